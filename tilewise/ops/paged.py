"""paged_attention() and the ops that fill the paged cache: inference over block tables."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise.ops import _checks, _dispatch, _paged_op
from tilewise.ops._paged_args import check_cache_pair, prepare_paged


class _Required(TypedDict):
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int


class _Paged(_Required, total=False):
    softmax_scale: float | None
    window: int | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    batch_invariant: bool
    backend: str | None


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Paged],
) -> Tensor: ...


@overload
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Paged],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from packed queries to keys and values kept in cache blocks.

    Sequence b owns rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q; they are its *last* positions, so
    row i of n sees keys 0 ... seqlens_k[b] - n + i. One call serves prefill chunks and decode
    alike. The new keys must already be in the cache (see write_kv_cache).

    Args:
        q: (T, Hq, D), float16, bfloat16, float32 (or float64 on a CPU).
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv); Hq is a multiple of Hk.
        block_table: (B, max_blocks) int32 block ids in order of position; entries past a sequence's
            last block are not read.
        seqlens_k: (B,) int32, tokens of each sequence with the new ones counted; 0 gives o = 0 and
            lse = -inf. At most max_blocks * block_size (not checked: it would need a sync).
        cu_seqlens_q: (B + 1,) int32, starts at 0, never decreases, ends at T.
        max_seqlen_q: host int, at least the longest query run; picks the kernel, not the result.
        softmax_scale: multiplies q . k; D ** -0.5 when None.
        window: w, the last w keys of a query, its own included; None is all.
        softcap, alibi_slopes, sinks: as in `attention`.
        batch_invariant: a sequence's bits do not depend on what else is in the batch.
        return_lse: also return lse (Hq, T), float32, natural log, the sink included.
        backend: "cpu", "triton" or "reference"; None chooses. A name is obeyed or refused.

    Returns:
        o (T, Hq, Dv) in q's dtype; with return_lse also lse.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call; the message says why.

    Source: PagedAttention (2023), section 4.1 of its kernels; split over keys as flash-decoding.

    Example:
        >>> o = paged_attention(q, k_cache, v_cache, block_table=table, seqlens_k=lengths,
        ...                     cu_seqlens_q=torch.arange(9, dtype=torch.int32), max_seqlen_q=1)
    """
    options = prepare_paged(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    o, lse = _paged_op.paged_attention(q, k_cache, v_cache, *options)
    return (o, lse) if return_lse else o


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write each row of k and v to its slot of the cache, in place and in one kernel.

    cache[slot // block_size, slot % block_size] = row, for every row whose slot is not -1.

    Args:
        k, v: (T, Hk, D) and (T, Hk, Dv), any float dtype; cast to the cache's.
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv).
        slot_mapping: (T,) int64, block * block_size + offset; -1 skips the row; slots differ.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `paged_attention`.

    Source: PagedAttention (2023), the fused reshape-and-write kernel.

    Example:
        >>> write_kv_cache(k, v, k_cache, v_cache, torch.tensor([5, 6, -1]))
    """
    check_cache_pair(k_cache, v_cache)
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _checks.check_float(name, rows)
        _checks.check_shape(name, rows, (slot_mapping.shape[0], *cache.shape[2:]))
        _checks.check_device(name, rows, k_cache.device)
        _checks.check_last_dim_contiguous(name, rows)
    _checks.check_same_dtype("slot_mapping", slot_mapping, torch.int64)
    _checks.check_dims("slot_mapping", slot_mapping, "(T)")
    _checks.check_device("slot_mapping", slot_mapping, k_cache.device)
    _dispatch.check_backend_name(backend)
    _paged_op.write_kv_cache(k, v, k_cache, v_cache, slot_mapping, backend)


def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, *, backend: str | None = None
) -> None:
    """Copy whole cache blocks, all pairs in one kernel: copy-on-write of a forked sequence.

    Args:
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv).
        block_pairs: (n, 2) int64, rows (source, destination); no block is both.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `paged_attention`.

    Source: PagedAttention (2023), the fused block-copy kernel.

    Example:
        >>> copy_blocks(k_cache, v_cache, torch.tensor([[0, 7], [3, 8]]))
    """
    check_cache_pair(k_cache, v_cache)
    _checks.check_same_dtype("block_pairs", block_pairs, torch.int64)
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(f"block_pairs must be (n, 2), got shape {tuple(block_pairs.shape)}")
    _checks.check_device("block_pairs", block_pairs, k_cache.device)
    _dispatch.check_backend_name(backend)
    _paged_op.copy_blocks(k_cache, v_cache, block_pairs, backend)
