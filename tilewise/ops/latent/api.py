"""mla_decode() and write_latent_cache(): multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import Any, Literal, Never, TypedDict, Unpack, overload

from torch import Tensor

from tilewise.keywords import names, unknown_keyword
from tilewise.ops import call, checks, dispatch, values
from tilewise.ops.latent import op as mla_op
from tilewise.ops.latent.arguments import LatentSignature, check_latent_cache


class _Required(TypedDict):
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    softmax_scale: float


class _Decode(_Required, total=False):
    latent_scale: Tensor | None
    batch_invariant: bool
    backend: str | None


@overload
def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Decode],
) -> Tensor: ...


@overload
def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Decode],
) -> tuple[Tensor, Tensor]: ...


@names
def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    latent_scale: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from absorbed queries to latents kept in cache blocks, causally among the new tokens.

    s = softmax_scale * (q_latent . z + q_rope . k_rope); o = softmax(s) z. All heads read the same
    row [z, k_rope] of a token, as key whole and as value in its first R channels, so it is read
    once. Sequence b owns rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of the queries, its last
    positions: row i of n sees keys 0 ... seqlens_k[b] - n + i. The new tokens must already be in
    the cache (see write_latent_cache). No gradient: `mla_attention` trains.

    Args:
        q_latent: (T, Hq, R), each head's query times its w_uk; float16, bfloat16, float32 (or
            float64 on a CPU).
        q_rope: (T, Hq, Dr), same dtype, rotated.
        latent_cache: (num_blocks, block_size, R + Dr), z (normalised, if the model does) and then
            the rotated k_rope; any block size, any float dtype, int8 or float8_e4m3fn.
        block_table: (B, max_blocks) int32 or int64 block ids in order of position; entries past a
            sequence's last block are not read.
        seqlens_k: (B,) int32 or int64, tokens of each sequence with the new ones counted; 0 gives o
            = 0 and lse = -inf. At most max_blocks * block_size, looked at on a CPU only: a GPU
            would have to be waited for.
        cu_seqlens_q: (B + 1,) int32 or int64, starts at 0, never decreases, ends at T.
        max_seqlen_q: host int, at least the longest query run; picks the kernel, not the result.
        softmax_scale: (Dn + Dr) ** -0.5 of the heads before absorption, which latents do not tell.
        latent_scale: (num_blocks, block_size, 2) float32, with an 8-bit cache and only then: what
            z and k_rope of each token are multiplied by, as write_latent_cache wrote them.
        batch_invariant: True if a sequence's bits must not depend on what else is in the batch.
        return_lse: True to also return lse (Hq, T), float32, natural log.
        backend: "cpu", "triton", "gluon" or "reference"; None chooses. A name is obeyed or refused.

    Returns:
        o (T, Hq, R) in the dtype of the queries, for w_uv to project up; with return_lse also lse.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call, and the message says why; or a gradient
            reaches it, which it has none of (a compiled call gives None).

    Source: DeepSeek-V2 (2024), section 2.1; Stratos, "Efficient Attention", section 3.2.

    Example:
        >>> q_latent = torch.einsum("thd,hdr->thr", q_nope, w_uk)
        >>> o = mla_decode(q_latent, q_rope, latent_cache, block_table=table, seqlens_k=lengths,
        ...                cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=192**-0.5)
        >>> o = torch.einsum("thr,hdr->thd", o, w_uv)
    """
    if unknown:
        raise unknown_keyword(mla_decode, unknown)

    given = LatentSignature(
        q_latent,
        q_rope,
        latent_cache,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        latent_scale,
        batch_invariant,
        backend,
    )
    if values.WAITS:
        longest = given.bind().max_seqlen_q
        values.check_step(block_table, seqlens_k, cu_seqlens_q, q_latent.shape[0], latent_cache)
        values.check_longest("max_seqlen_q", cu_seqlens_q, longest)
    results: Any = call.run(given)
    o, lse = results
    return (o, lse) if return_lse else o


@names
def write_latent_cache(
    latent: Tensor,
    k_rope: Tensor,
    latent_cache: Tensor,
    slot_mapping: Tensor,
    *,
    latent_scale: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> None:
    """Write each token's latent and rotated key side by side into its slot, in one kernel.

    cache[slot // block_size, slot % block_size] = [latent, k_rope] for every row whose slot is not
    -1. The caller rotates k_rope, since apply_rope rotates k_rope and the queries in one call:
    k_rope is a ninth of a row (64 of 576), and a rotation in this kernel would gain little.

    An 8-bit cache holds the latent divided by one scale and k_rope divided by another: amax / 127
    (int8) or amax / 448 (float8_e4m3fn), where amax is the largest absolute value of the token's
    latent, or of its k_rope. Models normalise the latent and not k_rope, so k_rope may be far
    larger; with a common scale the latent would lose precision.

    Args:
        latent: (T, R), any float dtype; cast to the cache's.
        k_rope: (T, Dr), any float dtype, rotated; cast to the cache's.
        latent_cache: (num_blocks, block_size, R + Dr), of a float dtype, int8 or float8_e4m3fn.
        slot_mapping: (T,) int64 or int32, block * block_size + offset; -1 skips the row. No other
            slot occurs twice.
        latent_scale: (num_blocks, block_size, 2) float32, with an 8-bit cache and only then;
            written with the row: the scale of the latent, then the scale of k_rope; 0 for zeros,
            NaN for a part with an infinity or NaN.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call, and the message says why.

    Source: DeepSeek-V2 (2024), section 2.1.3, what is cached; PagedAttention (2023), its kernel.

    Example:
        >>> write_latent_cache(latent, k_rope, latent_cache, torch.tensor([5, 6, -1]))
    """
    if unknown:
        raise unknown_keyword(write_latent_cache, unknown)
    checks.check_dims("slot_mapping", slot_mapping, "(T)")
    where = latent_cache.device
    checks.check_integers("slot_mapping", slot_mapping, tuple(slot_mapping.shape), where)
    for name, rows, layout in (("latent", latent, "(T, R)"), ("k_rope", k_rope, "(T, Dr)")):
        checks.check_float(name, rows)
        checks.check_dims(name, rows, layout)
        checks.check_shape(name, rows, (slot_mapping.shape[0], rows.shape[1]))
        checks.check_last_dim_contiguous(name, rows)
    width = latent.shape[1] + k_rope.shape[1]
    check_latent_cache(latent_cache, latent_scale, width, "latent and k_rope together")
    for name, tensor in (("latent", latent), ("k_rope", k_rope)):
        checks.check_device(name, tensor, latent_cache.device)
    dispatch.check_backend_name(backend)
    slots = checks.as_int64(slot_mapping)
    if values.WAITS:
        num_slots = latent_cache.shape[0] * latent_cache.shape[1]
        values.check_ids("slot_mapping", slots, -1, num_slots - 1)
    mla_op.write_latent_cache(latent, k_rope, latent_cache, latent_scale, slots, backend)
