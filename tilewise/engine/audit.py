"""Live requests computed again, alone, and compared to the bit. No torch.

Of a share of the requests the tokens and log-probabilities are noted as they are drawn. When the
engine has nothing else to do, such a request is computed again under a namespace of its own, so
that it uses no cached block, and each number is compared. With batch invariance they are equal, or
something is broken: a block was overwritten, a table was wrong, a row was another's. A request that
comes meanwhile ends the second computation, which begins anew when the engine is idle again: the
request waits for the step that runs, and shares none.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tilewise.engine.batch import TokenEvent
from tilewise.engine.request import Request, SamplingParams

__all__ = ["Auditor", "Difference"]

MOST_WAITING = 256  # noted requests that wait for idle steps; older ones are forgotten
MOST_NEIGHBOURS = 64  # names that a difference has


@dataclass(slots=True)
class _Noted:
    """A request under audit, with the token ids and logprobs that each of its samples has drawn so
    far.

    `tokens` and `scores` are lists by sample index; `blocks`, `neighbours` and steps are for a
    report.
    """

    request: Request
    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    neighbours: dict[str, None] = field(default_factory=dict)
    first_step: int = -1
    last_step: int = -1
    error: Exception | None = None

    def add(self, event: TokenEvent) -> None:
        token = event.token
        self.error = event.error or self.error
        if token is not None and token.logprob is not None:
            self.tokens.setdefault(event.index, []).append(token.token_id)
            self.scores.setdefault(event.index, []).append(token.logprob)


@dataclass(frozen=True, slots=True)
class Difference:
    """A fault that a check found: an answer or a cached block is not as it was when it was
    computed.

    Attributes:
        kind: "answer" of a request computed again, "block" of a block whose bytes have changed.
        request_id: the name of the request; "" of a block.
        text: one sentence that says what differs.
        blocks: the ids of the blocks that the request had last, or of the one that has changed.
        steps: the numbers of the first and last step of the request; of a block twice that of the
            check.
        neighbours: names of requests that ran in the same steps.
        replay: the prompt, the seed of the draws and the served tokens, of JSON's types; {} of a
            block.
    """

    kind: str
    request_id: str
    text: str
    blocks: tuple[int, ...]
    steps: tuple[int, int]
    neighbours: tuple[str, ...] = ()
    replay: dict[str, Any] = field(default_factory=dict)


class Auditor:
    """Notes some requests, and compares them with second computations; on the engine's thread.

    Args:
        share: the share of requests that are noted, in (0, 1].
        seed: the seed of the choice.

    Attributes:
        num_audited: requests that were computed again.
        num_different: the number of second computations in which something differed.
        num_forgotten: noted requests that were never computed again: too many waited, weights have
            changed, or a step of the second computation failed.
        on_difference: a function that is called with each difference.
    """

    def __init__(
        self,
        share: float,
        on_difference: Callable[[Difference], None],
        *,
        seed: int = 0,
    ) -> None:
        self.share, self.on_difference = share, on_difference
        self.num_audited = self.num_different = self.num_forgotten = 0
        self._draw = random.Random(f"audit {seed}")
        self._noted: dict[str, _Noted] = {}
        self._waiting: deque[_Noted] = deque()
        self._replay: tuple[str, _Noted, _Noted] | None = None
        self._numbers = itertools.count()

    def note(self, request: Request, seed: int) -> None:
        """Choose at random whether a request that the engine has just taken is audited; if so,
        change it to compute logprobs.

        Requests with beams, pooling or logits processors are never chosen.

        Args:
            request: the request, no step of which has been scheduled.
            seed: the seed of its draws.
        """
        if not _can_repeat(request) or self._draw.random() >= self.share:
            return
        if request.row_sampling.logprobs is None:
            request.row_sampling = dataclasses.replace(request.row_sampling, logprobs=0)
        request.is_plain = False
        self._noted[request.request_id] = _Noted(request, seed)

    @property
    def is_watching(self) -> bool:
        """Whether a running request is under audit, or a second computation runs."""
        return bool(self._noted) or self._replay is not None

    @property
    def watched(self) -> Iterable[str]:
        """The names of the noted requests that have not ended, as a new list."""
        return list(self._noted)

    def see(self, request_id: str, blocks: list[int], beside: Iterable[str], step: int) -> None:
        """Note a step of a watched request: its blocks, its number, and the requests beside it.

        Args:
            request_id: the request; one that is not noted is ignored.
            blocks: the ids of its blocks; an empty list leaves those noted before.
            beside: names of all requests of the step, the first 64 of which are noted.
            step: the number of the step.
        """
        noted = self._noted.get(request_id)
        if noted is None:
            return
        noted.blocks = blocks or noted.blocks
        noted.first_step = step if noted.first_step < 0 else noted.first_step
        noted.last_step = step
        for name in beside:
            if name != request_id and len(noted.neighbours) < MOST_NEIGHBOURS:
                noted.neighbours[name] = None

    def take(self, request_id: str, events: Iterable[TokenEvent]) -> None:
        """Note the tokens that a step drew for a request, or for the second computation of one."""
        noted = self._noted.get(request_id)
        if noted is None and self._replay is not None and self._replay[0] == request_id:
            noted = self._replay[2]
        if noted is not None:
            for event in events:
                noted.add(event)

    def end(self, request_id: str) -> None:
        """Take note that a request has ended, in whatever way: it now waits to be computed again.

        A request without tokens is forgotten, and the oldest that waits if 256 do.
        """
        noted = self._noted.pop(request_id, None)
        if noted is not None and any(noted.tokens.values()):
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.num_forgotten += 1
            self._waiting.append(noted)

    def next_request(self) -> Request | None:
        """Begin a second computation: return a request to submit that repeats the oldest that
        waits.

        The request has a name and namespace of its own, the same seed, and no deadline.

        Returns:
            The request; None if none waits, or if a second computation runs.
        """
        if self._replay is not None or not self._waiting:
            return None
        noted = self._waiting.popleft()
        name = f"audit-{next(self._numbers)}"
        longest = max(map(len, noted.tokens.values()))
        sampling = dataclasses.replace(
            noted.request.sampling, max_tokens=longest, logprobs=0, prompt_logprobs=None
        )
        request = dataclasses.replace(
            noted.request,
            request_id=name,
            sampling=sampling,
            salt=f"\0\0audit\0{name}",
            deadline_s=None,
            max_queue_s=None,
            drawn_seed=noted.seed,
        )
        self._replay = name, noted, _Noted(request, noted.seed)
        return request

    @property
    def replay_id(self) -> str | None:
        """The name of the request that computes an answer a second time now; None for none."""
        return None if self._replay is None else self._replay[0]

    def put_back(self) -> str | None:
        """Give up the second computation that runs, as a request has come; it begins anew later.

        Returns:
            The name of the repeating request, which the caller must abort; None if none runs.
        """
        if self._replay is None:
            return None
        name, noted, _ = self._replay
        self._replay = None
        self._waiting.appendleft(noted)
        return name

    def finish_replay(self) -> None:
        """Compare the second computation, which has ended, with the first, and report a difference.

        A step of it that failed says nothing: then the request is counted as forgotten.
        """
        assert self._replay is not None
        _, noted, again = self._replay
        self._replay = None
        if again.error is not None and not isinstance(again.error, FloatingPointError):
            self.num_forgotten += 1  # a step failed, which says nothing of what was served
            return
        self.num_audited += 1
        text = _first_difference(noted, again)
        if text is not None:
            self.num_different += 1
            self.on_difference(
                Difference(
                    "answer",
                    noted.request.request_id,
                    text,
                    tuple(noted.blocks),
                    (noted.first_step, noted.last_step),
                    tuple(noted.neighbours),
                    _replayable(noted),
                )
            )

    def forget_all(self) -> None:
        """Forget all noted and waiting requests and the second computation, because the weights
        change."""
        self.num_forgotten += len(self._noted) + len(self._waiting) + (self._replay is not None)
        self._noted.clear()
        self._waiting.clear()
        self._replay = None


def _can_repeat(request: Request) -> bool:
    return (
        type(request.sampling) is SamplingParams
        and request.pooling is None
        and not request.sampling.logits_processors
    )


def _first_difference(noted: _Noted, again: _Noted) -> str | None:
    for sample, tokens in sorted(noted.tokens.items()):
        others, scores = again.tokens.get(sample, []), again.scores.get(sample, [])
        for at, (token, score) in enumerate(zip(tokens, noted.scores[sample], strict=True)):
            place = f"sample {sample}, token {at} of {len(tokens)}"
            if at >= len(others):
                return f"{place}: served was token {token}, alone it ends before"
            if others[at] != token:
                return f"{place}: served was token {token}, alone it is token {others[at]}"
            if struct.pack("<f", scores[at]) != struct.pack("<f", score):
                gap = abs(scores[at] - score)
                return f"{place}: token {token} both times, log-probabilities differ by {gap:g}"
    return None


def _replayable(noted: _Noted) -> dict[str, Any]:
    """Return the part of an audit record by which an answer can be computed again and compared.

    The fields are prompt_token_ids, drawn_seed, temperature, and for each sample the token ids and
    logprobs that were served.
    """
    return {
        "prompt_token_ids": noted.request.prompt_token_ids,
        "drawn_seed": noted.seed,
        "temperature": noted.request.sampling.temperature,
        "answers": [
            {"index": i, "token_ids": tokens, "logprobs": noted.scores[i]}
            for i, tokens in sorted(noted.tokens.items())
        ],
    }
