"""Rows on the device say what the packed inputs of a batch say, after any history."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.test_scheduler_simulation import MAX_MODEL_LEN, random_request, random_scheduler
from tilewise.engine.batch import PENDING, Batch, SampledToken, ScheduledSequence
from tilewise.engine.captured import batch as device_batch
from tilewise.engine.captured.batch import DeviceBatch
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.inputs import HostTables, build_inputs
from tilewise.errors import RequestError

CPU = torch.device("cpu")


def decodes(batch: Batch) -> bool:
    return all(s.num_samples == 1 and len(s.token_ids) == 1 for s in batch.sequences)


class Follower:
    """Rows that follow the batches of a scheduler, with steps done by hand.

    `drawn` is what the device alone knows: the last token of each sequence.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        limits = scheduler.limits
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self.rows = DeviceBatch(limits.max_num_seqs, max_blocks, limits.block_size, CPU)
        self.block_size = limits.block_size
        self.tables = HostTables()
        self.rng = random.Random(5)
        self.drawn: dict[int, int] = {}
        self.waiting: list[tuple[Batch, list[list[SampledToken]]]] = []

    def step(self, batch: Batch) -> list[list[SampledToken]]:
        rows, is_decode = self.rows, decodes(batch)
        changes = rows.take(batch, decodes=is_decode)
        rows.send(changes)
        known = Batch(
            tuple(
                s._replace(token_ids=(self.drawn[s.seq_id],)) if PENDING in s.token_ids else s
                for s in batch.sequences
            )
        )
        inputs = build_inputs(known, self.block_size, CPU)
        told = build_inputs(
            replace(known, left=batch.left), self.block_size, CPU, tables=self.tables
        )
        assert torch.equal(inputs.ctx.block_table, told.ctx.block_table)
        assert torch.equal(inputs.ctx.slot_mapping, told.ctx.slot_mapping)
        index = torch.tensor(changes.rows)
        if is_decode:
            self.place_fresh()
            assert torch.equal(rows.token[index], inputs.ids)
            assert torch.equal(rows.position[index], inputs.positions)
            runs = torch.zeros(rows.max_num_seqs, dtype=torch.int64)
            runs[index] = 1
            assert torch.equal(rows.active, runs)
            self.check_parameters(batch, changes.rows, 0)
        else:
            assert not (rows.fresh >= 0).any()
            ends = [s.start + len(s.token_ids) for s in batch.sequences]
            assert rows.position[index].tolist() == ends
            self.check_parameters(batch, changes.rows, 1)
        for row, expected in zip(changes.rows, inputs.ctx.block_table, strict=True):
            length = int((expected >= 0).sum())
            assert torch.equal(rows.table[row, :length], expected[:length])
            assert torch.equal(torch.from_numpy(rows.host_table[row]), rows.table[row])
        samples = [
            [SampledToken(self.rng.randrange(6)) for _ in range(s.num_samples)]
            for s in batch.sequences
        ]
        for row, run, drawn in zip(changes.rows, batch.sequences, samples, strict=True):
            if drawn:
                self.drawn[run.seq_id] = drawn[0].token_id
                rows.store_tokens(torch.tensor([row]), torch.tensor([drawn[0].token_id]))
        if is_decode:
            rows.position += rows.active
            rows.counter += rows.active
        return samples

    def place_fresh(self) -> None:
        """What the step does with blocks that begin with its tokens."""
        rows = self.rows
        for row in (rows.fresh >= 0).nonzero()[:, 0].tolist():
            assert rows.active[row] == 1
            rows.table[row, int(rows.position[row]) // self.block_size] = rows.fresh[row]
        rows.fresh.fill_(-1)

    def check_parameters(self, batch: Batch, rows: list[int], drawn: int) -> None:
        for row, run in zip(rows, batch.sequences, strict=True):
            if not run.num_samples:
                continue
            sampling, on = run.sampling, self.rows
            found = (on.temperature[row], on.top_p[row], on.min_p[row])
            assert [x.item() for x in found] == pytest.approx(
                [sampling.temperature, sampling.top_p, sampling.min_p]
            )
            assert on.top_k[row] == sampling.top_k
            assert on.seed[row] == run.seeds[0]
            assert on.counter[row] == run.num_generated + drawn


def play(seed: int) -> Follower:
    rng = random.Random(seed)
    scheduler = random_scheduler(rng, max_in_flight=rng.choice([1, 2]))
    follower = Follower(scheduler)
    unfinished: list[tuple[Batch, list[list[SampledToken]]]] = []
    arrivals = rng.randrange(1, 12)
    while arrivals or scheduler.has_unfinished() or unfinished:
        if arrivals and rng.random() < 0.5:
            arrivals -= 1
            try:
                scheduler.add(random_request(rng, f"r{arrivals}"))
            except RequestError:
                continue
        while len(unfinished) < scheduler.max_in_flight:
            batch = scheduler.schedule()
            if batch is None:
                break
            unfinished.append((batch, follower.step(batch)))
        if rng.random() < 0.05 and scheduler.roster.live:
            scheduler.abort(rng.choice(list(scheduler.roster.live.values())).request.request_id)
        if unfinished:
            scheduler.update(*unfinished.pop(0))
    return follower


@pytest.mark.parametrize("part", range(4))
def test_rows_follow_any_history(part: int):
    assert MAX_MODEL_LEN > 0
    for seed in range(part * 25, (part + 1) * 25):
        play(seed)


def steady(count=8, prompt=20, block_size=4, max_in_flight=2):
    """A scheduler and rows after some steps in which `count` sequences decode."""
    scheduler = Scheduler(
        1000,
        block_size,
        max_num_seqs=count,
        max_num_batched_tokens=5000,
        max_model_len=1000,
        max_in_flight=max_in_flight,
    )
    for i in range(count):
        params = SamplingParams(max_tokens=200, seed=i)
        scheduler.add(Request(str(i), [i] * prompt, params))
    return scheduler, Follower(scheduler)


def bytes_of_steps(scheduler, follower, steps):
    """Run steps with one unfinished at a time; returns the bytes that each sent."""
    sent, waiting = [], follower.waiting
    for _ in range(steps):
        batch = scheduler.schedule()
        before = follower.rows.num_bytes_sent
        samples = follower.step(batch)
        sent.append(follower.rows.num_bytes_sent - before)
        waiting.append((batch, samples))
        if len(waiting) == scheduler.max_in_flight:
            scheduler.update(*waiting.pop(0))
    return sent


@pytest.mark.parametrize("prompt", [19, 400])
def test_a_steady_step_sends_a_word_a_row_when_blocks_begin_and_else_nothing(prompt):
    scheduler, follower = steady(prompt=prompt, count=4)
    first, *_ = bytes_of_steps(scheduler, follower, 3)
    assert first > 0
    sent = bytes_of_steps(scheduler, follower, 40)
    assert set(sent) == {0, 4 * 4}
    assert sum(x > 0 for x in sent) == 10  # every fourth step begins a block in every row


def test_a_steady_batch_names_no_token_and_copies_no_table():
    scheduler, follower = steady()
    bytes_of_steps(scheduler, follower, 4)
    batch = scheduler.schedule()
    tables = {s.seq_id: s.block_ids for s in scheduler.roster.running}
    for run in batch.sequences:
        assert run.token_ids == (PENDING,)
        assert run.block_ids is tables[run.seq_id]
        assert run.first_new_block >= len(run.block_ids) - 1


def run(seq_id, token_ids, start, blocks, first_new_block=0):
    return ScheduledSequence(
        seq_id, token_ids, start, blocks, 1, SamplingParams(), (7,), 3, first_new_block
    )


@pytest.mark.parametrize("is_decode", [True, False])
def test_a_table_that_is_longer_than_a_row_is_not_written_to_the_next(is_decode):
    rows = DeviceBatch(6, 8, 4, CPU)
    tokens = (1,) if is_decode else (1, 2)
    with pytest.raises(ValueError, match="at most 8 blocks, got 9"):
        rows.take(Batch((run(0, tokens, 0, list(range(9))),)), decodes=is_decode)
    assert (rows.host_table[1:] <= 0).all()


def test_rows_stay_together_when_sequences_leave():
    rows = DeviceBatch(6, 8, 4, CPU)
    come = Batch(tuple(run(i, (i,), 0, [10 + i]) for i in range(5)))
    rows.send(rows.take(come, decodes=True))
    rows.fresh.fill_(-1)
    rows.position += rows.active
    rest = Batch(tuple(run(i, (PENDING,), 1, [10 + i], 1) for i in (2, 4)), left=(0, 1, 3))
    changes = rows.take(rest, decodes=True)
    rows.send(changes)
    assert rows.num_rows == 2
    assert sorted(changes.rows) == [0, 1]
    assert changes.moves == [(4, 0), (2, 1)]
    assert rows.token[changes.rows].tolist() == [2, 4]
    assert rows.active.tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("start", [1, 0], ids=["goes on", "again"])
def test_a_row_that_goes_on_with_a_chosen_token_is_told_that_alone(start):
    rows = DeviceBatch(6, 8, 4, CPU)
    come = Batch(tuple(run(i, (i,), 0, [10 + i]) for i in range(3)))
    rows.send(rows.take(come, decodes=True))
    rows.fresh.fill_(-1)
    rows.position += rows.active
    rows.counter += rows.active
    rows.token += 100  # what the step has drawn
    chosen = [run(i, (7 + i,), start, [10 + i], 1)._replace(is_chosen=i != 1) for i in range(3)]
    changes = rows.take(Batch((*chosen[::2], run(1, (PENDING,), 1, [11], 1))), decodes=True)
    rows.send(changes)
    assert len(changes.set_rows) == (0 if start == 1 else 2)
    assert rows.token[:3].tolist() == [7, 101, 9]
    assert rows.position[:3].tolist() == [start, 1, start]
    assert rows.counter[:3].tolist() == [4 if start == 1 else 3, 4, 4 if start == 1 else 3]
    assert rows.active.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_drawn_token_that_no_row_has_is_an_error():
    rows = DeviceBatch(2, 8, 4, CPU)
    for is_decode in (True, False):
        with pytest.raises(RuntimeError, match="no row has the token of sequence 4"):
            rows.take(Batch((run(4, (PENDING,), 3, [1]),)), decodes=is_decode)
        rows.reset()


def test_sampling_parameters_are_right_while_few_are_remembered(monkeypatch):
    monkeypatch.setattr(device_batch, "MAX_KNOWN", 3)
    words, rng = device_batch.SamplingWords(), random.Random(0)
    all_of_them = [SamplingParams(temperature=0.1 * i, top_k=i, top_p=0.9) for i in range(9)]
    for _ in range(30):
        some = [rng.choice(all_of_them) for _ in range(rng.randrange(1, 7))]
        found = words.of(some)
        assert found.flags.c_contiguous
        assert found[3].tolist() == [each.top_k for each in some]
        temperatures = found[0].view(np.float32).tolist()
        assert temperatures == pytest.approx([each.temperature for each in some])
        assert len(words._known) == len(words._alive) <= 3
    assert {id(each) for each in words._alive} == words._known.keys()
