"""The sizes of a decoder on which the bytes and FLOPs of a token depend. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Sizes", "read_sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes on which the bytes and FLOPs of a token depend.

    Attributes:
        products: (in, out) of each matrix product of a layer; their weights are read once a step.
        head: (in, out) of the output head.
        max_len: the number of positions of the model.
        is_tied: True if the embedding table is the output head's weight.
    """

    products: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    is_tied: bool = True

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.head[0]

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's products."""
        return sum(math.prod(product) for product in self.products)

    @property
    def streamed_parameters(self) -> int:
        """Number of weights that a step reads: all products and the head, not the embedding
        table."""
        return self.num_layers * self.layer_parameters + math.prod(self.head)

    @property
    def parameters(self) -> int:
        """Number of weights in memory, without those of norms."""
        return self.streamed_parameters + (0 if self.is_tied else math.prod(self.head))

    def shard(self, parallel: int) -> Sizes:
        """Return the sizes of one of `parallel` shards: its part of every product and its heads.

        Vocabulary and width of the residual stream stay the whole model's; `distributed.shards`
        says which dimension of a product is cut.

        Raises:
            ValueError: `parallel` does not divide the query heads, or neither divides nor is a
                multiple of the key heads.
        """
        heads, kv_heads = self.num_q_heads, self.num_kv_heads
        if parallel < 1 or heads % parallel or (kv_heads % parallel and parallel % kv_heads):
            raise ValueError(
                f"tensor_parallel must divide {heads} query heads, and divide {kv_heads} key heads "
                f"or be a multiple of them, got {parallel}"
            )
        own = max(kv_heads // parallel, 1)
        products = []
        for place, (wide, narrow) in enumerate(self.products):
            # q, k and v: a rank's heads; key heads are repeated if there are fewer than ranks
            if place == 0:
                products.append((wide, (heads // parallel + 2 * own) * self.head_dim))
            elif place % 2:  # o and down: rows are cut, and the outputs are summed
                products.append((wide // parallel, narrow))
            else:
                products.append((wide, narrow // parallel))
        return replace(
            self,
            products=tuple(products),
            head=(self.head[0], -(-self.head[1] // parallel)),
            num_q_heads=heads // parallel,
            num_kv_heads=own,
            vocab_size=self.vocab_size,
        )

    def cache_bytes(self, element_bytes: float = 2) -> int:
        """Return the bytes of one token's keys and values; elements of 1 byte or half of one add a
        float32 scale a head."""
        head = int(self.head_dim * element_bytes) + (4 if element_bytes <= 1 else 0)
        return 2 * self.num_layers * self.num_kv_heads * head


def read_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a Hugging Face config.json, of GPT-2 or a Llama-like decoder.

    Raises:
        ValueError: a size is missing, or feed-forward blocks are mixtures of experts, whose weights
            a step reads in part.
    """
    dense = config.get("first_k_dense_replace")
    is_dense = isinstance(dense, int) and dense >= config.get("num_hidden_layers", 0)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(name) and not is_dense:
            raise ValueError(
                f"config must have dense feed-forward blocks, got {name} {config[name]}"
            )
    try:
        return _gpt2(config) if config.get("model_type") == "gpt2" else _llama(config)
    except KeyError as error:
        raise ValueError(f"config must have {error.args[0]!r}, got none") from None


def _gpt2(config: Mapping[str, Any]) -> Sizes:
    e, heads = config["n_embd"], config["n_head"]
    inner = config.get("n_inner") or 4 * e
    return Sizes(
        products=((e, 3 * e), (e, e), (e, inner), (inner, e)),
        head=(e, config["vocab_size"]),
        num_layers=config["n_layer"],
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=e // heads,
        vocab_size=config["vocab_size"],
        max_len=config["n_positions"],
    )


def _llama(config: Mapping[str, Any]) -> Sizes:
    e, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv_heads = config.get("num_key_value_heads") or heads
    d = config.get("head_dim") or e // heads
    return Sizes(
        products=((e, (heads + 2 * kv_heads) * d), (heads * d, e), (e, 2 * inner), (inner, e)),
        head=(e, config["vocab_size"]),
        num_layers=config["num_hidden_layers"],
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=d,
        vocab_size=config["vocab_size"],
        max_len=config["max_position_embeddings"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )
