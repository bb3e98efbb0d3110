"""What each form of 8-bit attention takes on Hopper, beside the same form in bfloat16.

    python lab/bytes_forms.py --seconds 60 --json bytes_forms.json

Forms are plain calls, capped ones, ones with sinks, packed sequences and block masks. They are run
in turns: bfloat16's op, the 8-bit op with its quantising, and the 8-bit kernel with what a packed
call lists before it. Numbers are TFLOP/s of the logits that are visible, medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise import attention, attention_fp8, attention_varlen, masks
from tilewise.kernels.gluon.attention import fp8
from tilewise.kernels.gluon.attention.quantise import Packed, quantize_qkv
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import AttentionTensors, Fp8Spec
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.fp8_op import E4M3
from tilewise.ops.attention.op import make_spec

_LENGTH, _HEADS = 8192, {64: 32, 128: 16, 256: 8}
_PACKED = (3000, 100, 1500, 70, 2048, 590, 884)  # 8,192 tokens together
_CALLS = 5  # of a measurement


def forms(head_dim: int) -> dict[str, tuple[dict[str, Any], dict[str, Any], int]]:
    """Return by name the rule, where sequences lie, and how many logits of a head are visible."""
    sinks = torch.linspace(-2.0, 5.0, _HEADS[head_dim], device="cuda")
    whole, diagonal = _LENGTH**2, _LENGTH * (_LENGTH + 1) // 2
    edges = torch.tensor([0, *_PACKED], device="cuda").cumsum(0).to(torch.int32)
    where: dict[str, Any] = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
    where |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(_PACKED))
    of_packed = sum(n * (n + 1) // 2 for n in _PACKED)
    documents = masks.document(list(_PACKED)).to("cuda")
    return {
        "plain": ({}, {}, whole),
        "causal": ({"causal": True}, {}, diagonal),
        "softcap": ({"softcap": 30.0}, {}, whole),
        "softcap, causal": ({"causal": True, "softcap": 30.0}, {}, diagonal),
        "sinks, causal": ({"causal": True, "sinks": sinks}, {}, diagonal),
        "packed, causal": ({"causal": True}, where, of_packed),
        "packed, causal, softcap, sinks": (
            {"causal": True, "softcap": 30.0, "sinks": sinks}, where, of_packed
        ),
        "mask of documents, causal": ({"causal": True, "mask": documents}, {}, of_packed),
    }  # fmt: skip


def ways(
    head_dim: int, rule: dict[str, Any], where: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Return how a form is computed, by name."""
    shape = (1, _LENGTH, _HEADS[head_dim], head_dim)
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=g, device="cuda").bfloat16()[slice(None) if not where else 0]
        for _ in range(3)
    )
    options = AttentionSignature(q, k, v, **rule, **where).bind().options
    spec = make_spec(q, k, v, options)._replace(dtype=E4M3)
    tensors = AttentionTensors(None, None, None, *options.beside)
    packed = Packed(*where.values()) if where else None
    given = (*quantize_qkv(q, k, v, packed=packed), *tensors)
    plan = fp8.plan_quantized(Call.of(Fp8Spec(spec, q.dtype), given))

    def bfloat16() -> Any:
        if where:
            return attention_varlen(q, k, v, backend="gluon", **rule, **where)
        return attention(q, k, v, backend="gluon", **rule)

    return {
        "bfloat16": bfloat16,
        "fp8 op": lambda: attention_fp8(q, k, v, backend="gluon", **rule, **where),
        "fp8 kernel": lambda: plan.run(*given)[0],
    }


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds that a call takes on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALLS


def main() -> None:
    """Measure all forms in turns until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--share", type=int, nargs=2, metavar=("I", "N"),
        help="only run every Nth form once, from the Ith: N such processes compile side by side",
    )  # fmt: skip
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    runs, flops, failed = {}, {}, {}
    number = 0
    with torch.no_grad():
        for head_dim in (128, 256, 64):
            for form, (rule, where, visible) in forms(head_dim).items():
                number += 1
                if given.share and number % given.share[1] != given.share[0]:
                    continue
                for way, run in ways(head_dim, rule, where).items():
                    name = f"d{head_dim} {form}: {way}"
                    try:
                        run()
                    except Exception as error:  # one form that fails must not hide the others
                        failed[name] = str(error)[:300]
                        continue
                    runs[name] = run
                    flops[name] = 4.0 * head_dim * _HEADS[head_dim] * visible
        torch.cuda.synchronize()
        if given.share:
            return
        taken: dict[str, list[float]] = {name: [] for name in runs}
        turns = 0
        while turns < 2 or (time.monotonic() < end and turns < 50):
            for name, run in runs.items():
                taken[name].append(seconds_of(run))
            turns += 1
    speeds = {
        name: round(flops[name] / statistics.median(each[1:]) / 1e12, 1)
        for name, each in taken.items()
    }
    found = {
        "device": torch.cuda.get_device_name(), "turns": turns, "tflops": speeds, "failed": failed
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
