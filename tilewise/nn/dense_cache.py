"""Attention of a dense batch computed as an engine does, over a cache that exists for one call.

On a GPU `ops.attention` and a batch-invariant engine's paged attention are different kernels, whose
sums have different orders. A model that promises the engine's bits writes the keys and values of
its batch to blocks of an engine's usual size and attends over those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.nn.context import AttentionContext

__all__ = ["BLOCK_SIZE", "dense_context", "packed_rope"]

BLOCK_SIZE = 16
"""The engine's default. Tiles do not follow from it unless blocks are smaller than a tile's row."""


def dense_context(batch: int, length: int, device: torch.device) -> AttentionContext:
    """Return the batch-invariant context of a dense batch's rows: sequence b has the b-th ceil(S /
    16) blocks.

    Args:
        batch: B, the number of sequences.
        length: S, the tokens of each sequence; at least 1.
        device: the device of the tensors.

    Returns:
        A context of B S rows over a cache of B ceil(S / 16) blocks.
    """
    blocks = -(-length // BLOCK_SIZE)
    table = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
    rows = torch.arange(length, device=device)
    slots = torch.arange(batch, device=device)[:, None] * (blocks * BLOCK_SIZE) + rows
    return AttentionContext(
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * length,
        max_seqlen_q=length,
        seqlens_k=torch.full((batch,), length, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=slots.flatten(),
        batch_invariant=True,
    )


def packed_rope(rope: tuple[Tensor, Tensor] | None, batch: int) -> tuple[Tensor, Tensor] | None:
    """Expand cos and sin of a dense batch, (S, R / 2) or (B, S, R / 2), to (B S, R / 2); None stays
    None."""
    if rope is None:
        return None
    cos, sin = (x if x.dim() == 3 else x.expand(batch, *x.shape) for x in rope)
    return cos.flatten(0, 1), sin.flatten(0, 1)
