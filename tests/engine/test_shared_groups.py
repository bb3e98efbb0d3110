"""Decode steps read shared prefixes once, by buffers that captured graphs follow."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tests.engine.test_graphs import GREEDY, make_runner, new_scheduler, prompts, run
from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.engine.captured import shared_groups
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.shared_groups import SharedGroups
from tilewise.engine.engine import Engine
from tilewise.engine.request import Request, SamplingParams


def attended(table, lengths, shared, backend, place):
    """Attention of one row a sequence over a small cache."""
    torch.manual_seed(0)
    q = torch.randn(len(lengths), 4, 16)
    cache = torch.randn(2, int(table.max()) + 1, 4, 2, 16)
    cu = torch.arange(len(lengths) + 1, dtype=torch.int32)
    tensors = [x.to(place) for x in (q, cache[0], cache[1], torch.from_numpy(table), cu)]
    q, k_cache, v_cache, blocks, cu = tensors
    return ops.paged_attention(
        q, k_cache, v_cache, block_table=blocks, cu_seqlens_q=cu, max_seqlen_q=1, shared=shared,
        seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=place), backend=backend,
    ).cpu()  # fmt: skip


def grouped(sizes, *, shared=9, own=3):
    """Tables of groups of sequences, mixed; a block has 4 tokens, the last is not full."""
    rows, block = [], 0
    for size in sizes:
        common = list(range(block, block + shared))
        block += shared
        for _ in range(size):
            rows.append([*common, *range(block, block + own)])
            block += own
    random.Random(1).shuffle(rows)
    return np.array(rows, np.int32), np.array([4 * (shared + own) - 1] * len(rows))


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
def test_the_same_buffers_serve_groups_that_change(monkeypatch, backend, place):
    """Rows of the padding and rows that do not run among them; more groups than there are seats."""
    monkeypatch.setattr(shared_groups, "MOST_GROUPS", 3)
    groups = SharedGroups(16, 12, 4, torch.device(place))
    bucket = 12
    prefixes = groups.prefixes(bucket)
    for sizes, idle in (([4, 3], 0), ([2, 2, 2, 5], 1), ([6, 1, 1], 2), ([2, 3], 3)):
        table, lengths = grouped(sizes)
        lengths[:idle] = 0
        groups.find(table, lengths, bucket, 4 * 9)
        assert groups.is_active
        padded = np.zeros((bucket, table.shape[1]), np.int32)
        padded[: len(table)] = table
        counts = np.zeros(bucket, np.int64)
        counts[: len(table)] = lengths
        plain = attended(padded, counts, None, backend, place)
        found = attended(padded, counts, prefixes, backend, place)
        torch.testing.assert_close(found, plain, atol=2e-5, rtol=2e-5)
        level = prefixes.levels[0]
        edges = level.cu_seqlens_q.tolist()
        assert sorted(level.rows.tolist()) == list(range(bucket))
        assert edges == sorted(edges)
        in_groups = level.rows[: edges[-1]].cpu()
        assert (prefixes.skipped.cpu()[in_groups] == 36).all()
        assert int((prefixes.skipped > 0).sum()) == edges[-1] > 1


def test_what_saves_too_little_is_left_alone():
    groups = SharedGroups(8, 12, 4, torch.device("cpu"))
    table, lengths = grouped([3])
    groups.find(table, lengths, 8, 2 * 36)
    assert groups.is_active
    groups.find(table, lengths, 8, 2 * 36 + 1)
    assert not groups.is_active
    groups.find(table[:1], lengths[:1], 8, 1)
    assert not groups.is_active


def alike(count, seed=2):
    """Requests that begin alike, and some that do not, ending at different times."""
    draw = random.Random(seed)
    begin = [draw.randrange(3, 290) for _ in range(50)]
    requests = [
        Request(
            f"alike {i}", [*begin, 3 + i],
            SamplingParams(temperature=0.0, max_tokens=draw.choice([6, 11, 19]), ignore_eos=True),
        )
        for i in range(count)
    ]  # fmt: skip
    return requests + [Request(f"other {i}", p, GREEDY) for i, p in enumerate(prompts(2))]


@pytest.mark.parametrize("case", ["llama", "qwen2_second_layer_window", "mistral_window"])
def test_sharing_changes_no_token(tmp_path, case):
    reference = write_checkpoint(tmp_path, case)
    found = []
    for sharing_tokens in (None, 1):
        runner = make_runner(tmp_path, "cpu", dtype="float32", max_num_batched_tokens=64)
        runner.sharing_tokens = sharing_tokens
        scheduler = new_scheduler(runner, enable_prefix_caching=True)
        found.append(run(Engine(scheduler, runner, overlap=True), alike(5)))
        assert bool(runner.shared_steps) == (sharing_tokens is not None)
    assert found[0] == found[1]
    first = alike(1)[0]
    wanted = greedy_tokens(reference, first.prompt_token_ids, first.sampling.max_tokens)
    assert found[1]["alike 0", 0] == wanted


@pytest.mark.gpu
def test_a_captured_step_follows_the_groups(tmp_path):
    write_checkpoint(tmp_path, "llama")
    found = []
    for sharing_tokens, captures in ((None, False), (1, False), (1, True)):
        runner = make_runner(tmp_path, "cuda", dtype="float32", max_num_batched_tokens=64)
        runner.sharing_tokens = sharing_tokens
        prepare(runner, max_num_batched_tokens=64, is_lazy=True)
        runner.captures = captures
        scheduler = new_scheduler(runner, enable_prefix_caching=True)
        found.append(run(Engine(scheduler, runner, overlap=True), alike(5)))
        assert bool(runner.shared_steps) == (sharing_tokens is not None)
        assert all(step.is_captured == captures for step in runner.shared_steps.values())
        assert runner.compilations.names == []
    assert found[0] == found[1] == found[2]
