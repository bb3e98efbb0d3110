"""Hopper's kernel over latents of 8 bits against float64: in the emulator, and on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.test_mla import BRAIN, HALF, WIDTHS, is_noticed, launch, run_emulated
from tests.kernels.quantised_cache import quantised
from tests.kernels.triton.test_mla import Case, Inputs, make_inputs
from tilewise.reference import mla as oracle
from tilewise.reference.mla import dequantise_latents
from tilewise.testing import accumulator_scales, assert_within_budget

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
RANK = WIDTHS[0]
ROPE_SIZE = 20  # rotated keys are not normalised


@dataclass(frozen=True)
class Bytes:
    """A case, whose cache is quantised to `dtype`."""

    case: Case
    dtype: torch.dtype


CASES = {
    "one_sequence": Bytes(Case("", (1,), (150,), 3, WIDTHS, 64, BRAIN), E4M3),
    "small_blocks_and_lengths_of_one_and_none": Bytes(
        Case("", (1, 1, 1), (1, 0, 85), 2, WIDTHS, 16, BRAIN), INT8
    ),
    "drafts_in_half_blocks": Bytes(
        Case("", (2, 0, 3), (69, 5, 64), 5, WIDTHS, 32, HALF, padding=2), E4M3
    ),
    "wide_blocks_and_32_rows": Bytes(Case("", (1, 1), (300, 129), 20, WIDTHS, 128, BRAIN), INT8),
    "64_rows": Bytes(Case("", (1,), (165,), 40, WIDTHS, 16, BRAIN), E4M3),
    "two_tiles_of_rows": Bytes(Case("", (2, 1), (90, 70), 40, WIDTHS, 64, BRAIN), INT8),
    "more_items_than_shares": Bytes(
        Case("", (1,) * 5, (300, 64, 65, 400, 0), 3, WIDTHS, 64, BRAIN), E4M3
    ),
    "a_run_longer_than_its_keys": Bytes(Case("", (5, 1), (3, 200), 3, WIDTHS, 64, BRAIN), INT8),
}
QUICK = {"one_sequence", "small_blocks_and_lengths_of_one_and_none"}


def make_bytes(given: Bytes, device: str, scale: float = 1.0) -> Inputs:
    """Return inputs whose latents are `scale` times as large."""
    inputs = make_inputs(given.case, "cpu")
    latent, k_rope = inputs.cache.float().unsqueeze(2).split(WIDTHS, -1)
    parts = [quantised(part, given.dtype) for part in (latent * scale, k_rope * ROPE_SIZE)]
    bits = torch.cat([part.view(torch.int8) for part, _ in parts], -1)
    tensors = inputs.tensors | {"latent_scale": torch.cat([s for _, s in parts], -1)}
    return Inputs(
        replace(inputs.spec, cache_dtype=given.dtype, device_type=device),
        inputs.q_latent.to(device),
        (inputs.q_rope / ROPE_SIZE).to(device),
        bits.view(given.dtype).squeeze(2).to(device),
        {name: tensor.to(device) for name, tensor in tensors.items()},
    )


def check(inputs: Inputs, o: Tensor, lse: Tensor) -> None:
    def expected(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        queries = (inputs.q_latent.to(dtype), inputs.q_rope.to(dtype))
        scale = inputs.spec.softmax_scale
        result = oracle.mla_decode(
            *queries, inputs.cache, softmax_scale=scale, return_lse=True, **inputs.tensors
        )
        assert isinstance(result, tuple)
        return result

    truth, eager = expected(torch.float64), expected(inputs.spec.dtype)
    scale = inputs.tensors["latent_scale"]
    rows = dequantise_latents(inputs.cache, scale, RANK, torch.float64).nan_to_num()
    q = torch.cat([inputs.q_latent, inputs.q_rope], -1).double()
    scales = accumulator_scales(q, rows, rows[..., :RANK], q, inputs.spec.softmax_scale)
    for name, *results in zip(("o", "lse"), (o, lse), truth, eager, strict=True):
        assert_within_budget(*results, name=name, scale=scales.get(name, 0.0))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in CASES],
)
def test_agrees_with_float64_in_the_emulator(name: str) -> None:
    inputs = make_bytes(CASES[name], "cpu")
    check(inputs, *run_emulated(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_latents_of_any_size_keep_the_precision_of_float16(size: float) -> None:
    inputs = make_bytes(CASES["one_sequence"], "cpu", size)
    inputs.q_latent /= size
    check(inputs, *run_emulated(inputs))


@pytest.mark.slow
def test_queries_of_any_size_and_strided_scales() -> None:
    inputs = make_bytes(CASES["one_sequence"], "cpu")
    inputs.q_latent *= 2.0**20  # more than float16 holds
    inputs.q_rope *= 2.0**20
    inputs.spec = replace(inputs.spec, softmax_scale=inputs.spec.softmax_scale * 2.0**-20)
    scale = inputs.tensors["latent_scale"]
    wide = torch.full((*scale.shape[:2], 3), math.nan)
    wide[..., :2] = scale
    inputs.tensors["latent_scale"] = wide[..., :2]
    check(inputs, *run_emulated(inputs))


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1e5, pytest.param(1e12, marks=pytest.mark.slow)])
def test_logits_may_have_any_size(size: float, place: str) -> None:
    """Each row is the latent of its largest key, which is far above all others."""
    inputs = make_bytes(CASES["small_blocks_and_lengths_of_one_and_none"], place, size)
    inputs.q_latent *= size
    o, lse = run_emulated(inputs) if place == "cpu" else launch(inputs)
    right, right_lse = oracle.mla_decode(
        inputs.q_latent.double(), inputs.q_rope.double(), inputs.cache, return_lse=True,
        softmax_scale=inputs.spec.softmax_scale, **inputs.tensors,
    )  # fmt: skip
    torch.testing.assert_close(o.double() / size, right / size, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-3, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64_on_a_gpu(name: str) -> None:
    inputs = make_bytes(CASES[name], "cuda")
    check(inputs, *launch(inputs))


@pytest.mark.gpu
@pytest.mark.large  # up to 36 GiB: the oracle has all keys of every head
@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize(("heads", "block"), [(16, 64), (16, 16), (32, 32), (128, 64)])
@pytest.mark.parametrize(
    ("runs", "lengths"),
    [((1,), (20_001,)), ((1,) * 8, (4096, 1, 0, 777, 9000, 64, 63, 65)), ((2, 8), (900, 5000))],
)
def test_agrees_with_float64_at_serving_size(runs, lengths, heads, block, dtype) -> None:
    given = Bytes(Case("", runs, lengths, heads, WIDTHS, block, BRAIN), dtype)
    inputs = make_bytes(given, "cuda")
    check(inputs, *launch(inputs))


def _without(place: str, line: str) -> Mutation:
    return Mutation(f"latent/bytes/{place}", line, "pass", "")


MUTATIONS = {
    "a_stage_is_filled_before_it_is_empty": _without(
        "loader:load_items",
        "mbarrier.wait(shared.empty.index(stage), (at // variant.stages & 1) ^ 1)",
    ),
    "scales_are_not_waited_for": Mutation(
        "latent/bytes/kernel:_allocate", "barriers(STAGES, 2), ", "barriers(STAGES, 1), ", ""
    ),
    "p_is_not_fenced": _without("scores:_score_tile", "fence_async_shared()"),
    "q_is_not_fenced": _without("scores:_bring_queries", "fence_async_shared()"),
    "p_overwrites_one_in_use": _without(
        "scores:_score_tile", "mbarrier.wait(shared.p_empty.index(slot), (at // 2 & 1) ^ 1)"
    ),
    "p_is_read_before_it_is_there": _without(
        "values:_add_tile", "mbarrier.wait(shared.p_full.index(slot), at // 2 & 1)"
    ),
    "slots_behind_the_end_are_read": Mutation(
        "latent/bytes/loader:_load_tile", " - shift_of(key, item.length, BOX)", "", ""
    ),
    "keys_behind_the_end_are_seen": Mutation(
        "latent/bytes/scores:_hide",
        "gl.where(within >= shift, first + within - shift, item.length)",
        "first + within - shift", "",
    ),
    "a_larger_scale_does_not_shrink_what_was_summed": Mutation(
        "latent/bytes/scores:_score_tile", "alpha * (unit * inverse)", "alpha", ""
    ),
    "channels_come_in_another_order": Mutation(
        "latent/bytes/operands:output_order", "(4, 1, 3, 0, 2)", "(4, 1, 3, 2, 0)", ""
    ),
}  # fmt: skip
SOON = {"p_is_not_fenced", "slots_behind_the_end_are_read"}
CALL = Bytes(Case("", (2, 1, 1), (420, 10, 150), 2, WIDTHS, 64, BRAIN), E4M3)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in SOON else [pytest.mark.slow]) for x in MUTATIONS],
)
def test_every_mistake_is_seen(name: str) -> None:
    inputs = make_bytes(CALL, "cpu")
    program = MUTATIONS[name].program()
    assert is_noticed(lambda seed: check(inputs, *run_emulated(inputs, seed, program, num_sms=1)))
