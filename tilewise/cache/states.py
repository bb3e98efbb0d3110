"""The memory of layers that remember by a state: slots of running sequences, and checkpoints.

A slot holds what a running sequence needs to go on from any token of its open chunk: the state
before the chunk, what the recurrence keeps of the chunk's tokens, and the last tokens that went
into the convolution. A checkpoint holds what is known at the end of a chunk alone: that state, and
the W - 1 tokens before it. So a checkpoint is made of a slot at any time until the sequence leaves
the chunk behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.cache.spec import StateSlots, StateSpec, StateTensor
from tilewise.huge_pages import ask_for_huge_pages

__all__ = ["StateStorage", "checkpoint_bytes"]

_ALIGNMENT = 16  # bytes, at which each part of a checkpoint begins


class _Stack(NamedTuple):
    """The layers with states of one spec, whose tensors lie in one.

    Attributes:
        layers: the numbers of the layers in the model.
        spec: the sizes of the state that each of the layers keeps.
        recurrence: the tensors of the recurrence's slots, (layers, slots, ...); empty without a
            recurrence.
        convolution: the tensor of the convolution's slots, (layers, slots, ...); None without a
            convolution.
        parts: views (checkpoints, layers, ...) of the parts of all checkpoints that belong to these
            layers.
    """

    spec: StateSpec
    layers: tuple[int, ...]
    recurrence: list[Tensor]
    convolution: Tensor | None
    parts: list[Tensor]


class StateStorage:
    """Slots and checkpoints of all layers with a state; not initialised.

    Args:
        specs: the layers of the model that have a state, by number, and the spec of each.
        num_slots: the number of sequences that run at once.
        num_checkpoints: the number of checkpoints that are kept; may be 0.
        device: the device of slots and checkpoints.

    Attributes:
        layers: the slots of each such layer, by its number in the model.
        checkpoints: (num_checkpoints, bytes) uint8, one row for each checkpoint; rows are copied to
            main memory and to files.

    Raises:
        ValueError: num_slots is below 1, or num_checkpoints below 0.
    """

    def __init__(
        self,
        specs: Sequence[tuple[int, StateSpec]],
        num_slots: int,
        num_checkpoints: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        if num_checkpoints < 0:
            raise ValueError(f"num_checkpoints must be at least 0, got {num_checkpoints}")
        self.specs = tuple(specs)
        self.num_slots, self.num_checkpoints = num_slots, num_checkpoints
        self.device = torch.device(device)
        width = checkpoint_bytes(self.specs)
        self.checkpoints = torch.empty(num_checkpoints, width, dtype=torch.uint8, device=device)
        keeps_tokens, place = self.device.type != "cpu", 0
        self._stacks: list[_Stack] = []
        self.layers: dict[int, StateSlots] = {}
        for spec in dict.fromkeys(spec for _, spec in self.specs):
            layers = tuple(layer for layer, own in self.specs if own == spec)
            kinds = [*spec.recurrence(keeps_tokens=keeps_tokens), *spec.convolution]
            tensors = [self._empty(len(layers), kind) for kind in kinds]
            parts: list[Tensor] = []
            for shape, dtype in spec.checkpoint:
                end = place + len(layers) * prod(shape) * dtype.itemsize
                part = self.checkpoints[:, place:end].view(dtype)
                parts.append(part.unflatten(1, (len(layers), *shape)))
                place = -(-end // _ALIGNMENT) * _ALIGNMENT
            convolution = tensors.pop() if spec.convolution else None
            self._stacks.append(_Stack(spec, layers, tensors, convolution, parts))
            for i, layer in enumerate(layers):
                own = [tensor[i] for tensor in tensors]
                betas = own[4] if len(own) > 4 else None
                inverses = own[5] if len(own) > 5 else None
                self.layers[layer] = StateSlots(
                    (own[0], own[1], own[2], own[3], betas, inverses) if own else None,
                    None if convolution is None else convolution[i],
                )

    def _empty(self, num_layers: int, kind: StateTensor) -> Tensor:
        shape, dtype = kind
        found = torch.empty(num_layers, self.num_slots, *shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            ask_for_huge_pages(found)
        return found

    def free(self) -> None:
        """Give the memory of all slots and checkpoints back; no tensor of them may be read
        afterwards."""
        tensors = [self.checkpoints]
        for stack in self._stacks:
            tensors += stack.recurrence
            tensors += [] if stack.convolution is None else [stack.convolution]
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if memory.resizable():  # else it is an array's, and ends with the last reference
                memory.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots and checkpoints."""
        tensors = [t for s in self._stacks for t in (*s.recurrence, s.convolution) if t is not None]
        return sum(t.numel() * t.element_size() for t in (*tensors, self.checkpoints))

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots in all layers, for each pair (source, target); no target may be a source."""
        if not pairs:
            return
        sources, targets = self._indices(pairs)
        for stack in self._stacks:
            for tensor in (*stack.recurrence, stack.convolution):
                if tensor is not None:
                    tensor[:, targets] = tensor[:, sources]

    def restore(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Fill slots from checkpoints, so that sequences continue behind `position` tokens.

        Args:
            places: (checkpoint, slot, position) for each; the position is the number of tokens at
                which the checkpoint was made, a multiple of STATE_CHUNK.
        """
        if not places:
            return
        sources, targets, positions = self._indices(places)
        for stack in self._stacks:
            parts = list(stack.parts)
            if stack.recurrence:
                stack.recurrence[0][:, targets] = parts.pop(0)[sources].transpose(0, 1)
            if stack.convolution is not None:
                rows = self._rows(stack, positions)
                stack.convolution[:, targets.unsqueeze(1), rows] = parts[0][sources].transpose(0, 1)

    def save(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Copy slots to checkpoints, for each (slot, checkpoint, position); the position must be
        that at which the open chunk of the slot's sequence begins."""
        if not places:
            return
        sources, targets, positions = self._indices(places)
        for stack in self._stacks:
            parts = list(stack.parts)
            if stack.recurrence:
                parts.pop(0)[targets] = stack.recurrence[0][:, sources].transpose(0, 1)
            if stack.convolution is not None:
                rows = self._rows(stack, positions)
                found = stack.convolution[:, sources.unsqueeze(1), rows]
                parts[0][targets] = found.transpose(0, 1)

    def _rows(self, stack: _Stack, positions: Tensor) -> Tensor:
        """Return the indices of the rows, in a slot's convolution tensor (a ring), of the W - 1
        tokens before each of positions (n,), oldest first: (n, W - 1); W is the convolution's
        width. Places before a sequence's first token wrap round the ring."""
        assert stack.convolution is not None
        back = torch.arange(1 - stack.spec.conv_width, 0, device=positions.device)
        return (positions.unsqueeze(1) + back) % stack.convolution.shape[2]

    def _indices(self, places: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Return the columns of a list of n tuples as int64 tensors (n,) on the device, sent in one
        copy."""
        found = torch.tensor(places, dtype=torch.int64)
        if self.device.type == "cuda":
            found = found.pin_memory().to(self.device, non_blocking=True)
        return found.unbind(1)


def checkpoint_bytes(specs: Sequence[tuple[int, StateSpec]]) -> int:
    """Return the bytes of one checkpoint of all layers in `specs`, with parts aligned to 16
    bytes."""
    total = 0
    for spec in dict.fromkeys(spec for _, spec in specs):
        count = sum(own == spec for _, own in specs)
        for shape, dtype in spec.checkpoint:
            size = count * prod(shape) * dtype.itemsize
            total = -(-(total + size) // _ALIGNMENT) * _ALIGNMENT
    return total
