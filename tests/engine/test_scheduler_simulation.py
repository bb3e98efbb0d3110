"""Random schedules over tiny pools: every request ends, and its tokens never depend on the others.

I1-I6, I8-I12 are checked in every step: by Scheduler.check_integrity(), by the virtual cache (what
a run reads is its own prefix; what it writes is its alone) and by comparing with each request run
alone.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.simulator import VOCAB, Outputs, VirtualModel, run_alone, run_to_end
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduler import Scheduler
from tilewise.errors import RequestError

MAX_MODEL_LEN = 40


def random_scheduler(rng: random.Random) -> Scheduler:
    block_size = rng.choice([1, 2, 3, 4, 8])
    return Scheduler(
        rng.choice([3, 5, 8, 13, 30]),
        block_size,
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64]),
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=rng.choice([None, None, 1, 7, 64]),
        enable_prefix_caching=rng.random() < 0.8,
    )


def random_request(rng: random.Random, request_id: str) -> Request:
    """Few distinct beginnings, salts and tokens, so that sharing and near-misses are common."""
    n = rng.choice([1, 1, 1, 2, 3, 5])
    beginning = [rng.choice([0, 1])] * rng.randrange(0, 17)
    prompt = beginning + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
    return Request(
        request_id,
        prompt,
        SamplingParams(
            n=n,
            max_tokens=rng.choice([1, 2, 5, 12, None]),
            seed=rng.randrange(3),
            stop_token_ids=rng.choice([None, [2]]),
            ignore_eos=rng.random() < 0.5,
        ),
        eos_token_ids=(3,),
        salt=rng.choice(["", "", "0"]),
    )


class Story:
    """One random run with arrivals, aborts and outside stops between and during steps."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = random_scheduler(self.rng)
        self.model = VirtualModel(self.scheduler)
        self.outputs = Outputs()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.first_runs: list[str] = []

    def play(self) -> None:
        """Run until all has ended and the pool is empty."""
        arrivals = self.rng.randrange(1, 12)
        meddles = self.rng.random() < 0.4
        steps = 0
        while arrivals or self.scheduler.has_unfinished():
            if arrivals and self.rng.random() < 0.5:
                arrivals -= 1
                self.arrive(f"r{arrivals}")
            batch = self.scheduler.schedule()
            if batch is None:
                continue
            self.note_first_runs(batch)
            samples = self.model.run(batch)
            if meddles and self.rng.random() < 0.1:
                self.meddle()
            self.outputs.add(self.scheduler.update(batch, samples))
            if meddles and self.rng.random() < 0.1:
                self.meddle()
            self.scheduler.check_integrity()
            steps += 1
            assert steps < 5000, "every request ends"
        assert self.scheduler.stats().blocks_used == 0
        assert self.scheduler.schedule() is None

    def arrive(self, request_id: str) -> None:
        request = random_request(self.rng, request_id)
        try:
            self.scheduler.add(request)
        except RequestError:
            limits = self.scheduler.limits
            alone = len(request.prompt_token_ids) + (request.sampling.max_tokens or 1)
            assert min(alone, MAX_MODEL_LEN) > limits.num_blocks * limits.block_size + 1
            return
        self.requests[request_id] = request

    def note_first_runs(self, batch) -> None:
        for run in batch.sequences:
            request_id = self.scheduler.roster.live[run.seq_id].request.request_id
            if request_id not in self.first_runs:
                self.first_runs.append(request_id)

    def meddle(self) -> None:
        live = list(self.scheduler.roster.live.values())
        if not live:
            return
        seq = self.rng.choice(live)
        request_id = seq.request.request_id
        if self.rng.random() < 0.5:
            assert self.scheduler.abort(request_id)
            self.aborted.add(request_id)
        else:
            assert self.scheduler.finish(request_id, seq.index, FinishReason.STOP, "end")
            self.stopped.add((request_id, seq.index))

    def judge(self) -> None:
        """Compare with each request run alone."""
        arrived = [r for r in self.requests if r in set(self.first_runs)]
        assert self.first_runs == arrived, "nobody overtakes"
        for request_id, request in self.requests.items():
            alone = run_alone(request, self.scheduler.limits.max_len(request))
            for index in range(request.sampling.n):
                key = (request_id, index)
                tokens = self.outputs.tokens.get(key, [])
                truth = alone.tokens[key]
                if request_id in self.aborted or (request_id, index) in self.stopped:
                    assert tokens == truth[: len(tokens)]
                elif (request_id, 0) in self.stopped and not tokens:
                    continue  # stopped before it forked
                else:
                    assert tokens == truth
                    assert self.outputs.reasons[key] == alone.reasons[key]
                    assert self.outputs.stop_reasons[key] == alone.stop_reasons[key]


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_gives_the_tokens_of_a_request_alone(part: int):
    for seed in range(part * 60, (part + 1) * 60):
        story = Story(seed)
        story.play()
        story.judge()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_give_the_tokens_of_a_request_alone(part: int):
    for seed in range(10_000 + part * 500, 10_000 + (part + 1) * 500):
        story = Story(seed)
        story.play()
        story.judge()


def test_the_random_schedules_reach_what_they_are_meant_to_test():
    seen = {"preemptions": 0, "hits": 0, "copies": 0, "aborts": 0, "overflowing forks": 0}
    for seed in range(60):
        story = Story(seed)
        run = story.model.run
        copies = []

        def counting(batch, run=run, copies=copies):
            copies.extend(batch.block_copies)
            return run(batch)

        story.model.run = counting
        story.play()
        stats = story.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_hit_tokens
        seen["copies"] += len(copies)
        seen["aborts"] += len(story.aborted)
        seats = story.scheduler.limits.max_num_seqs
        seen["overflowing forks"] += sum(r.sampling.n > seats for r in story.requests.values())
    assert all(count > 10 for count in seen.values()), seen


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_cache_do_not_change_tokens(chunk: int, caching: bool):
    rng = random.Random(chunk)
    requests = [random_request(rng, f"r{i}") for i in range(12)]
    scheduler = Scheduler(
        14,
        4,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=chunk,
        enable_prefix_caching=caching,
    )
    for request in requests:
        scheduler.add(request)
    together = run_to_end(scheduler)
    for request in requests:
        alone = run_alone(request, MAX_MODEL_LEN)
        for key, tokens in alone.tokens.items():
            assert together.tokens[key] == tokens
