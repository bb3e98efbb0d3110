"""`tilewise bench engine` plans sessions, takes turns, and measures the packaged model here."""

from __future__ import annotations

import argparse
import json
import subprocess

import pytest

from tests import warm
from tilewise.bench import engine
from tilewise.bench.engines import workloads
from tilewise.bench.engines.shapes import SHAPES, read_sizes


def options(*argv):
    found = engine.parser().parse_args(argv)
    found.device = found.device or "cpu"
    found.peer_python, found.peer_path = dict(found.peer_python), dict(found.peer_path)
    return found


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
    # A step is the difference of two runs: on a busy machine it may come out as anything.
    assert decode["roof ms"] > 0
    assert decode["% of roof"] == pytest.approx(100 * decode["roof ms"] / decode["ms a step"])
    assert decode["host ms"] > 0
    parts = set(decode["host parts"])
    assert parts - {"build_inputs", "decode_inputs"} == {"schedule", "update"}
    assert len(parts) == 3  # the second by its name with a compiled step, or without
    assert decode["decode tok/s"] == pytest.approx(1e3 / decode["ms a step"])
    assert (prefill["prompt"], prefill["new"]) == (20, 1)
    [start] = document["starts"]
    assert start["start_s"] > 0
    assert start["compiled after start"] == 0


def test_a_setting_that_llm_does_not_have_is_refused_in_its_rows(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    argv = ["--batch", "1", "--device", "cpu", "--no-peer", "--limits", "30e9", "400e9"]
    asked = [*argv, "--kv-cache-dtype", "int3"]
    assert engine.main(asked) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert "kv_cache_dtype must be" in row["error"]
