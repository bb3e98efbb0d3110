"""From flash-attn's words to tilewise's: what every function of the interface shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.ops import checks

CHANNELS = 8  # head dims are padded to a multiple of this, as flash-attn pads them

WindowSize = Sequence[int | None] | Tensor


class Rule(NamedTuple):
    """How a call weighs its keys and which ones it sees, in tilewise's terms.

    Attributes:
        window: keys to the left and to the right of the diagonal, -1 unlimited; causal is right 0.
        softcap: 0 is off.
        alibi_slopes: (Hq,) or (B, Hq).
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
        """Read the arguments of a call on q, whose head dim sets the default scale."""
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
    """Every negative bound is unlimited; programs also pass elements of a tensor."""
    return -1 if side is None else max(int(side), -1)


def host_int(value: int | Tensor) -> int:
    """Accept a length that lies in a tensor, as flash-attn does; it waits for the device."""
    return int(value) if isinstance(value, Tensor) else value


def padded(x: Tensor) -> Tensor:
    """Give x a contiguous last dimension that is a multiple of CHANNELS; the new channels are 0."""
    missing = -x.shape[-1] % CHANNELS
    if missing:  # the padded tensor lies in memory in the order of x
        x = torch.nn.functional.pad(x, (0, missing))
    return checks.with_packed_rows(x)
