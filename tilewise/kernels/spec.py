"""The description of a call without its tensors, which `ops` passes to a backend.

Specs are frozen and hashable, so that a choice (backend, tiles, number of splits) is a pure
function of a spec and can be tested without a device. Dimension letters are in README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RecurrentStates(NamedTuple):
    """The slots of running sequences: the state at the start of a chunk, and the chunk's tokens.

    A chunk is `CHUNK` tokens of a sequence, counted from its first one. In an open chunk of p
    tokens the first p rows of the tensors after `state` are in use.

    Attributes:
        state: (slots, H, K, V), float32 (float64 for float64): the state before the chunk.
        keys: (slots, CHUNK, Hk, K), the dtype of the keys.
        gates: (slots, CHUNK, H) or (slots, CHUNK, H, K), the dtype of `state`: logs of decays.
        values: (slots, CHUNK, H, V). With `betas`, in the tokens' dtype, what is left of each
            token's value, beta (v - S^T k) with the state before the chunk as S, decayed; without
            them, in the dtype of `state`, what each token adds to the state beside its key.
        betas: (slots, CHUNK, H), the dtype of `state`, or None.
        inverses: (slots, CHUNK, H, CHUNK), bfloat16 for such tokens, else the dtype of `state`: the
            rows of the inverse of 1 + A, A what each token's update takes from those before it (see
            kernels/triton/recurrent/pairs.py); None without `betas` or without the delta rule.
    """

    state: Any
    keys: Any
    gates: Any
    values: Any
    betas: Any = None
    inverses: Any = None


CHUNK = 64  # tokens; where a chunk starts decides how sums are rounded, so no call may choose


class MaskTensors(NamedTuple):
    """A block mask as launchers take it; the meaning is that of `masks.BlockMask`.

    Spans are (Bm, Hm, tiles, 3): first entry, end of the full tiles, end of the partial ones.
    Entries are (n, 2): the tile on the other side, and its bit tile (-1 for a full one). Rows and
    keys are counted from the start of their sequence; Bm and Hm are 1 where shared.

    Attributes:
        bits: int32 (n, tile_q, tile_k / 32); bit b of word w of row r: key 32 w + b is visible.
        rows, row_entries: the tiles of keys that each tile of queries sees.
        columns, column_entries: the tiles of queries that see each tile of keys.
    """

    bits: Tensor
    rows: Tensor
    row_entries: Tensor
    columns: Tensor
    column_entries: Tensor


class AttentionTensors(NamedTuple):
    """The tensors of an attention call, None for those that were not given.

    Attributes:
        q, k, v: (B, Sq, Hq, D), (B, Sk, Hk, D) and (B, Sk, Hk, Dv), or packed (T, H, D).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), when spec.is_varlen.
        seqlens_k: int32 (B,), when spec.has_seqlens_k.
        bias: a tensor that broadcasts to (B, Hq, Sq, Sk), Sq and Sk those of the spec.
        alibi_slopes: (Hq,) or (B, Hq); sinks: (Hq,).
        philox: int64 (2,), seed and offset of the dropout.
        mask_bits ... mask_column_entries: the fields of `MaskTensors`.
    """

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqlens_k: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    philox: Any = None
    mask_bits: Any = None
    mask_rows: Any = None
    mask_row_entries: Any = None
    mask_columns: Any = None
    mask_column_entries: Any = None

    @property
    def mask(self) -> MaskTensors | None:
        """The block mask, None without one."""
        return None if self.mask_bits is None else MaskTensors(*self[-5:])


class AttentionSpec(NamedTuple):
    """One dense or packed attention call.

    Query i of a sequence (0-based, of Sq) sees key j (of Sk) when, with offset = Sk - Sq,
    ``j <= i + offset + window_right`` (if window_right >= 0) and
    ``j >= i + offset - window_left`` (if window_left >= 0). Causal is window_right = 0.

    Attributes:
        device_type: the type of the device, "cpu" or "cuda".
        dtype: the dtype of q, k, v and o.
        batch: the number of sequences.
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens (S of a dense call).
        head_dim, v_head_dim: D of q and k; Dv of v and o.
        window_left, window_right: the keys visible on each side of the diagonal; -1 is unlimited.
        softmax_scale: the factor of q . k.
        softcap: c of s -> c * tanh(s / c), applied after the scale; 0 is off.
        is_varlen: True for packed (T, H, D) tensors with cu_seqlens instead of (B, S, H, D).
        has_seqlens_k: True for a dense call whose sequence b has only seqlens_k[b] valid keys.
        has_bias, has_alibi, has_sinks: True if these tensors were given.
        needs_dbias: True for a backward pass whose caller needs the gradient of the bias.
        mask_tile: (tile_q, tile_k) of the block mask, each 64 or 128; None without a mask. A key
            must be visible by the mask and by the rule above.
        dropout_p: the probability that a p_ij is dropped, in steps of 1/256; kept ones are scaled
            up. The choice follows `reference.dropout`, the same for every backend and tile.
        deterministic: True if the backward pass must be bitwise reproducible.
        needs_max: True for a forward pass whose caller needs the largest logit of each row as well,
            in the shape of lse: of the keys that the row sees, capped and biased, without the sink.
    """

    device_type: str
    dtype: torch.dtype
    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float = 1.0
    softcap: float = 0.0
    is_varlen: bool = False
    has_seqlens_k: bool = False
    has_bias: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    needs_dbias: bool = False
    mask_tile: tuple[int, int] | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    needs_max: bool = False

    @property
    def causal(self) -> bool:
        """Whether a query sees no key to its right."""
        return self.window_right == 0

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = Hq / Hk."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def dropout_threshold(self) -> int:
        """The number of the 256 values of a random byte that drop a probability: dropout_p * 256,
        rounded, except that 0 and 256 stand for dropout_p of 0 and 1 alone."""
        if self.dropout_p in (0, 1):
            return 256 * int(self.dropout_p)
        return min(max(round(self.dropout_p * 256), 1), 255)

    @property
    def drop_limit(self) -> int:
        """65,536 * dropout_threshold - 1, as kernels take the threshold: bits 16 to 23 of this
        number are the largest random byte that drops a probability.

        The number is odd and never 1, so that no value of it is compiled specially. It is -1
        without dropout, where kernels draw nothing.
        """
        return (self.dropout_threshold << 16) - 1

    @property
    def dropout_scale(self) -> float:
        """The factor of kept probabilities, 0 when none is kept."""
        kept = 256 - self.dropout_threshold
        return 256 / kept if kept else 0.0


@dataclass(frozen=True, slots=True)
class PagedSpec:
    """One call of paged attention.

    Sequence b owns rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q, its last positions: row i of n
    stands at position p = seqlens_k[b] - n + i and sees keys j <= p, and of these j >= p -
    window_left when window_left >= 0. With a tree mask a row sees all keys before the n new ones,
    and of the new ones those of its row of the mask.

    Attributes:
        dtype, cache_dtype: the dtype of q and o, and of k_cache and v_cache, where int8 and
            float8_e4m3fn come with scales.
        num_seqs: B, the number of sequences.
        num_tokens: T, the number of rows of q.
        max_seqlen_q: the longest query run, 1 in pure decoding.
        block_size: the tokens of a cache block.
        max_blocks: the columns of block_table, so max_blocks * block_size bounds seqlens_k.
        batch_invariant: True if a sequence's bits must not depend on its neighbours.
        causal: False if every row sees every key (a pass over a shared prefix).
        has_tree: True if a tree mask was given.
        shared_rows: the rows of the largest group of each level of shared prefixes.
        early: the way in which kernels overlap the one before, see `kernels.early`.
    """

    device_type: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    num_seqs: int
    num_tokens: int
    max_seqlen_q: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    max_blocks: int
    window_left: int = -1
    softmax_scale: float = 1.0
    softcap: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    batch_invariant: bool = False
    causal: bool = True
    has_tree: bool = False
    shared_rows: tuple[int, ...] = ()
    early: int = 0

    @property
    def group_size(self) -> int:
        """Query heads that share one key head, G = Hq / Hk."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def has_shared(self) -> bool:
        """Whether shared prefixes were given."""
        return len(self.shared_rows) > 0

    def of_level(self, level: SharedLevel) -> PagedSpec:
        """Return the spec of the pass over one level of shared prefixes: its groups take the place
        of sequences, and every row of a group sees all keys that the group shares. Sinks, trees and
        causality are left to the pass over each sequence's own keys."""
        return replace(
            self,
            num_seqs=level.block_table.shape[0],
            num_tokens=level.rows.shape[0],
            max_seqlen_q=level.max_rows,
            max_blocks=level.block_table.shape[1],
            has_sinks=False,
            causal=False,
            has_tree=False,
            shared_rows=(),
        )


class SharedLevel(NamedTuple):
    """One level of shared prefixes: G groups of sequences with cache blocks in common; no sequence
    is in two groups of a level.

    Attributes:
        block_table: int32 (G, max_shared_blocks), the blocks that a group shares.
        seqlens_k: int32 (G,), the number of tokens in a group's shared blocks.
        cu_seqlens_q: int32 (G + 1,), the edges of the groups in `rows`.
        rows: int32 (R,), the rows of q of all groups, one group after another, each row at most
            once.
        max_rows: the number of rows of the largest group.
    """

    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    rows: Tensor
    max_rows: int


class SharedKeys(NamedTuple):
    """Shared prefixes as launchers take them; the meaning is that of `ops.SharedPrefixes`.

    Attributes:
        skipped: int32 (B,), the number of first tokens of each sequence that its groups read for
            it.
        levels: the levels of groups; each reads the tokens that follow those of the level before.
    """

    skipped: Any
    levels: tuple[SharedLevel, ...]


class PagedTensors(NamedTuple):
    """The tensors of a call of paged attention, None for those that were not given.

    Attributes:
        q: (T, Hq, D) packed; strided in all dims but the last.
        k_cache, v_cache: (N, P, Hk, D), (N, P, Hk, Dv); strided in all dims but the last.
        block_table: int32 (B, M); entries past a sequence's last block are never read.
        seqlens_k: int32 (B,), the tokens of each sequence, the new ones included.
        cu_seqlens_q: int32 (B + 1,), the edges of the sequences' rows.
        alibi_slopes, sinks: (Hq,) float32.
        k_scale, v_scale: (N, P, Hk) or (Hk,) float32 of an 8-bit cache.
        tree_mask: bool (T, W), which replaces causality among a sequence's new rows.
        records: int32 (rows, 8), the work of each program by a `PagedPlan`; None and 0 rows mean
            the same.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seqlens_k: Any
    cu_seqlens_q: Any
    alibi_slopes: Any = None
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    tree_mask: Any = None
    records: Any = None

    @classmethod
    def of(
        cls, tensors: Sequence[Any], shared_rows: tuple[int, ...]
    ) -> tuple[PagedTensors, SharedKeys | None]:
        """Return the tensors of a call of paged attention and its shared prefixes, if there are
        any, else None. Records of 0 rows become None.

        Args:
            tensors: the fields of PagedTensors, then `SharedPrefixes.tensors`.
            shared_rows: the rows of the largest group of each level; () without shared prefixes.
        """
        count = len(cls._fields)
        given = cls(*tensors[:count])
        if given.records is not None and given.records.shape[0] == 0:
            given = given._replace(records=None)
        if not shared_rows:
            return given, None
        skipped, *rest = tensors[count:]
        levels = []
        for index, max_rows in enumerate(shared_rows):
            table, lengths, edges, rows = rest[4 * index : 4 * index + 4]
            levels.append(SharedLevel(table, lengths, edges, rows, max_rows))
        return given, SharedKeys(skipped, tuple(levels))


class LatentTensors(NamedTuple):
    """The tensors of a call of attention over latents, None for one that was not given.

    Attributes:
        q_latent: (T, Hq, R) packed; strided in all dims but the last, like q_rope and the cache.
        q_rope: (T, Hq, Dr), rotated.
        latent_cache: (N, P, R + Dr).
        block_table: int32 (B, M); entries past a sequence's last block are never read.
        seqlens_k: int32 (B,), the tokens of each sequence, the new ones included.
        cu_seqlens_q: int32 (B + 1,), the edges of the sequences' rows.
        latent_scale: float32 (N, P, 2) of an 8-bit cache: of a row's first R elements, of the rest.
    """

    q_latent: Any
    q_rope: Any
    latent_cache: Any
    block_table: Any
    seqlens_k: Any
    cu_seqlens_q: Any
    latent_scale: Any = None


class Fp8Spec(NamedTuple):
    """A call of attention over q, k and v in float8_e4m3fn with scales.

    Attributes:
        attention: the spec of the attention, with dtype float8_e4m3fn.
        o_dtype: the dtype of o, float16 or bfloat16.
        per_token: True if 16-bit q and k are quantised with a scale for each token.
    """

    attention: AttentionSpec
    o_dtype: torch.dtype
    per_token: bool = False

    @property
    def device_type(self) -> str:
        """The type of the call's device."""
        return self.attention.device_type


class QuantizeSpec(NamedTuple):
    """One tensor to quantise; its call has x, seqlens, cu_seqlens and a rotation's matrix.

    Attributes:
        max_seqlen: an upper bound of the lengths of packed sequences; -1 where the call needs none.
        per_token: True for a scale for each token and head, False for one for each sequence and
            head.
        rotation: the seed of the rotation's matrix, None without one.
        device_type: the type of the device of x.
    """

    max_seqlen: int = -1
    per_token: bool = False
    rotation: int | None = None
    device_type: str = "cuda"


@dataclass(frozen=True, slots=True)
class ElementSpec:
    """A call of an op that is planned by device type and dtype alone: element-wise or copying
    (rope, merge_states, write_kv_cache, copy_blocks); other specs add their sizes to it."""

    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GateSpec(ElementSpec):
    """A product of elements with a function of a gate.

    Attributes:
        function: the name of the function, see `ops.gated_mul`.
    """

    function: str


@dataclass(frozen=True, slots=True)
class RecurrentSpec(ElementSpec):
    """A call of a layer whose memory is a state.

    Attributes:
        key_dim, value_dim: the sizes K and V of a head's state (K, V).
        decays_by_channel: True if each channel of the keys has a decay of its own.
        keeps: the kind of rows that slots hold of an open chunk, "tokens" or "updates"; None for a
            call without slots.
    """

    key_dim: int
    value_dim: int
    decays_by_channel: bool
    keeps: str | None


@dataclass(frozen=True, slots=True)
class LinearSpec(ElementSpec):
    """A product of few rows with a weight (outputs, channels).

    Attributes:
        addressable: True if the weight starts on a 16-byte boundary, and each of its rows does.
    """

    outputs: int
    channels: int
    addressable: bool


@dataclass(frozen=True, slots=True)
class QuantisedLinearSpec(ElementSpec):
    """A product with a weight of 8 or 4 bits (outputs, channels), see `ops.QuantisedWeight`.

    Attributes:
        codes: the dtype that stores the codes.
        outputs, channels: the shape of the weight.
        block, outer_block: the rows and columns that share a scale, and an outer factor.
        scales, zeros, minimums: the dtypes of these tensors; None where they are absent.
        has_table, has_outer, has_outer_minimums, has_permutation: whether there is such a tensor.
        rows: rows of x, rounded up to a power of two.
        batch_invariant: True if a row's bits must not depend on the number of others.
        in_lanes: whether the codes are in the order of lanes.
        rounds_rows: whether many rows may be rounded to e4m3, see `QuantisedWeight`.
    """

    codes: torch.dtype
    outputs: int
    channels: int
    block: tuple[int, int]
    outer_block: tuple[int, int]
    scales: torch.dtype
    zeros: torch.dtype | None
    minimums: torch.dtype | None
    has_table: bool
    has_outer: bool
    has_outer_minimums: bool
    has_permutation: bool
    rows: int
    batch_invariant: bool
    in_lanes: bool = False
    rounds_rows: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codes == torch.uint8 else 8


FOUR_BITS = torch.uint8  # dtype of a cache with two codes of 4 bits in a byte
MOST_ROTATED = 128  # channels of such a cache that are rotated together, see `reference.four_bits`


def channel_bytes(dtype: torch.dtype) -> float:
    """Return the bytes that one channel of a row takes in a cache of `dtype`: 0.5 for uint8, which
    stands for codes of 4 bits."""
    return 0.5 if dtype == FOUR_BITS else dtype.itemsize


def row_width(cache: Tensor) -> int:
    """Return D, the number of channels of a row of a cache, whose tensor is (..., D), or (..., D /
    2) where a byte holds two codes of 4 bits."""
    return cache.shape[-1] * (2 if cache.dtype == FOUR_BITS else 1)


@dataclass(frozen=True, slots=True)
class QuantisedExpertsSpec(ElementSpec):
    """Both products of a mixture of experts with weights of 8 or 4 bits, see `ops.expert_mlp`.

    Attributes:
        up, down: each product, with the weights of all experts one below another.
        outputs: the rows of `up` of an expert, those of gates among them.
        width, inner: the channels of the tokens, and those between both products.
    """

    up: QuantisedLinearSpec
    down: QuantisedLinearSpec
    outputs: int
    width: int
    inner: int


def scale_per_slot(scale: Tensor, cache: Tensor) -> Tensor:
    """Return a view of the scales of an 8-bit cache, (num_blocks, block_size, Hk) per slot or (Hk,)
    per head, expanded to (num_blocks, block_size, Hk), the first dimensions of `cache`."""
    return scale.expand(cache.shape[:3])
