"""More than one device: shards of a model, and attention over sequences that ranks share."""

from tilewise.distributed.choose import context_parallel_attention, explain
from tilewise.distributed.layout import shard_sequence
from tilewise.distributed.ring import ring_attention
from tilewise.distributed.ulysses import ulysses_attention

__all__ = [
    "context_parallel_attention",
    "explain",
    "ring_attention",
    "shard_sequence",
    "ulysses_attention",
]
