"""Kernels that begin before the one before them has ended: which, and where that is allowed.

Between two kernels of a stream a device drains, launches and fills again. On Hopper a kernel may be
launched while the one before it still runs (programmatic dependent launch): it asks for what is not
being written meanwhile, weights above all, and waits for the end of that one before it reads or
writes anything else. Every kernel that is launched so waits, all of its programs do, and the end of
a kernel is that of all before it: what holds for neighbours holds for all.

Only the caller knows that nothing in a chain of kernels writes weights: it says so by `launching`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = [
    "AFTER",
    "CHOSEN",
    "CHOSEN_LARGE",
    "FIRST",
    "LARGE",
    "OFF",
    "chosen",
    "launching",
    "mode",
]

# When a kernel lets the next one be launched: never before its own end, as soon as all of its
# programs run, or when they have seen the end of the kernel before.
OFF, FIRST, AFTER = 0, 1, 2

# What begins early in a decode step: of models with small weights, and where a layer has a weight
# of LARGE elements and more. Qwen3-0.6B at 32 rows takes 2,084 us without, 2,077 with FIRST alone,
# and 1,790 with this and the products and tiles of attention that it makes worth while; Llama-3-8B
# 5,730 without, 6,083 with FIRST and 5,602 with AFTER alone (H200, 2026-11-23,
# lab/results/early_decode_h200.json).
LARGE = 1 << 24
CHOSEN: Mapping[str, int] = {
    "norm": AFTER,
    "activation": FIRST,
    "rope": FIRST,
    "attention": FIRST,
    "linear": AFTER,
    "rows": FIRST,
    "sampling": FIRST,
    "finish": FIRST,
    "start": FIRST,
}
CHOSEN_LARGE: Mapping[str, int] = dict.fromkeys(CHOSEN, AFTER)


class _State(threading.local):
    modes: Mapping[str, int] = {}
    chosen: tuple[tuple[str, int], ...] = ()


_state = _State()


@contextmanager
def launching(modes: Mapping[str, int] | None = None) -> Iterator[None]:
    """Let kernels of this thread be launched early inside of this context: while the kernel before
    them still runs. `modes` gives OFF, FIRST or AFTER by kind of kernel; None is CHOSEN. The modes
    that held before are restored at the end.

    No kernel in here may write what others read before they wait: weights, and of a step its plan,
    its table, its lengths and its slots. Those are to be written before, and after them there must
    be a kernel that is not launched early (torch launches none so).
    """
    before = _state.modes, _state.chosen
    _state.modes = CHOSEN if modes is None else modes
    _state.chosen = tuple(sorted(_state.modes.items()))
    try:
        yield
    finally:
        _state.modes, _state.chosen = before


def chosen() -> tuple[tuple[str, int], ...]:
    """Return the (kind, mode) pairs of the `launching` around the call, which say how kernels of
    this thread are launched early, sorted by kind; () outside of any."""
    return _state.chosen


def mode(kind: str) -> int:
    """Return how a kernel of this kind is to be launched in this thread: OFF, FIRST or AFTER; OFF
    for a kind that is not named and outside of `launching`."""
    return _state.modes.get(kind, OFF)
