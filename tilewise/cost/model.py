"""The sizes of a decoder on which the bytes and FLOPs of a token depend. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["CHUNK", "Sizes", "StateLayers", "read_sizes"]

CHUNK = 64  # tokens of a chunk of a recurrence, see `kernels.spec`


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The gated delta net layers of a model, which keep a state of fixed size per sequence instead
    of keys and values: their number and sizes.

    Attributes:
        count: the number of such layers.
        products: (in, out) of each matrix product of one such layer, its feed-forward block
            included.
        num_key_heads, num_heads: Hk and H, the heads of keys and of values.
        key_dim, value_dim: K and V, the channels of a key head and of a value head.
        conv_width: W, the taps of the convolution.
    """

    count: int
    products: tuple[tuple[int, int], ...]
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 states of one sequence in all these layers; a step reads all of
        them."""
        return 4 * self.count * self.num_heads * self.key_dim * self.value_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes that one running sequence takes in all these layers: the float32 states; of the up
        to CHUNK tokens of its open chunk the keys and values in 16 bits, two float32 gates a head
        and the inverse matrix; and CHUNK + W - 1 inputs of the convolution in 16 bits."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        channels = 2 * keys + values
        kept = CHUNK * (2 * keys + 2 * values + (8 + 2 * CHUNK) * self.num_heads)
        return self.state_bytes + self.count * (kept + 2 * (CHUNK + self.conv_width - 1) * channels)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint of a sequence in all these layers: the float32 states, and the
        last W - 1 inputs of the convolution in 16 bits."""
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return self.state_bytes + 2 * self.count * (self.conv_width - 1) * channels

    @property
    def token_flops(self) -> int:
        """FLOPs of the recurrences of one token of a prompt, in all layers; two for each
        multiply-add.

        Multiply-adds of a head: 3 K V, for the products of a key and of a query with the state and
        for the update of the state; and 2 (K + V) for each of the CHUNK / 2 tokens of its chunk, on
        average, with which a token is multiplied.
        """
        pairs = CHUNK // 2 * 2 * (self.key_dim + self.value_dim)
        head = 2 * (3 * self.key_dim * self.value_dim + pairs)
        return self.count * self.num_heads * head

    def shard(self, parallel: int) -> StateLayers:
        """Return the layers as one of `parallel` tensor parallel ranks holds them: its heads and
        its part of every product.

        Raises:
            ValueError: `parallel` does not divide the heads.
        """
        if self.num_key_heads % parallel or self.num_heads % parallel:
            raise ValueError(
                f"tensor_parallel must divide {self.num_key_heads} key heads and {self.num_heads} "
                f"heads of states, got {parallel}"
            )
        return replace(
            self,
            products=_cut(self.products, parallel),
            num_key_heads=self.num_key_heads // parallel,
            num_heads=self.num_heads // parallel,
        )


def _cut(products: tuple[tuple[int, int], ...], parallel: int) -> tuple[tuple[int, int], ...]:
    """Return a rank's part of `products`: the first, third ... have their outputs divided by
    `parallel`, the second, fourth ... their inputs."""
    return tuple(
        (wide // parallel, narrow) if place % 2 else (wide, narrow // parallel)
        for place, (wide, narrow) in enumerate(products)
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder on which the bytes and FLOPs of a token depend; `read_sizes` makes
    them.

    Attributes:
        products: (in, out) of each matrix product of a layer with attention; their weights are read
            once a step.
        num_layers: the number of layers with attention.
        states: the gated delta layers, not counted in num_layers; None for a model without.
        head: (in, out) of the output head.
        max_len: the number of positions of the model.
        is_tied: True if the embedding table is the output head's weight, and so is stored once.
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
    states: StateLayers | None = None

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.head[0]

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the matrix products of one layer with attention."""
        return sum(math.prod(product) for product in self.products)

    @property
    def streamed_parameters(self) -> int:
        """Number of weights that a step reads: all products and the head, not the embedding
        table."""
        states = self.states
        own = 0 if states is None else states.count * sum(map(math.prod, states.products))
        return self.num_layers * self.layer_parameters + own + math.prod(self.head)

    @property
    def parameters(self) -> int:
        """Number of weights in memory, the embedding table included if it is not tied to the head;
        without those of norms."""
        return self.streamed_parameters + (0 if self.is_tied else math.prod(self.head))

    def shard(self, parallel: int) -> Sizes:
        """Return the sizes of one of `parallel` shards: its part of every product and its heads.

        Vocabulary and width of the residual stream stay the whole model's; with more shards than
        key heads each holds one key head; `distributed.shards` says which dimension of a product is
        cut.

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
        # q (and its gate), k and v: a rank's heads; key heads are repeated if there are fewer than
        # ranks. Of o and down inputs are cut, and the outputs are summed.
        wide, narrow = self.products[0]
        queries = narrow - 2 * kv_heads * self.head_dim
        first = (wide, queries // parallel + 2 * own * self.head_dim)
        return replace(
            self,
            products=(first, *_cut(self.products, parallel)[1:]),
            states=None if self.states is None else self.states.shard(parallel),
            head=(self.head[0], -(-self.head[1] // parallel)),
            num_q_heads=heads // parallel,
            num_kv_heads=own,
            vocab_size=self.vocab_size,
        )

    def cache_bytes(self, element_bytes: float = 2) -> int:
        """Return the bytes of one token's keys and values in all layers with attention; if
        `element_bytes` is 1 or less, each head adds a float32 scale for its key and one for its
        value."""
        head = int(self.head_dim * element_bytes) + (4 if element_bytes <= 1 else 0)
        return 2 * self.num_layers * self.num_kv_heads * head


def read_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a Hugging Face config.json: GPT-2's, Qwen3.5's, a Llama-like decoder's.

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
        if config.get("model_type") == "gpt2":
            return _gpt2(config)
        return _qwen3_5(config) if "linear_num_value_heads" in config else _llama(config)
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


def _qwen3_5(config: Mapping[str, Any]) -> Sizes:
    whole, every = _llama(config), config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(whole.num_layers)
    ]
    count = sum(kind == "linear_attention" for kind in kinds)
    e, heads = whole.hidden, config["linear_num_value_heads"]
    key_heads = config["linear_num_key_heads"]
    k, v = (config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    rows = 2 * key_heads * k + 2 * heads * v + 2 * heads  # q, k, v, the gate, b and a
    (wide, narrow), o, *block = whole.products
    return replace(
        whole,
        products=((wide, narrow + whole.num_q_heads * whole.head_dim), o, *block),  # with a gate
        num_layers=whole.num_layers - count,
        states=StateLayers(
            count,
            ((e, rows), (heads * v, e), *block),
            key_heads,
            heads,
            k,
            v,
            config.get("linear_conv_kernel_dim") or 4,
        ),
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
