"""paged_attention() and plan_paged_attention(): inference over the blocks of a cache."""

from __future__ import annotations

import inspect
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, device_of
from tilewise.kernels.spec import row_width
from tilewise.keywords import keywords_of, names, unknown_keyword
from tilewise.ops import call, checks, dispatch, values
from tilewise.ops.paged.arguments import PagedSignature
from tilewise.ops.paged.op import calls_of_a_plan, describe_plan
from tilewise.ops.paged.plan import PagedPlan
from tilewise.ops.paged.shared_prefixes import SharedPrefixes


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
    k_scale: Tensor | None
    v_scale: Tensor | None
    tree_mask: Tensor | None
    shared: SharedPrefixes | None
    plan: PagedPlan | None
    batch_invariant: bool
    out: Tensor | None
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


@names
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    plan: PagedPlan | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from packed queries to keys and values kept in cache blocks.

    Sequence b owns rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q; they are its *last* positions, so
    row i of n sees keys 0 ... seqlens_k[b] - n + i. One call serves prefill chunks and decode
    alike. The new keys must already be in the cache (see write_kv_cache).

    Args:
        q: (T, Hq, D), float16, bfloat16, float32 (or float64 on a CPU).
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv); Hq is a multiple of Hk.
            A float dtype, or int8 or float8_e4m3fn with scales; uint8 of half as many channels is
            a cache of 4 bits, see `write_kv_cache`. On a GPU D is at most 576, Dv 512.
        block_table: (B, max_blocks) int32 or int64 block ids in order of position, looked at on a
            CPU only; entries past a sequence's last block are not read.
        seqlens_k: (B,) int32 or int64, tokens of each sequence with the new ones counted; 0 gives o
            = 0 and lse = -inf. At most max_blocks * block_size, looked at on a CPU only: a GPU
            would have to be waited for. There lengths are cut, and no id leads outside of the
            cache; with TILEWISE_CHECK=1 in the environment it waits and raises, see
            docs/guide/paged.md.
        cu_seqlens_q: (B + 1,) int32 or int64, starts at 0, never decreases, ends at T.
        max_seqlen_q: host int, at least the longest query run; picks the kernel, not the result.
        softmax_scale: the factor of q . k; D ** -0.5 when None.
        window: w, the last w keys of a query, its own included; None is all.
        softcap, alibi_slopes, sinks: as in `attention`.
        k_scale, v_scale: float32, with an 8-bit cache and only then: a key is k_scale * k_cache.
            Both (num_blocks, block_size, Hk), as write_kv_cache leaves them, or both (Hk,), one
            for each head (one for all is `scale.expand(Hk)`).
        tree_mask: bool (T, at least max_seqlen_q): which new tokens a token sees, in place of the
            causal rule. Row t, column j: token t sees new token j of its own sequence; keys before
            the new ones are seen by all. A window and ALiBi count places in the cache: new token j
            of n stands at seqlens_k[b] - n + j. See `tree_mask_from_parents`.
        shared: the prefixes that `shared_prefixes` found: keys that a group of sequences shares are
            read once for all of its queries and merged by lse; the result is the same up to
            rounding. Not with window, alibi_slopes or batch_invariant.
        plan: from `plan_paged_attention` for these lengths and shapes; made once a step, it saves
            every layer what it would find out about the lengths. It changes speed, and on a GPU
            how keys are split and so the rounding; a CPU has no use for it.
        batch_invariant: True if a row's bits must depend on its own keys alone: neither on what
            else is in the batch nor on how many rows of its sequence come at once. On a CPU they
            are those of `attention` over the whole sequence.
        out: memory to which o is written, and which is returned: (T, Hq, Dv), contiguous, in q's
            dtype, of no memory that the call reads. None makes it.
        return_lse: True to also return lse (Hq, T), float32, natural log, the sink included.
        backend: "cpu", "triton", "gluon" (Hopper) or "reference"; None chooses. A name is obeyed or
            refused.

    Returns:
        o (T, Hq, Dv) in q's dtype; with return_lse also lse.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call, and the message says why; or torch.vmap
            maps it; or a gradient reaches it, which it has none of (a compiled call gives None).

    Source: PagedAttention (2023), section 4.1 of its kernels; split over keys as flash-decoding;
    shared keys as Hydragen (2024), trees as SpecInfer (2024).

    Example:
        >>> o = paged_attention(q, k_cache, v_cache, block_table=table, seqlens_k=lengths,
        ...                     cu_seqlens_q=torch.arange(9, dtype=torch.int32), max_seqlen_q=1)
    """
    if unknown:
        raise unknown_keyword(paged_attention, unknown)
    for name, value, kind in (("plan", plan, PagedPlan), ("shared", shared, SharedPrefixes)):
        if value is not None:
            checks.check_type(name, value, kind)

    records = plan_for = last = None
    if plan is not None:
        records, plan_for = plan.records, plan.made_for
        if out is not None and not return_lse:
            last = plan.last
    given = PagedSignature(
        q,
        k_cache,
        v_cache,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        max_seqlen_q,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        tree_mask,
        records,
        plan_for,
        softmax_scale,
        window,
        softcap,
        batch_invariant,
        backend,
        shared,
    )
    if last is not None and out is not None and last.run(given, out):
        return out
    if out is not None:
        _check_out(out, q, v_cache)
    if values.WAITS:
        _check_values(given)
    results: Any = call.run(given, out, last)
    o, lse = results
    return (o, lse) if return_lse else o


def _check_values(given: PagedSignature) -> None:
    """Raise ValueError where block ids, lengths or rows of a call lead outside of its tensors.

    The values are read, on a GPU too: called for TILEWISE_CHECK=1.
    """
    q, k_cache, shared, options = given.q, given.k_cache, given.shared, given.bind()
    table, edges = options.block_table, options.cu_seqlens_q
    values.check_step(table, options.seqlens_k, edges, q.shape[0], k_cache, options.window_left)
    values.check_longest("max_seqlen_q", edges, options.max_seqlen_q)
    if shared is not None:
        skipped, *levels = shared.tensors
        values.check_lengths("shared.skipped", skipped, table.shape[1] * k_cache.shape[1])
        for at in range(0, len(levels), 4):
            level_table, lengths, level_edges, rows = levels[at : at + 4]
            values.check_step(level_table, lengths, level_edges, rows.shape[0], k_cache)
            values.check_ids("rows of shared", rows, 0, q.shape[0] - 1)


def _check_out(out: Tensor, q: Tensor, v_cache: Tensor) -> None:
    checks.check_same_dtype("out", out, q.dtype)
    checks.check_device("out", out, q.device)
    checks.check_shape("out", out, (*q.shape[:2], row_width(v_cache)))
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    # A compiled graph has no addresses; what it computes is copied to `out`.
    if not torch.compiler.is_compiling() and out.data_ptr() % 16:
        raise ValueError(f"out must begin at a multiple of 16 bytes, got {out.data_ptr()}")


@keywords_of(paged_attention, but=("plan", "out"))
def plan_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool = False, **options: Any
) -> PagedPlan:
    """Decide once for all layers of a step which program reads which keys.

    Calls of `paged_attention` with ``plan=`` skip what they would else find out from all lengths,
    each for itself. The result is the same up to the rounding of how keys are split; with
    batch_invariant, and on a CPU, bit for bit. No synchronisation: the plan is made on the device
    from the lengths there, and `PagedPlan.update` makes it anew for the next step. Compiled code
    takes a plan; make and update it outside.

    Args:
        q, k_cache, v_cache: as in `paged_attention`; only shapes, dtypes and the device matter.
        options: as in `paged_attention`, those of the calls to come. softmax_scale, sinks and
            return_lse may differ from call to call; block_table may hold other blocks.

    Returns:
        A plan for calls of these shapes, windows, caps and backend.

    Raises:
        ValueError, TypeError, UnsupportedError: as `paged_attention` with these arguments.

    Example:
        >>> plan = plan_paged_attention(q, *caches[0], block_table=table, seqlens_k=lengths,
        ...                             cu_seqlens_q=starts, max_seqlen_q=1)
        >>> for k_cache, v_cache in caches:
        ...     o = paged_attention(q, k_cache, v_cache, block_table=table, seqlens_k=lengths,
        ...                         cu_seqlens_q=starts, max_seqlen_q=1, plan=plan)
    """
    del return_lse
    if unknown := options.keys() - _OPTIONS:
        raise unknown_keyword(plan_paged_attention, unknown)
    bound = PagedSignature(q, k_cache, v_cache, **options).bind()
    spec = bound.spec()
    with device_of(q.device):
        layouts = Call.of(spec, bound.tensors())
        backend = dispatch.choose_for("paged_attention", layouts, bound.backend)
    module = dispatch.kernel_module("paged_attention", backend)
    pairs = module.plan_pairs(spec, q.device) if hasattr(module, "plan_pairs") else 0
    records = torch.zeros((pairs, 8), dtype=torch.int32, device=q.device)
    plan = PagedPlan(records, calls_of_a_plan(spec), backend, describe_plan(spec, backend))
    plan.update(bound.seqlens_k, bound.cu_seqlens_q)
    return plan


_OPTIONS = inspect.signature(plan_paged_attention).parameters.keys()
