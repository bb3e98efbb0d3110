"""Attention calls on Hopper's kernels without a GPU: the launchers, run in the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from tests.kernels.attention_problem import Problem, expected
from tests.kernels.planned import hopper_backward, hopper_forward, hopper_results
from tilewise.kernels import device
from tilewise.kernels.gluon.backward.launch import why_not_bwd
from tilewise.kernels.gluon.backward.plan import Way
from tilewise.kernels.gluon.forward.launch import why_not_fwd
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import Program, emulated

# Both warpgroups clear rows that no query sees: what they write is the same, whoever comes first.
IDEMPOTENT = frozenset({"clear_hidden", "clear_rows", "_clear_rows"})
_UNCHANGED = Program()


def in_turns(
    channels: int, *, diagonal: bool = False, passes_by: bool = False, turns: int = 2
) -> tuple[Way, ...]:
    """Return `plan.WAYS` by which plain calls of some channels, however few keys, have turns."""
    return (Way(channels, diagonal, 1, 1 << 20, turns, 1, passes_by),)


def refusals(problem: Problem) -> tuple[str | None, str | None]:
    """Return why the forward and the backward kernels would refuse the call on a GPU."""
    spec = problem.spec._replace(device_type="cuda")
    return why_not_fwd(spec), why_not_bwd(spec)


@contextlib.contextmanager
def _emulated(
    seed: int, program: Program, num_sms: int, resident: int | None = None
) -> Iterator[list[str]]:
    """Emulate a device that runs one CTA on each of `num_sms` multiprocessors, or fewer."""
    with (
        mock.patch.object(device, "sm_count_of", return_value=num_sms),
        emulated(
            seed, program=program, resident=resident or num_sms, idempotent=IDEMPOTENT
        ) as kernels,
    ):
        yield kernels


def forward(
    problem: Problem, seed: int = 0, *, program: Program = _UNCHANGED, num_sms: int = 4
) -> dict[str, Tensor]:
    """Return o and lse."""
    p = problem
    with _emulated(seed, program, num_sms) as kernels:
        o, lse = hopper_forward(p.q, p.k, p.v, p.spec, **p.tensors)
    assert kernels or p.q.numel() == 0
    return {"o": o, "lse": lse}


def forward_max(problem: Problem, *, program: Program = _UNCHANGED) -> dict[str, Tensor]:
    """Return o, lse and the largest logit of each row."""
    p = problem
    with _emulated(0, program, 4):
        results = hopper_results(p.q, p.k, p.v, p.spec._replace(needs_max=True), **p.tensors)
    return dict(zip(("o", "lse", "max"), results, strict=True))


def backward(
    problem: Problem,
    o: Tensor,
    lse: Tensor,
    seed: int = 0,
    *,
    program: Program = _UNCHANGED,
    num_sms: int = 4,
    resident: int | None = None,
) -> dict[str, Tensor]:
    """Return the gradients; resident: CTAs that really run at a time."""
    p = problem
    with _emulated(seed, program, num_sms, resident) as kernels:
        gradients = hopper_backward(p.do, p.dlse, p.q, p.k, p.v, o, lse, p.spec, **p.tensors)
    assert kernels or p.q.numel() == 0 or p.k.numel() == 0
    named = zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, strict=True)
    return {name: gradient for name, gradient in named if gradient is not None}


def assert_forward_right(problem: Problem, results: dict[str, Tensor]) -> None:
    """Judge o and lse alone, where the backward kernels refuse the call."""
    truth, eager = (expected(problem, dtype) for dtype in (torch.float64, problem.call.dtype))
    for name, result in results.items():
        assert_within_budget(result, truth[name], eager[name], name=name, scale=0.0)
