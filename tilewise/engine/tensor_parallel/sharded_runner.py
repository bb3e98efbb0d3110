"""`ModelRunner` over a shard: the same, but what is most likely is found among the ranks' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.distributed.shards import VocabularyHead, head_of
from tilewise.engine.batch import BROKEN, Batch, SampledToken
from tilewise.engine.runner import ModelRunner, Samples
from tilewise.engine.sampler import sample
from tilewise.models.decoder import Decoder

__all__ = ["ShardedRunner"]


class ShardedRunner(ModelRunner):
    """Runs a shard, in step with the runners of the other ranks.

    Every rank has the same batches and draws the same tokens: in steps that take the most likely
    token everywhere a pair of numbers for each row travels, in others the logits do.

    Args:
        model: of `distributed.shards.load_shard`.
        storage: the rank's part of the cache.
        batch_invariant: see `ModelRunner`.
    """

    def __init__(self, model: Decoder, storage: KVStorage, *, batch_invariant: bool) -> None:
        head = head_of(model)

        def draw(logits: Tensor, batch: Batch, *untouched: Any) -> Samples:
            if head.is_whole:
                return sample(logits, batch, *untouched)
            return _most_likely(head, logits, batch)

        super().__init__(model, storage, sampler=draw, batch_invariant=batch_invariant)
        self._head = head

    def _compute(self, batch: Batch) -> Samples:
        self._head.is_whole = batch.asks or not all(
            s.sampling.greedy and s.sampling.logprobs is None for s in batch.sequences
        )
        return super()._compute(batch)


@torch.inference_mode()
def _most_likely(head: VocabularyHead, logits: Tensor, batch: Batch) -> Samples:
    rows = [s for s in batch.sequences if s.num_samples > 0]
    if not rows:
        return [[] for _ in batch.sequences]
    values, tokens = head.most_likely(logits)
    found = zip(values.isfinite().tolist(), tokens.tolist(), strict=True)
    drawn = iter(
        [[SampledToken(token) if ok else BROKEN] * s.num_samples]
        for s, (ok, token) in zip(rows, found, strict=True)
    )
    return [next(drawn)[0] if s.num_samples > 0 else [] for s in batch.sequences]
