"""Compile one variant of the e4m3 kernel for sm_90 and tell what became of it, as JSON.

    python -m tests.kernels.gluon.fp8_compile HEAD_DIM [FEATURE ...]

Features: causal, window, lengths, tokens, cap, sinks, packed, mask. Run with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import sass
from tilewise.kernels.gluon.forward.fp8.kernel import attention_fp8_fwd_kernel
from tilewise.kernels.gluon.forward.fp8.tiles import variant_of
from tilewise.kernels.host.descriptors import tile_layout
from tilewise.kernels.spec import AttentionSpec

_NAMES = {torch.float8_e4m3fn: "fp8e4nv", torch.bfloat16: "bf16"}


def _descriptor(dtype: torch.dtype, rows: int, columns: int) -> str:
    layout = tile_layout(dtype, rows, columns)
    return f"tensordesc<{_NAMES[dtype]}[1, 1, {rows}, {columns}],{layout!r}>"


def compile_variant(spec: AttentionSpec, per_token: bool) -> Any:
    """Return the compiled kernel of a call."""
    variant = replace(variant_of(spec), PER_TOKEN=per_token)
    e4m3, width = torch.float8_e4m3fn, variant.HEAD_DIM // variant.PARTS
    signature = {
        "q_desc": _descriptor(e4m3, 64, variant.HEAD_DIM),
        "k_desc": _descriptor(e4m3, variant.TILE_N, variant.HEAD_DIM),
        "v_desc": _descriptor(e4m3, width, variant.TILE_N),
        "o_desc": _descriptor(torch.bfloat16, 64, width),
    }
    constants: dict[str, Any] = {"VARIANT": variant}
    attributes = {}
    for index, name in enumerate(attention_fp8_fwd_kernel.arg_names):
        if name in signature:
            continue
        given = {"seqlens_ptr": spec.has_seqlens_k, "sinks_ptr": spec.has_sinks}
        given |= {"softcap": spec.softcap > 0}
        given |= dict.fromkeys(("o_ptr", "plan_ptr", "size_ptr"), spec.is_varlen)
        if name.startswith("mask_"):
            given[name] = spec.mask_tile is not None
        if not given.get(name, True):
            signature[name], constants[name] = "constexpr", None
        elif name.endswith("_ptr"):
            integers = ("seqlens", "counter", "plan", "size")
            integers += ("mask_bits", "mask_spans", "mask_entries")
            pointer = dict.fromkeys((f"{each}_ptr" for each in integers), "*i32")
            pointer["o_ptr"] = "*bf16"
            signature[name] = pointer.get(name, "*fp32")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            kind = {"softmax_scale": "fp32", "softcap": "fp32", "VARIANT": "constexpr"}
            signature[name] = kind.get(name, "i32")
    source = GluonASTSource(
        fn=attention_fp8_fwd_kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def _assembled(kernel: Any, cubin: Path) -> str:
    """Write the machine code of a kernel, and return what the assembler says of it."""
    ptx = cubin.with_suffix(".ptx")
    ptx.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def describe(kernel: Any, said: str) -> dict[str, Any]:
    """Return what the assembler complained of, and what the loops over keys hold.

    Args:
        said: by the assembler when Triton ran it; nothing where the kernel was in Triton's cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        if "bytes spill stores" in said:
            report = said
            cubin.write_bytes(kernel.asm["cubin"])
        else:
            report = _assembled(kernel, cubin)
        instructions, labels = sass.disassemble(cubin)
    loops = []
    for begin, end in _tightest_loops(instructions, labels):
        body = instructions[begin:end]
        if any(i.startswith("MUFU.RCP") for i in body):
            continue  # a loop over output tiles: it divides
        loops.append(
            {
                "length": end - begin,
                "local": sum(i.startswith(("LDL", "STL")) for i in body),
                "permutations": sum(i.startswith("PRMT") for i in body),
            }
        )
    return {
        "complaints": re.findall(r"C75\d\d.*", report),
        "products": sum(i.startswith("QGMMA") for i in instructions),
        "loops": loops,
        "overwritten": sass.overwritten_operands(instructions),
        "shared": kernel.metadata.shared,
    }


def _tightest_loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return (begin, end) of the innermost loops that multiply."""
    loops = []
    for index, instruction in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_\S+?)\)", instruction)
        if jump and labels.get(jump[1], index + 1) <= index:
            body = instructions[labels[jump[1]] : index + 1]
            if any(i.startswith("QGMMA") for i in body):
                loops.append((labels[jump[1]], index + 1))
    return [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]


def main(head_dim: int, features: list[str]) -> None:
    """Compile and print."""
    spec = AttentionSpec(
        device_type="cuda",
        dtype=torch.float8_e4m3fn,
        batch=2,
        max_seqlen_q=4096,
        max_seqlen_k=4096,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window_left=1000 if "window" in features else -1,
        window_right=0 if "causal" in features else -1,
        softcap=30.0 if "cap" in features else 0.0,
        is_varlen="packed" in features,
        has_seqlens_k="lengths" in features,
        has_sinks="sinks" in features,
        mask_tile=(128, 128) if "mask" in features else None,
    )
    triton.knobs.nvidia.dump_ptxas_log = True
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        kernel = compile_variant(spec, "tokens" in features)
    print(json.dumps(describe(kernel, said.getvalue())))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
