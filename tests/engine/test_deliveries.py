"""When AsyncLLM tells its readers: at once, or of several steps together where telling is dear."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.engine.checkpoint import write_checkpoint
from tilewise.engine import async_llm
from tilewise.engine.async_llm import MOST_REST_S, AsyncLLM, Mailbox, _Reader
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
TEXTS = ["once upon", "the quick", "a small cat", "the lazy dog"]


class Clock:
    """An event loop and the processor's time: a reader costs what `cost` says."""

    def __init__(self, monkeypatch):
        self.now = self.spent = self.cost = 0.0
        self.soon, self.later = [], []
        monkeypatch.setattr(async_llm.time, "thread_time", lambda: self.spent)
        self.closed = False

    def is_closed(self):
        return self.closed

    def call_soon_threadsafe(self, function):
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.soon.append(function)

    def call_later(self, seconds, function):
        self.later.append((self.now + seconds, function))

    def run(self, seconds=0.0):
        """Call what is due now, then what is within so many seconds."""
        self._run_soon()
        end = self.now + seconds
        while self.later and min(self.later)[0] <= end:
            due = min(self.later, key=lambda pair: pair[0])
            self.later.remove(due)
            self.now = due[0]
            due[1]()
            self._run_soon()
        self.now = end

    def _run_soon(self):
        while self.soon:
            self.soon.pop(0)()


class Told(_Reader):
    """A reader whose generation is a count of tokens."""

    def __init__(self, mailbox, clock):
        self.output = self
        self.error, self.finished, self.tokens, self.seen = None, False, 0, []
        self.clock = clock
        super().__init__(mailbox, self, None)

    def step(self, last=False):
        self.tokens += 1
        self.finished = last
        self.tell()

    def read(self):
        self.clock.spent += self.clock.cost
        if self.tokens > self.num_seen:
            self.seen.append((self.clock.now, self.tokens))
            self.num_seen = self.tokens


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_cheap_deliveries_follow_each_step(clock):
    mailbox = Mailbox(clock, 0.5)
    reader = Told(mailbox, clock)
    clock.cost = 1e-4
    for _ in range(5):
        reader.step()
        clock.run(0.01)
    assert [tokens for _, tokens in reader.seen] == [1, 2, 3, 4, 5]
    assert not clock.later


def test_dear_deliveries_take_their_share_of_the_time_and_no_more(clock):
    mailbox = Mailbox(clock, 0.1)
    readers = [Told(mailbox, clock) for _ in range(8)]
    clock.cost = 2.5e-4  # 2 ms for all, so 18 ms of rest, of steps of 5
    for _ in range(100):
        for reader in readers:
            reader.step()
        clock.run(0.005)
    for reader in readers:
        assert [tokens for _, tokens in reader.seen][:3] == [1, 2, 5]
        assert len(reader.seen) in range(26, 31)  # 500 ms of 18
    assert clock.spent <= 0.12 * clock.now


def test_a_token_waits_for_a_bounded_time(clock):
    mailbox = Mailbox(clock, 0.01)
    reader = Told(mailbox, clock)
    clock.cost = 1.0
    reader.step()
    clock.run()
    reader.step()
    clock.run()  # and rests from here on
    reader.step()
    clock.run(MOST_REST_S)
    assert reader.seen[-1][1] == 3


def test_first_tokens_and_ends_wait_for_nothing(clock):
    mailbox = Mailbox(clock, 0.01)
    readers = [Told(mailbox, clock) for _ in range(3)]
    clock.cost = 1e-3
    for _ in range(2):
        readers[0].step()
        clock.run()
    for reader in readers:  # the first one's is a middle token, the others' are first ones
        reader.step()
    clock.run()
    assert [reader.num_seen for reader in readers] == [2, 1, 1]
    readers[0].step(last=True)
    readers[1].error = ValueError("it broke")
    readers[1].step()
    clock.run()
    assert [reader.num_seen for reader in readers] == [4, 2, 1]
    clock.run(1.0)
    assert readers[0].seen[-1][1] == 4
    assert len(readers[0].seen) == 3


def test_a_closed_event_loop_is_told_of_while_deliveries_rest(clock):
    mailbox = Mailbox(clock, 0.01)
    reader = Told(mailbox, clock)
    clock.cost = 1e-3
    for _ in range(2):
        reader.step()
        clock.run()
    assert mailbox._is_resting
    clock.closed = True
    with pytest.raises(RuntimeError):
        reader.step()


def test_nothing_is_left_behind_in_any_order(clock):
    draw = random.Random(7)
    for _ in range(300):
        mailbox = Mailbox(clock, draw.choice([0.01, 0.1, 0.5, 1.0]))
        readers = [Told(mailbox, clock) for _ in range(draw.randrange(1, 6))]
        for _ in range(draw.randrange(1, 40)):
            clock.cost = draw.choice([0.0, 1e-4, 1e-2])
            one = draw.choice(readers)
            if not one.finished:
                one.step(last=draw.random() < 0.05)
            if draw.random() < 0.5:
                clock.run(draw.choice([0.0, 1e-3, 1e-2]))
        clock.run(3 * MOST_REST_S)
        assert [r.num_seen for r in readers] == [r.tokens for r in readers]
        assert not clock.later
        assert not mailbox._told
        assert not mailbox._hurried


class GoneMeanwhile:
    """An event loop that ended: another thread forgets it while this one looks at it."""

    def __init__(self, mailboxes):
        self.mailboxes = mailboxes
        mailboxes[self] = None

    def is_closed(self):
        self.mailboxes.pop(self, None)
        return True


def test_event_loops_of_several_threads_may_come_and_go_at_once():
    engine = AsyncLLM(SimpleNamespace(tokenizer=None, config=None))
    for _ in range(2):
        GoneMeanwhile(engine._mailboxes)

    async def main():
        engine._mailbox()
        assert list(engine._mailboxes) == [asyncio.get_running_loop()]

    asyncio.run(main())


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"share must be above 0 and at most 1, got"):
        AsyncLLM(None, share=share)


def test_streams_that_share_deliveries_end_with_what_generate_returns(tmp_path, monkeypatch):
    """No step begins before readers have read what they were told, however busy the machine is;
    who rests does so until the end."""
    write_checkpoint(tmp_path, "llama")
    llm = LLM(tmp_path, device="cpu", num_blocks=200, block_size=4, max_num_seqs=16)
    wanted = llm.generate(TEXTS, GREEDY)
    monkeypatch.setattr(async_llm, "MOST_REST_S", 3600.0)
    step = llm.engine.step

    async def a_turn_of_all():
        for _ in range(5):  # a delivery, then the tasks that it wakes
            await asyncio.sleep(0)

    def step_after_readers():
        asyncio.run_coroutine_threadsafe(a_turn_of_all(), loop).result(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", step_after_readers)

    loop = None

    async def one(engine, text):
        seen = [output async for output in engine.generate(text, GREEDY)]
        for before, after in pairwise(seen):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
        return seen

    async def all_of(share):
        nonlocal loop
        loop = asyncio.get_running_loop()
        engine = AsyncLLM(llm, share=share)
        return await asyncio.gather(*(one(engine, text) for text in TEXTS))

    often, seldom = (asyncio.run(all_of(share)) for share in (1.0, 1e-9))
    for found in (often, seldom):
        for seen, want in zip(found, wanted, strict=True):
            assert seen[-1].finished
            assert seen[-1].outputs[0].text == want.outputs[0].text
            assert seen[-1].outputs[0].token_ids == want.outputs[0].token_ids
    assert all(len(seen) == GREEDY.max_tokens for seen in often)
    assert sum(map(len, seldom)) < sum(map(len, often))
    llm.close()
