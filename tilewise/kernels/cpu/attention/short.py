"""Short calls on the caller's thread, with all at hand that is the same in calls of a plan.

What      what a plan runs for a call without more than q, k and v that is too short to share.
Grid      none: one thread, as `run_alone` has it.
One call  allocates its results and enters the kernel, past numba's search for it.
Traffic   see forward_few.py, backward_few.py, backward_row.py and decode.py.
Numerics  as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import Problem
from tilewise.kernels.cpu.machine.threads import entry_of

__all__ = ["Alone", "Made", "fresh", "made_of", "run_short", "run_short_gradient"]

_zeros, _int64 = np.zeros, np.int64  # a short call feels each name that is looked up
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

try:  # what torch's own compiler allocates with, in two thirds of the time
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
        _empty_strided_cpu as fresh,
    )
except ImportError:  # an earlier or a later torch

    def fresh(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype)


def made_of(shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    """Return the shape, strides and dtype by which `fresh` allocates a contiguous tensor."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return tuple(x.shape), x.stride(), dtype


def _entered(kernel: Callable[..., None], given: tuple[Any, ...]) -> Callable[..., None]:
    """Run a kernel with the arguments `given`, for the first time, and return its compiled
    function, which later calls with arguments of the same types run directly."""
    kernel(*given)
    return entry_of(kernel, given)


# Arguments of a kernel before the addresses of a call, those behind them but a counter, and tasks.
Alone = tuple[tuple[Any, ...], tuple[Any, ...], int]


def run_short(
    kernel: Callable[..., None], prepare: Callable[[], Alone], o_made: Made, lse_made: Made
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function `run` of a forward plan whose kernel runs on the caller's thread only.

    Args:
        kernel: a compiled function of the addresses of q, k, v, o and lse.
        prepare: a function that returns the kernel's other arguments, called once, when `run` is
            first called.
        o_made, lse_made: the layouts of the results.
    """
    enter: Callable[..., None] | None = None
    before: tuple[Any, ...] = ()
    behind: tuple[Any, ...] = ()
    num_tasks = 0

    def run(q: Tensor, k: Tensor, v: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        nonlocal enter, before, behind, num_tasks
        if enter is None:
            before, behind, num_tasks = prepare()
        o, lse = fresh(*o_made), fresh(*lse_made)
        given = (
            *before,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            lse.data_ptr(),
            *behind,
            _zeros(1, _int64),
            num_tasks,
        )
        if enter is None:
            enter = _entered(kernel, given)
        else:
            enter(*given)
        return o, lse

    return run


def run_short_gradient(
    kernel: Callable[..., None],
    like: np.ndarray,
    frame: np.ndarray,
    problem: Problem,
    makes: Sequence[Made],
    beside: list[np.ndarray],
    num_tasks: int,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the function `run` of a gradient's plan whose kernel runs on the caller's thread only:
    from do, dlse (None), o, lse, q, k and v to dq, dk, dv, None, None.

    Args:
        kernel: a compiled function of `like`, `frame`, the addresses of q, k, v, o, do, dk, dv, lse
            and dq, `beside`, a counter and the number of tasks.
        like, frame: the first arguments of the kernel.
        problem: the problem with the arrays to which the frame points, which live as long as the
            returned function.
        makes: the layouts of dq, dk and dv.
        beside: the arguments of the kernel behind the addresses.
    """
    enter: Callable[..., None] | None = None
    made_q, made_k, made_v = makes

    def run(
        do: Tensor,
        dlse: None,
        o: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_: None,
        _problem: Problem = problem,
    ) -> tuple[Tensor | None, ...]:
        nonlocal enter
        dq, dk, dv = fresh(*made_q), fresh(*made_k), fresh(*made_v)
        given = (
            like,
            frame,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            do.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            lse.data_ptr(),
            dq.data_ptr(),
            *beside,
            _zeros(1, _int64),
            num_tasks,
        )
        if enter is None:
            enter = _entered(kernel, given)
        else:
            enter(*given)
        return dq, dk, dv, None, None

    return run
