"""The emulator of Gluon judges: right kernels pass, and each kind of mistake is seen.

Mistakes are made in the text of kernels: first of small ones, here, then of the product's own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.tools import small_kernels as small
from tilewise.kernels.host.descriptors import descriptor
from tools.gluon_emulator import (
    Deadlock,
    EmulationError,
    InFlight,
    NotEmulated,
    OutOfBounds,
    Program,
    Protocol,
    Race,
    Replay,
    emulated,
    recorded,
)

M, N, DEPTH = 128, 64, 256


def replaced(*changes: tuple[str, str]) -> Program:
    """Return the small kernels with pieces of their text replaced."""

    def change(text: str) -> str:
        for old, new in changes:
            assert text.count(old) == 1, f"{text.count(old)} times: {old}"
            text = text.replace(old, new)
        return text

    return Program({small.__name__: change})


def multiply(
    seed: int = 0, *, stages: int = 2, add: bool = False, program: Program | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what the kernel gives, the truth)."""
    torch.manual_seed(0)
    a, b = torch.randn(1, M, 1, DEPTH).bfloat16(), torch.randn(1, DEPTH, 1, N).bfloat16()
    o = torch.ones(1, M, 1, N) if add else torch.full((1, M, 1, N), torch.nan)
    truth = a[0, :, 0].double() @ b[0, :, 0].double() + add
    with emulated(seed, program=program or Program()):
        descriptors = descriptor(a, 64, 64), descriptor(b, 64, N), descriptor(o, 64, N)
        small.multiply[(M // 64,)](*descriptors, DEPTH, stages, add, num_warps=4)
    return o[0, :, 0].double(), truth


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("add", [False, True])
def test_a_right_kernel_is_right_in_every_schedule(stages: int, add: bool) -> None:
    results = []
    for seed in range(4):
        result, truth = multiply(seed, stages=stages, add=add)
        torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-4)
        results.append(result)
    assert all(torch.equal(result, results[0]) for result in results)


WAIT_FULL = "        mbarrier.wait(full.index(stage), (step // STAGES) & 1)\n"
WAIT_EMPTY = "        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)\n"
WAIT_SUM = "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"
RELEASE = "        mbarrier.arrive(empty.index(stage), count=1)\n"
MISTAKES = {
    "reads_before_the_copy_lands": (EmulationError, [(WAIT_FULL, "")]),
    "overwrites_what_is_multiplied": (EmulationError, [(WAIT_EMPTY, "")]),
    "releases_before_the_product_is_done": (
        Race,
        [(WAIT_SUM + RELEASE, RELEASE + WAIT_SUM)],
    ),
    "never_releases": (Deadlock, [(RELEASE, "")]),
    "waits_for_the_wrong_phase": (Deadlock, [(WAIT_EMPTY, WAIT_EMPTY.replace(" ^ 1", ""))]),
    "does_not_wait_for_a_sum": ((InFlight, Race), [(WAIT_SUM, "")]),
    "waits_for_all_but_one": ((InFlight, Race), [(WAIT_SUM, WAIT_SUM.replace("(0", "(1"))]),
    "expects_too_few_bytes": (
        EmulationError,
        [("a.block_type.nbytes + b.block_type.nbytes", "a.block_type.nbytes")],
    ),
    "expects_too_many_bytes": (
        Deadlock,
        [("a.block_type.nbytes + b.block_type.nbytes", "a.block_type.nbytes * 4")],
    ),
    "counts_too_many_arrivals": (
        Deadlock,
        [("init(empty.index(stage), count=1)", "init(empty.index(stage), count=2)")],
    ),
    "does_not_initialise_a_barrier": (
        Protocol,
        [("        mbarrier.init(empty.index(stage), count=1)\n", "")],
    ),
    "does_not_fence_before_a_copy": (Race, [("    fence_async_shared()\n", "")]),
    "ends_before_its_copy_is_done": (Protocol, [("    tma.store_wait(0)\n", "")]),
    "takes_the_wrong_place_of_the_ring": (
        Race,
        [("a = a_tiles.index(stage)", "a = a_tiles.index((stage + 1) % STAGES)")],
    ),
    "leaves_the_ring": (
        (OutOfBounds, Race),
        [("a = a_tiles.index(stage)", "a = a_tiles.index(stage + 1)")],
    ),
    "copies_a_tile_of_another_shape": (
        Protocol,
        [("tma_load(b, [0, 0, step * 64, 0]", "tma_load(a, [0, 0, step * 64, 0]"),
         ("gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, 64, n]",
          "gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, n, 32]")],
    ),
    "gives_a_worker_a_tensor": (
        EmulationError,
        [("a_tiles, b_tiles, full, empty, DEPTH, STAGES)),\n        ],",
          "gl.arange(0, 4), b_tiles, full, empty, DEPTH, STAGES)),\n        ],")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_in_every_schedule(name: str) -> None:
    error, changes = MISTAKES[name]
    for seed in range(3):
        with pytest.raises(error):
            multiply(seed, program=replaced(*changes))


LOADED = [
    (
        "a = a_tiles.index(stage).reshape([64, 64])",
        "a = a_tiles.index(stage).reshape([64, 64]).load(gl.DotOperandLayout(0, sum_layout(n), 2))",
    ),
    (WAIT_SUM, "        acc, a = warpgroup_mma_wait(0, deps=(acc, a))\n"),
]
FENCE = "        fence_async_shared()\n"


def test_a_copy_over_what_loads_have_read_needs_a_fence() -> None:
    """A barrier orders loads with stores; a copy that it lets go may land under them."""
    for seed in range(3):
        result, truth = multiply(seed, program=replaced(*LOADED, (RELEASE, FENCE + RELEASE)))
        torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-4)
        with pytest.raises(Race, match="was not fenced"):
            multiply(seed, program=replaced(*LOADED))


def sum_of_rows(seed: int, program: Program | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what the kernel gives, the truth); rows end in the midst of the third tile."""
    x = torch.arange(150 * 16, dtype=torch.float32).view(150, 16).bfloat16()
    result = torch.full((16,), torch.nan)
    with emulated(seed, program=program or Program()):
        small.sum_of_rows[(1,)](x, result, 150, 3, num_warps=4)
    return result, x.float().sum(0)


def test_copies_in_groups_are_there_once_they_are_waited_for() -> None:
    for seed in range(6):
        torch.testing.assert_close(*sum_of_rows(seed))


_WAIT_COPY = "        async_copy.wait_group(0)\n        _copy_rows(x, tiles, index + 1, rows)\n"
_LOAD_TILE = "        total = total + tiles.index(index % 2).load(LAYOUT).to(gl.float32)\n"
_COMMIT = "        async_copy.commit_group()\n"
IN_GROUPS = {
    "waits_for_one_group_too_few": (Race, [(_WAIT_COPY, _WAIT_COPY.replace("(0)", "(1)"))]),
    "does_not_close_a_group": (Race, [(_COMMIT + _LOAD_TILE, _LOAD_TILE)]),
    "copies_over_what_is_read_next": (
        Race, [(_WAIT_COPY, _WAIT_COPY.replace("index + 1", "index"))]
    ),
    "copies_before_others_have_read": (
        Race,
        [(_WAIT_COPY, _WAIT_COPY.splitlines(keepends=True)[0]),
         (_COMMIT + _LOAD_TILE, _LOAD_TILE
          + "        _copy_rows(x, tiles, index + 2, rows)\n" + _COMMIT)],
    ),
    "forgets_the_mask": (OutOfBounds, [("x + at, mask=inside", "x + at")]),
    "ends_before_its_copies_have_landed": (
        Protocol,
        [("    async_copy.wait_group(0)\n    at =", "    at =")],
    ),
    "copies_a_tile_of_another_shape": (Protocol, [("[2, 64, 16]", "[2, 64, 32]")]),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_GROUPS)
def test_a_mistake_with_groups_is_seen_in_every_schedule(name: str) -> None:
    error, changes = IN_GROUPS[name]
    for seed in range(3):
        with pytest.raises(error):
            sum_of_rows(seed, replaced(*changes))


def test_a_barrier_lets_copies_overwrite_what_was_read() -> None:
    changes = [
        (_WAIT_COPY, _WAIT_COPY.splitlines(keepends=True)[0]),
        (_COMMIT + _LOAD_TILE, _LOAD_TILE + "        gl.barrier()\n"
         "        _copy_rows(x, tiles, index + 2, rows)\n" + _COMMIT),
        ("    total = gl.zeros(", "    _copy_rows(x, tiles, gl.program_id(0) + 1, rows)\n"
         "    async_copy.commit_group()\n    total = gl.zeros("),
    ]  # fmt: skip
    for seed in range(3):
        torch.testing.assert_close(*sum_of_rows(seed, replaced(*changes)))


def test_copies_in_groups_are_in_no_recording() -> None:
    with recorded() as recordings:
        sum_of_rows(0)
    with pytest.raises(NotEmulated, match="cp.async"):
        Replay(recordings[0])


class TestLanguage:
    """Values mean what they mean on the device."""

    def test_integers_divide_towards_zero_and_wrap(self) -> None:
        result = torch.zeros(9, dtype=torch.int32)
        with emulated():
            small.integers[(1,)](result, -7, 2)
        assert result.tolist() == [-3, -1, -3, 0, -3, -3, -2, -2, 0xFFF8]

    def test_an_address_must_not_overflow(self) -> None:
        result = torch.zeros(1, dtype=torch.int32)
        with emulated(), pytest.raises(EmulationError, match="does not fit int32"):
            small.overflow[(1,)](result, 3)

    def test_loads_stay_inside_their_tensor(self) -> None:
        result, a = torch.zeros(1), torch.arange(8.0)
        with emulated():
            small.past_the_end[(1,)](result, a[2:6])
            assert result.item() == 2 + 3 + 4 + 5
            with pytest.raises(OutOfBounds):
                small.past_the_end[(1,)](result, a[2:5])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_inline_assembly_rounds_like_torch(self, dtype: torch.dtype) -> None:
        a, result = torch.randn(64, 8) * 3, torch.empty(64, 8)
        with emulated():
            small.round_trip[(1,)](
                result, a, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
            )
        assert torch.equal(result, torch.exp2(a).to(dtype).float())

    def test_unknown_operations_say_so(self) -> None:
        program = replaced(("gl.sum(gl.load(a + lanes), 0)", "gl.histogram(gl.load(a + lanes), 2)"))
        with emulated(program=program), pytest.raises(NotEmulated, match="histogram"):
            small.past_the_end[(1,)](torch.zeros(1), torch.zeros(4))


class TestTogether:
    """Partitions and CTAs that wait for one another."""

    @pytest.mark.parametrize("seed", range(3))
    def test_programs_may_poll_memory_for_their_turn(self, seed: int) -> None:
        total, turn = torch.ones(1), torch.zeros(1, dtype=torch.int32)
        with emulated(seed, resident=3):
            small.in_turn[(5,)](total, turn, True)
        assert total.item() == ((((1 * 2 + 0) * 2 + 1) * 2 + 2) * 2 + 3) * 2 + 4

    def test_polling_in_vain_is_a_deadlock(self) -> None:
        with emulated(), pytest.raises(Deadlock, match="in vain"):
            small.in_turn[(2,)](torch.ones(1), torch.zeros(1, dtype=torch.int32), False)

    def test_a_named_barrier_hands_memory_over(self) -> None:
        result = torch.zeros(64, dtype=torch.int32)
        with emulated():
            small.handed_over[(1,)](result)
        assert result.tolist() == list(range(64))

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (('    named_barrier("sync", 9, 256, 4)\n', ""), Race),
            (('    named_barrier("arrive", 9, 256, 4)\n', ""), Deadlock),
            (('"arrive", 9, 256', '"arrive", 9, 128'), Deadlock),
            (("result + at, memory.slice(0, 64)", "result + at, memory.slice(64, 64)"), None),
        ],
    )
    def test_what_goes_wrong_there(
        self, change: tuple[str, str], error: type[EmulationError] | None
    ) -> None:
        result = torch.zeros(64, dtype=torch.int32)
        with emulated(program=replaced(change)):
            if error is None:  # memory that nobody has written holds no plausible number
                small.handed_over[(1,)](result)
                assert np.all(result.numpy() == 0x5555)
            else:
                with pytest.raises(error):
                    small.handed_over[(1,)](result)

    def test_a_descriptor_must_not_outlive_its_memory(self) -> None:
        a = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
        with emulated():
            kept = descriptor(a, 64, 64)
            freed = descriptor(a.clone(), 64, 64)
            with pytest.raises(OutOfBounds, match="freed"):
                small.multiply[(1,)](kept, freed, kept, 64, 1, False, num_warps=4)
