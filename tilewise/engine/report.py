"""Numbers for people: the closing line of a run, the size of a cache, progress on a terminal."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from tilewise.cache.spec import FOUR_BITS, CacheSpec, KVSpec, LatentSpec
from tilewise.cache.states import checkpoint_bytes
from tilewise.engine.engine import EngineStats
from tilewise.engine.sizing import StateMemory
from tilewise.engine.tables.admission import window_blocks

_SOON = 2.0  # seconds of work before the time left says anything

__all__ = ["Progress", "cache_report", "stats_line", "stats_record"]


def stats_line(stats: EngineStats) -> str:
    """Return one line that says how fast a run was and what its cache held."""
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
    """Return the same as a JSON object, with the counts behind it."""
    return {
        **asdict(stats),
        "prefill_tokens_per_second": stats.prefill_rate,
        "decode_tokens_per_second": stats.decode_rate,
        "peak_wasted_fraction": stats.scheduler.peak_wasted_fraction,
    }


def cache_report(spec: CacheSpec, max_model_len: int) -> str:
    """Say what the keys and values of a model cost in memory."""
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
    """Say what the states of a model take, if it has any."""
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
    """Say what one layer keeps of one token."""
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


class Progress:
    """A line on a terminal that is written over as work goes on, and wiped at the end.

    A text that is longer than the terminal is wide is cut: a line that wraps could not be wiped.

    Args:
        stream: the stream to write to; None writes nothing.
        interval: seconds between two lines at least.
    """

    def __init__(self, stream: TextIO | None, interval: float = 0.1) -> None:
        self._stream = stream
        self._interval = interval
        self._due = 0.0
        self._began = time.monotonic()

    @property
    def is_shown(self) -> bool:
        """Whether anything is written."""
        return self._stream is not None

    def show(self, text: str, share: float | None = None) -> None:
        """Write `text` over the line, unless one was written a moment ago.

        Args:
            text: the words to show, on one line.
            share: the part of the work that is done, from which the time left follows.
        """
        now = time.monotonic()
        if self._stream is not None and now >= self._due:
            left = _time_left(now - self._began, share)
            self._stream.write(f"\r\x1b[K{_cut(text + left, self._stream)}")
            self._stream.flush()
            self._due = now + self._interval

    def close(self) -> None:
        """Wipe the line."""
        if self._stream is not None and self._due:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._due = 0.0


def terminal(wanted: bool | None = None) -> TextIO | None:
    """Return stderr, if there is one and progress is wanted there.

    By default it is wanted on a terminal, but on none that cannot write over a line (TERM=dumb).
    """
    if sys.stderr is None:
        return None
    if wanted is None:
        wanted = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return sys.stderr if wanted else None


def _time_left(seconds: float, share: float | None) -> str:
    """Return e.g. ", 2 min left" of work whose first `share` took `seconds`."""
    if not share or share >= 1.0 or seconds < _SOON:
        return ""
    left = seconds * (1.0 - share) / share
    if left < 100:
        return f", {left:.0f} s left"
    if left < 6000:
        return f", {left / 60:.0f} min left"
    return f", {left / 3600:.0f} h left"


def _cut(text: str, stream: TextIO) -> str:
    """Return as much of a text as fits on one line of the terminal behind a stream."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a stream that is no terminal has no width
        return text
    # The last column is left free, as a terminal may wrap when it is written; 0 is of no terminal.
    return text if columns < 2 or len(text) < columns else f"{text[: columns - 2]}…"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tok/s"


def _bytes(count: int) -> str:
    """Return e.g. "36,864 B", "2.25 MiB"."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if count < 10 * 1024:
        return f"{count:,} B"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:,.2f} {unit}"
