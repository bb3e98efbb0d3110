"""A CPU that is no x86, without Triton: every module is imported.

A process is told that its machine is an aarch64 and that LLVM's target has no AVX (but rounds, as
NEON does), cannot import
triton, fcntl or resource (which Windows lacks), and may emit no instruction of x86-64 by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest

_ROOT = Path(__file__).parents[1]
_HIDE = """
import platform, sys
platform.machine = lambda: "aarch64"
for name in ("triton", "fcntl", "resource"):
    sys.modules[name] = None  # whoever imports it gets an ImportError
import torch
from tilewise.kernels.cpu.machine import features, simd
assert not features.features().get("avx2") and simd.REGISTER_BYTES == 16
assert not (simd.HAS_TILES or simd.HAS_BF16_DOT or simd.HAS_INTEGER_DOT)
call_llvm = simd.call_llvm
def portable(builder, name, result, operands):
    assert not name.startswith("x86."), name
    return call_llvm(builder, name, result, operands)
simd.call_llvm = portable
"""
_IMPORT_ALL = """
import importlib, pkgutil, tilewise
from tilewise.kernels import device
assert not device.has_triton()
needs = ("tilewise.kernels.triton", "tilewise.kernels.gluon", "tilewise.kernels.host")
optional = ("ray", "matplotlib", "flash_attn", "vllm", "datasets")
count = 0
for found in pkgutil.walk_packages(tilewise.__path__, "tilewise.", onerror=lambda name: None):
    if found.name.startswith(needs) or found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        measures = missing == "resource" and found.name.startswith("tilewise.bench.")
        assert missing in optional or measures, (found.name, error)
    count += 1
assert count > 300, count
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _HIDE + code], cwd=_ROOT, capture_output=True, text=True,
        env=os.environ | {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


pytestmark = [
    pytest.mark.skipif(
        any((numba.config.CPU_NAME, numba.config.CPU_FEATURES)), reason="is told of another CPU"
    ),
    pytest.mark.skipif("avx2" not in llvm.get_host_cpu_features(), reason="hides nothing"),
]


@pytest.mark.timeout(120)
def test_every_module_is_imported_without_triton_on_another_cpu():
    _run(_IMPORT_ALL)
