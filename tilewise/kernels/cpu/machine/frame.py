"""Arguments of a kernel in one array of words, which compiled code reads.

A call from Python unpacks every tuple and array and determines its type again. The arguments that
are the same in all calls of a plan are therefore written once, as int64 words in order: an integer
or a truth value is a word, a float64 its bits, an array its address and its shape, a tuple its
items. The writer of a frame keeps its arrays alive: a kernel does not own their memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

__all__ = ["array_at", "num_words", "pointer_at", "reader", "words_of"]


def words_of(value: Any) -> list[int]:
    """Return the int64 words that stand for a number, a contiguous array or a tuple of them in a
    frame; an array is its address and its shape. Asserts that arrays are contiguous."""
    if isinstance(value, tuple):
        return [word for item in value for word in words_of(item)]
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return [value.__array_interface__["data"][0], *value.shape]
    if isinstance(value, float):
        return [int(np.float64(value).view(np.int64))]
    return [int(value)]


def num_words(kind: types.Type) -> int:
    """Return how many words of a frame a value of a numba type has: 1 for a number, 1 + ndim for an
    array, the sum of its items for a tuple."""
    if isinstance(kind, types.BaseTuple):
        return sum(map(num_words, kind))
    return 1 + kind.ndim if isinstance(kind, types.Array) else 1


def reader(kind: types.Type) -> Any:
    """Return a function read(frame, at) for compiled code, which returns the value of type `kind`
    whose words, as of `words_of`, begin at index `at` of an int64 array.

    Arrays are views of the writer's memory. The next value begins at `at + num_words(kind)`.
    """

    @intrinsic
    def read(typingctx, frame, at):
        def codegen(context, builder, sig, args):
            data = make_array(sig.args[0])(context, builder, value=args[0]).data
            return _load(context, builder, kind, builder.gep(data, [args[1]]))

        return kind(frame, types.int64), codegen

    return read


@intrinsic
def array_at(typingctx, address, count, like):
    """Return the flat array of `count` elements of like's dtype at `address`: a view that does not
    own its memory."""
    kind = types.Array(like.dtype, 1, "C")

    def codegen(context, builder, sig, args):
        return _array(context, builder, kind, args[0], [args[1]])

    return kind(types.int64, types.int64, like), codegen


@intrinsic
def pointer_at(typingctx, like, address):
    """Return `address` as a bare pointer to elements of like's dtype."""
    pointer = types.CPointer(like.dtype)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[1], context.get_value_type(pointer))

    return pointer(like, types.int64), codegen


def _load(context, builder, kind, at):
    if isinstance(kind, types.BaseTuple):
        items, place = [], 0
        for item in kind:
            start = builder.gep(at, [context.get_constant(types.intp, place)])
            items.append(_load(context, builder, item, start))
            place += num_words(item)
        return context.make_tuple(builder, kind, items)
    if isinstance(kind, types.Array):
        words = [
            builder.load(builder.gep(at, [context.get_constant(types.intp, i)]))
            for i in range(1 + kind.ndim)
        ]
        return _array(context, builder, kind, words[0], words[1:])
    if kind == types.float64:
        return builder.load(builder.bitcast(at, context.get_value_type(kind).as_pointer()))
    word = builder.load(at)
    return builder.icmp_signed("!=", word, word.type(0)) if kind == types.boolean else word


def _array(context, builder, kind, address, shape):
    array = make_array(kind)(context, builder)
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides, step = [], context.get_constant(types.intp, size)
    for length in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, length)
    populate_array(
        array,
        data=builder.inttoptr(address, array.data.type),
        shape=cgutils.pack_array(builder, shape),
        strides=cgutils.pack_array(builder, strides),
        itemsize=context.get_constant(types.intp, size),
        meminfo=None,
    )
    return array._getvalue()
