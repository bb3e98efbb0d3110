"""What is allocated and launched for the rows kernel bounds what the device finds to do."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.kernels.planned import serving_spec
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import paged
from tilewise.kernels.tiles.paged_rows import extend_config, plan_rows


def _spec(**changes: object) -> PagedSpec:
    one = {"num_seqs": 1, "num_tokens": 128, "max_seqlen_q": 128, "max_blocks": 512}
    return serving_spec(**{**one, **changes})


def test_items_parts_and_merged_tiles_are_bounded_for_any_lengths() -> None:
    draw = random.Random(0)
    were_split = 0
    for _ in range(400):
        runs = [draw.choice([0, 1, 3, 40, 200]) for _ in range(draw.choice([1, 2, 7, 150]))]
        spec = _spec(
            num_seqs=len(runs),
            num_tokens=sum(runs),
            max_seqlen_q=max(runs),
            num_kv_heads=draw.choice([1, 8, 32]),
            max_blocks=draw.choice([1, 20, 600, 9000]),
            window_left=draw.choice([-1, -1, 700]),
        )
        adds, min_run = draw.random() < 0.3, draw.choice([1, 2])
        plan = plan_rows(spec, extend_config(spec, 90), 132, adds=adds)
        if not plan.splits:
            continue
        config, longest = plan.config, spec.max_blocks * spec.block_size
        work = []  # tiles of rows and of keys of each sequence, as the device counts them
        for run in runs:
            length = max(run, draw.choice([0, 1, longest, draw.randrange(longest + 1)]))
            length = min(length, longest)
            first = 0
            if spec.window_left >= 0:
                first = max(0, length - run - spec.window_left) // config.tile_n
            row_tiles = -(-run * spec.group_size // config.tile_m) if run >= min_run else 0
            work.append((row_tiles, max(1, -(-length // config.tile_n) - first)))
        total = sum(rows * keys for rows, keys in work)
        split_tiles = max(plan.split_tiles, -(-total // plan.target_items))
        items = [(rows, -(-keys // split_tiles)) for rows, keys in work]
        parts = [(rows, splits) for rows, splits in items if adds or splits > 1]
        assert sum(rows * splits for rows, splits in items) <= plan.num_items
        assert sum(rows * splits for rows, splits in parts) <= plan.num_parts
        assert sum(rows for rows, _ in parts) <= plan.num_merged
        were_split += any(splits > 1 for _, splits in items)
    assert were_split > 20


def test_a_few_tiles_fill_the_device_once_and_many_are_left_whole() -> None:
    spec = _spec(num_tokens=64, max_seqlen_q=64, max_blocks=512)  # two tiles of 128 rows a head
    plan = plan_rows(spec, extend_config(spec, 90), 132)
    assert plan.splits
    assert 2 * 8 * (-(-128 // -(-256 // plan.target_items))) <= 132
    crowd = _spec(num_seqs=64, num_tokens=64 * 64, max_seqlen_q=64)
    assert not plan_rows(crowd, extend_config(crowd, 90), 132).splits


def test_sequences_that_decode_are_an_item_each() -> None:
    decode = _spec(num_seqs=4096, num_tokens=4096, max_seqlen_q=1)
    plan = plan_rows(decode, extend_config(decode, 90), 132)
    assert plan.lone
    assert plan.num_items == 4096
    drafts = replace(decode, num_tokens=4096 * 3, max_seqlen_q=3)
    assert not plan_rows(drafts, extend_config(drafts, 90), 132).lone
    wide = replace(decode, num_q_heads=256, num_kv_heads=1)  # two tiles of 128 rows a token
    assert not plan_rows(wide, extend_config(wide, 90), 132).lone
    few = replace(decode, num_seqs=2, num_tokens=2)
    assert not plan_rows(few, extend_config(few, 90), 132).lone  # their keys are split


def test_batch_invariant_rows_that_decode_meet_the_tiles_of_all_others() -> None:
    decode = _spec(batch_invariant=True, num_seqs=9, max_seqlen_q=1, num_tokens=9, max_blocks=900)
    mixed = _spec(batch_invariant=True, num_seqs=9, max_seqlen_q=700, num_tokens=9000)
    for choose in (paged.paged_work, paged.planned_work):
        first, second = choose(decode, 90, 132), choose(mixed, 90, 132)
        assert first.rows_config is None
        assert first.split_run == second.split_run == 1
        assert first.split_config == second.split_config == second.rows_config
        assert first.split_plan.alone
        assert first.split_plan.num_pairs == 9
        for arch, changes in (
            (80, {}),
            (90, {"dtype": torch.float32, "cache_dtype": torch.float32}),
        ):
            other = choose(_spec(batch_invariant=True, num_tokens=1, **changes), arch, 132)
            assert other.split_run == 0
            assert other.rows_config is not None


def test_runs_of_one_length_need_no_kernel_for_those_of_one_token() -> None:
    prompt = _spec(batch_invariant=True, num_tokens=1024, max_seqlen_q=1024)
    mixed = _spec(batch_invariant=True, num_seqs=9, max_seqlen_q=700, num_tokens=6200)
    decode = _spec(batch_invariant=True, num_seqs=9, max_seqlen_q=1, num_tokens=9)
    for choose in (paged.paged_work, paged.planned_work):
        works = [choose(spec, 90, 132) for spec in (prompt, mixed, decode)]
        assert [work.split_run for work in works] == [0, 1, 1]
        rows = works[0].rows_config
        assert rows == works[1].rows_config == works[2].split_config
        assert rows is not None


def test_batch_invariant_work_depends_on_a_sequence_alone() -> None:
    few = _spec(batch_invariant=True, max_seqlen_q=3, num_tokens=3)
    many = _spec(batch_invariant=True, num_seqs=90, max_seqlen_q=700, num_tokens=9000)
    assert extend_config(few, 90) == extend_config(many, 90)
    assert not plan_rows(few, extend_config(few, 90), 132).splits
