"""What tests of a GPU have in common that let nothing wait for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise where torch waits for the device; the mode ends with the block whatever happens."""
    try:
        with warnings.catch_warnings():  # torch says once that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
