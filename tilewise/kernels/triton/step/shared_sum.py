"""Sums of the rows of all ranks' GPUs, with the residual stream and the norm that follow.

what     x = round(sum over ranks of round(x of the rank)); r = round(x + residual), where there is
         a residual; y = round(r / rms(r)) * weight, where a norm is asked for. A rank's x may come
         in parts, float32, or be rows of its part of an embedding
grid     programs that each take rows in turn, the same on all ranks
program  puts a row's numbers into the inbox of every rank, and waits for those of the others in its
         own. A word of 8 bytes holds 4 bytes of numbers and 4 that say which sum of this row they
         belong to: it arrives whole, so there is no barrier, and no fence before a signal
         DEALT: the rank whose turn the row is gets the numbers of all, and sends y to the others.
         They need no residual, and get none: only a row's own rank has it
traffic  over NVLink twice what the numbers take, to (SIZE - 1) ranks; DEALT 2 (SIZE - 1) / SIZE of
         them, of which twice
numerics float32, added in the order of the ranks by the same code on all: the same bits on all

An inbox has two places for a row, which sums take in turn. A rank that writes a place for the
second time has the numbers of all ranks for the sum between, and they were sent after their sender
had read the place for the first time (`tests/distributed/test_inbox.py` walks through all orders).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.early import await_previous, begin_next, options

# Most programs of a launch. Those of one number on different GPUs wait for one another, so all of a
# launch must fit on a device beside whatever begins early: an H100 has 132 multiprocessors.
MOST_PROGRAMS = 128
WORDS_PER_WARP = 128  # 4 a thread, of each rank
MOST_WORDS = 16384  # of a row and all ranks: as many as the registers of a program hold


@triton.jit
def _put(pointers, words, inside, STRONG: tl.constexpr):
    """Store words of 8 bytes, each of which another GPU sees whole or not at all.

    pointers: the addresses, also in other GPUs' memory; inside: which words are stored; STRONG:
    False for plain stores, as the interpreter can.
    """
    if STRONG:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred wanted;
                setp.ne.b32 wanted, $3, 0;
                @wanted st.relaxed.sys.global.b64 [$1], $2;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,l,r", [pointers.to(tl.int64), words, inside.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointers, words, mask=inside)


@triton.jit
def _packed(low, high, epoch, PACKED: tl.constexpr):
    """Return 8-byte words: numbers in the lower half, the number of the sum in the upper half.

    With PACKED the numbers are two of 16 bits, `low` and `high`; otherwise `low` of 32 bits.
    """
    if PACKED:
        bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        bits |= high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = low.to(tl.int32, bitcast=True)
    return (bits.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def _low(words, dtype: tl.constexpr, PACKED: tl.constexpr):
    bits = words.to(tl.int32)
    if PACKED:
        return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, dtype: tl.constexpr):
    bits = words.to(tl.int32) >> 16
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _wait_for(pointers, inside, epoch):
    """Wait until all words (ranks, columns) at `pointers` belong to sum `epoch`; return them.

    Where `inside` is False nothing is read or awaited, and the numbers of the word are 0.
    """
    wanted = epoch.to(tl.int64) << 32
    words = tl.load(pointers, mask=inside, other=wanted, volatile=True)
    while tl.max(tl.max(((words ^ wanted) >> 32 != 0).to(tl.int32), 1), 0) > 0:
        words = tl.load(pointers, mask=inside, other=wanted, volatile=True)
    return words


@triton.jit
def _addends(
    x_ptr,
    ids_ptr,
    row,
    column,
    inside,
    stride_x,
    stride_part,
    first,
    end,
    dtype: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERS: tl.constexpr,
):
    """Return this rank's addends of some columns of a row, rounded to `dtype`.

    They are 0 where `inside` is False. With GATHERS the row is the embedding of a token of ids_ptr,
    0 for a token outside of first ... end - 1; with PARTS > 1 it is the sum of PARTS float32 parts,
    stride_part apart.
    """
    if GATHERS:
        token = tl.load(ids_ptr + row)
        is_ours = (token >= first) & (token < end)
        at = x_ptr + (token - first) * stride_x + column
        x = tl.load(at, mask=inside & is_ours, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            at = x_ptr + part * stride_part + row * stride_x + column
            x += tl.load(at, mask=inside, other=0.0)
    return x.to(dtype)


# The numbers of ranks and rows are not compiled in: all ranks run the same code.
@triton.jit(do_not_specialize=["rank", "rows", "first", "end"])
def _sum_kernel(
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
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEALT: tl.constexpr,
    PACKED: tl.constexpr,
    STRONG: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    WORDS: tl.constexpr = DIM // 2 if PACKED else DIM
    column = tl.arange(0, TILE)
    inside = column < WORDS
    # Loaded first: these do not depend on the kernel before.
    if HAS_NORM:
        weight_low = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if PACKED:
            weight_high = tl.load(weight_ptr + WORDS + column, mask=inside, other=0.0)
            weight_high = weight_high.to(tl.float32)
    ranks = tl.arange(0, RANKS)
    bases = tl.load(inboxes_ptr + ranks, mask=ranks < SIZE, other=0)
    own = tl.multiple_of(tl.load(inboxes_ptr + rank).to(tl.pointer_type(tl.int64)), 16)
    everywhere = (ranks < SIZE)[:, None] & inside[None, :]
    elsewhere = everywhere & (ranks != rank)[:, None]
    zero = tl.full((), 0, tl.int64)
    answers = (zero + most_rows) * (2 * SIZE * WORDS)  # offset of the answers in an inbox
    await_previous(EARLY)

    if DEALT:
        # Values that other ranks wait for are sent first.
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            if row % SIZE != rank:
                epoch = tl.load(epochs_ptr + row) + 1
                low = _addends(
                    x_ptr,
                    ids_ptr,
                    zero + row,
                    column,
                    inside,
                    stride_x,
                    stride_part,
                    first,
                    end,
                    dtype,
                    PARTS,
                    GATHERS,
                )
                high = low
                if PACKED:
                    high = _addends(
                        x_ptr,
                        ids_ptr,
                        zero + row,
                        WORDS + column,
                        inside,
                        stride_x,
                        stride_part,
                        first,
                        end,
                        dtype,
                        PARTS,
                        GATHERS,
                    )
                place = (zero + (epoch & 1) * most_rows + row) * (SIZE * WORDS)
                at = tl.load(inboxes_ptr + row % SIZE).to(tl.pointer_type(tl.int64))
                at = tl.multiple_of(at, 16) + place + rank * WORDS
                _put(at + column, _packed(low, high, epoch, PACKED), inside, STRONG)

    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        is_mine = True
        if DEALT:
            is_mine = row % SIZE == rank
        if is_mine:
            epoch = tl.load(epochs_ptr + row) + 1
            low = _addends(
                x_ptr,
                ids_ptr,
                zero + row,
                column,
                inside,
                stride_x,
                stride_part,
                first,
                end,
                dtype,
                PARTS,
                GATHERS,
            )
            high = low
            if PACKED:
                high = _addends(
                    x_ptr,
                    ids_ptr,
                    zero + row,
                    WORDS + column,
                    inside,
                    stride_x,
                    stride_part,
                    first,
                    end,
                    dtype,
                    PARTS,
                    GATHERS,
                )
            place = (zero + (epoch & 1) * most_rows + row) * (SIZE * WORDS)
            words = _packed(low, high, epoch, PACKED)
            if DEALT:
                _put(own + place + rank * WORDS + column, words, inside, STRONG)
            else:
                to = bases[:, None] + 8 * (place + rank * WORDS + column)[None, :]
                sent = tl.broadcast_to(words[None, :], (RANKS, TILE))
                _put(to.to(tl.pointer_type(tl.int64)), sent, everywhere, STRONG)
            # The residual is loaded while the others' values arrive.
            if HAS_RESIDUAL:
                at = residual_ptr + (zero + row) * stride_residual + column
                residual_low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                if PACKED:
                    residual_high = tl.load(at + WORDS, mask=inside, other=0.0).to(tl.float32)
            found = _wait_for(
                own + place + ranks[:, None] * WORDS + column[None, :], everywhere, epoch
            )
            x_low = tl.sum(_low(found, dtype, PACKED), 0).to(dtype).to(tl.float32)
            x_high = x_low
            if PACKED:
                x_high = tl.sum(_high(found, dtype), 0).to(dtype).to(tl.float32)
            if HAS_RESIDUAL:
                x_low = (x_low + residual_low).to(dtype).to(tl.float32)
                if PACKED:
                    x_high = (x_high + residual_high).to(dtype).to(tl.float32)
            out = (zero + row) * DIM + column
            tl.store(total_ptr + out, x_low.to(dtype), mask=inside)
            if PACKED:
                tl.store(total_ptr + out + WORDS, x_high.to(dtype), mask=inside)
            y_low, y_high = x_low.to(dtype), x_high.to(dtype)
            if HAS_NORM:
                squares = tl.sum(x_low * x_low, 0)
                if PACKED:
                    squares += tl.sum(x_high * x_high, 0)
                scale = tl.rsqrt(squares / DIM + eps)
                y_low = ((x_low * scale).to(dtype).to(tl.float32) * weight_low).to(dtype)
                tl.store(y_ptr + out, y_low, mask=inside)
                if PACKED:
                    y_high = (x_high * scale).to(dtype).to(tl.float32)
                    y_high = (y_high * weight_high).to(dtype)
                    tl.store(y_ptr + out + WORDS, y_high, mask=inside)
            if DEALT:
                answer = answers + (zero + (epoch & 1) * most_rows + row) * WORDS
                to = bases[:, None] + 8 * (answer + column)[None, :]
                y_words = _packed(y_low, y_high, epoch, PACKED)
                sent = tl.broadcast_to(y_words[None, :], (RANKS, TILE))
                _put(to.to(tl.pointer_type(tl.int64)), sent, elsewhere, STRONG)
            tl.store(epochs_ptr + row, epoch)

    if DEALT:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            if row % SIZE != rank:
                epoch = tl.load(epochs_ptr + row) + 1
                answer = answers + (zero + (epoch & 1) * most_rows + row) * WORDS
                got = _wait_for((own + answer + column)[None, :], inside[None, :], epoch)
                got = tl.reshape(got, (TILE,))
                out = (zero + row) * DIM + column
                goal = total_ptr
                if HAS_NORM:
                    goal = y_ptr
                tl.store(goal + out, _low(got, dtype, PACKED).to(dtype), mask=inside)
                if PACKED:
                    tl.store(goal + out + WORDS, _high(got, dtype).to(dtype), mask=inside)
                tl.store(epochs_ptr + row, epoch)


def words_of(dim: int, itemsize: int) -> int:
    """Return the number of 8-byte words of a row, each with 4 bytes of values.

    Args:
        dim, itemsize: the elements of a row and the bytes of one.
    """
    return dim * itemsize // 4


def inbox_words(dim: int, itemsize: int, size: int, most_rows: int) -> int:
    """Return the number of 8-byte words of a rank's inbox for sums over ranks.

    It has two places, used in turn, for each row of each rank, and for each row of the sum.

    Args:
        dim, itemsize: the elements of a row and the bytes of one.
        size: the number of ranks.
        most_rows: the largest number of rows of a sum.
    """
    return 2 * most_rows * (size + 1) * words_of(dim, itemsize)


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
    is_dealt: bool,
    parts: int = 0,
    ids: Tensor | None = None,
    first: int = 0,
    end: int = 0,
    is_strong: bool = True,
) -> None:
    """Write to total (rows, E) the sum of all ranks' x plus the residual, and to y its RMS norm.

    All ranks must launch it for the same rows: programs wait for the numbers of other ranks.

    Args:
        x: (rows, E), this rank's addends; with `parts` (P, rows, E) float32, which are summed; with
            `ids` (n, E), the embeddings of this rank's tokens.
        residual: (rows, E), last dim contiguous, or None.
        weight: (E,), the weight of the norm, or None: then y is not written.
        inboxes: (size,) int64, the address of each rank's inbox.
        epochs: (most_rows,) int32, this rank's number of sums of each row so far.
        is_dealt: True if each rank adds up its share of the rows; others' rows of `total` are not
            written if there is a norm.
        parts: the number P of parts of x, 0 for none.
        ids: (rows,) int64 tokens, of which this rank has first ... end - 1; None for rows of x.
        is_strong: True to store words as other GPUs need it, False as the interpreter can.
    """
    rows, dim = total.shape
    words = words_of(dim, total.itemsize)
    tile = triton.next_power_of_2(words)
    added = total if residual is None else residual
    maker.launch(
        _sum_kernel,
        min(rows, MOST_PROGRAMS),
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
        len(epochs),
        DIM=dim,
        TILE=tile,
        SIZE=size,
        RANKS=triton.next_power_of_2(size),
        PARTS=parts,
        GATHERS=ids is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        DEALT=is_dealt,
        PACKED=total.itemsize == 2,
        STRONG=is_strong,
        num_warps=min(16, max(1, tile // WORDS_PER_WARP)),
        **options("norm"),
    )
