"""The context of a step: what attention in chunks makes of it."""

from __future__ import annotations

import pytest
import torch

from tilewise.nn.context import AttentionContext

BLOCK = 4


def context(lengths: list[int], new: list[int]) -> AttentionContext:
    """Return the context of sequences of these lengths, the last `new` tokens of which are new."""
    edges = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    table = torch.arange(len(lengths) * 8, dtype=torch.int32).view(len(lengths), 8)
    return AttentionContext(
        cu_seqlens_q=edges,
        max_seqlen_q=max(new),
        seqlens_k=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(sum(new), dtype=torch.int32),
    )


def test_each_chunk_with_new_rows_is_a_sequence_whose_keys_begin_with_it() -> None:
    found = context([19, 3], [10, 1]).in_chunks(8, BLOCK)
    runs = found.cu_seqlens_q.diff().tolist()
    filled = [i for i, rows in enumerate(runs) if rows]
    assert [runs[i] for i in filled] == [7, 3, 1]  # tokens 9 to 15, 16 to 18; and token 2
    assert [int(found.seqlens_k[i]) for i in filled] == [8, 3, 3]
    assert [found.block_table[i].tolist() for i in filled] == [[2, 3], [4, 5], [8, 9]]


@pytest.mark.parametrize("length", [-(2**31), -1, 2**31 - 1])
def test_lengths_that_memory_happens_to_hold_name_blocks_of_the_table(length: int) -> None:
    """A start compiles kernels before one has written lengths."""
    found = context([length, 3], [1, 1]).in_chunks(8, BLOCK)
    assert set(found.block_table.flatten().tolist()) <= set(range(16))
