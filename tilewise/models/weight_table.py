"""Which tensors of a checkpoint a parameter is made of, and which part of them it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Part", "Weight"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter and the checkpoint tensors that it is made of.

    Attributes:
        name: in the model's own state dict.
        sources: checkpoint names; their rows follow one another in the parameter.
        rows: dim 0 of each source; None when there is one source.
        transposed: the checkpoint stores (..., in, out), as GPT-2's Conv1D, unless it holds MXFP4.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    transposed: bool = False

    @classmethod
    def of(cls, name: str, source: str) -> Weight:
        """Take one checkpoint tensor as it is."""
        return cls(name, (source,))

    def parts(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each source's name and its view of the parameter, in the checkpoint's shape."""
        rows = self.rows or (parameter.shape[0],)
        for source, part in zip(self.sources, parameter.split(rows), strict=True):
            yield source, part.mT if self.transposed else part


class Part(NamedTuple):
    """What of a checkpoint's tensor a parameter holds, in the layout of the parameter.

    Attributes:
        dim: 0 or 1, the one that is cut.
        size: of the whole tensor there.
        spans: first and last (not included) of what is read, one after another. It may be less
            than the parameter has; the rest of that stays as it is.
    """

    dim: int
    size: int
    spans: tuple[tuple[int, int], ...]
