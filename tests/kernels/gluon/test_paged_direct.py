"""The kernel over 8-bit caches where mma.sync is the product: in the emulator, and on any GPU.

A GPU of another kind compiles it all the same; which calls take it is decided by the device's
capability, which the tests of dispatch pretend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.test_paged import _TENSORS, BYTES, CASES, MANY, Case, _inputs, _reference
from tests.kernels.planned import paged
from tilewise.kernels import device
from tilewise.kernels.gluon.paged import plan as gluon
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import PagedTensors
from tilewise.kernels.tiles import paged as tiles
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import emulated

BYTE_TYPES = (torch.int8, torch.float8_e4m3fn)
EMULATED = {
    "splits": Case("", (430, 33, 130), (1, 1, 1), (8, 4), head_dim=64),
    "drafts_and_a_window": Case(
        "", (200, 65, 64), (2, 1, 2), (8, 4), head_dim=64, options={"window": 70}
    ),
    "a_scale_a_head": Case("", (290, 70), (1, 1), (4, 4), head_scales=True),
    "one_scale": Case("", (290, 70), (1, 1), (4, 4), head_scales=True, one_scale=True),
    "nothing_to_see": Case("", (0, 5, 64), (1, 1, 1), (8, 4), options={"sinks": 3.0}),
    "sixteen_rows_in_wide_blocks": Case("", (200, 70), (1, 1), (64, 4), block_size=48),
    "padding_rows": Case("", (100, 70, 9), (1, 1, 0), (8, 8), head_dim=64),
}


def judge(
    case: Case,
    dtype: torch.dtype,
    splits: tiles.SplitPlan | None,
    where: str = "cuda",
    *,
    has_plan: bool,
) -> None:
    """Run one call as a device without faster products than mma.sync would, and judge its o and lse
    by float64. splits: those of a plan, in place of the table's."""
    (q, k, v, k_scale, v_scale, *exact), options = _inputs(case, dtype, where)
    window = options.get("window")
    spec = replace(
        BYTES, cache_dtype=dtype, num_seqs=len(case.lengths), num_tokens=q.shape[0],
        max_seqlen_q=max(case.runs), num_q_heads=case.heads[0], num_kv_heads=case.heads[1],
        head_dim=case.head_dim, v_head_dim=case.head_dim, block_size=case.block_size,
        max_blocks=options["block_table"].shape[1], softmax_scale=case.head_dim**-0.5,
        window_left=-1 if window is None else window - 1, has_sinks="sinks" in options,
    )  # fmt: skip
    chosen = tiles.direct_decode_plan if splits is None else lambda *_: splits
    with (
        mock.patch.object(gluon, "_is_direct", return_value=True),
        mock.patch.object(tiles, "direct_decode_plan", chosen),
    ):
        records = None
        if has_plan:
            rows = gluon.plan_pairs(spec, q.device)
            records = torch.zeros(rows, 8, dtype=torch.int32, device=where)
            gluon.fill_plan(records, spec, options["seqlens_k"], options["cu_seqlens_q"])
        o, lse = paged(
            gluon, q, k, v, spec, **{name: options[name] for name in _TENSORS}, k_scale=k_scale,
            v_scale=v_scale, sinks=options.get("sinks"), plan=records,
        )  # fmt: skip
        again, _ = paged(
            gluon, q, k, v, spec, **{name: options[name] for name in _TENSORS}, k_scale=k_scale,
            v_scale=v_scale, sinks=options.get("sinks"), plan=records,
        )  # fmt: skip
    assert torch.equal(o, again)
    truth, truth_lse = _reference(torch.float64, q, exact, options)
    eager, eager_lse = _reference(q.dtype, q, exact, options)
    assert_within_budget(o, truth, eager, name="o")
    assert_within_budget(lse, truth_lse, eager_lse, name="lse")


SPLITS = tiles.SplitPlan(target_pairs=0, split_tiles=4, num_pairs=14, fixed=True, alone=False)
ALONE = tiles.SplitPlan(target_pairs=1, split_tiles=40, num_pairs=3, fixed=True, alone=True)


@pytest.mark.parametrize("dtype", BYTE_TYPES, ids=str)
@pytest.mark.parametrize("name", EMULATED)
def test_agrees_with_float64_in_the_emulator(name: str, dtype: torch.dtype) -> None:
    with emulated(0, resident=2):
        judge(EMULATED[name], dtype, SPLITS, "cpu", has_plan=False)


@pytest.mark.parametrize("dtype", BYTE_TYPES, ids=str)
def test_with_a_plan_agrees_with_float64_in_the_emulator(dtype: torch.dtype) -> None:
    with emulated(0, resident=2):
        judge(EMULATED["splits"], dtype, SPLITS, "cpu", has_plan=True)


def test_single_tokens_beside_a_prompt_agree_with_float64_in_the_emulator() -> None:
    with emulated(0, resident=2):
        case = Case("", (100, 70, 33), (1, 30, 1), (8, 4), head_dim=64)
        judge(case, torch.float8_e4m3fn, SPLITS, "cpu", has_plan=True)


def test_sequences_without_splits_agree_with_float64_in_the_emulator() -> None:
    with emulated(0, resident=2):
        judge(EMULATED["splits"], torch.int8, ALONE, "cpu", has_plan=False)


ON_A_GPU = [
    *(case for case in CASES if case.block_size % 16 == 0),
    Case("narrow_heads", (3000, 70), (1, 1), head_dim=64),
    MANY,
    Case("mixed", (3000, 700, 33, 1, 90, 2000), (1, 300, 1, 1, 90, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("has_plan", [False, True], ids=["", "planned"])
@pytest.mark.parametrize("dtype", BYTE_TYPES, ids=str)
@pytest.mark.parametrize("case", ON_A_GPU, ids=lambda case: case.name)
def test_agrees_with_float64(case: Case, dtype: torch.dtype, has_plan: bool) -> None:
    judge(case, dtype, None, has_plan=has_plan)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Let a GPU of some compute capability be there."""

    def have(arch: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device, "arch_of", lambda _: arch)
        monkeypatch.setattr(device, "sm_count_of", lambda _: 108)

    return have


def _call(changes: dict[str, Any], **tensors: torch.Tensor) -> Call:
    """Return a call of BYTES with `changes` to its spec and other `tensors`, without data."""
    spec = replace(BYTES, **changes)
    slots = (40, spec.block_size, spec.num_kv_heads)
    q = torch.empty(spec.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
    cache = torch.empty(*slots, spec.head_dim, dtype=spec.cache_dtype)
    table = torch.empty(spec.num_seqs, spec.max_blocks, dtype=torch.int32)
    starts = torch.empty(spec.num_seqs + 1, dtype=torch.int32)
    scale = torch.empty(slots)
    given = PagedTensors(q, cache, cache, table, starts[1:], starts, k_scale=scale, v_scale=scale)
    return Call.of(spec, given._replace(**tensors))


@pytest.mark.parametrize(
    ("arch", "takes"), [(75, False), (80, True), (86, True), (89, True), (120, True), (100, False)]
)
def test_devices_without_warpgroup_products_take_it(capability, arch: int, takes: bool) -> None:
    capability(arch)
    assert (gluon.why_not_call(_call({})) is None) == takes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_dtype": torch.bfloat16}, "dtype of the cache must be int8 or float8_e4m3fn"),
        ({"cache_dtype": torch.uint8}, "dtype of the cache must be int8 or float8_e4m3fn"),
        ({"block_size": 8}, "block_size must be a multiple of 16, got 8"),
        ({"num_kv_heads": 2, "num_q_heads": 8}, "Hk must be a multiple of 4, got 2"),
        ({"softcap": 3.0}, "softcap and alibi_slopes are not in this kernel"),
    ],
)
def test_refusals_say_why(capability, changes: dict[str, Any], reason: str) -> None:
    capability(80)
    refused = gluon.plan_fwd(_call(changes))
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_caches_that_lanes_cannot_read_are_refused(capability) -> None:
    capability(80)
    shape = (40, BYTES.block_size, BYTES.num_kv_heads, BYTES.head_dim)
    whole = torch.empty(shape, dtype=torch.int8)
    for cache, reason in (
        (torch.empty(whole.numel() + 1, dtype=torch.int8)[1:].view(shape), "16-byte boundary"),
        (torch.empty(*shape[:3], 136, dtype=torch.int8)[..., :128], "multiples of 16, got"),
        (torch.empty(*shape, 2, dtype=torch.int8)[..., 0], "strides of 1 and"),
        (whole[:0], "must not be empty"),
    ):
        refused = gluon.plan_fwd(_call({}, v_cache=cache))
        assert isinstance(refused, Refusal)
        assert refused.reason.startswith("v_cache must")
        assert reason in refused.reason
    refused = gluon.plan_fwd(_call({}, block_table=torch.empty(16, 0, dtype=torch.int32)))
    assert isinstance(refused, Refusal)
    assert "block_table must not be empty" in refused.reason
