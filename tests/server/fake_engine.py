"""An AsyncLLM without a model: the next token is a function of those before it.

It has the story model's tokenizer and its limits, takes a step every `step_s`, and does what the
real one promises: outputs hold everything so far, a slow reader gets several steps merged, leaving
the iterator aborts, a prompt that can never fit is refused.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tilewise.engine.batch import SampledToken, TokenEvent
from tilewise.engine.engine import EngineStats
from tilewise.engine.outputs import Generation
from tilewise.engine.prompts import token_ids
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.stats import SchedulerStats
from tilewise.engine.tables.admission import Limits
from tilewise.engine.tokenizer import load_tokenizer

STORY = Path(__file__).parents[2] / "tilewise" / "assets" / "story"
VOCABULARY = 4096


class FakeEngine:
    """See the module.

    Attributes:
        live: requests that have not ended, by id.
        aborted: ids of those that were let go of.
        script: token ids that every request draws, over and over; None draws by a hash.
        fails_at: the token at which every request fails; None never.
        is_held: while True no token is drawn.
    """

    def __init__(self, *, step_s: float = 0.0, max_model_len: int = 1024) -> None:
        self.tokenizer = load_tokenizer(STORY)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=max_model_len)
        self.limits = Limits(4 * max_model_len // 16, 16, 64, 2048, max_model_len)
        self.step_s = step_s
        self.live: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.seen: list[dict] = []
        self.script: list[int] | None = None
        self.fails_at: int | None = None
        self.is_held = False
        self.is_alive = True
        self.last_step_time = time.monotonic()
        self.is_closed = False

    async def generate(
        self,
        prompt,
        sampling_params=None,
        *,
        request_id=None,
        user="",
        cache_salt="",
        priority=0,
        deadline_s=None,
        max_queue_s=None,
        sink=None,
    ):
        sampling = sampling_params or SamplingParams()
        text, ids, _ = token_ids(prompt, self.tokenizer)
        asked = (
            {} if sampling.structured is None else {"new_matcher": object}
        )  # no schema is followed
        request = Request(
            request_id or "request", ids, sampling, (0,), cache_salt, user, priority, **asked
        )
        request.deadline_s, request.max_queue_s = deadline_s, max_queue_s
        self.limits.check(request)
        self.seen.append({"request": request})
        generation = Generation(request, text, self.tokenizer)
        end = time.monotonic() + (deadline_s if deadline_s is not None else 1e9)
        self.live[request.request_id] = request
        try:
            drawn = [0] * sampling.num_samples
            while not generation.output.finished:
                await asyncio.sleep(self.step_s)
                if request.request_id in self.aborted:
                    generation.abort()
                elif time.monotonic() > end:
                    for completion in generation.output.outputs:
                        if completion.finish_reason is None:
                            completion.finish_reason = FinishReason.DEADLINE.value
                    generation.output.finished = True
                elif self.is_held:
                    await asyncio.sleep(0.002)
                    continue
                else:
                    self._step(generation, drawn)
                output = self._snapshot(generation)
                if sink is None or output.finished or not sink(output):
                    yield output
        finally:
            if not generation.output.finished:
                self.aborted.append(request.request_id)
            del self.live[request.request_id]

    def _step(self, generation, drawn):
        request, self.last_step_time = generation.request, time.monotonic()
        for index, completion in enumerate(generation.output.outputs):
            if completion.finish_reason is not None:
                continue
            number = drawn[index]
            drawn[index] += 1
            if number == self.fails_at:
                raise FloatingPointError("logits must be finite, got nan")
            token = self._token(request, index, number)
            reason = None
            if token in request.end_ids:
                reason = FinishReason.STOP
            elif len(request.prompt_token_ids) + number + 1 >= self.limits.max_len(request):
                reason = FinishReason.LENGTH
            count = request.sampling.logprobs
            best = tuple(((token + i) % VOCABULARY, -0.5 - i) for i in range(count or 0))
            sampled = SampledToken(token, None if count is None else -0.5, best)
            is_asked = token in request.stop_ids
            generation.take(
                TokenEvent(
                    request.request_id, index, sampled, reason,
                    stop_reason=token if is_asked else None, num_cached_tokens=0,
                )
            )  # fmt: skip

    def _token(self, request, index, number):
        if self.script is not None:
            return self.script[number % len(self.script)]
        seed = request.sampling.seed or 0
        mixed = hash((tuple(request.prompt_token_ids), index, number, seed))
        return 1 + mixed % (VOCABULARY - 1)

    def _snapshot(self, generation):
        outputs = [
            replace(
                completion,
                text=generation._streams[completion.index].text,
                token_ids=list(completion.token_ids),
                logprobs=None if completion.logprobs is None else list(completion.logprobs),
            )
            for completion in generation.output.outputs
        ]
        return replace(generation.output, outputs=outputs)

    async def abort(self, request_id):
        self.aborted.append(request_id)

    def line(self, most):
        """Nobody waits: all are drawn for at once."""
        return []

    def stats(self):
        scheduler = SchedulerStats(
            num_running=len(self.live),
            num_waiting=0,
            num_blocks=256,
            block_size=16,
            blocks_used=len(self.live),
            blocks_peak=0,
            slots_used=0,
            slots_peak=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            num_preemptions=0,
        )
        return EngineStats(scheduler, cache_bytes_per_token=0)

    def pause(self):
        self.is_held = True

    def resume(self):
        self.is_held = False

    def explain(self, request_id):
        if request_id not in self.live:
            raise KeyError(request_id)
        return {"request_id": request_id, "state": "running"}

    def trace(self, since=0):
        return [{"number": i} for i in range(since, 10)]

    async def reset_prefix_cache(self):
        return not self.live

    async def aclose(self):
        self.is_closed = True
