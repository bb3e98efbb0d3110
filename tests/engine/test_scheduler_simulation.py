"""Random schedules over tiny pools: every request ends, and its tokens never depend on the others.

I1-I6, I8-I12 are checked in every step: by Scheduler.check_integrity(), by the virtual cache (what
a run reads is its own prefix; what it writes is its alone) and by comparing with each request run
alone.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.engine.simulator import (
    VOCAB,
    Outputs,
    VirtualModel,
    draw_alone,
    run_alone,
    run_to_end,
)
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.batch import PENDING
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.withdrawal import pause_transfers, resume_transfers, withdraw
from tilewise.engine.tables import block_tables
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.inside import begin_inside
from tilewise.errors import RequestError

MAX_MODEL_LEN = 40


def random_scheduler(rng: random.Random, max_in_flight: int = 1) -> Scheduler:
    block_size = rng.choice([1, 2, 3, 4, 8])
    return Scheduler(
        rng.choice([3, 5, 8, 13, 30]),
        block_size,
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 7, 16, 64]),
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=rng.choice([None, None, 1, 7, 64]),
        enable_prefix_caching=rng.random() < 0.8,
        max_in_flight=max_in_flight,
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
    """One random run with arrivals, aborts, outside stops and failures, between and during steps.

    With overlap a step is scheduled while another is unfinished, mostly.

    Attributes:
        most_arrivals: how often at most somebody arrives.
    """

    most_arrivals = 11

    def __init__(
        self, seed: int, *, overlap: bool = False, fails: bool = False, damages: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.scheduler = random_scheduler(self.rng, 2 if overlap else 1)
        self.overlap, self.fails = overlap, fails
        self.damages = damages
        self.model = VirtualModel(self.scheduler, self.is_damaging)
        self.outputs = Outputs()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.first_runs: list[str] = []
        self.failed: set[str] = set()
        self.num_withdrawn = 0
        self.known_damage: set[int] = set()

    def is_damaging(self) -> bool:
        return self.damages and self.rng.random() < 0.02

    def update(self, batch) -> None:
        """Take a step's results; what is known to be damaged then must not be findable."""
        samples = self.model.result(batch)
        # What a later step, scheduled already, will write is still somebody else's.
        written = {run.seq_id: run.start + len(run.token_ids) for run in batch.sequences}
        owned = [
            (
                s.request.request_id,
                self.model.damaged(s.block_ids, written.get(s.seq_id, s.num_computed_tokens)),
            )
            for s in self.scheduler.roster.live.values()
        ]
        events = self.scheduler.update(batch, samples)
        self.outputs.add(events)
        failed = {event.request_id for event in events if event.error is not None}
        self.failed |= failed
        for request_id, damage in owned:
            if request_id in failed:
                self.known_damage |= damage
        pool = self.scheduler.tables.allocator
        findable = [block for block in range(pool.num_blocks) if pool.is_cached(block)]
        assert not self.known_damage & self.model.damaged(findable), "known damage is never found"

    def retry_failed(self) -> None:
        """Ask again for what has failed: an attempt that fails leaves nothing to the next one."""
        self.damages, self.outputs = False, Outputs()
        for request_id in sorted(self.failed):
            request = self.requests[request_id]
            alone = draw_alone(request, self.scheduler.limits.max_len(request))
            for attempt in range(2):
                name = f"{request_id} again {attempt}"
                self.scheduler.add(replace(request, request_id=name))
                while self.scheduler.has_unfinished():
                    self.update(self.submit())
                    self.scheduler.check_integrity()
                if name not in self.failed:
                    break
            assert name not in self.failed
            for index in range(request.sampling.n):
                assert self.outputs.tokens[name, index] == alone.tokens[request_id, index]

    def submit(self):
        batch = self.scheduler.schedule()
        self.model.submit(batch)
        return batch

    def play(self) -> None:
        """Run until all has ended and the pool is empty."""
        arrivals = self.rng.randrange(1, self.most_arrivals + 1)
        meddles = self.rng.random() < 0.4
        steps = 0
        unfinished = []
        while arrivals or self.scheduler.has_unfinished() or unfinished:
            if arrivals and self.rng.random() < 0.5:
                arrivals -= 1
                self.arrive(f"r{arrivals}")
            while len(unfinished) < self.scheduler.max_in_flight:
                batch = self.scheduler.schedule()
                if batch is None:
                    break
                self.note_first_runs()
                self.model.submit(batch)
                unfinished.append(batch)
                self.scheduler.check_integrity()
                if self.rng.random() < 0.1:
                    break  # the next one is not scheduled in time
            if not unfinished:
                continue
            if meddles and self.rng.random() < 0.1:
                self.meddle()
            if self.fails and self.rng.random() < 0.03:
                self.fail(unfinished)
                continue
            batch = unfinished.pop(0)
            self.update(batch)
            if meddles and self.rng.random() < 0.1:
                self.meddle()
            self.scheduler.check_integrity()
            steps += 1
            assert steps < 5000, "every request ends"
        assert self.scheduler.stats().blocks_used == 0
        assert self.scheduler.schedule() is None

    def fail(self, unfinished) -> None:
        """Let one of the unfinished steps fail: the requests in it end, or all steps come again."""
        if self.rng.random() < 0.5:
            unfinished.clear()
            self.model.unfinished.clear()
            self.model.has_lost_steps = True
            withdraw(self.scheduler)
            self.num_withdrawn += 1
            if self.rng.random() < 0.3:
                pause_transfers(self.scheduler)
            self.scheduler.check_integrity()
            return
        resume_transfers(self.scheduler)
        self.discard(unfinished)

    def discard(self, unfinished) -> None:
        """Let one of the unfinished steps fail, and the requests in it end."""
        batch = unfinished.pop(self.rng.randrange(len(unfinished)))
        self.model.drop(batch)
        self.aborted |= set(self.scheduler.discard(batch))
        self.scheduler.check_integrity()

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

    def note_first_runs(self) -> None:
        for seq in self.scheduler.roster.running:
            request_id = seq.request.request_id
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
            index, n = seq.index, seq.request.sampling.num_samples
            is_search = self.scheduler.beams.search_of(seq) is not None
            if not is_search and len(self.scheduler.sequences(request_id)) < n:
                index = self.rng.choice([i for i in range(n) if i not in seq.ended])
            assert self.scheduler.finish(request_id, index, FinishReason.STOP, "end")
            self.stopped.add((request_id, index))

    def judge(self) -> None:
        """Compare with each request run alone."""
        arrived = [r for r in self.requests if r in set(self.first_runs)]
        assert self.first_runs == arrived, "nobody overtakes"
        for request_id, request in self.requests.items():
            alone = draw_alone(request, self.scheduler.limits.max_len(request))
            for index in range(request.sampling.n):
                key = (request_id, index)
                tokens = self.outputs.tokens.get(key, [])
                truth = alone.tokens[key]
                if (
                    request_id in self.failed
                    or request_id in self.aborted
                    or (request_id, index) in self.stopped
                ):
                    assert tokens == truth[: len(tokens)]
                else:
                    assert tokens == truth
                    assert self.outputs.reasons[key] == alone.reasons[key]
                    assert self.outputs.stop_reasons[key] == alone.stop_reasons[key]


def test_what_requests_draw_alone_is_what_the_scheduler_draws_for_them_alone():
    rng = random.Random(7)
    for i in range(150):
        request = random_request(rng, f"r{i}")
        limit = min(
            MAX_MODEL_LEN, len(request.prompt_token_ids) + (request.sampling.max_tokens or 99)
        )
        assert vars(draw_alone(request, limit)) == vars(run_alone(request, MAX_MODEL_LEN))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(8))
def test_any_schedule_gives_the_tokens_of_a_request_alone(part: int, overlap: bool):
    for seed in range(part * 20, (part + 1) * 20):
        story = Story(seed, overlap=overlap, fails=seed % 4 == 3)
        story.play()
        story.judge()


@pytest.mark.parametrize("overlap", [False, True])
def test_damage_ends_whoever_reads_it_and_nobody_finds_it_again(overlap: bool):
    seen = {"failed": 0, "unharmed": 0, "doubtful": 0}
    for seed in range(80):
        story = Story(seed, overlap=overlap, fails=seed % 4 == 3, damages=True)
        forget = story.scheduler.tables.forget

        def forgetting(family, holders, forget=forget):
            forget(family, holders)
            seen["doubtful"] += sum(s.is_doubtful and s not in family for s in holders)

        story.scheduler.tables.forget = forgetting
        story.play()
        story.judge()
        seen["failed"] += len(story.failed)
        seen["unharmed"] += len(story.requests) - len(story.failed | story.aborted)
        story.retry_failed()
    assert all(count > 1 for count in seen.values()), seen


FORGET = BlockTables.forget

DAMAGE_MISTAKES = {
    "damage stays findable": (BlockTables, "forget", lambda tables, family, holders: None),
    "a sharer tells of damage": (BlockTables, "forget", lambda t, f, h: FORGET(t, f, [])),
}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_give_the_tokens_of_a_request_alone(part: int, overlap: bool):
    for seed in range(10_000 + part * 500, 10_000 + (part + 1) * 500):
        story = Story(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()
        story.retry_failed()


def release_at_once(tables, number, blocks):
    tables.release_now(number, list(blocks))


def keep_no_copied_block(tables, number):
    pool = tables.pools[number]
    copies = tuple(pool.copies)
    pool.copies.clear()
    pool.allocator.release([source for source, _ in copies])
    return copies


def tell_only_what_is_added(tables, seq):
    told = seq.num_told_blocks
    REGISTER(tables, seq)
    seq.num_told_blocks = told


def tell_nothing_of_what_is_taken_over(tables, seq):
    told = seq.num_told_blocks
    gained = ADOPT(tables, seq)
    seq.num_told_blocks = told
    return gained


def take_over_more_than_is_there(tables, seq):
    gained = ADOPT(tables, seq)
    if gained:
        seq.num_computed_tokens += 1
        seq.num_scheduled_tokens += 1
    return gained


def begin_one_token_too_far(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    return count + (0 < count < seq.num_tokens - seq.num_registered_blocks * tables.block_size - 1)


def begin_inside_without_a_copy(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    seq.shares_tail = False
    return count


def begin_in_the_block_itself(tables, seq, spare, *, is_fresh):
    """What the cache finds is written by whoever goes on there."""
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    if count:
        tables.prefix.forget_block(0, seq.block_ids[seq.num_registered_blocks])
    return count


def take_a_source_that_nobody_keeps(tables, seq, spare, *, is_fresh):
    count = INSIDE(tables, seq, spare, is_fresh=is_fresh)
    if count:
        tables.allocator.release([seq.block_ids[seq.num_registered_blocks]])
    return count


def take_any_child(prefix, node, token_ids):
    child, count = BEGINS(prefix, node, token_ids)
    known = [each for each in node.children.values() if each.blocks[0] >= 0]
    return (known[0], count) if count else (child, count)


def find_beginnings_under_any_parent(prefix, node, token_ids):
    nodes = [other for other in prefix._all() if other.parent is not None]
    found = (BEGINS(prefix, other, token_ids) for other in nodes)
    return max(found, key=lambda pair: pair[1], default=(None, 0))


def free_a_source_behind_its_parent(tables, index):
    for pool in tables.pools:
        pool.fences[index][:0] = pool.read[index]
        pool.read[index].clear()
    END_STEP(tables, index)


REGISTER, ADOPT = BlockTables.register, BlockTables.adopt
INSIDE, BEGINS, END_STEP = (
    begin_inside,
    PrefixCache.begins_inside,
    BlockTables.end_step,
)

MISTAKES = {
    "a block is freed early": (BlockTables, "let_go", release_at_once),
    "a copy's source is freed early": (BlockTables, "_take_copies", keep_no_copied_block),
    "a change is not told": (BlockTables, "register", tell_only_what_is_added),
    "what is taken over is not told": (BlockTables, "adopt", tell_nothing_of_what_is_taken_over),
    "too much is taken over": (BlockTables, "adopt", take_over_more_than_is_there),
    "a hit inside a block is a token too long": (
        block_tables, "begin_inside", begin_one_token_too_far,
    ),
    "who goes on with one token writes to what was found": (
        block_tables, "begin_inside", begin_inside_without_a_copy,
    ),
    "what was found is nobody's now": (block_tables, "begin_inside", begin_in_the_block_itself),
    "a source is not kept": (block_tables, "begin_inside", take_a_source_that_nobody_keeps),
    "another child is copied": (PrefixCache, "begins_inside", take_any_child),
    "another prompt's child is copied": (
        PrefixCache, "begins_inside", find_beginnings_under_any_parent,
    ),
    "a parent is freed before the source": (
        BlockTables, "end_step", free_a_source_behind_its_parent,
    ),
}  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_the_random_schedules_reach_what_they_are_meant_to_test(overlap: bool):
    seen = {"preemptions": 0, "hits": 0, "copies": 0, "aborts": 0, "overflowing forks": 0}
    seen["taken over"] = seen["inside a block"] = 0
    if overlap:
        seen |= {"drawn tokens": 0, "dropped runs": 0, "waits for fences": 0}
    for seed in range(200 if overlap else 60):
        story = Story(seed, overlap=overlap)
        submit, result = story.model.submit, story.model.result
        extend = story.scheduler.tables.extend
        copies = []

        def submitting(batch, submit=submit, copies=copies):
            copies.extend(batch.block_copies)
            if overlap:
                seen["drawn tokens"] += sum(s.token_ids == (PENDING,) for s in batch.sequences)
            submit(batch)

        def finishing(batch, result=result, story=story):
            live = story.scheduler.roster.live
            if overlap:
                seen["dropped runs"] += sum(s.seq_id not in live for s in batch.sequences)
            return result(batch)

        def extending(seq, end, extend=extend, story=story):
            done = extend(seq, end)
            if overlap:
                seen["waits for fences"] += not done and story.scheduler.tables.has_fenced
            return done

        def adopting(seq, adopt=story.scheduler.tables.adopt):
            gained = adopt(seq)
            seen["taken over"] += gained
            return gained

        def beginning(node, tokens, begins=story.scheduler.tables.prefix):
            found = PrefixCache.begins_inside(begins, node, tokens)
            seen["inside a block"] += found[1] > 0
            return found

        if story.scheduler.tables.prefix is not None:
            story.scheduler.tables.prefix.begins_inside = beginning
        story.scheduler.tables.adopt = adopting
        story.model.submit, story.model.result = submitting, finishing
        story.scheduler.tables.extend = extending
        story.play()
        stats = story.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_hit_tokens
        seen["copies"] += len(copies)
        seen["aborts"] += len(story.aborted)
        seats = story.scheduler.limits.max_num_seqs
        seen["overflowing forks"] += sum(r.sampling.n > seats for r in story.requests.values())
        if all(count > 10 for count in seen.values()):
            return
    pytest.fail(f"not all came often: {seen}")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_cache_do_not_change_tokens(chunk: int, caching: bool, overlap: bool):
    rng = random.Random(chunk)
    requests = [random_request(rng, f"r{i}") for i in range(12)]
    scheduler = Scheduler(
        14,
        4,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=MAX_MODEL_LEN,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=caching,
        max_in_flight=1 + overlap,
    )
    for request in requests:
        scheduler.add(request)
    together = run_to_end(scheduler)
    for request in requests:
        alone = run_alone(request, MAX_MODEL_LEN)
        for key, tokens in alone.tokens.items():
            assert together.tokens[key] == tokens
