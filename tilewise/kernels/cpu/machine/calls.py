"""Call one kernel from another by its address, so that each is compiled once.

A kernel that is inlined into another is compiled again for each combination of argument types of
either. Called by its address it is compiled for its own types, and found in numba's cache by all
callers.
"""

from __future__ import annotations

from typing import Any

from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

__all__ = ["address_of", "call_at", "empty_of"]


def address_of(kernel: Any, *arguments: Any) -> int:
    """Compile `kernel` for arguments of these types, if it is not yet, and return the address in
    this process of its code, for `call_at`."""
    kinds = tuple(map(typeof, arguments))
    kernel.compile(kinds)
    compiled = kernel.overloads[kinds]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    assert address
    return address


@intrinsic
def call_at(typingctx, address, arguments):
    """Call the kernel at `address`, which returns nothing, with a tuple of arguments; an error in
    it is raised by the caller.

    The arguments' types are those that `address_of` was given, except that arrays may be `empty_of`
    instead.
    """
    kinds = tuple(map(types.unliteral, arguments))

    def codegen(context, builder, sig, args):
        convention = context.call_conv
        kind = convention.get_function_type(types.none, kinds)
        values = [builder.extract_value(args[1], index) for index in range(len(kinds))]
        status, _ = convention.call_function(
            builder, builder.inttoptr(args[0], kind.as_pointer()), types.none, kinds, values
        )
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


@intrinsic
def empty_of(typingctx, size):
    """Return an empty flat array that stands in `call_at` for an array argument which the kernel
    does not use: only the kernel knows its type, whose elements have `size` bytes."""
    kind = types.Array(types.uint8, 1, "C")

    def codegen(context, builder, sig, args):
        array = make_array(kind)(context, builder)
        populate_array(
            array,
            data=cgutils.get_null_value(array.data.type),
            shape=cgutils.pack_array(builder, [context.get_constant(types.intp, 0)]),
            strides=cgutils.pack_array(builder, [args[0]]),
            itemsize=args[0],
            meminfo=None,
        )
        return array._getvalue()

    return kind(types.int64), codegen
