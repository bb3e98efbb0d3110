"""A model of reproducible sums of dq on Hopper: who waits for whom, without a GPU.

    python lab/ordered_sums.py [--measured lab/results/hopper_h200.json]

CTAs are launched in the order of `backward.span.head_of_cta` on 132 multiprocessors; a step takes
as long as makes the plain call take what was measured. A tile of dq is sent once it is there, the
CTA before has told of its own, and the sender is free; it is seen by the next CTA when its copy has
landed and a fence is past. The times are guesses, of which two things are known: what one sender
takes in all (docs/results/hopper-tried.md), and what comes out. Prints the cost of each row as
measured and as modelled: now, with heads launched side by side, with two senders, and with both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

SMS = 132
TOKENS, CHANNELS, KEYS = 16384, 2048, 128
JITTER = 0.1  # of a step, its standard deviation
BEGIN_US, END_US = 2.0, 1.4  # of a CTA


class Times(NamedTuple):
    """Microseconds of a tile of dq; 0 for sums without an order."""

    read: float = 0.6  # until its shared memory is free
    landed: float = 1.4
    fence: float = 0.5
    ask: float = 0.7  # that the sender takes for the next tile
    see: float = 0.7  # that the next CTA takes to see it


USUAL = Times()
FREE = Times(0.0, 0.0, 0.0, 0.0, -1e9)


class Row(NamedTuple):
    """A call of 16,384 tokens and 2,048 channels."""

    d: int
    n: int
    causal: bool

    @property
    def heads(self) -> int:
        return TOKENS // self.n * (CHANNELS // self.d)

    @property
    def blocks(self) -> int:
        return self.n // KEYS

    @property
    def tile(self) -> int:
        """Return the queries of a step."""
        return 128 if self.d == 64 else 64


@numba.njit(cache=False)
def _run(
    heads: int, blocks: int, tiles: int, causal: bool, last_first: bool, section: int,
    step: float, times: tuple[float, float, float, float, float], senders: int, late: bool,
) -> float:  # fmt: skip
    read, landed, fence, ask, see = times
    np.random.seed(0)
    seen = np.zeros((heads, tiles))  # when the last sum of a tile was told of
    free = np.zeros(SMS)
    for number in range(heads * blocks):
        first = number // (blocks * section) * section
        size = min(section, heads - first)
        within = number % (blocks * section)
        block, head = within // size, first + within % size
        if last_first:
            block = blocks - 1 - block
        sm = np.argmin(free)
        now = free[sm] + BEGIN_US
        memory = np.zeros(senders)
        sender = np.zeros(senders)
        begin = block * (tiles // blocks) if causal else 0
        for index in range(tiles - begin):
            tile, mine = begin + index, index % senders
            now = max(now + step * (1 + JITTER * np.random.standard_normal()), memory[mine])
            sent = max(now, sender[mine])
            if seen[head, tile] > 0:
                sent = max(sent, seen[head, tile] + see)
            memory[mine] = sent + read
            if late:  # asks for the next tile while the copy lands
                seen[head, tile] = max(sent + landed + fence, sent + read + ask)
                sender[mine] = seen[head, tile]
            else:
                seen[head, tile] = sent + landed + fence
                sender[mine] = seen[head, tile] + ask
        free[sm] = max(now, sender.max()) + END_US
    return float(free.max())


def milliseconds(row: Row, step: float, times: Times, *, side_by_side: bool, senders: int) -> float:
    """Return what a call takes; a diagonal's sums go from the last tile of keys to the first."""
    section = max(1, SMS // row.blocks) if side_by_side else 1
    last_first = row.causal and times is not FREE
    tiles = row.n // row.tile
    late = row.causal and row.d == 128 and senders == 1  # as `backward.loader.send_dq` does
    us = _run(
        row.heads, row.blocks, tiles, row.causal, last_first, section, step, tuple(times), senders,
        late,
    )  # fmt: skip
    return us / 1000


def step_of(row: Row, plain_ms: float) -> float:
    """Return the microseconds of a step with which a call without an order takes `plain_ms`."""
    low, high = 0.1, 10.0
    while high - low > 1e-3:
        step = (low + high) / 2
        took = milliseconds(row, step, FREE, side_by_side=row.causal, senders=4)
        low, high = (step, high) if took < plain_ms else (low, step)
    return (low + high) / 2


def costs(row: Row, plain_ms: float, times: Times = USUAL) -> dict[str, float]:
    """Return the modelled times of the call, of the plain call's."""
    step = step_of(row, plain_ms)
    forms = {
        "now": (False, 1), "side by side": (True, 1), "two senders": (False, 2), "both": (True, 2),
    }  # fmt: skip
    return {
        name: milliseconds(row, step, times, side_by_side=heads, senders=senders) / plain_ms
        for name, (heads, senders) in forms.items()
    }


def measured_rows(document: dict[str, Any]) -> list[tuple[Row, float, float]]:
    """Return (row, plain ms, cost measured) of a result of `tilewise bench attention`."""
    return [
        (Row(row["D"], row["N"], row["causal"]), row["ms"] / row["x plain"], row["x plain"])
        for row in document["rows"]
        if row["table"] == row["feature"] == "deterministic" and row["op"] == "backward"
        and row["peer"] == "tilewise"
    ]  # fmt: skip


def main() -> None:
    """Print a line for each measured row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--measured", type=Path, default=Path("lab/results/hopper_h200.json"), metavar="JSON"
    )
    options = parser.parse_args()
    for row, plain, cost in measured_rows(json.loads(options.measured.read_text())):
        found = costs(row, plain)
        said = "  ".join(f"{name} {value:.2f}" for name, value in found.items())
        kind = "causal" if row.causal else "full"
        print(f"D {row.d:3} N {row.n:6} {kind:6}  measured {cost:.2f}  {said}", flush=True)


if __name__ == "__main__":
    main()
