"""What a step does with states beside computing: slots are filled before it, kept after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewise.cache.states import StateStorage
from tilewise.engine.batch import Batch
from tilewise.nn.states import LayerStates
from tilewise.ops import RecurrentStates

__all__ = ["begin_states", "end_states", "layer_states"]


def layer_states(storage: StateStorage) -> Mapping[int, LayerStates]:
    """Return the slots of each layer as its module takes them."""
    return {
        layer: LayerStates(
            None if slots.recurrence is None else RecurrentStates(*slots.recurrence),
            slots.convolution,
        )
        for layer, slots in storage.layers.items()
    }


@torch.inference_mode()
def begin_states(storage: StateStorage | None, batch: Batch) -> None:
    """Fill slots from checkpoints and from other slots, before anything of a step runs."""
    if storage is not None:
        storage.restore(batch.states.restores)
        storage.fork(batch.states.forks)


@torch.inference_mode()
def end_states(storage: StateStorage | None, batch: Batch) -> None:
    """Keep what slots know, when a step's layers have run."""
    if storage is not None:
        storage.save(batch.states.saves)
