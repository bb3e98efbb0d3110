"""Choose the fastest of three methods to attend over a shared sequence, with a reason.

The exposed time of a method is the time that a rank spends on anything but attention, while all
ranks wait:

  ring         the part of each transfer that takes longer than the attention that runs meanwhile,
               and the passes over o in float32 that merge its steps
  gather       the transfer of all keys and values, and the pass that puts them in order
  ulysses      all exchanges, and the passes that split and join heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.arguments import Window, prepare
from tilewise.distributed.exchange import agree, rank_and_size
from tilewise.distributed.gather import gather_attention
from tilewise.distributed.layout import bounds, edges_of, edges_rule, layout_rule, work_of
from tilewise.distributed.ring import ring_attention
from tilewise.distributed.ulysses import repeats, ulysses_attention, why_not_ulysses
from tilewise.keywords import keywords_of

__all__ = ["METHODS", "Choice", "Rates", "context_parallel_attention", "explain"]

METHODS = {"ring": ring_attention, "ulysses": ulysses_attention, "gather": gather_attention}
# Messages of a call's forward pass: a ring sends k and v in each step, Ulysses q, k, v and o.
MESSAGES = {"ring": 2, "gather": 2, "ulysses": 4}
# Tokens of a rank's part up to which a gather is chosen. For four ranks of 8,192 (GQA 64/8, D 128)
# its own share of the work took 6.53 ms forward, a ring's 7.42 and Ulysses' 7.08; backward it took
# 20.3 ms and both others 20.8 (one H200, nothing sent, 2026-11-23,
# lab/results/context_share_mended_h200.json). With the wait for its keys it stays ahead at a
# third of the link of `Rates`; with the float32 gradients on their way back, which a ring hides, it
# needs 310 GB/s. Four H100s reached 0.82 of one's rate forward with it, 0.70 with Ulysses and 0.62
# with a ring; backward 0.86, 0.93 and 0.85 (2026-11-27,
# docs/results/several-gpus.md). At 32,768 tokens it was the first forward by 0.02, but the last
# backward by 0.08. A call does not say whether a backward pass will follow, so longer parts are not
# gathered.
SHORT = 8192
# Factor of the time for merging the steps of a ring of more than two ranks, relative to its bytes,
# beside transfers. On four H100s (GQA 64/8, D 128), between 8,192 and 32,768 tokens a rank, a
# ring's extra time over an even split grew 1.7 times as fast as that of Ulysses, where their bytes
# predict 1.15 times with that GPU's memory: Ulysses was ahead at both lengths, forward and
# backward. A single card that merges and sends nothing takes the time that the bytes predict.
MERGED = 1.5


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine; the defaults are an H200's.

    With them the extra time of Ulysses over an even split grows by 92 ns a token (2 GPUs, GQA 64/8,
    D 128): the measurement was 87 between 8,192 and 32,768 tokens a GPU, and 1.3 ms that do not
    grow, mostly the host's. For a ring that merged in float32 the prediction was 51, the
    measurement 34 (docs/results/several-gpus.md, 2026-11-23).

    Attributes:
        flops: FLOP/s of attention; measured here forward, causal, 2026-11 (docs/results/hopper.md).
        link: bytes/s that one GPU sends; NVLink 4 by its vendor's figure, not measured here.
        memory: bytes/s of a copy in a GPU's memory, both directions counted; measured 2026-11.
        message_s: the fixed seconds of a message; not measured.
        room: the bytes of scratch that a call may allocate; a tenth of the GPU.
    """

    flops: float = 600e12
    link: float = 450e9
    memory: float = 4.3e12
    message_s: float = 20e-6
    room: float = 14e9


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen method, and the numbers on which the choice is based.

    Attributes:
        method: the name, "ring", "gather" or "ulysses".
        reason: a sentence that gives the reason.
        compute_s: the seconds of attention on the busiest rank, forward.
        balance: the work of all ranks divided by (number of ranks x work of the busiest rank); 1 is
            balanced.
        sent_bytes: the bytes that each rank sends, forward, by method; a refused method is missing.
        exposed_s: the seconds of a rank in addition to compute_s, by method.
        memory_bytes: the scratch of a rank, forward and backward, by method.
    """

    method: str
    reason: str
    compute_s: float
    balance: float
    sent_bytes: dict[str, float]
    exposed_s: dict[str, float]
    memory_bytes: dict[str, float]

    def __str__(self) -> str:
        """Return the choice as text: the reason, the time of attention, and a line for each
        method's costs."""
        lines = [
            f"{self.method}: {self.reason}",
            f"  attention {1e6 * self.compute_s:,.1f} us on the busiest rank, "
            f"{self.balance:.0%} of it in the mean",
        ]
        lines += [
            f"  {name:8} sends {self.sent_bytes[name] / 1e6:,.1f} MB a rank, "
            f"waits {1e6 * seconds:,.1f} us, takes {self.memory_bytes[name] / 1e6:,.1f} MB"
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
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: str = "zigzag",
    rates: Rates | None = None,
    method: str | None = None,
) -> Choice:
    """Return the method by which `context_parallel_attention` would attend, with its costs, from
    shapes alone.

    Args:
        q, k, v: a rank's part, as for `ring_attention`; meta tensors suffice.
        size: the number of ranks.
        causal, window, cu_seqlens, layout: the arguments of the call.
        rates: the rates of the machine; None for an H200's.
        method: the requested method; None chooses.

    Raises:
        ValueError: a method is not known, or refused for these heads; or cu_seqlens or layout break
            a rule of `ring_attention`.

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
    pairs, balance = _pairs(tokens, q.shape[-3], size, causal, window, cu_seqlens, layout)
    compute = 2 * pairs * heads * (q.shape[-1] + v.shape[-1]) / rates.flops
    row = (q.shape[-1] + v.shape[-1]) * q.itemsize  # bytes of a token's key and value of one head
    steps = size - 1
    keys, outputs = tokens * kv_heads * row, tokens * heads * v.shape[-1]
    wide = 4 * tokens * kv_heads * (q.shape[-1] + v.shape[-1])  # gradients of keys in float32
    sent: dict[str, float] = {"ring": steps * keys, "gather": steps * keys}
    # A step's o is converted, merged (three passes) and stored; a causal step has half of the rows.
    part = 0.5 if causal or isinstance(window, int) else 1.0
    merged = MERGED * outputs * (12 + 30 * steps * part)
    if size == 2:  # merged once, in its own dtype: two are read, one is written and copied
        merged = outputs * 5 * q.itemsize * part
    late = max(keys / rates.link - compute / size, 0.0)
    ordered = 2 * size * keys
    waits = {
        "ring": steps * late + merged / rates.memory,
        "gather": steps * keys / rates.link + ordered / rates.memory,
    }
    memory: dict[str, float] = {
        "ring": 2 * keys + 3 * wide + 4 * outputs,
        "gather": 2 * size * (keys + wide),
    }
    count = repeats(heads, kv_heads, size)
    if count is not None:
        held = tokens * row * (heads + count * kv_heads)
        sent["ulysses"] = held * steps / size
        waits["ulysses"] = sent["ulysses"] / rates.link + 6 * held / rates.memory
        memory["ulysses"] = 2 * held
    for name in waits:
        times = steps if name == "ring" else int(size > 1)
        waits[name] += times * MESSAGES[name] * rates.message_s

    def choice(method: str, reason: str) -> Choice:
        return Choice(method, reason, compute, balance, sent, waits, memory)

    if method is not None:
        return choice(method, "asked for by name")
    why_not = {
        name: f"{name} would take {memory[name] / 1e9:,.1f} GB"
        for name in ("gather", *(["ulysses"] if refusal is None else []))
        if memory[name] > rates.room
    }
    if q.shape[-3] > SHORT:
        why_not.setdefault("gather", f"gather is for at most {SHORT:,} tokens a rank")
    best = min((name for name in waits if name not in why_not), key=waits.__getitem__)
    others = [
        why_not.get(name, f"{name} waits {1e6 * waits[name]:,.1f} us")
        for name in waits
        if name != best
    ]
    if refusal is not None:
        others.append(f"ulysses cannot: {refusal}")
    return choice(best, f"waits {1e6 * waits[best]:,.1f} us where {', '.join(others)}")


def _pairs(
    tokens: int,
    length: int,
    size: int,
    causal: bool,
    window: Window,
    cu_seqlens: Sequence[int] | Tensor | None,
    layout: str,
) -> tuple[float, float]:
    """Return the number of visible pairs of queries and keys on the busiest rank, and
    `Choice.balance`.

    Args:
        tokens: the tokens of a rank, of all sequences of the batch.
        length: the tokens of a rank in one sequence.
        size: the number of ranks.
        causal, window, cu_seqlens, layout: the arguments of the call; ValueError if they do not
            fit.
    """
    left, right = bounds(causal, window)
    edges = None if cu_seqlens is None else edges_of(cu_seqlens)
    refusal = layout_rule(layout, edges)
    if refusal is None and edges is not None:
        refusal = edges_rule(edges, length * size)
    if refusal is not None:
        raise ValueError(refusal)
    if edges is None:
        whole = length * size
        visible = whole / 2 if right == 0 else float(whole)
        if left is not None:
            visible = min(visible, left + 1 + (right or 0))
        if layout == "contiguous" and right == 0 and left is None:
            return tokens * (whole - length / 2), whole / 2 / (whole - length / 2)
        return tokens * visible, 1.0
    work = [
        work_of(rank, size, layout=layout, left=left, right=right, edges=edges)
        for rank in range(size)
    ]
    return float(max(work)), sum(work) / max(size * max(work), 1) or 1.0


def _unknown(method: object) -> str:
    return f"method must be one of {', '.join(METHODS)}, got {method!r}"


@keywords_of(prepare, but=("rule",))
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
    layout: str = "zigzag",
    rates: Rates | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a shared sequence by the method that `explain` chooses, or a named one.

    Args:
        q, k, v, group, causal, window, cu_seqlens, layout, return_lse, options: as `ring_attention`
            takes them.
        method: the name, "ring", "gather" or "ulysses"; None chooses by shape, the same on every
            rank.
        rates: the rates of the machine for that choice; None for an H200's.

    Returns:
        As `ring_attention`.

    Raises:
        ValueError: see `explain` and `ring_attention`.

    Example:
        >>> o = context_parallel_attention(q, k, v, causal=True)
    """
    _, size = rank_and_size(group)
    if method is not None and method not in METHODS:
        # Raised on the other ranks, too, as they wait for this rank's shapes.
        agree(group, {"q": q, "k": k, "v": v}, (), _unknown(method))
    method = method or _method_of(q, k, v, size, causal, window, cu_seqlens, layout, rates)
    attend: Any = METHODS[method]
    result: Tensor | tuple[Tensor, Tensor] = attend(
        q,
        k,
        v,
        group=group,
        causal=causal,
        window=window,
        cu_seqlens=cu_seqlens,
        layout=layout,
        return_lse=return_lse,
        **options,
    )
    return result


def _method_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    causal: bool,
    window: Window,
    cu_seqlens: Sequence[int] | Tensor | None,
    layout: str,
    rates: Rates | None,
) -> str:
    """Return the name of the method that is predicted to be fastest, such as "ring".

    Invalid arguments give "ring" as well, whose own checks then raise on every rank.

    Args:
        q, k, v: this rank's part of each tensor.
        size: the number of ranks.
        rates: the speeds of the machine; None for an H200's.
    """
    try:
        return explain(
            q,
            k,
            v,
            size=size,
            causal=causal,
            window=window,
            cu_seqlens=cu_seqlens,
            layout=layout,
            rates=rates,
        ).method
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # Raised on every rank: the chosen method tells the others.
        return "ring"
