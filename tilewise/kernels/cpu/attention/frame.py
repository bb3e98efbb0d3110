"""A `Problem` as a frame of words, which kernels read; see `machine/frame.py`.

A plan writes the frame of a call of q, k and v alone once: its `starts` are offsets, to which each
thread adds the addresses of a call. Other frames are written for each call.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import typeof, types

from tilewise.kernels.cpu.attention.problem import (
    DK,
    DO,
    DV,
    NO_DROPOUT,
    NO_MASK,
    Arrays,
    Gradients,
    K,
    O,
    Problem,
    Q,
    Rule,
    Sizes,
    V,
)
from tilewise.kernels.cpu.machine.frame import array_at, num_words, reader, words_of
from tilewise.kernels.cpu.machine.threads import borrowed, inner

_KINDS = (
    typeof(Sizes(*range(len(Sizes._fields)))),
    typeof(Rule(True, 1.0, 1.0, True, True)),
    typeof(NO_MASK),
    typeof(NO_DROPOUT),
    types.Array(types.int64, 2, "C"),  # starts
    types.Array(types.int32, 2, "C"),  # table
)
_PLACES = np.cumsum([0, *map(num_words, _KINDS)]).tolist()
_GRADIENTS = typeof(
    Gradients(*[kind == "bool" or 1 for kind in Gradients.__annotations__.values()])
)
_RULE, _MASK, _DROPOUT, _STARTS, _TABLE, _HEADS = _PLACES[1:]
FRAME_WORDS = _HEADS + 4  # without gradients: slopes and sinks have an address and a length
_LSE_HEAD = Sizes._fields.index("lse_head")
_read_sizes, _read_rule, _read_mask, _read_dropout, _read_starts, _read_table = map(reader, _KINDS)
_read_gradients = reader(_GRADIENTS)


@functools.lru_cache(maxsize=256)
def _numbers(sizes: Sizes, rule: Rule) -> list[int]:
    return words_of((sizes, rule))


_NOTHING = words_of((NO_MASK, NO_DROPOUT))


def frame_of(problem: Problem, grads: Gradients | None = None) -> np.ndarray:
    """Return the int64 words of a problem and, if given, of `grads`: the strides of the gradients,
    and how many tasks compute them.

    The addresses of the problem's arrays are among the words: the caller keeps these arrays alive.
    """
    sizes, rule, arrays, mask, dropout = problem
    is_plain = mask is NO_MASK and dropout is NO_DROPOUT
    words = [*_numbers(sizes, rule), *(_NOTHING if is_plain else words_of((mask, dropout)))]
    for array in (arrays.starts, arrays.table, arrays.slopes, arrays.sinks):
        words += words_of(array)
    words += () if grads is None else words_of(grads)
    return np.array(words, np.int64)


@inner
def read_problem(frame, like, packed_like):
    """Return the `Problem` of a frame, for compiled code; `like` and `packed_like`, which a frame
    does not hold, become its empty arrays."""
    slopes = array_at(frame[_HEADS], frame[_HEADS + 1], like)
    sinks = array_at(frame[_HEADS + 2], frame[_HEADS + 3], like)
    starts, table = _read_starts(frame, _STARTS), _read_table(frame, _TABLE)
    arrays = Arrays(borrowed(like), borrowed(packed_like), starts, table, slopes, sinks)
    return Problem(
        _read_sizes(frame, 0),
        _read_rule(frame, _RULE),
        arrays,
        _read_mask(frame, _MASK),
        _read_dropout(frame, _DROPOUT),
    )


@inner
def moved_frame(address, starts, table, frame):
    """Fill `frame` with a copy of the words of the problem at `address`, without gradients, for
    other sequences of one query each: their `starts` and block table take the place of the
    problem's own, and lse is (Hq, sequences)."""
    kept = array_at(address, FRAME_WORDS, frame)
    for word in range(FRAME_WORDS):
        frame[word] = kept[word]
    frame[_LSE_HEAD] = len(starts)
    frame[_STARTS], frame[_STARTS + 1] = types.int64(starts.ctypes.data), len(starts)
    frame[_STARTS + 2] = starts.shape[1]
    frame[_TABLE], frame[_TABLE + 1] = types.int64(table.ctypes.data), table.shape[0]
    frame[_TABLE + 2] = table.shape[1]


@inner
def with_starts(problem, starts):
    """Return the problem with `starts` in place of its own."""
    old = problem.arrays
    arrays = Arrays(old.like, old.packed_like, starts, old.table, old.slopes, old.sinks)
    return Problem(problem.sizes, problem.rule, arrays, problem.mask, problem.dropout)


@inner
def read_gradients(frame):
    """Return the `Gradients` of a frame that was made with them, for compiled code."""
    return _read_gradients(frame, _HEADS + 4)


@inner
def placed(starts, q, k, v, o):
    """Return a copy of `starts` with the addresses of q, k, v and o added to its offsets; if all
    four are 0, `starts` itself, which then holds addresses."""
    if (q | k | v | o) == 0:
        return starts
    starts = starts.copy()
    for sequence in range(len(starts)):
        starts[sequence, Q] += q
        starts[sequence, K] += k
        starts[sequence, V] += v
        starts[sequence, O] += o
    return starts


@inner
def place_gradients_too(starts, do, dk, dv):
    """Add the addresses of do, dk and dv to their columns of `starts`, in place."""
    for sequence in range(len(starts)):
        starts[sequence, DO] += do
        starts[sequence, DK] += dk
        starts[sequence, DV] += dv
