"""Synchronisation of the threads of a step: sharing an operation, and waiting between two.

What      an operation is a number of tasks. A thread enters the operation, takes tasks from a
          counter until none is left, leaves, and goes on when all that entered have left.
Grid      none: called by every thread of `run.py`.
One call  two or three atomic operations on cache lines of the operation's own.
Traffic   128 bytes an operation.
Numerics  none. A thread that is late finds fewer tasks and is waited for only while it holds one: a
          thread that gets no core costs nothing, so a second thread makes no step slower.

Waiting spins for some microseconds, the usual time, then yields the core repeatedly
(`sched_yield`), so that a waiting thread never keeps a computing one from its core, and at last
sleeps (a futex) if possible: the kernel moves a thread that others keep from its core to an idle
one, not to one that is kept busy by waiting.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine.threads import inner

LINE = 128  # bytes from counter to counter: CPUs fetch lines of 64 in pairs
SPINS = 200  # pauses of 40 to 140 cycles before the first yield: about 10 us
YIELDS = 100  # yields of about 0.5 us before the thread sleeps
FUTEX, WAIT_PRIVATE, WAKE_PRIVATE = 202, 128, 129  # system call numbers of Linux on x86-64
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _pointer(builder, address):
    return builder.inttoptr(address, _i64.as_pointer())


@intrinsic
def add_at(typingctx, address, number):
    """Add `number` to the int64 at `address`, atomically, and return its old value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def read_at(typingctx, address):
    """Return the int64 at `address`, an atomic load that is ordered before all later reads of what
    its writer wrote."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write_at(typingctx, address, number):
    """Store `number` to the int64 at `address`, an atomic store that is ordered after all that this
    thread wrote before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that the loop around is one that waits; does nothing but on x86."""

    def codegen(context, builder, sig, args):
        target = builder.module.triple
        if target.startswith(("x86_64", "i686", "amd64")):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_give_way(typingctx, function):
    """Call the C function at address `function`, which takes nothing and returns an int, such as
    sched_yield; the int is dropped."""

    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(_i32, []).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _futex(typingctx, syscall, address, operation, value, timeout):
    """Call Linux's futex on `address` through the C function syscall, whose address is `syscall`;
    the result is dropped."""

    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(_i64, [_i64] * 5).as_pointer()
        function, address, operation, value, timeout = args
        number = ir.Constant(_i64, FUTEX)
        function = builder.inttoptr(function, kind)
        builder.call(function, [number, address, operation, value, timeout])
        return context.get_dummy_value()

    given = [types.int64] * 5
    return types.void(*given), codegen


@inner
def sleep_on(syscall, address, value, timeout):
    """Sleep until woken, if the low half of the int64 at `address` still equals the low half of
    `value`; else return at once.

    Args:
        syscall: the address of the C function syscall.
        timeout: the address of two int64, seconds and nanoseconds, or 0 to wait for `wake_all`.
    """
    _futex(syscall, address, WAIT_PRIVATE, value & 0xFFFFFFFF, timeout)


@inner
def wake_all(syscall, address):
    """Wake all threads that sleep on `address`, by the C function at `syscall`."""
    _futex(syscall, address, WAKE_PRIVATE, 1 << 30, 0)


@inner
def leave(address, waiters, syscall):
    """Decrement the int64 at `address`, the number of threads inside; the last one wakes the
    threads that sleep until it is 0, if the int64 at `waiters` counts any."""
    if add_at(address, -1) == 1 and syscall != 0 and read_at(waiters) > 0:
        wake_all(syscall, address)


@inner
def wait_until_zero(address, give_way, waiters, syscall):
    """Wait until the int64 at `address` is 0: spin, then yield the core, and at last sleep until
    `leave` wakes the thread.

    Args:
        give_way: the address of the C function that yields the core; 0 if there is none.
        waiters: the address of the number of threads that sleep here.
        syscall: the address of the C function that can put a thread to sleep; 0 if there is none.
    """
    turn = 0
    while read_at(address) != 0:
        turn += 1
        if turn < SPINS or give_way == 0:
            pause()
        elif turn < SPINS + YIELDS or syscall == 0:
            call_give_way(give_way)
        else:
            add_at(waiters, 1)
            value = read_at(address)
            if value != 0:  # a thread that changes it from now on sees that another sleeps
                sleep_on(syscall, address, value, 0)
            add_at(waiters, -1)
