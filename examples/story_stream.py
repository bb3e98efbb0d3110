"""A prepared corpus on the device that trains, and the rows that each epoch cuts from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SNAPPED_ROWS = 0.5  # share of rows that begin with a document


@dataclass(frozen=True, slots=True)
class Data:
    """The prepared corpus: tokens of both splits on the device, and meta.json."""

    train: Tensor
    val: Tensor
    meta: dict[str, Any]
    folder: Path

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Data:
        """Read what story_data.py wrote."""
        splits = (np.fromfile(folder / f"{split}.bin", np.uint16) for split in ("train", "val"))
        train, val = (torch.from_numpy(s.astype(np.int32)).to(device) for s in splits)
        return cls(train, val, json.loads((folder / "meta.json").read_text()), folder)


class TokenStream:
    """Rows of training tokens, packed anew each epoch on the device that trains.

    Args:
        tokens: (N,) the end token before each document and once after the last.
        ranges: source name -> {"start", "end"}, as meta.json holds them.
        weights: source name -> how often an epoch shows its documents; 1 where absent.
        context: tokens of a row, S.
    """

    def __init__(
        self,
        tokens: Tensor,
        ranges: dict[str, dict[str, int]],
        weights: dict[str, float],
        context: int,
        generator: torch.Generator,
    ) -> None:
        self.tokens = tokens
        self.context = context
        self.generator = generator
        ends = (tokens == 0).nonzero().flatten()
        self.starts, self.lengths = ends[:-1], ends.diff()
        self.weights = torch.ones(len(self.starts), device=tokens.device)
        for source, weight in weights.items():
            if source not in ranges:
                raise ValueError(f"weights must name one of {sorted(ranges)}, got {source!r}")
            begin, end = ranges[source]["start"], ranges[source]["end"]
            self.weights[(self.starts >= begin) & (self.starts < end)] = weight

    def _draw(self, size: int) -> Tensor:
        return torch.rand(size, device=self.tokens.device, generator=self.generator)

    def epoch(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets (batch, S) int64 until the shuffled documents are used up."""
        copies = (self.weights + self._draw(len(self.weights))).floor().long()
        order = torch.arange(len(copies), device=copies.device).repeat_interleave(copies)
        order = order[self._draw(len(order)).argsort()]
        lengths = self.lengths[order]
        begins = lengths.cumsum(0) - lengths
        shift = (self.starts[order] - begins).repeat_interleave(lengths)
        stream = self.tokens[torch.arange(len(shift), device=shift.device) + shift].long()
        if len(stream) <= self.context + 1:
            stream = stream.repeat(2 + (self.context + 1) // len(stream))
        last = len(stream) - self.context - 1
        offset = int(self._draw(1).item() * min(self.context, last))
        rows = torch.arange(offset, last + 1, self.context, device=stream.device)
        following = begins[torch.searchsorted(begins, rows).clamp(max=len(begins) - 1)]
        snaps = (following > rows) & (following < rows + self.context) & (following <= last)
        snaps &= self._draw(len(rows)) < SNAPPED_ROWS
        rows = torch.where(snaps, following, rows)[self._draw(len(rows)).argsort()]
        columns = torch.arange(self.context + 1, device=stream.device)
        for first in range(0, len(rows), batch):
            window = stream[rows[first : first + batch, None] + columns]
            if first == 0 or len(window) == batch:  # one shape, one compilation
                yield window[:, :-1], window[:, 1:]

    def batches(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch after the other, without end."""
        while True:
            yield from self.epoch(batch)
