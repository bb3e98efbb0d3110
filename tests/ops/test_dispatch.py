"""Which backend runs: a pure function, obeyed when named, explained when refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.errors import UnsupportedError
from tilewise.kernels.spec import AttentionSpec
from tilewise.ops import _dispatch

SPEC = AttentionSpec(
    device_type="cpu",
    dtype=torch.float32,
    batch=1,
    max_seqlen_q=8,
    max_seqlen_k=8,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
)


def test_a_cpu_call_runs_on_the_cpu_backend():
    assert _dispatch.choose("attention", SPEC, None) == "cpu"


def test_a_cuda_call_runs_on_triton():
    spec = replace(SPEC, device_type="cuda", dtype=torch.bfloat16)
    assert _dispatch.choose("attention", spec, None) == "triton"


def test_the_reference_runs_when_named():
    assert _dispatch.choose("attention", SPEC, "reference") == "reference"


def test_automatic_choice_never_falls_to_the_reference():
    spec = replace(SPEC, device_type="cuda", dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="no backend can run attention on cuda.*float64"):
        _dispatch.choose("attention", spec, None)


def test_an_unknown_device_is_named():
    with pytest.raises(UnsupportedError, match="cpu or cuda device, got 'mps'"):
        _dispatch.choose("attention", replace(SPEC, device_type="mps"), None)


def test_a_missing_package_is_the_reason(monkeypatch):
    def missing(op, backend):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(_dispatch, "kernel_module", missing)
    reason = _dispatch.refusal("attention", "triton", SPEC)
    assert reason == "needs the package 'triton', which is not installed"
