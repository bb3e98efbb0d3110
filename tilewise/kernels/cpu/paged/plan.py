"""Plan attention over a paged cache on the CPU: decoding, prefill chunks and mixtures.

What      one packed call, described in plain numbers except addresses and lengths, which a run
          adds; a sequence with one new row decodes, one with more is a prefill chunk, and so are
          all with a tree mask. Shared prefixes are calls of their own without a mask, whose queries
          are the rows of all sequences of a group, and merged by lse.
Grid      decode.py for single rows, whose cost is reading the cache; attention/forward.py for
          chunks, whose cost is arithmetic: it gathers each tile of keys once and multiplies. A call
          that is batch-invariant, or over a cache of 4 bits, uses decode_tiles.py for single rows.
One call  at most one parallel region of each kind.
Traffic   see decode.py and attention/forward.py; the cache is never copied as a whole.
Numerics  see decode.py and attention/forward.py; a sequence's bits do not depend on its neighbours,
          and in a batch-invariant call not on how many of its rows are computed at once either.
          Over a cache of 4 bits all is float32, of queries that are rotated as its rows are.
"""

from __future__ import annotations

from dataclasses import replace

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
    check_longest,
    float_type,
    packed_type,
    per_head,
    refuse_edges,
    sizes_of,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, why_not_dtype
from tilewise.kernels.cpu.paged.decode import place_sequences
from tilewise.kernels.cpu.paged.decode_launch import rows_of, run_decode
from tilewise.kernels.cpu.paged.decode_tiles import run_decode_tiles
from tilewise.kernels.cpu.paged.four_bits import rotate
from tilewise.kernels.cpu.paged.ids import check_ids, check_table
from tilewise.kernels.cpu.paged.quantise import CACHE_CODES
from tilewise.kernels.plan import Call, Refusal, Results
from tilewise.kernels.spec import (
    FOUR_BITS,
    PagedSpec,
    PagedTensors,
    SharedKeys,
    SharedLevel,
    scale_per_slot,
)
from tilewise.kernels.tiles.paged import TileConfig

CODES = DTYPE_CODES | CACHE_CODES


def why_not(spec: PagedSpec) -> str | None:
    """Return why the CPU's kernels of paged attention cannot run `spec`, or None if they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if (spec.dtype == torch.float64) != (spec.cache_dtype == torch.float64):
        return f"cache dtype must be float64 with float64 q only, got {spec.cache_dtype}"
    if spec.head_dim % 2 or spec.v_head_dim % 2:
        return f"head dims must be even, got {spec.head_dim} and {spec.v_head_dim}"
    if spec.cache_dtype in CACHE_CODES:
        return why_not_dtype(spec.dtype)
    return why_not_dtype(spec.dtype) or why_not_dtype(spec.cache_dtype)


def plan_fwd(call: Call) -> PagedForwardPlan | Refusal:
    """Return the plan by which each sequence's new rows attend to its cached keys, causally, or a
    Refusal.

    Its results are o (T, Hq, Dv) of q's dtype, and lse (Hq, T), float32, float64 for float64.

    Source: Kwon et al. 2023, PagedAttention; Dao et al. 2023, Flash-Decoding (split keys).
    """
    reason = why_not(call.spec)
    return PagedForwardPlan(call) if reason is None else Refusal(reason)


class PagedForwardPlan:
    """The plan of a call of paged attention on a CPU, made once and run for each call like it: a
    pass over each sequence's own keys, and one over each level of shared prefixes, merged by lse.

    Attributes:
        tiles: an empty table, since the tiles are the same for all calls.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        given, shared = PagedTensors.of(call.layouts, call.spec.shared_rows)
        spec = self._spec = call.spec
        q = given.q.meta()
        self._rotates = spec.cache_dtype == FOUR_BITS
        self._copies_q = q.stride(-1) != 1
        if self._rotates:
            spec, q = replace(spec, dtype=torch.float32), q.float()
        q = q.contiguous() if self._copies_q or self._rotates else q
        self._own = _Pass(spec, given, q)
        self._levels = []
        for level in () if shared is None else shared.levels:
            rows = torch.empty((level.rows.shape[0], *q.shape[1:]), dtype=q.dtype, device="meta")
            own = _without_features(given, level)
            self._levels.append(_Pass(spec.of_level(_metas(level)), own, rows))

    @property
    def steps(self) -> list[str]:
        """The steps of the plan in words, a line each."""
        steps = self._own.steps
        return steps + [step for each in self._levels for step in (*each.steps, "merge by lse")]

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o (T, Hq, Dv) and lse (Hq, T) for the tensors of a call, in the order of
        `PagedTensors.of`; rows behind the last sequence get 0 and -inf.

        Raises:
            ValueError: lengths, edges, blocks or shared rows lie outside of what the tensors hold.
        """
        given, shared = PagedTensors.of(tensors, self._spec.shared_rows)
        if self._rotates:
            q = given.q.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            rotate(q)
            o, lse = self._run(given._replace(q=q), shared)
            rotate(o, back=True)
            return o.to(self._spec.dtype), lse
        if self._copies_q:
            given = given._replace(q=given.q.contiguous())
        return self._run(given, shared)

    def _run(self, given: PagedTensors, shared: SharedKeys | None) -> tuple[Tensor, Tensor]:
        if shared is None:
            return self._own.run(given)
        skipped, q = shared.skipped, given.q
        most_keys = given.block_table.shape[1] * self._spec.block_size
        check_ids("shared.skipped", skipped.numpy(), 0, most_keys)
        table = _shifted(given.block_table, skipped, self._spec.block_size)
        later = given._replace(block_table=table, seqlens_k=given.seqlens_k - skipped)
        o, lse = self._own.run(later)
        for each, level in zip(self._levels, shared.levels, strict=True):
            check_ids("rows of shared", level.rows.numpy(), 0, q.shape[0] - 1)
            rows = level.rows.long()
            found = each.run(_without_features(given, level)._replace(q=q[rows]))
            o[rows], lse[:, rows] = merge.launch(o[rows], lse[:, rows], *found)
        return o, lse


def _without_features(given: PagedTensors, level: SharedLevel) -> PagedTensors:
    """Return the tensors of the pass over a level of shared prefixes: the level's table, lengths
    and edges, without ALiBi, sinks and a tree; the caller replaces q."""
    return given._replace(
        block_table=level.block_table,
        seqlens_k=level.seqlens_k,
        cu_seqlens_q=level.cu_seqlens_q,
        alibi_slopes=None,
        sinks=None,
        tree_mask=None,
        records=None,
    )


def _metas(level: SharedLevel) -> SharedLevel:
    return SharedLevel(*(x.meta() for x in level[:-1]), level.max_rows)


class _Pass:
    """One pass of sequences, or of groups that share keys, over their keys; made by the plan, and
    run for each call.

    Args:
        layouts: the layouts of the tensors.
        q: a tensor on "meta" instead of the layout's queries.
    """

    def __init__(self, spec: PagedSpec, layouts: PagedTensors, q: Tensor) -> None:
        self._spec, self._dtype = spec, q.dtype
        self._cache_dtype = spec.cache_dtype
        self._tiles_singles = spec.batch_invariant or spec.cache_dtype == FOUR_BITS
        self._o_shape, self._lse_shape = (*q.shape[:-1], spec.v_head_dim), (q.shape[1], q.shape[0])
        k_cache, v_cache = layouts.k_cache.meta(), layouts.v_cache.meta()
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1, "cache rows are contiguous"
        o = torch.empty(self._o_shape, dtype=q.dtype, device="meta")
        has_alibi = layouts.alibi_slopes is not None
        right = 0 if spec.causal and not spec.has_tree else -1
        sizes = sizes_of(spec, q, k_cache, v_cache, o, CODES[k_cache.dtype], right)
        self._sizes = sizes._replace(
            block_size=k_cache.shape[1],
            k_block=k_cache.stride(0) * k_cache.element_size(),
            v_block=v_cache.stride(0) * v_cache.element_size(),
        )
        self._q_row, self._o_row = _row_bytes(q), _row_bytes(o)
        self._has_scales = layouts.k_scale is not None and layouts.v_scale is not None
        if self._has_scales:
            scales = {"k_scale": layouts.k_scale.meta(), "v_scale": layouts.v_scale.meta()}
            self._sizes = _with_scales(self._sizes, k_cache, scales)
        is_plain = not has_alibi and spec.softcap == 0.0 and spec.softmax_scale > 0.0
        self._rule = Rule(
            is_plain, float(spec.softmax_scale), float(spec.softcap), False, has_alibi
        )
        self._real = np.float64 if q.dtype == torch.float64 else np.float32
        self._lse_dtype = float_type(q.dtype)
        has_dot = simd.HAS_BF16_DOT and spec.cache_dtype == q.dtype
        self._like = np.empty(0, self._real)
        self._packed_like = np.empty(0, packed_type(q.dtype, has_dot))
        self._widened_like = self._packed_like
        if self._has_scales:  # 8-bit rows are widened on their way to a tile
            self._widened_like = np.empty(0, packed_type(q.dtype, simd.HAS_BF16_DOT))
        self._has_tree = layouts.tree_mask is not None

    @property
    def steps(self) -> list[str]:
        """The steps of the pass in words, a line each."""
        decode = "the decode kernel over tiles" if self._tiles_singles else "the decode kernel"
        single = [] if self._has_tree else [f"run {decode} for single rows"]
        if self._spec.max_seqlen_q == 1 and single:
            return single
        return [*single, "run the forward kernel for longer runs"]

    def run(self, given: PagedTensors) -> tuple[Tensor, Tensor]:
        """Return o and lse of the pass. Raises ValueError if edges, lengths or blocks lie outside
        of what the tensors hold."""
        spec, q, k_cache, v_cache = self._spec, given.q, given.k_cache, given.v_cache
        o = torch.empty(self._o_shape, dtype=self._dtype)
        lse = torch.empty(self._lse_shape, dtype=self._lse_dtype)
        edges = given.cu_seqlens_q.contiguous().numpy()
        num_rows = int(edges[-1])
        if num_rows != self._o_shape[0]:
            o[num_rows:] = 0
            lse[:, num_rows:] = float("-inf")
        sizes, starts = self._sizes, np.zeros((spec.num_seqs, NUM_STARTS), np.int64)
        if self._has_scales:
            sizes = sizes._replace(
                k_scale=given.k_scale.data_ptr(), v_scale=given.v_scale.data_ptr()
            )
        lengths = given.seqlens_k.contiguous().numpy()
        single, several, negative, longest = place_sequences(
            starts,
            edges,
            lengths,
            q.data_ptr(),
            self._q_row,
            o.data_ptr(),
            self._o_row,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
        )
        if edges[0] != 0 or negative or num_rows > self._o_shape[0]:
            refuse_edges("cu_seqlens_q", edges, self._o_shape[0])
        if several or spec.max_seqlen_q < 1:  # decoding rows have a length of at most 1
            check_longest("max_seqlen_q", starts[:, Q_LEN], spec.max_seqlen_q)
        most_keys = given.block_table.shape[1] * sizes.block_size
        if longest > most_keys:
            raise ValueError(f"seqlens_k must be at most {most_keys}, got {lengths}")
        slopes = per_head(given.alibi_slopes, spec.num_q_heads, 0.0, self._real)
        sinks = per_head(given.sinks, spec.num_q_heads, -np.inf, self._real)
        table = given.block_table.contiguous().numpy()
        check_table(table, edges, lengths, k_cache, spec.window_left)
        arrays = Arrays(self._like, self._packed_like, starts, table, slopes, sinks)
        problem = Problem(sizes, self._rule, arrays)
        fewest = 2
        if given.tree_mask is not None:
            single, several, fewest = 0, single + several, 1
            mask = given.tree_mask.contiguous().view(torch.uint8)
            tree = NO_MASK._replace(
                tree=mask.view(-1).numpy(),
                tree_row=mask.shape[1],
                tree_starts=starts[:, LSE].copy(),
            )
            problem = problem._replace(mask=tree)
        if single > 0:
            part = problem if single == len(starts) else _subset(problem, starts[:, Q_LEN] == 1)
            if self._tiles_singles:
                run_decode_tiles(self._widened(part), lse)
            else:
                run_decode(rows_of(part, self._cache_dtype, torch.get_num_threads()), lse)
        if several > 0:
            part = problem
            if several != len(starts):
                part = _subset(problem, starts[:, Q_LEN] >= fewest)
            run_forward(self._widened(part), lse)
        return o, lse

    def _widened(self, problem: Problem) -> Problem:
        if not self._has_scales:
            return problem
        return problem._replace(arrays=problem.arrays._replace(packed_like=self._widened_like))


def _row_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _with_scales(sizes: Sizes, cache: Tensor, scales: dict[str, Tensor]) -> Sizes:
    """Return `sizes` with the byte strides of an 8-bit cache's scales; each run sets their
    addresses."""
    numbers = {}
    for name, scale in scales.items():
        strides = scale_per_slot(scale, cache).stride()
        for axis, stride in zip(("block", "row", "head"), strides, strict=True):
            numbers[f"{name}_{axis}"] = stride * scale.element_size()
    return sizes._replace(**numbers)


def _subset(problem: Problem, chosen: np.ndarray) -> Problem:
    """Return the problem with only the sequences for which `chosen` (B,) is true, in their
    order."""
    arrays, mask = problem.arrays, problem.mask
    if mask.tree_row > 0:
        mask = mask._replace(tree_starts=mask.tree_starts[chosen])
    return problem._replace(
        arrays=arrays._replace(starts=arrays.starts[chosen], table=arrays.table[chosen]), mask=mask
    )


def _shifted(block_table: Tensor, skipped: Tensor, block_size: int) -> Tensor:
    """Return a block table (B, M) whose rows begin behind the blocks of each sequence's first
    `skipped` tokens, whole blocks; the last columns repeat a row's last entry."""
    first = (skipped // block_size).long()
    columns = first[:, None] + torch.arange(block_table.shape[1])
    return block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
