"""What the engines are asked to do: a fixed batch, nano-vllm's 256 requests, samples of prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Workload", "fixed", "nano", "samples"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for a benchmark of engines, which are all there from the beginning and never end
    early.

    Attributes:
        name: the name of its kind, "fixed", "nano" or "samples".
        prompts: the token ids of each prompt.
        new_tokens: the number of tokens to generate for each prompt, in each of its samples.
        temperature: 0 is greedy.
        n: samples of each prompt.
        max_num_seqs: sequences that run at once.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    temperature: float
    max_num_seqs: int
    n: int = 1

    @property
    def tokens_in(self) -> int:
        """Number of tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Number of tokens to generate, in all samples of all prompts."""
        return self.n * sum(self.new_tokens)

    @property
    def max_len(self) -> int:
        """Number of tokens of the longest sequence, prompt and answer together."""
        return max(len(p) + new for p, new in zip(self.prompts, self.new_tokens, strict=True))

    def as_request(self) -> dict[str, object]:
        """Return the request for a worker process, as `worker.py` reads it."""
        return {
            "do": "generate",
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "temperature": self.temperature,
            "n": self.n,
        }


def fixed(
    batch: int, prompt_tokens: int, new_tokens: int, *, vocab_size: int, seed: int = 0
) -> Workload:
    """Return `batch` greedy requests of one length; their prompts differ from the first token on.

    Equal lengths keep every sequence at the same place, so that a step has one meaning.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(10, min(vocab_size, 10_000)) for _ in range(prompt_tokens)]
        for _ in range(batch)
    ]
    return Workload("fixed", prompts, [new_tokens] * batch, 0.0, batch)


def nano(
    *, requests: int = 256, shortest: int = 100, longest: int = 1024, vocab_size: int = 10_001
) -> Workload:
    """Return nano-vllm's requests: by default 142,827 tokens in and 133,966 out.

    Drawn as its benchmark draws them, from Python's generator with seed 0: for each prompt its
    length, then its ids, in 0 ... 10,000; then all numbers of new tokens. Temperature 0.6.
    Source: nano-vllm, bench.py (2025).

    Args:
        vocab_size: a smaller one than the default changes the ids, and then the lengths too.
    """
    rng = random.Random(0)
    top = min(10_000, vocab_size - 1)
    prompts = [
        [rng.randint(0, top) for _ in range(rng.randint(shortest, longest))]
        for _ in range(requests)
    ]
    new_tokens = [rng.randint(shortest, longest) for _ in range(requests)]
    return Workload("nano", prompts, new_tokens, 0.6, min(requests, 256))


def samples(
    *,
    prompts: int = 128,
    n: int = 1024,
    prompt_tokens: int = 256,
    new_tokens: int = 128,
    max_num_seqs: int = 4096,
    vocab_size: int = 10_001,
    seed: int = 0,
) -> Workload:
    """Return prompts of which many samples are drawn, as repeated sampling does.

    The shape of Tokasaurus' benchmark (2025): 128 prompts, 1,024 samples of each. Its prompts are
    of GSM8K; these are random ids of one length.
    """
    rng = random.Random(seed)
    top = min(10_000, vocab_size - 1)
    ids = [[rng.randint(0, top) for _ in range(prompt_tokens)] for _ in range(prompts)]
    return Workload("samples", ids, [new_tokens] * prompts, 0.6, min(max_num_seqs, prompts * n), n)
