"""CPU features that kernels may use: those for which LLVM generates code in this process.

They are the CPU's own, unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES name others; tile registers
need Linux's permission, too. The features decide which code a kernel has, so `once.py` makes them a
part of the key under which a compiled kernel is cached.
"""

from __future__ import annotations

import ctypes
import platform

import llvmlite.binding as llvm
import numba
from numba.core.codegen import get_host_cpu_features, initialize_llvm

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64

# For each feature of x86-64 a function, and a word of its assembly that only this feature gives.
_MARKS = {
    "avx512f": "zmm",
    "avx2": "ymm",
    "avx512bw": "zmm",
    "f16c": "vcvtph2ps",
    "avx512bf16": "vcvtneps2bf16",
}
_PROBE = """
define void @avx512f(<16 x float>* %p) {
  %a = load <16 x float>, <16 x float>* %p
  %b = fadd <16 x float> %a, %a
  store <16 x float> %b, <16 x float>* %p
  ret void
}
define void @avx2(<8 x i32>* %p) {
  %a = load <8 x i32>, <8 x i32>* %p
  %b = add <8 x i32> %a, %a
  store <8 x i32> %b, <8 x i32>* %p
  ret void
}
define void @avx512bw(<32 x i16>* %p) {
  %a = load <32 x i16>, <32 x i16>* %p
  %b = add <32 x i16> %a, %a
  store <32 x i16> %b, <32 x i16>* %p
  ret void
}
define void @f16c(<8 x half>* %p, <8 x float>* %q) {
  %a = load <8 x half>, <8 x half>* %p
  %b = fpext <8 x half> %a to <8 x float>
  store <8 x float> %b, <8 x float>* %q
  ret void
}
define void @avx512bf16(<16 x float>* %p, <16 x bfloat>* %q) {
  %a = load <16 x float>, <16 x float>* %p
  %b = fptrunc <16 x float> %a to <16 x bfloat>
  store <16 x bfloat> %b, <16 x bfloat>* %q
  ret void
}
"""


def features() -> dict[str, bool]:
    """Return whether code of this process may use each CPU feature, by LLVM's name; a feature that
    is missing counts as False.

    LLVM lists them only for the CPU it runs on. For another CPU, or if numba disables some, they
    are found from the code that LLVM generates for a few functions.
    """
    config = numba.config
    if config.CPU_NAME is None and config.CPU_FEATURES is None and config.ENABLE_AVX:
        return dict(llvm.get_host_cpu_features())
    initialize_llvm()
    listed = config.CPU_FEATURES
    if listed is None:  # then numba passes the CPU's own features to LLVM, whatever name is given
        listed = get_host_cpu_features()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=config.CPU_NAME or llvm.get_host_cpu_name(), features=listed
    )
    found, at = dict.fromkeys(_MARKS, False), ""
    for line in machine.emit_assembly(llvm.parse_assembly(_PROBE)).splitlines():
        label = line.partition(":")[0].lstrip("_")
        at = label if label in _MARKS else at
        if at and _MARKS[at] in line:
            found[at] = True
    return found | {"amx-bf16": {"+amx-tile", "+amx-bf16"} <= set(listed.split(","))}


def grants_tiles() -> bool:
    """Request the tile registers from Linux for all threads of the process, and return whether it
    grants them; False on other systems."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
