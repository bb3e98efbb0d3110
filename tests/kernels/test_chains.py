"""Chains of kernels that begin early: the same bits as one after the other, run after run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import kernel_stress
from tests.kernels.chains import CHAINS, MODELS, MODES, STEPS, Chain, config_of, launched
from tests.kernels.gluon import delays
from tilewise import ops
from tilewise.kernels import early

ROOT = Path(__file__).parents[2]
ROWS, LAYERS = 4, 2
# Seconds of a chain on a GPU, beside what it takes to compile it.
SECONDS = 1.0


@pytest.fixture(scope="module")
def chain() -> Chain:
    tiny = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    }  # fmt: skip
    return Chain(config_of(MODELS["small"]) | tiny, ROWS, 40, "cpu")


def test_a_run_begins_where_the_one_before_began_and_leaves_all_that_it_computed(chain: Chain):
    found = chain.run("off")
    again = chain.run("chosen")
    assert all(torch.equal(again[name], x) for name, x in found.items())
    assert all(bool(x.isfinite().all()) for x in found.values())
    assert found["keys 1"].shape == (ROWS * STEPS, 2, 16)
    drawn = found["tokens"][:, :, 0]
    assert (drawn >= 0).sum(1).tolist() == [0, ROWS, ROWS, 0]  # a place for each step
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("run", [0, 1])
def test_a_kernel_that_computes_something_else_in_one_of_the_runs_is_seen(
    chain: Chain, run: int, monkeypatch: pytest.MonkeyPatch
):
    attend, calls = ops.paged_attention, iter(range(1000))

    def spoiled(*given, **options):
        o = attend(*given, **options)
        if next(calls) == run * LAYERS * STEPS:
            o[0] += 1
        return o

    chain.check("chosen")
    monkeypatch.setattr(ops, "paged_attention", spoiled)
    with pytest.raises(AssertionError, match="chosen"):
        chain.check("chosen")


def test_what_no_kernel_has_written_is_seen(chain: Chain, monkeypatch: pytest.MonkeyPatch):
    write = ops.rope_write_kv_cache

    def nowhere(q, k, v, k_cache, v_cache, *given, **options):
        return write(q, k, v, k_cache.clone(), v_cache.clone(), *given, **options)

    monkeypatch.setattr(ops, "rope_write_kv_cache", nowhere)
    with pytest.raises(AssertionError, match="logits 0"):
        chain.check("chosen")


def test_modes_hold_inside_alone():
    chosen, large = early.CHOSEN, early.CHOSEN_LARGE
    with launched(MODES["after"]):
        assert set(early.CHOSEN.values()) == {early.AFTER}
        assert early.CHOSEN_LARGE is early.CHOSEN
    for modes in (MODES["chosen"], {}):
        with launched(modes):
            assert early.CHOSEN is (chosen if modes is None else modes)
        assert early.CHOSEN is chosen
        assert early.CHOSEN_LARGE is large


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CHAINS, ids=lambda case: f"{case[0]}_{case[1]}")
def test_every_run_of_a_chain_gives_the_bits_of_kernels_one_after_the_other(case, mode):
    model, rows, _ = case
    name = f"chain/{mode}_{model}_{rows}"
    found = kernel_stress.stress(name, dict(kernel_stress.gpu_cases())[name](), SECONDS)
    assert found.differing == 0, found
    assert found.runs > 100


def write_mistake(folder: Path) -> None:
    """Write a copy of the package in which a norm does not wait for the kernel before it."""
    delays.write_package(folder)
    norm = folder / "tilewise" / "kernels" / "triton" / "step" / "norm.py"
    text = norm.read_text()
    assert text.count("    await_previous(EARLY)\n") == 1
    norm.write_text(text.replace("    await_previous(EARLY)\n", ""))


@pytest.mark.gpu
@pytest.mark.slow
def test_a_kernel_that_does_not_wait_is_found(tmp_path: Path):
    write_mistake(tmp_path)
    environment = os.environ | {
        "TILEWISE_DELAYED": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "stress_kernels.py"), "--seconds", "150",
         "--runs", "1000", "--cases", "chain/first_small_8", "--warm-processes", "0"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    is_seen = "AssertionError: ('first'" in done.stdout  # at once, beside one after the other
    assert is_seen or found["differing"] > 0, done.stdout[-2000:]
