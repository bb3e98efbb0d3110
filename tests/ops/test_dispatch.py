"""Which backend runs: a pure function, obeyed when named, explained when refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.spec import AttentionSpec
from tilewise.ops import dispatch

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
    assert dispatch.choose("attention", SPEC, None) == "cpu"


@pytest.fixture
def capability(monkeypatch):
    """Let a GPU of some compute capability be there, and forget earlier choices."""

    def have(arch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device, "arch_of", lambda _: arch)
        dispatch.choose.cache_clear()

    yield have
    dispatch.choose.cache_clear()


CUDA = replace(SPEC, device_type="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(("arch", "backend"), [(80, "triton"), (90, "gluon"), (100, "triton")])
def test_a_cuda_call_runs_on_the_kernels_of_its_gpu(capability, arch, backend):
    capability(arch)
    assert dispatch.choose("attention", CUDA, None) == backend


def test_what_hoppers_kernels_refuse_runs_on_the_portable_ones(capability):
    capability(90)
    single = replace(CUDA, dtype=torch.float32)
    assert dispatch.choose("attention", single, None) == "triton"
    with pytest.raises(UnsupportedError, match="'gluon' cannot run attention.*float32"):
        dispatch.choose("attention", single, "gluon")


def test_hoppers_kernels_are_never_compiled_for_another_gpu(capability):
    capability(80)
    with pytest.raises(UnsupportedError, match="needs a Hopper GPU.*got 8.0"):
        dispatch.choose("attention", CUDA, "gluon")


def test_a_backend_without_a_kernel_says_so():
    reason = dispatch.refusal("merge_states", "gluon", SPEC)
    assert reason == "it has no kernel for this op"


def test_the_reference_runs_when_named():
    assert dispatch.choose("attention", SPEC, "reference") == "reference"


def test_automatic_choice_never_falls_to_the_reference():
    spec = replace(SPEC, device_type="cuda", dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="no backend can run attention on cuda.*float64"):
        dispatch.choose("attention", spec, None)


def test_an_unknown_device_is_named():
    with pytest.raises(UnsupportedError, match="cpu or cuda device, got 'mps'"):
        dispatch.choose("attention", replace(SPEC, device_type="mps"), None)


def test_a_missing_package_is_the_reason(monkeypatch):
    def missing(op, backend):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(dispatch, "kernel_module", missing)
    reason = dispatch.refusal("attention", "triton", SPEC)
    assert reason == "needs the package 'triton', which is not installed"
