"""`tilewise serve` as a process: its start, its refusals, its end; `tilewise chat` beside it."""

from __future__ import annotations

import http.client
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

import tilewise
from tests import warm
from tests.server.serving import serving, wait_for
from tilewise.cli import main
from tilewise.engine import llm
from tilewise.engine.settings import model_directory
from tilewise.server import command
from tilewise.server.engine_process import remote
from tilewise.server.keys import hash_of, read_keys
from tilewise.server.options import ELSEWHERE, FLAGS, VARIABLES, resolve, unknown_variables
from tilewise.server.terminal import MAX_TOKENS, Conversation, chat

ROOT = Path(__file__).resolve().parents[2]


def serve(*arguments, start=subprocess.Popen, **environment):
    return start(
        [sys.executable, "-m", "tilewise", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def url_of(process, lines):
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving \S+ at (\S+)", line):
            threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
            return found.group(1)
    raise AssertionError("".join(lines))


def post(url, body, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    )


@pytest.mark.timeout(600)
def test_it_says_what_it_does_serves_and_ends_at_sigterm_when_requests_have(tmp_path):
    lines = []
    with serve("--shutdown-timeout", "20", TILEWISE_API_KEY="a-long-secret-key") as process:
        url = url_of(process, lines)
        start = "".join(lines)
        for step in (
            "libraries imported",
            "weights loaded",
            "cache made",
            "kernels compiled",
            "kernels of long prompts and options compiled",
            "engine ready",
            "ready in",
            "after the start",
        ):
            assert step in start
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, {"prompt": "x"})
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with post(url, body, "a-long-secret-key") as stream:
            first = stream.readline()
            process.send_signal(signal.SIGTERM)
            rest = stream.read()
        assert b'"finish_reason":"length"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert first.startswith(b"data: ")
        assert process.wait(30) == 0
    wait_for(lambda: "shutting down" in "".join(lines))
    assert "a-long-secret-key" not in "".join(lines)


@pytest.mark.timeout(600)
def test_a_second_sigterm_ends_it_now(tmp_path):
    lines = []
    with serve("--shutdown-timeout", "60", "--max-num-seqs", "4", start=warm.Popen) as process:
        url = url_of(process, lines)
        host = url.removeprefix("http://")
        assert urllib.request.urlopen(f"{url}/pause", b"").status == 200
        waiting = http.client.HTTPConnection(host)
        waiting.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        metrics = f"{url}/metrics"
        wait_for(
            lambda: b'in_flight{model_name="story"} 1' in urllib.request.urlopen(metrics).read()
        )
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None  # a request is there
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1  # of 60 that the request would be waited for
        waiting.close()


def refused(capsys, *arguments):
    try:
        code = main(["serve", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_what_is_wrong_is_one_sentence_and_exit_code_2(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "Address already in use" in refused(capsys, "--port", port)
    assert "--allow-open" in refused(capsys, "--host", "0.0.0.0")
    assert "must be in 0 ... 65535" in refused(capsys, "--port", "70000")
    assert "8 characters" in refused(capsys, "--api-key", "short")
    assert "--keys-file must be a file" in refused(capsys, "--keys-file", str(tmp_path / "no"))
    assert "--ssl-certfile must be given" in refused(capsys, "--ssl-keyfile", "k")
    assert "--tool-call-parser must be" in refused(capsys, "--tool-call-parser", "gpt")
    nothing = str(tmp_path)
    assert "config.json" in refused(capsys, nothing, "--port", "0")


def test_a_model_is_called_by_its_folder_however_its_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    given = {
        ".": "m",
        "./": "m",
        "../m/": "m",
        "..": tmp_path.name,
        "../link": "link",
        str(tmp_path / "m"): "m",
        "/": "model",
        "story": "story",
    }
    assert {model: command.name_of(model, model_directory(model)) for model in given} == given


@pytest.mark.parametrize("more", [(), ("--engine-process",)])
def test_weights_are_drawn_where_that_is_asked_for(capsys, monkeypatch, more):
    seen = {}

    def make(model, settings=None, **given):
        seen.update(settings or given)
        raise ValueError("seen")

    make.__signature__ = inspect.signature(llm.LLM.__init__)
    monkeypatch.setattr(llm, "LLM", type("LLM", (), {"__init__": staticmethod(make)}))
    monkeypatch.setattr(remote, "RemoteEngine", make)
    assert "seen" in refused(capsys, "story", "--port", "0", "--load-format", "dummy", *more)
    assert seen == {"random_weights": True}
    assert "--load-format must be one of auto, dummy, got gguf" in refused(
        capsys, "--load-format", "gguf"
    )


@pytest.mark.parametrize(
    ("arguments", "has_gpu", "is_apart"),
    [
        ((), True, True),
        ((), False, False),
        (("--device", "cuda:1"), True, True),
        (("--device", "cpu"), True, False),
        (("--no-engine-process",), True, False),
        (("--engine-process",), False, True),
    ],
)
def test_the_engine_has_a_process_of_its_own_where_it_computes_on_a_gpu(
    capsys, monkeypatch, arguments, has_gpu, is_apart
):
    def make(where):
        def made(model, settings=None, share=None, **given):
            raise ValueError(f"{where}, a share of {share}")

        made.__signature__ = inspect.signature(llm.LLM.__init__)
        return made

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * has_gpu)
    monkeypatch.setattr(llm, "LLM", type("LLM", (), {"__init__": staticmethod(make("here"))}))
    monkeypatch.setattr(remote, "RemoteEngine", make("apart"))
    said = refused(capsys, "story", "--port", "0", "--stream-share", "0.25", *arguments)
    assert ("apart, a share of 0.25" in said) == is_apart
    assert "here" in said or is_apart


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--gpu-mem-utilization=0.5", "--gpu-memory-utilization"),
        ("--enable-prefix-cacheing", "--enable-prefix-caching"),
        ("--max-model", "--max-model-len"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_known_one(capsys, wrong, right):
    err = refused(capsys, wrong, "3")
    assert f"{wrong.split('=')[0]} is not an option of serve; did you mean {right}?" in err


def test_what_vllm_calls_otherwise_is_named_and_what_is_like_nothing_is_not_guessed(capsys):
    assert "--enforce-eager is not an option of serve: --graphs off does that here" in refused(
        capsys, "--enforce-eager"
    )
    assert "did you mean" not in refused(capsys, "--tensor-colour", "3")


def test_every_option_that_is_named_elsewhere_is_one():
    known = {flag.flag for flag in FLAGS}
    for asked, told in ELSEWHERE.items():
        assert asked not in known
        assert set(re.findall(r"--[a-z-]+[a-z]", told)) <= known


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_a_gpu_both_ways_serve_the_same_tokens_and_end():
    told = []
    for more in ((), ("--no-engine-process",)):
        lines = []
        with serve("--num-blocks", "64", "--max-num-seqs", "4", *more) as process:
            url = url_of(process, lines)
            body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 1}
            with post(url, body) as answer:
                told.append(json.load(answer)["choices"][0])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert "on cuda" in "".join(lines)
        assert ("in process " in "".join(lines)) == (not more)
    assert told[0] == told[1]


def test_demo_opens_the_page_when_it_is_ready(tmp_path):
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    lines = []
    browsed = {"BROWSER": f"{browser} %s"}
    with serve("--demo", "--num-blocks", "64", start=warm.Popen, **browsed) as process:
        url = url_of(process, lines)
        wait_for(lambda: opened.exists() and opened.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert opened.read_text().strip() == url


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tilewise.server.command", None)
    monkeypatch.delitem(sys.modules, "tilewise.server.command")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [n for n in sys.modules if n.startswith("tilewise.server.run")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'tilewise[serve]'" in refused(capsys)


def test_flags_win_over_variables_and_these_over_a_file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'port = 1\nhost = "::1"\nmax-model-len = 64\nserved_model_name = ["a", "b"]\n'
        "enable-prefix-caching = false\n"
    )
    environment = {"TILEWISE_PORT": "2", "TILEWISE_HOST": "127.0.0.2", "TILEWISE_ALLOW_OPEN": "1"}
    found = resolve({"port": 3, "config": str(path)}, environment)
    assert (found["port"], found["host"], found["max_model_len"]) == (3, "127.0.0.2", 64)
    assert found["served_model_name"] == ["a", "b"]
    assert found["allow_open"] is True
    assert found["enable_prefix_caching"] is False
    assert {flag.name for flag in FLAGS} == set(found)
    for text, message in (
        ("prt = 1", "did you mean --port"),
        ('port = "x"', "port in .* must be int, got 'x'"),
        ("port = true", "must be int, got True"),
        ("port", "must be a file of TOML"),
        ("served-model-name = [1]", r"must be a list of str, got \[1\]"),
        ("served-model-name = 1", "must be a list of str, got 1"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            resolve({"config": str(path)}, {})
    with pytest.raises(ValueError, match="TILEWISE_PORT must be int, got 'x'"):
        resolve({}, {"TILEWISE_PORT": "x"})
    with pytest.raises(ValueError, match="TILEWISE_ALLOW_OPEN must be 1 or 0"):
        resolve({}, {"TILEWISE_ALLOW_OPEN": "maybe"})


def test_a_variable_that_nothing_reads_is_named(capsys, monkeypatch):
    """A misspelt key left a server open without a word; what it holds may be a secret."""
    monkeypatch.setenv("TILEWISE_APIKEY", "a-long-secret-key")
    monkeypatch.setenv("tilewise_port", "1")  # another program's
    assert main(["key", "alice"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "tilewise: TILEWISE_APIKEY is not a variable of tilewise, did you mean TILEWISE_API_KEY?"
    )
    several = {"TILEWISE_XYZ": "", "TILEWISE_MAX_MODEL_LENGTH": "9", "TILEWISE_HOST": "::1"}
    assert unknown_variables(several) == (
        "TILEWISE_MAX_MODEL_LENGTH is not a variable of tilewise, did you mean "
        "TILEWISE_MAX_MODEL_LEN?; TILEWISE_XYZ is not a variable of tilewise"
    )
    known = dict.fromkeys(VARIABLES, "1") | {
        "TILEWISE_SERVICE_HOST": "10.0.0.1", "TILEWISE_SERVICE_PORT_HTTP": "80",
        "TILEWISE_PORT_80_TCP_ADDR": "10.0.0.1", "PATH": "/bin", "TILEWISE": "",
    }  # fmt: skip
    assert unknown_variables(known) is None


def test_the_address_of_a_service_of_that_name_is_no_port():
    """Kubernetes sets it in every container beside a service called tilewise; servers ended."""
    set_there = {"TILEWISE_PORT": "tcp://10.0.0.1:80", "TILEWISE_PORT_80_TCP_PORT": "80"}
    assert resolve({}, set_there)["port"] == 8000
    assert "TILEWISE_PORT is not read: it is the address of a" in unknown_variables(set_there)


def test_every_variable_that_the_package_names_is_known():
    package = Path(tilewise.__file__).parent
    found = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"TILEWISE_[A-Z][A-Z_]*", path.read_text(encoding="utf-8"))
    }
    assert "TILEWISE_PROGRESS" in found
    assert found - {"TILEWISE_NAME"} <= VARIABLES  # NAME stands for an option's


def test_a_drawn_key_is_shown_once_and_held_as_its_hash(capsys, tmp_path):
    assert main(["key", "alice"]) == 0
    shown = capsys.readouterr()
    key = re.search(r"tw-\S+", shown.err).group()
    assert "tw-" not in shown.out  # which goes to the file: tilewise key alice >> keys.toml
    path = tmp_path / "keys.toml"
    path.write_text(shown.out)
    [(digest, caller)] = read_keys(path).items()
    assert digest == hash_of(key)
    assert caller.name == "alice"
    assert not caller.admin


@pytest.mark.parametrize("name", ["alice", "Zoë", "\U0001f600", 'a"b\\c', "x" * 64])
def test_a_key_of_any_name_is_read_again(capsys, tmp_path, name):
    assert main(["key", name]) == 0
    path = tmp_path / "keys.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert [caller.name for caller in read_keys(path).values()] == [name]


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "a\x7fb"])
def test_a_key_without_a_proper_name_is_not_drawn(capsys, name):
    assert main(["key", name]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("table", "message"),
    [('[keys.""]', "names of keys must be 1 ... 64 characters, got 0"),
     (f'[keys.{"x" * 65}]', "names of keys must be 1 ... 64 characters, got 65"),
     ('[keys.a]\ngroup = ""', "group of key 'a' must be 1 ... 64 characters, got 0")],
)  # fmt: skip
def test_names_that_would_be_nobodys_or_refused_later_are_refused(tmp_path, table, message):
    path = tmp_path / "keys.toml"
    path.write_text(f'{table}\nhash = "{hash_of("key-of-somebody")}"\n')
    with pytest.raises(ValueError, match=re.escape(message)):
        read_keys(path)


def test_the_key_of_an_option_is_no_other_ones(tmp_path):
    path = tmp_path / "keys.toml"
    given = {"api_key": "key-of-alice", "keys_file": str(path)}
    path.write_text(f'[keys.alice]\nhash = "{hash_of("key-of-alice")}"\n')
    with pytest.raises(ValueError, match="--api-key must have a key that --keys-file has not"):
        command.checked(given)
    path.write_text(f'[keys.api-key]\nhash = "{hash_of("key-of-bob")}"\n')
    with pytest.raises(ValueError, match="must have a name, api-key, that --keys-file has not"):
        command.checked(given)
    path.write_text(f'[keys.bob]\nhash = "{hash_of("key-of-bob")}"\n')
    assert {c.name for c in command.checked(given)[1].values()} == {"api-key", "bob"}
    for key in ("key-of-alice\n", " key-of-alice", "schl\xfcssel-key", "key of alice"):
        with pytest.raises(ValueError, match="--api-key must be of ASCII"):
            command.checked({"api_key": key})


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan"), -1.0])
def test_a_time_in_which_no_request_can_end_is_refused(seconds):
    with pytest.raises(ValueError, match="--request-timeout must be"):
        command.checked({"request_timeout": seconds})


def talk(url, *lines, key=None, code=0, **settings):
    left, out = list(lines), io.StringIO()

    def read(_):
        if not left:
            raise EOFError
        return left.pop(0)

    assert chat(url, key, {"max_tokens": 5} | settings, read=read, out=out) == code
    return out.getvalue()


@pytest.fixture
def unseen(monkeypatch):
    """A server that is not looked at beforehand: these answer once."""
    monkeypatch.setattr(Conversation, "look", lambda self: None)


def test_a_conversation_streams_remembers_resets_and_saves(tmp_path):
    with serving() as running:
        path = tmp_path / "saved.json"
        text = talk(running.url, "Hello", "More", f"/save {path}", "/reset", "New", "/exit", "no")
        assert text.count("5 tokens") == 3
        assert "prompt tokens cached]" in text
        roles = [message["role"] for message in json.loads(path.read_text())]
        assert roles == ["user", "assistant"] * 2
        prompts = [len(seen["request"].prompt_token_ids) for seen in running.engine.seen]
        assert prompts[1] > prompts[0]
        assert prompts[2] < prompts[1]
        assert "/reset" in talk(running.url, "/what")


def read_nothing(prompt):
    raise AssertionError("a line must not be asked for")


def test_a_conversation_looks_for_its_server_before_the_first_line(capsys):
    def refuses(url, key=None, **settings):
        assert chat(url, key, settings, read=read_nothing) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("tilewise: ")
        return err

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = refuses(gone)
        assert f"there is no server at {gone} (connection refused): start one with tilew" in said
        assert main(["chat", gone]) == 1
        capsys.readouterr()
    assert "must be a server with /v1/models, got" in refuses(answering(b"SSH-2.0-OpenSSH\r\n"))
    text = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    assert "must tell its models, got something else" in refuses(answering(text))
    with serving(keys={hash_of("secret-key"): read_caller()}) as running:
        assert "authorization must be Bearer" in refuses(running.url)
        assert "5 tokens" in talk(f"{running.url}/v1", "Hello", key="secret-key")
        said = refuses(running.url, "secret-key", model="other")
        assert "--model must be one of " in said
        assert "got 'other'" in said


def test_a_model_that_cannot_chat_says_so_before_the_first_line(capsys):
    with serving() as running:
        running.service.template.source = None
        assert chat(running.url, None, {}, read=read_nothing) == 1
    said = capsys.readouterr().err
    assert "messages must be of a model with a chat template, this one has none" in said


def test_an_answer_has_a_limit_and_says_when_it_was_cut(capsys):
    def asked(running):
        return running.engine.seen[-1]["request"].sampling.max_tokens

    with serving() as running:
        longest = running.bridge.max_model_len
        told = talk(running.url, "Hello", max_tokens=3)
        assert asked(running) == 3
        assert "(cut at its limit: /reset makes room, --max-tokens allows more)" in told
        conversation = Conversation(running.url, None, {}, limit=20)
        conversation.look()
        assert len("".join(conversation.ask("Hello"))) > 0
        assert asked(running) == 20
        # Where the limit does not fit, what is left of the context is the limit.
        conversation = Conversation(running.url, None, {}, limit=longest)
        conversation.look()
        for _ in conversation.ask("Hello"):
            pass
        assert asked(running) is None
        assert conversation.usage["total_tokens"] <= longest
    assert MAX_TOKENS == 2048


def test_what_was_given_with_a_flag_is_refused_by_its_flag_and_exit_code():
    with serving() as running:
        told = talk(running.url, "Hello", code=1, temperature=-1.0)
        assert "tilewise: --temperature must be" in told
        assert "5 tokens" in talk(running.url, "Hello")


def answering(text):
    """Answer one request on a port of its own; return the url."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_once():
        with listener, listener.accept()[0] as sock:
            told = sock.makefile("rb")
            headers = http.client.parse_headers(told) if told.readline() else {}
            told.read(int(headers.get("content-length", 0)))
            # All of it: who closes a socket with something unread resets the connection.
            sock.sendall(text)

    threading.Thread(target=serve_once, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PART = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [(STREAM + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PART) + PART + b"\r\n",
      "Hi\ntilewise: http"),
     (STREAM + b"Connection: close\r\n\r\n" + PART, "must answer to the end, got 2 characters"),
     (b"", "must answer to the end, got Remote end closed"),
     (b"SSH-2.0-OpenSSH_9.6\r\n", "must answer to the end, got SSH-2.0"),
     (b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\n", "HTTP 500"),
     (STREAM + b"\r\ndata: 5\n\n", "must send events of a chat, got b'5"),
     (STREAM + b"\r\ndata: {}\n\n", "must send events of a chat, got b'{}"),
     (STREAM + b"\r\n" + b'data: {"error": {"message": "no luck"}}\n\n', "no luck")],
)  # fmt: skip
@pytest.mark.usefixtures("unseen")
def test_a_conversation_with_a_server_that_ends_or_is_none_goes_on(text, message):
    told = talk(answering(text), "Hello", "/help", "/exit", code=1)
    assert message in told
    assert "/reset" in told


@pytest.mark.usefixtures("unseen")
def test_a_count_that_others_leave_out_is_none():
    usage = (
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}\n\n'
    )
    told = talk(answering(STREAM + b"\r\n" + PART + usage + b"data: [DONE]\n\n"), "Hello")
    assert "Hi\n[0 tokens" in told
    assert "0% of 3 prompt tokens cached]" in told


@pytest.mark.usefixtures("unseen")
def test_an_interrupt_stops_an_answer_and_not_the_conversation(tmp_path):
    class Stopped(io.StringIO):
        def write(self, text):
            if text == "Hi" and "Hi" not in self.getvalue():
                super().write(text)
                raise KeyboardInterrupt
            return super().write(text)

    out, path = Stopped(), tmp_path / "saved.json"
    lines = iter(["Hello", f"/save {path}", "/exit"])
    url = answering(STREAM + b"\r\n" + PART + b"data: [DONE]\n\n")
    assert chat(url, None, {}, read=lambda _: next(lines), out=out) == 0
    assert "(stopped; the message is forgotten)" in out.getvalue()
    assert json.loads(path.read_text()) == []


def read_caller():
    from tilewise.server.keys import Caller

    return Caller("somebody")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream_share": 0.0}, "--stream-share must be above 0 and at most 1, got 0.0"),
        ({"stream_share": 1.5}, "--stream-share must be above 0 and at most 1, got 1.5"),
    ],
)
def test_a_share_of_streams_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        command.checked(options)


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://a b", ""])
def test_an_origin_is_written_as_browsers_write_it(capsys, origin):
    told = refused(capsys, "--allowed-origins", "https://right.example", origin, "--port", "0")
    assert "--allowed-origins must be origins such as https://example.com" in told
