"""What the processes of test_inbox.py do: sums through inboxes in files that all of them map."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import torch

from tilewise.distributed import inbox as inboxes
from tilewise.distributed.inbox import Inbox, inbox_words
from tilewise.ops import add_rms_norm

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter

    interpreter.repair()

EPS = 1e-6


def mapped(folder: str, size: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Map every rank's inbox; the files are zeros, and have room for one that deals."""
    count = inbox_words(dim, dtype.itemsize, size, deals=True)
    return [
        torch.from_file(str(Path(folder) / str(r)), shared=True, size=count, dtype=torch.int64)
        for r in range(size)
    ]


def draw(rank: int, step: int, rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, dim, generator=generator).to(dtype)


def sums(
    group, rank, size, *, folder, dim, dtype, rows, one_shot, most_rows=8, parts=0, plain=None,
    before=0, deals=True,
):  # fmt: skip
    """Add up again and again, with delays; return what is not as the sums of each rank's numbers.

    Args:
        rows: of each sum in turn.
        one_shot: rows up to which every rank gets all numbers.
        plain: rows up to which words tell of their sum, of more flags beside them; all by default.
        before: sums of each row that are said to have been.
        deals: see `Inbox`.
    """
    wide = getattr(torch, dtype)
    inboxes.MOST_ROWS = most_rows
    kept = mapped(folder, size, dim, wide)
    inbox = Inbox(
        rank, [t.data_ptr() for t in kept], dim, wide, torch.device("cpu"), deals=deals
    )  # fmt: skip
    inbox.one_shot_rows = one_shot
    inbox.flagged_bytes = (0, 0)
    if plain is not None:
        inbox.flagged_bytes = (plain * dim * wide.itemsize, most_rows * dim * wide.itemsize)
    inbox._epochs.fill_(before)
    if deals:
        inbox._group_epochs.fill_(before)
    weight = (1 + draw(99, 0, 1, dim, wide)[0] / 8).to(wide)
    delays, wrong = random.Random(rank), []
    for step, count in enumerate(rows):
        time.sleep(delays.choice((0, 0, 0.01, 0.05)))
        pieces = [draw(r, step, count * max(parts, 1), dim, torch.float32) for r in range(size)]
        if parts:
            given = [p.view(parts, count, dim) for p in pieces]
            pieces = [p.sum(0) for p in given]
            x = given[rank]
        pieces = [p.to(wide) for p in pieces]
        if not parts:
            x = pieces[rank]
        total = torch.stack([p.float() for p in pieces])
        added = total[0]
        for piece in total[1:]:
            added = added + piece
        residual = draw(50, step, count, dim, wide)
        if step % 3 == 2 and not parts:
            got = {"sum": inbox.sum(x)}
            want = {"sum": added.to(wide)}
        elif step % 3 == 1 and not parts:
            n = 6
            table = draw(7, step, n * size, dim, wide)
            ids = torch.randint(
                0, n * size, (count,), generator=torch.Generator().manual_seed(step)
            )
            span = (rank * n, (rank + 1) * n)
            got = {"rows": inbox.embed(table[slice(*span)].contiguous(), ids, span)}
            want = {"rows": table[ids]}
        else:
            y, new = inbox.add_rms_norm(x, residual, weight, EPS, parts=parts)
            y_want, new_want = add_rms_norm(added.to(wide), residual, weight, EPS)
            is_whole = count <= one_shot and not inbox.has_flags(count)
            mine = slice(None) if is_whole else slice(rank, None, size)
            got = {"y": y, "residual": new[mine]}
            want = {"y": y_want, "residual": new_want[mine]}
        for name, value in got.items():
            near = torch.finfo(wide).eps * 4 if name == "y" else 0
            if not torch.allclose(value.float(), want[name].float(), rtol=near, atol=near):
                off = float((value.float() - want[name].float()).abs().max())
                wrong.append([step, name, off])
    behind = kept[rank][inbox_words(dim, wide.itemsize, size, deals=deals) :]
    if behind.any():
        wrong.append(["words are written behind the inbox"])
    return wrong


def rounded_norms(group, rank, size, *, folder, dim, rows, most_rows=8):
    """Return y of one sum by each way, and by torch with x + residual rounded and as it is."""
    wide = torch.bfloat16
    inboxes.MOST_ROWS = most_rows
    kept = mapped(folder, size, dim, wide)
    inbox = Inbox(rank, [t.data_ptr() for t in kept], dim, wide, torch.device("cpu"), deals=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (size, rows, dim), generator=generator)
    # From 256 to 512 odd numbers are rounded.
    residual = 2 * torch.randint(128, 239, (rows, dim), generator=generator)
    weight = (1 + torch.randint(0, 8, (dim,), generator=generator) / 8).to(wide)
    numbers, stream = x.to(wide), residual.to(wide)
    assert torch.equal(numbers.sum(0), x.sum(0).to(wide))
    ways = {"all": (rows, (0, 0)), "dealt": (0, (0, 0)), "flags": (rows, (0, 1 << 20))}
    found = {}
    for way, (inbox.one_shot_rows, inbox.flagged_bytes) in ways.items():
        y, _ = inbox.add_rms_norm(numbers[rank], stream, weight, EPS)
        found[way] = y.tolist()
    total = (x.sum(0) + residual).float()
    for way, added in (("rounded", total.to(wide).float()), ("as it is", total)):
        scale = torch.rsqrt(added.square().mean(-1, keepdim=True) + EPS)
        found[way] = ((added * scale).to(wide).float() * weight.float()).to(wide).tolist()
    return found
