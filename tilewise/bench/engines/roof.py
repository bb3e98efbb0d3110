"""The least time that a step, or a whole workload, can take on a device.

Each matrix product takes the slower of two: reading its weights, or multiplying. After all products
come keys, values and states, read once at the read bandwidth. Nothing else counts: no activations,
norms, sampling or launches. A prompt costs its products, its attention and its recurrences at the
rate of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.bench.engines.shapes import Sizes
from tilewise.bench.engines.workloads import Workload

__all__ = ["Roof"]


@dataclass(frozen=True, slots=True)
class Roof:
    """The least times of a model's steps and workloads on a device, by the device's limits.

    Attributes:
        sizes: the sizes of the model.
        read_bytes: bytes/s of a kernel that only reads.
        flops: FLOP/s of a large matrix product in the dtype of the weights.
        weight_bytes, cache_bytes: the bytes of an element of the weights, and of the cache.

    Example:
        >>> roof = Roof(read_sizes(SHAPES["qwen3-0.6b"]), 4.4e12, 750e12)
        >>> round(1e3 * roof.step(1, 1024), 2)
        0.3
    """

    sizes: Sizes
    read_bytes: float
    flops: float
    weight_bytes: float = 2
    cache_bytes: float = 2

    def step(self, rows: int, cached_tokens: float) -> float:
        """Return the least seconds of one decode step.

        Args:
            rows: sequences, each with one new token.
            cached_tokens: tokens whose keys and values are read, of all sequences together; those
                of a shared prefix count once.
        """
        states = self.sizes.states
        reading = 0 if states is None else rows * states.state_bytes / self.read_bytes
        return self._products(rows, rows) + reading + self.read_cache(cached_tokens)

    def read_cache(self, tokens: float) -> float:
        """Return the least seconds to read the keys and values of `tokens` tokens in all layers."""
        return tokens * self.sizes.cache_bytes(self.cache_bytes) / self.read_bytes

    def prefill(self, prompts: Sequence[int]) -> float:
        """Return the least seconds for prompts of these lengths, computed together, to their first
        tokens."""
        tokens, sizes = sum(prompts), self.sizes
        pairs = sum(length * (length + 1) // 2 for length in prompts)
        attention = 4 * sizes.num_layers * sizes.num_q_heads * sizes.head_dim * pairs / self.flops
        scan = 0 if sizes.states is None else tokens * sizes.states.token_flops / self.flops
        return self._products(tokens, len(prompts)) + attention + scan

    def whole(self, workload: Workload) -> float:
        """Return the least seconds of a whole workload: its prompts, then decode steps of all
        sequences that still need tokens.

        Samples of a prompt compute it once and read its keys and values once a step. When more
        sequences wait than run at once, seats are taken in order, a prompt's samples one after
        another, and each wave ends before the next: exact for answers of one length.
        """
        lengths = [len(prompt) for prompt in workload.prompts]
        seconds = self.prefill(lengths)
        seats = [i for i in range(len(lengths)) for _ in range(workload.n)]
        for first in range(0, len(seats), workload.max_num_seqs):
            wave = seats[first : first + workload.max_num_seqs]
            members = {i: wave.count(i) for i in dict.fromkeys(wave)}
            seconds += self._wave(members, lengths, workload.new_tokens)
        return seconds

    def _wave(
        self, members: dict[int, int], lengths: Sequence[int], new_tokens: Sequence[int]
    ) -> float:
        """Return the least seconds of all decode steps of some prompts, which run at once.

        Args:
            members: the number of samples of each prompt, by the prompt's index.
            lengths, new_tokens: the number of tokens of each prompt, and of each of its samples.
        """
        seconds = 0.0
        # The first new token comes from the prompt's own step.
        for made in range(1, max(new_tokens[i] for i in members)):
            live = [i for i in members if new_tokens[i] > made]
            rows = sum(members[i] for i in live)
            cached = sum(lengths[i] + members[i] * made for i in live)
            seconds += self.step(rows, cached)
        return seconds

    def _products(self, rows: int, head_rows: int) -> float:
        """Return the least seconds of the products of all layers for `rows` rows, and of the head
        for `head_rows` rows."""
        sizes, states = self.sizes, self.sizes.states
        kinds = [(sizes.num_layers, sizes.products)]
        if states is not None:
            kinds.append((states.count, states.products))
        layers = sum(
            count * self._product(product, rows)
            for count, products in kinds
            for product in products
        )
        return layers + self._product(sizes.head, head_rows)

    def _product(self, product: tuple[int, int], rows: int) -> float:
        weights = product[0] * product[1]
        return max(weights * self.weight_bytes / self.read_bytes, 2 * rows * weights / self.flops)
