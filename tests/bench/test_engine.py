"""`tilewise bench engine` plans sessions, takes turns, and measures the packaged model here."""

from __future__ import annotations

import argparse
import json

import pytest

from tilewise.bench import engine
from tilewise.bench.engines import workloads
from tilewise.bench.engines.process import EngineFailed
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import SHAPES, read_sizes

ROOF = Roof(read_sizes(SHAPES["llama-0.4b"]), 30e9, 400e9)


def options(*argv):
    found = engine.parser().parse_args(argv)
    found.device = found.device or "cpu"
    found.peer_python, found.peer_path = dict(found.peer_python), dict(found.peer_path)
    return found


class Fake:
    """An engine's process whose answers have made-up times."""

    def __init__(self, name, step, calls, fails_at=None):
        self.name, self.step, self.calls, self.fails_at = name, step, calls, fails_at

    def ask(self, request, timeout):
        self.calls.append((self.name, max(request["new_tokens"])))
        if len(self.calls) == self.fails_at:
            raise EngineFailed("out of memory")
        seconds = 0.5 + self.step * (max(request["new_tokens"]) - 1)
        return {"seconds": seconds, "ids": [[1] * n for n in request["new_tokens"]]}


def bench(tmp_path, **changes):
    settings = {"json_path": None, "folder": tmp_path, "repeats": 2, "timeout": 1.0}
    return engine.Bench({}, **(settings | changes))


def test_engines_take_turns_and_their_time_is_split_into_prefill_and_decode(tmp_path):
    calls = []
    workload = workloads.fixed(4, 16, 11, vocab_size=100)
    competitors = [engine.Competitor(name, name, {}) for name in ("tilewise", "vllm")]
    processes = [
        (competitors[0], Fake("ours", 0.01, calls)),
        (competitors[1], Fake("theirs", 0.02, calls)),
    ]
    found = bench(tmp_path)._turns(workload, processes)
    turn = [("ours", 1), ("ours", 11), ("theirs", 1), ("theirs", 11)]
    assert calls == [("ours", 8), ("theirs", 8), *turn, *turn]
    row = engine.summary(workload, found["tilewise"], ROOF)
    assert row["prefill tok/s"] == pytest.approx(4 * 16 / 0.5)
    assert row["ms a step"] == pytest.approx(10.0)
    assert row["decode tok/s"] == pytest.approx(400.0)
    assert row["output tok/s"] == pytest.approx(44 / 0.6)
    assert row["% of roof"] == pytest.approx(100 * ROOF.step(4, 4 * (16 + 5.5)) / 0.01)


def test_an_engine_that_fails_keeps_its_place_and_disturbs_no_other(tmp_path):
    calls, others = [], []
    workload = workloads.fixed(1, 4, 9, vocab_size=100)
    processes = [
        (engine.Competitor("tilewise", "tilewise", {}), Fake("ours", 0.01, calls, fails_at=2)),
        (engine.Competitor("vllm", "vllm", {}), Fake("theirs", 0.02, others)),
    ]
    found = bench(tmp_path)._turns(workload, processes)
    assert str(found["tilewise"]) == "out of memory"
    assert len(calls) == 2
    assert len(found["vllm"]) == 2


def test_a_prompt_alone_has_no_decode():
    workload = workloads.fixed(1, 64, 1, vocab_size=100)
    row = engine.summary(workload, [{"first": 0.2}, {"first": 0.1}, {"first": 0.3}], ROOF)
    assert row["prefill tok/s"] == pytest.approx(320.0)
    assert row["spread %"] == pytest.approx(100.0)
    assert "ms a step" not in row
    assert "output tok/s" not in row


def test_a_whole_run_is_compared_with_its_own_roof():
    workload = workloads.nano(requests=4, shortest=2, longest=5, vocab_size=50)
    row = engine.summary(workload, [{"whole": 2.0}, {"whole": 4.0}], ROOF)
    assert row["output tok/s"] == pytest.approx(workload.tokens_out / 3.0)
    assert row["% of roof"] == pytest.approx(100 * ROOF.whole(workload) / 3.0)


def test_tokens_agree_up_to_the_first_difference_of_a_row():
    assert engine.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8


def test_ours_is_compared_with_the_best_peer_of_the_same_threads():
    shared = {"shape": "s", "workload": "fixed", "batch": 1, "tokens in": 1, "tokens out": 9}
    rows = [
        shared | {"engine": "tilewise", "threads": 1, "decode tok/s": 30.0},
        shared | {"engine": "llamacpp f16", "threads": 1, "decode tok/s": 10.0},
        shared | {"engine": "llamacpp bf16", "threads": 1, "decode tok/s": 20.0},
        shared | {"engine": "llamacpp bf16", "threads": 2, "decode tok/s": 90.0},
        shared | {"engine": "vllm", "threads": 1, "error": "no GPU"},
    ]
    engine.compare(rows)
    assert rows[0]["x best peer"] == pytest.approx(1.5)
    assert not any("x best peer" in row for row in rows[1:])


def test_shared_prompts_and_threads_have_sessions_of_their_own(tmp_path):
    asked = options(
        "--shape", "qwen3-0.6b", "--workload", "fixed", "nano", "samples", "--batch", "1", "32",
        "--threads", "1", "2", "--peers", "vllm", "--peer-path", "vllm=/elsewhere",
    )  # fmt: skip
    found = engine.plan_sessions(asked, "qwen3-0.6b", tmp_path, (4.4e12, 750e12))
    assert [[w.name for w in s.workloads] for s in found] == 2 * [
        ["fixed", "fixed", "nano"],
        ["samples"],
    ]
    assert [s.competitors[0].threads for s in found] == [1, 1, 2, 2]
    first, second = found[0].competitors
    assert (first.label, second.label, second.path) == ("tilewise", "vllm", "/elsewhere")
    assert first.settings["prefix_caching"] is False
    assert found[1].competitors[0].settings["prefix_caching"] is True
    assert first.settings["max_num_seqs"] == 256
    assert first.settings["max_len"] == max(workloads.nano().max_len, 192)
    assert first.settings["random_weights"] is True


def test_a_workload_longer_than_the_model_is_refused():
    asked = options("--workload", "nano")
    sizes = read_sizes(SHAPES["llama-0.4b"] | {"max_position_embeddings": 1024})
    with pytest.raises(ValueError, match="nano must fit the 1,024 positions of tiny, got"):
        engine.plan_workloads(asked, "tiny", sizes)


@pytest.mark.parametrize(
    "argv", [["--peers", "sglang"], ["--peer-path", "vllm"], ["--peer-python", "other=/x"]]
)
def test_unknown_peers_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        options(*argv)
    assert "must be" in capsys.readouterr().err


def test_the_options_of_before_are_still_there():
    found = options("--model", "story", "--batch", "1", "8", "--no-peer", "--repeats", "1")
    assert (found.shape, found.batch, found.no_peer) == (["story"], [1, 8], True)
    assert (found.prompt_tokens, found.new_tokens, found.peers) == (128, 64, ["transformers"])
    assert isinstance(found, argparse.Namespace)


def test_the_packaged_model_is_measured_here(tmp_path, capsys):
    path = tmp_path / "out.json"
    argv = ["--batch", "1", "--prompt-tokens", "12", "--new-tokens", "9", "--repeats", "1"]
    argv += ["--device", "cpu", "--no-peer", "--limits", "30e9", "400e9", "--threads", "1"]
    assert engine.main([*argv, "--json", str(path), "--prefill-tokens", "20"]) == 0
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    decode, prefill = document["rows"]
    assert "error" not in decode
    assert "error" not in prefill
    assert 0 < decode["% of roof"] < 100
    assert decode["host ms"] > 0
    assert set(decode["host parts"]) == {"schedule", "build_inputs", "update"}
    assert decode["decode tok/s"] == pytest.approx(1e3 / decode["ms a step"])
    assert (prefill["prompt"], prefill["new"]) == (20, 1)
    [start] = document["starts"]
    assert start["start_s"] > 0
    assert start["compiled after start"] == 0


def test_a_setting_that_llm_does_not_have_is_refused_in_its_rows(tmp_path, capsys):
    argv = ["--batch", "1", "--device", "cpu", "--no-peer", "--limits", "30e9", "400e9"]
    asked = [*argv, "--kv-cache-dtype", "int3"]
    assert engine.main(asked) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert "kv_cache_dtype must be" in row["error"]
