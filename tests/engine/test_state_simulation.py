"""Random schedules of models with states: whatever meets, each request gets what it gets alone.

Everything of `test_whole_simulation` (chunks, hits, forks, searches, guesses, preemption, main
memory, files, deadlines, failures) over slots and checkpoints that `state_model` watches.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.engine.state_model import StateModel
from tests.engine.test_whole_simulation import WholeStory
from tilewise.engine.scheduling import newcomers
from tilewise.engine.scheduling.withdrawal import pause_transfers, withdraw
from tilewise.engine.tables.state_tables import StateLimits


class StateStory(WholeStory):
    """A random run of a model that has layers with states beside groups of layers with keys."""

    model_type = StateModel

    def random_states(self) -> StateLimits:
        rng = self.rng
        chunk = rng.choice([1, 2, 3, 4, 6])
        return StateLimits(rng.choice([0, 1, 2, 4, 9, 30]), chunk * rng.choice([1, 2, 5]), chunk)

    def fail(self, unfinished) -> None:
        if self.rng.random() < 0.5:
            unfinished.clear()
            self.model.lose()
            self.model.has_lost_steps = True
            withdraw(self.scheduler)
            self.num_withdrawn += 1
            if self.rng.random() < 0.3:
                pause_transfers(self.scheduler)
            self.scheduler.check_integrity()
            return
        super().discard(unfinished)


def play(seed: int) -> StateStory:
    story = StateStory(seed)
    with mock.patch.object(newcomers, "FLOOD", 2):  # so few blocks hold no real one
        story.play()
    story.judge()
    return story


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_of_states_gives_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(part * 25, (part + 1) * 25):
        play(seed)
