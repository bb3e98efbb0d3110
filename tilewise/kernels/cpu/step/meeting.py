"""How the threads of a step share its operations and meet between two of them.

What      an operation is a number of tasks. A thread enters the operation, takes tasks from a
          counter until none is left, leaves, and goes on when all that entered have left.
Grid      none: called by every thread of `run.py`.
One call  two or three atomic operations on cache lines of the operation's own.
Traffic   128 bytes an operation.
Numerics  none. A thread that is late finds less to do and is waited for only while it holds a task:
          one that gets no core costs nothing, so a second thread makes no step slower.

Waiting spins for some microseconds, the usual time, and then gives the core away again and again
(`sched_yield`), so that a thread that computes is never kept from it by one that waits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine.threads import inner

LINE = 128  # bytes from counter to counter: CPUs fetch lines of 64 in pairs
SPINS = 200  # pauses of 40 to 140 cycles before the first yield: about 10 us
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _pointer(builder, address):
    return builder.inttoptr(address, _i64.as_pointer())


@intrinsic
def add_at(typingctx, address, number):
    """Atomically add to the int64 at `address` and return what it was."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def read_at(typingctx, address):
    """The int64 at `address`, and after it all that its writer wrote before."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write_at(typingctx, address, number):
    """Store an int64 after all that this thread wrote before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    """Tell the core that this loop only waits."""

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
def _call(typingctx, function):
    """Call the C function at address `function`, which takes nothing and returns an int."""

    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(_i32, []).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@inner
def wait_until_zero(address, give_way):
    """Wait until the int64 at `address` is 0.

    Args:
        give_way: address of the C function that gives the core to another thread; 0 has none.
    """
    turn = 0
    while read_at(address) != 0:
        turn += 1
        if turn < SPINS or give_way == 0:
            _pause()
        else:
            _call(give_way)
