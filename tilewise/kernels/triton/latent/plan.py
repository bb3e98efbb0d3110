"""Attention over a paged cache of latents: one row of a token is key and value of all heads.

what     o = softmax(scale (q_latent z^T + q_rope k_rope^T)) z, causal among the new tokens of a
         sequence; z is the first R channels of a cached row, k_rope the other Dr
grid     short runs: (pairs, tiles of rows), a pair being (sequence, split of its keys), then the
         merge of `paged_decode`; long runs: (tiles,), of rows of one sequence, last tile first
program  owns TILE_M rows, row r being new token r // Hq and head r % Hq; loops over tiles of keys,
         each of which is loaded once and multiplied twice
traffic  latents once per tile of rows, from L2 after the first; q and o once; partials of splits
         4 * (R + 1) bytes a row and split
numerics as in `paged.keys`; of an 8-bit row z and k_rope have a scale each, so their products
         with q are summed scaled, in float32

Any block size: rows are addressed one by one through the block table unless a block holds whole
tiles. No synchronisation, so a captured CUDA graph may be replayed with other lengths.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import Call, LaunchPlan, Maker, Refusal
from tilewise.kernels.spec import LatentTensors, PagedSpec
from tilewise.kernels.tiles import latent as mla_tiles
from tilewise.kernels.tiles.paged import (
    SplitPlan,
    TileConfig,
    has_only_mma_sync,
    padded_head_dim,
)
from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.paged.decode import FEW_ROWS, _merge_kernel, reach_of
from tilewise.kernels.triton.paged.four_bits import join_channels, split_channels
from tilewise.kernels.triton.paged.items import find_tile
from tilewise.kernels.triton.paged.keys import (
    LOWEST,
    MERGE_TILE,
    _load_blocks,
    _load_rows,
    _load_scales,
    cached_keys,
    clear_padding_rows,
    normalise,
    run_of,
)
from tilewise.kernels.triton.paged.quantise import (
    FLOAT,
    as_bytes,
    cache_kind,
    factor,
    widen,
    widen_once,
    widen_pairs,
)
from tilewise.kernels.triton.paged.splits import TILE_B, find_split
from tilewise.kernels.triton.visible import end_of_keys, key_at, key_tile_range

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_RANK = 512  # sums of 64 rows of this width are all the registers of 8 warps hold
MAX_ROPE_DIM = 128


class Memory(NamedTuple):
    """The tensors that a latent kernel reads and writes.

    A field that a launch does not use holds some other tensor, which is not touched.
    """

    q: object
    q_rope: object
    cache: object
    o: object
    lse: object
    part_o: object
    part_lse: object
    plan: object
    block_table: object
    seqlens_k: object
    cu_seqlens_q: object
    scale: object


class Form(NamedTuple):
    """Constexpr: the sizes of a cache of latents and of the heads that share it, and its format."""

    heads: int
    tile_h: int  # a power of two
    rank: int  # channels of a latent, and of its rotated part
    rope_dim: int
    rank_pad: int  # powers of two
    rope_pad: int
    block_size: int
    kind: int  # see `quantise.cache_kind`
    widens_once: bool
    pairs: bool  # True if even and odd channels of an 8-bit cache are multiplied apart
    ptx: bool  # True if instructions of NVIDIA's may be written


class Way(NamedTuple):
    """Constexpr: which work a program of the latent kernel has.

    It is a tile of the rows of a long run with all keys, or all rows of a short run with one split
    of the keys.
    """

    long: bool
    fixed: bool  # True if splits have one size in every batch
    alone: bool  # True if every sequence has one split
    clears: bool  # True if rows after the last sequence are written, too


@triton.jit
def _attend_latents(
    q,
    q_rope,
    acc,
    l,
    m,
    pos,
    cache_ptr,
    scale_ptr,
    block_row_ptr,
    stride_b,
    stride_p,
    stride_sb,
    stride_sp,
    first,
    last,
    key_hi,
    num_blocks,
    scale_log2,
    form: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Fold the cached tokens of key tiles first ... last - 1 into acc, l and m; return these.

    Keys from key_hi on do not exist. q (TILE_M, rank_pad), q_rope (TILE_M, rope_pad); pos (TILE_M,)
    is the last key each row sees; acc, l and m are the running output, sum and base-2 maximum.
    """
    offs_n = tl.arange(0, TILE_N)
    UNIT: tl.constexpr = 2 if form.pairs else 1  # channels of an element
    offs_r = tl.arange(0, form.rank_pad // UNIT)
    offs_dr = tl.arange(0, form.rope_pad // UNIT)
    acc_odd = 0.0
    if form.pairs:
        q, q_odd = split_channels(q)
        q_rope, rope_odd = split_channels(q_rope)
        acc, acc_odd = split_channels(acc)
    # Block ids are loaded a tile ahead, see `paged.keys.attend_keys`.
    block = _load_blocks(block_row_ptr, first, last, 0, key_hi, num_blocks, TILE_N, form.block_size)
    for tile in range(first, last):
        key = tile * TILE_N + offs_n
        owned = key < key_hi
        if form.block_size % TILE_N == 0:
            slot = (tile % (form.block_size // TILE_N)) * TILE_N + offs_n
            row = cache_ptr + block * stride_b + slot[:, None] * stride_p
        else:
            slot = key % form.block_size
            row = cache_ptr + block[:, None] * stride_b + slot[:, None] * stride_p
        if form.kind != FLOAT:
            scales = scale_ptr + block * stride_sb + slot * stride_sp
            z_scale = _load_scales(scales, owned, True) * factor(form.kind)
            rope_scale = _load_scales(scales + 1, owned, True) * factor(form.kind)
        block = _load_blocks(
            block_row_ptr, tile + 1, last, 0, key_hi, num_blocks, TILE_N, form.block_size
        )
        rope_row = row + form.rank
        if form.pairs:
            row = row.to(tl.pointer_type(tl.int16), bitcast=True)
            rope_row = rope_row.to(tl.pointer_type(tl.int16), bitcast=True)
        z = _load_rows(row, offs_r, owned, form.rank // UNIT, form.rank_pad // UNIT, True)
        k_rope = _load_rows(
            rope_row, offs_dr, owned, form.rope_dim // UNIT, form.rope_pad // UNIT, True
        )
        if form.pairs:
            z, z_odd = widen_pairs(z, q.dtype, form.kind, form.ptx)
            k_rope, k_odd = widen_pairs(k_rope, q.dtype, form.kind, form.ptx)
        elif form.widens_once:
            z, k_rope = widen_once(z, form.kind), widen_once(k_rope, form.kind)
        else:
            z, k_rope = widen(z, q.dtype, form.kind), widen(k_rope, q.dtype, form.kind)
        s = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        if form.pairs:
            s = tl.dot(rope_odd, tl.trans(k_odd), s, input_precision="ieee")
        if form.kind == FLOAT:
            s = tl.dot(q, tl.trans(z), s, input_precision="ieee") * scale_log2
        else:
            s_latent = tl.dot(q, tl.trans(z), input_precision="ieee")
            if form.pairs:
                s_latent = tl.dot(q_odd, tl.trans(z_odd), s_latent, input_precision="ieee")
            s = (s_latent * z_scale[None, :] + s * rope_scale[None, :]) * scale_log2
        s = tl.where(owned[None, :] & (key[None, :] <= pos[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        if form.kind != FLOAT and q.dtype == tl.float16:
            # p times a scale may underflow in float16; times the scale's share of the largest it
            # does not.
            largest = tl.max(z_scale, 0)
            p *= (z_scale / tl.where(largest > 0.0, largest, 1.0))[None, :]
            o = tl.dot(p.to(q.dtype), z, input_precision="ieee")
            acc = acc * alpha[:, None] + o * largest
        else:
            if form.kind != FLOAT:
                p *= z_scale[None, :]
            acc = tl.dot(p.to(q.dtype), z, acc * alpha[:, None], input_precision="ieee")
            if form.pairs:
                acc_odd = tl.dot(
                    p.to(q.dtype), z_odd, acc_odd * alpha[:, None], input_precision="ieee"
                )
        m = m_new
    if form.pairs:
        acc = join_channels(acc, acc_odd)
    return acc, l, m


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_tokens",
        "max_keys",
        "num_blocks",
        "max_run",
        "target_pairs",
        "split_tiles",
        "num_pairs",
        "min_run",
        "stride_lh",
    ]
)
def _latent_kernel(
    at,
    stride_sb,
    stride_sp,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_b,
    stride_p,
    stride_ot,
    stride_oh,
    stride_lh,
    stride_table,
    num_seqs,
    num_tokens,
    max_keys,
    num_blocks,
    max_run,
    target_pairs,
    split_tiles,
    num_pairs,
    min_run,
    scale_log2,
    form: tl.constexpr,
    way: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    TILE_R: tl.constexpr = form.rank_pad
    pair = tl.program_id(0)
    row_tile = tl.program_id(1)
    first_pair = 0
    if way.clears and row_tile == 0:
        used = tl.minimum(tl.maximum(tl.load(at.cu_seqlens_q + num_seqs), 0), num_tokens)
        clear_padding_rows(
            at.o,
            at.lse,
            stride_ot,
            stride_oh,
            stride_lh,
            used + pair,
            num_pairs,
            num_tokens,
            0,
            form.heads,
            form.tile_h,
            form.rank,
            TILE_R,
        )
    if way.long:
        seq, row_tile = find_tile(
            at.cu_seqlens_q,
            num_pairs - 1 - pair,
            num_seqs,
            num_tokens,
            min_run,
            form.heads,
            TILE_M,
            TILE_B,
        )
    else:
        seq, first_pair, split_tiles = find_split(
            at.seqlens_k,
            at.cu_seqlens_q,
            pair,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            target_pairs,
            split_tiles,
            -1,
            TILE_N,
            way.fixed,
            TILE_B,
        )
    if seq >= num_seqs:
        return
    start, run = run_of(at.cu_seqlens_q, seq, True, num_tokens)
    seqlen_k = cached_keys(at.seqlens_k, seq, True, max_keys)
    _, num_tiles = key_tile_range(seqlen_k, run, -1, TILE_N)
    num_splits = 1
    split = 0
    if not way.long:
        num_splits = (tl.maximum(num_tiles, 1) + split_tiles - 1) // split_tiles
        split = pair - first_pair
        if not way.alone and split == 0:
            tl.store(at.plan + 2 * seq, first_pair)
            tl.store(at.plan + 2 * seq + 1, num_splits)

    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    token = row // form.heads
    head = row % form.heads
    in_run = token < run
    pos = key_at(token, run, seqlen_k)
    offs_r = tl.arange(0, TILE_R)
    offs_dr = tl.arange(0, form.rope_pad)
    t = (start + token).to(tl.int64)
    q = _load_rows(
        (at.q + t * stride_qt + head * stride_qh)[:, None], offs_r, in_run, form.rank, TILE_R, True
    )
    q_rope = _load_rows(
        (at.q_rope + t * stride_rt + head * stride_rh)[:, None],
        offs_dr,
        in_run,
        form.rope_dim,
        form.rope_pad,
        True,
    )
    if form.kind == FLOAT and at.q.dtype.element_ty != at.cache.dtype.element_ty:
        q = q.to(tl.float32)
        q_rope = q_rope.to(tl.float32)

    # Keys that the last row of this tile sees.
    last_token = tl.minimum((row_tile * TILE_M + TILE_M - 1) // form.heads, run - 1)
    key_hi = end_of_keys(last_token, run, seqlen_k)
    last = tl.minimum((split + 1) * num_tiles // num_splits, (key_hi + TILE_N - 1) // TILE_N)
    acc = tl.zeros([TILE_M, TILE_R], dtype=tl.float32)
    l = tl.zeros([TILE_M], dtype=tl.float32)
    m = tl.full([TILE_M], LOWEST, dtype=tl.float32)
    acc, l, m = _attend_latents(
        q,
        q_rope,
        acc,
        l,
        m,
        pos,
        at.cache,
        at.scale,
        at.block_table + seq.to(tl.int64) * stride_table,
        stride_b,
        stride_p,
        stride_sb,
        stride_sp,
        split * num_tiles // num_splits,
        last,
        key_hi,
        num_blocks,
        scale_log2,
        form,
        TILE_N,
    )
    o, lse = normalise(acc, l, m)

    inside = in_run[:, None] & (offs_r[None, :] < form.rank)
    if way.long or way.alone or num_splits == 1:
        o_row = at.o + t * stride_ot + head * stride_oh
        tl.store(o_row[:, None] + offs_r[None, :], o.to(at.o.dtype.element_ty), mask=inside)
        tl.store(at.lse + head * stride_lh + start + token, lse, mask=in_run)
    else:
        part = pair.to(tl.int64) * (max_run * form.heads) + row
        tl.store(at.part_o + part[:, None] * form.rank + offs_r[None, :], o, mask=inside)
        tl.store(at.part_lse + part, lse, mask=in_run)


def why_not(spec: PagedSpec) -> str | None:
    """Return why these kernels cannot run a call, or None if they can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in DTYPES:
        return f"dtype of the queries must be float32, float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8 or float8_e4m3fn, "
            f"got {spec.cache_dtype}"
        )
    rank, rope_dim = spec.v_head_dim, spec.head_dim - spec.v_head_dim
    if not 1 <= rank <= MAX_RANK:
        return f"R must be 1 to {MAX_RANK}, got {rank}"
    if not 1 <= rope_dim <= MAX_ROPE_DIM:
        return f"Dr must be 1 to {MAX_ROPE_DIM}, got {rope_dim}"
    return None


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan of a call of attention over latents, or a Refusal with the reason.

    Its results are o (T, Hq, R) in the dtype of the queries and lse (Hq, T) float32. Rows past
    cu_seqlens_q[B] get o = 0 and lse = -inf.
    """
    reason = why_not(call.spec)
    return Refusal(reason) if reason is not None else made_fwd(call)


def made_fwd(call: Call) -> LaunchPlan:
    """Return the plan of a call that `why_not` does not refuse; results are those of `plan_fwd`."""
    spec, maker = call.spec, Maker(call, LatentTensors._fields)
    given = LatentTensors(*maker.inputs)
    o = maker.empty(given.q_latent.shape, spec.dtype)
    lse = maker.empty((spec.num_q_heads, spec.num_tokens), torch.float32)
    chosen: dict[str, TileConfig] = {}
    if spec.num_tokens == 0:
        return maker.finish((o, lse))
    arch, sm_count = device.arch_of(maker.device), device.sm_count_of(maker.device)
    work = mla_tiles.mla_work(spec, arch, sm_count)
    if work.split_run > 0:
        chosen["split"] = work.split_config
        launch_splits(
            maker,
            given,
            o,
            lse,
            spec,
            config=work.split_config,
            plan=work.split_plan,
            max_run=work.split_run,
            clears=work.rows_config is None,
            arch=arch,
        )
    if work.rows_config is not None:
        config = chosen["rows"] = work.rows_config
        launch_rows(maker, given, o, lse, spec, config=config, split_run=work.split_run, arch=arch)
    return maker.finish((o, lse), lambda: chosen)


def launch_splits(
    maker: Maker,
    given: LatentTensors,
    o: Tensor,
    lse: Tensor,
    spec: PagedSpec,
    *,
    config: TileConfig,
    plan: SplitPlan,
    max_run: int,
    clears: bool,
    arch: int,
) -> None:
    """Add to a plan: write rows of o and lse of every sequence that has 1 ... max_run new tokens.

    Args:
        given: the tensors of the call.
        o, lse: (T, Hq, R) and (Hq, T), the results of the call.
        config: the tiles of the kernel.
        plan: the result of `mla_tiles.mla_splits` for this spec, config and max_run.
        clears: True to write also the rows after the last sequence (o = 0, lse = -inf).
        arch: the compute capability of the GPU.
    """
    num_heads, rank = spec.num_q_heads, spec.v_head_dim
    if plan.alone:
        part_o, part_lse, bounds = o, lse, given.seqlens_k  # never touched
    else:
        parts = plan.num_pairs * max_run * num_heads
        part_o = maker.empty((parts, rank), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    maker.launch(
        _latent_kernel,
        (plan.num_pairs, triton.cdiv(max_run * num_heads, config.tile_m)),
        *_arguments(given, o, lse, part_o, part_lse, bounds),
        spec.num_seqs,
        spec.num_tokens,
        *reach_of(spec, given.latent_cache),
        max_run,
        plan.target_pairs,
        plan.split_tiles,
        plan.num_pairs,
        0,
        spec.softmax_scale * LOG2E.value,
        **_constants(maker, given.latent_cache, spec, config, arch),
        way=Way(False, plan.fixed, plan.alone, clears),
    )
    if plan.alone:
        return
    rows = spec.num_seqs * max_run * num_heads
    # The tile decides the order of the sum, so with batch_invariant it is one for every batch.
    num_warps = 4 if rows <= FEW_ROWS and not spec.batch_invariant else 1
    maker.launch(
        _merge_kernel,
        (spec.num_seqs * max_run, num_heads),
        part_o,
        part_lse,
        bounds,
        given.cu_seqlens_q,
        o,
        lse,
        *o.stride()[:2],
        lse.stride(0),
        spec.num_tokens,
        plan.num_pairs,
        max_run,
        NUM_KV_HEADS=1,
        GROUP=num_heads,
        V_HEAD_DIM=rank,
        TILE_DV=padded_head_dim(rank),
        MERGE_TILE=max(1, MERGE_TILE * num_warps * 128 // padded_head_dim(rank)),
        num_warps=num_warps,
    )


def launch_rows(
    maker: Maker,
    given: LatentTensors,
    o: Tensor,
    lse: Tensor,
    spec: PagedSpec,
    *,
    config: TileConfig,
    split_run: int,
    arch: int,
) -> None:
    """Add to a plan: write rows of o and lse of sequences with more than split_run new tokens.

    Rows after the last sequence are written, too (o = 0, lse = -inf). The arguments are those of
    `launch_splits`.
    """
    # Every sequence wastes less than one tile, so this bounds the tiles of any cu_seqlens_q.
    num_tiles = spec.num_tokens * spec.num_q_heads // config.tile_m + spec.num_seqs
    maker.launch(
        _latent_kernel,
        (num_tiles, 1),
        *_arguments(given, o, lse, o, lse, given.seqlens_k),
        spec.num_seqs,
        spec.num_tokens,
        *reach_of(spec, given.latent_cache),
        0,
        0,
        0,
        num_tiles,
        split_run + 1,
        spec.softmax_scale * LOG2E.value,
        **_constants(maker, given.latent_cache, spec, config, arch),
        way=Way(True, True, True, True),
    )


def _arguments(given: LatentTensors, o: Tensor, lse: Tensor, *parts: Tensor) -> tuple[Any, ...]:
    """Return the first arguments of a launch of the latent kernel: its tensors and their strides.

    Args:
        parts: the partial o and lse of splits, and the table in which splits of a sequence are
            noted; other tensors where a launch has none.
    """
    q_latent, q_rope, cache, table, seqlens_k, cu_seqlens_q, scale = given
    # Without scales the float32 lse is passed, and not read.
    first_scale, *strides = (lse, 0, 0) if scale is None else (scale, *scale.stride()[:2])
    memory = Memory(
        q_latent,
        q_rope,
        as_bytes(cache),
        o,
        lse,
        *parts,
        table,
        seqlens_k,
        cu_seqlens_q,
        first_scale,
    )
    return (
        memory,
        *strides,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *cache.stride()[:2],
        *o.stride()[:2],
        lse.stride(0),
        table.stride(0),
    )


def _constants(
    maker: Maker, cache: Tensor, spec: PagedSpec, config: TileConfig, arch: int
) -> dict[str, Any]:
    """Return the constexpr arguments and options of the latent kernel's launches, except `way`."""
    rank, rope_dim = spec.v_head_dim, spec.head_dim - spec.v_head_dim
    is_narrow = spec.dtype == torch.bfloat16 and spec.cache_dtype in BYTE_DTYPES
    pairs = _has_words(maker, cache, spec, config, arch)
    least = 32 if pairs else 16  # halves of 16 channels
    # So few rows do not use Blackwell's own product.
    widens_once = is_narrow and config.tile_m < 64 and device.runs_ptx() and not pairs
    if widens_once or (pairs and device.runs_ptx()):
        arch = 90
    return {
        "form": Form(
            spec.num_q_heads,
            triton.next_power_of_2(spec.num_q_heads),
            rank,
            rope_dim,
            max(padded_head_dim(rank), least),
            max(padded_head_dim(rope_dim), least),
            spec.block_size,
            cache_kind(spec.cache_dtype, arch),
            widens_once,
            pairs,
            device.runs_ptx(),
        ),
        "TILE_B": TILE_B,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _has_words(maker: Maker, cache: Tensor, spec: PagedSpec, config: TileConfig, arch: int) -> bool:
    """Return whether an 8-bit cache of latents is read in words of two channels.

    It is so for bfloat16 queries with tiles of 16 rows on GPUs that have only mma.sync, whose
    operands come from registers, if all rows are aligned to 16 bytes.
    """
    rank, rope_dim = spec.v_head_dim, spec.head_dim - spec.v_head_dim
    is_narrow = spec.dtype == torch.bfloat16 and spec.cache_dtype in BYTE_DTYPES
    if not (is_narrow and config.tile_m == 16 and has_only_mma_sync(arch)):
        return False
    steps = (*cache.stride()[:2], rank, rope_dim)
    return maker.is_aligned(cache) and not any(x % 16 for x in steps)
