"""The state of the rows of a captured decode step, brought forward by torch's own operations.

A row is a running sequence: its position, next token, block table and slot. `ops.decode_rows` runs
this on CPUs; it is the oracle of the kernels of GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def begin(
    position: Tensor,
    active: Tensor,
    fresh: Tensor,
    table: Tensor,
    place: Tensor,
    *,
    block_size: int,
    ring: int,
    positions: Tensor,
    slot_mapping: Tensor,
    seqlens_k: Tensor,
) -> None:
    """Prepare a decode step in place: enter new blocks in the table, compute positions, slots and
    numbers of keys, and advance `place`, the index of the step's results among `ring` places.

    The arguments are those of `ops.decode_rows.begin_decode`, without backend.
    """
    positions.copy_(position * active)
    column = (positions // block_size).unsqueeze(1)
    block = table.gather(1, column)
    block = torch.where(fresh.unsqueeze(1) >= 0, fresh.unsqueeze(1), block)
    table.scatter_(1, column, block)
    fresh.fill_(-1)
    slots = block[:, 0].to(torch.int64) * block_size + positions % block_size
    slot_mapping.copy_(torch.where(active != 0, slots, -1))
    seqlens_k.copy_(positions + active)
    place.add_(1).remainder_(ring)


def start(
    position: Tensor,
    active: Tensor,
    fresh: Tensor,
    table: Tensor,
    place: Tensor,
    *,
    token: Tensor,
    embedding: Tensor,
    angles: Tensor,
    **written: Any,
) -> tuple[Tensor, Tensor]:
    """Prepare a decode step as `begin` does; return embedding[token] and angles[positions].

    The arguments are those of `ops.decode_rows.start_decode`.
    """
    begin(position, active, fresh, table, place, **written)
    return embedding[token], angles[written["positions"]]


def finish(
    drawn: Tensor,
    is_finite: Tensor,
    token: Tensor,
    position: Tensor,
    counter: Tensor,
    active: Tensor,
    place: Tensor,
    results: Tensor,
) -> None:
    """Advance token, position and counter of active rows; write the drawn tokens and is_finite of
    all rows to results[place].

    The arguments are those of `ops.decode_rows.finish_decode`.
    """
    token.copy_(torch.where(active != 0, drawn, token))
    position += active
    counter += active
    pairs = torch.stack((drawn, is_finite.to(torch.int64)), dim=1)
    results[:, : len(drawn)].index_copy_(0, place, pairs.unsqueeze(0))
