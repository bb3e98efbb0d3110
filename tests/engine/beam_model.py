"""Beam search without a cache or a scheduler, and a virtual model that gives beams their rows."""

from __future__ import annotations

import math

from tests.engine.simulator import VOCAB, VirtualModel, _digest, fingerprints
from tilewise.engine.batch import BROKEN, Batch, SampledToken, ScheduledSequence
from tilewise.engine.request import Request, Sequence
from tilewise.engine.scheduling.beams import BeamSearchParams


def row(token_ids: list[int]) -> list[tuple[int, float]]:
    """Return the log-probability of every next token, the most likely first.

    Few different weights, so that equal scores are common.
    """
    prefix = fingerprints(token_ids)[-1]
    weights = [1 + _digest(prefix, token) % 5 for token in range(VOCAB)]
    values = [math.log(weight / sum(weights)) for weight in weights]
    return sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))


class BeamModel(VirtualModel):
    """The virtual model, with log-probabilities of the next tokens where they are asked for."""

    def _read_and_draw(self, run, table, prefix) -> list[SampledToken]:
        drawn = super()._read_and_draw(run, table, prefix)
        if not drawn or run.sampling.logprobs is None or drawn[0] is BROKEN:
            return drawn
        seq = self.scheduler.roster.live.get(run.seq_id)
        if seq is None or not isinstance(seq.request.sampling, BeamSearchParams):
            return drawn
        assert run.num_samples == 1
        found = row(seq.token_ids[: run.start + len(run.token_ids)])
        return [SampledToken(found[0][0], found[0][1], tuple(found[: run.sampling.logprobs]))]

    def _first(self) -> Sequence:
        """The first that runs and does not rest; somebody does."""
        scheduler = self.scheduler
        return next(s for s in scheduler.roster.running if not scheduler.beams.is_resting(s))

    def _oldest_id(self) -> int:
        """The first of the oldest request's sequences that is not at rest."""
        family = next(iter(self.scheduler.roster.requests.values()))
        return next(
            s.seq_id
            for s in family
            if s.finish_reason is None and not self.scheduler.beams.is_resting(s)
        )


def virtual_rows(prefixes: list[list[int]], parents: list[int]) -> list[list[tuple[int, float]]]:
    """Return the rows of the virtual model."""
    return [row(prefix) for prefix in prefixes]


def search(request: Request, max_len: int, rows=virtual_rows) -> list[tuple[list[int], float, str]]:
    """Return what a search finds, the best first: tokens, score and whether it ends by "stop".

    Written from transformers' description, over whole lists, with every token of every row.

    Args:
        rows: takes the tokens that live, prompts included, and of each the place that its parent
            had one step before; returns (token, log-probability) of each.
    """
    params, prompt = request.sampling, list(request.prompt_token_ids)
    alive: list[tuple[float, list[int], int]] = [(0.0, [], 0)]
    ended: list[tuple[float, list[int], str]] = []
    while True:
        length = len(alive[0][1]) + 1
        is_last = len(prompt) + length >= max_len
        found = rows([prompt + tokens for _, tokens, _ in alive], [r for *_, r in alive])
        every = [
            (total + value, rank, token)
            for rank, (total, _, _) in enumerate(alive)
            for token, value in found[rank]
        ]
        every.sort(key=lambda found: (-found[0], found[1], found[2]))
        going = [(x, r, t) for x, r, t in every if t not in request.end_ids and not is_last]
        for total, rank, token in every[: params.beam_width]:
            if token in request.end_ids or is_last:
                why = "stop" if token in request.end_ids else "length"
                ended.append((total / length**params.length_penalty, alive[rank][1] + [token], why))
        ended = sorted(ended, key=lambda e: -e[0])[: params.beam_width]
        alive = [(x, alive[r][1] + [t], r) for x, r, t in going[: params.beam_width]]
        if not alive:
            break
        if len(ended) == params.beam_width:
            at = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                at = max_len - len(prompt)
            best = alive[0][0] / at**params.length_penalty
            if params.early_stopping is True or best <= ended[-1][0]:
                break
    return [(tokens, score, why) for score, tokens, why in ended]


class ContiguousBeams:
    """Rows of a real runner in which every beam has a copy of its whole cache, as in `search`.

    Args:
        runner: of an engine that does nothing else.
        sampling: what is asked of each row.
        width: beams.
    """

    def __init__(self, runner, sampling, width: int) -> None:
        self.runner, self.sampling = runner, sampling
        half = runner.storage.num_blocks // 2
        self.sides = [range(half), range(half, 2 * half)]
        self.per_beam, self.step = half // width, 0

    def blocks(self, rank: int, step: int) -> list[int]:
        """Blocks of a beam: one half of the cache in even steps, the other in odd ones."""
        return list(self.sides[step % 2][rank * self.per_beam : (rank + 1) * self.per_beam])

    def __call__(self, prefixes: list[list[int]], parents: list[int]):
        """See `rows` of `search`."""
        now, self.step = self.step, self.step + 1
        runs, copies, left = [], [], ()
        for rank, (tokens, parent) in enumerate(zip(prefixes, parents, strict=True)):
            start = len(tokens) - 1 if now else 0
            own = self.blocks(rank, now)
            if now:
                copies += zip(self.blocks(parent, now - 1), own, strict=True)
                left = tuple(range(1000 * (now - 1), 1000 * now))
            runs.append(
                ScheduledSequence(
                    1000 * now + rank, tuple(tokens[start:]), start, own, 1, self.sampling, (0,)
                )
            )
        batch = Batch(tuple(runs), tuple(copies), left)
        return [list(drawn.top_logprobs) for [drawn] in self.runner.submit(batch).result()]
