"""begin_decode(), start_decode(), finish_decode(), draw_decode(): the rows of a decode step.

All work in place on fixed buffers and exchange nothing with the host, so that a step between them
can be captured in a CUDA graph and replayed without the host.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from tilewise.ops import checks, dispatch
from tilewise.ops.sampling import sample_tokens
from tilewise.ops.step import launched

__all__ = ["begin_decode", "draw_decode", "finish_decode", "start_decode"]


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
    """Write the position and slot of each row's next token, and the number of its keys.

    A row that is not active gets position 0, slot -1 and no keys. A fresh block, one that begins
    with this token, is put into the table at the column of the token.

    Args:
        position: (B,) int64, the position of the next token.
        active: (B,) int64, 1 for rows that run, 0 for others.
        fresh: (B,) int32, a fresh block or -1; all -1 afterwards.
        table: (B, max_blocks) int32 cache block ids.
        place: (1,) int64, the index at which `finish_decode` stores; incremented, modulo `ring`.
        block_size: the tokens of a cache block.
        ring: the number of places for results.
        positions, slot_mapping: (B,) int64, written.
        seqlens_k: (B,) int32, written.
        backend: "triton" or "reference"; None chooses by the device.
    """
    launched(
        _module(position, backend).begin,
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


def start_decode(
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
    token: Tensor,
    embedding: Tensor,
    angles: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Begin a step as `begin_decode` does, and look up embeddings and angles in the same launch.

    Args:
        token: (B,) int64, the last token of each row, below V.
        embedding: (V, E), contiguous.
        angles: (positions, R) float32, contiguous; see `RotaryEmbedding.table`.
        position, active, fresh, table, place, block_size, ring, positions, slot_mapping, seqlens_k,
            backend: as for `begin_decode`, which changes or writes the same ones.

    Returns:
        embedding[token] (B, E) and angles[positions] (B, R), new contiguous tensors.
    """
    x, found = launched(
        _module(position, backend).start,
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
        token=token,
        embedding=embedding,
        angles=angles,
    )
    return x, found


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
    """Store the sampled tokens as the last ones of active rows, and advance these rows by one.

    Args:
        drawn: (B,) int64, the sampled tokens.
        is_finite: (B,) bool or int32, whether the row's logits were finite.
        token, position, counter: (B,) int64, changed where a row is active.
        active: (B,) int64, 1 for rows that run, 0 for others.
        place: (1,) int64, the index in `results` at which this step is stored; not changed.
        results: (ring, at least B, 2) int64; token and is_finite of all rows, written at `place`.
        backend: "triton" or "reference"; None chooses by the device.
    """
    finish = _module(token, backend).finish
    launched(finish, drawn, is_finite, token, position, counter, active, place, results)


def draw_decode(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    token: Tensor,
    position: Tensor,
    counter: Tensor,
    active: Tensor,
    place: Tensor,
    results: Tensor,
    backend: str | None = None,
) -> None:
    """Sample a token of each row of logits, and do what `finish_decode` does in the same launch.

    Args:
        logits, temperature, top_k, top_p, min_p, seeds: as for `ops.sample_tokens`, whose counters
            are the old values of `counter`.
        token, position, counter, active, place, results, backend: as for `finish_decode`.
    """
    module = _module(token, backend)
    rows = (token, position, counter, active, place, results)
    if hasattr(module, "draw"):
        checks.check_dims("logits", logits, "(R, V)")
        moved = module.Moved(*rows)
        launched(module.draw, logits, temperature, top_k, top_p, min_p, seeds, moved)
        return
    drawn, is_finite = sample_tokens(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        counters=counter if temperature is not None else None,
        backend=backend,
    )
    launched(module.finish, drawn, is_finite, *rows)


def _module(rows: Tensor, backend: str | None) -> ModuleType:
    if backend not in (None, "triton", "reference"):
        raise ValueError(f"backend must be triton, reference or None, got {backend!r}")
    checks.check_dims("position", rows, "(B)")
    if backend is None:
        backend = "triton" if rows.is_cuda else "reference"
    return dispatch.kernel_module("decode_rows", backend)
