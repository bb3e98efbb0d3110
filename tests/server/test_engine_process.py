"""An engine in a process of its own does what one in the server's does; both end together."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from tests import warm
from tests.engine.test_deliveries import Clock
from tests.server.serving import serving, wait_for
from tilewise.engine import async_llm
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.errors import CheckpointError, EngineClosedError, RequestError
from tilewise.server import garbage
from tilewise.server.embeddings import embeddings_router
from tilewise.server.engine_process import host as process_host
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process import wire
from tilewise.server.engine_process.host import LOOK_S, Host
from tilewise.server.engine_process.remote import RemoteEngine
from tilewise.server.live import live_router
from tilewise.server.routes import admin_router

SETTINGS = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 8}
PROMPT = "Once upon a time there was a little dog."


@pytest.fixture(scope="module", autouse=True)
def warm_engines():
    """Start engines with torch imported; those of the command are new interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_remote, "subprocess", warm)
        yield


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", **SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def remote():
    made = RemoteEngine("story", SETTINGS)
    yield made
    assert made.close(5.0)
    assert made._process.returncode == 0


@pytest.fixture(scope="module")
def running(remote):
    def routers(service):
        return [admin_router(service), embeddings_router(service), live_router(service)]

    with serving(remote, loop=remote, routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def near(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=lambda s: [embeddings_router(s)]) as server:
        yield server


def ask(running, path="/v1/completions", **body):
    content = {"prompt": PROMPT, "max_tokens": 24, **body} if path == "/v1/completions" else body
    return httpx.post(f"{running.url}{path}", json=content, timeout=60)


def without_names(answer):
    return {name: answer[name] for name in ("choices", "usage")}


FIELDS = {
    "greedy": {"temperature": 0},
    "samples": {"n": 3, "seed": 5, "return_token_ids": True},
    "log-probabilities": {"logprobs": 3, "seed": 1, "prompt_logprobs": 2},
    "stop": {"seed": 2, "stop": [" the", "."], "include_stop_str_in_output": True},
    "best of": {"seed": 3, "n": 2, "best_of": 4},
    "beams": {"use_beam_search": True, "n": 2, "best_of": 3, "logprobs": 1},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 7},
    "biases": {"seed": 4, "logit_bias": {"300": 3.0}, "presence_penalty": 0.5, "min_tokens": 4},
    "several prompts": {"prompt": ["A dog", [5, 6, 7]], "seed": 6, "echo": True},
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_means_what_it_means_in_one_process(running, near, name):
    fields = FIELDS[name]
    near_by, far = ask(near, **fields), ask(running, **fields)
    assert near_by.status_code == far.status_code == 200, far.text
    wanted = without_names(near_by.json())
    found = without_names(far.json())
    for one in (wanted, found):
        one["usage"].pop("prompt_tokens_details")  # each has a cache of its own
    assert found == wanted
    text: dict[int, str] = {}
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", timeout=60,
        json={"prompt": PROMPT, "max_tokens": 24, **fields, "stream": True},
    ) as answer:  # fmt: skip
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text[choice["index"]] = text.get(choice["index"], "") + choice["text"]
    assert text == {choice["index"]: choice["text"] for choice in wanted["choices"]}


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}], ids=str)
def test_a_stream_tells_what_its_prompt_has_as_in_one_process(running, near, more):
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "n": 2, **more, "stream": True}
    told = []
    for server in (near, running):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[int, list] = {}
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    logprobs = choice["logprobs"] or {"token_logprobs": []}
                    told_of = found.setdefault(choice["index"], [])
                    told_of += logprobs["token_logprobs"] + choice.get("prompt_logprobs", [])
        told.append(found)
    assert told[0] == told[1]
    assert all(one[0] is None and len(one) > 6 for one in told[1].values())


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40])
def test_integers_of_any_size_mean_what_they_mean_in_one_process(running, near, remote, number):
    for fields in ({"seed": number}, {"priority": number}, {"stop_token_ids": [abs(number)]}):
        near_by, far = (
            ask(server, temperature=1.5, **{"seed": 1, **fields}) for server in (near, running)
        )
        assert near_by.status_code == far.status_code, far.text
        if far.status_code == 200:
            assert far.json()["choices"] == near_by.json()["choices"], fields
        else:
            assert far.json() == near_by.json()
    assert httpx.get(f"{running.url}/v1/trace", params={"since": number}).status_code == 200
    assert not remote._pending


def test_embeddings_are_the_same(running, near):
    asked = {"path": "/v1/embeddings", "input": [PROMPT, "A cat"]}
    near_by, far = ask(near, **asked).json(), ask(running, **asked).json()
    assert far["data"] == near_by["data"]
    size = len(far["data"][0]["embedding"])
    assert ask(running, **asked, dimensions=size).json()["data"] == far["data"]
    assert ask(running, **asked, dimensions=size - 1).status_code == 400


def test_what_is_wrong_is_told_as_in_one_process(running):
    for body, status in (
        ({"prompt": [5] * 5000}, 400),
        ({"structured_outputs": {"regex": "("}}, 400),
        ({"logit_bias": {"99999": 1.0}}, 400),
        ({"max_tokens": 1000, "prompt": [5] * 1000}, 200),
    ):
        answer = ask(running, **body)
        assert answer.status_code == status, answer.text


def test_the_engine_is_asked_across(running, remote):
    assert list(remote.start_seconds)[:1] == ["weights loaded"]
    assert min(remote.start_seconds.values()) > 0
    assert ask(running, max_tokens=2).status_code == 200
    stats = remote.stats()
    assert stats.scheduler.num_blocks == 64
    assert stats.scheduler.step_tokens.counts
    assert "tilewise:num_requests_running" in httpx.get(f"{running.url}/metrics").text
    events = httpx.get(f"{running.url}/v1/trace?limit=10000").json()["data"]
    assert {"arrive", "admit", "finish"} <= {event["kind"] for event in events}
    assert remote.picture()["num_blocks"] == 64
    assert httpx.get(f"{running.url}/v1/queue").json()["data"] == []
    assert remote.explain("nobody")["state"] == "unknown"
    assert httpx.post(f"{running.url}/reset_prefix_cache").json() == {"reset": True}
    assert httpx.post(f"{running.url}/pause").status_code == 200
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert httpx.post(f"{running.url}/resume").status_code == 200
    assert remote.last_step_time is not None


def test_steps_without_a_token_are_told_of():
    """As those of a long prompt are: the engine would seem to hang."""
    ours, stream = socket.socketpair()
    our_calls, calls = socket.socketpair()
    loop = SimpleNamespace(is_alive=True, last_step_time=None, num_restarts=0)
    host = Host(SimpleNamespace(loop=loop, close=lambda _: True), stream, calls)
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        ours.settimeout(60)
        for seconds in (1.5, 2.5):
            loop.last_step_time = seconds
            news = wire.msgspec.msgpack.decode(wire.receive(ours), type=wire.News)
            assert (news.last_step_time, news.deltas) == (seconds, [])
    finally:
        ours.close()
        our_calls.close()
        thread.join(10)
        assert not thread.is_alive()
        time.sleep(2 * LOOK_S)  # for the thread that sends
        stream.close()
        calls.close()


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_old_circles_of_the_engines_process_go_while_no_request_is_there(monkeypatch, thresholds):
    gc.set_threshold(700, 10, garbage.NEVER)
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)
    monkeypatch.setattr(garbage, "EVERY_S", 0.0)
    pairs = [socket.socketpair() for _ in range(2)]
    loop = SimpleNamespace(is_alive=True, last_step_time=None, num_restarts=0)
    host = Host(SimpleNamespace(loop=loop, close=lambda _: True), *(theirs for _, theirs in pairs))
    host._entries[1], gone = None, []

    class Circle:
        def __init__(self):
            self.own = self

        def __del__(self):
            gone.append(not host._entries)

    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        circle = Circle()
        gc.collect()  # it is of the oldest now, which only a collection of all looks at
        del circle
        for _ in range(20):
            gc.collect(0)  # as when requests come and go
            time.sleep(0.002)
        assert not gone
        host._entries.clear()
        wait_for(lambda: gc.collect(0) is not None and gone)
        assert gone == [True]
    finally:
        for ours, _ in pairs:
            ours.close()
        thread.join(10)
        assert not thread.is_alive()
        time.sleep(2 * LOOK_S)  # for the thread that sends
        for _, theirs in pairs:
            theirs.close()


def test_python_collects_young_objects_only_in_the_engines_process(monkeypatch, thresholds):
    """What the process does once the engine is made, without an engine and a process."""
    gc.set_threshold(700, 10, 10)

    @dataclasses.dataclass
    class Limits:
        max_num_seqs: int = 1

    class Engine:
        def __init__(self, *_, **settings):
            self.engine = SimpleNamespace(scheduler=SimpleNamespace(limits=Limits()))
            self.config = SimpleNamespace(vocab_size=1, hidden_size=1)
            self.devices, self.start_seconds = ["cpu"], {}

    class Served:
        def __init__(self, _, *sockets):
            kept.extend(sockets)

        def run(self):
            seen.append((gc.get_threshold(), gc.get_freeze_count() > 0))

    class EndedError(Exception):
        pass

    def end(_):
        raise EndedError

    seen, kept = [], []
    (ours, stream), (our_calls, calls) = socket.socketpair(), socket.socketpair()
    for name, fake in (("LLM", Engine), ("warm_up", lambda _: None), ("Host", Served)):
        monkeypatch.setattr(process_host, name, fake)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", end)
    our_calls.sendall(wire.frame(["story", {}]))
    with ours, our_calls:
        with pytest.raises(EndedError):
            process_host.main(stream.detach(), calls.detach())
        assert msgspec.msgpack.decode(wire.receive(our_calls))[0] is True
    for one in kept:
        one.close()
    assert seen == [((700, garbage.YOUNGEST, garbage.NEVER), True)]


def test_tokens_wait_while_deliveries_rest_and_first_ones_and_ends_do_not(monkeypatch):
    clock = Clock(monkeypatch)
    engine = object.__new__(RemoteEngine)  # without its process
    engine._mailbox, engine._buffer = async_llm.Mailbox(clock, 0.01), bytearray()
    engine._decode, engine._pending = msgspec.msgpack.Decoder(wire.News | wire.End).decode, {}
    seen: dict[int, list[str]] = {1: [], 2: []}

    def sink(number):
        def take(output):
            clock.spent += 1e-3  # so that the next one waits for 0.1 s
            seen[number].append(output.outputs[0].text)
            return True

        return take

    def come(number, text):
        news = [wire.Delta(number, 0, [wire.Choice(0, [5], text, None, None, None, None)])]
        engine.data_received(wire.frame(wire.News(1.0, 0, news)))

    for number in seen:
        output = RequestOutput("x", None, [1], [CompletionOutput(0)], RequestMetrics(0.0))
        engine._pending[number] = process_remote._Pending(output, sink(number))
    come(1, "a")
    come(1, "b")
    assert seen[1] == ["a", "ab"], "the first token, and one after nothing has been told"
    come(1, "c")
    come(1, "d")
    assert seen[1] == ["a", "ab"]
    come(2, "x")
    assert seen[2] == ["x"], "a first token does not wait"
    clock.run(0.15)
    assert seen[1] == ["a", "ab", "abcd"]
    pending = engine._pending[1]
    come(1, "e")
    engine.data_received(wire.frame(wire.End(1, None, wire.Failure("ValueError", "it broke"))))
    assert pending.changed.is_set(), "nor does an end"
    assert str(pending.error) == "it broke"
    clock.run(0.2)
    assert seen[1] == ["a", "ab", "abcd"], "what a task will read is not told"


def test_an_engine_whose_server_ends_before_it_is_made_ends():
    ours, stream = socket.socketpair()
    our_calls, calls = socket.socketpair()
    numbers = [stream.fileno(), calls.fileno()]
    command = [sys.executable, "-m", "tilewise.server.engine_process.host", *map(str, numbers)]
    with ours, our_calls, warm.Popen(command, pass_fds=numbers) as process:
        stream.close()
        calls.close()
        time.sleep(0.2)
        ours.close()  # as when the server is killed; of the calls' socket nothing comes
        assert process.wait(30) == 1


def test_a_client_that_leaves_frees_its_blocks(running, remote):
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(5):  # a machine that others use may let it end first
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            if remote.stats().scheduler.num_running:
                break
    else:
        pytest.fail("no request was left while it ran")
    wait_for(lambda: remote.stats().scheduler.blocks_used == 0)
    wait_for(lambda: not running.bridge.jobs)
    assert not remote._pending


def test_many_clients_that_leave_or_stay_leave_nothing_behind(running, remote):
    whole = []

    def client(number):
        draw = random.Random(number)
        for turn in range(3):
            body = {"prompt": f"{PROMPT} {number}", "max_tokens": 30, "ignore_eos": True,
                    "stream": True, "n": draw.choice((1, 1, 3)), "seed": turn}  # fmt: skip
            with httpx.stream(
                "POST", f"{running.url}/v1/completions", json=body, timeout=60
            ) as answer:
                lines = answer.iter_lines()
                if draw.random() < 0.5:
                    for _ in range(draw.randrange(12)):
                        next(lines, None)
                else:
                    whole.append("".join(lines).endswith("data: [DONE]"))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert whole
    assert all(whole)
    wait_for(lambda: not running.bridge.jobs)
    wait_for(lambda: remote.stats().scheduler.blocks_used == 0)
    assert not remote._pending
    assert running.tasks() == []


def test_an_administrator_aborts(running, remote):
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True,
            "request_id": "mine"}  # fmt: skip
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        httpx.post(f"{running.url}/abort", json={"request_ids": ["cmpl-mine"]})
        assert '"finish_reason":"abort"' in "".join(lines)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=2, stop=["a"], logit_bias={3: 1.0}, seed=4, bad_words=["dog"]),
        SamplingParams(structured=StructuredOutputs(json={"type": "object"}), max_tokens=None),
        BeamSearchParams(3, max_tokens=5, length_penalty=0.5, early_stopping=True),
    ],
)
def test_sampling_goes_there_unchanged(sampling):
    told = wire.frame(wire.told_sampling(sampling))
    [body] = wire.frames(bytearray(told))
    assert wire.sampling_of(wire.msgspec.msgpack.decode(body)) == sampling


def test_functions_do_not_leave_their_process():
    with pytest.raises(RequestError, match="logits_processors must be None"):
        wire.told_sampling(SamplingParams(logits_processors=[lambda ids, logits: logits]))


def test_integers_of_any_size_go_through():
    for number in (0, 1, -1, 2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, -(10**40)):
        told = {"a": number, "b": [number, {"c": number}], "d": True}
        sent = wire.frame(wire.plain(told))
        assert msgspec.msgpack.decode(sent[4:], ext_hook=wire.wide) == told


def test_messages_may_be_cut_anywhere():
    whole = b"".join(wire.frame([i, "x" * i]) for i in range(40))
    for step in (1, 3, 7, 100):
        buffer, found = bytearray(), []
        for i in range(0, len(whole), step):
            buffer += whole[i : i + step]
            found += [wire.msgspec.msgpack.decode(body) for body in wire.frames(buffer)]
        assert found == [[i, "x" * i] for i in range(40)]
        assert not buffer


def test_an_exception_keeps_its_class_or_becomes_a_plain_one():
    for error in (RequestError("a"), EngineClosedError("b"), TimeoutError("c"), KeyError("d")):
        assert type(wire.error_of(wire.failure_of(error))) is type(error)
    odd = wire.error_of(wire.Failure("Exit", "x"))
    assert type(odd) is RuntimeError
    assert type(wire.error_of(wire.Failure("__doc__", "x"))) is RuntimeError


def test_what_the_engine_refuses_at_its_start_is_raised_here(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        RemoteEngine(str(tmp_path), {})
    with pytest.raises(ValueError, match="preemption must be") as raised:
        RemoteEngine("story", {"preemption": "never"})
    [note] = raised.value.__notes__
    assert note.startswith("in the engine's process:\nTraceback")


def test_an_engine_that_is_killed_fails_its_requests_and_ends_the_server():
    engine = RemoteEngine("story", SETTINGS)
    try:
        with serving(engine, loop=engine) as running:
            body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
            with httpx.stream(
                "POST", f"{running.url}/v1/completions", json=body, timeout=60
            ) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(engine.pid, signal.SIGKILL)
                assert "the engine's process has ended" in "".join(lines)
            running._thread.join(60)
            assert not running._thread.is_alive()
            assert running.server.exit_code == 1
        assert not engine.is_alive

        async def late():
            async for _ in engine.generate({"prompt_token_ids": [1]}):
                raise AssertionError("an engine that has ended gives nothing")

        with pytest.raises(EngineClosedError):
            asyncio.run(late())
    finally:
        engine.close(1.0)


def test_an_engine_whose_server_is_killed_ends():
    code = (
        "from tilewise.server.engine_process.remote import RemoteEngine\n"
        f"engine = RemoteEngine('story', {SETTINGS!r})\n"
        "print(engine.pid, flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    with warm.Parent([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        server.kill()
    wait_for(lambda: not _runs(pid))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(300)
def test_the_command_serves_drains_and_ends_both():
    command = [sys.executable, "-m", "tilewise", "serve", "--port", "0", "--num-blocks", "64",
               "--engine-process"]  # fmt: skip
    # Its start is that of the command without the flag; the engine's process is a new interpreter.
    with warm.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url, pid, lines = None, None, []
        for line in server.stderr:
            lines.append(line)
            if "in process " in line:
                pid = int(line.split("in process ")[1].split()[0])
            if " at http" in line:
                url = line.split(" at ")[1].split()[0]
                break
        assert url is not None, "".join(lines)
        assert pid is not None
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            found = answer.iter_lines()
            next(found)
            server.terminate()
            assert "".join(found).endswith("data: [DONE]"), "what runs may end"
        for _ in server.stderr:
            pass
        assert server.wait(60) == 0
    begun = time.monotonic()
    wait_for(lambda: not _runs(pid))
    assert time.monotonic() - begun < 10


@pytest.mark.slow
def test_types_of_tokens_and_vectors_of_an_encoder_cross_to_it_and_back(tmp_path):
    from tests.models.encoders import write_encoder

    write_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    prompt = {"prompt_token_ids": [2, 7, 3, 9, 3], "token_type_ids": [0, 0, 0, 1, 1]}
    settings = {"device": "cpu", "max_num_seqs": 2}
    with LLM(tmp_path, **settings) as llm:
        wanted = asyncio.run(AsyncLLM(llm).embed(prompt, pooling="cls"))
    engine = RemoteEngine(str(tmp_path), settings)
    assert engine.limits.max_prompt_len == 66
    with serving(engine) as running:
        asked = engine.embed(prompt, pooling="cls")
        found = asyncio.run_coroutine_threadsafe(asked, running.event_loop).result(60)
    engine.close(0.0)
    assert found.embedding == pytest.approx(wanted.embedding, abs=1e-6)
