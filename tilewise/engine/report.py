"""Numbers for people: the closing line of a run, the size of a cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tilewise.cache.spec import FOUR_BITS, CacheSpec, KVSpec, LatentSpec
from tilewise.cache.states import checkpoint_bytes
from tilewise.engine.engine import EngineStats
from tilewise.engine.sizing import StateMemory
from tilewise.engine.tables.admission import window_blocks

__all__ = ["cache_report", "stats_line", "stats_record"]


def stats_line(stats: EngineStats) -> str:
    """Return one line with the rates, cache use, prefix hits and preemptions of a run."""
    scheduler = stats.scheduler
    parts = [
        f"prefill {_rate(stats.prefill_rate)}",
        f"decode {_rate(stats.decode_rate)}",
        f"KV blocks {scheduler.blocks_peak}/{scheduler.num_blocks} at peak, "
        f"{scheduler.peak_wasted_fraction:.1%} of their slots empty",
        f"{stats.cache_bytes_per_token:,} bytes a token",
        f"prefix cache had {scheduler.prefix_hit_tokens} of {scheduler.prefix_query_tokens} tokens",
    ]
    if scheduler.num_preemptions:
        parts.append(f"{scheduler.num_preemptions} preemptions for want of blocks")
    if stats.why_not_compiled:
        parts.append(f"op by op, which is slower: {stats.why_not_compiled}")
    return " | ".join(parts)


def stats_record(stats: EngineStats) -> dict[str, Any]:
    """Return an engine's statistics as a dict of JSON's types: the fields of `EngineStats`, the
    rates, and the peak share of empty slots."""
    return {
        **asdict(stats),
        "prefill_tokens_per_second": stats.prefill_rate,
        "decode_tokens_per_second": stats.decode_rate,
        "peak_wasted_fraction": stats.scheduler.peak_wasted_fraction,
    }


def cache_report(spec: CacheSpec, max_model_len: int) -> str:
    """Return lines on the memory that the keys and values of a model take."""
    gib = 2**30
    rows = []
    if spec.num_layers:
        kept = f"{spec.num_layers} layers x {_kept(spec.kv)}"
        rows = [
            ("one token", f"{_bytes(spec.bytes_per_token)} = {kept}"),
            ("one block", f"{_bytes(spec.bytes_per_block)} = {spec.block_size} tokens"),
        ]
    context = 0
    for i, group in enumerate(spec.groups):
        blocks = -(-max_model_len // spec.block_size)
        if group.window is not None:
            blocks = min(blocks, window_blocks(group.window, 1, spec.block_size))
            rows.append(
                (
                    f"{len(group.layers)} layers keep",
                    f"a window of {group.window:,} tokens, in at most {blocks:,} blocks",
                )
            )
        context += blocks * spec.group_block_bytes(i)
    if spec.num_layers:
        rows.append(("one full context", f"{_bytes(context)} = {max_model_len:,} tokens"))
    rows += _states(spec)
    if spec.is_plain:
        rows.append(("one GiB holds", f"{gib // spec.bytes_per_block * spec.block_size:,} tokens"))
    return "\n".join(f"{name:<18}{value}" for name, value in rows)


def _states(spec: CacheSpec) -> list[tuple[str, str]]:
    """Return lines, as (name, text), about the memory of recurrent states; none without states."""
    if not spec.states:
        return []
    slots = {
        place: sum(s.slot_bytes(keeps_tokens=place == "a GPU") for _, s in spec.states)
        for place in ("a CPU", "a GPU")
    }
    memory = StateMemory(spec, 1, None, None, keeps_tokens=True)
    checkpoint = f"{_bytes(checkpoint_bytes(spec.states))}, one for {memory.tokens_apart:,} tokens"
    sizes = " and ".join(f"{_bytes(size)} on {place}" for place, size in slots.items())
    return [
        ("one running text", f"{sizes} = states in {len(spec.states)} layers"),
        ("one checkpoint", f"{checkpoint}, and for each end of a text"),
    ]


def _kept(kind: KVSpec | LatentSpec) -> str:
    """Return the channels and bytes that the cache of one layer keeps of one token, as text."""
    dtype, width = str(kind.dtype).removeprefix("torch."), kind.dtype.itemsize
    heads = ""
    if isinstance(kind, LatentSpec):
        channels = f"({kind.kv_rank} + {kind.rope_dim})"
    else:
        channels = f"({kind.head_dim} + {kind.v_head_dim})"
        heads = f"{kind.num_kv_heads} head{'s' * (kind.num_kv_heads > 1)} x "
    text = f"{channels} channels x {width} byte{'s' * (width > 1)}"
    if kind.dtype == FOUR_BITS:
        text, dtype = f"{channels} channels / 2 bytes", "4 bits"
    if kind.is_quantised:
        text = f"({text} + {kind.scale_bytes} of scales)"
    return f"{heads}{text} ({dtype})"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tok/s"


def _bytes(count: int) -> str:
    """Format a number of bytes: "9,216 B" below 10 KiB, else in the largest unit, "36.00 KiB"."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if count < 10 * 1024:
        return f"{count:,} B"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:,.2f} {unit}"
