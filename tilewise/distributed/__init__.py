"""Several devices: the shards of a model, attention and recurrences over sequences that ranks
share, and weights from the ranks of a trainer."""

from __future__ import annotations

import importlib
from typing import Any

from tilewise.distributed.choose import context_parallel_attention, explain
from tilewise.distributed.gather import gather_attention
from tilewise.distributed.layout import choose_layout, shard_sequence
from tilewise.distributed.recurrence import (
    context_parallel_causal_conv1d,
    context_parallel_gated_delta,
)
from tilewise.distributed.ring import ring_attention
from tilewise.distributed.ulysses import ulysses_attention
from tilewise.distributed.weights import receive_weights, send_weights

__all__ = [
    "choose_layout",
    "context_parallel_attention",
    "context_parallel_causal_conv1d",
    "context_parallel_gated_delta",
    "explain",
    "gather_attention",
    "receive_weights",
    "ring_attention",
    "send_weights",
    "serve_app",
    "shard_sequence",
    "ulysses_attention",
]


def __getattr__(name: str) -> Any:
    """Import and return `serve_app` on demand, as it needs Ray; AttributeError for any other name.

    Raises ImportError if Ray is not installed.
    """
    if name != "serve_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("tilewise.cluster.application").serve_app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise ImportError("serve_app needs Ray: pip install 'tilewise[ray]'") from None
