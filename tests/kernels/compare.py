"""One launch that compares a result with the first run's, keeps what differs and overwrites it.

what: counts runs whose results differ from the first run's, for `kernel_stress.Watch` on a GPU
grid: one program for each TILE elements of a result; `settle` is one program
one program: compares bits, or values within limits; the first differing run's tile is kept; poison
traffic: reads the result and the first one, writes poison: three times the result's bytes
numerics: bits are compared; where a limit is given, the difference in float32
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048


@triton.jit
def _compare(
    got_ptr, want_ptr, kept_ptr, limit_ptr, state_ptr, size,
    WORD: tl.constexpr, ROUNDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    got = tl.load(got_ptr + at, mask=inside, other=0.0)
    want = tl.load(want_ptr + at, mask=inside, other=0.0)
    differs = got.to(WORD, bitcast=True) != want.to(WORD, bitcast=True)
    if ROUNDED:
        limit = tl.load(limit_ptr + at, mask=inside, other=0.0)
        near = tl.abs(got.to(tl.float32) - want.to(tl.float32)) <= limit
        differs = differs & (near == 0)  # NaN is not near
    if tl.max(differs.to(tl.int32), axis=0) > 0:
        before = tl.load(state_ptr)
        tl.store(kept_ptr + at, got, mask=inside & (before == 0))
        tl.store(state_ptr + 1, 1)
    tl.store(got_ptr + at, tl.full([TILE], float("nan"), tl.float32), mask=inside)


@triton.jit
def _settle(state_ptr):
    differs = tl.load(state_ptr + 1)
    tl.store(state_ptr, tl.load(state_ptr) + differs)
    tl.store(state_ptr + 1, 0)


def compare(got: Tensor, want: Tensor, kept: Tensor, limit: Tensor | None, state: Tensor) -> None:
    """Note in state[1] whether got differs from want; overwrite got with NaN.

    Args:
        got, want, kept: flat, equal sizes, of one floating dtype of 2 or 4 bytes. kept is
            overwritten where got differs, while state[0] is zero.
        limit: float32, how far got may be from want; None compares bits.
        state: int64, (2,): runs that differed before this one, whether this one does.
    """
    words = {2: tl.int16, 4: tl.int32}
    if not got.is_floating_point() or got.element_size() not in words:
        raise TypeError(f"got must be floats of 2 or 4 bytes, got {got.dtype}")
    if got.numel():
        _compare[(triton.cdiv(got.numel(), TILE),)](
            got, want, kept, want if limit is None else limit, state, got.numel(),
            WORD=words[got.element_size()], ROUNDED=limit is not None, TILE=TILE,
        )  # fmt: skip


def settle(state: Tensor) -> None:
    """Count a run whose results have all been compared."""
    _settle[(1,)](state)
