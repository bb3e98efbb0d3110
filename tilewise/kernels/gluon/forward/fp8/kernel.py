"""Attention of e4m3 queries, keys and values on Hopper: the kernel.

What: o = softmax(c q k^T) v with c = softmax_scale * q_scale * k_scale of the head, times v_scale;
      PER_TOKEN, q_scale is a row's and rides in the fma, k_scale a column's, one product more;
      capped or with a sink as the 16-bit kernel does it.
Grid: one CTA an SM; each walks the tiles that `loader` gives it.
One CTA: NUM_CONSUMERS warpgroups of 64 queries each and a producer warp. K and V pass through rings
      of STAGES buffers; P stays in registers.
Traffic: Q, O, lse once; K and V once per tile of queries. V comes transposed and with its keys in
      the order of `device.e4m3`, since the instruction reads operands of one byte along their keys
      only.
Numerics: base 2, float32 for m, the row sums and o. P in [0, 1] is multiplied by 2 ** 8, so that
      e4m3 holds what is above 2 ** -14 of the row's maximum in full precision and 2 ** -17 at all;
      the row sum carries the same factor. See `step` for the sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.compat import tma_store
from tilewise.kernels.gluon.device.e4m3 import byte_sum_layout, pack_e4m3
from tilewise.kernels.gluon.device.warpgroup import LN2, scale_rows
from tilewise.kernels.gluon.forward.epilogue import Output, store_columns
from tilewise.kernels.gluon.forward.fp8.loader import (
    BATCH,
    BATCH_HEAD,
    COUNT,
    FIRST,
    FIRST_K,
    FIRST_Q,
    HEAD,
    KEYS,
    LENGTH_Q,
    NOTES,
    NUMBER,
    ROW,
    SEQUENCE,
    Barriers,
    Buffers,
    Descriptors,
    notes_of,
    produce,
    read_note,
)
from tilewise.kernels.gluon.forward.fp8.masked import attend_masked
from tilewise.kernels.gluon.forward.fp8.step import (
    P_LOG2,
    KeyScales,
    add_values,
    arrive_scheduler,
    logits_of,
    next_tile,
    scales_of_keys,
    scores,
    skip,
    softmax,
    step,
    wait_scheduler,
)
from tilewise.kernels.gluon.forward.scheduler import Rows, Work
from tilewise.kernels.gluon.forward.softmax import finish
from tilewise.kernels.gluon.forward.span import Mask
from tilewise.kernels.gluon.visible import byte_columns


@gluon.jit
def _store(
    acc, o_desc, smem, b, h, row0, PART: gl.constexpr, C: gl.constexpr, CONSUMER: gl.constexpr
):
    WIDTH: gl.constexpr = C.HEAD_DIM // C.PARTS
    buffer = smem.o.index(CONSUMER * C.PARTS + PART)
    if PART == 0:
        tma.store_wait(0)
    buffer.reshape([64, WIDTH]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [b, h, row0, PART * WIDTH], buffer)


@gluon.jit
def _store_packed(
    acc,
    o_desc,
    o_ptr,
    heads,
    smem,
    rows,
    row0,
    PART: gl.constexpr,
    C: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    WIDTH: gl.constexpr = C.HEAD_DIM // C.PARTS
    EIGHTS: gl.constexpr = C.HEAD_DIM // 8
    buffer = smem.o.index(CONSUMER * C.PARTS + PART)
    output = Output(
        o_desc, o_ptr, heads * EIGHTS, EIGHTS, None, None, None, None, None, None, None, None
    )
    store_columns(acc.to(o_desc.dtype), buffer, rows, row0, PART * WIDTH, output, C)


@gluon.jit
def _row_in_tensor(row, smem, slot, C: gl.constexpr):
    """Return where row `row` of the tile's sequence stands among all rows of q."""
    if C.packed:
        return row + read_note(smem.sequences, slot * SEQUENCE + FIRST_Q)
    else:
        return row


@gluon.jit
def _length_of(seqlen_q, smem, slot, C: gl.constexpr):
    """Return the number of queries of the tile's sequence."""
    if C.packed:
        return read_note(smem.sequences, slot * SEQUENCE + LENGTH_Q)
    else:
        return seqlen_q


@gluon.jit
def _scales_of_rows(row, batch_head, smem, slot, q_scale_ptr, seqlen_q, C: gl.constexpr):
    """Return float32 (64,), the factor from products q k^T to logits in base 2 of rows:
    softmax_scale * log2(e) times the scales of the head's q and k, or, PER_TOKEN, times the row's
    scale of q alone."""
    scale = gl.full_like(row, 0).to(gl.float32) + read_note(smem.factors, slot * 2)
    if C.PER_TOKEN:
        at = q_scale_ptr + batch_head.to(gl.int64) * seqlen_q + _row_in_tensor(row, smem, slot, C)
        inside = row < _length_of(seqlen_q, smem, slot, C)
        scale = scale * gl.load(at, mask=inside, other=1.0)
    return scale


@gluon.jit
def _with_cap(scale, softcap, C: gl.constexpr):
    """Return two factors (64,): of the numbers that softmax takes, and of scores inside the
    softcap's tanh; without a softcap both are `scale`.

    Args:
        scale: the factor of scores without a softcap.
        softcap: the call's softcap times log2(e).
    """
    ratio = scale
    if C.softcap != "none":
        ratio = scale / softcap
        scale = gl.full_like(scale, 0.0) + softcap
    return scale, ratio


@gluon.jit
def _consume(own, smem, bars, C: gl.constexpr, CONSUMER: gl.constexpr):
    (
        o_desc,
        lse_ptr,
        q_scale_ptr,
        k_scale_ptr,
        head_group,
        seqlen_q,
        seqlen_k,
        left,
        right,
        sinks_ptr,
        softcap,
        o_ptr,
        heads,
        masked,
    ) = own
    TILE_N: gl.constexpr = C.TILE_N
    HEAD_DIM: gl.constexpr = C.HEAD_DIM
    WIDTH: gl.constexpr = HEAD_DIM // C.PARTS
    s_layout: gl.constexpr = byte_sum_layout(TILE_N)
    o_layout: gl.constexpr = byte_sum_layout(WIDTH)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    done = 0  # tiles of keys
    visit = 0
    if CONSUMER == C.NUM_CONSUMERS - 1:
        arrive_scheduler(CONSUMER, C)
    q = smem.q.index(CONSUMER).reshape([64, HEAD_DIM])
    mbarrier.wait(bars.q_full.index(CONSUMER), 0)
    row0 = read_note(smem.places, CONSUMER * NOTES + ROW)
    while row0 >= 0:
        slot = notes_of(CONSUMER, visit, C)
        first = read_note(smem.places, slot * NOTES + FIRST)
        count = read_note(smem.places, slot * NOTES + COUNT)
        keys = read_note(smem.places, slot * NOTES + KEYS)
        row = row0 + gl.arange(0, 64, rows)
        batch_head = read_note(smem.places, slot * NOTES + BATCH_HEAD)
        scale = _scales_of_rows(row, batch_head, smem, slot, q_scale_ptr, seqlen_q, C)
        scale, ratio = _with_cap(scale, softcap, C)
        m = gl.full([64], float("-inf"), gl.float32, rows)
        blank = gl.zeros([64, TILE_N], gl.float32, s_layout).reshape([64, TILE_N // 8, 4, 2])
        sums = gl.sum(gl.sum(blank, 3), 1)
        acc = gl.zeros([64, WIDTH], gl.float32, o_layout)
        if C.PARTS == 2:
            acc2 = gl.zeros([64, WIDTH], gl.float32, o_layout)
        else:
            acc2 = 0
        if C.mask_keys > 0:
            length_q = _length_of(seqlen_q, smem, slot, C)
            of_b = read_note(smem.places, slot * NOTES + BATCH)
            first_k = 0
            if C.packed:
                of_b = read_note(smem.sequences, slot * SEQUENCE + NUMBER)
                first_k = read_note(smem.sequences, slot * SEQUENCE + FIRST_K)
            mask, mask_batch, mask_head = masked
            work = Work(
                0,
                0,
                0,
                0,
                0,
                head_group,
                seqlen_q,
                seqlen_k,
                left,
                right,
                mask_batch,
                mask_head,
                None,
                None,
            )
            h = read_note(smem.places, slot * NOTES + HEAD)
            tile_rows = Rows(of_b, h, row0 - CONSUMER * 64, 0, length_q, first_k, keys)
            kv_head = (batch_head // head_group).to(gl.int64)
            key_scales_at = k_scale_ptr + kv_head * (gl.cdiv(seqlen_k, 4) * 4) + first_k
            state = (acc, acc2, m, sums, scale, ratio, row, key_scales_at)
            acc, acc2, p, m, sums, alpha, done = attend_masked(
                q, smem, bars, done, state, tile_rows, work, mask, C, CONSUMER
            )
        else:
            # Columns that a row sees, counted from the tile at hand, which is TILE_N further to the
            # left in every step.
            length_q = _length_of(seqlen_q, smem, slot, C)
            begin, end, skipped, masked_until, whole_until = byte_columns(
                row, row0, first, count, length_q, keys, left, right, C
            )
            # Heads of a sequence are whole groups; those of a key head start at whole fours.
            kv_head = (batch_head // head_group).to(gl.int64)
            key_scales_at = k_scale_ptr + kv_head * (gl.cdiv(seqlen_k, 4) * 4)
            last_key = seqlen_k
            if C.packed:
                key_scales_at += read_note(smem.sequences, slot * SEQUENCE + FIRST_K)
                last_key = keys
            of_keys = KeyScales(key_scales_at, first + count - 1, last_key)
            if C.HAS_RIGHT or C.packed:
                for _ in range(skipped):
                    skip(bars, done, CONSUMER, C)
                    done += 1
                end += skipped * TILE_N
                of_keys = next_tile(of_keys, skipped)
                if C.HAS_LEFT:
                    begin += skipped * TILE_N
            # The first tile of keys: scores only.
            stage = done % C.STAGES
            mbarrier.wait(bars.k_full.index(stage), (done // C.STAGES) & 1)
            wait_scheduler(CONSUMER)
            token = scores(q, smem, stage, C)
            arrive_scheduler(CONSUMER, C)
            HAS_END: gl.constexpr = C.HAS_RIGHT or C.HAS_TAIL
            key_scales = scales_of_keys(of_keys, HAS_END, C)
            s = warpgroup_mma_wait(0, deps=(token,))
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
            s = logits_of(s, key_scales, ratio, C)
            p, m, sums, alpha = softmax(s, m, sums, scale, begin, end, C.HAS_LEFT, HAS_END)
            p = pack_e4m3(p)
            done += 1
            if C.HAS_RIGHT:  # the other tiles that some row does not see to their end
                for _ in range(skipped + 1, masked_until):
                    end += TILE_N
                    if C.HAS_LEFT:
                        begin += TILE_N
                    of_keys = next_tile(of_keys, 1)
                    acc, acc2, p, m, sums, alpha = step(
                        q,
                        smem,
                        bars,
                        done,
                        acc,
                        acc2,
                        p,
                        m,
                        sums,
                        alpha,
                        scale,
                        ratio,
                        of_keys,
                        begin,
                        end,
                        None,
                        CONSUMER,
                        C,
                        C.HAS_LEFT,
                        True,
                    )
                    done += 1
            for _ in range(masked_until, whole_until):
                of_keys = next_tile(of_keys, 1)
                acc, acc2, p, m, sums, alpha = step(
                    q,
                    smem,
                    bars,
                    done,
                    acc,
                    acc2,
                    p,
                    m,
                    sums,
                    alpha,
                    scale,
                    ratio,
                    of_keys,
                    begin,
                    end,
                    None,
                    CONSUMER,
                    C,
                    False,
                    False,
                )
                done += 1
            if C.HAS_LEFT:  # the tiles that some row does not see from their start
                begin += (whole_until - masked_until) * TILE_N
                for _ in range(whole_until, count):
                    begin += TILE_N
                    of_keys = next_tile(of_keys, 1)
                    acc, acc2, p, m, sums, alpha = step(
                        q,
                        smem,
                        bars,
                        done,
                        acc,
                        acc2,
                        p,
                        m,
                        sums,
                        alpha,
                        scale,
                        ratio,
                        of_keys,
                        begin,
                        end,
                        None,
                        CONSUMER,
                        C,
                        True,
                        False,
                    )
                    done += 1
        mbarrier.arrive(bars.q_empty.index(CONSUMER), count=1)
        # The last product with values.
        last = (done - 1) % C.STAGES
        mbarrier.wait(bars.v_full.index(last), ((done - 1) // C.STAGES) & 1)
        acc, acc2 = add_values(acc, acc2, p, alpha, smem, last, C)
        mbarrier.arrive(bars.v_empty.index(last), count=1)
        slot = notes_of(CONSUMER, visit, C)
        row0 = read_note(smem.places, slot * NOTES + ROW)
        b = read_note(smem.places, slot * NOTES + BATCH)
        h = read_note(smem.places, slot * NOTES + HEAD)
        batch_head = read_note(smem.places, slot * NOTES + BATCH_HEAD)
        row = row0 + gl.arange(0, 64, rows)
        scale = _scales_of_rows(row, batch_head, smem, slot, q_scale_ptr, seqlen_q, C)
        scale, _ = _with_cap(scale, softcap, C)
        v_scale = read_note(smem.factors, slot * 2 + 1)
        if C.sinks:
            sink = gl.load(sinks_ptr + h)
            lse, inverse = finish(m * scale - P_LOG2, sums, 1.0, sink, False, True)
            inverse = inverse * v_scale
        else:
            total = gl.convert_layout(gl.sum(sums, 1), rows)
            inverse = gl.where(total > 0, v_scale / total, 0.0)
            lse = (m * scale - P_LOG2) * LN2 + gl.log(total)
            lse = gl.where(total > 0, lse, float("-inf"))
        if C.packed:
            first_q = read_note(smem.sequences, slot * SEQUENCE + FIRST_Q)
            length_q = _length_of(seqlen_q, smem, slot, C)
            at = lse_ptr + (batch_head.to(gl.int64) * seqlen_q + first_q) + row
            gl.store(at, lse, mask=row < length_q)
            of_rows = Rows(b, h, row0, first_q, length_q, row0, row0)  # no key is read from it
            o = scale_rows(acc, inverse)
            _store_packed(o, o_desc, o_ptr, heads, smem, of_rows, row0, 0, C, CONSUMER)
            if C.PARTS == 2:
                o = scale_rows(acc2, inverse)
                _store_packed(o, o_desc, o_ptr, heads, smem, of_rows, row0, 1, C, CONSUMER)
        else:
            gl.store(lse_ptr + batch_head.to(gl.int64) * seqlen_q + row, lse, mask=row < seqlen_q)
            _store(scale_rows(acc, inverse), o_desc, smem, b, h, row0, 0, C, CONSUMER)
            if C.PARTS == 2:
                _store(scale_rows(acc2, inverse), o_desc, smem, b, h, row0, 1, C, CONSUMER)
        visit += 1
        mbarrier.wait(bars.q_full.index(CONSUMER), visit & 1)
        row0 = read_note(smem.places, notes_of(CONSUMER, visit, C) * NOTES + ROW)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "row_tiles",
        "tiles",
        "batch_heads",
        "heads",
        "head_group",
        "group",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "mask_batch",
        "mask_head",
    ]
)
def attention_fp8_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    seqlens_ptr,
    counter_ptr,
    softmax_scale,
    row_tiles,
    tiles,
    batch_heads,
    heads,
    head_group,
    group,
    seqlen_q,
    seqlen_k,
    left,
    right,
    sinks_ptr,
    softcap,
    o_ptr,
    plan_ptr,
    size_ptr,
    mask_bits_ptr,
    mask_spans_ptr,
    mask_entries_ptr,
    mask_batch,
    mask_head,
    VARIANT: gl.constexpr,
):
    """Compute o and lse of attention over e4m3 q, k, v with float32 scales; the module's docstring
    has the rule.

    softmax_scale, softcap: times log2(e). group: heads that share the L2 cache. sinks_ptr, softcap:
    None where the call has none. o_ptr, plan_ptr, size_ptr: of a packed batch, else None: o, for
    the last rows of its sequences; its tiles of rows (see sorted_tiles.py) and their number.
    seqlen_q, seqlen_k: then all rows. mask_...: of a block mask, else None, see `forward.kernel`.
    VARIANT: the tile and the compile-time choices.
    """
    C: gl.constexpr = VARIANT
    WIDTH: gl.constexpr = C.HEAD_DIM // C.PARTS
    word: gl.constexpr = mbarrier.MBarrierLayout()
    e4m3: gl.constexpr = gl.float8e4nv
    HEAD_DIM: gl.constexpr = C.HEAD_DIM
    TILE_N: gl.constexpr = C.TILE_N
    NC: gl.constexpr = C.NUM_CONSUMERS
    STAGES: gl.constexpr = C.STAGES
    smem = Buffers(
        gl.allocate_shared_memory(e4m3, [NC, 1, 1, 64, HEAD_DIM], q_desc.layout),
        gl.allocate_shared_memory(e4m3, [STAGES, 1, 1, TILE_N, HEAD_DIM], k_desc.layout),
        gl.allocate_shared_memory(
            e4m3, [STAGES * (HEAD_DIM // WIDTH), 1, 1, WIDTH, TILE_N], v_desc.layout
        ),
        gl.allocate_shared_memory(
            o_desc.dtype, [NC * (HEAD_DIM // WIDTH), 1, 1, 64, WIDTH], o_desc.layout
        ),
        gl.allocate_shared_memory(gl.int32, [2 * NC * NOTES, 1], word),
        gl.allocate_shared_memory(gl.float32, [2 * NC * 2, 1], word),
        None,
    )
    if C.packed:
        sequences = gl.allocate_shared_memory(gl.int32, [2 * NC * SEQUENCE, 1], word)
        smem = Buffers(smem.q, smem.k, smem.v, smem.o, smem.places, smem.factors, sequences)
    bars = Barriers(
        gl.allocate_shared_memory(gl.int64, [NC, 1], word),
        gl.allocate_shared_memory(gl.int64, [NC, 1], word),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], word),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], word),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], word),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], word),
    )
    for i in gl.static_range(NC):
        mbarrier.init(bars.q_full.index(i), count=1)
        mbarrier.init(bars.q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.k_full.index(i), count=1)
        mbarrier.init(bars.k_empty.index(i), count=NC)
        mbarrier.init(bars.v_full.index(i), count=1)
        mbarrier.init(bars.v_empty.index(i), count=NC)
    sizes = (
        row_tiles,
        tiles,
        batch_heads,
        heads,
        head_group,
        group,
        seqlen_q,
        seqlen_k,
        left,
        right,
    )
    descs = Descriptors(q_desc, k_desc, v_desc, o_desc)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    masked = (Mask(mask_bits_ptr, None, mask_spans_ptr, mask_entries_ptr), mask_batch, mask_head)
    own = (
        o_desc,
        lse_ptr,
        q_scale_ptr,
        k_scale_ptr,
        head_group,
        seqlen_q,
        seqlen_k,
        left,
        right,
        sinks_ptr,
        softcap,
        o_ptr,
        heads,
        masked,
    )
    shared = (
        descs,
        counter_ptr,
        seqlens_ptr,
        scales,
        softmax_scale,
        sizes,
        plan_ptr,
        size_ptr,
        masked,
    )
    if NC == 2:
        gl.warp_specialize(
            [
                (_consume, (own, smem, bars, C, 0)),
                (_consume, (own, smem, bars, C, 1)),
                (produce, (shared, smem, bars, C)),
            ],
            [4, 1],
            [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (own, smem, bars, C, 0)),
                (_consume, (own, smem, bars, C, 1)),
                (_consume, (own, smem, bars, C, 2)),
                (produce, (shared, smem, bars, C)),
            ],
            [4, 4, 1],
            [C.CONSUMER_REGISTERS, C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS],
        )
