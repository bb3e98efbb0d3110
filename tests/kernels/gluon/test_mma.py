"""The forward pass by mma.sync and cp.async against float64: in the emulator, and on any GPU.

A GPU of another kind than the kernels' own compiles them all the same (Hopper has mma.sync and
cp.async), so what they compute can be judged there; which calls take them is decided by the
device's capability, which the tests of dispatch pretend.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    everyday,
    make_problem,
)
from tests.kernels.gluon import test_attention_fwd as hopper
from tests.kernels.gluon.mutations import MMA_FORWARD
from tests.kernels.planned import mma_results, refusal
from tilewise import masks
from tilewise.kernels import device
from tilewise.kernels.gluon.attention import plan as attention
from tilewise.kernels.gluon.mma import plan as mma
from tilewise.kernels.gluon.mma import tiles
from tilewise.kernels.gluon.mma.forward import Tile
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tools.gluon_emulator import EmulationError, Program, emulated

LARGE, SMALL = 80, 89  # compute capabilities with 163 and with 99 KiB of shared memory
SHARED_MEMORY = {LARGE: 163 << 10, SMALL: 99 << 10}
D40, D64, D96, D128, D256, D512 = ((width, width) for width in (40, 64, 96, 128, 256, 512))
CASES = {
    "whole_tiles": Call(128, 128, (1, 1), D64, 1, BRAIN),
    "no_tile_whole": Call(150, 77, (1, 1), D64, 2, HALF),
    "d128": Call(100, 140, (1, 1), D128, 1, BRAIN),
    "d256": Call(70, 100, (1, 1), D256, 1, BRAIN, CAUSAL),
    "causal": Call(180, 180, (1, 1), D64, 1, BRAIN, CAUSAL),
    "causal_d128": Call(140, 170, (1, 1), D128, 1, HALF, CAUSAL),
    "causal_fewer_keys": Call(200, 70, (1, 1), D64, 1, BRAIN, CAUSAL),
    "one_query": Call(1, 130, (1, 1), D64, 1, BRAIN, CAUSAL),
    "one_key": Call(90, 1, (1, 1), D64, 1, BRAIN),
    "grouped": Call(70, 90, (4, 2), D64, 1, BRAIN, CAUSAL),
    "window": Call(150, 300, (1, 1), D64, 1, BRAIN, (100, 0)),
    "window_both": Call(180, 200, (1, 1), D64, 1, BRAIN, (40, 17)),
    "window_left": Call(130, 200, (1, 1), D64, 1, BRAIN, (60, -1)),
    "window_right": Call(140, 150, (1, 1), D128, 1, BRAIN, (-1, 20)),
    "window_of_the_own_key": Call(130, 130, (1, 1), D64, 1, BRAIN, (0, 0)),
    "lengths": Call(80, 140, (1, 1), D64, 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 140)),
    "packed": Call(
        heads=(2, 1), dims=D64, dtype=BRAIN, lengths=((130, 130), (0, 50), (7, 0), (40, 150))
    ),
    "packed_causal": Call(
        heads=(1, 1), dims=D128, dtype=BRAIN, window=CAUSAL, lengths=((130, 100), (64, 90))
    ),
    "packed_window": Call(
        heads=(1, 1), dims=D64, dtype=HALF, window=(50, 9), lengths=((130, 100), (64, 190)),
        sinks=True,
    ),
    "softcap": Call(70, 140, (1, 1), D64, 1, BRAIN, CAUSAL, softcap=3.0),
    "softcap_float16": Call(70, 100, (1, 1), D64, 1, HALF, softcap=20.0),
    "alibi": Call(70, 150, (2, 1), D64, 1, BRAIN, CAUSAL, alibi="heads"),
    "alibi_both_sides": Call(90, 70, (1, 1), D64, 2, HALF, alibi="sequences"),
    "bias": Call(70, 130, (2, 1), D64, 1, BRAIN, bias=(2, 70, 130)),
    "bias_copied": Call(150, 136, (2, 1), D128, 2, BRAIN, bias=(2, 150, 136)),
    "bias_copied_causal": Call(130, 176, (2, 1), D64, 1, HALF, CAUSAL, bias=(1, 2, 130, 176)),
    "bias_copied_and_all": Call(
        100, 136, (2, 1), D128, 2, BRAIN, (30, 9), bias=(2, 2, 100, 136), alibi="heads",
        softcap=5.0, seqlens_k=(136, 45), sinks=True,
    ),
    "bias_of_keys": Call(70, 131, (1, 1), D64, 2, HALF, CAUSAL, bias=(2, 1, 1, 131)),
    "sinks": Call(150, 60, (2, 1), D64, 1, BRAIN, CAUSAL, sinks=True),
    "dropout": Call(70, 130, (2, 1), D64, 1, BRAIN, CAUSAL, dropout_p=0.3),
    "mask": Call(200, 300, (1, 1), D64, 1, BRAIN, mask=(1, 1), mask_tile=(128, 64)),
    "mask_of_wide_tiles": Call(150, 200, (1, 1), D128, 1, HALF, mask=(1, 1), mask_tile=(128, 128)),
    "mask_and_window": Call(
        200, 300, (1, 1), D64, 1, HALF, (90, 30), mask=(1, 1), mask_tile=(128, 128)
    ),
    "mask_packed": Call(
        heads=(1, 1), dims=D64, dtype=BRAIN, window=CAUSAL, lengths=((130, 100), (64, 190)),
        mask=(2, 1), mask_tile=(128, 128),
    ),
    "d40": Call(90, 130, (1, 1), D40, 1, HALF),
    "d72_values_200": Call(70, 80, (1, 1), (72, 200), 1, BRAIN),
    "d96": Call(100, 130, (1, 1), D96, 1, BRAIN, CAUSAL),
    "latent": Call(70, 90, (1, 1), (192, 128), 1, BRAIN, CAUSAL),
    "scale_below_zero": Call(70, 90, (1, 1), D64, 1, BRAIN, scale=-0.2),
    "every_feature": Call(
        150, 170, (2, 1), (48, 24), 2, BRAIN, (60, 5), softcap=8.0, alibi="heads", sinks=True,
        seqlens_k=(160, 45), bias=(2, 1, 170), dropout_p=0.2,
    ),
    "every_feature_masked": Call(
        150, 170, (2, 1), D64, 2, HALF, (60, 5), softcap=8.0, alibi="sequences", sinks=True,
        seqlens_k=(160, 45), bias=(1, 2, 150, 170), dropout_p=0.2, mask=(1, 2),
        mask_tile=(128, 64),
    ),
}  # fmt: skip
WIDE = {
    "d512": Call(70, 100, (1, 1), D512, 1, BRAIN, CAUSAL),
    "d512_full": Call(130, 90, (4, 2), D512, 1, HALF),
    "d512_alibi": Call(70, 90, (2, 1), D512, 1, BRAIN, CAUSAL, alibi="heads"),
    "d512_lengths": Call(40, 70, (1, 1), D512, 3, BRAIN, (30, 5), seqlens_k=(0, 33, 70)),
    "d512_packed": Call(
        heads=(2, 1), dims=D512, dtype=BRAIN, window=CAUSAL, lengths=((70, 60), (0, 50), (40, 90))
    ),
    "d320": Call(80, 70, (2, 1), (320, 264), 1, HALF, softcap=5.0, sinks=True),
}
CASES |= WIDE
# Each feature once, packed, and a width of each row of the tables.
EVERYDAY = {
    "no_tile_whole", "causal", "causal_d128", "grouped", "window_both", "lengths", "packed",
    "softcap", "alibi", "bias", "bias_copied", "bias_copied_and_all", "sinks",
    "dropout", "mask", "d40", "latent", "d512",
}  # fmt: skip


def tile_of(problem: Problem, arch: int) -> Tile:
    return mma.tile_config_fwd(problem.spec, arch, bias_copied=is_copied(problem))


def is_copied(problem: Problem) -> bool:
    """Whether cp.async can bring the bias of a problem."""
    bias, spec = problem.tensors.get("bias"), problem.spec
    if bias is None or bias.dtype.itemsize != 2 or max(spec.head_dim, spec.v_head_dim) > 128:
        return False
    return bias.shape[-2] > 1 and bias.shape[-1] % 8 == 0


def computed(
    problem: Problem, tile: Tile | None = None, *, seed: int = 0, program: Program | None = None
) -> dict[str, Tensor]:
    """Return o and lse, and the row maxima if wanted, from the emulator unless on a GPU."""
    p = problem
    names = ("o", "lse", "max")
    if p.q.is_cuda:
        results = mma_results(p.q, p.k, p.v, p.spec, tile, **p.tensors)
    else:
        with emulated(seed, program=program or Program()):
            results = mma_results(p.q, p.k, p.v, p.spec, tile, **p.tensors)
    return dict(zip(names, results, strict=False))


def assert_right(problem: Problem, results: dict[str, Tensor]) -> None:
    """Judge o and lse by the error budget."""
    hopper.assert_right(problem, (results["o"], results["lse"]))


def distinct_tiles(problem: Problem) -> Iterator[Tile]:
    """Yield every way in which the tables cut calls of these widths, whatever their kind."""
    spec = problem.spec
    d, dv = spec.head_dim, spec.v_head_dim
    dealt = mma.tile_config_fwd(spec, LARGE).dynamic
    kinds = {kind for _, kind in tiles._LARGE.keys() | tiles._SMALL.keys()}
    found = {
        tiles._tile_of(d, dv, kind, dealt, is_large)
        for kind in kinds for is_large in (True, False)
    }  # fmt: skip
    has_words = spec.dropout_p > 0 or spec.mask_tile is not None  # of at least 64 keys
    most_keys = 128 if spec.mask_tile is None else spec.mask_tile[1]  # a tile has one entry
    for tile in sorted(found):
        if tile.keys > most_keys:
            continue
        if tile.bias_stages > 0 and not is_copied(problem):
            continue
        if not has_words or tile.keys >= 64:
            yield tile


def shared_memory(tile: Tile) -> int:
    """Return the bytes that a CTA takes."""
    bias = tile.bias_stages * tile.keys * tile.rows
    p = tile.rows * tile.keys if tile.across > 1 else 0
    return 2 * (tile.rows * tile.d + tile.stages * tile.keys * (tile.d + tile.dv) + bias + p)


@pytest.mark.parametrize("name", everyday(CASES, EVERYDAY))
def test_results_match_float64(name: str) -> None:
    problem = make_problem(CASES[name], "cpu")
    arch = (LARGE, SMALL)[zlib.crc32(name.encode()) & 1]
    assert_right(problem, computed(problem, tile_of(problem, arch)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [LARGE, SMALL])
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_gives_the_same_bits(name: str, arch: int) -> None:
    problem = make_problem(CASES[name], "cpu")
    first, second = (computed(problem, tile_of(problem, arch), seed=seed) for seed in (1, 2))
    assert_right(problem, first)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


ROWS = [
    pytest.param(
        width, kind, arch,
        marks=[] if (width, kind) in ((64, "plain"), (128, "long")) and arch == LARGE
        else pytest.mark.slow,
    )
    for arch, table in ((LARGE, tiles._LARGE), (SMALL, tiles._SMALL)) for width, kind in table
]  # fmt: skip


@pytest.mark.parametrize("is_dealt", [False, True])
@pytest.mark.parametrize(("width", "kind", "arch"), ROWS)
def test_every_row_of_the_tables_matches_float64(
    width: int, kind: str, arch: int, is_dealt: bool
) -> None:
    """Whatever call may choose it."""
    window = CAUSAL if is_dealt else (-1, -1)
    call = Call(150, 170, (1, 1), (width, width), 1, BRAIN, window)
    if kind == "copied":
        call = replace(call, seqlen_k=176, bias=(150, 176))
    problem = make_problem(call, "cpu")
    tile = tiles._tile_of(width, width, kind, is_dealt, arch == LARGE)
    assert_right(problem, computed(problem, tile))


def test_rows_of_the_tables_fit_shared_memory() -> None:
    for arch, table in ((LARGE, tiles._LARGE), (SMALL, tiles._SMALL)):
        for width, kind in table:
            tile = tiles._tile_of(width, width, kind, True, arch == LARGE)
            assert shared_memory(tile) <= SHARED_MEMORY[arch], (arch, width, kind)


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_row_maxima_are_the_largest_logits(name: str) -> None:
    problem = make_problem(CASES[name], "cpu")
    problem.spec = problem.spec._replace(needs_max=True)
    results = computed(problem, tile_of(problem, LARGE))
    assert_right(problem, results)
    exact = largest_logits(problem)
    torch.testing.assert_close(results["max"].double(), exact, rtol=1e-2, atol=1e-2)


def largest_logits(problem: Problem) -> Tensor:
    """Return the largest visible logit of each row in float64, -inf where there is none."""
    p, spec = problem, problem.spec
    edges_q = [0, p.q.shape[-3]] if p.cu_seqlens_q is None else p.cu_seqlens_q.tolist()
    edges_k = [0, p.k.shape[-3]] if p.cu_seqlens_k is None else p.cu_seqlens_k.tolist()
    q, k = (x.reshape(-1, *x.shape[-2:]).double() for x in (p.q, p.k))
    found = torch.full((spec.num_q_heads, q.shape[0]), -torch.inf, dtype=torch.float64)
    for i in range(len(edges_q) - 1):
        rows, keys = slice(*edges_q[i : i + 2]), slice(*edges_k[i : i + 2])
        each = k[keys].repeat_interleave(spec.group_size, 1)
        s = torch.einsum("qhd,khd->hqk", q[rows], each) * spec.softmax_scale
        if spec.window_right == 0:
            queries, columns = s.shape[1:]
            seen = torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries)
            s = s.masked_fill(~seen, -torch.inf)
        if s.shape[2]:
            found[:, rows] = s.amax(2)
    return found.reshape(1, *found.shape) if p.cu_seqlens_q is None else found


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 40), (40, 0), (0, 0)])
def test_empty_inputs(seqlen_q: int, seqlen_k: int) -> None:
    problem = make_problem(Call(seqlen_q, seqlen_k, (2, 2), D64, 1, BRAIN, CAUSAL), "cpu")
    problem.spec = problem.spec._replace(needs_max=True)
    results = computed(problem, tile_of(problem, LARGE))
    assert not results["o"].any()
    assert torch.all(results["lse"] == -torch.inf)
    assert torch.all(results["max"] == -torch.inf)


def test_keys_that_nobody_sees_may_hold_nan() -> None:
    lengths = make_problem(CASES["lengths"], "cpu")
    for row, length in enumerate(lengths.call.seqlens_k or ()):
        lengths.k[row, length:], lengths.v[row, length:] = torch.nan, torch.inf
    window = make_problem(Call(70, 330, (1, 1), D64, 1, BRAIN, (20, 0)), "cpu")
    window.k[:, :239], window.v[:, :239] = torch.nan, torch.nan
    mask = make_problem(CASES["mask"], "cpu")
    mask.k[:, 150], mask.v[:, 150] = torch.nan, torch.nan  # hidden from every row
    for problem in (lengths, window, mask):
        results = computed(problem, tile_of(problem, LARGE))
        problem.k, problem.v = (x.nan_to_num(0.0, 0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)


MISTAKEN = {
    "two_stages": (Call(190, 260, (1, 1), D64, 1, BRAIN, CAUSAL), {"q_in_registers": False}),
    "one_stage": (Call(150, 170, (1, 1), D64, 1, BRAIN), {"stages": 1}),
    "in_registers": (Call(150, 170, (1, 1), D64, 1, BRAIN), {}),
    "padded": (Call(130, 70, (1, 1), D40, 1, BRAIN), {}),
    "masked": (CASES["mask_and_window"], {}),
    "biased": (CASES["bias_copied_causal"], {}),
    "wide": (CASES["d512"], {}),
}


@functools.cache
def mistaken(name: str) -> tuple[Problem, Tile, dict[str, Tensor]]:
    torch.manual_seed(0)
    call, changes = MISTAKEN[name]
    problem = make_problem(call, "cpu")
    if name == "masked":  # rows of tiles that see nothing
        problem = replace(problem, **_hidden(problem))
    tile = tile_of(problem, LARGE)._replace(**changes)
    return problem, tile, computed(problem, tile)


def _hidden(problem: Problem) -> dict[str, object]:
    assert problem.visible is not None
    visible = problem.visible.clone()
    visible[:, :, :128] = False
    mask = masks.dense(visible, tile=problem.call.mask_tile)
    return {"visible": visible, "mask": MaskTensors(*mask.tensors())}


@pytest.mark.parametrize("name", MISTAKEN)
def test_calls_of_mistakes_are_right_without_them(name: str) -> None:
    problem, tile, results = mistaken(name)
    assert_right(problem, results)
    for seed in (1, 2):
        again = computed(problem, tile, seed=seed)
        assert all(torch.equal(again[key], value) for key, value in results.items())


QUICK = {
    "keys_multiplied_before_they_are_there", "keys_copied_over_those_that_are_multiplied",
    "both_parts_have_the_first_ones_queries", "keys_past_the_end_are_read",
}  # fmt: skip


@pytest.mark.parametrize("name", everyday(MMA_FORWARD, QUICK))
def test_a_mistake_is_seen(name: str) -> None:
    mutation = MMA_FORWARD[name]
    problem, tile, truth = mistaken(mutation.call)
    program, seen = mutation.program(), False
    for seed in range(3):
        try:
            results = computed(problem, tile, seed=seed, program=program)
        except EmulationError:
            seen = True
        else:
            seen = seen or not all(
                torch.allclose(results[key].float(), value.float(), 1e-2, 1e-2, equal_nan=True)
                for key, value in truth.items()
            )
    assert seen


ON_GPU = hopper.CASES | WIDE


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_results_match_float64_on_a_gpu(name: str) -> None:
    """By each row of both tables that fits the card, whichever a call of this size would choose."""
    problem = make_problem(ON_GPU[name], "cuda")
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for tile in distinct_tiles(problem):
        if shared_memory(tile) <= room:
            assert_right(problem, computed(problem, tile))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["more_tiles_than_ctas", "packed_causal", "window", "mask"])
def test_a_thousand_runs_on_a_gpu_are_bitwise_equal(name: str) -> None:
    problem = make_problem(hopper.CASES[name], "cuda")
    tile = tile_of(problem, LARGE)
    first = computed(problem, tile)
    for _ in range(1000):
        again = computed(problem, tile)
        assert all(torch.equal(again[key], value) for key, value in first.items())


SPEC = AttentionSpec("cuda", BRAIN, 1, 512, 512, 4, 2, 64, 64)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Let a GPU of some compute capability be there."""

    def have(arch: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device, "arch_of", lambda _: arch)
        monkeypatch.setattr(device, "sm_count_of", lambda _: 108)

    return have


@pytest.mark.parametrize(
    ("arch", "takes"), [(80, True), (86, True), (89, True), (120, True), (90, False), (100, False)]
)
def test_devices_without_warpgroup_products_take_it(capability, arch: int, takes: bool) -> None:
    capability(arch)
    assert mma.is_served(arch) == takes
    assert attention._is_mma(SPEC) == takes
    reason = refusal(attention, SPEC)
    assert (reason is None) == (takes or arch == 90)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"head_dim": 520, "v_head_dim": 520}, "head_dim must be a multiple of 8 from 8 to 512"),
        ({"head_dim": 60}, "head_dim must be a multiple of 8"),
        ({"v_head_dim": 4}, "v_head_dim must be"),
        ({"mask_tile": (64, 64)}, "mask tiles must have 128 queries"),
        ({"softcap": 5000.0}, "softcap must be at most"),
    ],
)
def test_refusals_name_their_reason(capability, changes: dict[str, object], reason: str) -> None:
    capability(80)
    assert refusal(attention, SPEC) is None
    assert reason in (refusal(attention, SPEC._replace(**changes)) or "")


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_of_a_plan_fit_the_device(capability, arch: int, width: int) -> None:
    capability(arch)
    spec = SPEC._replace(head_dim=width, v_head_dim=width)
    for changes in ({}, {"window_right": 0}, {"dropout_p": 0.1}, {"max_seqlen_q": 8192}):
        tile = mma.tile_config_fwd(spec._replace(**changes), arch)
        assert shared_memory(tile) <= SHARED_MEMORY[LARGE if arch == 80 else SMALL]
        assert tile.rows == 16 * tile.warps * tile.parts
