"""Instructions that kernels are made of: the CPU's own, or those that numba is told of."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
import numba
import pytest
import torch

from tilewise.kernels.cpu.machine import features, simd
from tilewise.kernels.cpu.machine.rows import why_not_dtype

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of x86-64")

NAMES = ["avx2", "avx512f", "avx512bw", "avx512bf16", "f16c", "amx-bf16"]
# Features of CPUs by their names alone, in the order of NAMES.
CPUS = {
    "nehalem": (0, 0, 0, 0, 0, 0),
    "ivybridge": (0, 0, 0, 0, 1, 0),
    "haswell": (1, 0, 0, 0, 1, 0),
    "skylake-avx512": (1, 1, 1, 0, 1, 0),
    "cooperlake": (1, 1, 1, 1, 1, 0),
    "znver4": (1, 1, 1, 1, 1, 0),
}


def found() -> tuple[int, ...]:
    known = features.features()
    return tuple(int(bool(known.get(name))) for name in NAMES)


@pytest.mark.parametrize("cpu", CPUS)
def test_features_of_a_named_cpu_are_its_own(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", cpu)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "")
    assert found() == CPUS[cpu]


def test_listed_features_are_added_to_those_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "cooperlake")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "-avx512bf16,+amx-tile,+amx-bf16")
    assert found() == (1, 1, 1, 0, 1, 1)
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "-avx512f")
    assert found() == (1, 0, 0, 0, 1, 0)


def test_a_name_alone_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba goes on to tell LLVM of the CPU's own features then, and float16 works as before."""
    here = found()
    for cpu in ("haswell", llvm.get_host_cpu_name()):
        monkeypatch.setattr(numba.config, "CPU_NAME", cpu)
        assert found()[:5] == here[:5]


def test_the_probe_finds_what_llvm_says_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = found()
    monkeypatch.setattr(numba.config, "CPU_FEATURES", features.get_host_cpu_features())
    assert found() == here


@pytest.mark.skipif(
    any((numba.config.CPU_NAME, numba.config.CPU_FEATURES)), reason="is told of another CPU"
)
def test_kernels_have_the_features_of_this_cpu() -> None:
    own = llvm.get_host_cpu_features()
    wide = 64 if own.get("avx512f") else 32 if own.get("avx2") else 16
    assert wide == simd.REGISTER_BYTES
    assert bool(own.get("avx512bf16")) == simd.HAS_BF16_DOT
    assert bool(own.get("f16c")) == simd.HAS_HALF
    assert (why_not_dtype(torch.float16) is None) == simd.HAS_HALF
