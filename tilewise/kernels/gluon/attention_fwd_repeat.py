"""A forward pass like one before: only where its tensors lie is looked at.

A call without mask, bias and packed sequences is decided by its spec and the strides of q, k and v;
what follows from them, tiles, code, grid, numbers and descriptors, is remembered with the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gluon._repeat import Repeat, map_address, observed
from tilewise.kernels.spec import AttentionSpec

__all__ = ["Remembered", "key_of", "recall", "remember"]

_MAX_CALLS, _MAX_ADDRESSES = 256, 256
_ALIGNED = 15  # addresses are multiples of 16, or Triton compiles another kernel
Descriptors = Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Sequence[TensorDescriptor]]]
_calls: dict[tuple[object, ...], Remembered] = {}


def key_of(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, vectors: Sequence[Tensor | None]
) -> tuple[object, ...]:
    """Return what decides a call; vectors: what it has beside q, k and v, all of them contiguous.

    Slopes of sequences differ from slopes of heads in their dims only.
    """
    dims = tuple([None if x is None else x.dim() for x in vectors])
    return (spec, q.stride(), k.stride(), v.stride(), q.device, dims)


def recall(key: tuple[object, ...]) -> Remembered | None:
    """Return the call of this key, if there was one."""
    return _calls.get(key)


def remember(key: tuple[object, ...], call: Remembered) -> None:
    """Keep a call for the next of its key."""
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call


class Remembered:
    """A launch that has run, and the descriptors of tensors that it has met."""

    def __init__(
        self, repeat: Repeat, o: Tensor, lse: Tensor, counter: Callable[[torch.device], Tensor],
        descriptors: Descriptors,
    ) -> None:  # fmt: skip
        self._repeat, self._counter, self._descriptors = repeat, counter, descriptors
        self._o, self._lse = o.shape, lse.shape
        self._met: dict[tuple[int, ...], tuple[list[int], Any]] = {}

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, vectors: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor] | None:
        """Return o and lse, or None where the call needs another launch."""
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        given = [x for x in vectors if x is not None]
        beside = [x.data_ptr() for x in given]
        odd = at[0] | at[1] | at[2]
        for address in beside:
            odd |= address
        if odd & _ALIGNED or not all(x.is_contiguous() for x in given) or observed():
            return None
        if torch.cuda.current_device() != self._repeat.device:
            return None
        device = q.device
        o = torch.empty(self._o, dtype=q.dtype, device=device)
        lse = torch.empty(self._lse, dtype=torch.float32, device=device)
        place = o.data_ptr()
        met = self._met.get((*at, place))
        if met is None:
            met = self._meet(q, k, v, o)
        addresses = (place, lse.data_ptr(), self._counter(device).data_ptr(), *beside)
        self._repeat.start(addresses, met[0])
        return o, lse

    def _meet(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple[list[int], Any]:
        """Return the maps of four tensors, and what must live as long as they are used."""
        if len(self._met) >= _MAX_ADDRESSES:
            self._met.clear()
        found = [each for pair in self._descriptors(q, k, v, o) for each in pair]
        key = tuple([x.data_ptr() for x in (q, k, v, o)])
        met = self._met[key] = [map_address(each) for each in found], found
        return met
