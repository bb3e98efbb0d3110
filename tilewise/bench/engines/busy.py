"""The share of a decode in which a GPU works: the union of what a profiler's trace shows on it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Span", "busy_share", "read_trace"]

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class Span(NamedTuple):
    """The time, in microseconds, from start to end of one kernel, copy or memset that ran on the
    device."""

    start: float
    end: float
    is_kernel: bool


def read_trace(path: Path) -> list[Span]:
    """Return the device's spans, by start, of a Chrome trace that torch's profiler wrote, gzipped
    or not."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return sorted(
        Span(float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["cat"] == "kernel")
        for e in events
        if e.get("cat") in _ON_DEVICE and e.get("ph") == "X"
    )


def busy_share(spans: Iterable[Span], *, skip: float) -> tuple[float, int]:
    """Return the busy share of the steady part of a run, and the kernels that began in it.

    The steady part is the later half of what follows the prompts; its end is the last span's.

    Args:
        spans: the spans of the whole run, in the order of their starts.
        skip: seconds that the prompts took, from the first span on.

    Returns:
        The share in [0, 1] of the steady part's time in which some span ran, and the number of
        kernels.

    Raises:
        ValueError: there is no span, or none after the prompts.
    """
    spans = list(spans)
    if not spans:
        raise ValueError("spans must hold something that ran on the device, got none")
    end = max(span.end for span in spans)
    first = min(spans[0].start + 1e6 * skip, end)
    begin = (first + end) / 2
    busy, reached, kernels = 0.0, begin, 0
    for span in spans:
        kernels += span.is_kernel and span.start >= begin
        if span.end > reached:
            busy += span.end - max(span.start, reached)
            reached = span.end
    if end <= begin:
        raise ValueError(f"spans must go on after the prompts' {skip} s, they do not")
    return busy / (end - begin), kernels
