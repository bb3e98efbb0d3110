"""Hand-overs of memory in the Hopper kernels, in thousands of schedules, and mistakes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.handovers import HANDOVERS
from tests.kernels.gluon.schedules import CASES, replayed
from tools.gluon_emulator import (
    EmulationError,
    Program,
    Protocol,
    Race,
    Replay,
    recorded,
    unjudged,
)

# Of a recording; the slow form has four. The proof is of all schedules, these are a check of it:
# each planted mistake below is seen in any one of 50.
SCHEDULES, SCHEDULES_SLOW = 200, 10_000
TRIES = 3
# Mistakes with which a run of the emulator cannot go on: it hangs, or its barriers are misused.
STOPPED = frozenset((
    "a_tile_announced_before_the_last_number_is_read",
    "the_end_announced_before_the_last_number_is_read", "q_given_back_unread_before_it_has_come",
    "the_turn_passed_to_oneself", "another_stage_of_v_given_back",
    "another_stage_of_k_given_back_unread", "the_wrong_phase_of_a_block_that_is_passed_by",
    "the_bytes_of_the_rest_forgotten", "the_wrong_phase_of_ds", "the_wrong_buffer_of_ds_given_back",
    "the_wrong_phase_of_dq", "k_of_rows_given_back_before_its_product_is_done",
    "8_bits_the_turn_passed_to_oneself", "8_bits_q_and_its_notes_read_before_they_are_there",
    "a_page_used_before_it_is_there", "a_page_loaded_over_one_in_use",
    "the_scales_of_a_page_not_waited_for", "a_stage_multiplied_before_it_is_there",
    "the_scales_of_a_page_announced_before_they_are_copied",
    "the_wrong_phase_of_a_stage", "another_stage_loaded",
    "a_stage_loaded_before_its_product_is_done", "the_bytes_of_x_forgotten",
    "the_bytes_of_an_early_weight_forgotten", "arrivals_left_behind",
    "8_bits_v_multiplied_before_it_is_there", "the_wrong_phase_of_dq_of_two_senders",
    "another_senders_dq_given_back", "k_of_the_next_tile_loaded_before_its_place_is_free",
    "the_wrong_phase_of_free_k", "v_given_back_before_dk_has_left", "the_last_ds_not_given_back",
    "notes_read_before_they_are_there", "notes_of_another_tile",
    "codes_multiplied_before_they_are_there", "codes_loaded_over_some_in_use",
))  # fmt: skip
RACES = [name for name in HANDOVERS if name not in STOPPED]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small, and the emulator has threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_no_schedule_lets_two_accesses_meet(name: str) -> None:
    """By proof for all schedules of a recording, and by running some of them."""
    for recording in CASES[name](0, Program()):
        replay = Replay(recording)
        replay.prove()
        replay.run(0, SCHEDULES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_no_schedule_of_many_lets_two_accesses_meet(name: str) -> None:
    """Of several recordings, too: what a partition does may depend on the others."""
    for seed in range(1, 5):
        for recording in CASES[name](seed, Program()):
            replay = Replay(recording)
            replay.prove()
            replay.run(1_000_000 * seed, SCHEDULES_SLOW)


SEEN = [pytest.param(name, marks=[pytest.mark.slow] * (name in RACES)) for name in HANDOVERS]


@pytest.mark.parametrize("name", SEEN)
def test_a_mistake_is_seen(name: str) -> None:
    """By the emulator itself as a rule; every day those that the next test cannot record."""
    mutation = HANDOVERS[name]
    program = mutation.program()

    def judge() -> None:
        for seed in range(TRIES):
            replayed(CASES[mutation.call](seed, program), 100)

    with pytest.raises((EmulationError, AssertionError)):
        judge()


@pytest.mark.parametrize("name", RACES)
def test_every_schedule_sees_the_mistake_and_so_does_the_proof(name: str) -> None:
    """Of a run in which the emulator itself has looked away."""
    mutation = HANDOVERS[name]
    with unjudged(), recorded() as recordings:
        try:
            CASES[mutation.call](0, mutation.program())
        except EmulationError:
            raise
        except AssertionError:
            pass  # numbers are wrong where the race was lost
    wrong = [replay for replay in map(Replay, recordings) if is_wrong(replay.prove)]
    assert wrong
    for replay in wrong:
        assert all(is_wrong(lambda: replay.run(seed)) for seed in range(50))  # noqa: B023


def is_wrong(judge: Callable[[], None]) -> bool:
    try:
        judge()
    except EmulationError:
        return True
    return False


@pytest.mark.parametrize("name", ["packed_causal", "backward", "latents"])
def test_barriers_among_the_warps_of_a_partition_are_needed(name: str) -> None:
    """That the model lets warps lag: without the barriers of Triton's own it sees races."""
    for recording in CASES[name](0, Program()):
        replay = Replay(recording, barriers=False)
        with pytest.raises((Race, Protocol)):
            replay.run(0, 50)


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
