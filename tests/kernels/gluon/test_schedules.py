"""Hand-overs of memory in the Hopper kernels, in thousands of schedules, and mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.emulator import EmulationError, Program, Race, Replay
from tests.kernels.gluon.handovers import HANDOVERS
from tests.kernels.gluon.schedules import CASES, replayed

STEPS = 180_000  # of all schedules of a kernel together, as partitions count them: seconds
STEPS_SLOW = 4_000_000
TRIES = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small, and the emulator has threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_no_schedule_lets_two_accesses_meet(name: str) -> None:
    """Between 150 and 1,000 schedules of each kernel."""
    for recording in CASES[name](0, Program()):
        replayed([recording], STEPS // Replay(recording).steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_no_schedule_of_many_lets_two_accesses_meet(name: str) -> None:
    """Of several recordings, too: what a partition does may depend on the others."""
    for seed in range(1, 5):
        for recording in CASES[name](seed, Program()):
            replayed([recording], STEPS_SLOW // 4 // Replay(recording).steps, 1_000_000 * seed)


@pytest.mark.parametrize("name", HANDOVERS)
def test_a_mistake_is_seen(name: str) -> None:
    mutation = HANDOVERS[name]
    program = mutation.program()

    def judge() -> None:
        for seed in range(TRIES):
            replayed(CASES[mutation.call](seed, program), 100)

    with pytest.raises((EmulationError, AssertionError)):
        judge()


@pytest.mark.parametrize("name", ["packed_causal", "backward", "latents"])
def test_barriers_among_the_warps_of_a_partition_are_needed(name: str) -> None:
    """That the model lets warps lag: without the barriers of Triton's own it sees races."""
    for recording in CASES[name](0, Program()):
        replay = Replay(recording, barriers=False)
        assert any(races(replay, seed) for seed in range(50))


def races(replay: Replay, seed: int) -> bool:
    try:
        replay.run(seed)
    except Race:
        return True
    return False


def test_a_schedule_can_be_repeated() -> None:
    recording = CASES["latents"](0, HANDOVERS[LAGGING].program())[0]
    replay = Replay(recording)
    seen = []
    for _ in range(2):
        try:
            replay.run(3)
        except Race as error:
            seen.append(str(error))
    assert len(seen) == 2
    assert seen[0] == seen[1]


LAGGING = "latents_loaded_over_queries_that_some_warp_reads"  # only where warps lag
