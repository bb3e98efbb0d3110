"""Block masks on the CPU: partial, full and empty tiles, alone and beside the other rules."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_oracle import assert_agree, by_kernel
from tilewise import masks, ops
from tilewise.kernels.cpu.attention.problem import TILE_M, TILE_N
from tilewise.kernels.cpu.visible import seeing_rows
from tilewise.testing import make_qkv

B, SQ, SK, D, DV = 2, 150, 290, 24, 16


@dataclass(frozen=True)
class Case:
    """A mask by its leading dims and tile, and what comes with it."""

    shared: tuple[int, int] = (1, 1)  # (Bm, Hm) of the mask, 1 or all
    heads: tuple[int, int] = (2, 2)
    tile: tuple[int, int] = (128, 128)
    options: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    packed: bool = False
    seed: int = 0


LENGTHS = torch.tensor([270, 133], dtype=torch.int32)
EDGES_Q, EDGES_K = (torch.tensor([0, *x], dtype=torch.int32) for x in ([150, 211], [200, 490]))
CASES = {
    "one mask for all": Case(),
    "a mask for each sequence": Case(shared=(2, 1), tile=(64, 64)),
    "a mask for each head": Case(shared=(1, 4), heads=(4, 4), tile=(64, 128)),
    "heads of a group apart": Case(shared=(2, 6), heads=(6, 2), tile=(128, 64)),
    "group across tile edges": Case(heads=(7, 1), tile=(64, 64)),
    "group above a tile, apart": Case(shared=(1, 80), heads=(80, 1), tile=(64, 64)),
    "causal": Case(shared=(1, 2), options={"causal": True}),
    "window": Case(tile=(64, 64), options={"window": (30, 50)}),
    "key lengths": Case(shared=(2, 1), options={"seqlens_k": LENGTHS, "causal": True}),
    "packed": Case(heads=(4, 2), packed=True, shared=(2, 4), tile=(64, 64)),
    "packed, causal": Case(packed=True, options={"causal": True}),
    "everything": Case(
        shared=(2, 6), heads=(6, 2), tile=(64, 128), tensors=("bias", "sinks"),
        options={"window": (200, 90), "softcap": 5.0, "seqlens_k": LENGTHS, "softmax_scale": 0.3},
    ),
}  # fmt: skip


def visible(shared: tuple[int, int], seed: int = 0) -> Tensor:
    """Random bits with full tiles, empty tiles, and rows that see nothing."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand((*shared, SQ, SK), generator=generator) < 0.3
    seen[..., :64, :128] = True
    seen[..., 64:, 128:256] = False
    seen[:, -1, 130:140] = False
    return seen


def draw(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    (hq, hk), lead_q, lead_k = case.heads, (B, SQ), (B, SK)
    lse_shape: tuple[int, ...] = (B, hq, SQ)
    if case.packed:
        lead_q, lead_k = (int(EDGES_Q[-1]),), (int(EDGES_K[-1]),)
        lse_shape = (hq, *lead_q)
    shapes = {"q": (*lead_q, hq, D), "k": (*lead_k, hk, D), "v": (*lead_k, hk, DV)}
    shapes |= {n: s for n, s in (("bias", (hq, SQ, SK)), ("sinks", (hq,))) if n in case.tensors}
    tensors = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    if "sinks" in tensors:
        tensors["sinks"] = tensors["sinks"].float()
    do = torch.randn((*lead_q, hq, DV), generator=generator).to(dtype)
    return tensors, do, torch.randn(lse_shape, generator=generator)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    + [("one mask for all", torch.float32), ("packed", torch.bfloat16)]
    + [("heads of a group apart", torch.bfloat16), ("everything", torch.bfloat16)],
)
def test_values_and_gradients_follow_the_mask(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    seen = visible(case.shared)
    options = {**case.options, "mask": masks.dense(seen, tile=case.tile)}
    if case.packed:
        options |= {"cu_seqlens_q": EDGES_Q, "cu_seqlens_k": EDGES_K,
                    "max_seqlen_q": SQ, "max_seqlen_k": SK}  # fmt: skip
    actual = assert_agree(*draw(case, dtype), options, {"mask": seen})
    if not case.tensors and not case.packed:
        blind = actual["lse"] == -math.inf
        assert bool(blind[:, -1, 130:140].all())
        assert bool((actual["o"].transpose(1, 2)[blind] == 0).all())
        assert bool((actual["dq"].transpose(1, 2)[blind] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_key_reaches_only_the_rows_that_see_it(
    dtype: torch.dtype, poison: float
) -> None:
    seen = visible((1, 1))
    tensors, do, dlse = draw(Case(), dtype)
    mask = masks.dense(seen)
    clean = by_kernel(tensors, do, dlse, mask=mask)
    dirty_keys = torch.tensor([3, 70, 140, 260, 289])
    poisoned = {name: tensor.clone() for name, tensor in tensors.items()}
    poisoned["k"][:, dirty_keys], poisoned["v"][:, dirty_keys] = poison, poison
    dirty = by_kernel(poisoned, do, dlse, mask=mask)
    reached = seen[0, 0][:, dirty_keys].any(-1)
    assert 0 < int(reached.sum()) < SQ
    for name in ("o", "dq"):
        torch.testing.assert_close(
            dirty[name][:, ~reached], clean[name][:, ~reached], rtol=2e-2, atol=1e-3
        )
        assert not bool(dirty[name][:, reached].isfinite().all(-1).any())


def test_bits_repeat_on_any_number_of_threads() -> None:
    case = Case(heads=(6, 2), shared=(1, 6))
    tensors, do, dlse = draw(case, torch.bfloat16)
    mask = masks.dense(visible(case.shared))
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            runs.append(by_kernel(tensors, do, dlse, mask=mask))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_empty_tiles_cost_nothing() -> None:
    length = 8192
    mask = masks.dense(torch.block_diag(*torch.ones(length // 128, 128, 128)).bool())
    assert mask.bits.shape[0] == 0
    q, k, v = (torch.randn(1, length, 1, 16, requires_grad=True) for _ in range(3))

    def seconds(**options: Any) -> float:
        best = math.inf
        for _ in range(3):
            start = time.thread_time()
            o = ops.attention(q, k, v, **options, backend="cpu")
            torch.autograd.grad(o.sum(), (q, k, v))
            best = min(best, time.thread_time() - start)
        return best

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert seconds(mask=mask) < seconds() / 4  # 64 of 4,096 tiles
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("q_len", "k_len"), [(150, 150), (70, 200), (200, 70), (1, 300)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (5, -1), (-1, 4), (130, 2), (1, 0), (3, 40)])
def test_rows_that_see_a_tile_of_keys_are_all_of_them_and_no_more(
    q_len: int, k_len: int, group: int, window: tuple[int, int]
) -> None:
    """The backward pass walks these rows of a tile; the first may be rounded down to a tile."""
    sizes = SimpleNamespace(window_left=window[0], window_right=window[1], group=group)
    query, key = torch.arange(q_len).unsqueeze(1), torch.arange(k_len)
    diagonal = query + k_len - q_len
    sees = torch.ones(q_len, k_len, dtype=torch.bool)
    if window[0] >= 0:
        sees &= key >= diagonal - window[0]
    if window[1] >= 0:
        sees &= key <= diagonal + window[1]
    for start in range(0, k_len, TILE_N):
        count = min(TILE_N, k_len - start)
        first, end = seeing_rows.py_func(sizes, q_len, k_len, start, count)
        rows = sees[:, start : start + count].any(1).nonzero()
        if rows.numel() == 0:
            continue
        assert first % TILE_M == 0
        assert rows.min() * group - TILE_M < first <= rows.min() * group
        assert end == (int(rows.max()) + 1) * group


def test_the_last_row_of_a_left_window_has_its_gradient() -> None:
    """Row TILE_N + left sees one key of the first tile and starts a tile of rows of its own."""
    left = (1 - TILE_N) % TILE_M
    length = TILE_N + left + 1
    leaves = make_qkv(1, length, length, 1, 1, 16, requires_grad=True)
    do = torch.zeros(1, length, 1, 16)
    do[0, TILE_N + left - 1] = 1.0
    grads = [
        torch.autograd.grad(ops.attention(*leaves, window=(left, 0), backend=name), leaves, do)
        for name in ("cpu", "reference")
    ]
    assert float(grads[1][1][0, TILE_N - 1].abs().max()) > 0
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
