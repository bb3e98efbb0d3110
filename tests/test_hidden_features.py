"""A CPU that is no x86, without Triton: every module is imported, kernels and engine compute.

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
optional = ("ray", "matplotlib", "flash_attn", "vllm", "sglang", "datasets")
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
_COMPUTE = """
from tilewise import attention, paged_attention, LLM, SamplingParams
torch.manual_seed(0)
for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    q, k, v = (torch.randn(2, 70, heads, 64).to(dtype) for heads in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_(True)
    found, want = (attention(q, k, v, causal=True, backend=b) for b in (None, "reference"))
    assert (found.float() - want.float()).abs().max() < most
    grads = [torch.autograd.grad(o.float().square().sum(), (q, k, v)) for o in (found, want)]
    for one, other in zip(*grads):
        assert (one - other).float().abs().max() < 40 * most
    with torch.no_grad():
        k_cache, v_cache = (torch.randn(8, 16, 2, 64).to(dtype) for _ in "kv")
        options = dict(
            block_table=torch.tensor([[3, 1, 0], [7, 2, 5]], dtype=torch.int32),
            seqlens_k=torch.tensor([33, 48], dtype=torch.int32),
        )
        for tokens in (1, 5):
            q = torch.randn(2 * tokens, 4, 64).to(dtype)
            starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
            both = [
                paged_attention(
                    q, k_cache, v_cache, cu_seqlens_q=starts, max_seqlen_q=tokens, backend=b,
                    **options,
                )
                for b in (None, "reference")
            ]
            assert (both[0].float() - both[1].float()).abs().max() < most
with LLM("story", device="cpu", max_model_len=64, max_num_seqs=2) as llm:
    request = SamplingParams(max_tokens=4, temperature=0.0)
    text = llm.generate(["Once upon a time"], request)[0].outputs[0]
    print(list(text.token_ids))
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attention_caches_and_an_engine_compute_on_another_cpu():
    from tilewise import LLM, SamplingParams

    told = _run(_COMPUTE)
    with LLM("story", device="cpu", max_model_len=64, max_num_seqs=2) as llm:
        request = SamplingParams(max_tokens=4, temperature=0.0)
        want = llm.generate(["Once upon a time"], request)[0].outputs[0].token_ids
    assert told.split("\n")[-2] == str(list(want))
