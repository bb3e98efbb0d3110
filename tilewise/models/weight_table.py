"""The checkpoint tensors that a parameter is made of, and the parts of them that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.models.layer_config import AttentionConfig, LayerConfig
from tilewise.nn.gated_delta_net import GatedDeltaConfig

__all__ = ["Part", "RowOrder", "Weight", "gate_rows", "grouped_rows"]

RowOrder = Callable[[Any, range, range], tuple[tuple[int, int], ...]]
"""The ranges of rows of a fused source in the order of the parameter: of a whole model's attention
(or gated delta net), some query heads and some key heads (some key heads and some value heads)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter and the checkpoint tensors that it is made of.

    Attributes:
        name: the name in the model's own state dict.
        sources: the checkpoint's names; their rows follow one another in the parameter.
        rows: the size of dim 0 of each source; None when there is one source.
        transposed: True if the checkpoint stores (..., in, out), as GPT-2's Conv1D does; MXFP4
            never does.
        order: a function that returns the rows of the first source, where heads or parts are mixed,
            in the order of the parameter; None where they are in that order.
        either: True if `transposed` holds of some checkpoints, as the shape of the tensor tells.
        unit_dims: the dims of size 1, ascending, that the checkpoint's tensor has besides.
        is_cut_anywhere: True if some files cut the parameter into sources at other rows.
        whole: the name of a tensor that is the parameter, in files that do not have the sources.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    transposed: bool = False
    order: RowOrder | None = None
    either: bool = False
    unit_dims: tuple[int, ...] = ()
    is_cut_anywhere: bool = False
    whole: str | None = None

    @classmethod
    def of(cls, name: str, source: str) -> Weight:
        """Return the weight that is one checkpoint tensor unchanged."""
        return cls(name, (source,))

    def parts(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each source's name and its view of the parameter, in the checkpoint's shape."""
        whole, rows = parameter, self.rows or (parameter.shape[0],)
        if parameter.dim() == 3 and self.rows is not None:
            whole = parameter.flatten(0, 1)  # several tensors for each expert
        for source, part in zip(self.sources, whole.split(rows), strict=True):
            for dim in self.unit_dims:
                part = part.unsqueeze(dim)
            yield source, part.mT if self.transposed else part

    def rows_in_order(self, layer: LayerConfig) -> tuple[tuple[int, int], ...]:
        """Return the (first, end) ranges of rows of the first source, of all heads, in the order of
        the parameter.

        Args:
            layer: the layer of the parameter. The weight must have an `order`.
        """
        block = layer.mixer if ".mixer." in self.name else layer.attention
        assert self.order is not None
        assert isinstance(block, AttentionConfig | GatedDeltaConfig)
        return self.order(block, *block.heads)

    @property
    def layer(self) -> int:
        """The index of the layer in the model, from 0; only for parameters of layers."""
        return int(self.name.split(".")[1])


class Part(NamedTuple):
    """The part of a checkpoint's tensor that a parameter holds, in the layout of the parameter.

    Attributes:
        dim: the dimension that is cut, 0, 1 or 2.
        size: the size of the whole tensor in that dimension.
        spans: (first, end) of the ranges that are read, one after another. They may be shorter than
            the parameter, whose rest then stays as it is.
    """

    dim: int
    size: int
    spans: tuple[tuple[int, int], ...]


def grouped_rows(
    attention: AttentionConfig, q_heads: range, kv_heads: range
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of rows of the given heads: queries, then keys, then values.

    The source has for each key head the queries that read it, then the key, then the value. Source:
    GPT-NeoX, with one query for each key.
    """
    dim = attention.head_dim
    group = attention.num_q_heads // attention.num_kv_heads
    places = [(head // group) * (group + 2) + head % group for head in q_heads]
    for which in (0, 1):
        places += [head * (group + 2) + group + which for head in kv_heads]
    return tuple((place * dim, (place + 1) * dim) for place in places)


def gate_rows(
    attention: AttentionConfig, q_heads: range, kv_heads: range
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of rows of the given heads: gates, then queries.

    The source has for each head its query and then its gate. Source: Qwen3-Next.
    """
    dim = attention.head_dim
    places = [2 * head + which for which in (1, 0) for head in q_heads]
    return tuple((place * dim, (place + 1) * dim) for place in places)
