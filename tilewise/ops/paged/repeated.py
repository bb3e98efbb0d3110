"""The last call of a plan, run again for the layers that follow: nothing of it is looked up twice.

The layers of a step differ in their tensors, not in how these lie, and all else is one step's. So
the first of them is checked and planned; for the others it takes torch's own guard to see that
their tensors lie alike, and the launches are started with other addresses, in the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.plan import Again, LaunchPlan
from tilewise.kernels.spec import PagedTensors
from tilewise.ops import values
from tilewise.ops.derivatives import check_of, never, unwatched
from tilewise.ops.plans import Reading, Run

__all__ = ["LAYER", "Repeated"]

# What differs from layer to layer, and where it stands among the tensors of a call.
LAYER = ("q", "k_cache", "v_cache", "sinks", "k_scale", "v_scale")
_PLACES = [PagedTensors._fields.index(name) for name in LAYER]


class Repeated:
    """The last call with a plan and `out`; what it takes to run it for other layers."""

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type[Repeated], tuple[()]]:
        return Repeated, ()  # a copy has had no call

    def forget(self) -> None:
        """Repeat nothing until a call has run."""
        self._check: Callable[..., bool] = never
        self._types: list[type] = []  # of a layer's tensors, so which of them there are
        self._scale: float | None = None
        self._mode = early.OFF
        self._is_recorded = False  # a gradient would have been wanted, had there been one
        self._tensors: list[Tensor | None] = []  # of a call, none of a layer
        self._run: Run | None = None
        self._again: Again | None = None

    def follow(
        self, run: Run, tensors: Sequence[Tensor | None], softmax_scale: float | None, out: Tensor
    ) -> None:
        """Take note of a call that has run; tensors: all that it was given but `out`."""
        self.forget()
        if values.WAITS:
            return  # every call is to be checked
        its = run.run if isinstance(run, Reading) else run
        if not isinstance(getattr(its, "__self__", None), LaunchPlan):
            return
        if any(x is not None and x.data_ptr() & 15 for x in (*tensors, out)):
            return
        layer, rest = [tensors[place] for place in _PLACES], [*tensors]
        for place in _PLACES:
            rest[place] = None
        if isinstance(run, Reading):
            read = run.as_kernels_read(rest)
            if any(x is not y for x, y in zip(read, rest, strict=True)):
                return  # what a kernel reads is a copy, which does not follow its tensor
        self._tensors = rest
        self._check = check_of(*[x for x in layer if x is not None], out)
        self._types = [*map(type, layer)]
        self._scale, self._mode = softmax_scale, early.mode("attention")
        self._is_recorded, self._run = torch.is_grad_enabled(), run

    def run(
        self, layer: tuple[Tensor | None, ...], softmax_scale: float | None, out: Tensor
    ) -> bool:
        """Run it for a layer's tensors, in the order of LAYER; False where something differs.

        False as well where somebody watches ops, wants a gradient, or captures a graph.
        """
        if [*map(type, layer)] != self._types:
            return False
        if not self._check(*[x for x in layer if x is not None], out):
            return False
        if type(softmax_scale) is not type(self._scale) or softmax_scale != self._scale:
            return False
        if not unwatched() or early.mode("attention") != self._mode:
            return False
        if torch.is_grad_enabled() and not self._is_recorded:
            return False
        run: Any = self._run
        if isinstance(run, Reading):
            read = run.as_kernels_read(self._with(layer))
            layer, run = tuple([read[place] for place in _PLACES]), run.run
        if self._again is None:
            self._again = run.__self__.again(out, self._with(layer), _PLACES)
            if self._again is None:  # a plan that does more than launch
                self.forget()
                return False
        return self._again.run(out, layer)

    def _with(self, layer: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return all tensors of a call."""
        tensors = self._tensors.copy()
        for place, x in zip(_PLACES, layer, strict=True):
            tensors[place] = x
        return tensors
