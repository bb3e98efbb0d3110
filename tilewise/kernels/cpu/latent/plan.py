"""Plan attention over a paged cache of latents on the CPU.

What      describes a call in plain numbers except addresses and lengths, which a run adds; it cuts
          the runs into tasks, and allocates the partial results of splits.
Grid      see kernel.py.
One call  is one parallel region, and one more if keys were split.
Traffic   see kernel.py.
Numerics  see kernel.py.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import (
    check_edges,
    check_longest,
    float_type,
    packed_type,
)
from tilewise.kernels.cpu.latent.kernel import (
    LOG2_E,
    MERGE_ROWS,
    SPLIT,
    Arrays,
    Sizes,
    attend_latents,
    merge_splits,
    place_runs,
)
from tilewise.kernels.cpu.latent.tiles import ACC_PAD, PAD, ROWS
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, why_not_dtype
from tilewise.kernels.cpu.machine.threads import run_tasks
from tilewise.kernels.cpu.paged.ids import check_table
from tilewise.kernels.cpu.paged.quantise import BYTE_CODES
from tilewise.kernels.plan import Call, Layout, Refusal, Results
from tilewise.kernels.spec import LatentTensors, PagedSpec
from tilewise.kernels.tiles.paged import TileConfig

# Unless batch-invariant: more tasks would only add partial sums, fewer would leave cores idle.
TASKS_PER_CORE = 4


def why_not(spec: PagedSpec) -> str | None:
    """Return why the CPU's kernels over latents cannot run `spec`, or None if they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if (spec.dtype == torch.float64) != (spec.cache_dtype == torch.float64):
        return f"cache dtype must be float64 with float64 queries only, got {spec.cache_dtype}"
    reason = None if spec.cache_dtype in BYTE_CODES else why_not_dtype(spec.cache_dtype)
    return why_not_dtype(spec.dtype) or reason


def plan_fwd(call: Call) -> LatentForwardPlan | Refusal:
    """Return the plan by which each sequence's new rows attend to its cached latents, causally, or
    a Refusal.

    Its results are o (T, Hq, R) of q's dtype, and lse (Hq, T), float32, float64 for float64.

    Source: DeepSeek-V2 (2024), section 2.1; Dao et al. 2023, Flash-Decoding (split keys).
    """
    reason = why_not(call.spec)
    return LatentForwardPlan(call) if reason is None else Refusal(reason)


class LatentForwardPlan:
    """The plan of a call of attention over latents on a CPU, made once and run for each call like
    it; spec.head_dim is R + Dr, and spec.v_head_dim is R.

    Attributes:
        tiles: an empty table, since the tiles are the same for all calls.
        steps: the steps of the plan in words, a line each.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        self.steps = ["run the kernel over latents", "merge splits, where there are any"]
        layouts, spec = LatentTensors(*call.layouts), call.spec
        self._spec = spec
        self._copies = [
            x.stride[-1] != 1 and x.shape[-1] != 1 for x in (layouts.q_latent, layouts.q_rope)
        ]
        self._sizes = _sizes_of(*map(_dense, layouts[:2], self._copies), layouts, spec)
        self._o_shape, self._lse_shape = layouts.q_latent.shape, (spec.num_q_heads, spec.num_tokens)
        self._real = np.float64 if spec.dtype == torch.float64 else np.float32
        self._lse_dtype = float_type(spec.dtype)
        is_narrow = spec.cache_dtype == spec.dtype or spec.cache_dtype in BYTE_CODES
        self._like = np.empty(0, self._real)
        self._packed_like = np.empty(0, packed_type(spec.dtype, simd.HAS_BF16_DOT and is_narrow))
        # The machine's cores rather than the threads in use, on which results must not depend.
        self._split_tasks = TASKS_PER_CORE * (os.cpu_count() or 1)
        self._sums_of_row = -(-spec.v_head_dim // 32) * 32 + ACC_PAD

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o (T, Hq, R) and lse (Hq, T) for the fields of `LatentTensors`; rows behind the
        last sequence get 0 and -inf. Raises ValueError if edges, lengths or blocks lie outside of
        what the tensors hold."""
        given, spec = LatentTensors(*tensors), self._spec
        q_latent, q_rope = (
            q.contiguous() if copies else q
            for q, copies in zip(given[:2], self._copies, strict=True)
        )
        o = torch.empty(self._o_shape, dtype=spec.dtype)
        lse = torch.empty(self._lse_shape, dtype=self._lse_dtype)
        edges = given.cu_seqlens_q.contiguous().numpy()
        check_edges("cu_seqlens_q", edges, spec.num_tokens)
        num_rows = int(edges[-1])
        if num_rows != spec.num_tokens:
            o[num_rows:] = 0
            lse[:, num_rows:] = float("-inf")
        starts = np.zeros((spec.num_seqs, 11), np.int64)
        runs = np.diff(edges)
        check_longest("max_seqlen_q", runs, spec.max_seqlen_q)
        longest = max(1, int(runs.max(initial=0)))
        block_rows = min(ROWS, -(-longest * spec.num_q_heads // PAD) * PAD)
        lengths = given.seqlens_k.contiguous().numpy()
        most_keys = given.block_table.shape[1] * given.latent_cache.shape[1]
        if lengths.max(initial=0, where=runs > 0) > most_keys:
            raise ValueError(f"seqlens_k must be at most {most_keys}, got {lengths}")
        table = given.block_table.contiguous().numpy()
        check_table(table, edges, lengths, given.latent_cache, -1)
        split_keys = 0
        if not spec.batch_invariant:
            blocks = -(-runs * spec.num_q_heads // block_rows)
            all_keys = int((blocks * lengths.astype(np.int64)).sum())
            split_keys = max(SPLIT, all_keys // self._split_tasks)
        scale = given.latent_scale
        sizes = self._sizes._replace(
            cache=given.latent_cache.data_ptr(),
            scale=0 if scale is None else scale.data_ptr(),
            block_rows=block_rows,
            split_keys=split_keys,
        )
        num_tasks, num_slots = place_runs(
            sizes, starts, edges, lengths, q_latent.data_ptr(), q_rope.data_ptr(), o.data_ptr()
        )
        rows = num_slots * block_rows
        arrays = Arrays(
            like=self._like,
            packed_like=self._packed_like,
            starts=starts,
            table=table,
            sums=np.empty(rows * self._sums_of_row, self._real),
            tops=np.empty(rows, self._real),
            totals=np.empty(rows, self._real),
        )
        flat = lse.view(-1).numpy()
        run_tasks(attend_latents, num_tasks, sizes, arrays, flat)
        if num_slots > 0:
            merges = -(-num_rows * spec.num_q_heads // MERGE_ROWS)
            run_tasks(merge_splits, merges, sizes, arrays, flat)
        return o, lse


def _dense(layout: Layout, copies: bool) -> Tensor:
    return layout.meta().contiguous() if copies else layout.meta()


def _sizes_of(q_latent: Tensor, q_rope: Tensor, layouts: LatentTensors, spec: PagedSpec) -> Sizes:
    """Return the sizes and byte strides that the kernels take, for calls of one shape.

    The fields `cache` and `scale` (addresses of the cache and of its scales), `block_rows` and
    `split_keys` are 0: each run sets them.
    """
    cache, latent_scale = layouts.latent_cache.meta(), layouts.latent_scale
    size, q_size = cache.element_size(), q_latent.element_size()
    is_bf16 = spec.dtype == torch.bfloat16 and (
        spec.cache_dtype == torch.bfloat16 or spec.cache_dtype in BYTE_CODES
    )
    scale_block, scale_row = (0, 0) if latent_scale is None else latent_scale.stride[:2]
    return Sizes(
        num_heads=spec.num_q_heads,
        rank=spec.v_head_dim,
        rope_dim=spec.head_dim - spec.v_head_dim,
        q_code=DTYPE_CODES[spec.dtype],
        cache_code=(DTYPE_CODES | BYTE_CODES)[spec.cache_dtype],
        row_size=cache.shape[2] * size,
        q_row=q_latent.stride(0) * q_size,
        q_head=q_latent.stride(1) * q_size,
        rope_row=q_rope.stride(0) * q_size,
        rope_head=q_rope.stride(1) * q_size,
        o_row=spec.num_q_heads * spec.v_head_dim * q_size,
        o_head=spec.v_head_dim * q_size,
        lse_head=spec.num_tokens,
        cache=0,
        cache_block=cache.stride(0) * size,
        cache_row=cache.stride(1) * size,
        scale=0,
        scale_block=scale_block * 4,
        scale_row=scale_row * 4,
        block_size=cache.shape[1],
        block_rows=0,
        split_keys=0,
        scale_log2=float(spec.softmax_scale) * LOG2_E,
        uses_amx=amx.HAS_AMX and is_bf16,
    )
