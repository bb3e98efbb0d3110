"""The backward pass by mma.sync against float64: in the emulator anywhere, and on a GPU."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    assert_right,
    everyday,
    make_problem,
)
from tests.kernels.gluon import test_attention_bwd, test_attention_fwd, test_mma
from tests.kernels.gluon.mutations import MMA_BACKWARD
from tests.kernels.gluon.problem import IDEMPOTENT
from tests.kernels.planned import tensors_of
from tilewise.kernels import device
from tilewise.kernels.gluon.mma import plan
from tilewise.kernels.gluon.mma.tiles import BwdTile, choice_bwd, tile_config_bwd
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import GRADIENT_TENSORS
from tilewise.kernels.plan import Call as KernelCall
from tilewise.kernels.spec import AttentionSpec
from tools.gluon_emulator import EmulationError, Program, emulated

D64, D128 = (64, 64), (128, 128)
LENGTHS = ((70, 50), (1, 1), (0, 9), (33, 90))
CASES = {
    "plain": Call(128, 128, (1, 1), D64, 1, BRAIN),
    "causal": Call(130, 140, (2, 1), D64, 1, BRAIN, CAUSAL),
    "fewer_keys": Call(140, 50, (1, 1), D64, 1, HALF, CAUSAL),
    "one_query": Call(1, 150, (1, 1), D64, 1, BRAIN, CAUSAL),
    "one_key": Call(70, 1, (1, 1), D64, 1, BRAIN),
    "groups": Call(40, 70, (4, 2), D64, 2, BRAIN, CAUSAL),
    "d128": Call(70, 130, (1, 1), D128, 1, BRAIN, CAUSAL),
    "d256": Call(40, 70, (1, 1), (256, 256), 1, BRAIN, CAUSAL),
    "d512": Call(40, 70, (1, 1), (512, 512), 1, BRAIN, CAUSAL),
    "d320": Call(50, 40, (2, 1), (320, 264), 1, HALF),
    "latent": Call(40, 70, (1, 1), (192, 128), 1, BRAIN, CAUSAL),
    "padded": Call(70, 80, (1, 1), (40, 24), 1, HALF),
    "window": Call(150, 150, (1, 1), D64, 1, BRAIN, (30, 5)),
    "window_of_the_own_key": Call(70, 70, (1, 1), D64, 1, BRAIN, (0, 0)),
    "softcap": Call(60, 70, (2, 1), D64, 1, BRAIN, CAUSAL, softcap=5.0),
    "softcap_float16": Call(60, 70, (1, 1), D64, 1, HALF, softcap=5.0),
    "alibi": Call(60, 70, (2, 1), D64, 1, BRAIN, alibi="heads"),
    "negative_scale": Call(60, 70, (1, 1), D64, 1, BRAIN, CAUSAL, scale=-0.2),
    "sinks": Call(60, 70, (2, 1), D64, 1, BRAIN, CAUSAL, sinks=True),
    "bias": Call(60, 70, (2, 1), D64, 1, BRAIN, bias=(1, 2, 60, 70)),
    "dropout": Call(60, 70, (2, 1), D64, 2, BRAIN, dropout_p=0.3),
    "key_lengths": Call(60, 70, (1, 1), D64, 3, BRAIN, CAUSAL, seqlens_k=(0, 31, 70)),
    "packed": Call(heads=(2, 1), dims=D64, dtype=BRAIN, window=CAUSAL, lengths=LENGTHS),
    "packed_window": Call(heads=(1, 1), dims=D64, dtype=BRAIN, window=(9, 3), lengths=LENGTHS),
    "mask": Call(150, 200, (1, 1), D64, 1, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "mask_ruled": Call(
        150, 150, (2, 1), D64, 1, BRAIN, CAUSAL, mask=(1, 2), mask_tile=(128, 128), sinks=True
    ),
    "every_feature": Call(
        70, 80, (2, 1), (40, 24), 2, HALF, (20, 3), softcap=5.0, alibi="sequences", sinks=True,
        seqlens_k=(80, 33), bias=(1, 2, 70, 80), dropout_p=0.2,
    ),
    "every_feature_packed": Call(
        heads=(2, 1), dims=D64, dtype=BRAIN, lengths=LENGTHS, window=(20, 3), softcap=5.0,
        alibi="heads", sinks=True, dropout_p=0.2,
    ),
}  # fmt: skip
BIASED = {
    "bias_copied": Call(150, 136, (2, 1), D128, 2, BRAIN, bias=(2, 150, 136)),
    "bias_copied_causal": Call(130, 176, (2, 1), D64, 1, HALF, CAUSAL, bias=(1, 2, 130, 176)),
    "bias_copied_and_all": Call(
        70, 136, (2, 1), D128, 2, BRAIN, (30, 9), bias=(2, 2, 70, 136), alibi="heads",
        softcap=5.0, seqlens_k=(136, 45), sinks=True,
    ),
}  # fmt: skip
CASES |= BIASED
_QUICK = ("plain", "causal", "groups", "padded", "window", "dropout", "packed", "mask_ruled")
_EVERYDAY = [pytest.param(n, marks=[] if n in _QUICK else pytest.mark.slow) for n in CASES]
ON_GPU = {
    name: call
    for name, call in (
        test_attention_fwd.CASES | test_attention_bwd.CASES | test_mma.WIDE | BIASED
    ).items()
    if call.mask is None or call.mask_tile == (128, 128)
}


def differentiated(problem: Problem) -> dict[str, torch.Tensor]:
    """Run both passes where the problem's tensors are."""
    p = problem
    assert plan.why_not_fwd(p.spec._replace(device_type="cuda")) is None
    assert plan.why_not_bwd(p.spec) is None
    tensors = tensors_of(p.q, p.k, p.v, **p.tensors)
    maker = Maker(KernelCall.of(p.spec, tensors))
    results = plan.add_fwd(maker, p.spec, maker.tensors)
    o, lse = maker.finish(results, dict).run(*tensors)[:2]
    given = (p.do, p.dlse, o, lse, *tensors)
    maker = Maker(KernelCall.of(p.spec, given), GRADIENT_TENSORS)
    do, dlse, o_given, lse_given = maker.inputs[:4]
    assert do is not None
    assert o_given is not None
    assert lse_given is not None
    gradients = plan.add_bwd(maker, p.spec, do, dlse, o_given, lse_given, maker.tensors)
    names = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
    found = zip(names, (o, lse, *maker.finish(gradients, dict).run(*given)), strict=True)
    return {name: x for name, x in found if x is not None}


def emulate(
    call: Call,
    arch: int,
    *,
    seed: int = 0,
    deterministic: bool = False,
    program: Program | None = None,
) -> tuple[Problem, dict[str, torch.Tensor]]:
    """Run both passes in the emulator, as on a device of this compute capability."""
    torch.manual_seed(0)
    problem = make_problem(call, "cpu")
    problem.spec = problem.spec._replace(deterministic=deterministic)
    with (
        mock.patch.object(device, "arch_of", return_value=arch),
        mock.patch.object(device, "sm_count_of", return_value=4),
        emulated(seed, program=program or Program(), resident=4, idempotent=IDEMPOTENT),
    ):
        return problem, differentiated(problem)


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("name", _EVERYDAY)
def test_gradients_match_float64(name: str, arch: int) -> None:
    assert_right(*emulate(CASES[name], arch))


@pytest.mark.parametrize("name", ["plain", "causal", "groups", "d128", "d256"])
def test_an_ordered_gradient_has_the_bits_of_any_schedule(name: str) -> None:
    problem, first = emulate(CASES[name], 89, deterministic=True)
    assert_right(problem, first)
    _, second = emulate(CASES[name], 89, seed=1, deterministic=True)
    assert torch.equal(first["dq"], second["dq"])


# name -> (call, compute capability, deterministic); see tiles.py for stages and tiles.
MISTAKEN: dict[str, tuple[Call, int, bool]] = {
    "two_stages": (Call(100, 140, (2, 1), D64, 1, BRAIN, CAUSAL), 80, False),
    "one_stage": (Call(130, 70, (1, 1), D128, 1, BRAIN), 89, False),
    "padded": (Call(40, 50, (1, 1), (40, 24), 1, HALF), 80, False),
    "ordered": (Call(130, 260, (1, 1), D64, 1, BRAIN), 89, True),
    "dropped": (Call(60, 140, (1, 1), D64, 1, BRAIN, dropout_p=0.4), 80, False),
    "unseen": (Call(60, 140, (1, 1), D64, 2, BRAIN, seqlens_k=(5, 140)), 80, False),
    "biased": (CASES["bias_copied"], 89, False),
}


@functools.cache
def mistaken(name: str) -> tuple[Problem, dict[str, torch.Tensor]]:
    call, arch, is_ordered = MISTAKEN[name]
    return emulate(call, arch, deterministic=is_ordered)


@pytest.mark.parametrize("name", MISTAKEN)
def test_calls_of_mistakes_are_right_without_them(name: str) -> None:
    assert_right(*mistaken(name))


QUICK = {
    name for name, mutation in MMA_BACKWARD.items() if mutation.call in ("two_stages", "ordered")
}


@pytest.mark.parametrize("name", everyday(MMA_BACKWARD, QUICK))
def test_a_mistake_is_seen(name: str) -> None:
    mutation = MMA_BACKWARD[name]
    _, truth = mistaken(mutation.call)
    call, arch, is_ordered = MISTAKEN[mutation.call]
    program, seen = mutation.program(), False
    for seed in range(3):
        try:
            _, found = emulate(call, arch, seed=seed, deterministic=is_ordered, program=program)
        except EmulationError:
            seen = True
        else:
            seen = seen or not all(
                torch.allclose(found[key].float(), value.float(), 1e-2, 1e-2, equal_nan=True)
                for key, value in truth.items()
            )
        if seen:
            break
    assert seen


def test_a_call_without_queries_or_keys_has_gradients_of_zero() -> None:
    for call in (Call(0, 30, (1, 1), D64, 1, BRAIN), Call(30, 0, (1, 1), D64, 1, BRAIN)):
        _, found = emulate(call, 80)
        assert all(not found[name].any() for name in ("dq", "dk", "dv"))


def test_what_has_no_order_or_other_tiles_is_refused() -> None:
    spec = make_problem(CASES["window"], "cpu").spec
    assert plan.why_not_bwd(spec) is None
    full = spec._replace(window_right=-1, deterministic=True)
    assert "order" in str(plan.why_not_bwd(full))
    wide = spec._replace(head_dim=128, v_head_dim=128, deterministic=True)
    assert plan.why_not_bwd(wide) is None
    assert "(128, 128)" in str(plan.why_not_bwd(spec._replace(mask_tile=(128, 64))))


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_tiles_fit_the_shared_memory_of_a_device(arch: int, width: int) -> None:
    spec = make_problem(Call(64, 64, (1, 1), (64, 64), 1, BRAIN), "cpu").spec
    spec = spec._replace(head_dim=width, v_head_dim=width)
    tile = tile_config_bwd(spec, arch)
    assert shared_bytes(spec, tile) <= (163 if arch == 80 else 99) << 10


def shared_bytes(spec: AttentionSpec, tile: BwdTile) -> int:
    """Return the bytes that the kernel's buffers take."""
    variant, _ = choice_bwd(spec, tile)
    keys = tile.keys * (variant.d + variant.dv)
    queries = tile.stages * tile.queries * (variant.d + variant.dv)
    tiles = (2 + tile.stages * tile.has_room) * tile.keys * tile.queries  # p, ds and the bias
    return 2 * (keys + queries + tiles) + 8 * tile.stages * tile.queries


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_gradients_match_float64_on_a_gpu(name: str) -> None:
    problem = make_problem(ON_GPU[name], "cuda")
    assert_right(problem, differentiated(problem))
