"""A machine with two memories that counts accesses: slow, large HBM and fast, small SRAM.

The papers' algorithms are judged by how many elements they move between the two, how much HBM they
need beside their inputs and outputs, and how much SRAM. Running them here measures all three.
"""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["ALL", "Memory"]

ALL = slice(None)


class Memory:
    """Named matrices in HBM, named tiles in SRAM, and the traffic between them.

    Everything is counted in elements. A tile keeps its room in SRAM until it is dropped or a tile
    of the same name replaces it.

    Attributes:
        loads: the elements read from HBM.
        stores: the elements written to HBM, initial values included.
        peak_extra: the most HBM elements allocated at once beside inputs and outputs.
        peak_sram: the most SRAM elements in use at once.
    """

    def __init__(self, **inputs: Tensor) -> None:
        self.loads = 0
        self.stores = 0
        self.peak_extra = 0
        self.peak_sram = 0
        self._hbm = dict(inputs)
        self._extra: dict[str, int] = {}
        self._sram: dict[str, int] = {}
        self._like = next(iter(inputs.values()))

    @property
    def accesses(self) -> int:
        """The number of elements moved in either direction, which the IO theorems bound."""
        return self.loads + self.stores

    def __getitem__(self, name: str) -> Tensor:
        """Return the matrix `name` in HBM, not a copy, without counting; for the caller of the
        algorithm."""
        return self._hbm[name]

    def alloc(
        self, name: str, *shape: int, fill: float | None = None, output: bool = False
    ) -> None:
        """Allocate a matrix in HBM.

        Args:
            name: the name of the matrix; an older one of that name is freed.
            shape: the shape of the matrix.
            fill: the initial value, which costs stores; None leaves NaN.
            output: True if it is the algorithm's result and so not additional memory.
        """
        value = math.nan if fill is None else fill
        self._hbm[name] = self._like.new_full(shape, value)
        self._extra[name] = 0 if output else math.prod(shape)
        self.peak_extra = max(self.peak_extra, sum(self._extra.values()))
        if fill is not None:
            self.stores += math.prod(shape)

    def load(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Copy part of a matrix from HBM into the SRAM tile of the same name; count and return
        it."""
        tile = self._hbm[name][rows, columns].clone()
        self.loads += tile.numel()
        return self.keep(name, tile)

    def store(self, name: str, value: Tensor, rows: slice = ALL, columns: slice = ALL) -> None:
        """Copy `value` from SRAM over part of a matrix in HBM, and count it; the shapes must be
        equal."""
        target = self._hbm[name][rows, columns]
        assert target.shape == value.shape, (name, target.shape, value.shape)
        target.copy_(value)
        self.stores += value.numel()

    def keep(self, name: str, tile: Tensor) -> Tensor:
        """Count `tile` as held in SRAM under `name`, in place of an older tile of that name; return
        it."""
        self._sram[name] = tile.numel()
        self.peak_sram = max(self.peak_sram, sum(self._sram.values()))
        return tile

    def drop(self, *names: str) -> None:
        """Free the SRAM tiles of these names; KeyError if one is not there."""
        for name in names:
            del self._sram[name]
