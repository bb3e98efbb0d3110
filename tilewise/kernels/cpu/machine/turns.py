"""The order in which tasks add to shared sums, so that bits do not depend on threads.

What      the tasks of one head, a chunk of keys each, add to its dq in the order of their chunks,
          so that one copy of dq serves them all and bits do not depend on threads.
Grid      none: called by the tasks of `attention/backward.py` and `attention/backward_amx.py`.
One task  goes through its rows from the first to the last. Before it adds to some rows it waits
          until the task before has published them, which has waited for its own predecessor.
Traffic   one int64 per task; tasks of one head are started far apart if there are many heads, and
          follow one another by some rows if there are few.
Numerics  none. A task waits only for tasks started before it, so one of them never waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine.threads import inner


class Turn(NamedTuple):
    """A task's position in the order.

    Attributes:
        done: the number of rows that each task has added to, over all sequences and heads.
        task, before: the numbers of this task and of the one to wait for, below 0 for none.
        base: the rows of the sequences and heads that this task has finished.
    """

    done: np.ndarray
    task: int
    before: int
    base: int


@intrinsic
def _read(typingctx, done, task):
    """Return done[task], ordered before all later reads of what its task wrote."""

    def codegen(context, builder, sig, args):
        data = cgutils.create_struct_proxy(done)(context, builder, value=args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(done, types.int64), codegen


@intrinsic
def _write(typingctx, done, task, rows):
    """Store done[task] = rows, ordered after all that this thread wrote before."""

    def codegen(context, builder, sig, args):
        data = cgutils.create_struct_proxy(done)(context, builder, value=args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(done, types.int64, types.int64), codegen


@inner
def wait_for_rows(turn, last_row):
    """Wait until the task before has added to all rows of this sequence and head up to last_row."""
    while turn.before >= 0 and _read(turn.done, turn.before) < turn.base + last_row:
        pass


@inner
def wait_for_count(counter, number):
    """Wait until tasks have counted to `number`, by `next_task`."""
    while _read(counter, 0) < number:
        pass


@inner
def publish_rows(turn, last_row):
    """Report that this task has added to all rows up to last_row, so that the next task may."""
    _write(turn.done, turn.task, turn.base + last_row)


@inner
def end_turn(turn, num_rows):
    """Wait for the task before, and publish that this task has added to all rows of a head.

    Args:
        turn: the Turn of this task.
        num_rows: the rows of the sequence.

    Returns:
        The Turn for the next pair of sequence and head, with base raised by num_rows.
    """
    wait_for_rows(turn, num_rows)
    publish_rows(turn, num_rows)
    return Turn(turn.done, turn.task, turn.before, turn.base + num_rows)
