"""EngineLoop: one thread for all callers, whatever fails, ends, forks or is let go of."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.engine.checkpoint import write_checkpoint
from tests.engine.test_engine import build_engine, expected_tokens, prompt_of
from tilewise.engine.llm import LLM
from tilewise.engine.loop import EngineLoop
from tilewise.engine.outputs import Generation
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.errors import EngineClosedError, RequestError

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TEXT_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Caller:
    """One request with what a caller of the loop does about it."""

    def __init__(self, name, prompt, params=GREEDY):
        self.generation = Generation(Request(name, prompt, params), None, None)
        self.ended = threading.Event()
        self.generation.on_end = self.ended.set

    def result(self):
        assert self.ended.wait(60)
        if self.generation.error is not None:
            raise self.generation.error
        return self.generation.output.outputs[0].token_ids


def new_scheduler():
    return Scheduler(64, 4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def engine(request):
    return build_engine(overlap=request.param)


@pytest.fixture
def loop(engine):
    loop = EngineLoop(engine, new_scheduler=new_scheduler)
    yield loop
    assert loop.close(timeout_s=60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """What the tests before these have left need not be looked at in every collection."""
    gc.collect()
    gc.freeze()


def make(directory, **settings):
    return LLM(directory, device="cpu", **{"num_blocks": 100, "block_size": 4, **settings})


def assert_idle(loop):
    loop.call(lambda: None)
    assert loop.num_live == 0
    assert not loop.engine.has_unfinished()
    assert loop.engine.stats().scheduler.blocks_used == 0
    loop.engine.scheduler.check_integrity()


def callers(count=5, params=GREEDY):
    return [Caller(str(i), prompt_of(5 + i, i), params) for i in range(count)]


def test_requests_of_many_callers_run_in_the_same_steps(loop):
    mine = callers()
    loop.submit(*(c.generation for c in mine[:3]))
    loop.submit(mine[3].generation)
    loop.submit(mine[4].generation)
    for i, caller in enumerate(mine):
        assert caller.result() == expected_tokens(prompt_of(5 + i, i), GREEDY)
    assert_idle(loop)
    widths = [e["num_sequences"] for e in loop.engine.trace() if e["kind"] == "schedule"]
    assert max(widths) >= 3
    assert 0 <= time.monotonic() - loop.last_step_time < 60


def test_an_idle_loop_uses_no_cpu(loop):
    assert loop.last_step_time is None
    before = loop.call(time.thread_time)
    time.sleep(0.3)
    assert loop.call(time.thread_time) - before < 0.01


def test_a_function_runs_between_two_steps_and_returns_or_raises(loop):
    assert loop.call(threading.current_thread).name == "tilewise-engine"
    assert not loop.is_own_thread
    assert loop.call(lambda: loop.is_own_thread)
    assert loop.call(lambda: loop.call(lambda: 7)) == 7
    assert loop.post(lambda: 8).result(timeout=60) == 8
    with pytest.raises(LookupError, match="nothing there"):
        loop.call(lambda: (_ for _ in ()).throw(LookupError("nothing there")))
    with pytest.raises(KeyboardInterrupt):
        loop.call(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert loop.is_alive


def test_a_paused_loop_takes_requests_and_begins_no_step(loop):
    [caller] = callers(1)
    loop.pause()
    loop.submit(caller.generation)
    assert loop.call(lambda: loop.num_live) == 1
    assert not caller.ended.wait(0.05)
    assert loop.last_step_time is None
    loop.resume()
    assert len(caller.result()) == 12
    assert_idle(loop)


def test_abort_ends_one_request_and_tells_its_caller(loop):
    mine = callers(3, SamplingParams(temperature=0.0, max_tokens=60))
    loop.pause()
    loop.submit(*(c.generation for c in mine))
    loop.abort("1")
    loop.abort("unknown")
    loop.resume()
    mine[1].result()
    assert mine[1].generation.output.outputs[0].finish_reason == "abort"
    assert [len(mine[i].result()) for i in (0, 2)] == [60, 60]
    assert_idle(loop)


def test_who_was_let_go_of_before_it_arrived_never_runs(loop):
    [caller] = callers(1)
    caller.generation.abort()
    loop.submit(caller.generation)
    assert caller.result() == []
    assert_idle(loop)
    assert loop.last_step_time is None


def test_what_the_engine_refuses_is_the_callers_error_alone(loop):
    mine = callers(2)
    long = Caller("long", prompt_of(200, 1))
    loop.pause()
    loop.submit(mine[0].generation, long.generation, mine[1].generation)
    again = Caller("0", prompt_of(4, 1))
    loop.submit(again.generation)
    loop.resume()
    with pytest.raises(RequestError, match="prompt must be at most"):
        long.result()
    with pytest.raises(RequestError, match="request_id must be unique"):
        again.result()
    assert [len(c.result()) for c in mine] == [12, 12]
    assert_idle(loop)


@pytest.mark.parametrize("kind", [LookupError, asyncio.CancelledError])
def test_a_callback_that_raises_ends_its_own_request(loop, kind):
    mine, calls = callers(3), []

    def on_change():
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            raise kind("the reader is gone")

    mine[1].generation.on_change = on_change
    loop.submit(*(c.generation for c in mine))
    with pytest.raises(kind, match="the reader is gone"):
        mine[1].result()
    for i in (0, 2):
        assert mine[i].result() == expected_tokens(prompt_of(5 + i, i), GREEDY)
    assert set(calls) == {"tilewise-engine"}
    assert_idle(loop)


def test_an_on_end_that_raises_hurts_nobody(loop):
    mine = callers(3)
    ended = mine[0].ended

    def fail():
        ended.set()
        raise LookupError("no one")

    mine[0].generation.on_end = fail
    loop.submit(*(c.generation for c in mine))
    assert [len(c.result()) for c in mine] == [12] * 3
    assert_idle(loop)


@pytest.mark.parametrize("error", [AssertionError("a table is torn"), KeyboardInterrupt("stop")])
def test_a_broken_scheduler_fails_all_each_with_its_own_copy_and_the_loop_goes_on(loop, error):
    mine, broken = callers(3), loop.engine.scheduler

    def fail(*args):
        raise error

    broken.update = fail
    loop.submit(*(c.generation for c in mine))
    caught = []
    for caller in mine:
        with pytest.raises(type(error), match=str(error)) as info:
            caller.result()
        caught.append(info.value)
    assert len({id(e) for e in caught}) == 3
    [caller] = callers(1)
    loop.submit(caller.generation)
    assert caller.result() == expected_tokens(prompt_of(5, 0), GREEDY)
    assert loop.engine.scheduler is not broken
    assert_idle(loop)


def test_who_was_late_when_a_scheduler_broke_may_come_again(loop):
    """The event of its deadline was on its way and belongs to nobody any more."""
    broken, now = loop.engine.scheduler, [0.0]
    broken.clock = lambda: now[0]
    [late] = callers(1)
    late.generation.request.deadline_s = 1.0

    def expire():
        broken.schedule = None  # which then fails
        now[0] = 2.0
        return type(broken).expire(broken)

    broken.expire = expire
    loop.submit(late.generation)
    with pytest.raises(TypeError):
        late.result()
    [again] = callers(1)
    assert again.generation.request.request_id == late.generation.request.request_id
    loop.submit(again.generation)
    assert again.result() == expected_tokens(prompt_of(5, 0), GREEDY)
    assert again.generation.output.outputs[0].finish_reason == "length"
    assert_idle(loop)


def test_who_is_late_ends_also_while_no_step_may_begin(loop):
    waiting, patient = callers(2)
    loop.pause()
    waiting.generation.request.deadline_s = 0.05
    loop.submit(waiting.generation, patient.generation)
    assert waiting.ended.wait(60)
    assert waiting.generation.output.outputs[0].finish_reason == "deadline"
    assert not patient.ended.is_set()
    assert not any(event["kind"] == "schedule" for event in loop.engine.trace())
    loop.resume()
    assert len(patient.result()) == 12
    assert_idle(loop)


def test_a_scheduler_that_breaks_again_at_once_ends_the_loop(engine):
    def breaking():
        made = new_scheduler()
        made.update = None
        return made

    loop = EngineLoop(engine, new_scheduler=breaking)
    engine.scheduler.update = None
    for _ in range(2):
        assert loop.is_alive
        [caller] = callers(1)
        loop.submit(caller.generation)
        with pytest.raises(TypeError):
            caller.result()
    with pytest.raises(EngineClosedError, match="the engine has failed"):
        loop.call(lambda: None)
    assert loop.num_restarts == 1
    assert loop.close(timeout_s=60)


def test_an_end_without_a_step_shows_nothing_of_a_new_scheduler(loop):
    def break_next():
        [caller] = callers(1)
        loop.submit(caller.generation)
        with pytest.raises(TypeError):
            caller.result()

    loop.engine.scheduler.update = None
    break_next()
    loop.pause()
    [late] = callers(1)
    late.generation.request.deadline_s = 0.01
    loop.submit(late.generation)
    assert late.ended.wait(60)
    loop.engine.scheduler.update = None
    loop.resume()
    break_next()
    with pytest.raises(EngineClosedError, match="the engine has failed"):
        loop.call(lambda: None)
    assert loop.num_restarts == 1


def test_without_a_new_scheduler_a_broken_one_ends_the_loop(engine):
    loop = EngineLoop(engine)
    engine.scheduler.update = None
    mine = callers(2)
    loop.submit(*(c.generation for c in mine))
    for caller in mine:
        with pytest.raises(TypeError):
            caller.result()
    with pytest.raises(EngineClosedError, match="scheduler is broken"):
        loop.call(lambda: time.sleep(0))
    assert loop.close(timeout_s=60)
    assert not loop.is_alive


def test_what_makes_the_engine_may_fail():
    def fail():
        raise LookupError("no such engine")

    with pytest.raises(LookupError, match="no such engine"):
        EngineLoop(fail)
    made = EngineLoop(lambda: build_engine(), new_scheduler=new_scheduler)
    [caller] = callers(1)
    made.submit(caller.generation)
    assert len(caller.result()) == 12
    assert made.close(timeout_s=60)


def test_a_closed_loop_fails_what_is_unfinished_and_takes_no_more(loop):
    mine = callers(3, SamplingParams(temperature=0.0, max_tokens=60))
    loop.pause()
    loop.submit(*(c.generation for c in mine))
    assert loop.call(lambda: loop.num_live) == 3
    assert loop.close(timeout_s=60)
    for caller in mine:
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            caller.result()
    assert loop.engine.stats().scheduler.blocks_used == 0
    assert not loop.is_alive
    [caller] = callers(1)
    for action in (lambda: loop.submit(caller.generation), lambda: loop.call(int), loop.pause):
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            action()
    loop.abort("0")
    loop.drop([caller.generation])
    assert loop.close()


def test_close_does_not_wait_for_ever_for_a_step_that_hangs(engine):
    loop, hang, begun = EngineLoop(engine), threading.Event(), threading.Event()
    whole = engine.runner.submit

    def hanging(batch):
        begun.set()
        assert hang.wait(60)
        return whole(batch)

    engine.runner.submit = hanging
    [caller] = callers(1)
    loop.submit(caller.generation)
    assert begun.wait(60)
    assert not loop.close(timeout_s=0.05)
    hang.set()
    assert loop.close(timeout_s=float("inf"))
    with pytest.raises(EngineClosedError):
        caller.result()


def test_a_loop_that_nobody_holds_ends_its_thread_and_lets_go_of_the_engine(engine):
    loop = EngineLoop(engine, new_scheduler=new_scheduler)
    [thread] = [loop.call(threading.current_thread)]
    [caller] = callers(1)
    loop.submit(caller.generation)
    caller.result()
    held = weakref.ref(engine.scheduler)
    engine.scheduler = None
    del loop
    thread.join(60)
    assert not thread.is_alive()
    assert held() is None


def leave_a_stream(llm):
    deltas = llm.stream("the", ENDLESS)
    next(deltas)
    deltas.close()


@pytest.mark.parametrize(
    "last",
    [
        lambda llm: llm.generate("the", TEXT_GREEDY),
        leave_a_stream,
        lambda llm: llm.loop.abort("unknown"),
        lambda llm: llm.loop.pause(),
    ],
    ids=["generate", "stream", "abort", "pause"],
)
def test_an_llm_that_nobody_holds_is_freed_with_its_thread(directory, last):
    llm = make(directory)
    thread = llm.loop.call(threading.current_thread)
    last(llm)
    parts = [weakref.ref(x) for x in (llm, llm.loop, llm.engine, llm.model)]
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert [part() for part in parts] == [None] * 4


def test_an_llm_that_a_stream_uses_lives_until_the_stream_ends(directory):
    llm = make(directory)
    wanted = llm.generate("the quick", TEXT_GREEDY)[0].outputs[0].text
    deltas = llm.stream("the quick", TEXT_GREEDY)
    text = next(deltas)
    thread = llm.loop.call(threading.current_thread)
    del llm
    gc.collect()
    assert text + "".join(deltas) == wanted
    del deltas
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_stream_that_is_collected_within_a_step_is_dropped_after_it(directory, monkeypatch):
    llm = make(directory)
    streams, begun, seen = [llm.stream("the quick", ENDLESS)], threading.Event(), []
    whole = llm.engine.scheduler.schedule

    def collecting():
        seen.append(llm.engine.has_unfinished())
        if len(seen) == 9:
            assert begun.wait(60)
            streams.clear()  # the last reference: its iterator is closed here, inside of the step
        return whole()

    monkeypatch.setattr(llm.engine.scheduler, "schedule", collecting)
    next(streams[0])
    begun.set()
    deadline = time.monotonic() + 60
    while llm.loop.num_live and time.monotonic() < deadline:
        time.sleep(0.001)
    assert seen == [True] * 9
    assert_idle(llm.loop)


def test_llm_close_ends_it(directory):
    llm = make(directory)
    assert llm.close(timeout_s=60)
    with pytest.raises(EngineClosedError, match="the engine was closed"):
        llm.generate("the", TEXT_GREEDY)
    with pytest.raises(EngineClosedError, match="the engine was closed"):
        next(llm.stream("the", TEXT_GREEDY))


def test_the_engines_thread_must_not_wait_for_itself(directory):
    llm = make(directory)
    with pytest.raises(RuntimeError, match="must not wait for requests of its own"):
        llm.loop.call(lambda: llm.generate("the", TEXT_GREEDY))


def test_the_engine_uses_the_threads_that_torch_has_where_the_llm_was_made(directory):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        llm = make(directory)
        assert llm.loop.call(torch.get_num_threads) == 2
        torch.set_num_threads(1)
        llm.generate("the", TEXT_GREEDY)
        assert llm.loop.call(torch.get_num_threads) == 1
        torch.set_num_threads(2)
        with ThreadPoolExecutor(1) as pool:  # of another thread's number nothing is known
            pool.submit(llm.generate, "the", TEXT_GREEDY).result()
        assert llm.loop.call(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(os.name == "nt", reason="needs pthread_kill")
def test_an_interrupt_during_a_step_ends_the_call_that_it_interrupts(directory, monkeypatch):
    llm = make(directory)
    wanted = llm.generate("once upon", ENDLESS)[0].outputs
    whole, steps = llm.engine.runner.forward, []
    both = threading.Event()

    def interrupting(inputs):
        if len(inputs.ctx.seqlens_k) == 2:
            steps.append(1)
            if len(steps) == 3:
                both.set()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.05)
        return whole(inputs)

    def resume():
        while llm.loop.call(lambda: llm.loop.num_live) < 2:
            time.sleep(0.001)
        llm.loop.resume()

    monkeypatch.setattr(llm.engine.runner, "forward", interrupting)
    with ThreadPoolExecutor(2) as pool:
        llm.loop.pause()
        other = pool.submit(llm.generate, "once upon", ENDLESS)
        while not llm.loop.call(lambda: llm.loop.num_live):
            time.sleep(0.001)
        resuming = pool.submit(resume)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("the quick", ENDLESS)
        resuming.result(timeout=60)
        assert both.is_set()
        assert llm.loop.num_live <= 1
        assert other.result(timeout=60)[0].outputs == wanted
    assert_idle(llm.loop)
    assert llm.generate("once upon", ENDLESS)[0].outputs == wanted


def run(code, directory, device="cpu", *, is_warm=False, **kwargs):
    """Run code behind an engine in a new interpreter, or in one that has imported torch."""
    code = (
        f"import os, sys, threading, time\nfrom tilewise import LLM, SamplingParams\n"
        f"llm = LLM({str(directory)!r}, device={device!r}, num_blocks=100, block_size=4)\n"
        f"params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)\n{code}"
    )
    if is_warm:
        command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with warm.Popen(command, text=True, cwd=ROOT, **pipes, **kwargs) as process:
            said = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, *said)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, cwd=ROOT, **kwargs,
    )  # fmt: skip


# Each is a process that loads torch, so what may hold an interpreter back comes together.
@pytest.mark.parametrize(
    "code",
    [
        "stream = llm.stream('the', params); print(len(next(stream)) > 0)",
        # the engine runs on: for a thread that waits for ever, and for nobody
        "threading.Thread(target=llm.generate, args=('the',), daemon=True).start()\n"
        "llm.loop.submit(llm.prepare('the', params)); print(True)",
        "print(True, flush=True); llm.generate('the', params); sys.exit(0)",
    ],
    ids=["a stream is open", "the engine runs", "the engine is idle"],
)
def test_the_interpreter_ends_whatever_the_engine_is_doing(directory, code):
    done = run(code, directory)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# Every day the harder of two: the parent's engine runs when it is forked.
@pytest.mark.parametrize("during", [pytest.param("idle", marks=pytest.mark.slow), "a stream"])
def test_a_forked_child_has_an_engine_of_its_own(directory, during):
    stream = "stream = llm.stream('the', params); next(stream)\n" if during == "a stream" else ""
    code = f"""
[wanted] = llm.generate('once upon', params)
{stream}
child = os.fork()
if child == 0:
    [output] = llm.generate('once upon', params)
    used = llm.engine.stats().scheduler.blocks_used
    os._exit(0 if output.outputs == wanted.outputs and used == 0 else 1)
[output] = llm.generate('once upon', params)
assert output.outputs == wanted.outputs
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    done = run(code, directory, is_warm=True)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["0"]), done.stderr


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_fails_once_is_made_good_by_its_halves(directory, monkeypatch):
    llm = LLM(directory, device="cuda", dtype="float32", num_blocks=100, block_size=4)
    prompts = ["the quick", "once upon", "a small cat"]
    wanted = [o.outputs for o in llm.generate(prompts, TEXT_GREEDY)]
    submit, count = llm.engine.runner.submit, []

    def failing(batch):
        count.append(len(batch.sequences))
        if len(count) in (2, 9):
            raise RuntimeError("out of luck")
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", failing)
    outputs = llm.generate(prompts, TEXT_GREEDY)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [
        [c.token_ids for c in each] for each in wanted
    ]
    assert min(count) < 3
    assert_idle(llm.loop)


@pytest.mark.gpu
def test_an_error_that_a_gpu_keeps_ends_the_loop_with_the_reason(directory):
    code = """
import torch
from tilewise import DeviceLostError
submit, count = llm.engine.runner.submit, []

def breaking(batch):
    count.append(1)
    if len(count) == 4:  # an index out of its range stops the device for this process
        torch.zeros(1, device="cuda").index_select(0, torch.tensor([5], device="cuda"))
        torch.cuda.synchronize()
    return submit(batch)

llm.engine.runner.submit = breaking
for _ in range(2):
    try:
        llm.generate(["the quick", "once"], params)
    except DeviceLostError as error:
        print("device is lost" in str(error), flush=True)
print(llm.loop.is_alive, flush=True)
os._exit(0)
"""
    done = run(code, directory, device="cuda")
    assert done.stdout.split() == ["True", "True", "False"], done.stderr
