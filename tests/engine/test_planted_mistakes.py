"""Mistakes of scheduler, tables, swap space, beams and drafts, planted one by one: each shows.

The tables of mistakes stand beside the stories that find them; here they are one. A mistake is
caught when a random schedule breaks an invariant, reads a wrong key, or ends with other tokens than
the request alone. `make mutants` runs this beside the mistakes of host code and of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.engine import (
    test_beam_tiers,
    test_beams,
    test_group_simulation,
    test_scheduler_simulation,
    test_speculative,
    test_state_simulation,
    test_tier_simulation,
)
from tests.engine.test_beams import BeamStory
from tests.engine.test_scheduler_simulation import Story
from tests.engine.test_speculative import DraftStory, TreeStory
from tilewise.engine.scheduling import withdrawal

CAUGHT = (AssertionError, ValueError, LookupError, RuntimeError, StopIteration)
MOST_SEEDS = 2000  # the rarest shows after some 900


# Where a mistake shows late, the schedule in which it did: tried first, and all others after it.
LATE = {
    "a checkpoint that is read is given away": 64,
    "a failed step's restores are trusted": 58,
    "a checkpoint is listed a block late": 53,
    "a state that has left its chunk is taken back": 15,
    "a checkpoint is of the run's last token": 14,
    "a shared tail of groups is written in place": 150,
    "what a window has passed is held again": 150,
    "another child's blocks are copied in groups": 128,
    "damage stays in main memory": 123,
    "the first block of a window is not swapped": 79,
    "what is taken over is not told": 254,
    "who goes on with one token writes to what was found": 869,
    "what a source replaces is given back at once": 54,
    "a torn file is a hit": 76,
    "a hit inside blocks of groups is a token too long": 48,
    "beams beside tiers: make way for none but siblings": 57,
    "a torn file of a group is used": 45,
    "who has passed too much goes on": 55,
    "one token behind a hit inside blocks is written in place": 41,
    "an ended sequence keeps slots of groups": 43,
    "one group alone is swapped": 38,
    "one token too many is back in groups": 38,
    "a failed step's transfers of groups are trusted": 45,
    "a parent is freed before the source": 134,
    "too much is taken over": 110,
    "beams beside tiers: swap beams": 33,
    "a failed step's transfers are trusted": 28,
    "a deadline is for who waits only": 28,
    "a shared tail is written in place": 27,
    "one sample of all comes back": 27,
    "the newest is admitted first": 24,
    "a change is not told": 26,
    "what was found is nobody's now": 24,
    "another child is copied": 99,
    "beams: forget the row of who is preempted": 1,
    "the source of one group is not held": 12,
    "what was found inside blocks is not copied in one group": 12,
    "a window is a key too short": 6,
    "a slot is given away and still found": 5,
    "another prompt's blocks are copied in groups": 3,
    "a source is taken that one group has no more": 3,
    "a withdrawn step's tokens are computed": 20,
    "a hit is in the wrong place": 19,
    "what a group keeps was never moved": 3,
    "what a group finds in main memory stays there": 3,
    "slots of groups are not pinned": 3,
    "beams beside tiers: forget the deadline of who was dropped": 9,
}


class Planted(NamedTuple):
    """What takes the place of `name` in `owner`, and who is to notice."""

    owner: Any
    name: str
    mistake: Any
    play: Callable[[int], None]


def story(seed: int) -> None:
    played = Story(seed, overlap=seed % 2 == 1, fails=seed % 4 == 3)
    played.play()
    played.judge()


def damaged_story(seed: int) -> None:
    Story(seed, damages=True).play()


def tier_story(seed: int) -> None:
    test_tier_simulation.play(seed).retry_failed()


def beam_story(seed: int) -> None:
    played = BeamStory(seed, overlap=seed % 2 == 0)
    played.play()
    played.judge()


def draft_story(seed: int) -> None:
    played = DraftStory(seed, overlap=seed % 2 == 0)
    played.play()
    played.judge()


def tree_story(seed: int) -> None:
    played = TreeStory(seed, overlap=seed % 2 == 0)
    played.play()
    played.judge()


WITHDRAW = withdrawal.withdraw


def withdraw_without_the_copies(scheduler):
    """The copies of a step that never ran are taken for made."""
    for step in scheduler._steps:
        object.__setattr__(step.batch, "block_copies", ())
    WITHDRAW(scheduler)


def withdraw_and_keep_what_was_scheduled(scheduler):
    scheduled = {s: s.num_scheduled_tokens for s in scheduler.roster.running if not s.num_pending}
    WITHDRAW(scheduler)
    for seq, count in scheduled.items():
        if seq.block_ids and not seq.num_preemptions:
            seq.num_computed_tokens = seq.num_scheduled_tokens = min(count, seq.num_tokens - 1)


def withdraw_and_still_wait_for_tokens(scheduler):
    pending = {s: s.num_pending for s in scheduler.roster.running}
    WITHDRAW(scheduler)
    for seq, count in pending.items():
        seq.num_pending = count if seq.block_ids else 0


def withdraw_and_trust_what_was_to_move(scheduler):
    revoke = scheduler.preemption.revoke
    scheduler.preemption.revoke = lambda batch, later: None
    try:
        WITHDRAW(scheduler)
    finally:
        scheduler.preemption.revoke = revoke


WITHDRAWN = {
    "a withdrawn step's copies are trusted": withdraw_without_the_copies,
    "a withdrawn step's tokens are computed": withdraw_and_keep_what_was_scheduled,
    "a withdrawn step's tokens are waited for": withdraw_and_still_wait_for_tokens,
    "a withdrawn step's transfers are trusted": withdraw_and_trust_what_was_to_move,
}


def failing_tier_story(seed: int) -> None:
    played = test_tier_simulation.TierStory(seed, overlap=seed % 2 == 1, fails=True)
    played.play()
    played.judge()


def _all() -> dict[str, Planted]:
    found = {
        name: Planted(*where, player)
        for table, player in (
            (test_scheduler_simulation.MISTAKES, story),
            (test_scheduler_simulation.DAMAGE_MISTAKES, damaged_story),
            (test_tier_simulation.MISTAKES, tier_story),
        )
        for name, where in table.items()
    }
    listed = (
        ("beams", test_beams.MISTAKES, beam_story),
        ("beams beside tiers", test_beam_tiers.MISTAKES, test_beam_tiers.play),
        ("drafts", test_speculative.MISTAKES, draft_story),
        ("trees", test_speculative.TREE_MISTAKES, tree_story),
    )
    for subject, table, player in listed:
        for owner, name, mistake in table:
            says = mistake.__name__.replace("_", " ")
            found[f"{subject}: {says}"] = Planted(owner, name, mistake, player)
    for name, (*where, player) in test_group_simulation.MISTAKES.items():
        found[name] = Planted(*where, player)
    for name, where in test_state_simulation.MISTAKES.items():
        found[name] = Planted(*where, test_state_simulation.play)
    for says, mistake in WITHDRAWN.items():
        where = test_scheduler_simulation, "withdraw"
        found[says] = Planted(*where, mistake, failing_tier_story)
    return found


MISTAKES = _all()


def test_there_are_at_least_forty():
    assert len(MISTAKES) >= 40
    assert LATE.keys() <= MISTAKES.keys()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_shows(monkeypatch, name: str):
    planted = MISTAKES[name]
    monkeypatch.setattr(planted.owner, planted.name, planted.mistake)

    def play_many():
        for seed in (LATE.get(name, 0), *range(MOST_SEEDS)):
            planted.play(seed)

    with pytest.raises(CAUGHT):
        play_many()


@pytest.mark.parametrize("name", LATE)
def test_the_schedule_in_which_a_mistake_shows_late_is_right_without_it(name: str):
    """The everyday run plays few of the random schedules, and these."""
    MISTAKES[name].play(LATE[name])
