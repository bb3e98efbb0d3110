"""The checkpoint tensors that a parameter is made of, and the parts of them that it holds."""

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
        name: the name in the model's own state dict.
        sources: the checkpoint's names; their rows follow one another in the parameter.
        rows: the size of dim 0 of each source; None when there is one source.
        transposed: True if the checkpoint stores (..., in, out), as GPT-2's Conv1D does; MXFP4
            never does.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    transposed: bool = False

    @classmethod
    def of(cls, name: str, source: str) -> Weight:
        """Return the weight that is one checkpoint tensor unchanged."""
        return cls(name, (source,))

    def parts(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each source's name and its view of the parameter, in the checkpoint's shape."""
        rows = self.rows or (parameter.shape[0],)
        for source, part in zip(self.sources, parameter.split(rows), strict=True):
            yield source, part.mT if self.transposed else part


class Part(NamedTuple):
    """The part of a checkpoint's tensor that a parameter holds, in the layout of the parameter.

    Attributes:
        dim: the dimension that is cut, 0 or 1.
        size: the size of the whole tensor in that dimension.
        spans: (first, end) of the ranges that are read, one after another. They may be shorter than
            the parameter, whose rest then stays as it is.
    """

    dim: int
    size: int
    spans: tuple[tuple[int, int], ...]
