"""Tokens drawn from shares of the vocabulary by processes, with gloo between them."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tensor_parallel.test_drawing import RULES, _batch, _head, _ids, _logits
from tilewise.distributed.shard_group import ShardGroup
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.sampler import sample
from tilewise.engine.tensor_parallel.drawing import draw_from_shares


def drawn(group, rank, size, *, vocab, samples):
    """Draw by all rules in one step; return the rules whose tokens differ from one process's."""
    names = [*RULES] * 5
    params = [
        SamplingParams(**RULES[name], logprobs=3 if i % 4 == 0 else None)
        for i, name in enumerate(names)
    ]
    logits, batch = _logits(vocab, len(params), seed=9), _batch(params, samples)
    shards = ShardGroup(rank, size, torch.device("cpu"), group)
    head = _head(shards, vocab)
    got = draw_from_shares(head, logits[:, head.first : head.end], batch)
    want = _ids(sample(logits.clone(), batch))
    return [name for name, a, b in zip(names, _ids(got), want, strict=True) if a != b]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 2])
def test_processes_draw_what_one_draws(ranks, size, samples):
    for vocab in (101, 5000):
        assert ranks.run(drawn, size, vocab=vocab, samples=samples) == [[]] * size
