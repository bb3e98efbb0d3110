"""The load generator: what it counts, and that it counts it over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.bench.serve import WARMING, main
from tilewise.bench.serving.client import Answer, load, summary
from tilewise.bench.workload import Asked, arriving, conversations, with_keys
from tilewise.server.keys import Caller, hash_of


def test_a_summary_counts_what_requests_saw():
    answers = [
        Answer("a", 0.0, times=[1.0, 2.0, 3.0], num_tokens=3, ended=3.0),
        Answer("b", 1.0, times=[1.5, 1.75], num_tokens=1, ended=2.0),
        Answer("b", 1.0, error="HTTP/1.1 503", ended=1.1),
    ]
    found = summary(answers, {"ttft": 600.0})
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["seconds"] == 3.0
    assert found["tokens_per_second"] == pytest.approx(4 / 3)
    assert found["ttft"]["p50"] == 1000.0
    assert found["ttft"]["mean"] == 750.0
    assert found["itl"]["p99"] == 1000.0
    assert found["goodput"] == pytest.approx(1 / 3)
    assert found["jain"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert summary([answers[2]]) == {"requests": 1, "failed": 1}


def test_it_loads_a_server_with_keys_in_turn_at_a_rate():
    keys = {hash_of("key-one"): Caller("one"), hash_of("key-two"): Caller("two")}
    with serving(FakeEngine(step_s=0.001), keys=keys) as running:
        asked = [Asked({"prompt": f"A {i}", "max_tokens": 5}) for i in range(20)]
        asked = with_keys(arriving(asked, 100.0, burstiness=0.5), ["key-one", "key-two"])
        answers = asyncio.run(load(running.url, asked))
        found = summary(answers)
        assert found["failed"] == 0
        assert found["jain"] == pytest.approx(1.0)
        assert all(a.num_tokens == 5 and 1 <= len(a.times) <= 5 for a in answers)
        refused = asyncio.run(load(running.url, with_keys(asked[:1], ["wrong"])))
        assert "401" in refused[0].error
        usage = running.bridge.ledger
        assert usage.of("one")["requests"] == usage.of("two")["requests"] == 10


def test_its_last_line_is_json_and_failures_are_its_exit_code(capsys):
    with serving() as running:
        arguments = ["--url", running.url, "--num-prompts", "4", "--max-tokens", "3"]
        assert main([*arguments, "--concurrency", "2", "--goodput", "ttft:9999"]) == 0
        output = capsys.readouterr()
        assert "left out: one request beforehand" in output.err
        found = json.loads(output.out.splitlines()[-1])
        assert found["requests"] == 4
        assert found["goodput"] > 0
        assert len(running.engine.seen) == 5
    assert main(arguments) == 1
    assert "failed" in capsys.readouterr().err


def test_a_turn_is_asked_with_all_that_was_said_before():
    with serving() as running:
        asked = conversations(
            2, 3, words=4, shared_words=5, max_tokens=6, temperature=1.0, think_s=0.01
        )
        answers = asyncio.run(load(running.url, asked))
        assert [a.error for a in answers] == [None] * 6
        seen = {tuple(s["request"].prompt_token_ids) for s in running.engine.seen}
        encode = running.engine.tokenizer.encode
        for turn in (1, 2):
            for talk in (0, 1):
                before, now = answers[2 * (turn - 1) + talk], answers[2 * turn + talk]
                assert now.begun > before.ended
                if turn == 1:
                    assert before.text
                    new = asked[2 + talk].body["prompt"]
                    assert now.prompt == before.prompt + before.text + new
                assert now.prompt.startswith(before.prompt)
                assert tuple(encode(now.prompt)) in seen
        assert answers[0].prompt.split()[:5] == answers[1].prompt.split()[:5]
        # A turn after one that failed is not sent.
        asked[0] = Asked({"prompt": "x", "max_tokens": -1})
        answers = asyncio.run(load(running.url, asked))
        assert [a.error is None for a in answers] == [False, True] * 3
        assert "turn before" in answers[2].error


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,9000,44\n2023-11-16 18:15:50.6805900,21,6\n"
    "2023-11-16 18:15:52.6805900,33,3\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 600, "output_length": 4, '
    '"hash_ids": [1, 2]}\n{"timestamp": 2000, "input_length": 520, "output_length": 5, '
    '"hash_ids": [1, 3]}\n',
    "ours.jsonl": '{"seconds": 1, "prompt": [5, 6, 7], "output": 4, "n": 2, "user": "b"}\n'
    '{"seconds": 3, "prompt": 8, "output": 3, "user": "a", "salt": "s", "priority": 2}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_sent_as_it_was_and_served_in_virtual_time(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    (tmp_path / name).write_text(TRACES[name])
    plot, document = tmp_path / "found.png", tmp_path / "found.json"
    with serving(FakeEngine(step_s=0.001)) as running:
        arguments = [
            "--url", running.url, "--trace", str(tmp_path / name), "--speed", "50", "--simulate",
            "--plot", str(plot), "--json", str(document), "--probes", "0",
        ]  # fmt: skip
        assert main(arguments) == 0
        first, *requests = [s["request"] for s in running.engine.seen]
    assert first.prompt_token_ids == WARMING["prompt"]  # no answer of the summary
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = json.loads(document.read_text())["answers"]
    assert found["requests"] == 2
    assert 0.03 < told[1]["begun"] - told[0]["begun"] < 0.06, "two seconds, fifty times faster"
    if name == "azure.csv":  # the first one does not fit
        assert [len(r.prompt_token_ids) for r in requests] == [21, 33]
        assert [r.sampling.max_tokens for r in requests] == [6, 3]
    elif name == "mooncake.jsonl":
        first, second = (r.prompt_token_ids for r in requests)
        assert first[:512] == second[:512]
        assert first[512:520] != second[512:520]
    else:
        assert requests[0].prompt_token_ids == [5, 6, 7]
        assert requests[0].sampling.n == 2
        assert (requests[1].priority, requests[1].user) == (2, "a")
        assert "s" in requests[1].salt
    assert found["simulated"]["predicted"]["req/s"] > 0
    # The same times in the same words: measured ones are those of the summary.
    measured = found["simulated"]["measured"]
    assert measured["ttft p50"] <= found["ttft"]["p50"] / 1e3
    assert measured["tok/s"] >= found["tokens_per_second"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000


def test_goodput_takes_all_bounds_and_keys_are_in_no_document(tmp_path, capsys):
    keys = {hash_of("key-one"): Caller("one"), hash_of("key-two"): Caller("two", max_requests=1)}
    document = tmp_path / "found.json"
    with serving(FakeEngine(step_s=0.002), keys=keys) as running:
        arguments = [
            "--url", running.url, "--num-prompts", "8", "--max-tokens", "4", "--json",
            str(document), "--api-key", "key-one", "key-two",
        ]  # fmt: skip
        assert main([*arguments, "--goodput", "ttft:9999", "itl:0"]) == 1, "a key is refused"
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["goodput"] == 0
    assert found["jain"] < 0.9
    assert found["failed"] == 3
    assert "key-" not in document.read_text()
    with pytest.raises(SystemExit):
        main(["--goodput", "speed:3"])
    assert main(["--speed", "0"]) == 2
    capsys.readouterr()
    assert main(["--url", "http://127.0.0.1:9", "--trace", __file__]) == 2
    assert "there is no server at http://127.0.0.1:9 (" in capsys.readouterr().err
