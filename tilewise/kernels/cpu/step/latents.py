"""Attention over cached latents in a step: one row of each sequence, by the kernels of a prompt.

What      o = softmax(scale (q_latent . z + q_rope . k_rope)) z of each row and head; see
          `latent/kernel.py`.
Grid      the tasks of that kernel, shared by the threads of a step: first those that attend, then,
          as an operation of its own, those that merge what long sequences were split into.
One task  that of `latent/kernel.py`. Traffic   that of `latent/kernel.py`. Numerics  those of
`latent/kernel.py`: where keys are split depends on a sequence's length alone if the list is
          batch-invariant, else on the lengths of all.
"""

from __future__ import annotations

import numpy as np
from numba import typeof, types

from tilewise.kernels.cpu.latent.kernel import MERGE_ROWS, SPLIT, Arrays, Sizes, place_runs
from tilewise.kernels.cpu.latent.tiles import ACC_PAD
from tilewise.kernels.cpu.machine.calls import call_at, empty_of
from tilewise.kernels.cpu.machine.frame import array_at, reader
from tilewise.kernels.cpu.machine.threads import borrowed, keep_alive, kernel
from tilewise.kernels.cpu.step.codes import (
    CHUNK,
    EXTRA,
    EXTRA_ROW,
    FRAME,
    PHASE,
    Q_AT,
    SOURCE,
    TARGET,
)

ATTEND_LATENTS, MERGE = range(2)
NUM_STARTS = 11
_SIZES = typeof(Sizes(*[1] * 22, 1.0, True))
_read_sizes = reader(_SIZES)


@kernel
def attend_rows_to_latents(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Run one phase of attention to latents, ATTEND_LATENTS or MERGE as op[PHASE] says: an
    operation of a step, whose tasks this thread takes beside the others until none is left.

    The columns of `op`: FRAME, the address of the words of `Sizes`, with the split_keys of the
    batch left out; SOURCE and Q_AT, the addresses of latent queries and, in the same rows, of
    rotated ones; EXTRA, the address of the kernel of the phase; EXTRA_ROW, the bytes of an operand
    of its products; CHUNK, the tasks among which keys are split, 0 if a length alone decides.
    """
    starts = np.empty((len(batch.lengths), NUM_STARTS), np.int64)
    frame = array_at(op[FRAME], types.int64(24), starts[0])
    given = _read_sizes(frame, 0)
    split_keys = types.int64(0)
    if op[CHUNK] > 0:
        blocks = (given.num_heads + given.block_rows - 1) // given.block_rows
        keys = types.int64(0)
        for sequence in range(len(batch.lengths)):
            keys += blocks * types.int64(batch.lengths[sequence])
        split_keys = max(types.int64(SPLIT), keys // op[CHUNK])
    num_rows = len(batch.ids)
    sizes = Sizes(
        given.num_heads,
        given.rank,
        given.rope_dim,
        given.q_code,
        given.cache_code,
        given.row_size,
        given.q_row,
        given.q_head,
        given.rope_row,
        given.rope_head,
        given.o_row,
        given.o_head,
        num_rows,
        given.cache,
        given.cache_block,
        given.cache_row,
        given.scale,
        given.scale_block,
        given.scale_row,
        given.block_size,
        given.block_rows,
        split_keys,
        given.scale_log2,
        given.uses_amx,
    )
    num_tasks, num_slots = place_runs(
        sizes, starts, batch.edges, batch.lengths, op[SOURCE], op[Q_AT], op[TARGET]
    )
    rows = num_slots * sizes.block_rows
    width = (sizes.rank + 31) // 32 * 32 + ACC_PAD
    base = types.int64(work.sums.ctypes.data)
    arrays = Arrays(
        borrowed(like),
        empty_of(op[EXTRA_ROW]),
        borrowed(starts),
        batch.table,
        array_at(base, rows * width, like),
        array_at(base + 4 * rows * width, rows, like),
        array_at(base + 4 * rows * (width + 1), rows, like),
    )
    if op[PHASE] == MERGE:
        num_tasks = types.int64(0)
        if num_slots > 0:
            num_tasks = (num_rows * sizes.num_heads + MERGE_ROWS - 1) // MERGE_ROWS
    if num_tasks > 0:
        call_at(op[EXTRA], (sizes, arrays, work.lse, counter, num_tasks))
    keep_alive(starts)
