"""begin_decode() and finish_decode(): the rows of a decoding batch, before and after a step.

Both work in place on fixed buffers, wait for nothing and read nothing of the host, so that a step
between them can be captured in a CUDA graph and repeated without a word from the host.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from tilewise.ops import checks, dispatch

__all__ = ["begin_decode", "finish_decode"]


def begin_decode(
    position: Tensor,
    active: Tensor,
    fresh: Tensor,
    table: Tensor,
    place: Tensor,
    *,
    block_size: int,
    ring: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seqlens_k: Tensor,
    backend: str | None = None,
) -> None:
    """Write where the next token of each row goes, and how many keys it then has.

    A row that is not active gets position 0, slot -1 and no keys. A fresh block, one that begins
    with this token, is put into the table at the column of the token.

    Args:
        position: (B,) int64 of the next token.
        active: (B,) int64, 1 for rows that run, else 0.
        fresh: (B,) int32, block or -1; all -1 afterwards.
        table: (B, max_blocks) int32 cache block ids.
        place: (1,) int64, moved on by one, modulo `ring`: where `finish_decode` stores.
        block_size: tokens per cache block.
        ring: places of results.
        positions, slot_mapping: (B,) int64, written.
        seqlens_k: (B,) int32, written.
        backend: "triton" or "reference"; None is by the device.
    """
    _module(position, backend).begin(
        position,
        active,
        fresh,
        table,
        place,
        block_size=block_size,
        ring=ring,
        positions=positions,
        slot_mapping=slot_mapping,
        seqlens_k=seqlens_k,
    )


def finish_decode(
    drawn: Tensor,
    is_finite: Tensor,
    token: Tensor,
    position: Tensor,
    counter: Tensor,
    active: Tensor,
    place: Tensor,
    results: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Store the drawn tokens as the last ones of active rows, and move these on by one.

    Args:
        drawn: (B,) int64.
        is_finite: (B,) bool or int32, whether the row's logits were finite.
        token, position, counter: (B,) int64, changed where a row is active.
        active: (B,) int64.
        place: (1,) int64, see `begin_decode`.
        results: (ring, at least B, 2) int64; token and is_finite of all rows, written at `place`.
        backend: "triton" or "reference"; None is by the device.
    """
    _module(token, backend).finish(
        drawn, is_finite, token, position, counter, active, place, results
    )


def _module(rows: Tensor, backend: str | None) -> ModuleType:
    if backend not in (None, "triton", "reference"):
        raise ValueError(f"backend must be triton, reference or None, got {backend!r}")
    checks.check_dims("position", rows, "(B)")
    if backend is None:
        backend = "triton" if rows.is_cuda else "reference"
    return dispatch.kernel_module("decode_rows", backend)
