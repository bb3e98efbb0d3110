"""Convert between padded (B, S, ...) and packed (T, ...) batches, under flash-attn's names."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens that a mask selects, sequence after sequence; waits for the device.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) bool or int, nonzero where a token is valid.
        unused_mask: (B, S) bool or int, tokens that are packed, too, without being counted as
            valid.

    Returns:
        rows (T, ...), differentiable; indices (T,) int64, each row's index among the B * S tokens;
        cu_seqlens (B + 1,) int32; the longest sequence, int; the number of valid tokens of each
        sequence, (B,) int32.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> rows, indices, cu, longest, _ = unpad_input(x, mask)
        >>> x = pad_input(flash_attn_varlen_func(rows, rows, rows, cu, cu, longest, longest),
        ...               indices, *mask.shape)
    """
    valid = attention_mask != 0
    placed = valid if unused_mask is None else valid | (unused_mask != 0)
    lengths = placed.sum(-1, dtype=torch.int32)
    indices = placed.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, longest, valid.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a padded batch (batch, seqlen, ...) with packed rows (T, ...) at `indices`, 0
    elsewhere.

    Args:
        hidden_states: (T, ...).
        indices: (T,) int64, as `unpad_input` returned them.
        batch, seqlen: the sizes of the padded batch.

    Source: the interface of flash-attn 2.8.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `input` (n, ...) at indices (T,): (T, ...), differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return (first_axis_dim, ...) with values (T, ...) at distinct indices (T,), 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)
