"""One way to time a call: warm up, repeat, report the median and the spread.

On CUDA each repetition is timed by events after the L2 cache has been overwritten, so that inputs
smaller than the cache do not look faster than memory allows.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_Key = TypeVar("_Key")
_Event = Any  # torch.cuda.Event, which torch does not type
_CYCLES_PER_SECOND = 2e9  # more than any GPU has, so that it waits long enough
_L2_BYTES = 256 << 20  # several times the largest L2 in use (H200: 60 MB)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call over `repeats` runs: the median, and in `low` and `high` the bounds of
    the fastest and the slowest tenth."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """The difference of `high` and `low`, as a share of the median."""
        return (self.high - self.low) / self.median


def _summary(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def _time_cpu(call: Callable[[], object], budget: float, fewest: int | None) -> Timing:
    if fewest is None:
        fewest = 5
        call()
    seconds: list[float] = []
    end = time.perf_counter() + budget
    while len(seconds) < fewest or (time.perf_counter() < end and len(seconds) < 200):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return _summary(seconds)


def _time_cuda(call: Callable[[], object], budget: float, fewest: int | None) -> Timing:
    flush = torch.empty(_L2_BYTES, dtype=torch.int8, device="cuda")
    if fewest is None:
        fewest = 10
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    estimate = max(time.perf_counter() - start, 1e-6)
    repeats = max(fewest, min(200, int(budget / estimate)))
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return _summary([begin.elapsed_time(end) / 1e3 for begin, end in pairs])


def time_call(
    call: Callable[[], object], device: str, *, budget: float = 0.5, fewest: int | None = None
) -> Timing:
    """Return the timing of `call` on "cpu" or "cuda", repeated for about `budget` seconds.

    Args:
        fewest: the least number of repeats of a call that has run before; None warms the call up
            and repeats it at least 5 times on a CPU, 10 on a GPU.
    """
    if device == "cuda":
        return _time_cuda(call, budget, fewest)
    return _time_cpu(call, budget, fewest)


def time_together(
    calls: Mapping[_Key, Callable[[], object]],
    *,
    rounds: int = 10,
    block_seconds: float = 3e-3,
    most: int = 24,
) -> dict[_Key, Timing]:
    """Return the timings of CUDA calls, run in turn in short blocks, so that all of them see the
    same clocks.

    A card that runs at its power limit changes its clocks within milliseconds, and calls that are
    measured one after the other differ by several percent for that alone. Every call must have run
    before. The median of each block counts as one run; low and high are the quartiles of these. The
    host's time to launch a block is hidden behind a wait of the GPU.

    Args:
        calls: the calls, by the names under which their timings are returned.
        rounds: number of blocks of each call.
        block_seconds: seconds that a block takes, about.
        most: the largest number of repeats in a block.
    """
    flush = torch.empty(_L2_BYTES, dtype=torch.int8, device="cuda")

    def block(call: Callable[[], object], repeats: int) -> list[tuple[_Event, _Event]]:
        events = []
        for _ in range(repeats):
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        return events

    def seconds(events: list[tuple[_Event, _Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    fastest, host = {}, {}
    for name, call in calls.items():
        start = time.perf_counter()
        events = block(call, 3)
        host[name] = (time.perf_counter() - start) / 3
        fastest[name] = min(seconds(events))
    repeats = {n: max(1, min(most, round(block_seconds / t))) for n, t in fastest.items()}
    medians: dict[_Key, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        blocks = {}
        for name, call in calls.items():
            # The GPU waits until the host has sent the whole block: it is the GPU's time we want.
            torch.cuda._sleep(int(repeats[name] * host[name] * _CYCLES_PER_SECOND))
            blocks[name] = block(call, repeats[name])
        for name, events in blocks.items():
            medians[name].append(statistics.median(seconds(events)))
    timings = {}
    for name, found in medians.items():
        ordered, quarter = sorted(found), len(found) // 4
        low, high = ordered[quarter], ordered[-1 - quarter]
        total = repeats[name] * rounds
        timings[name] = Timing(statistics.median(ordered), low, high, total)
    return timings


def time_graph(call: Callable[[], object], *, budget: float = 0.3) -> Timing:
    """Return the timing of `call` replayed from a CUDA graph: the device's time without the host's
    launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _time_cuda(graph.replay, budget, None)


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Run `call` once, and return the bytes that it needs at its peak beyond what was allocated
    before it: of GPU memory, or on Linux of the process's resident memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    # Linux with glibc: give free heap back, then reset the peak resident size (5).
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have {field}, got none")
