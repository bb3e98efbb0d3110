"""Of processes that need a kernel at the same moment, one compiles it and the others load it."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from numba import njit

from tilewise.kernels.cpu.machine import once, simd, telling

fcntl = pytest.importorskip("fcntl")

KERNEL = """
def halve(number):
    if number < 0:
        raise ValueError("number must be positive")
    return number // 2

def wrong(number):
    return number.no_such_field
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module with functions to compile and an empty cache."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "halves.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("halves")
    del sys.modules["halves"]


def shared(function):
    compiled = njit(cache=True)(function)
    once.compile_once(compiled, "stamp")
    return compiled


def another(compiled):
    """Let another process have the lock."""
    path = compiled._cache.lock_path
    path.parent.mkdir(parents=True, exist_ok=True)
    code = (
        "import fcntl, sys, time\n"
        f"lock = open({str(path)!r}, 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"locked\n"
    return process


def is_free(compiled):
    with open(compiled._cache.lock_path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def waiting_call(compiled, monkeypatch):
    """Start a call in a thread; return the thread and its results once it waits for the lock."""
    looks, results = threading.Event(), []
    sleep = once.time.sleep
    monkeypatch.setattr(once.time, "sleep", lambda seconds: (looks.set(), sleep(seconds)))
    thread = threading.Thread(target=lambda: results.append(compiled(9)))
    thread.start()
    assert looks.wait(60)
    return thread, results


def test_what_another_process_compiles_meanwhile_is_loaded(module, monkeypatch, tmp_path):
    first = shared(module.halve)
    holder = another(first)
    try:
        thread, results = waiting_call(first, monkeypatch)
        # Numba's lock is with the thread that waits, as it is with one that compiles.
        other = subprocess.run(
            [sys.executable, "-c",
             "from numba import njit; import halves\n"
             "compiled = njit(cache=True)(halves.halve)\n"
             "cache = compiled._cache\n"
             "cache._cache_file._source_stamp, key = 'stamp', cache._index_key\n"
             f"cache._index_key = lambda *call: (*key(*call), {once.made_of()})\n"
             "print(compiled(8))"],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert other.stdout == "4\n"
        assert not results
    finally:
        holder.communicate()
    thread.join(60)
    assert results == [4]
    assert not first.stats.cache_misses
    assert sum(first.stats.cache_hits.values()) == 1
    assert is_free(first)


def test_the_lock_of_a_process_that_dies_is_free(module, monkeypatch):
    compiled = shared(module.halve)
    holder = another(compiled)
    thread, results = waiting_call(compiled, monkeypatch)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    thread.join(60)
    assert results == [4]
    assert sum(compiled.stats.cache_misses.values()) == 1
    assert is_free(compiled)


def test_who_waits_too_long_compiles_for_itself(module, monkeypatch):
    monkeypatch.setattr(once, "PATIENCE_S", 0.1)
    compiled = shared(module.halve)
    holder = another(compiled)
    try:
        assert compiled(9) == 4
        assert not is_free(compiled)
    finally:
        holder.communicate()


def test_the_lock_is_given_back_after_compiling_and_after_an_error(module):
    compiled, wrong = shared(module.halve), shared(module.wrong)
    assert compiled(9) == 4
    with pytest.raises(Exception, match="no_such_field"):
        wrong(9)
    assert is_free(compiled)
    assert is_free(wrong)
    again = shared(module.halve)
    assert again(8) == 4
    assert not again.stats.cache_misses


def test_garbage_is_looked_for_as_before_after_compiling(module):
    before = gc.get_threshold()
    compiled, seen = shared(module.halve), []
    compile_now = compiled.targetctx.codegen

    def codegen():
        seen.append(gc.get_threshold())
        return compile_now()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.targetctx, "codegen", codegen)
        assert compiled(9) == 4
    assert seen
    assert max(threshold[0] for threshold in seen) >= 100_000
    assert gc.get_threshold() == before


def test_who_waits_for_a_kernel_is_told(module, monkeypatch, capsys):
    monkeypatch.delenv("TILEWISE_PROGRESS", raising=False)
    monkeypatch.setattr(telling, "MOMENT_S", 0.0)
    monkeypatch.setattr(telling, "_has_told", False)
    compiled = shared(module.halve)
    assert compiled(9) == 4
    assert capsys.readouterr().err == f"{telling.LINE}\n"
    monkeypatch.setattr(telling, "_has_told", False)
    again = shared(module.halve)
    assert again(9) == 4  # from the cache
    assert capsys.readouterr().err == ""
    holder = another(again)
    try:
        monkeypatch.setattr(once, "PATIENCE_S", 0.2)
        assert again(9.0) == 4.0
        assert capsys.readouterr().err == f"{telling.LINE}\n"
    finally:
        holder.communicate()


def test_a_cache_of_another_stamp_is_not_used(module):
    assert shared(module.halve)(9) == 4
    compiled = njit(cache=True)(module.halve)
    once.compile_once(compiled, "another stamp")
    assert compiled(9) == 4
    assert sum(compiled.stats.cache_misses.values()) == 1


FACTS = [name for name, fact in vars(simd).items() if name.isupper() and isinstance(fact, int)]


@pytest.mark.parametrize("fact", [*FACTS, "l2_bytes"])
def test_a_kernel_of_another_kind_of_machine_is_not_used(module, monkeypatch, fact):
    """One that takes instructions which this process has not would end it."""
    assert shared(module.halve)(9) == 4
    with monkeypatch.context() as other:
        if fact == "l2_bytes":
            other.setattr(once, "l2_bytes", lambda: 12345)
        else:
            other.setattr(simd, fact, 3 - getattr(simd, fact))
        there = shared(module.halve)
        assert there(9) == 4
        assert sum(there.stats.cache_misses.values()) == 1
        again = shared(module.halve)
        assert again(9) == 4
        assert not again.stats.cache_misses
    here = shared(module.halve)
    assert here(9) == 4
    assert not here.stats.cache_misses  # what the other one saved lies beside it
