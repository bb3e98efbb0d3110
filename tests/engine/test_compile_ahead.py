"""The kernels of a start: rehearsed, compiled in other processes, and then found on disk."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tilewise.cache.spec import KVSpec
from tilewise.distributed.shard_group import ShardGroup
from tilewise.engine.captured import ahead, graphs
from tilewise.engine.captured.rehearsal import few_layers
from tilewise.kernels.host.requests import Request, is_recording, recording
from tilewise.models.config import ModelConfig
from tilewise.models.registry import empty_model

_ROOT = Path(__file__).parents[2]
# Cheap to compile, and among them one of each way in: by Triton, by a plan, with what begins early.
EVERY_FEW = "tiny/_norm_kernel,_plan_kernel,_finish_kernel,_adjust_kernel,_copy_kernel"
EVERY_DAY = ("tiny", "windows", "two ranks")
SLOW = ("qwen3-0.6b", "lazy", "llama-3-8b", "8 bits", "invariant")


@pytest.fixture(scope="module")
def worker():
    """A process that has imported what starts need, and forks one for each."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine.start_worker"], cwd=_ROOT, text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process


def _told(worker, what, names, cache):
    worker.stdin.write(json.dumps([what, names, str(cache)]) + "\n")
    worker.stdin.flush()
    status, output, errors = json.loads(worker.stdout.readline())
    assert status == 0, errors[-4000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("start"): line for line in lines}


@functools.cache
def _requests(worker, names, cache):
    return _told(worker, "requests", names, cache)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_rehearsal_asks_for_all_that_the_start_asks_for(tmp_path_factory, worker, name):
    names = EVERY_DAY if name in EVERY_DAY else SLOW
    told = _requests(worker, names, tmp_path_factory.getbasetemp())[name]
    assert len(told["needed"]) > 20
    assert [told["names"][key] for key in set(told["needed"]) - set(told["rehearsed"])] == []
    extra = {told["names"][key] for key in set(told["rehearsed"]) - set(told["needed"])}
    assert extra == set() or name == "lazy"  # that captures on a GPU


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [EVERY_FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in ("tiny", *SLOW[:1]))],
)
def test_a_start_finds_on_disk_what_other_processes_compiled(tmp_path, worker, name):
    told = _told(worker, "start", [name], tmp_path)[name]
    assert told["asked"] > 5
    assert len(told["hits"]) > 5
    assert told["misses"] == []
    assert told["is_stamped"] == (name != EVERY_FEW)


def test_kernels_are_kept_under_the_same_name_in_whatever_order_they_come(tmp_path, worker):
    told = [_told(worker, "names", [order], tmp_path)[order] for order in ("forward", "backward")]
    assert told[0] == told[1]


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_start_captures_a_step_of_every_kind_or_every_step(monkeypatch, is_lazy):
    """No kernel is left to be compiled while requests wait: not that of greedy rows of ranks."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    captured, lines = [], []
    runner = SimpleNamespace(
        device=torch.device("cuda"), buckets=[1, 2, 4, 8, 16, 24], greedy_buckets=[16, 24],
        prompts=SimpleNamespace(sizes=[64, 512]), start_seconds={}, adapters=None,
        capture_prompts=lambda size: captured.append((size, "prompts")),
        capture=lambda size, **more: captured.append((size, more)),
    )  # fmt: skip
    graphs.capture_steps(runner, is_lazy=is_lazy, show=lambda line, share=None: lines.append(line))
    greedy, kinds = {"is_greedy": True}, ["decode steps", "greedy steps"]
    if is_lazy:
        assert captured == [(24, {}), (16, {}), (2, {}), (1, {}), (24, greedy)]
    else:
        decode = [(size, {}) for size in (24, 16, 8, 4, 2, 1)]
        prompts = [(512, "prompts"), (64, "prompts")]
        assert captured == [*prompts, *decode, (24, greedy), (16, greedy)]
        kinds.insert(0, "steps with prompts")
    assert list(runner.start_seconds) == [f"capturing {kind}" for kind in kinds]
    assert len(lines) == len(captured)


def test_a_start_with_adapters_captures_its_steps_beside_those_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    captured = []
    runner = SimpleNamespace(
        device=torch.device("cuda"), buckets=[1, 2], greedy_buckets=[], adapters=object(),
        prompts=SimpleNamespace(sizes=[64]), start_seconds={},
        capture_prompts=lambda size, **more: captured.append((size, more)),
        capture=lambda size, **more: captured.append((size, more)),
    )  # fmt: skip
    graphs.capture_steps(runner, is_lazy=False)
    adapted = {"adapted": True}
    plain = [(64, {}), (2, {}), (1, {})]
    assert captured == [*plain, (64, adapted), (2, adapted), (1, adapted)]


def test_a_lazy_start_on_a_cpu_captures_nothing():
    graphs.capture_steps(SimpleNamespace(device=torch.device("cpu")), is_lazy=True)


def test_few_layers_have_one_of_every_kind_and_a_second():
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 50,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7,
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "tie_word_embeddings": True, "rope_theta": 1e4,
        }
    )  # fmt: skip
    model = empty_model(config, "float32", "cpu")
    few, count = few_layers(model, [None] * 7)
    assert count == 2
    assert list(few.layers) == list(model.layers)[:2]
    assert few.embed_tokens is model.embed_tokens
    assert few_layers(model, [None, None, 64, None, 64, 64, 64])[1] == 4
    assert few_layers(model, [None] * 6 + [64])[1] == 7
    assert len(model.layers) == 7


def test_only_the_thread_that_notes_launches_does_not_launch():
    assert not is_recording()
    with recording() as found:
        assert is_recording()
    assert not is_recording()
    assert found == {}


def test_a_rank_that_is_alone_waits_for_nobody_and_counts_nothing():
    group = ShardGroup(1, 4, torch.device("cpu"))  # of nobody: a collective would raise
    x = torch.arange(6.0).view(2, 3)
    with group.alone():
        assert group.stack(x).shape == (4, 2, 3)
        assert torch.equal(group.sum(x), 4 * x)
        assert group.concatenate(x).shape == (2, 12)
    assert group.num_calls == 0
    with pytest.raises(ValueError, match=r"group"):
        group.sum(x)


def test_the_environment_says_how_many_processes(monkeypatch):
    monkeypatch.setenv(ahead.PROCESSES, "5")
    assert ahead.num_processes() == 5
    monkeypatch.setenv(ahead.PROCESSES, "0")
    assert ahead.num_processes() == 0
    monkeypatch.setenv(ahead.PROCESSES, "-1")
    with pytest.raises(ValueError, match="must be a number of processes, 0 for none, got '-1'"):
        ahead.num_processes()
    monkeypatch.delenv(ahead.PROCESSES)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(ahead, "available_memory", lambda: 100 << 30)
    assert [ahead.num_processes(ranks) for ranks in (1, 2, 4)] == [12, 6, 3]
    monkeypatch.setattr(ahead, "available_memory", lambda: 7 << 30)
    assert ahead.num_processes() == 3


def _ahead(monkeypatch, device="cuda"):
    monkeypatch.setenv(ahead.PROCESSES, "2")
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        }
    )  # fmt: skip
    return ahead.compile_ahead(
        empty_model(config, "float32", "cpu"),
        ahead.CacheSpec(1, 16, KVSpec(2, 16, 16, torch.float32)),
        torch.device(device), max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32,
        captures_prompts=True, is_lazy=False,
    )  # fmt: skip


def test_nothing_is_compiled_ahead_on_a_cpu(monkeypatch):
    monkeypatch.setattr(ahead, "_stamp_of", None)
    assert _ahead(monkeypatch, "cpu") == {}


def test_what_fails_is_a_warning(monkeypatch, tmp_path):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ahead, "_stamp_of", lambda *_: tmp_path / "none")
    monkeypatch.setattr(ahead, "_compile", fail)
    with pytest.warns(RuntimeWarning, match=r"one after another.*OutOfMemoryError: no room"):
        assert _ahead(monkeypatch) == {}


@pytest.mark.slow
def test_a_start_whose_kernels_are_on_disk_rehearses_nothing(monkeypatch, tmp_path):
    stamp, there = tmp_path / "starts" / "one.json", {"a", "b"}
    requests = [Request("module", "kernel", name, "kernel", b"") for name in ("a", "b")]
    monkeypatch.setattr(ahead, "_stamp_of", lambda *_: stamp)
    monkeypatch.setattr(ahead.compiling, "is_on_disk", lambda name, file: name in there)
    monkeypatch.setattr(ahead, "_compile", lambda *_: {"rehearsal": 1.0})
    assert _ahead(monkeypatch) == {"rehearsal": 1.0}
    ahead._write(stamp, requests)
    assert _ahead(monkeypatch) == {}
    there.remove("b")  # somebody has emptied the cache
    assert _ahead(monkeypatch) == {"rehearsal": 1.0}
    stamp.write_text("[[")
    assert _ahead(monkeypatch) == {"rehearsal": 1.0}


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_first_start_on_a_gpu_compiles_nothing_by_itself(tmp_path):
    """Before it all was compiled that it needs, and tokens are those of a start without that."""
    rows = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "lab/cold_start.py", "--shape", "story", "--length", "256",
         "--processes", "4", "0", "--seconds", "600", "--gpu-memory-utilization", "0.6",
         "--json", str(rows)],
        cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ahead_cold, ahead_warm, plain_cold, _ = json.loads(rows.read_text())["rows"]
    assert ahead_cold["compiled at start"] == ahead_cold["warned"] == []
    assert len(plain_cold["compiled at start"]) > 10
    assert "rehearsal" in ahead_cold
    assert "rehearsal" not in ahead_warm
