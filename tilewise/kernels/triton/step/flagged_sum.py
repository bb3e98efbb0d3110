"""Sums of many rows over the GPUs of one host, in two shots, with flags beside the numbers.

what     as `shared_sum`: x = round(sum over ranks of round(x of the rank)); r = round(x + residual)
         and y = round(r / rms(r)) * weight. Rank j adds up rows j, j + SIZE, ... and sends y to all
grid     a program for SIZE rows that follow one another, the group: one row of each rank. Programs
         await those of their number on other GPUs, so all of a launch must have room at once
program  sends its rank's numbers of the others' rows to them, and a flag each; awaits the flags of
         its own row, adds up, normalises, sends y and a flag to the others; awaits theirs
traffic  over NVLink 2 (SIZE - 1) / SIZE of the numbers, in words of 16 bytes, and 8 bytes of flags
         a row and rank; what arrives is read once more. `shared_sum` sends twice as much
numerics float32, added in the order of the ranks, by one rank: the same bits on all

**The protocol.** A rank's memory has, for each row of a group, an entry for what rank j sends of
this rank's row (x), and one for the row that rank j has added up (y); each has a flag. A flag says
which sum of the group the entry holds; `epochs` counts them on each device, so that a graph may be
replayed after any other. In sum e a rank

1. writes x into the entries of the owners, then e into their flags;
2. as the owner of a row awaits e in the flags of all, reads the entries, and writes y into the
   entries of all others, then e into their flags;
3. awaits e in the flags of the other rows' owners, and reads the entries.

Entries have two places, of even and odd sums. No rank waits at the end: a rank that writes an
entry of sum e + 2 has ended sum e + 1, for which all ranks had sent x, and each did so after it
had ended sum e and read its entries. (One place would suffice, as a rank sends x of sum e + 1
after it has the answer of e; the second keeps a whole sum between.) Flags have one place: a rank
that sets e + 1 has ended sum e, so that its reader has seen e in this flag. Both hold where groups
are not full, and where other ways take turns with this one (`tests/distributed/test_inbox.py`
walks through all orders).

**The memory's order.** Numbers are plain stores of all threads. Then comes a barrier of the
program, and SIZE of its threads each fence at the scope of the system and store one flag. The
barrier orders the program's stores before the fence, and a fence is cumulative: a thread that
acquires the flag sees all of them. On the other side SIZE threads each load one flag with acquire
at the scope of the system until it is e; the barrier after it orders the plain loads of all
threads behind. They go past L1, which no rule demands. That what was read is not overwritten too
early follows from the same chain: reads come before the barrier and the fence of what is sent
next, and between two kernels of one device the first has ended before the second sends
(`await_previous`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.early import await_previous, begin_next, options

BYTES_PER_WARP = 512  # 16 a thread, of each rank


@triton.jit
def _raise_flags(inboxes_ptr, offset, peers, epoch, SIZE: tl.constexpr, STRONG: tl.constexpr):
    """Set a flag in the memory of some ranks, after all stores of the program so far.

    Args:
        inboxes_ptr: the address of a list of the ranks' memories.
        offset: the offset of the flag in each rank's memory, in bytes.
        peers: a bit set of the ranks.
        epoch: the new value of the flag.
        STRONG: True on a GPU; False for plain stores, as the interpreter can.
    """
    if STRONG:
        tl.debug_barrier()
        # Thread i is for rank i. Shifts by more than 31 give 0.
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred wanted;
                .reg .b32 thread, bit;
                .reg .b64 at;
                mov.u32 thread, %tid.x;
                shr.b32 bit, $3, thread;
                and.b32 bit, bit, 1;
                setp.ne.b32 wanted, bit, 0;
                mad.wide.u32 at, thread, 8, $1;
                @wanted ld.global.b64 at, [at];
                add.s64 at, at, $2;
                @wanted fence.acq_rel.sys;
                @wanted st.relaxed.sys.global.b32 [at], $4;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,l,r,r", [inboxes_ptr.to(tl.int64), offset, peers, epoch], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for rank in tl.static_range(SIZE):
            if (peers >> rank) & 1:
                at = tl.load(inboxes_ptr + rank) + offset
                tl.store(at.to(tl.pointer_type(tl.int32)), epoch)


@triton.jit
def _await_flags(flags_ptr, peers, epoch, SIZE: tl.constexpr, STRONG: tl.constexpr):
    """Wait until the flags that some ranks set in this rank's memory have the value `epoch`.

    After it the data of all these ranks may be read. flags_ptr: the address of SIZE flags, one of
    each rank; peers: a bit set of the ranks to wait for.
    """
    if STRONG:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred wanted, late;
                .reg .b32 thread, bit, seen;
                .reg .b64 at;
                mov.u32 thread, %tid.x;
                shr.b32 bit, $2, thread;
                and.b32 bit, bit, 1;
                setp.ne.b32 wanted, bit, 0;
                mad.wide.u32 at, thread, 4, $1;
                @!wanted bra FOUND;
            AGAIN:
                ld.acquire.sys.global.b32 seen, [at];
                setp.ne.b32 late, seen, $3;
                @late bra AGAIN;
            FOUND:
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r", [flags_ptr.to(tl.int64), peers, epoch], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
        tl.debug_barrier()
    else:
        ranks = tl.arange(0, SIZE)
        wanted = (peers >> ranks) & 1 != 0
        seen = tl.load(flags_ptr + ranks, mask=wanted, other=0, volatile=True)
        while tl.max((wanted & (seen != epoch)).to(tl.int32), 0) > 0:
            seen = tl.load(flags_ptr + ranks, mask=wanted, other=0, volatile=True)


@triton.jit
def _addends(
    x_ptr,
    ids_ptr,
    rows,
    inside,
    column,
    stride_x,
    stride_part,
    first,
    end,
    dtype: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERS: tl.constexpr,
):
    """Return this rank's addends of some rows (R,), (R, TILE), rounded to `dtype`.

    They are 0 where `inside` (R, TILE) is False. With GATHERS a row is the embedding of a token of
    ids_ptr, 0 for a token outside of first ... end - 1; with PARTS > 1 it is the sum of PARTS
    float32 parts, stride_part apart.
    """
    if GATHERS:
        token = tl.load(ids_ptr + rows, mask=tl.max(inside.to(tl.int32), 1) > 0, other=-1)
        is_ours = (token >= first) & (token < end)
        at = x_ptr + ((token - first) * stride_x)[:, None] + column[None, :]
        x = tl.load(at, mask=inside & is_ours[:, None], other=0.0)
    elif PARTS > 1:
        at = x_ptr + (rows * stride_x)[:, None] + column[None, :]
        x = tl.load(at, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            x += tl.load(at + part * stride_part, mask=inside, other=0.0)
    else:
        at = x_ptr + (rows * stride_x)[:, None] + column[None, :]
        x = tl.load(at, mask=inside, other=0.0)
    return x.to(dtype)


# The numbers of ranks and rows are not compiled in: all ranks run the same code.
@triton.jit(do_not_specialize=["rank", "rows", "first", "end"])
def _flagged_sum_kernel(
    x_ptr,
    ids_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    inboxes_ptr,
    epochs_ptr,
    stride_x,
    stride_residual,
    stride_part,
    first,
    end,
    eps,
    rank,
    rows,
    most_rows,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STRONG: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    WIDTH: tl.constexpr = dtype.primitive_bitwidth // 8
    group = tl.program_id(0)
    column = tl.arange(0, TILE)
    in_row = column < DIM
    # Loaded first: these do not depend on the kernel before.
    if HAS_NORM:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    # The others begin with the next rank: at any time all links are used, not those to one rank.
    turns = (rank + 1 + tl.arange(0, SIZE)) % SIZE
    bases = tl.load(inboxes_ptr + turns).to(tl.pointer_type(dtype))
    bases = tl.multiple_of(bases, 16)
    own = tl.load(inboxes_ptr + rank).to(tl.pointer_type(dtype))
    own = tl.multiple_of(own, 16)
    zero = tl.full((), 0, tl.int64)
    begin = zero + group * SIZE  # the group's first row
    flags = (zero + most_rows) * (4 * DIM * WIDTH)  # offsets of the flags: x's, then y's
    own_flags = tl.load(inboxes_ptr + rank) + flags
    own_flags = own_flags.to(tl.pointer_type(tl.int32)) + begin
    mine = begin + rank
    has_mine = mine < rows
    present = tl.minimum(rows - group * SIZE, SIZE)
    peers = ((1 << present) - 1) & ~(1 << rank)  # the ranks that own a row of the group
    everyone = ((1 << SIZE) - 1) & ~(1 << rank)
    goal = total_ptr
    if HAS_NORM:
        goal = y_ptr
    await_previous(EARLY)
    epoch = tl.load(epochs_ptr + group) + 1
    # Entries: (x or y, even or odd, row, DIM).
    x_place = (zero + (epoch & 1) * most_rows + begin) * DIM
    y_place = x_place + (zero + 2 * most_rows) * DIM

    elsewhere = ((turns != rank) & (begin + turns < rows))[:, None] & in_row[None, :]
    sent = _addends(
        x_ptr,
        ids_ptr,
        begin + turns,
        elsewhere,
        column,
        stride_x,
        stride_part,
        first,
        end,
        dtype,
        PARTS,
        GATHERS,
    )
    tl.store(bases[:, None] + (x_place + rank * DIM) + column[None, :], sent, mask=elsewhere)
    # This rank's own addends are loaded while the others' values arrive.
    one = tl.arange(0, 1)
    here = (has_mine & in_row)[None, :]
    x_mine = _addends(
        x_ptr,
        ids_ptr,
        mine + one,
        here,
        column,
        stride_x,
        stride_part,
        first,
        end,
        dtype,
        PARTS,
        GATHERS,
    )
    if HAS_RESIDUAL:
        stream = residual_ptr + mine * stride_residual + column
        residual = tl.load(stream, mask=has_mine & in_row, other=0.0).to(tl.float32)
    _raise_flags(inboxes_ptr, flags + 4 * mine, peers, epoch, SIZE, STRONG)

    if has_mine:
        _await_flags(own_flags, everyone, epoch, SIZE, STRONG)
        ranks = tl.arange(0, SIZE)
        entries = own + x_place + (ranks * DIM)[:, None] + column[None, :]
        theirs = (ranks != rank)[:, None] & in_row[None, :]
        found = tl.load(entries, mask=theirs, other=0.0, cache_modifier=".cg")
        found = tl.where((ranks == rank)[:, None], x_mine, found)
        x = tl.sum(found.to(tl.float32), 0).to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            x = (x + residual).to(dtype).to(tl.float32)
        y = x.to(dtype)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
            y = ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)
        goals = bases[:, None] + (y_place + rank * DIM) + column[None, :]
        everywhere = (turns != rank)[:, None] & in_row[None, :]
        tl.store(goals, tl.broadcast_to(y[None, :], (SIZE, TILE)), mask=everywhere)
        y_flags = flags + 4 * (zero + most_rows)
        _raise_flags(inboxes_ptr, y_flags + 4 * mine, everyone, epoch, SIZE, STRONG)
        # No rank waits for these.
        out = mine * DIM + column
        tl.store(total_ptr + out, x.to(dtype), mask=in_row)
        if HAS_NORM:
            tl.store(y_ptr + out, y, mask=in_row)

    _await_flags(own_flags + most_rows, peers, epoch, SIZE, STRONG)
    answers = own + y_place + (turns * DIM)[:, None] + column[None, :]
    got = tl.load(answers, mask=elsewhere, other=0.0, cache_modifier=".cg")
    to = goal + ((begin + turns) * DIM)[:, None] + column[None, :]
    tl.store(to, got, mask=elsewhere)
    tl.store(epochs_ptr + group, epoch)


@planned
def launch(
    maker: Maker,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    total: Tensor,
    *,
    inboxes: Tensor,
    epochs: Tensor,
    rank: int,
    size: int,
    most_rows: int,
    parts: int = 0,
    ids: Tensor | None = None,
    first: int = 0,
    end: int = 0,
    is_strong: bool = True,
) -> None:
    """Write to total (rows, E) the sum of all ranks' x plus the residual, and to y its RMS norm.

    Args:
        x, residual, weight, parts, ids, first, end, is_strong: as in `shared_sum.launch`.
        inboxes: (size,) int64, the address of each rank's memory, a multiple of 16; the memory has
            zeros before the first sum.
        epochs: (most_rows / size,) int32, this rank's number of sums of each group so far.
        most_rows: the number of rows for which there is memory, a multiple of `size`. Others' rows
            of `total` are not written if there is a norm.
    """
    rows, dim = total.shape
    tile = triton.next_power_of_2(dim)
    added = total if residual is None else residual
    maker.launch(
        _flagged_sum_kernel,
        triton.cdiv(rows, size),
        x,
        x if ids is None else ids,
        added,
        total if weight is None else weight,
        y,
        total,
        inboxes,
        epochs,
        x.stride(-2),
        added.stride(0),
        x.stride(0) if parts else 0,
        first,
        end,
        eps,
        rank,
        rows,
        most_rows,
        DIM=dim,
        TILE=tile,
        SIZE=size,
        PARTS=parts,
        GATHERS=ids is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        STRONG=is_strong,
        num_warps=min(16, max(1, tile * total.itemsize // BYTES_PER_WARP)),
        **options("norm"),
    )
