"""Scripts that set their own process's environment for ranks they start are run in this one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_of_before() -> Iterator[None]:
    """Put the environment back after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
