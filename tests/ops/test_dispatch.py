"""Which backend runs: a pure function, obeyed when named, explained when refused."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.planned import refusal
from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
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


def choose(spec: AttentionSpec, backend: str | None) -> str:
    """Return the backend of a call of this spec."""
    shapes = (
        (spec.batch, spec.max_seqlen_q, spec.num_q_heads, spec.head_dim),
        (spec.batch, spec.max_seqlen_k, spec.num_kv_heads, spec.head_dim),
        (spec.batch, spec.max_seqlen_k, spec.num_kv_heads, spec.v_head_dim),
    )
    tensors = [torch.empty(shape, dtype=spec.dtype, device="meta") for shape in shapes]
    return dispatch.choose_plan("attention", Call.of(spec, AttentionTensors(*tensors)), backend)[0]


def test_a_cpu_call_runs_on_the_cpu_backend():
    assert choose(SPEC, None) == "cpu"


@pytest.fixture
def capability(monkeypatch):
    """Let a GPU of some compute capability be there."""

    def have(arch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(device, "arch_of", lambda _: arch)
        monkeypatch.setattr(device, "sm_count_of", lambda _: 132)

    return have


CUDA = SPEC._replace(device_type="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arch", "backend"),
    [(80, "gluon"), (89, "gluon"), (90, "gluon"), (100, "triton"), (120, "gluon")],
)
def test_a_cuda_call_runs_on_the_kernels_of_its_gpu(capability, arch, backend):
    capability(arch)
    assert choose(CUDA, None) == backend


def test_what_hoppers_kernels_refuse_runs_on_the_portable_ones(capability):
    capability(90)
    single = CUDA._replace(dtype=torch.float32)
    assert choose(single, None) == "triton"
    with pytest.raises(UnsupportedError, match="'gluon' cannot run attention.*float32"):
        choose(single, "gluon")


def test_hoppers_kernels_are_never_compiled_for_another_gpu(capability):
    capability(100)
    with pytest.raises(UnsupportedError, match=r"8\.x, 9\.x or 12\.x.*got 10.0"):
        choose(CUDA, "gluon")


def test_what_mma_sync_kernels_refuse_runs_on_the_portable_ones(capability):
    capability(80)
    assert choose(CUDA._replace(head_dim=512, v_head_dim=512), None) == "gluon"
    for changes in ({"dtype": torch.float32}, {"head_dim": 60, "v_head_dim": 60}):
        refused = CUDA._replace(**changes)
        assert choose(refused, None) == "triton"
        with pytest.raises(UnsupportedError, match="'gluon' cannot run attention"):
            choose(refused, "gluon")


def test_a_backend_without_a_kernel_says_so():
    reason = dispatch.refusal("merge_states", "gluon", SPEC)
    assert reason == "it has no kernel for this op"


def test_the_reference_runs_when_named():
    assert choose(SPEC, "reference") == "reference"


def test_automatic_choice_never_falls_to_the_reference():
    spec = SPEC._replace(device_type="cuda", dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="no backend can run attention on cuda.*float64"):
        choose(spec, None)


def test_an_unknown_device_is_named():
    with pytest.raises(UnsupportedError, match="cpu or cuda device, got 'mps'"):
        choose(SPEC._replace(device_type="mps"), None)


def test_a_name_that_a_package_has_no_more_is_the_reason(monkeypatch):
    module = dispatch.kernel_module("attention", "reference")

    def renamed(op, backend):
        if backend == "reference":
            return module
        raise ImportError("cannot import name X", name="numba.core.codegen")

    monkeypatch.setattr(dispatch, "kernel_module", renamed)
    with pytest.raises(UnsupportedError, match="needs another version of 'numba': cannot import"):
        choose(SPEC, "cpu")

    def ours(op, backend):
        raise ImportError("cannot import name 'X'", name="tilewise.kernels.cpu")

    monkeypatch.setattr(dispatch, "kernel_module", ours)
    with pytest.raises(ImportError):
        choose(SPEC, "cpu")


def test_a_missing_package_is_the_reason(monkeypatch):
    def missing(op, backend):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(dispatch, "kernel_module", missing)
    wanted = "needs the package 'triton', which is not installed"
    assert dispatch.refusal("merge", "triton", SPEC) == wanted
    plan = dispatch.plan_by("attention", Call(SPEC, torch.device("cpu"), ()), "triton")
    assert plan == Refusal(wanted)


WIDE = SPEC._replace(
    device_type="cuda", dtype=torch.bfloat16, head_dim=256, v_head_dim=256, max_seqlen_q=512,
    max_seqlen_k=512,
)  # fmt: skip


@pytest.mark.parametrize("width", [(192, 128), (256, 256), (136, 200)])
@pytest.mark.parametrize(
    "changes",
    [
        {"window_right": 0}, {"window_left": 100, "window_right": 7}, {"dtype": torch.float16},
        {"is_varlen": True}, {"has_seqlens_k": True}, {"softcap": 50.0}, {"has_alibi": True},
        {"has_sinks": True}, {"has_bias": True}, {"dropout_p": 0.1}, {"mask_tile": (128, 128)},
        {"deterministic": True}, {"max_seqlen_q": 1}, {"softmax_scale": -1.0}, {"needs_max": True},
    ],
    ids=str,
)  # fmt: skip
def test_no_feature_of_wide_heads_leads_to_hoppers_portable_gradient(capability, width, changes):
    capability(90)
    spec = WIDE._replace(head_dim=width[0], v_head_dim=width[1], **changes)
    assert refusal(dispatch.kernel_module("attention", "gluon"), spec) is None


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"head_dim": 252}, {"mask_tile": (128, 64)}, {"softcap": 1025.0}],
    ids=str,
)
def test_what_of_wide_heads_leads_to_hoppers_portable_gradient(capability, changes):
    capability(90)
    spec = WIDE._replace(**changes)
    assert refusal(dispatch.kernel_module("attention", "gluon"), spec) is not None


def test_an_amd_gpu_has_the_portable_kernels(capability, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device.capability.__wrapped__(0) == device.AMD  # torch's numbers are those of gfx942
    assert not device.runs_ptx()
    capability(device.AMD)
    assert choose(CUDA, None) == "triton"
    with pytest.raises(UnsupportedError, match="needs a GPU of NVIDIA's, got one of AMD's"):
        choose(CUDA, "gluon")
