"""Workers that die, hang or never start: a named error within seconds, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.engine.tensor_parallel.conftest import SETTINGS, assert_nothing_stays, exists
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.tensor_parallel import processes
from tilewise.errors import CheckpointError, EngineClosedError, WorkerLostError

PROMPT = {"prompt_token_ids": [5, 6, 7]}
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


def _start(checkpoint, **settings):
    return LLM(checkpoint, tensor_parallel_size=2, **{**SETTINGS, **settings})


def test_letting_go_leaves_nothing(checkpoint):
    llm = _start(checkpoint)
    workers = llm.engine.runner.workers
    del llm
    end = time.monotonic() + 15
    while workers._folder.exists() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert_nothing_stays(workers)


@pytest.mark.parametrize("how", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSTOP"])
def test_a_worker_that_dies_or_hangs_ends_its_requests(checkpoint, how, monkeypatch):
    llm = _start(checkpoint)
    monkeypatch.setattr(processes, "SILENCE_S", 4.0)
    workers = llm.engine.runner.workers
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    started = time.monotonic()
    os.kill(workers.pids[1], signal.Signals[how])
    with pytest.raises(WorkerLostError, match="worker 1 of 2 (ended by SIGKILL|must say)"):
        list(stream)
    assert time.monotonic() - started < 15
    with pytest.raises(EngineClosedError, match="worker 1 of 2"):
        llm.generate(PROMPT)
    assert not llm.loop.is_alive
    llm.close()
    assert_nothing_stays(workers)


def test_a_worker_that_dies_while_nothing_runs_ends_the_engine(checkpoint):
    llm = _start(checkpoint)
    workers = llm.engine.runner.workers
    os.kill(workers.pids[0], signal.SIGKILL)
    end = time.monotonic() + 15
    while llm.loop.is_alive and time.monotonic() < end:
        time.sleep(0.05)
    assert not llm.loop.is_alive
    with pytest.raises(EngineClosedError, match="worker 0 of 2 ended by SIGKILL"):
        llm.generate(PROMPT)
    gc.collect()
    assert_nothing_stays(workers)


def test_workers_end_with_a_parent_that_is_killed(checkpoint):
    code = (
        "import sys\n"
        "from tilewise.engine.llm import LLM\n"
        f"llm = LLM({str(checkpoint)!r}, tensor_parallel_size=2, **{SETTINGS!r})\n"
        "workers = llm.engine.runner.workers\n"
        "print(workers._folder, *workers.pids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    # Its workers are warm: those of a server are new interpreters, see test_command.py.
    with warm.Parent(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        folder, *pids = parent.stdout.readline().decode().split()
        pids = list(map(int, pids))
        assert Path(folder).is_dir()
        assert len(pids) == 2
        parent.kill()
    end = time.monotonic() + 15
    while any(map(exists, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(exists, pids))
    assert not Path(folder).exists()


def test_a_checkpoint_that_only_workers_find_broken(checkpoint, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where nobody else's folders are
    with pytest.raises(CheckpointError, match=r"checkpoint must hold model\.safetensors"):
        _start(broken)
    assert not list(tmp_path.glob("tilewise-*"))


def test_one_without_memory_where_all_meet_is_named_at_once(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "WORKER", "tests.engine.tensor_parallel.short_of_memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where nobody else's folders are
    started = time.monotonic()
    what = "OutOfMemoryError: worker 1 of 2: CUDA out of memory"
    with pytest.raises(RuntimeError, match=what) as raised:
        _start(checkpoint)
    (note,) = raised.value.__notes__  # where in the worker
    assert note.startswith("worker 1 of 2 wrote at its end:\nTraceback")
    assert "in without_memory" in note
    assert time.monotonic() - started < 60  # importing torch included, on a busy machine
    assert not list(tmp_path.glob("tilewise-*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel_size": 3}, "must divide the model's num_q_heads 8, got 3"),
        ({"device": "cpu:0"}, "device must be cpu without a number"),
        ({"offload_dir": "x", "swap_space_gib": 0.0}, "offload_gib must be above 0"),
        ({"swap_space_gib": 1e-9}, "swap_space_gib must hold at least one cache block"),
    ],
)
def test_bad_settings_start_no_process(checkpoint, settings, message, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, **{**SETTINGS, "tensor_parallel_size": 2, **settings})


def test_gpus_that_are_missing(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="at most the 1 GPUs that torch sees, got 2"):
        _start(checkpoint, device="cuda")


def test_a_size_is_an_integer(checkpoint):
    with pytest.raises(TypeError, match="tensor_parallel_size must be an integer"):
        LLM(checkpoint, tensor_parallel_size=2.0, **SETTINGS)
