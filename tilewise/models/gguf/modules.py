"""The quantised modules of a GGUF file, as `models.quantised.QuantisedModules` gives those of
others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.models.gguf.checkpoint import GgufCheckpoint
from tilewise.models.quantised.format import Format, Stored
from tilewise.models.quantised.modules import QuantisedModules
from tilewise.ops import QuantisedWeight

__all__ = ["GgufModules"]


class GgufModules(QuantisedModules):
    """The matrices of a GGUF file that are stored as codes of few bits, in the order of Hugging
    Face's rows.

    Args:
        checkpoint: the file's tensors.
    """

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        def read(stored: Stored) -> QuantisedWeight:
            raise NotImplementedError  # a GGUF file has whole weights, no tensors of a module

        super().__init__(Format("GGUF", (), read), {})
        self._checkpoint = checkpoint

    def has(self, source: str) -> bool:
        """Return whether a tensor is stored as codes that are kept as a quantised weight."""
        return self._checkpoint.is_narrow(source)

    def weight(self, source: str, *, is_meta: bool = False) -> QuantisedWeight:
        """Return the quantised weight of a matrix for which `has` is True.

        Args:
            source: Hugging Face's name of the weight.
            is_meta: True to return it on "meta"; only one row is read then, for its dtypes.
        """
        if not is_meta:
            found = self._checkpoint.read(source)
            assert isinstance(found, QuantisedWeight)
            return found
        row, count = self._checkpoint.row_of(source), self._checkpoint.shape(source)[0]
        assert row.block[0] == 1
        rows = {
            name: torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
            for name, tensor in row.tensors().items()
        }
        return replace(row, **rows)  # type: ignore[arg-type]

    def known(self, sources: Iterable[str]) -> set[str]:
        """Return the names of the tensors that quantised sources are made of: their own."""
        return set(sources)
