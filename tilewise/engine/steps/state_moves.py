"""What a step does with states beside computing: slots are filled before it, kept after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tilewise.cache.states import StateStorage
from tilewise.engine.batch import Batch
from tilewise.engine.steps.inputs import send
from tilewise.nn.context import StepStates
from tilewise.nn.states import LayerStates
from tilewise.ops import RecurrentStates

__all__ = ["FixedStates", "begin_states", "end_states", "layer_states"]


def layer_states(storage: StateStorage) -> Mapping[int, LayerStates]:
    """Return the slots of each layer as `LayerStates`, by the layer's number in the model."""
    return {
        layer: LayerStates(
            None if slots.recurrence is None else RecurrentStates(*slots.recurrence),
            slots.convolution,
        )
        for layer, slots in storage.layers.items()
    }


@torch.inference_mode()
def begin_states(storage: StateStorage | None, batch: Batch) -> None:
    """Fill slots of states from checkpoints, then copy slots to others, before a batch's layers
    run.

    The batch's `states` say which. Without a storage of states nothing is done.
    """
    if storage is not None:
        storage.restore(batch.states.restores)
        storage.fork(batch.states.forks)


@torch.inference_mode()
def end_states(storage: StateStorage | None, batch: Batch) -> None:
    """Save the checkpoints of states that a batch asks for, after its layers have run.

    Without a storage of states nothing is done.
    """
    if storage is not None:
        storage.save(batch.states.saves)


class FixedStates:
    """The slots of a captured step's rows, in memory that its graphs read.

    Args:
        storage: the slots of all layers.
        max_num_seqs: rows of a step.

    Attributes:
        slots: (max_num_seqs,) int64, -1 for a row that the step does not run.
    """

    def __init__(self, storage: StateStorage, max_num_seqs: int) -> None:
        self.slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=storage.device)
        self.layers = layer_states(storage)

    def write(self, batch: Batch, rows: Sequence[int], bucket: int) -> None:
        """Write the slots of a decode step's rows to the device.

        Args:
            batch: the sequences of the step, each with one token.
            rows: the row of each of these sequences.
            bucket: the number of rows of the step; those without a sequence get no slot.
        """
        slots = np.full(bucket, -1, np.int64)
        slots[rows] = [run.state_slot for run in batch.sequences]
        self.slots[:bucket].copy_(send((slots,), self.slots.device)[0])

    def of_rows(self, starts: Tensor) -> StepStates:
        """Return the states of the first rows of a captured step, as views of the fixed slots.

        Args:
            starts: (rows,) int64, for each row the number of its sequence's tokens before the step.
        """
        return StepStates(self.slots[: len(starts)], starts, self.layers)

    def of_step(self, batch: Batch) -> StepStates:
        """Return the states of a step that is computed op by op."""
        slots, starts = (
            np.array(each, np.int64)
            for each in zip(*((run.state_slot, run.start) for run in batch.sequences), strict=True)
        )
        on_device = send((slots, starts), self.slots.device)
        return StepStates(on_device[0], on_device[1], self.layers)
