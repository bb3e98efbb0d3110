"""Random schedules with every order, victim and preemption, main memory, files and deadlines.

The stories are those of test_scheduler_simulation.py with more in them: after each step everything
is checked, and at the end the tokens are those of each request run alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.simulator import Outputs, VirtualStore, check_idle, run_alone
from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, Story, random_request
from tilewise.engine.request import FinishReason
from tilewise.engine.scheduler import Scheduler
from tilewise.errors import QueueFullError


class TierStory(Story):
    """A story with all that this subject adds; a clock that goes one second a step."""

    def __init__(
        self, seed: int, *, overlap: bool = False, fails: bool = False, damages: bool = False
    ) -> None:
        super().__init__(seed, overlap=overlap, fails=fails, damages=damages)
        rng = self.rng
        self.now = 0.0
        self.expired: dict[str, float] = {}
        self.store = VirtualStore(rng.random)
        num_swap_blocks = rng.choice([0, 2, 6, 15, 60])
        policy = rng.choice(["fcfs", "fcfs", "priority", "fair"])
        self.scheduler = Scheduler(
            rng.choice([3, 5, 8, 13, 30]),
            rng.choice([1, 2, 3, 4, 8]),
            max_num_seqs=rng.choice([1, 2, 3, 8]),
            max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64]),
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=rng.choice([None, None, 1, 7, 64]),
            enable_prefix_caching=rng.random() < 0.8,
            max_in_flight=2 if overlap else 1,
            scheduling_policy=policy,
            user_weights={"u1": 2.0} if policy == "fair" else None,
            preemption=rng.choice(["auto", "recompute", "swap", "swap"])
            if num_swap_blocks
            else "auto",
            victim=rng.choice(["newest", "cheapest"]),
            num_swap_blocks=num_swap_blocks,
            store=self.store if num_swap_blocks and rng.random() < 0.6 else None,
            max_waiting_requests=rng.choice([None, None, None, 2]),
            clock=lambda: self.now,
        )
        rates = self.scheduler.preemption.rates
        rates.prefill_tokens, rates.link_blocks = 10.0, rng.choice([0.0, 1.0, 100.0])
        self.model = self.store.model = type(self.model)(self.scheduler, self.is_damaging)
        schedule = self.scheduler.schedule

        def expiring():
            self.now += 1.0
            self.end_who_is_late()
            batch = schedule()
            self.note_expiry(batch)
            return batch

        self.scheduler.schedule = expiring

    def end_who_is_late(self) -> None:
        live = {name: family[0] for name, family in self.scheduler.roster.requests.items()}
        events = self.scheduler.expire()
        self.outputs.add(events)
        for event in events:
            assert event.finish_reason is FinishReason.DEADLINE
            request, first = self.requests[event.request_id], live[event.request_id]
            age = self.now - first.arrival_time
            late = request.deadline_s is not None and age >= request.deadline_s
            unbegun = not first.was_admitted
            assert late or (unbegun and age >= request.max_queue_s), "nobody ends early"
            self.aborted.add(event.request_id)
            self.expired[event.request_id] = self.now

    def note_expiry(self, batch) -> None:
        """Whoever is in a batch has time left."""
        if batch is None:
            return
        for run in batch.sequences:
            seq = self.scheduler.roster.live[run.seq_id]
            if seq.request.deadline_s is not None:
                assert self.now - seq.arrival_time < seq.request.deadline_s, "computed for nobody"

    def arrive(self, request_id: str) -> None:
        request = random_request(self.rng, request_id)
        request.user = self.rng.choice(["u0", "u1", "u2"])
        request.priority = self.rng.randrange(3)
        if self.rng.random() < 0.1:
            request.deadline_s = self.rng.choice([0.0, 3.0, 20.0])
        if self.rng.random() < 0.1:
            request.max_queue_s = self.rng.choice([0.0, 2.0, 9.0])
        queued = self.scheduler.roster.num_queued
        try:
            self.scheduler.limits.check(request)
            self.scheduler.add(request)
        except QueueFullError:
            assert queued == self.scheduler.limits.max_waiting_requests
            return
        except ValueError:
            return
        self.requests[request_id] = request

    def update(self, batch) -> None:
        super().update(batch)
        assert not self.known_damage & self.model.damaged_slots(), "nor in main memory"
        kept = {v for _, values in self.store.files.values() for v in values}
        assert not self.known_damage & kept, "nor in files"

    def retry_failed(self) -> None:
        self.damages, self.outputs = False, Outputs()
        for request_id in sorted(self.failed):
            request = self.requests[request_id]
            alone = run_alone(request, self.scheduler.limits.max_len(request))
            name = f"{request_id} again"
            again = replace(request, request_id=name, deadline_s=None, max_queue_s=None)
            self.requests[name] = again
            for _ in range(8):
                self.failed.discard(name)
                self.scheduler.add(again)
                while self.scheduler.has_unfinished():
                    self.update(self.submit())
                    self.scheduler.check_integrity()
                if name not in self.failed:
                    break
                self.outputs = Outputs()
            assert name not in self.failed
            for index in range(request.sampling.n):
                assert self.outputs.tokens[name, index] == alone.tokens[request_id, index]
            del self.requests[name]

    def play(self) -> None:
        super().play()
        check_idle(self.scheduler)
        self.scheduler.check_integrity()

    def judge(self) -> None:
        if self.scheduler.order.name != "fcfs" or self.aborted:
            self.first_runs = [r for r in self.requests if r in set(self.first_runs)]
        super().judge()


def play(seed: int, **settings) -> TierStory:
    story = TierStory(
        seed,
        overlap=seed % 2 == 1,
        fails=seed % 5 == 3,
        damages=seed % 7 == 4,
        **settings,
    )
    story.play()
    story.judge()
    return story


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_gives_the_tokens_of_a_request_alone(part: int):
    for seed in range(part * 75, (part + 1) * 75):
        play(seed).retry_failed()
