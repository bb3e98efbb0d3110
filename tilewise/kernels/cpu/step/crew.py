"""Helper threads that stay in compiled code between steps, so that none waits for Python.

What      the thread that owns a step writes the step's arguments into a mailbox and increments its
          number; helpers see it, walk the same list, and wait for the next one.
Grid      none: called by every thread of `run.py`.
One call  a step: 150 stores, three atomic operations, and a wake-up if a helper sleeps.
Traffic   the mailbox, 1.6 KiB.
Numerics  none.

A helper from a Python thread pool would need the interpreter to begin and to end: 0.2 ms on a
quiet machine, and as long as another thread holds it elsewhere. Here a helper spins for a bounded
time, yielding its core, and then sleeps in the kernel (a futex), where it costs nothing until it
is woken. The time is halved when it was in vain and doubled when it was not, so a helper does not
spin if steps are far apart.

A helper enters a step only while it is open. The owner closes it when the list is done, and waits
for the helpers that are inside, which find no further task. So the arrays of a step may be freed
when it has ended.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.step.meeting import (
    FUTEX,
    LINE,
    SPINS,
    WAKE_PRIVATE,
    add_at,
    call_give_way,
    leave,
    pause,
    read_at,
    sleep_on,
    wait_until_zero,
    wake_all,
    write_at,
)

# Lines of a mailbox: the number of the step, the number of sleeping helpers, the number of the open
# step, the number of helpers inside it, whether its owner sleeps until they have left, whether all
# shall leave, and the step's arguments.
NUMBER, SLEEPERS, OPEN, INSIDE, OUTSIDE, LEAVE, JOB = range(7)
_JOB_ENTRIES = 160  # words of a step, some more than `run.py` writes
SIZE = JOB * LINE // 8 + _JOB_ENTRIES
# Reads of the number before a helper sleeps: about 0.05 ms and 0.6 ms on an own core.
FEWEST_LOOKS, MOST_LOOKS = SPINS, 8 * SPINS


def _find_syscall() -> int:
    """Return the address of the C library's function syscall, by which helpers sleep; 0 where there
    are no futexes (all but Linux on x86-64)."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return 0
    function = getattr(ctypes.CDLL(None), "syscall", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


SYSCALL = _find_syscall()


@intrinsic
def note_step(typingctx, mailbox, step):
    """Write `step`, a tuple of numbers and borrowed arrays, to the mailbox, where helpers read it.

    The tuple is stored as compiled code represents it: the address, shape and strides of each
    array.
    """

    def codegen(context, builder, sig, args):
        value = args[1]
        if context.get_abi_sizeof(value.type) > 8 * _JOB_ENTRIES:
            raise ValueError(f"_JOB_ENTRIES must hold a step, got {_JOB_ENTRIES}")
        builder.store(value, _job(context, builder, mailbox, args[0], value.type))
        return context.get_dummy_value()

    return types.void(mailbox, step), codegen


@intrinsic
def noted_step(typingctx, mailbox, like):
    """Return the step that the mailbox holds, a tuple; `like`, a tuple of the same types, gives its
    type, and is not read."""

    def codegen(context, builder, sig, args):
        return builder.load(_job(context, builder, mailbox, args[0], args[1].type))

    return like(mailbox, like), codegen


def _job(context, builder, mailbox, array, kind):
    """Emit the pointer to the step in the mailbox `array`, a value of LLVM's type `kind`."""
    data = cgutils.create_struct_proxy(mailbox)(context, builder, value=array).data
    first = builder.gep(data, [ir.Constant(ir.IntType(64), JOB * LINE // 8)])
    return builder.bitcast(first, kind.as_pointer())


@inner
def open_step(mailbox, syscall):
    """Let helpers into the step that `note_step` has written to the mailbox, and wake those that
    sleep."""
    base = mailbox.ctypes.data
    number = read_at(base + NUMBER * LINE) + 1
    write_at(base + OPEN * LINE, number)
    add_at(base + NUMBER * LINE, 1)
    if read_at(base + SLEEPERS * LINE) > 0:
        wake_all(syscall, base + NUMBER * LINE)


@inner
def close_step(mailbox, give_way, syscall):
    """Let no further helper into the open step, and wait until those inside have left; the owner
    calls this when the list is done."""
    base = mailbox.ctypes.data
    add_at(base + OPEN * LINE, -read_at(base + OPEN * LINE))
    wait_until_zero(base + INSIDE * LINE, give_way, base + OUTSIDE * LINE, syscall)


@inner
def wait_for_step(mailbox, done, looks, give_way, syscall):
    """Wait for a step after the one of number `done`: look `looks` times, and then sleep until
    woken.

    Returns:
        The number of the new step, or -1 when the helper shall leave; and the number of looks
        before the next sleep, twice as many if looking was enough, else half.
    """
    base = mailbox.ctypes.data
    address = base + NUMBER * LINE
    for turn in range(looks):
        if read_at(address) != done:
            break
        if turn < SPINS // 2 or give_way == 0:
            pause()
        else:
            call_give_way(give_way)
    if read_at(address) != done:
        looks = min(2 * looks, MOST_LOOKS)
    else:
        looks = max(looks // 2, FEWEST_LOOKS)
    while read_at(address) == done:
        if read_at(base + LEAVE * LINE) != 0:
            return -1, looks
        add_at(base + SLEEPERS * LINE, 1)
        # The kernel reads the number again before it lets the thread sleep.
        if read_at(base + LEAVE * LINE) == 0:
            sleep_on(syscall, address, done, 0)
        add_at(base + SLEEPERS * LINE, -1)
    if read_at(base + LEAVE * LINE) != 0:
        return -1, looks
    return read_at(address), looks


@inner
def enter_step(mailbox, number):
    """Count this helper as inside, and return whether the step of that number is still open;
    `leave_step` must follow either way."""
    base = mailbox.ctypes.data
    add_at(base + INSIDE * LINE, 1)
    return read_at(base + OPEN * LINE) == number


@inner
def leave_step(mailbox, syscall):
    """Count this helper as outside again, and wake the owner of the step if it sleeps until all
    have left."""
    base = mailbox.ctypes.data
    leave(base + INSIDE * LINE, base + OUTSIDE * LINE, syscall)


def new_mailbox() -> np.ndarray:
    """Return an empty mailbox, int64 (SIZE,), on cache lines of its own."""
    memory = np.zeros(SIZE + LINE // 8, np.int64)
    skip = -memory.ctypes.data % LINE // 8
    return memory[skip : skip + SIZE]


class Crew:
    """The helpers of one program: daemon threads that start when a step first needs them."""

    def __init__(self) -> None:
        self.mailbox = new_mailbox()
        self._threads: list[threading.Thread] = []
        self._has_left = False

    def grow(self, count: int, help_out: Callable[..., Any], *args: Any) -> None:
        """Start helpers until there are `count`; none if they have been told to leave, or the
        system refused a thread before: a step can do without.

        Each helper calls help_out(*args, mailbox, number), numbers from 1, which releases the GIL.
        """
        while len(self._threads) < count and not self._has_left:
            number = len(self._threads) + 1
            thread = threading.Thread(
                target=help_out,
                args=(*args, self.mailbox, number),
                name=f"tilewise-step-{number}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:
                self._has_left = True  # tried once: a refused thread costs more than a step
                return
            self._threads.append(thread)

    def leave(self, timeout_s: float = 5.0) -> None:
        """Tell all helpers to leave, and wait until they have, for `timeout_s` at most.

        The wait is bounded: this may run in a garbage collection, on a thread that holds something
        that helpers need in order to end, such as the lock of the list of threads.
        """
        self._has_left = True
        self.mailbox[LEAVE * LINE // 8] = 1
        address = self.mailbox.ctypes.data + NUMBER * LINE
        wake = ctypes.CDLL(None).syscall
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            while thread.is_alive() and thread is not threading.current_thread():
                # Repeatedly, since one may be about to sleep.
                wake(FUTEX, ctypes.c_void_p(address), WAKE_PRIVATE, 2**30)
                if time.monotonic() > deadline:
                    return
                thread.join(0.001)
