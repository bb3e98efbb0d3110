"""The launcher of adjust_logits for backend="reference": the oracle, written back in place."""

from __future__ import annotations

from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.reference.adjust import adjust_logits

__all__ = ["launch", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(logits: Tensor, *arguments: Tensor | None) -> None:
    """Write the oracle's result of `ops.adjust_logits` to `logits`, in place, all rows.

    Args:
        arguments: the further arguments of `ops.adjust_logits` in its order, `rows` first.
    """
    rows = arguments[0]
    assert rows is not None
    logits.copy_(adjust_logits(logits, rows, *arguments[1:]))
