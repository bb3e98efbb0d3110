"""Sums through inboxes: the kernel in Triton's interpreter on several processes, and all orders."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed.inbox_ranks import sums
from tilewise.distributed import inbox as inboxes
from tilewise.distributed.inbox import inbox_words, why_not

pytest.importorskip("triton")


def _files(folder, size, dim, itemsize):
    for rank in range(size):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(8 * inbox_words(dim, itemsize, size))
    return str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("one_shot", [8, 0], ids=["all", "dealt"])
def test_sums_of_ranks_in_turn(ranks, tmp_path, size, dtype, one_shot, monkeypatch):
    """Rows come and go from one sum to the next, and one rank is late, then another."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, size, 40, getattr(torch, dtype).itemsize)
    rows = [5, 1, 3, 8, 2, 2, 7, 1, 1, 8]
    given = {"folder": folder, "dim": 40, "dtype": dtype, "rows": rows, "one_shot": one_shot}
    assert ranks.run(sums, size, **given) == [[]] * size


def test_ways_may_change_between_sums(ranks, tmp_path, monkeypatch):
    """Three rows are added up on all ranks, more by turns; the same places serve both."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 4, 24, 2)
    rows = [8, 1, 8, 3, 3, 8, 4, 2]
    given = {"folder": folder, "dim": 24, "dtype": "bfloat16", "rows": rows, "one_shot": 3}
    assert ranks.run(sums, 4, **given) == [[]] * 4


def test_products_leave_parts(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 2, 32, 2)
    given = {"folder": folder, "dim": 32, "dtype": "bfloat16", "rows": [3, 2, 3], "parts": 3}
    assert ranks.run(sums, 2, **given, one_shot=8) == [[]] * 2


def test_why_not(monkeypatch):
    assert why_not(4096, torch.bfloat16, 2) == "it is off"
    monkeypatch.setattr(inboxes, "FUSED", True)
    assert why_not(4096, torch.bfloat16, 2) is None
    assert why_not(8192, torch.bfloat16, 4) is None
    assert "multiple of 8" in why_not(4092, torch.bfloat16, 2)
    assert "got 5" in why_not(4096, torch.bfloat16, 5)
    assert "at most" in why_not(8192, torch.bfloat16, 8)
    assert "float64" in why_not(4096, torch.float64, 2)


def _walk(programs):
    """Follow all orders in which ranks' actions can happen; return what goes wrong.

    An action is ("put", inbox, place, word) or ("read", own place, words that are waited for).
    Words stay on their way until they are delivered, in any order. A read waits until every word is
    there; it is wrong where one of them can never come, since it was written over.
    """
    start = (tuple(0 for _ in programs), frozenset(), frozenset())
    seen, stack = {start}, [start]
    while stack:
        at, flying, memory = stack.pop()
        moves = []
        for word in flying:  # delivered: what was in the place is gone
            kept = frozenset(m for m in memory if m[:2] != word[:2])
            moves.append((at, flying - {word}, kept | {word}))
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            kind, *what = program[at[rank]]
            ahead = (*at[:rank], at[rank] + 1, *at[rank + 1 :])
            if kind == "put":
                moves.append((ahead, flying | {tuple(what)}, memory))
            elif all((rank, *word) in memory for word in what[0]):
                moves.append((ahead, flying, memory))
        if not moves and any(a < len(p) for a, p in zip(at, programs, strict=True)):
            return f"ranks wait for ever at {at}"
        for state in moves:
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return None


def _program(rank, size, kinds, places):
    """Return one rank's actions for a row: sums on all ranks ("all"), or on the first ("dealt")."""
    actions = []
    for epoch, kind in enumerate(kinds, 1):
        slot = epoch % places
        if kind == "all":
            actions += [("put", r, (slot, rank), epoch) for r in range(size)]
            actions.append(("read", tuple(((slot, r), epoch) for r in range(size))))
            continue
        actions.append(("put", 0, (slot, rank), epoch))
        if rank == 0:
            actions.append(("read", tuple(((slot, r), epoch) for r in range(size))))
            actions += [("put", r, (slot, "answer"), epoch) for r in range(1, size)]
        else:
            actions.append(("read", (((slot, "answer"), epoch),)))
    return actions


@pytest.mark.parametrize("kinds", list(itertools.product(("all", "dealt"), repeat=3)))
def test_two_places_are_enough_in_every_order(kinds):
    programs = [_program(rank, 2, kinds, 2) for rank in range(2)]
    assert _walk(programs) is None


def test_one_place_is_not():
    programs = [_program(rank, 2, ("all", "all"), 1) for rank in range(2)]
    assert "for ever" in _walk(programs)


def test_three_ranks_in_every_order():
    programs = [_program(rank, 3, ("dealt", "dealt"), 2) for rank in range(3)]
    assert _walk(programs) is None
