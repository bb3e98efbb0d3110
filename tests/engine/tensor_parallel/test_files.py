"""Blocks in files, of workers: each file holds what all ranks have of a block."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from tests.engine.tensor_parallel.conftest import (
    SETTINGS,
    assert_nothing_stays,
    write_latents,
    write_model,
    write_windows,
)
from tests.engine.tensor_parallel.test_equal import _greedy, _prompts
from tilewise.engine.llm import LLM
from tilewise.engine.tables.block_files import BlockFiles
from tilewise.engine.tensor_parallel import remote_host, runner
from tilewise.engine.tensor_parallel.remote_host import Window
from tilewise.errors import EngineClosedError, WorkerLostError

KINDS = {"plain": write_model, "windows": write_windows, "latents": write_latents}
PROMPTS = _prompts(33, 29, 40, 37, 21, 45)


def _start(path, files, size=2, swap_space_gib=2e-5):
    return LLM(
        path, tensor_parallel_size=size, offload_dir=files,
        **{**SETTINGS, "swap_space_gib": swap_space_gib},
    )  # fmt: skip


def _generate(llm, turns=1):
    # One after another: the first ones' blocks give way to those that follow.
    outputs = [llm.generate(prompt, _greedy(6))[0] for prompt in PROMPTS * turns]
    llm.loop.call(llm.engine.scheduler.check_integrity)
    return [o.outputs[0].token_ids for o in outputs], sum(o.num_cached_tokens for o in outputs)


def _stores(llm):
    found = llm.engine.store
    return [found] if isinstance(found, BlockFiles) else list(found)


def _hits(llm):
    return sum(store.num_hits for store in _stores(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_workers_find_the_files_of_the_last_ones(kind, tmp_path):
    path, files = KINDS[kind](tmp_path), tmp_path / "files"
    with LLM(path, **SETTINGS) as whole:
        want, _ = _generate(whole)
    with _start(path, files) as llm:
        got, cached = _generate(llm)
        assert (got, cached) == (want, 0)
        again, _ = _generate(llm)
        assert again == want
        assert _hits(llm) > 0  # read into slots of both workers, and attended to
    assert_nothing_stays(llm.engine.runner.workers)
    with _start(path, files) as llm:
        got, cached = _generate(llm)
        assert got == want
        assert _hits(llm) > 0
        assert cached > 0
        assert llm.reset_prefix_cache()
        assert not any(file.is_file() for file in files.rglob("*.block"))


def test_the_files_of_other_shards_are_others(tmp_path):
    """A sum over ranks rounds in another order, and a rank holds other heads."""
    path, files = write_model(tmp_path), tmp_path / "files"
    with _start(path, files, 1, swap_space_gib=1e-5) as llm:
        want, _ = _generate(llm)
    assert list(files.iterdir())
    with _start(path, files) as llm:
        got, _ = _generate(llm)
        assert got == want
        assert _hits(llm) == 0


def test_a_worker_that_dies_while_a_block_is_asked_for_ends_the_engine(tmp_path, monkeypatch):
    path, files = write_model(tmp_path), tmp_path / "files"
    llm = _start(path, files)
    workers = llm.engine.runner.workers
    read = remote_host.RemoteHost.read

    def kill(self, slot, group=0):
        with suppress(ProcessLookupError):  # it is dead already
            os.kill(workers.pids[1], signal.SIGKILL)
        return read(self, slot, group)

    monkeypatch.setattr(remote_host.RemoteHost, "read", kill)
    started = time.monotonic()
    with pytest.raises((WorkerLostError, EngineClosedError), match="worker 1 of 2 ended by SIG"):
        _generate(llm, turns=3)
    assert time.monotonic() - started < 20
    assert llm.close()
    assert_nothing_stays(workers)
    assert not list(files.glob("*.block"))


def test_a_window_without_room_is_an_error_and_not_a_signal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_host.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        Window.make(tmp_path / "window", 4096)


def test_a_window_that_cannot_be_mapped_leaves_no_worker_behind(tmp_path, monkeypatch):
    started = []

    def refuse(workers, *_):
        started.append(workers)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(runner, "RemoteHost", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        _start(write_model(tmp_path), tmp_path / "files")
    assert_nothing_stays(started[0])
