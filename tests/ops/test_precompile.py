"""precompile(): the usual calls, made once; what fails is said, not raised."""

from __future__ import annotations

import importlib

import pytest
import torch

from tilewise import ops
from tilewise.cli import main
from tilewise.errors import UnsupportedError

module = importlib.import_module("tilewise.ops.precompile")  # the function has its name


def test_every_usual_call_runs():
    done = ops.precompile(head_dims=[32], device="cpu", workers=1)
    # dense (full and causal, on and off the tiles), packed (full and causal), paged, latent
    assert (done.calls, done.failures) == (8, ())
    assert done.seconds > 0


def test_what_fails_is_told_and_the_rest_goes_on(monkeypatch):
    def break_down(job, device):
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(module._CALLS, "packed", break_down)
    done = ops.precompile(head_dims=[32], device="cpu", workers=1, needs_backward=False)
    assert done.calls == 8
    want = "packed 32 torch.bfloat16: RuntimeError: no such instruction"
    assert done.failures == (want, want)


def test_paged_calls_come_with_a_plan_and_with_a_prefix(monkeypatch):
    seen, paged_attention = [], module.paged_attention

    def recorded(*args, **options):
        seen.append((options["max_seqlen_q"], options.get("plan"), options.get("shared")))
        return paged_attention(*args, **options)

    monkeypatch.setattr(module, "paged_attention", recorded)
    done = ops.precompile(head_dims=[32], device="cpu", workers=1, needs_backward=False)
    assert done.failures == ()
    runs = [(run, plan is not None, shared is not None) for run, plan, shared in seen]
    assert runs == [(128, False, False), (1, False, False), (1, True, False), (1, False, True)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dims": []}, "head_dims must be"),
        ({"head_dims": [0]}, "head_dims must be"),
        ({"dtypes": []}, "dtypes must"),
        ({"workers": 0}, "workers must be"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ops.precompile(**wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(UnsupportedError, match="without a GPU"):
        ops.precompile(device="cuda")


def test_the_command_says_what_it_did(capsys):
    code = main(
        ["precompile", "--device", "cpu", "--head-dims", "32", "--workers", "1", "--forward-only"]
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert out.startswith("8 of 8 calls compiled in ")
    assert "\r" not in err  # progress is for terminals
