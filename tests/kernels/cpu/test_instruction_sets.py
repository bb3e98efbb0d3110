"""The CPU's bitwise and numeric tests under instruction sets that this machine does not choose.

A kernel is other code on a CPU with AVX2, with AVX-512, with products of bfloat16 pairs and with a
matrix unit: registers, blocks, tiles and the order of sums differ. Each set has processes of its
own, in which LLVM is told of that CPU and torch's libraries keep to it; the matrix unit's own
instructions are software there, and so are those of AVX-512 where the CPU has none (see
`software_tiles`). Every day they run a few rows, in the slow form the whole suites.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding as llvm
import numba
import pytest

_ROOT = Path(__file__).parents[3]


class Set(NamedTuple):
    """An instruction set.

    Attributes:
        needs: features that the CPU must have, by LLVM's names.
        cpu: a CPU that has these and no more, or "" for this one.
        libraries: what torch, MKL and oneDNN are told to keep to.
    """

    needs: str
    cpu: str
    libraries: tuple[str, str, str]
    has_tiles: bool = False


SETS = {
    "SSE": Set("sse4.2", "nehalem", ("default", "SSE4_2", "SSE41")),
    "AVX2": Set("avx2", "haswell", ("avx2", "AVX2", "AVX2")),
    "AVX-512": Set("avx512f", "skylake-avx512", ("avx512", "AVX512", "AVX512_CORE")),
    "pairs of bfloat16": Set("avx512bf16", "cooperlake", ("avx512", "AVX512", "AVX512_CORE_BF16")),
    "tiles": Set("avx2", "", ("avx512", "AVX512", "AVX512_CORE_BF16"), has_tiles=True),
}

_FEW = "tests/kernels/cpu/test_attention_few.py"
_LOGITS = "tests/ops/attention/test_huge_logits.py"
# Without a cache of compiled kernels these take 35 s of a core, of which starting takes 16.
FEW_ROWS = {
    "AVX2": [f"{_FEW}::test_few_keys_have_the_bits_of_many[float32-groups-{{}}]"],
    "AVX-512": ["tests/kernels/cpu/test_blocks.py", "-k", "blocks_are_products"],
}
SUITES = {
    "attention": ["tests/kernels/cpu/test_attention.py",
                  "tests/kernels/cpu/test_attention_masks.py",
                  "tests/kernels/cpu/test_attention_packed.py",
                  "tests/kernels/cpu/test_attention_dropout.py"],
    "gradients": ["tests/kernels/cpu/test_attention_backward.py"],
    "few": [_FEW],
    "decoding": ["tests/kernels/cpu/test_decode.py", "tests/kernels/cpu/test_decode_tiles.py",
                 "tests/kernels/cpu/test_paged.py", "tests/kernels/cpu/test_cache_ops.py"],
    "latents": ["tests/kernels/cpu/test_mla.py"],
    "steps": ["tests/kernels/cpu/test_step.py", "tests/kernels/cpu/test_int8.py",
              "tests/kernels/cpu/test_narrow.py",
              "tests/kernels/cpu/test_blocks.py", "tests/engine/test_cpu_step.py"],
    "logits": [_LOGITS, "tests/ops/attention/test_one_visible_key.py", "-k", "cpu",
               "-m", "not gpu"],
}  # fmt: skip


def run(name: str, arguments: list[str], folder: Path) -> None:
    """Run tests in a process of an instruction set."""
    kind = SETS[name]
    features = dict(llvm.get_host_cpu_features())
    if kind.needs not in features:
        pytest.skip("not a CPU of x86-64")
    if not features[kind.needs]:
        pytest.skip(f"this CPU has no {kind.needs}")
    libraries = kind.libraries
    if kind.has_tiles and not features["avx512bf16"]:
        libraries = SETS["AVX2"].libraries
    torch_, mkl, onednn = libraries
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": torch_, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn,
    }  # fmt: skip
    program = "pytest"
    if kind.cpu:
        environment |= {"NUMBA_CPU_NAME": kind.cpu, "NUMBA_CPU_FEATURES": ""}
    if kind.has_tiles:
        program = "tests.kernels.cpu.software_tiles"
        environment["NUMBA_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-m", program, "-q", "-p", "no:cacheprovider", *arguments],
        cwd=_ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout, done.stdout[-4000:]


pytestmark = pytest.mark.skipif(
    any((numba.config.CPU_NAME, numba.config.CPU_FEATURES)), reason="is told of another CPU itself"
)


@pytest.mark.parametrize("name", FEW_ROWS)
def test_a_few_rows_hold(name: str, tmp_path: Path) -> None:
    if name == "AVX2" and not llvm.get_host_cpu_features().get("avx512f"):
        pytest.skip("this CPU has no more: it runs all rows so")
    run(name, FEW_ROWS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("name", SETS)
def test_all_rows_hold(name: str, suite: str, tmp_path: Path) -> None:
    run(name, SUITES[suite], tmp_path)
