"""Run a list of operations on the threads that share it: a model's step, without Python.

What      rows of an int64 array are the operations: embed, normalise, multiply by weights, rotate
          and write to the cache, attend, each from buffer to buffer; see `program.py`.
Grid      every thread walks the whole list; the tasks of an operation are shared, see `meeting.py`.
          Helpers wait here for the next step, see `crew.py`.
One task  some rows, or some weights for up to some hundred rows, or a task of `paged/decode.py`.
Traffic   that of the operations; between two of them only two atomic counters.
Numerics  those of `layers.py`, `paged/rope_write.py` and `paged/decode.py`. The division into tasks
          depends on the number of threads, the computation of an element does not.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from tilewise.kernels.cpu.attention.frame import FRAME_WORDS, moved_frame, read_problem
from tilewise.kernels.cpu.attention.problem import K_LEN, NUM_STARTS
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.calls import call_at, empty_of
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.rows import load_row
from tilewise.kernels.cpu.machine.threads import (
    borrowed,
    inner,
    keep_alive,
    kernel,
    scratch,
)
from tilewise.kernels.cpu.paged.decode import place_sequences, plan_decode
from tilewise.kernels.cpu.paged.decode_tiles import heads_of_task
from tilewise.kernels.cpu.paged.quantise import INT8
from tilewise.kernels.cpu.paged.rope_write import Rows, move_heads
from tilewise.kernels.cpu.step.codes import (
    ADD,
    ALPHA,
    ANGLES,
    ATTEND,
    BETA,
    BIAS,
    CAP,
    CHUNK,
    CHUNK_KEYS,
    CODE,
    COPIES,
    DIM,
    EPILOGUE,
    EPS,
    EXTRA,
    EXTRA_ROW,
    FACTOR,
    FORM,
    FRAME,
    FUNCTION,
    GROUPS,
    GROWTH_FIRST,
    GROWTH_LENGTH,
    HALF,
    INPUTS,
    IS_AFTER,
    IS_INTERLEAVED,
    IS_PART,
    IS_SAMPLED,
    JOINS,
    K_AT,
    K_BIAS,
    K_BLOCK,
    K_CACHE,
    K_HEAD,
    K_NORM,
    K_ROW,
    K_SCALE,
    K_WEIGHT,
    KERNEL,
    KIND,
    LAYER,
    LIMIT,
    NARROW_PANELS,
    NORM,
    NORM_CODE,
    NORM_STEP,
    NUM_KV,
    NUM_Q,
    OUTPUTS,
    OWN_KERNEL,
    PARTS,
    PIECES,
    PRODUCT,
    Q_AT,
    Q_BIAS,
    Q_NORM,
    Q_STEP,
    Q_WEIGHT,
    ROTATE,
    SCALE_BLOCK,
    SCALE_HEAD,
    SCALE_ROW,
    SHIFT,
    SOURCE,
    SOURCE_ROW,
    SOURCE_STEP,
    TARGET,
    TARGET_ROW,
    TARGET_STEP,
    V_AT,
    V_BLOCK,
    V_CACHE,
    V_DIM,
    V_FROM,
    V_HEAD,
    V_ROW,
    V_SCALE,
    V_WEIGHT,
    WEIGHT,
    WINDOW,
)
from tilewise.kernels.cpu.step.crew import (
    close_step,
    enter_step,
    leave_step,
    note_step,
    noted_step,
    open_step,
    wait_for_step,
)
from tilewise.kernels.cpu.step.layers import (
    BLOCK_ROWS,
    bytes_of_group,
    copy_words,
    embed_row,
    multiply_task,
    normalise_row,
    scale_row,
    steps_of_slice,
)
from tilewise.kernels.cpu.step.meeting import (
    LINE,
    SPINS,
    add_at,
    leave,
    read_at,
    wait_until_zero,
    write_at,
)
from tilewise.kernels.cpu.step.panels import STEP, WIDTH
from tilewise.kernels.cpu.step.product import has_tiles, has_words
from tilewise.kernels.cpu.step.words import get, put

# Rows that are multiplied by a block of weights before the next: they fit half of a 2 MiB L2 cache.
CHUNK_BYTES = 1 << 20
TASKS_PER_THREAD = 4  # of a product, so that a late thread leaves little to wait for
# smallest size of a task's weights, 1 us of memory: taking a task costs 0.1 us
FEWEST_BYTES = 1 << 15
TOKENS_PER_TASK = 8  # tokens per task of the operations on rows, if there are many
# Up to this many elements of rows, and this many threads, each thread normalises for itself: a
# meeting takes as long as some thousand elements.
MOST_ELEMENTS, MOST_MEMBERS = 4096, 8
# Positions in `meeting`, in lines: the operation in progress, the number of threads that sleep
# until one ends, three words about stopping, and two counters of each operation.
PROGRESS, WAITERS, STOP, FIRST_COUNTER = 0, 1, 2, 3
# Words of STOP: the number of this step, of the step to stop, which several threads may write, and
# this step's number again if a thread has stopped.
OWN, ASKED, STOPPED = (STOP * LINE // 8 + word for word in range(3))
OWNER = 0  # the owner of a step; helpers have numbers from 1


@inner
def _counters(meeting, op):
    """Return two addresses in `meeting`: of the counter of tasks of operation number `op`, and of
    its counter of threads inside."""
    start = meeting.ctypes.data + (FIRST_COUNTER + 2 * op) * LINE
    return start, start + LINE


@inner
def _head_weight(address, code, row, weight, dim):
    """Load the weight of a norm of heads, `dim` numbers of the dtype `code` at `address`, into the
    scratch `weight`, and return that part of it; an empty array if the address is 0."""
    if address == 0:
        return weight[:0]
    load_row(row, code, weight, 0, address, dim)
    return weight[:dim]


@inner
def _normalise_heads(word_like, like, op, numbers, weight, bias, start, step, first, end, spare):
    """Normalise heads first ... end - 1 of a row in place; head 0 is at the address `start`, and
    heads are `step` bytes apart. Nothing is done without a weight.

    Args:
        weight, bias: the addresses of the weight and the bias of head 0, or 0 for none.
        spare: the address of scratch for a register of words.
    """
    if weight == 0:
        return
    for head in range(first, end):
        at = start + head * step
        other = bias
        if bias != 0:
            other += head * op[NORM_STEP]
        normalise_row(
            word_like,
            like,
            at,
            at,
            weight + head * op[NORM_STEP],
            other,
            op[DIM],
            numbers[EPS],
            numbers[SHIFT],
            1.0,
            op[KIND] | IS_PART,
            False,
            1.0,
            spare,
        )


@inner
def _normalise_values(word_like, like, op, numbers, source, first, end, spare):
    """Write the norms of the values of heads first ... end - 1 to the values' columns of the row at
    address `source`; they are computed from its columns V_FROM on."""
    head = op[V_DIM] * word_like.itemsize
    for number in range(first, end):
        normalise_row(
            word_like,
            like,
            source + op[V_FROM] + number * head,
            source + op[V_AT] + number * head,
            op[V_WEIGHT],
            types.int64(0),
            op[V_DIM],
            numbers[EPS],
            0.0,
            1.0,
            types.int64(IS_PART),
            False,
            1.0,
            spare,
        )


@inner
def _grow(word_like, like, row, dim, factor, spare):
    """Replace the `dim` words at address `row` by round(word * factor) in place; `spare` is the
    address of scratch for a register of words."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    factors = simd.splat(like, factor)
    for column in range(0, dim, lanes):
        at = row + column * size
        if column + lanes <= dim:
            put(word_like, at, simd.mul(get(word_like, at), factors))
            continue
        copy_words(word_like, spare, at, dim - column)  # another head begins within the register
        put(word_like, spare, simd.mul(get(word_like, spare), factors))
        copy_words(word_like, at, spare, dim - column)


@inner
def _rotate(
    word_like, like, op, numbers, shape, tables, batch, token, row, weight, first, end, spare
):
    """Normalise and rotate some heads of a token: queries in place, keys on their way to the cache,
    to which values are written, too. A token with slot -1 writes nothing there.

    Args:
        row, weight: scratch for the channels of a head, and for the weight of its norm.
        first, end: the range of heads to process, of q, k and v one after the other.
        spare: the address of scratch for a register of words.
    """
    size = word_like.itemsize
    dim, half, is_interleaved = op[DIM], op[HALF], op[IS_INTERLEAVED] == 1
    eps, stride = numbers[EPS], op[SOURCE_ROW]
    source = op[SOURCE] + token * stride
    num_q, num_kv, head = op[NUM_Q], op[NUM_KV], dim * size
    angle = batch.positions[token] * tables.row + op[ANGLES]
    cos, sin = tables.cos[angle : angle + half], tables.sin[angle : angle + half]
    none = types.int64(0)
    first_q, end_q = first, min(end, num_q)
    low, high = max(first - num_q, 0), min(end - num_q, num_kv)
    is_after = op[IS_AFTER] == 1
    q_at, k_at = source + op[Q_AT], source + op[K_AT]
    low_v, high_v = max(first - num_q - num_kv, 0), min(end - num_q - num_kv, num_kv)
    if op[V_WEIGHT] != 0 and low_v < high_v:
        _normalise_values(word_like, like, op, numbers, source, low_v, high_v, spare)
    if not is_after:
        _normalise_heads(
            word_like,
            like,
            op,
            numbers,
            op[Q_WEIGHT],
            op[Q_BIAS],
            q_at,
            op[Q_STEP],
            first_q,
            end_q,
            spare,
        )
        _normalise_heads(
            word_like, like, op, numbers, op[K_WEIGHT], op[K_BIAS], k_at, head, low, high, spare
        )
    if first_q < end_q:
        start = q_at + first_q * op[Q_STEP]
        queries = Rows(
            start,
            none,
            op[Q_STEP],
            end_q - first_q,
            dim,
            shape.code,
            start,
            none,
            none,
            op[Q_STEP],
            shape.code,
            0,
            0,
            0,
            0,
            False,
        )
        move_heads(
            queries,
            none,
            none,
            none,
            shape.block_size,
            row,
            _head_weight(op[Q_NORM], op[NORM_CODE], row, weight, dim),
            eps,
            cos,
            sin,
            half,
            is_interleaved,
        )
    if is_after:
        if low < high:
            start = k_at + low * head
            keys = Rows(
                start,
                none,
                head,
                high - low,
                dim,
                shape.code,
                start,
                none,
                none,
                head,
                shape.code,
                0,
                0,
                0,
                0,
                False,
            )
            move_heads(
                keys,
                none,
                none,
                none,
                shape.block_size,
                row,
                weight[:0],
                eps,
                cos,
                sin,
                half,
                is_interleaved,
            )
            half = none
        _normalise_heads(
            word_like,
            like,
            op,
            numbers,
            op[Q_WEIGHT],
            op[Q_BIAS],
            q_at,
            op[Q_STEP],
            first_q,
            end_q,
            spare,
        )
        _normalise_heads(
            word_like, like, op, numbers, op[K_WEIGHT], op[K_BIAS], k_at, head, low, high, spare
        )
    if op[GROWTH_LENGTH] != 0 and first_q < end_q:
        steps = (batch.positions[token] + op[GROWTH_FIRST]) // op[GROWTH_LENGTH]
        if steps > 0:
            factor = types.float32(1.0 + numbers[BETA] * math.log1p(types.float64(steps)))
            for of in range(first_q, end_q):
                _grow(word_like, like, q_at + of * op[Q_STEP], dim, factor, spare)
    slot = batch.slots[token]
    if slot < 0:
        return
    owns = shape.cache_code >= INT8
    if low < high:
        keys = Rows(
            k_at + low * head,
            none,
            head,
            high - low,
            dim,
            shape.code,
            op[K_CACHE] + low * op[K_HEAD],
            op[K_BLOCK],
            op[K_ROW],
            op[K_HEAD],
            shape.cache_code,
            op[K_SCALE] + low * op[SCALE_HEAD],
            op[SCALE_BLOCK],
            op[SCALE_ROW],
            op[SCALE_HEAD],
            owns,
        )
        move_heads(
            keys,
            none,
            none,
            slot,
            shape.block_size,
            row,
            _head_weight(op[K_NORM], op[NORM_CODE], row, weight, dim),
            eps,
            cos,
            sin,
            half,
            is_interleaved,
        )
    if low_v < high_v:
        head = op[V_DIM] * size
        values = Rows(
            source + op[V_AT] + low_v * head,
            none,
            head,
            high_v - low_v,
            op[V_DIM],
            shape.code,
            op[V_CACHE] + low_v * op[V_HEAD],
            op[V_BLOCK],
            op[V_ROW],
            op[V_HEAD],
            shape.cache_code,
            op[V_SCALE] + low_v * op[SCALE_HEAD],
            op[SCALE_BLOCK],
            op[SCALE_ROW],
            op[SCALE_HEAD],
            owns,
        )
        move_heads(
            values, none, none, slot, shape.block_size, row, weight[:0], eps, cos, sin, none, False
        )


@inner
def _attend(op, batch, work, likes, num_threads, starts, splits, frame, block_size, counter):
    """Let every sequence's one row attend to its cached keys, by the tasks of `op` that this thread
    takes beside the others, as `paged/decode_launch.py` would on its own.

    The kernel of attention is called by address: inlined, it would be compiled again for each kind
    of list, and this function for each kind of cache.

    Args:
        starts: the starts of all sequences, filled; this thread's own.
        splits: scratch, (B, 2) int64.
        frame: scratch for the operation's frame, into which this thread's `starts` are written.
        counter: int64 (1,), from which all threads take tasks.
    """
    num_sequences, num_kv_heads = len(starts), op[NUM_KV]
    table = batch.table
    if op[CHUNK_KEYS] != 0 and table.shape[1] * block_size > op[CHUNK_KEYS]:
        table = _enter_chunks(starts, table, op[CHUNK_KEYS], block_size)
    moved_frame(op[FRAME], starts, table, frame)
    like = likes.real
    if likes.in_tiles == 1:
        problem = read_problem(frame, like, empty_of(likes.packed_size))
        heads = heads_of_task(problem.sizes, num_sequences, num_threads)
        num_tasks = num_sequences * num_kv_heads // heads
        call_at(
            likes.attend,
            (problem.sizes, problem.rule, problem.arrays, heads, work.lse, counter, num_tasks),
        )
        if has_tiles(likes.word):
            amx.configure()  # the kernel releases its own
        keep_alive(table)
        return
    num_slots = plan_decode(starts, op[WINDOW], num_kv_heads, splits)
    heads = num_kv_heads
    while num_slots // heads < 4 * num_threads and heads % 2 == 0:
        heads //= 2
    first = op[LAYER] * num_sequences
    finished = work.finished[first : first + num_sequences * num_kv_heads]
    nowhere = types.int64(0)
    call_at(
        likes.attend,
        (
            like,
            empty_of(likes.packed_size),
            empty_of(likes.cache_size),
            frame,
            op[CHUNK],
            True,
            heads,
            splits,
            nowhere,
            nowhere,
            nowhere,
            nowhere,
            nowhere,
            work.sums,
            finished,
            counter,
            num_slots // heads,
        ),
    )
    keep_alive(table)


@inner
def _enter_chunks(starts, table, size, block_size):
    """Restrict each sequence to its last chunk of `size` keys.

    The numbers of keys in `starts` are reduced, in place, to those in the last chunks.

    Args:
        starts: the starts and lengths of the sequences.
        table: the block table.
        size: the keys of a chunk, a multiple of block_size.

    Returns:
        The block table of the last chunks.
    """
    width, blocks = size // block_size, table.shape[1]
    own = np.empty((len(starts), max(min(width, blocks), 1)), table.dtype)
    for sequence in range(len(starts)):
        chunk = max(starts[sequence, K_LEN] - 1, 0) // size
        starts[sequence, K_LEN] -= chunk * size
        needed = (starts[sequence, K_LEN] + block_size - 1) // block_size
        for block in range(min(needed, own.shape[1])):
            own[sequence, block] = table[sequence, chunk * width + block]
    return own


@inner
def _normalise(word_like, like, op, numbers, batch, begin, end, target, spare):
    """Write the norms of rows begin ... end - 1 (of sampled rows, if op says so) to rows at the
    address `target`, or add them there, as the NORM operation `op` says."""
    scale = 1.0
    if op[EXTRA] != 0:
        scale = types.float64(array_at(op[EXTRA], 1, like)[0])
    for row in range(begin, end):
        source = batch.sampled[row] if op[IS_SAMPLED] == 1 else row
        for part in range(op[PARTS]):
            bias = op[BIAS]
            if bias != 0:
                bias += part * op[NORM_STEP]
            normalise_row(
                word_like,
                like,
                op[SOURCE] + source * op[SOURCE_ROW] + part * op[SOURCE_STEP],
                target + row * op[TARGET_ROW] + part * op[TARGET_STEP],
                op[WEIGHT] + part * op[NORM_STEP],
                bias,
                op[INPUTS],
                numbers[EPS],
                numbers[SHIFT],
                numbers[FACTOR],
                op[KIND],
                op[EPILOGUE] == ADD,
                scale,
                spare,
            )


@inner
def _embed(word_like, like, op, factor, batch, row, c, words):
    """Write a token's row of the embedding, times `factor`, plus the row of its position if there
    is a table of these, to the target of `op`.

    Args:
        op: the operation's record: WEIGHT is the table, BIAS that of positions or 0.
        row: the row of the token in the batch.
        c, words: the addresses of scratch.
    """
    inputs, target = op[INPUTS], op[TARGET] + row * op[TARGET_ROW]
    embed_row(word_like, like, batch.ids[row], op[WEIGHT], inputs, op[FORM], target, c, words)
    if op[BIAS] != 0 or factor != 1.0:
        other = types.int64(0)
        if op[BIAS] != 0:
            other = op[BIAS] + batch.positions[row] * inputs * word_like.itemsize
        scale_row(word_like, like, target, inputs, factor, other, c)


@inner
def _rows_per_task(num_rows, num_threads):
    return max(1, min(TOKENS_PER_TASK, num_rows // (2 * num_threads)))


@inner
def _walk(
    ops,
    numbers,
    first,
    last,
    num_threads,
    give_way,
    syscall,
    meeting,
    batch,
    shape,
    tables,
    work,
    likes,
    most_inputs,
    most_narrow,
    most_permuted,
    member,
):
    """Run operations first ... last - 1 as thread number `member`, together with the other threads
    of the step, and return when the list is done or stopped.

    If there are few rows, each thread computes a norm for its own part of the product that follows,
    in rows that no other thread sees, and a rotation after a product is applied by the thread that
    has computed it: each saves a meeting.
    """
    like, word_like = likes.real, likes.word
    num_rows, num_sampled = len(batch.ids), len(batch.sampled)
    if has_tiles(word_like):
        amx.configure()
    c = scratch(2 * BLOCK_ROWS * WIDTH, like)
    wide = scratch(1, like)
    if not has_words(word_like):
        # Rows of a chunk, as many as of the narrower words.
        wide = scratch(max(BLOCK_ROWS * (most_inputs + STEP), CHUNK_BYTES // 4), like)
    # Few rows use narrow weights in slices: a larger scratch would be mapped again in each step.
    steps = steps_of_slice(word_like)
    if num_rows > BLOCK_ROWS:
        steps = max(steps, most_narrow // STEP)
    words = scratch(WIDTH * STEP * steps if most_narrow > 0 else 1, word_like)
    permuted = scratch(1, word_like)
    if most_permuted > 0:
        longest = BLOCK_ROWS * (most_permuted + STEP)
        permuted = scratch(max(longest, CHUNK_BYTES // word_like.itemsize), word_like)
    head_row, head_weight = scratch(shape.most_dim, like), scratch(shape.most_dim, like)
    # Unsigned ints mixed with those of `ops` would become float64, and compile callees twice.
    c_at, words_at = types.int64(c.ctypes.data), types.int64(words.ctypes.data)
    wide_at, permuted_at = types.int64(wide.ctypes.data), types.int64(permuted.ctypes.data)
    starts = np.empty((len(batch.lengths), NUM_STARTS), np.int64)
    splits = np.empty((len(batch.lengths), 2), np.int64)
    frame = np.empty(FRAME_WORDS, np.int64)
    base = meeting.ctypes.data
    waiters = base + WAITERS * LINE
    # Helpers of a pool have no numbers, so no rows of their own.
    joins_norms = num_threads <= MOST_MEMBERS and (num_threads == 1 or syscall != 0)
    index = max(first, read_at(base))
    own = meeting[OWN]
    while index < last:
        if own > 0 and read_at(base + 8 * ASKED) == own:
            write_at(base + 8 * STOPPED, own)
            break  # others may have begun this operation: they finish it without this thread
        if read_at(base) < index:
            write_at(base, index)
        op = ops[index]
        code = op[CODE]
        counter, active = _counters(meeting, index)
        add_at(active, 1)
        norm = -1
        if code == NORM and joins_norms and index + 1 < last and op[JOINS] == 1:
            rows = num_sampled if op[IS_SAMPLED] == 1 else num_rows
            if rows <= BLOCK_ROWS and rows * op[INPUTS] <= MOST_ELEMENTS:
                norm, index = index, index + 1
                op = ops[index]
                code = op[CODE]
        rows = num_sampled if op[IS_SAMPLED] == 1 else num_rows * op[COPIES]
        if code == PRODUCT:
            source, stride = op[SOURCE], op[SOURCE_ROW]
            if norm >= 0:
                source += member * BLOCK_ROWS * stride
            align = 1
            rotates = op[JOINS] > 0 and index + 1 < last
            if rotates:
                align = op[JOINS]
            row_bytes = stride if has_words(word_like) else 4 * (op[INPUTS] + STEP)
            chunk = max(CHUNK_BYTES // row_bytes // BLOCK_ROWS, 1) * BLOCK_ROWS
            chunks = (rows + chunk - 1) // chunk
            groups, inputs = op[GROUPS], op[INPUTS]
            is_narrow = op[FORM] == NARROW_PANELS
            per_task = groups
            if num_threads > 1:
                parts = TASKS_PER_THREAD * num_threads
                fewest = FEWEST_BYTES // bytes_of_group(word_like, inputs)
                if is_narrow:
                    fewest *= 2
                per_task = max((groups + parts - 1) // parts, fewest, 1)
                per_task = (per_task + align - 1) // align * align
            per_chunk = (groups + per_task - 1) // per_task
            num_runs = chunks * op[PARTS]
            if op[PIECES] != 0:
                num_runs = read_at(op[PIECES])
            held, shown = -1, types.int64(-1)
            while True:
                task = add_at(counter, 1)
                if task >= num_runs * per_chunk:
                    break
                which = task // per_chunk
                start = (task - which * per_chunk) * per_task
                end = min(start + per_task, groups)
                part = which // chunks
                begin = (which - part * chunks) * chunk
                count = min(chunk, rows - begin)
                if op[PIECES] != 0:
                    piece = op[PIECES] + 8 + 24 * which
                    part, begin, count = read_at(piece), read_at(piece + 8), read_at(piece + 16)
                weight, bias = op[WEIGHT], op[BIAS]
                if op[PARTS] > 1:
                    weight, bias = read_at(weight + 16 * part), read_at(weight + 16 * part + 8)
                # while this thread holds a task the rows do not change
                if norm >= 0 and held != which:
                    _normalise(
                        word_like,
                        like,
                        ops[norm],
                        numbers[norm],
                        batch,
                        types.int64(0),
                        rows,
                        source,
                        c_at,
                    )
                extra = op[EXTRA]
                if extra != 0:
                    extra += begin * op[EXTRA_ROW]
                shown = multiply_task(
                    word_like,
                    like,
                    source + begin * stride + part * op[SOURCE_STEP],
                    stride,
                    count,
                    weight,
                    is_narrow,
                    inputs,
                    start,
                    end,
                    bias,
                    op[EPILOGUE],
                    op[FUNCTION],
                    numbers[index, FACTOR],
                    numbers[index, LIMIT],
                    numbers[index, ALPHA],
                    numbers[index, CAP],
                    op[OUTPUTS],
                    extra,
                    op[EXTRA_ROW],
                    op[TARGET] + begin * op[TARGET_ROW] + part * op[TARGET_STEP],
                    op[TARGET_ROW],
                    c_at,
                    wide_at,
                    words_at,
                    permuted_at,
                    shown if held == which else types.int64(-1),
                )
                held = which
                if rotates:
                    dim = ops[index + 1, DIM]
                    num_heads = ops[index + 1, NUM_Q] + 2 * ops[index + 1, NUM_KV]
                    low = start * WIDTH // dim
                    high = min(end * WIDTH // dim, num_heads)
                    for row in range(begin, begin + count):
                        _rotate(
                            word_like,
                            like,
                            ops[index + 1],
                            numbers[index + 1],
                            shape,
                            tables,
                            batch,
                            row,
                            head_row,
                            head_weight,
                            low,
                            high,
                            c_at,
                        )
            if rotates:
                index += 1
        elif code == ATTEND:
            place_sequences(
                starts,
                batch.edges,
                batch.lengths,
                op[SOURCE] + op[Q_AT],
                op[SOURCE_ROW],
                op[TARGET],
                op[TARGET_ROW],
                op[K_CACHE],
                op[V_CACHE],
            )
            place = (FIRST_COUNTER + 2 * index) * (LINE // 8)
            _attend(
                op,
                batch,
                work,
                likes,
                num_threads,
                starts,
                splits,
                frame,
                shape.block_size,
                meeting[place : place + 1],
            )
        elif code >= OWN_KERNEL:
            place = (FIRST_COUNTER + 2 * index) * (LINE // 8)
            call_at(
                op[KERNEL],
                (
                    like,
                    word_like,
                    op,
                    numbers[index],
                    batch,
                    work,
                    meeting[place : place + 1],
                    types.int64(num_threads),
                ),
            )
            if has_tiles(word_like):
                amx.configure()  # the kernel may have released its own
        else:
            per_task = _rows_per_task(rows, num_threads)
            while True:
                begin = add_at(counter, 1) * per_task
                if begin >= rows:
                    break
                end = min(begin + per_task, rows)
                if code == NORM:
                    _normalise(
                        word_like, like, op, numbers[index], batch, begin, end, op[TARGET], c_at
                    )
                    continue
                for row in range(begin, end):
                    if code == ROTATE:
                        _rotate(
                            word_like,
                            like,
                            op,
                            numbers[index],
                            shape,
                            tables,
                            batch,
                            row,
                            head_row,
                            head_weight,
                            types.int64(0),
                            op[NUM_Q] + 2 * op[NUM_KV],
                            c_at,
                        )
                    else:
                        _embed(
                            word_like, like, op, numbers[index, FACTOR], batch, row, c_at, words_at
                        )
        leave(active, waiters, syscall)
        wait_until_zero(active, give_way, waiters, syscall)
        index += 1
    write_at(base, last)
    if has_tiles(word_like):
        amx.release()
    keep_alive((c, wide, words, permuted))


@kernel
def run_list(
    ops,
    numbers,
    first,
    last,
    num_threads,
    give_way,
    syscall,
    meeting,
    batch,
    shape,
    tables,
    work,
    likes,
    most_inputs,
    most_narrow,
    most_permuted,
    mailbox,
    member,
):
    """Run operations first ... last - 1 as the owner of a step and return; or, as a helper, help
    with each step that an owner opens in the mailbox, until told to leave.

    Args:
        ops: (n, NUM_COLUMNS) int64, see the names of its columns; addresses and strides are in
            bytes.
        numbers: (n, NUM_NUMBERS) float64, see the names of its columns.
        give_way, syscall: see `meeting.wait_until_zero`.
        meeting: int64 zeros, 2 n + 3 lines, with the number of a step that may be stopped. When the
            number to stop equals it, a thread that reads it begins no further operation, and
            records that.
        most_inputs: the longest row of a product's input.
        most_narrow, most_permuted: the longest row of a product with a narrow weight, and with one
            that permutes its inputs; 0 without them.
        mailbox: the mailbox, see `crew.py`; all zeros if helpers of a pool call this as owners do.
        member: OWNER, or the number of a helper, which waits for steps of this shape until it shall
            leave; it uses only the dtypes of its own arguments.
    """
    number, looks = types.int64(0), types.int64(SPINS)
    is_shared = num_threads > 1 and syscall != 0
    while True:
        is_open = True
        step = (first, last, num_threads, ops, numbers, meeting, batch, tables, work)
        if member != OWNER:
            number, looks = wait_for_step(mailbox, number, looks, give_way, syscall)
            if number < 0:
                break
            is_open = enter_step(mailbox, number)
            if is_open:
                first, last, num_threads, ops, numbers, meeting, batch, tables, work = noted_step(
                    mailbox, step
                )
                is_open = member < num_threads
        elif is_shared:
            note_step(mailbox, borrowed(step))
            open_step(mailbox, syscall)
        if is_open:
            _walk(
                ops,
                numbers,
                first,
                last,
                num_threads,
                give_way,
                syscall,
                meeting,
                batch,
                shape,
                tables,
                work,
                likes,
                most_inputs,
                most_narrow,
                most_permuted,
                member,
            )
        if member == OWNER:
            if is_shared:
                close_step(mailbox, give_way, syscall)
            break
        leave_step(mailbox, syscall)
