"""Hopper's kernel over 8-bit caches: what it takes, and that it agrees with float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.planned import paged
from tests.kernels.triton.test_paged import _spec
from tilewise import paged_attention, plan_paged_attention, write_kv_cache
from tilewise.kernels import device, early
from tilewise.kernels.gluon.device.byte_operands import LINE
from tilewise.kernels.gluon.paged import plan as gluon
from tilewise.kernels.gluon.paged.plan import why_not_decode
from tilewise.kernels.host.descriptors import token_descriptor
from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.tiles import paged as tiles
from tilewise.reference import four_bits
from tilewise.reference import paged as reference
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import Program, emulated

BYTES = _spec(cache_dtype=torch.int8)


@dataclass(frozen=True)
class Case:
    """A batch of runs of new tokens over a cache of 8 bits."""

    name: str
    lengths: tuple[int, ...]
    runs: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 16
    head_scales: bool = False
    one_scale: bool = False  # for all heads
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("decode", (4000, 33, 1700, 1), (1, 1, 1, 1)),
    Case("one_long_sequence", (100_001,), (1,)),
    Case("nothing_to_see", (0, 5, 64), (1, 1, 1)),
    Case("drafts", (900, 65, 64), (2, 1, 2), (16, 4)),
    Case("no_groups_wide_blocks", (3000, 257), (1, 1), (8, 8), block_size=256),
    Case("sixteen_rows", (3000, 70), (1, 1), (64, 4)),
    Case("narrow_heads_small_blocks", (3000, 70), (1, 1), head_dim=64, block_size=8),
    Case("a_scale_a_head", (3000, 70), (1, 1), head_scales=True),
    Case("one_scale", (3000, 70), (1, 1), head_scales=True, one_scale=True),
    Case("window", (3000, 70, 900), (1, 1, 1), options={"window": 500}),
    Case("sinks", (3000, 70), (1, 1), options={"sinks": 3.0}),
    Case("padding_rows", (3000, 70, 9), (1, 1, 0)),
]


def _inputs(
    case: Case, dtype: torch.dtype, where: str = "cuda"
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, the caches of 8 bits and of what they stand for; NaN wherever nobody owns a slot."""
    generator = torch.Generator(where).manual_seed(0)
    counts = [-(-length // case.block_size) for length in case.lengths]
    slots = (sum(counts) + 2, case.block_size, case.heads[1])
    tables = torch.randperm(slots[0], generator=generator, device=where).int().split(
        [*counts, 2]
    )  # fmt: skip
    table = torch.full((len(counts), max(counts) + 1), -7, dtype=torch.int32, device=where)
    owned = torch.zeros(slots[:2], dtype=torch.bool, device=where)
    for row, (blocks, length) in enumerate(zip(tables[:-1], case.lengths, strict=True)):
        table[row, : len(blocks)] = blocks
        at = torch.arange(length, device=where)
        owned[blocks.long()[at // case.block_size], at % case.block_size] = True
    caches, scales, exact = [], [], []
    for _ in range(2):
        x = torch.randn(*slots, case.head_dim, generator=generator, device=where)
        if dtype == torch.uint8:
            cache, scale = four_bits.pack(x)
            exact.append(four_bits.unpack(cache, scale, torch.float64) * owned[..., None, None])
            cache[~owned], scale[~owned] = 0xE7, torch.nan
            caches.append(cache)
            scales.append(scale)
            continue
        cache = torch.zeros_like(x, dtype=dtype)
        shape = slots[2:] if case.head_scales else slots
        scale = torch.rand(shape, generator=generator, device=where) * 0.1 + 0.001
        if case.one_scale:
            scale = scale[:1].clone().expand(shape)
        divided = x / scale.unsqueeze(-1)
        limit = 127.0 if dtype == torch.int8 else 448.0
        cache.copy_(divided.clamp(-limit, limit))
        exact.append((cache.double() * scale.double().unsqueeze(-1)) * owned[..., None, None])
        cache.view(torch.int8)[~owned] = 127  # NaN as e4m3
        if not case.head_scales:
            scale[~owned] = torch.nan
        caches.append(cache)
        scales.append(scale)
    q = torch.randn(
        sum(case.runs) + 2, case.heads[0], case.head_dim, generator=generator, device=where
    )
    options = {
        "block_table": table,
        "seqlens_k": torch.tensor(case.lengths, dtype=torch.int32, device=where),
        "cu_seqlens_q": torch.tensor([0, *case.runs], device=where).cumsum(0).int(),
        "max_seqlen_q": max(case.runs),
        **case.options,
    }
    if "sinks" in options:
        options["sinks"] = torch.full((case.heads[0],), options["sinks"], device=where)
    return [q.bfloat16(), *caches, *scales, *exact], options


def _reference(
    dtype: torch.dtype, q: Tensor, exact: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    tensors = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in options.items()
        if name != "max_seqlen_q"
    }
    result = reference.paged_attention(
        q.to(dtype), *(cache.to(dtype) for cache in exact), return_lse=True, **tensors
    )
    assert isinstance(result, tuple)
    return result


WIDE = Case("wide_heads", (3000, 70), (1, 1), (8, 4), head_dim=256)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*(c for c in CASES if not c.head_scales), WIDE], ids=lambda case: case.name
)
def test_four_bits_agree_with_float64_with_and_without_a_plan(case: Case) -> None:
    test_agrees_with_float64_with_and_without_a_plan(case, torch.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_float64_with_and_without_a_plan(case: Case, dtype: torch.dtype) -> None:
    (q, k, v, k_scale, v_scale, *exact), options = _inputs(case, dtype)
    given = options | {"k_scale": k_scale, "v_scale": v_scale, "backend": "gluon"}
    truth, truth_lse = _reference(torch.float64, q, exact, options)
    eager, eager_lse = _reference(q.dtype, q, exact, options)
    for plan in (None, plan_paged_attention(q, k, v, **given)):
        o, lse = paged_attention(q, k, v, plan=plan, return_lse=True, **given)
        assert_within_budget(o, truth, eager, name="o")
        assert_within_budget(lse, truth_lse, eager_lse, name="lse")
        again = paged_attention(q, k, v, plan=plan, **given)
        assert torch.equal(o, again)


# Many sequences, so that a CTA that stays takes several; two of them have splits.
MANY = Case("many", (*range(1, 1400, 10), 9000, 6000), (1,) * 142)
STAYING = (
    MANY,
    Case("many_windows", MANY.lengths, MANY.runs, options={"window": 300}),
    Case("many_narrow_heads", MANY.lengths, MANY.runs, head_dim=64, block_size=8),
    Case("many_padding_rows", (*MANY.lengths, 50, 2000), (*MANY.runs, 0, 0)),
)
SEVERAL = [*STAYING, *(case for case in CASES if case.name in ("decode", "drafts", "padding_rows"))]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.large] if c in STAYING else [], id=c.name)
        for c in SEVERAL
    ],
)
def test_a_cta_takes_several_pairs(case: Case) -> None:
    (q, k, v, k_scale, v_scale, *exact), options = _inputs(case, torch.float8_e4m3fn)
    given = options | {"k_scale": k_scale, "v_scale": v_scale, "backend": "gluon"}
    truth, truth_lse = _reference(torch.float64, q, exact, options)
    eager, eager_lse = _reference(q.dtype, q, exact, options)
    plan = plan_paged_attention(q, k, v, **given)
    with early.launching():
        o, lse = paged_attention(q, k, v, plan=plan, return_lse=True, **given)
        results = [paged_attention(q, k, v, plan=plan, **given) for _ in range(20)]
    assert_within_budget(o, truth, eager, name="o")
    assert_within_budget(lse, truth_lse, eager_lse, name="lse")
    assert all(torch.equal(o, again) for again in results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_single_tokens_beside_prompts_agree_with_float64(
    dtype: torch.dtype,
) -> None:
    case = Case("mixed", (3000, 700, 33, 1, 90, 2000), (1, 300, 1, 1, 90, 1))
    (q, k, v, k_scale, v_scale, *exact), options = _inputs(case, dtype)
    given = options | {"k_scale": k_scale, "v_scale": v_scale}
    truth, truth_lse = _reference(torch.float64, q, exact, options)
    eager, eager_lse = _reference(q.dtype, q, exact, options)
    for backend in ("gluon", None):
        o, lse = paged_attention(q, k, v, return_lse=True, **given, backend=backend)
        assert_within_budget(o, truth, eager, name="o")
        assert_within_budget(lse, truth_lse, eager_lse, name="lse")


@pytest.mark.gpu
def test_a_captured_graph_follows_the_plan() -> None:
    case = Case("serving", (3000, 17, 900), (1, 1, 1))
    (q, k, v, k_scale, v_scale, *_), options = _inputs(case, torch.float8_e4m3fn)
    write_kv_cache(
        torch.randn(k.shape[0] * 16, 8, 128, device="cuda"),
        torch.randn(k.shape[0] * 16, 8, 128, device="cuda"),
        k, v, torch.arange(k.shape[0] * 16, device="cuda"), k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    given = options | {"k_scale": k_scale, "v_scale": v_scale, "backend": "gluon"}
    plan = plan_paged_attention(q, k, v, **given)
    paged_attention(q, k, v, plan=plan, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = paged_attention(q, k, v, plan=plan, **given)
    for lengths in ((3000, 17, 900), (5, 3, 0), (2999, 16, 1)):
        options["seqlens_k"].copy_(torch.tensor(lengths))
        plan.update(options["seqlens_k"], options["cu_seqlens_q"])
        graph.replay()
        want = paged_attention(q, k, v, **(given | {"backend": "triton"}))
        torch.testing.assert_close(o, want, rtol=2e-2, atol=2e-2)


EMULATED = {
    "splits": Case("", (430, 33, 130), (1, 1, 1), (8, 4), head_dim=64),
    "drafts_and_a_window": Case(
        "", (200, 65, 64), (2, 1, 2), (8, 4), head_dim=64, block_size=8, options={"window": 70}
    ),
    "a_scale_a_head": Case("", (290, 70), (1, 1), (4, 4), head_scales=True),
    "one_scale": Case("", (290, 70), (1, 1), (4, 4), head_scales=True, one_scale=True),
    "nothing_to_see": Case("", (0, 5, 64), (1, 1, 1), (8, 4), options={"sinks": 3.0}),
}


def run_emulated(
    case: Case,
    dtype: torch.dtype,
    seed: int = 0,
    program: Program | None = None,
    *,
    has_plan: bool = False,
) -> None:
    """Judge one call in the emulator: two stages, and a split for every four tiles of keys.

    There are two multiprocessors. With a plan each has one CTA, which stays and takes more pairs.
    """
    (q, k, v, k_scale, v_scale, *exact), options = _inputs(case, dtype, "cpu")
    window = options.get("window")
    spec = replace(
        BYTES, cache_dtype=dtype, num_seqs=len(case.lengths), num_tokens=q.shape[0],
        max_seqlen_q=max(case.runs), num_q_heads=case.heads[0], num_kv_heads=case.heads[1],
        head_dim=case.head_dim, v_head_dim=case.head_dim, block_size=case.block_size,
        max_blocks=options["block_table"].shape[1], softmax_scale=case.head_dim**-0.5,
        window_left=-1 if window is None else window - 1, has_sinks="sinks" in options,
    )  # fmt: skip
    splits = tiles.SplitPlan(target_pairs=0, split_tiles=4, num_pairs=12, fixed=True, alone=False)
    counters = -(-len(case.lengths) * case.heads[1] // 4 // 8)
    records = torch.zeros(12 + counters, 8, dtype=torch.int32)
    with (
        # Shared memory of the emulator holds numbers, not bytes: e4m3 has no two zeros or NaNs.
        mock.patch.object(gluon, "_lines_descriptor", _int8_descriptor),
        mock.patch.object(device, "sm_count_of", return_value=2),
        mock.patch.object(gluon, "SEATS", 1 if has_plan else 1000),
        emulated(seed, program=program or Program(), resident=2),
    ):
        if has_plan:
            gluon._fill(
                launch_now,
                records,
                spec,
                options["seqlens_k"],
                options["cu_seqlens_q"],
                splits,
            )
        o, lse = paged(
            gluon, q, k, v, spec, **{name: options[name] for name in _TENSORS}, k_scale=k_scale,
            v_scale=v_scale, sinks=options.get("sinks"), tuned=(2, splits),
            plan=records if has_plan else None,
        )  # fmt: skip
    assert not records[12:].any(), "counters are as they were"
    truth, truth_lse = _reference(torch.float64, q, exact, options)
    eager, eager_lse = _reference(q.dtype, q, exact, options)
    assert_within_budget(o, truth, eager, name="o")
    assert_within_budget(lse, truth_lse, eager_lse, name="lse")


_TENSORS = ("block_table", "seqlens_k", "cu_seqlens_q")


def _int8_descriptor(cache: Tensor, rows: int) -> object:
    return token_descriptor(cache.view(torch.int8), rows, LINE.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", EMULATED)
def test_agrees_with_float64_in_the_emulator(name: str, dtype: torch.dtype) -> None:
    run_emulated(EMULATED[name], dtype)


NIBBLES = {
    **{name: EMULATED[name] for name in ("splits", "drafts_and_a_window", "nothing_to_see")},
    "sixteen_rows": Case("", (200, 70), (1, 1), (64, 4)),
    "wide_heads": Case("", (290, 70), (1, 1), (8, 4), head_dim=256),
}


@pytest.mark.parametrize("name", NIBBLES)
def test_four_bits_agree_with_float64_in_the_emulator(name: str) -> None:
    run_emulated(NIBBLES[name], torch.uint8)


def test_four_bits_with_a_plan_agree_with_float64_in_the_emulator() -> None:
    run_emulated(NIBBLES["splits"], torch.uint8, has_plan=True)


@pytest.mark.parametrize("name", EMULATED)
def test_with_a_plan_agrees_with_float64_in_the_emulator(name: str) -> None:
    run_emulated(EMULATED[name], torch.int8, has_plan=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_dtype": torch.bfloat16}, "dtype of the cache must be int8, float8_e4m3fn or"),
        ({"dtype": torch.float32}, "dtype of q must be bfloat16 or float16"),
        ({"head_dim": 256, "v_head_dim": 256}, "both head dims must be one of 64, 128, got 256"),
        ({"v_head_dim": 64}, "both head dims must be one of 64, 128, got 128 and 64"),
        (
            {"max_seqlen_q": 5, "num_tokens": 5 * BYTES.num_seqs},
            "max_seqlen_q * Hq / Hk must be 1 ... 16, got 20",
        ),
        ({"block_size": 1}, "block_size must be a power of two from 8 on, got 1"),
        ({"num_kv_heads": 2, "num_q_heads": 8}, "Hk must be a multiple of 4, got 2"),
        ({"softcap": 3.0}, "softcap and alibi_slopes are not in this kernel"),
        ({"has_tree": True}, "tree_mask and shared are not in this kernel"),
        ({"batch_invariant": True}, "batch_invariant is not in this kernel"),
    ],
)
def test_refusals_say_why(changes: dict[str, Any], reason: str) -> None:
    assert why_not_decode(BYTES) is None
    assert reason in (why_not_decode(replace(BYTES, **changes)) or "")
