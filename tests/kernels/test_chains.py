"""Chains of kernels that begin early: the same bits as one after the other, run after run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.chains import CHAINS, MODELS, MODES, STEPS, Chain, config_of, launched
from tests.kernels.gluon import delays
from tilewise import ops
from tilewise.kernels import early

ROOT = Path(__file__).parents[2]
ROWS, LAYERS = 4, 2


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


def stressed(folder: Path, *cases: str, copy: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Stress chains in processes of their own, where no fresh memory is filled between kernels.

    Args:
        folder: for what is compiled of a copy.
        cases: what their names begin with.
        copy: of the package, to be stressed in its place.

    Returns:
        The exit status, and what the stress says.
    """
    path, environment = [str(ROOT)], dict(os.environ)
    if copy is not None:
        path.insert(0, str(copy))
        environment["TILEWISE_DELAYED"] = str(copy)
    environment["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "lab" / "stress_kernels.py"), "--seconds", "200",
         "--runs", "2000", "--json", str(folder / "found.json"), "--cases", *cases],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (folder / "found.json").exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((folder / "found.json").read_text())


@pytest.mark.gpu
def test_every_run_of_a_chain_gives_the_bits_of_kernels_one_after_the_other(tmp_path: Path):
    status, found = stressed(tmp_path, "chain/chosen_")
    assert status == 0, found
    assert [case["runs"] >= 2000 for case in found["cases"]] == [True] * len(CHAINS)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_norm_that_does_not_wait_for_the_kernel_before_it_is_found(tmp_path: Path):
    delays.write_package(tmp_path)
    norm = tmp_path / "tilewise" / "kernels" / "triton" / "step" / "norm.py"
    text = norm.read_text()
    assert text.count("    await_previous(EARLY)\n") == 1
    norm.write_text(text.replace("    await_previous(EARLY)\n", ""))
    status, found = stressed(tmp_path, "chain/first_small_8", copy=tmp_path)
    assert status == 1
    [case] = found["cases"]
    # At once, beside one kernel after the other, or in a later run.
    assert case.get("error", "").startswith("AssertionError: ('first'") or case["differing"] > 0
