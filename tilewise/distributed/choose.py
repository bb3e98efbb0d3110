"""Which of the two ways to attend over a shared sequence is faster, and why.

exposed time   what a rank waits for the others: all of the trades of Ulysses; of a ring the part
               of each transfer that is longer than the attention beside it, and the merges
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.arguments import Window
from tilewise.distributed.exchange import agree, rank_and_size
from tilewise.distributed.ring import ring_attention
from tilewise.distributed.ulysses import repeats, ulysses_attention, why_not_ulysses

__all__ = ["METHODS", "Choice", "Rates", "context_parallel_attention", "explain"]

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does a second. The defaults are of an H200.

    Attributes:
        flops: of attention, FLOP/s; measured here forward, causal, 2026-11 (docs/hopper.md).
        link: bytes/s that one GPU sends; NVLink 4 by its vendor's figure, not measured here.
        memory: bytes/s of a GPU's memory, a copy, both ways counted; measured 2026-11.
    """

    flops: float = 600e12
    link: float = 450e9
    memory: float = 4.3e12


@dataclass(frozen=True, slots=True)
class Choice:
    """What would be run, and what it was weighed against.

    Attributes:
        method: "ring" or "ulysses".
        reason: why, in a sentence.
        compute_s: seconds of attention on each rank, forward.
        sent_bytes: that each rank sends, forward, by method; a method that is refused is missing.
        exposed_s: seconds that a rank waits beside that, by method.
    """

    method: str
    reason: str
    compute_s: float
    sent_bytes: dict[str, float]
    exposed_s: dict[str, float]

    def __str__(self) -> str:
        """Show it as a table."""
        lines = [
            f"{self.method}: {self.reason}",
            f"  attention {1e6 * self.compute_s:,.1f} us a rank",
        ]
        lines += [
            f"  {name:8} sends {self.sent_bytes[name] / 1e6:,.1f} MB a rank, "
            f"waits {1e6 * seconds:,.1f} us"
            for name, seconds in self.exposed_s.items()
        ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: int,
    causal: bool = False,
    window: Window = None,
    rates: Rates | None = None,
    method: str | None = None,
) -> Choice:
    """Say how `context_parallel_attention` would attend, from shapes alone.

    Args:
        q, k, v: a rank's part, as for `ring_attention`; meta tensors will do.
        size: ranks.
        causal, window: of the call.
        rates: of the machine.
        method: what is asked for; None chooses.

    Raises:
        ValueError: a method is not known, or refused for these heads.

    Example:
        >>> q = torch.empty(1, 8192, 32, 128, dtype=torch.bfloat16, device="meta")
        >>> kv = torch.empty(1, 8192, 8, 128, dtype=torch.bfloat16, device="meta")
        >>> print(explain(q, kv, kv, size=4, causal=True))
    """
    if method is not None and method not in METHODS:
        raise ValueError(_unknown(method))
    rates = rates or Rates()
    heads, kv_heads = q.shape[-2], k.shape[-2]
    refusal = why_not_ulysses(heads, kv_heads, size)
    if method == "ulysses" and refusal is not None:
        raise ValueError(refusal)
    tokens = q.shape[:-2].numel()
    row = (q.shape[-1] + v.shape[-1]) * q.itemsize  # bytes of a token's key and value of one head
    whole = tokens * size
    left = window - 1 if isinstance(window, int) else None if window is None else window[0]
    visible = whole / 2 if causal or isinstance(window, int) else float(whole)
    if left is not None and left >= 0:
        visible = min(visible, left + 1)
    compute = 2 * tokens * visible * heads * (q.shape[-1] + v.shape[-1]) / rates.flops
    steps = size - 1
    transfer = tokens * kv_heads * row
    merge = 3 * tokens * heads * v.shape[-1] * 4 / rates.memory  # read twice, written once
    sent: dict[str, float] = {"ring": steps * transfer}
    waits = {"ring": steps * (max(transfer / rates.link - compute / size, 0.0) + merge)}
    count = repeats(heads, kv_heads, size)
    if count is not None:
        traded = tokens * row * (heads + count * kv_heads) * steps / size
        sent["ulysses"], waits["ulysses"] = traded, traded / rates.link
    if method is not None:
        return Choice(method, "asked for by name", compute, sent, waits)
    if refusal is not None:
        return Choice("ring", f"ulysses cannot: {refusal}", compute, sent, waits)
    best = min(waits, key=waits.__getitem__)
    other = "ulysses" if best == "ring" else "ring"
    reason = f"waits {1e6 * waits[best]:,.1f} us where {other} waits {1e6 * waits[other]:,.1f} us"
    return Choice(best, reason, compute, sent, waits)


def _unknown(method: object) -> str:
    return f"method must be one of {', '.join(METHODS)}, got {method!r}"


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    method: str | None = None,
    causal: bool = False,
    window: Window = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    rates: Rates | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a shared sequence by the way that `explain` picks, or that is named.

    Args:
        q, k, v, group, causal, window, cu_seqlens, options: as `ring_attention` takes them.
        method: "ring" or "ulysses"; None chooses by shape, the same on every rank.
        rates: of the machine.

    Returns:
        As `ring_attention`.

    Raises:
        ValueError: see `explain` and `ring_attention`.

    Example:
        >>> o = context_parallel_attention(q, k, v, causal=True)
    """
    _, size = rank_and_size(group)
    if method is not None and method not in METHODS:
        # To the others, too, who wait for this rank's shapes.
        agree(group, {"q": q, "k": k, "v": v}, (), _unknown(method))
    # Shapes that cannot be weighed are refused by the method, on every rank.
    is_plain = min(q.dim(), k.dim(), v.dim()) >= 3 and size * k.shape[-2] > 0
    if method is None and is_plain and q.shape[-2] % k.shape[-2] == 0:
        method = explain(q, k, v, size=size, causal=causal, window=window, rates=rates).method
    attend: Any = METHODS[method or "ring"]
    result: Tensor | tuple[Tensor, Tensor] = attend(
        q, k, v, group=group, causal=causal, window=window, cu_seqlens=cu_seqlens, **options
    )
    return result
