"""A model without tensors, to run the scheduler's own steps thousands of times per second.

The virtual cache keeps, in each slot, a fingerprint of the token there and of all before it, so a
slot is right only if its whole prefix is. The virtual model first does the copies, then writes the
step's tokens, then reads every slot that a real one would read, and draws the next token from the
fingerprint and the sample's random stream.
"""

from __future__ import annotations

import hashlib

from tilewise.engine.batch import Batch, SampledToken, TokenEvent
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.scheduler import Scheduler

VOCAB = 6


def _digest(*parts: object) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class VirtualModel:
    """Executes batches on a virtual cache and refuses any step that a real one would get wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.limits.block_size
        self.slots: list[list[int | None]] = [
            [None] * self.block_size for _ in range(scheduler.limits.num_blocks)
        ]

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        """Compute one step."""
        self._check_limits(batch)
        self._copy(batch)
        prefixes = {}
        written: set[tuple[int, int]] = set()
        for run in batch.sequences:
            seq = self.scheduler.roster.live[run.seq_id]
            end = run.start + len(run.token_ids)
            assert list(run.token_ids) == seq.token_ids[run.start : end]
            assert len(run.block_ids) == -(-end // self.block_size)
            prefixes[run.seq_id] = prefix = fingerprints(seq.token_ids[:end])
            for position in range(run.start, end):
                block = run.block_ids[position // self.block_size]
                slot = (block, position % self.block_size)
                assert self.scheduler.tables.allocator.ref_count(block) == 1, "exclusive writer"
                assert slot not in written, "one writer per slot"
                written.add(slot)
                self.slots[block][slot[1]] = prefix[position]
        return [self._read_and_draw(run, prefixes[run.seq_id]) for run in batch.sequences]

    def _check_limits(self, batch: Batch) -> None:
        limits = self.scheduler.limits
        assert 1 <= batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.sequences) <= limits.max_num_seqs
        chunk = limits.max_chunk_tokens or limits.max_num_batched_tokens
        assert all(1 <= len(run.token_ids) <= chunk for run in batch.sequences)
        assert batch.sequences[0].seq_id == self._oldest_id(), "the oldest always runs"

    def _oldest_id(self) -> int:
        family = next(iter(self.scheduler.roster.requests.values()))
        return next(s.seq_id for s in family if s.finish_reason is None)

    def _copy(self, batch: Batch) -> None:
        sources = {source for source, _ in batch.block_copies}
        destinations = [destination for _, destination in batch.block_copies]
        assert not sources & set(destinations), "a source is never a destination"
        assert len(destinations) == len(set(destinations)), "one copy per destination"
        for source, destination in batch.block_copies:
            self.slots[destination] = list(self.slots[source])

    def _read_and_draw(self, run, prefix: list[int]) -> list[SampledToken]:
        for position, truth in enumerate(prefix):
            block = run.block_ids[position // self.block_size]
            assert self.slots[block][position % self.block_size] == truth, (
                f"sequence {run.seq_id} reads a wrong key at {position}, block {block}"
            )
        assert len(run.seeds) == run.num_samples
        return [
            SampledToken(_digest(prefix[-1], seed, run.num_generated) % VOCAB) for seed in run.seeds
        ]


def fingerprints(token_ids: list[int]) -> list[int]:
    """Return for each position a number that depends on all tokens up to it."""
    out, value = [], 0
    for token in token_ids:
        value = hash((value, token))
        out.append(value)
    return out


class Outputs:
    """Collects events and insists that each sample ends once, with nothing after."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.stop_reasons: dict[tuple[str, int], int | str | None] = {}

    def add(self, events: list[TokenEvent]) -> None:
        """Append one step's events."""
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.reasons, f"{key} went on after its end"
            self.tokens.setdefault(key, []).append(event.token.token_id)
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
                self.stop_reasons[key] = event.stop_reason


def run_to_end(scheduler: Scheduler, max_steps: int = 20_000) -> Outputs:
    """Step until nothing is unfinished, checking everything in each step."""
    model, outputs = VirtualModel(scheduler), Outputs()
    for _ in range(max_steps):
        batch = scheduler.schedule()
        if batch is None:
            break
        outputs.add(scheduler.update(batch, model.run(batch)))
        scheduler.check_integrity()
    assert not scheduler.has_unfinished(), f"unfinished after {max_steps} steps"
    assert scheduler.stats().blocks_used == 0
    return outputs


def run_alone(request: Request, max_model_len: int) -> Outputs:
    """Answer one request with room for all of it at once, whole prompt in one step, no cache."""
    room = (max_model_len + 1) * request.sampling.n
    scheduler = Scheduler(
        room,
        1,
        max_num_seqs=request.sampling.n,
        max_num_batched_tokens=room,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    scheduler.add(request)
    outputs = run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0
    return outputs
