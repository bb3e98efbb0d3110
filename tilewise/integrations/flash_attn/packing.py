"""Map the rows of packed sequences from one packing to another."""

from __future__ import annotations

import torch
from torch import Tensor


def edges_of(lengths: Tensor) -> Tensor:
    """Return cu_seqlens (B + 1,) int32, 0 and the running sums of lengths (B,)."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _sequence_of(edges: Tensor, num_rows: int) -> Tensor:
    """Return the number of the sequence of each packed row, int64 (num_rows,).

    Rows after the end of the last sequence get the number of the last sequence, B - 1.

    Args:
        edges: integers (B + 1,), the first row of each sequence and the end of the last one.
        num_rows: the number of packed rows, which may exceed the last edge.
    """
    row = torch.arange(num_rows, dtype=torch.int32, device=edges.device)
    last = max(edges.shape[0] - 2, 0)
    return torch.searchsorted(edges[1:], row, right=True).clamp(max=last)


def rows_of(per_sequence: Tensor, edges: Tensor, num_rows: int) -> Tensor:
    """Return (num_rows, H): for each packed row the entry of per_sequence (B, H) of the row's
    sequence."""
    return per_sequence[_sequence_of(edges, num_rows)]


def rows_in(num_rows: int, edges: Tensor, others: Tensor) -> Tensor:
    """Return the index of each of num_rows rows, packed by `edges`, in the packing of the same
    sequences by `others`, int64; -1 for a row that is not in it, as its sequence is shorter
    there."""
    if num_rows == 0 or edges.shape[0] < 2:
        return torch.full((num_rows,), -1, dtype=torch.int64, device=edges.device)
    sequence = _sequence_of(edges, num_rows)
    at = torch.arange(num_rows, device=edges.device) - edges[sequence] + others[sequence]
    exists = (at < others[sequence + 1]) & (at - others[sequence] >= 0)
    inside = torch.arange(num_rows, device=edges.device) < edges[-1]
    return torch.where(exists & inside, at, -1).long()
