"""What the one kernel of a decode step's layers is compiled for."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Constexpr: the sizes of a model and of a step, and how both are cut.

    `*_n` are outputs of a product that a program has at once, `*_runs` the runs of 256 channels
    that they are sums of, a power of two.
    """

    grid: int
    rows: int
    hidden: int
    runs: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    has_qk_norm: bool
    has_qkv_bias: bool
    block_size: int
    splits: int  # spans of keys of a key head
    splits_padded: int  # to a power of two
    span_step: int  # spans are multiples of it
    tile_keys: int
    group: int  # query heads of a key head, padded to those of a matrix instruction
    group_padded: int  # to a power of two
    fields: int  # of a layer in the table
    qkv_n: int
    o_n: int
    o_runs: int
    gate_n: int
    down_n: int
    down_runs: int
    o_part_n: int = 0  # of the o product by key heads; 0 has spans merged in a phase of their own
