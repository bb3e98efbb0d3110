"""Which requests can never be served, and how long each may grow. No torch.

A refusal here is what makes every accepted request end: whatever passes fits the cache alone, so
the oldest sequence can always run to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.engine.request import Request
from tilewise.errors import QueueFullError, RequestError

__all__ = ["Limits", "window_blocks"]

MAX_TOKEN_ID = 2**31 - 1  # token ids travel as int32


def window_blocks(window: int, num_tokens: int, block_size: int) -> int:
    """Return the most blocks in which the keys lie that a run of `num_tokens` queries sees.

    It holds wherever the run begins, for layers with a window of `window` keys.

    The first of `num_tokens` queries sees window - 1 keys before its own, the last its own:
    window + num_tokens - 1 keys in a row.
    """
    return (window + num_tokens + block_size - 3) // block_size + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that a scheduler works within.

    Attributes:
        num_blocks: the number of cache blocks.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of a sequence, prompt and generated.
        long_prefill_token_threshold: the most tokens of one sequence in one step; None for
            max_num_batched_tokens.
        max_waiting_requests: requests that may wait without having run; None is no bound.
        max_waiting_tokens: prompt tokens of all these waiting requests together; None is no bound.
        windows: the window of each group of layers, None for all keys.
        other_blocks: cache blocks of the groups of layers beyond the first.
        fair_prompt_tokens: the number of tokens of a step's admitted prompts, under the policy
            "fair", from which on the step admits no other request; None is no bound.
        is_encoder: True if each prompt runs whole, in one step, and nothing follows it, so that it
            may have max_model_len tokens; no step may be narrower than that.
        max_loras: different adapters of the sequences that run at once; None is no bound.

    Raises:
        ValueError: a limit is below 1, or max_model_len below 2.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int | None = None
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    windows: tuple[int | None, ...] = (None,)
    other_blocks: tuple[int, ...] = ()
    fair_prompt_tokens: int | None = None
    is_encoder: bool = False
    max_loras: int | None = None

    def __post_init__(self) -> None:
        at_least_one = {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        optional = {
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "max_waiting_requests": self.max_waiting_requests,
            "max_waiting_tokens": self.max_waiting_tokens,
            "fair_prompt_tokens": self.fair_prompt_tokens,
            "max_loras": self.max_loras,
        }
        at_least_one |= {name: value for name, value in optional.items() if value is not None}
        for name, value in at_least_one.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.is_encoder and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len {self.max_model_len} for "
                f"an encoder, whose texts run whole, got {self.max_num_batched_tokens}"
            )

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt: all but one of a sequence's, or all of an encoder's."""
        return self.max_model_len - (0 if self.is_encoder else 1)

    @property
    def why_prompt_len(self) -> str:
        """The end of an error message that says why no prompt may be longer."""
        if self.is_encoder:
            return "which the model has positions for"
        return f"so that 1 more fits the context of {self.max_model_len:,}"

    @property
    def max_run(self) -> int:
        """The largest number of tokens of one sequence in one step."""
        longest = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(longest, self.max_num_batched_tokens, self.max_model_len)

    @property
    def max_cached_len(self) -> int:
        """The largest number of tokens of a sequence that has the whole cache to itself. Its last
        token is never written there.

        A group of layers sets no bound if its blocks hold a window and a step; if none does, this
        is max_model_len.
        """
        longest, _ = self._scarcest()
        return longest

    def _scarcest(self) -> tuple[int, str]:
        """Return the most tokens of a sequence that all groups of layers hold, and what sets this
        bound.

        The latter is the part of an error message that names the scarcest group's blocks; "" if
        max_model_len alone bounds a sequence.
        """
        found = (self.max_model_len, "")
        counts = (self.num_blocks, *self.other_blocks)
        for window, count in zip(self.windows, counts, strict=True):
            held, what = count * self.block_size + 1, ""
            if window is not None:
                needed = window_blocks(window, self.max_run, self.block_size)
                if count >= needed:
                    continue
                what = (
                    f" of the layers with a window of {window} (which with {needed} blocks, of a "
                    f"window and a step of {self.max_run} tokens, hold any length)"
                )
            text = f"the {count} cache blocks of {self.block_size} tokens{what}"
            if held < found[0] or not found[1]:
                found = (held, text)
        return found

    def max_len(self, request: Request) -> int:
        """Return the number of tokens, prompt and generated, at which a sequence of a request ends.

        It is min(prompt + max_tokens, max_model_len), one more than the latter for an encoder;
        without max_tokens, as far as model and cache go.
        """
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return min(self.max_model_len, self.max_cached_len)
        longest = self.max_prompt_len + 1
        return min(len(request.prompt_token_ids) + max_tokens, longest)

    def check_queue(self, request: Request, num_waiting: int, num_waiting_tokens: int) -> None:
        """Refuse a request for which the queue has no room now.

        Args:
            request: a request that could be served.
            num_waiting, num_waiting_tokens: the number of requests that have not run yet, and of
                all tokens of their prompts.

        Raises:
            QueueFullError: the queue is full. A prompt longer than max_waiting_tokens is accepted
                by an empty queue.
        """
        most, tokens = self.max_waiting_requests, len(request.prompt_token_ids)
        if most is not None and num_waiting >= most:
            raise QueueFullError(
                f"waiting requests must be at most {most}, got {num_waiting} and 1 more"
            )
        most = self.max_waiting_tokens
        if most is not None and num_waiting and num_waiting_tokens + tokens > most:
            raise QueueFullError(
                f"waiting prompt tokens must be at most {most}, got {num_waiting_tokens} and "
                f"{tokens} more"
            )

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        The samples of a request need not fit together: they can be preempted one by one, so one
        alone has to fit.

        Raises:
            RequestError: the prompt is empty, too long or not of token ids, or prompt and
                max_tokens exceed the cache.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise RequestError("prompt must hold at least 1 token, got 0")
        if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
            worst = min(prompt) if min(prompt) < 0 else max(prompt)
            raise RequestError(f"prompt token ids must be in 0 ... {MAX_TOKEN_ID}, got {worst}")
        if len(prompt) > self.max_prompt_len:
            raise RequestError(
                f"prompt must be at most {self.max_prompt_len} tokens, {self.why_prompt_len}, "
                f"got {len(prompt)}"
            )
        needed = max(self.max_len(request), len(prompt) + 1)
        longest, holder = self._scarcest()
        if needed > longest:
            raise RequestError(
                f"prompt and max_tokens must be at most {longest} tokens together, so that they "
                f"fit {holder}, got {needed} (prompt of {len(prompt)})"
            )
