"""Attention by mma.sync beside FlashAttention-2, as devices of sm_80 or sm_89 run it.

    TRITON_OVERRIDE_ARCH=sm80 python lab/ampere.py --json found.json [--only NAME ...]

Triton lowers the kernels for that architecture (mma.sync, cp.async) and assembles them for the card
at hand, for which tilewise takes the same one; no CTA gets more shared memory than such a device
has. FlashAttention-2 is torch's, called without its dispatcher. Each row is measured in turns with
the host ahead, each peer first in turn; a result that is further from float64 than twice
FlashAttention-2's, on the first heads and 512 rows, ends it. Rows that FlashAttention-2 does not
have are measured beside the plain call of the same size, heads of 512 channels beside the portable
kernels, whose results must be equal but for rounding, and heads of 256 channels. Figures are
TFLOP/s. As sm90 the last ones run what a Hopper card would.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise.kernels import device
from tilewise.kernels.gluon.attention import plan as gluon
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, MaskTensors
from tilewise.kernels.triton.attention import plan as portable

TOKENS, HIDDEN = 16384, 2048
ROUNDS, CALLS, AHEAD = 5, 6, 3_000_000  # the last in cycles
LENGTHS = (8192, 4096, 1024, 512, 2048, 512)  # of packed sequences
_LIMITS = {80: 163 << 10, 89: 99 << 10}  # bytes of shared memory of a CTA
_flash = torch.ops.aten._flash_attention_forward
_flash_bwd = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Row:
    """One call, forward or backward."""

    width: int
    length: int = 4096
    causal: bool = True
    window: int = -1  # keys to the left
    kv_heads: int = 1  # one for so many query heads
    packed: bool = False
    added: str = ""  # what FlashAttention-2 does not have

    @property
    def name(self) -> str:
        kind = "packed" if self.packed else f"N {self.length}"
        parts = [f"D {self.width}", kind, "causal" if self.causal else "full"]
        if self.window >= 0:
            parts.append(f"window {self.window}")
        if self.kv_heads > 1:
            parts.append(f"group {self.kv_heads}")
        return ", ".join([*parts, *([self.added] if self.added else [])])


def rows() -> list[Row]:
    """Return all rows."""
    plain = [
        Row(width, length, causal)
        for width in (64, 128, 256)
        for length in (512, 1024, 4096, 16384)
        for causal in (False, True)
    ]
    kinds = [Row(width, packed=True) for width in (64, 128)]
    kinds += [Row(width, 16384, window=1024) for width in (64, 128)]
    kinds += [Row(128, kv_heads=8), Row(64, kv_heads=8)]
    wide = [Row(512, length, causal) for length in (1024, 4096, 16384) for causal in (False, True)]
    names = ("softcap", "ALiBi", "sinks", "bias", "dropout", "documents", "deterministic")
    return plain + kinds + [Row(128, added=name) for name in names] + wide


class Case:
    """The tensors of a row and its calls."""

    def __init__(self, row: Row) -> None:
        torch.manual_seed(0)
        self.row = row
        batch, heads = (1 if row.packed else TOKENS // row.length), HIDDEN // row.width
        self.lengths = LENGTHS if row.packed else (row.length,) * batch
        shape = (TOKENS, heads, row.width)
        kv_shape = (TOKENS, heads // row.kv_heads, row.width)
        lead = () if row.packed else (batch, row.length)

        def draw(shape: tuple[int, ...]) -> Tensor:
            x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            return x.view(*lead, *shape[1:]) if lead else x

        self.q, self.k, self.v, self.do = map(draw, (shape, kv_shape, kv_shape, shape))
        self.longest = max(self.lengths)
        self.cu = None
        if row.packed:
            starts = torch.tensor([0, *self.lengths]).cumsum(0)
            self.cu = starts.to("cuda", torch.int32)
        added = row.added
        self.spec = AttentionSpec(
            device_type="cuda", dtype=torch.bfloat16, batch=len(self.lengths),
            max_seqlen_q=self.longest, max_seqlen_k=self.longest, num_q_heads=heads,
            num_kv_heads=heads // row.kv_heads, head_dim=row.width, v_head_dim=row.width,
            window_left=row.window, window_right=0 if row.causal else -1,
            softmax_scale=row.width**-0.5, is_varlen=row.packed,
            softcap=30.0 if added == "softcap" else 0.0, has_alibi=added == "ALiBi",
            has_sinks=added == "sinks", has_bias=added == "bias",
            dropout_p=0.1 if added == "dropout" else 0.0, deterministic=added == "deterministic",
            mask_tile=(128, 128) if added == "documents" else None,
        )  # fmt: skip
        given: dict[str, Any] = {"cu_seqlens_q": self.cu, "cu_seqlens_k": self.cu}
        if added == "ALiBi":
            given["alibi_slopes"] = torch.linspace(0.01, 0.5, heads, device="cuda")
        if added == "sinks":
            given["sinks"] = torch.randn(heads, device="cuda")
        if added == "bias":
            shape = (1, heads, row.length, row.length)
            given["bias"] = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        if added == "dropout":
            given["philox"] = torch.tensor([1, 2], device="cuda")
        if added == "documents":
            ids = torch.arange(row.length, device="cuda") // 500
            mask = MaskTensors(*masks.document(ids=ids, tile=128).tensors())
            given |= {f"mask_{name}": x for name, x in mask._asdict().items()}
        self.tensors = AttentionTensors(self.q, self.k, self.v, **given)

    def flops(self, backward: bool) -> float:
        """Return the FLOPs as the FlashAttention papers count them."""
        pairs = sum(
            min(self.row.window + 1, n) * n if self.row.window >= 0
            else n * n * (0.5 if self.row.causal else 1.0)
            for n in self.lengths
        )  # fmt: skip
        if self.row.added == "documents":
            pairs *= 500 / self.row.length
        return (10.0 if backward else 4.0) * pairs * HIDDEN

    def ours(self, kernels: Any = gluon) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return the call of a backend of ours and that of its gradient."""
        plan = kernels.plan_fwd(Call.of(self.spec, self.tensors))
        if isinstance(plan, Refusal):
            raise SystemExit(f"{self.row.name}: {plan.reason}")
        o, lse = plan.run(*self.tensors)[:2]
        given = (self.do, None, o, lse, *self.tensors)
        gradient = kernels.plan_bwd(Call.of(self.spec, given))
        return lambda: plan.run(*self.tensors), lambda: gradient.run(*given)

    def flash(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return FlashAttention-2's."""
        windows = {"window_size_left": self.row.window, "window_size_right": 0}
        windows = windows if self.row.window >= 0 else {}
        causal = self.row.causal and self.row.window < 0
        sizes = (self.cu, self.cu, self.longest, self.longest, 0.0, causal)
        q, k, v = self.q, self.k, self.v

        def forward() -> Any:
            return _flash(q, k, v, *sizes, False, **windows)

        o, lse, seed, offset, _ = forward()

        def backward() -> Any:
            return _flash_bwd(self.do, q, k, v, o, lse, *sizes, seed, offset, **windows)

        return forward, backward


def rounded(name: str, ours: Any, theirs: Any) -> None:
    """End the run where our results are not FlashAttention-2's but for rounding."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a is None or a.dtype != torch.bfloat16:
            continue
        error, size = (a.float() - b.float()).abs().max(), b.float().abs().max()
        if not error <= 0.02 * size:
            raise SystemExit(f"{name}: result {index} is off by {error} of {size}")


def clock(call: Callable[[], Any]) -> float:
    """Return milliseconds of a call, with the host ahead."""
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median of each, each being first in turn."""
    names, found = list(calls), {name: [] for name in calls}
    for turn in range(ROUNDS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(clock(calls[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def peers_of(row: Row) -> dict[str, tuple[Case, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Return the calls of each peer and the case that they compute; ours come first."""
    case = Case(row)
    peers = {"tilewise": (case, case.ours())}
    if row.added:
        plain = Case(replace(row, added=""))
        peers["plain"] = plain, plain.ours()
    elif row.width <= 256:
        peers["FlashAttention-2"] = case, case.flash()
    else:
        peers["portable"] = case, case.ours(portable)
        narrower = Case(replace(row, width=256))
        peers["D 256"] = narrower, narrower.ours()
    return peers


def measure(row: Row) -> dict[str, dict[str, float]]:
    """Return TFLOP/s of both directions."""
    peers = peers_of(row)
    case, ours = peers["tilewise"]
    theirs = [calls for of, calls in peers.values() if of is case and calls is not ours]
    for mine, his in zip(ours, *theirs, strict=True) if theirs else ():
        rounded(row.name, mine(), his())
    found = {}
    for backward, name in enumerate(("forward", "backward")):
        times = in_turns({peer: calls[backward] for peer, (_, calls) in peers.items()})
        flops = {peer: of.flops(bool(backward)) for peer, (of, _) in peers.items()}
        found[name] = {key: round(flops[key] / ms / 1e9, 1) for key, ms in times.items()}
    return found


def take_overridden() -> int | None:
    """Let tilewise take cards for the architecture that Triton compiles for; return it, if one.

    It is that of TRITON_OVERRIDE_ARCH.
    """
    name = os.environ.get("TRITON_OVERRIDE_ARCH", "").removeprefix("sm")
    if not name:
        return None
    device.capability = lambda index: int(name)  # type: ignore[assignment]
    return int(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="rows whose name has one of these in it")
    parser.add_argument("--compile", help="only compile every n-th row from the i-th on: i/n")
    given = parser.parse_args()
    arch = take_overridden()
    if arch is None:
        raise SystemExit("TRITON_OVERRIDE_ARCH must be sm80, sm89 or sm90, is not set")
    chosen = [r for r in rows() if not given.only or any(x in r.name for x in given.only)]
    if given.compile:
        index, count = map(int, given.compile.split("/"))
        for row in chosen[index::count]:
            for _, calls in peers_of(row).values():
                for call in calls:
                    call()
        return
    found = {}
    for row in chosen:
        found[row.name] = measure(row)
        print(row.name, json.dumps(found[row.name]), flush=True)
    if given.json:
        facts = {
            "GPU": torch.cuda.get_device_name(), "torch": torch.__version__, "as": f"sm_{arch}",
            "shared memory of a CTA": _LIMITS.get(arch), "TFLOP/s": found,
        }  # fmt: skip
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
