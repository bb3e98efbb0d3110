"""A batch becomes the packed tensors of a step, in one buffer."""

from __future__ import annotations

import random

import torch

from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.inputs import ALIGNMENT, build_inputs

CPU = torch.device("cpu")


def run(token_ids, start, block_ids, num_samples=1):
    return ScheduledSequence(
        0, tuple(token_ids), start, tuple(block_ids), num_samples, SamplingParams()
    )


def test_a_mixed_batch_by_hand():
    batch = Batch(
        (
            run([10, 11, 12], 0, [4]),  # a whole prompt
            run([20, 21], 4, [7, 2], num_samples=0),  # a chunk in the middle of one
            run([30], 9, [0, 1, 5]),  # a decode
        ),
        block_copies=((3, 6), (8, 9)),
    )
    inputs = build_inputs(batch, 4, CPU)
    assert inputs.ids.tolist() == [10, 11, 12, 20, 21, 30]
    assert inputs.positions.tolist() == [0, 1, 2, 4, 5, 9]
    assert inputs.ctx.slot_mapping.tolist() == [16, 17, 18, 8, 9, 21]
    assert inputs.ctx.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert inputs.ctx.max_seqlen_q == 3
    assert inputs.ctx.seqlens_k.tolist() == [3, 6, 10]
    assert inputs.ctx.block_table.tolist() == [[4, -1, -1], [7, 2, -1], [0, 1, 5]]
    assert inputs.logits_rows.tolist() == [2, 5]
    assert inputs.block_copies.tolist() == [[3, 6], [8, 9]]


def test_dtypes_are_those_that_the_ops_take():
    inputs = build_inputs(Batch((run([1], 0, [0]),)), 16, CPU)
    for tensor in (inputs.ids, inputs.positions, inputs.logits_rows, inputs.block_copies):
        assert tensor.dtype == torch.int64
    assert inputs.ctx.slot_mapping.dtype == torch.int64
    for tensor in (inputs.ctx.cu_seqlens_q, inputs.ctx.seqlens_k, inputs.ctx.block_table):
        assert tensor.dtype == torch.int32


def test_nothing_to_copy_and_nothing_to_sample_are_empty_tensors():
    inputs = build_inputs(Batch((run([1, 2], 0, [0], num_samples=0),)), 16, CPU)
    assert inputs.logits_rows.shape == (0,)
    assert inputs.block_copies.shape == (0, 2)


def test_one_transfer_carries_everything_and_every_part_is_aligned():
    inputs = build_inputs(Batch((run([1, 2, 3], 0, [0]), run([4], 5, [1, 2]))), 4, CPU)
    parts = [inputs.ids, inputs.positions, inputs.logits_rows]
    parts += [inputs.ctx.cu_seqlens_q, inputs.ctx.seqlens_k, inputs.ctx.block_table]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.data_ptr() % ALIGNMENT == 0 for part in parts)


def test_slots_and_positions_follow_the_definition():
    draw = random.Random(0)
    for block_size in (1, 3, 16):
        runs = []
        for _ in range(20):
            start, length = draw.randrange(40), draw.randrange(1, 30)
            count = -(-(start + length) // block_size)
            blocks = [draw.randrange(1000) for _ in range(count)]
            runs.append(run([draw.randrange(99) for _ in range(length)], start, blocks))
        inputs = build_inputs(Batch(tuple(runs)), block_size, CPU)
        positions, slots = [], []
        for r in runs:
            for p in range(r.start, r.start + len(r.token_ids)):
                positions.append(p)
                slots.append(r.block_ids[p // block_size] * block_size + p % block_size)
        assert inputs.positions.tolist() == positions
        assert inputs.ctx.slot_mapping.tolist() == slots


def test_prefixes_are_shared_where_they_save_enough():
    """Two sequences with eight blocks of four tokens in common save 32 keys."""
    common = tuple(range(8))
    batch = Batch((run([5], 35, (*common, 20)), run([6], 33, (*common, 21)), run([7], 3, [30])))
    shared = build_inputs(batch, 4, CPU, sharing_tokens=32).ctx.shared
    assert shared.skipped.tolist() == [32, 32, 0]
    assert shared.levels[0].rows.tolist() == [0, 1]
    assert build_inputs(batch, 4, CPU, sharing_tokens=33).ctx.shared is None
    assert build_inputs(batch, 4, CPU).ctx.shared is None
