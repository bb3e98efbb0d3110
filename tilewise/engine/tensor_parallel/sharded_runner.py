"""`ModelRunner` over a shard: the same, but tokens are drawn from the ranks' own logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.distributed.shards import head_of
from tilewise.engine.batch import Batch
from tilewise.engine.steps.runner import ModelRunner, Samples
from tilewise.engine.steps.sampler import sample
from tilewise.engine.tensor_parallel.drawing import draw_from_shares
from tilewise.models.decoder import Decoder

__all__ = ["GATHERED_BYTES", "ShardedRunner"]

# Logits of a step, in bytes, up to which they are gathered where not all rows are greedy: copied in
# one message and drawn from by a compiled kernel they take less than the small messages and torch's
# operators of `drawing`. Two processes, a vocabulary of 128,256, milliseconds gathered and from
# shares, plain / top_k 40 / top_p 0.9 (two cores, 2026-11, lab/draw_shares.py): 8 rows,
# 4 MB: 11 / 12 / 13 and 13 / 7 / 21; 32 rows, 16 MB: 50 / 61 / 51 and 29 / 17 / 41.
GATHERED_BYTES = 8 << 20


class ShardedRunner(ModelRunner):
    """Runs a shard, in step with the runners of the other ranks.

    Every rank has the same batches and draws the same tokens. Before a step it is known what
    travels: numbers that are found among each rank's own logits (`drawing`), or the logits, where
    some row asks that they be changed or scored for a prompt, or where they are few.

    Args:
        model: the model that `distributed.shards.load_shard` returned.
        storage: the rank's part of the cache.
        batch_invariant: see `ModelRunner`.
    """

    def __init__(self, model: Decoder, storage: KVStorage, *, batch_invariant: bool) -> None:
        head = head_of(model)

        def draw(logits: Tensor, batch: Batch, *untouched: Any) -> Samples:
            if head.is_whole:
                return sample(logits, batch, *untouched)
            return draw_from_shares(head, logits, batch)

        super().__init__(model, storage, sampler=draw, batch_invariant=batch_invariant)
        self._head = head

    def _compute(self, batch: Batch) -> Samples:
        self._head.is_whole = batch.asks or self._is_small(batch)
        return super()._compute(batch)

    def _is_small(self, batch: Batch) -> bool:
        """Return whether a step's logits are so few that they are gathered whole rather than drawn
        in shares.

        False if all rows are greedy without log-probabilities, whose exchange is smaller still.
        """
        rows = [s for s in batch.sequences if s.num_samples > 0]
        if all(s.sampling.greedy and s.sampling.logprobs is None for s in rows):
            return False
        return 4 * len(rows) * self._head.vocab_size <= GATHERED_BYTES
