"""Adapters on the device: a fixed number of slots, of which each step uses some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tilewise.distributed.shards import RowParallel
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.steps.inputs import send
from tilewise.models.adapters import Adapter, AdapterSite, sites_by_module
from tilewise.nn.adapted import StepAdapters
from tilewise.ops import LowRank, RowTiles, most_tiles, tile_rows
from tilewise.ops.low_rank import TILE

__all__ = ["AdapterSlots", "FixedAdapters", "empty_slots"]


class Loaded(Protocol):
    """The two properties of `engine.adapters.LoadedAdapter` that slots read."""

    @property
    def number(self) -> int:
        """The number that tells this adapter from all others that were loaded."""
        ...

    @property
    def weights(self) -> Adapter:
        """The tensors of the adapter."""
        ...


class FixedAdapters:
    """The adapter slot of each row of a step, in device buffers whose addresses stay.

    A CUDA graph reads these buffers; `write` sets them before each replay.

    Args:
        adapters: the adapters that the slots hold.
        most: the largest number of rows of a step.
    """

    def __init__(self, adapters: AdapterSlots, most: int) -> None:
        self._adapters = adapters
        count = most_tiles(most, adapters.count)
        self._tiles = RowTiles(
            torch.full((count,), -1, dtype=torch.int32, device=adapters.device),
            torch.full((count, TILE), -1, dtype=torch.int32, device=adapters.device),
        )

    def of(self, rows: int) -> StepAdapters:
        """Return the adapters of a step of `rows` rows, as views of the buffers that `write`
        overwrites."""
        count = most_tiles(rows, self._adapters.count)
        tiles = RowTiles(self._tiles.slots[:count], self._tiles.rows[:count])
        return StepAdapters(self._adapters.weights, tiles)

    def write(self, slots: NDArray[np.int32], rows: int) -> None:
        """Write the adapter slot of each row of the next step to the fixed buffers.

        Args:
            slots: (T,) the adapter slot of rows 0 ... T - 1, -1 for a row without an adapter.
            rows: the number of rows of the step, at least T; rows from T on get no adapter.
        """
        tiles, own = tile_rows(slots)
        count = most_tiles(rows, self._adapters.count)
        padded, all_rows = np.full(count, -1, np.int32), np.full((count, TILE), -1, np.int32)
        padded[: len(tiles)], all_rows[: len(tiles)] = tiles, own
        on_device = send((padded, all_rows.ravel()), self._adapters.device)
        self._tiles.slots[:count].copy_(on_device[0])
        self._tiles.rows[:count].copy_(on_device[1].view(count, TILE))


def empty_slots(
    sites: Mapping[str, AdapterSite],
    *,
    count: int,
    max_rank: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, LowRank]:
    """Return zeroed weights for `count` adapters in each linear layer, by the names of the layers.

    Space for `max_rank` is rounded up to a multiple of TILE.

    Args:
        sites: the linear layers of the model by name, see `models.adapters.adapter_sites`.
        count: the number of slots, and so of different adapters that one step can use.
        max_rank: the largest rank of an adapter.
        device, dtype: the device and the dtype of the rows that the linear layers take.
    """
    found = {}
    rank = -(-max_rank // TILE) * TILE
    for name, named in sites_by_module(sites).items():
        parts = [site for _, site in named]
        firsts = [site.first for site in parts]
        edges = [*firsts, firsts[-1] + parts[-1].out_features]

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        found[name] = LowRank(
            zeros(count, len(parts) * rank, parts[0].in_features),
            zeros(count, rank, edges[-1]),
            zeros(count, len(parts), kind=torch.float32),
            zeros(count, len(parts), kind=torch.int32),
            torch.tensor(edges, dtype=torch.int32, device=device),
        )
    return found


class AdapterSlots:
    """A fixed number of adapters' weights on the device.

    An adapter that is needed and not there takes a free slot, or else that of the adapter that was
    used longest ago.

    Args:
        model: the model, whose linear layers may be packed or quantised.
        slots: the weights of all slots, by the names of its modules: `empty_slots`, or those of an
            adapter that is trained elsewhere.
        numbers: the numbers of the adapters that are in the first slots already.

    Attributes:
        count: the number of slots, and so of different adapters that one step can use.
        device: the device of the weights.
        weights: the weights of all slots, by linear layer.
    """

    def __init__(
        self, model: nn.Module, slots: Mapping[str, LowRank], numbers: Sequence[int] = ()
    ) -> None:
        first = next(iter(slots.values()))
        self.count, self.device = len(first.a), first.a.device
        self.weights: dict[nn.Module, LowRank] = {}
        self._of_module: dict[str, tuple[LowRank, dict[int, int]]] = {}
        # By number, the one used last at the end.
        self._slots = OrderedDict((number, slot) for slot, number in enumerate(numbers))
        for name, own in slots.items():
            linear = model.get_submodule(name)
            if isinstance(linear, RowParallel):
                linear = linear.linear  # to whose product it is added, before the ranks' sum
            self.weights[linear] = own
            firsts = own.edges[:-1].tolist()
            self._of_module[name] = own, {first: i for i, first in enumerate(firsts)}

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter matrices A and B of all slots on the device."""
        return sum(own.a.nbytes + own.b.nbytes for own in self.weights.values())

    def place(self, runs: Sequence[ScheduledSequence]) -> NDArray[np.int32] | None:
        """Return the adapter slot of each run (B,), -1 where a run uses no adapter; None if none
        does.

        An adapter that is in no slot is first written to a free one, or to the slot that was used
        longest ago. The write is queued behind the device's earlier work.

        Raises:
            RuntimeError: the runs use more adapters than there are slots.
        """
        wanted = {run.adapter.number: run.adapter for run in runs if run.adapter is not None}
        if not wanted:
            return None
        if len(wanted) > self.count:
            raise RuntimeError(f"a step must use at most {self.count} adapters, got {len(wanted)}")
        for number in wanted:
            if number in self._slots:
                self._slots.move_to_end(number)
        for number, adapter in wanted.items():
            if number not in self._slots:
                slot = len(self._slots)
                if slot == self.count:
                    _, slot = self._slots.popitem(last=False)
                self._write(slot, adapter.weights)
                self._slots[number] = slot
        return np.array(
            [-1 if run.adapter is None else self._slots[run.adapter.number] for run in runs],
            np.int32,
        )

    def step(self, batch: Batch) -> StepAdapters | None:
        """Return the adapters of each row of a batch's step; None if no row uses one.

        Adapters that are in no slot are written to one, as `place` says.
        """
        slots = self.place(batch.sequences)
        if slots is None:
            return None
        return self.of_rows(np.repeat(slots, [len(s.token_ids) for s in batch.sequences]))

    def of_rows(self, slots: NDArray[np.int32]) -> StepAdapters:
        """Return the adapters of T rows for one step, given the adapter slot of each (T,), -1 for
        none."""
        tiles, rows = tile_rows(slots)
        on_device = send((tiles, rows.ravel()), self.device)
        return StepAdapters(self.weights, RowTiles(on_device[0], on_device[1].view(rows.shape)))

    def warm_up(self) -> None:
        """Run each adapter kernel once with an empty slot, so that no request waits for its
        compilation."""
        for linear, own in self.weights.items():
            x = own.a.new_zeros(1, own.a.shape[2])
            self.of_rows(np.zeros(1, np.int32)).add(linear, x, x.new_zeros(1, own.b.shape[2]))

    @torch.inference_mode()
    def _write(self, slot: int, adapter: Adapter) -> None:
        for name, (own, places) in self._of_module.items():
            rank, parts = own.rank, own.parts
            ranks, scales = [0] * parts, [0.0] * parts
            for part in adapter.parts.get(name, ()):
                at, have = places[part.first], part.a.shape[0]
                ranks[at], scales[at] = have, part.scale
                first, end = part.first, part.first + part.b.shape[0]
                padded = -(-have // TILE) * TILE  # what is read of a rank
                a = own.a[slot, at * rank : at * rank + padded]
                b = own.b[slot, :padded, first:end]
                a[have:].zero_()
                b[have:].zero_()
                a[:have].copy_(part.a, non_blocking=True)
                # A device turns it in microseconds, where the host takes 0.1 s for an 8B model.
                b[:have].copy_(part.b.to(self.device, non_blocking=True).T)
            own.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))
            own.scale[slot].copy_(torch.tensor(scales))
