"""Launch attention over a paged cache on the CPU: decoding, prefill chunks and mixtures.

What      one packed call; a sequence with one new row decodes, one with more is a prefill chunk,
          and so are all with a tree mask. Shared prefixes are calls of their own without a mask,
          whose queries are the rows of all sequences of a group, and merged by lse.
Grid      decode.py for single rows, whose cost is reading the cache; attention/forward.py for
          chunks, whose cost is arithmetic: it gathers each tile of keys once and multiplies. A call
          that is batch-invariant takes decode_tiles.py for single rows.
One call  at most one parallel region of each kind.
Traffic   see decode.py and attention/forward.py; the cache is never copied as a whole.
Numerics  see decode.py and attention/forward.py; a sequence's bits do not depend on its neighbours,
          and in a batch-invariant call not on how many of its rows come at once either.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu import merge
from tilewise.kernels.cpu.attention.plan import run_forward
from tilewise.kernels.cpu.attention.problem import (
    LSE,
    NO_MASK,
    NUM_STARTS,
    Q_LEN,
    Arrays,
    Problem,
    Rule,
    Sizes,
    byte_strides,
    float_type,
    packed_type,
    per_head,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, F32, why_not_dtype
from tilewise.kernels.cpu.paged.decode import place_sequences
from tilewise.kernels.cpu.paged.decode_launch import run_decode
from tilewise.kernels.cpu.paged.decode_tiles import run_decode_tiles
from tilewise.kernels.cpu.paged.quantise import BYTE_CODES
from tilewise.kernels.spec import PagedSpec, SharedKeys, SharedLevel, scale_per_slot

CODES = DTYPE_CODES | BYTE_CODES


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if (spec.dtype == torch.float64) != (spec.cache_dtype == torch.float64):
        return f"cache dtype must be float64 with float64 q only, got {spec.cache_dtype}"
    if spec.head_dim % 2 or spec.v_head_dim % 2:
        return f"head dims must be even, got {spec.head_dim} and {spec.v_head_dim}"
    if spec.cache_dtype in BYTE_CODES:
        return why_not_dtype(spec.dtype)
    return why_not_dtype(spec.dtype) or why_not_dtype(spec.cache_dtype)


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    shared: SharedKeys | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each sequence's new rows to its cached keys, causally.

    Args:
        q: (T, Hq, D) packed; strided in all dims but the last.
        k_cache, v_cache: (N, P, Hk, D), (N, P, Hk, Dv); strided in all dims but the last.
        block_table: int32 (B, M); entries past a sequence's last block are never read.
        seqlens_k: int32 (B,), tokens with the new ones counted.
        cu_seqlens_q: int32 (B + 1,).
        alibi_slopes, sinks: (Hq,).
        k_scale, v_scale: (N, P, Hk) or (Hk,) float32 of an 8-bit cache.
        tree_mask: bool (T, W), in place of causality among a sequence's new rows.
        shared: leading keys that are read once for a group of sequences.

    Returns:
        o (T, Hq, Dv) of q's dtype; lse (Hq, T), float32, float64 for float64.

    Source: Kwon et al. 2023, PagedAttention; Dao et al. 2023, Flash-Decoding (split keys).
    """
    q = q.detach()
    q = q if q.stride(-1) == 1 else q.contiguous()
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if shared is not None:
        skipped = shared.skipped
        o, lse = launch(
            q, k_cache, v_cache, spec, block_table=_shifted(block_table, skipped, spec.block_size),
            seqlens_k=seqlens_k - skipped, cu_seqlens_q=cu_seqlens_q, sinks=sinks,
            tree_mask=tree_mask, **scales,
        )  # fmt: skip
        for level in shared.levels:
            _add_level(o, lse, q, k_cache, v_cache, spec, level, scales)
        return o, lse
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1, "cache rows are contiguous"
    o = torch.empty((*q.shape[:-1], spec.v_head_dim), dtype=q.dtype)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=float_type(q.dtype))
    edges = cu_seqlens_q.contiguous().numpy()
    num_rows = int(edges[-1])
    if num_rows != q.shape[0]:
        o[num_rows:] = 0
        lse[:, num_rows:] = float("-inf")
    problem = _describe(q, k_cache, v_cache, o, spec, block_table, alibi_slopes, sinks)
    if k_scale is not None and v_scale is not None:
        problem = _with_scales(problem, k_cache, k_scale, v_scale)
    starts = problem.arrays.starts
    single, several = place_sequences(
        starts, edges, seqlens_k.contiguous().numpy(), q.data_ptr(), _row_bytes(q), o.data_ptr(),
        _row_bytes(o), k_cache.data_ptr(), v_cache.data_ptr(),
    )  # fmt: skip
    if tree_mask is not None:
        single, several = 0, single + several
        mask = tree_mask.contiguous().view(torch.uint8)
        problem = problem._replace(mask=NO_MASK._replace(
            tree=mask.view(-1).numpy(), tree_row=mask.shape[1], tree_starts=starts[:, LSE].copy()
        ))  # fmt: skip
    if single > 0:
        part = problem if single == len(starts) else _subset(problem, starts[:, Q_LEN] == 1)
        if spec.batch_invariant:
            run_decode_tiles(_widened(part, q.dtype), lse)
        else:
            run_decode(part, lse, k_cache.dtype)
    if several > 0:
        fewest = 2 if tree_mask is None else 1
        part = problem if several == len(starts) else _subset(problem, starts[:, Q_LEN] >= fewest)
        run_forward(_widened(part, q.dtype), lse)
    return o, lse


def _widened(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same call with 8-bit rows widened on their way to a tile, to what its product takes."""
    if problem.sizes.k_scale == 0:
        return problem
    packed = np.empty(0, packed_type(dtype, simd.HAS_BF16_DOT))
    return problem._replace(arrays=problem.arrays._replace(packed_like=packed))


def _row_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _with_scales(problem: Problem, cache: Tensor, k_scale: Tensor, v_scale: Tensor) -> Problem:
    """The same call over an 8-bit cache of these scales."""
    numbers = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        strides = scale_per_slot(scale, cache).stride()
        numbers[name] = scale.data_ptr()
        for axis, stride in zip(("block", "row", "head"), strides, strict=True):
            numbers[f"{name}_{axis}"] = stride * scale.element_size()
    return problem._replace(sizes=problem.sizes._replace(**numbers))


def _subset(problem: Problem, chosen: np.ndarray) -> Problem:
    """The same call with only the chosen sequences."""
    arrays, mask = problem.arrays, problem.mask
    if mask.tree_row > 0:
        mask = mask._replace(tree_starts=mask.tree_starts[chosen])
    return problem._replace(
        arrays=arrays._replace(starts=arrays.starts[chosen], table=arrays.table[chosen]), mask=mask
    )


def _shifted(block_table: Tensor, skipped: Tensor, block_size: int) -> Tensor:
    """Return the table without the blocks that hold the first `skipped` tokens of a sequence."""
    first = (skipped // block_size).long()
    columns = first[:, None] + torch.arange(block_table.shape[1])
    return block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))


def _add_level(
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    level: SharedLevel,
    scales: dict[str, Tensor | None],
) -> None:
    """Merge what the groups of a level share into their rows of o and lse."""
    rows = level.rows.long()
    own_o, own_lse = launch(
        q[rows], k_cache, v_cache, spec.of_level(level), block_table=level.block_table,
        seqlens_k=level.seqlens_k, cu_seqlens_q=level.cu_seqlens_q, **scales,
    )  # fmt: skip
    o[rows], lse[:, rows] = merge.launch(o[rows], lse[:, rows], own_o, own_lse)


def _describe(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    o: Tensor,
    spec: PagedSpec,
    block_table: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Problem:
    """Put the call into the numbers that the kernels take; `starts` is still to be filled."""
    (q_row, q_head), (k_row, k_head), (v_row, v_head), (o_row, o_head) = map(
        byte_strides, (q, k_cache, v_cache, o)
    )
    size = k_cache.element_size()
    sizes = Sizes(
        num_kv_heads=spec.num_kv_heads,
        group=spec.group_size,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        window_left=spec.window_left,
        window_right=0 if spec.causal and not spec.has_tree else -1,
        q_code=DTYPE_CODES[q.dtype],
        k_code=CODES[k_cache.dtype],
        k_size=size,
        q_row=q_row,
        q_head=q_head,
        k_row=k_row,
        k_head=k_head,
        v_row=v_row,
        v_head=v_head,
        o_row=o_row,
        o_head=o_head,
        lse_head=q.shape[0],
        block_size=k_cache.shape[1],
        k_block=k_cache.stride(0) * size,
        v_block=v_cache.stride(0) * size,
        bias=0,
        bias_code=F32,
        bias_batch=0,
        bias_head=0,
        bias_row=0,
        bias_column=0,
    )
    is_plain = alibi_slopes is None and spec.softcap == 0.0 and spec.softmax_scale > 0.0
    rule = Rule(
        is_plain, float(spec.softmax_scale), float(spec.softcap), False, alibi_slopes is not None
    )
    real = np.float64 if q.dtype == torch.float64 else np.float32
    has_dot = simd.HAS_BF16_DOT and k_cache.dtype == q.dtype
    arrays = Arrays(
        like=np.empty(0, real),
        packed_like=np.empty(0, packed_type(q.dtype, has_dot)),
        starts=np.zeros((spec.num_seqs, NUM_STARTS), np.int64),
        table=block_table.contiguous().numpy(),
        slopes=per_head(alibi_slopes, spec.num_q_heads, 0.0, real),
        sinks=per_head(sinks, spec.num_q_heads, -np.inf, real),
    )
    return Problem(sizes, rule, arrays)
