"""AsyncLLM: what LLM gives, as async iterators; whoever leaves holds nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests.engine.checkpoint import VOCAB, write_checkpoint
from tilewise.engine.async_llm import LONG_PROMPT, AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.errors import EngineClosedError, RequestError

STEPS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
TEXTS = ["once upon", "the quick", "a small cat", "the lazy dog"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(directory, device="cpu", num_blocks=200, block_size=4, max_num_seqs=16)


@pytest.fixture
def engine(llm):
    return AsyncLLM(llm)


def assert_idle(llm):
    llm.loop.call(lambda: None)  # after what was asked for before
    assert llm.loop.num_live == 0
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().scheduler.blocks_used == 0
    llm.engine.scheduler.check_integrity()


async def last(outputs):
    found = None
    async for output in outputs:
        found = output
    return found


def test_outputs_grow_to_what_generate_returns(llm, engine):
    wanted = llm.generate(TEXTS, GREEDY)

    async def one(text):
        seen = [output async for output in engine.generate(text, GREEDY)]
        for before, after in pairwise(seen):
            [a], [b] = before.outputs, after.outputs
            assert len(a.token_ids) < len(b.token_ids) or after.finished
            assert b.token_ids[: len(a.token_ids)] == a.token_ids
            assert b.text.startswith(a.text)
            assert not before.finished
        return seen[-1]

    async def main():
        return await asyncio.gather(*map(one, TEXTS))

    for output, want in zip(asyncio.run(main()), wanted, strict=True):
        assert output.finished
        assert output.outputs == want.outputs
        assert output.prompt == want.prompt
    assert_idle(llm)


def test_a_slow_reader_gets_several_steps_in_one_output(llm, engine):
    async def main():
        seen = []
        async for output in engine.generate(TEXTS[0], GREEDY):
            seen.append(len(output.outputs[0].token_ids))
            while llm.loop.num_live:
                await asyncio.sleep(0.001)
        return seen

    seen = asyncio.run(main())
    assert len(seen) <= 2  # one where all was there before the reader had looked once
    assert seen[-1] == STEPS


def test_an_output_is_the_readers_own(llm, engine):
    async def main():
        outputs = engine.generate(TEXTS[0], SamplingParams(max_tokens=60, logprobs=2, seed=1))
        first = await anext(outputs)
        counts = len(first.outputs[0].token_ids), len(first.outputs[0].logprobs)
        rest = await last(outputs) or first  # a slow reader finds all in the first
        assert (len(first.outputs[0].token_ids), len(first.outputs[0].logprobs)) == counts
        assert rest.outputs[0].logprobs[: counts[0]] == first.outputs[0].logprobs

    asyncio.run(main())


def test_samples_stop_strings_and_long_prompts_are_those_of_generate(llm, engine):
    many = SamplingParams(n=3, seed=5, max_tokens=8)
    [whole] = llm.generate(TEXTS[1], GREEDY)
    stop = SamplingParams(temperature=0.0, max_tokens=STEPS, stop=whole.outputs[0].text[3:5])
    cases = [(TEXTS[0], many), (TEXTS[1], stop), (" ".join(["the"] * 200), GREEDY)]

    async def main():
        return [await last(engine.generate(text, params)) for text, params in cases]

    for output, (text, params) in zip(asyncio.run(main()), cases, strict=True):
        assert output.outputs == llm.generate(text, params)[0].outputs
    assert_idle(llm)


def test_a_very_long_prompt_is_refused_like_a_short_one(llm, engine):
    async def main():
        for bad in ("the " * LONG_PROMPT, "", {"prompt_token_ids": [VOCAB]}, 7):
            with pytest.raises(RequestError):
                await anext(engine.generate(bad, GREEDY))
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
            await anext(engine.generate("the", {"max_tokens": 3}))

    asyncio.run(main())
    assert_idle(llm)


@pytest.mark.parametrize("way", ["aclose", "cancel", "abort", "break"])
def test_who_leaves_aborts_the_request_and_no_other(llm, engine, way):
    [wanted] = llm.generate(TEXTS[1], LONG)

    async def read(outputs, begun):
        found = None
        async for output in outputs:
            found = output
            begun.set()
        return found

    async def main():
        begun = asyncio.Event()
        other = asyncio.create_task(last(engine.generate(TEXTS[1], LONG)))
        outputs = engine.generate(TEXTS[0], LONG, request_id="mine")
        if way in ("cancel", "abort"):
            task = asyncio.create_task(read(outputs, begun))
            await begun.wait()
            if way == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await engine.abort("mine")
                output = await task
                assert output.finished
                assert output.outputs[0].finish_reason in ("abort", "length")
        else:
            await anext(outputs)
            await outputs.aclose()
        return await other

    assert asyncio.run(main()).outputs == wanted.outputs
    assert_idle(llm)


def test_an_id_that_is_taken_is_refused(llm, engine):
    async def main():
        llm.loop.pause()
        first = asyncio.create_task(last(engine.generate(TEXTS[0], GREEDY, request_id="same")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request_id must be unique"):
            await anext(engine.generate(TEXTS[1], GREEDY, request_id="same"))
        llm.loop.resume()
        return await first

    assert asyncio.run(main()).outputs == llm.generate(TEXTS[0], GREEDY)[0].outputs
    assert_idle(llm)


def test_who_chose_the_id_of_another_does_not_end_it(llm, engine):
    async def main():
        number = int(llm.generate("once", GREEDY)[0].request_id.removeprefix("request-"))
        first = engine.generate(TEXTS[0], LONG, request_id=f"request-{number + 1}")
        await anext(first)
        [second] = await asyncio.to_thread(llm.generate, TEXTS[1], GREEDY)
        assert second.request_id == f"request-{number + 2}"
        await first.aclose()

    asyncio.run(main())
    assert_idle(llm)


def test_what_is_no_argument_is_named(llm, engine):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 'x'"):
        AsyncLLM(llm, share="x")
    with pytest.raises(TypeError, match="sink must be a function or None, got 5"):
        engine.generate("once", GREEDY, sink=5)
    for params in ({}, 0, "greedy"):
        with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got"):
            asyncio.run(last(engine.generate("once", params)))


def test_an_error_comes_after_the_tokens_before_it(llm, engine, monkeypatch):
    make_detokenizer = type(llm.tokenizer).detokenizer

    def breaking(self, prompt):
        whole = make_detokenizer(self, prompt)
        push, pushed = whole.push, []

        def fail(token):
            pushed.append(token)
            if len(pushed) == 4:
                raise LookupError("no such letter")
            return push(token)

        monkeypatch.setattr(whole, "push", fail)
        return whole

    monkeypatch.setattr(type(llm.tokenizer), "detokenizer", breaking)

    async def main():
        seen = []
        try:
            async for output in engine.generate(TEXTS[0], GREEDY):
                assert not output.finished
                seen.append(len(output.outputs[0].token_ids))
        except LookupError as error:
            seen.append(str(error))
        return seen

    assert asyncio.run(main())[-2:] == [4, "no such letter"]
    assert_idle(llm)


def test_a_reader_whose_event_loop_is_gone_ends_its_request(llm, engine):
    async def main():
        outputs = engine.generate(TEXTS[0], LONG)
        await anext(outputs)
        llm.loop.pause()
        return outputs

    # Without the shutdown of asyncio.run, which would close the iterator.
    loop = asyncio.new_event_loop()
    outputs = loop.run_until_complete(main())
    loop.close()
    llm.loop.resume()
    [other] = llm.generate(TEXTS[1], LONG)
    assert len(other.outputs[0].token_ids) > STEPS
    assert_idle(llm)
    with pytest.raises(StopIteration):  # a closed generator needs no event loop
        outputs.aclose().send(None)


def test_a_delivery_that_a_closed_event_loop_never_made_ends_the_request(llm, engine):
    loop = asyncio.new_event_loop()
    outputs = engine.generate(TEXTS[0], LONG)
    loop.run_until_complete(anext(outputs))
    count = llm.engine.stats().decode_tokens
    while llm.engine.stats().decode_tokens < count + STEPS:  # steps of which a delivery is due
        llm.loop.call(lambda: None)
    loop.close()
    count = llm.engine.stats().decode_tokens
    while llm.loop.num_live:
        llm.loop.call(lambda: None)
    assert llm.engine.stats().decode_tokens - count < STEPS
    assert_idle(llm)
    with pytest.raises(StopIteration):
        outputs.aclose().send(None)


def test_a_sink_that_raises_what_is_no_exception_ends_its_own_reader(llm, engine):
    """A future that was cancelled raises CancelledError, which Exception does not cover."""

    def sink(output):
        raise asyncio.CancelledError("of a future")

    async def main():
        good = asyncio.create_task(last(engine.generate(TEXTS[1], GREEDY, sink=lambda _: True)))
        bad = [
            asyncio.create_task(last(engine.generate(text, LONG, sink=sink))) for text in TEXTS[:2]
        ]
        await asyncio.wait([good, *bad], timeout=60)
        assert all(task.cancelled() for task in bad)
        assert len((await good).outputs[0].token_ids) == STEPS

    asyncio.run(main())
    assert_idle(llm)


def test_aclose_ends_a_request_whose_id_an_unread_one_had(llm):
    engine = AsyncLLM(llm)

    async def main():
        read = engine.generate(TEXTS[0], GREEDY, request_id="again")
        await anext(read)
        while llm.loop.num_live:
            await asyncio.sleep(0.001)
        outputs = engine.generate(TEXTS[1], LONG, request_id="again")
        await anext(outputs)
        await engine.aclose()
        assert llm.loop.num_live == 0
        for iterator in (read, outputs):
            await iterator.aclose()

    asyncio.run(main())
    assert_idle(llm)


def test_a_request_that_is_prepared_while_it_closes_is_refused(llm, monkeypatch):
    engine, closed, prepare = AsyncLLM(llm), threading.Event(), llm.prepare

    def slowly(*args, **asked):
        assert closed.wait(60)
        return prepare("short", *args[1:], **asked)

    monkeypatch.setattr(llm, "prepare", slowly)

    async def main():
        outputs = engine.generate("a" * (LONG_PROMPT + 1), GREEDY)
        task = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0.01)
        await engine.aclose()
        closed.set()
        with pytest.raises(EngineClosedError, match="AsyncLLM was closed"):
            await task

    asyncio.run(main())
    assert_idle(llm)


def test_aclose_ends_its_own_requests_and_takes_no_more(llm):
    engine, other = AsyncLLM(llm), AsyncLLM(llm)

    async def main():
        mine = [asyncio.create_task(last(engine.generate(t, LONG))) for t in TEXTS[:2]]
        alien = asyncio.create_task(last(other.generate(TEXTS[2], GREEDY)))
        await asyncio.sleep(0.01)
        await engine.aclose()
        reasons = {o.outputs[0].finish_reason for o in await asyncio.gather(*mine)}
        assert reasons <= {"abort", "length"}
        assert (await alien).outputs[0].finish_reason == "length"
        with pytest.raises(EngineClosedError, match="AsyncLLM was closed"):
            await anext(engine.generate(TEXTS[0], GREEDY))
        await engine.aclose()
        assert engine.stats().scheduler.num_blocks == 200
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert_idle(llm)


def test_nobody_looks_at_the_tables_while_a_reset_changes_them(llm, engine, monkeypatch):
    scheduler, others = llm.engine.scheduler, []

    def reset():
        with ThreadPoolExecutor(1) as pool:  # as who asks for a picture, on another thread
            others.append(pool.submit(llm.engine.lock.acquire, False).result())
        return True

    monkeypatch.setattr(scheduler, "reset_prefix_cache", reset)
    assert llm.reset_prefix_cache()
    assert asyncio.run(engine.reset_prefix_cache())
    assert others == [False, False]


def test_a_closed_engine_tells_every_reader(directory):
    llm = LLM(directory, device="cpu", num_blocks=100, block_size=4)
    engine = AsyncLLM(llm)

    async def main():
        llm.loop.pause()
        tasks = [asyncio.create_task(last(engine.generate(t, LONG))) for t in TEXTS]
        await asyncio.sleep(0)
        assert llm.close(timeout_s=60)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineClosedError)
        with pytest.raises(EngineClosedError):
            await anext(engine.generate(TEXTS[0], GREEDY))
        await engine.abort("unknown")
        await engine.aclose()

    asyncio.run(main())
    assert llm.engine.stats().scheduler.blocks_used == 0


def test_threads_and_a_thousand_tasks_come_stall_cancel_and_go(llm):
    engine = AsyncLLM(llm)
    wanted = [llm.generate(text, GREEDY)[0].outputs for text in TEXTS]
    ends, stop = {"whole": 0, "cancelled": 0, "left": 0, "aborted": 0}, threading.Event()

    def caller(number):
        draw = random.Random(number)
        served = 0
        while not stop.is_set() or not served:
            which = draw.randrange(len(TEXTS))
            if draw.random() < 0.5:
                assert llm.generate(TEXTS[which], GREEDY)[0].outputs == wanted[which]
            else:
                deltas = llm.stream(TEXTS[which], GREEDY)
                next(deltas)
                if draw.random() < 0.5:
                    deltas.close()
                else:
                    list(deltas)
            served += 1
        return served

    async def task(number):
        draw = random.Random(number)
        await asyncio.sleep(draw.random())
        which, way = draw.randrange(len(TEXTS)), draw.random()
        name = f"task-{number}"
        outputs = engine.generate(TEXTS[which], GREEDY, request_id=name)
        if way < 0.4:
            assert (await last(outputs)).outputs == wanted[which]
            ends["whole"] += 1
        elif way < 0.6:
            reading = asyncio.create_task(last(outputs))
            await asyncio.sleep(draw.random() * 0.05)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            ends["cancelled"] += 1
        elif way < 0.8:
            await anext(outputs)
            await asyncio.sleep(draw.random() * 0.1)  # it stalls, and the engine does not
            await outputs.aclose()
            ends["left"] += 1
        else:
            reading = asyncio.create_task(last(outputs))
            await asyncio.sleep(0)
            await engine.abort(name)
            output = await reading
            assert output.outputs[0].finish_reason in ("abort", "length")
            ends["aborted"] += 1

    async def main():
        await asyncio.gather(*map(task, range(1000)))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    with ThreadPoolExecutor(48) as pool:
        callers = [pool.submit(caller, i) for i in range(48)]
        try:
            asyncio.run(main())
        finally:
            stop.set()
        assert all(each.result(timeout=120) for each in callers)
    assert all(count > 100 for count in ends.values()), ends
    assert_idle(llm)
    assert not engine._live
