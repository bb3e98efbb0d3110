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
    """The position of one task in the order in which tasks add rows to shared sums; each task holds
    one, and gets a new one for each pair of sequence and head.

    Attributes:
        done: int64 (tasks,), the number of rows that each task has added to so far, over all its
            sequences and heads; shared by all tasks.
        task, before: the numbers of this task and of the one to wait for, below 0 for none.
        base: the number of rows of the sequences and heads that this task has finished.
    """

    done: np.ndarray
    task: int
    before: int
    base: int


@intrinsic
def _read(typingctx, done, task):
    """Return done[task], an atomic load that is ordered before all later reads of what that task
    wrote."""

    def codegen(context, builder, sig, args):
        data = cgutils.create_struct_proxy(done)(context, builder, value=args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(done, types.int64), codegen


@intrinsic
def _write(typingctx, done, task, rows):
    """Store `rows` to done[task], an atomic store that is ordered after all that this thread wrote
    before."""

    def codegen(context, builder, sig, args):
        data = cgutils.create_struct_proxy(done)(context, builder, value=args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(done, types.int64, types.int64), codegen


@inner
def wait_for_rows(turn, last_row):
    """Wait in a loop, without sleeping, until the task before has added to all rows of this
    sequence and head below last_row; a first task does not wait."""
    while turn.before >= 0 and _read(turn.done, turn.before) < turn.base + last_row:
        pass


@inner
def wait_for_count(counter, number):
    """Wait in a loop, without sleeping, until counter[0], which tasks raise by `next_task`, has
    reached `number`."""
    while _read(counter, 0) < number:
        pass


@inner
def publish_rows(turn, last_row):
    """Report that this task has added to all rows of this sequence and head below last_row, so that
    the next task may."""
    _write(turn.done, turn.task, turn.base + last_row)


@inner
def end_turn(turn, num_rows):
    """Wait for the task before to end this sequence and head, and then report that this task has
    ended it too.

    Args:
        turn: the Turn of this task.
        num_rows: the rows of the sequence.

    Returns:
        The Turn for the next pair of sequence and head, with base raised by num_rows.
    """
    wait_for_rows(turn, num_rows)
    publish_rows(turn, num_rows)
    return Turn(turn.done, turn.task, turn.before, turn.base + num_rows)
