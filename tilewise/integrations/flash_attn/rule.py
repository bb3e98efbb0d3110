"""Convert flash-attn's arguments to tilewise's, for every function of the interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.ops import checks

CHANNELS = 8  # head dims are padded to a multiple of this, as flash-attn does

WindowSize = Sequence[int | None] | Tensor


class Rule(NamedTuple):
    """The options of one flash-attn call, in the terms of `tilewise.attention`.

    Attributes:
        window: the keys to the left and right of the diagonal, -1 unlimited; causal is right 0.
        softcap: the bound of the logits; 0 is off.
        alibi_slopes: (Hq,) or (B, Hq); None for no ALiBi.
    """

    softmax_scale: float
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    deterministic: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> Rule:
        """Return the rule of a call with flash-attn's arguments; q's head dim sets the default
        scale.

        Raises ValueError unless window_size has two values, (left, right).
        """
        if len(window_size) != 2:
            raise ValueError(f"window_size must be (left, right), got {window_size!r}")
        left, right = (_bound(side) for side in window_size)
        return cls(
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            window=(left, 0 if causal else right),
            softcap=max(softcap, 0.0),  # flash-attn: anything not positive is off
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            deterministic=deterministic,
        )


def _bound(side: int | Tensor | None) -> int:
    """Return one side of a window as an int, -1 for None and every negative number; a tensor is
    read."""
    return -1 if side is None else max(int(side), -1)


def host_int(value: int | Tensor) -> int:
    """Return a length as an int; if it is in a tensor, as flash-attn allows, wait for the
    device."""
    return int(value) if isinstance(value, Tensor) else value


def padded(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension that is a multiple of CHANNELS; new channels are
    0."""
    missing = -x.shape[-1] % CHANNELS
    if missing:  # the padded tensor has x's order of dimensions in memory
        x = torch.nn.functional.pad(x, (0, missing))
    return checks.with_packed_rows(x)
