"""Forward-mode derivatives and the gradient of the gradient: how long, and how much memory.

The papers count no FLOPs for them, so their rows have none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.bench.case import Case
from tilewise.bench.peers import Run
from tilewise.bench.truth import difference, rows_of, sampled_weights

OPS = ("jvp", "double backward")
LIMIT = 0.05  # two derivatives of bfloat16 products


def call_of(op: str, case: Case, run: Run) -> tuple[Callable[[], object], str | None]:
    """Return the call to time of a peer's `run`, and a text or None.

    The text says how the result of a first run differs from the truth, if by more than LIMIT of its
    norm. A call with a text is not to be timed; that of "double backward" does nothing.

    Args:
        op: "jvp", the tangent of o; or "double backward", of which only the second gradient is
            timed.
        case: the tensors of the problem, from which the truth is computed.
        run: the peer's function and tensors.
    """
    return _jvp(case, run) if op == "jvp" else _double_backward(case, run)


def _directions(run: Run) -> list[Tensor]:
    """Return a fixed random tensor like each of q, k and v: the directions of derivatives."""
    generator = torch.Generator(run.do.device).manual_seed(1)
    return [
        torch.randn(leaf.shape, generator=generator, device=leaf.device).to(leaf.dtype)
        for leaf in run.qkv
    ]


def _doubles(run: Run, tensors: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Return the compared sequence of three tensors like q, k, v in float64; of the first only
    `rows`."""
    q, k, v = (run.checked(t.detach()).double() for t in tensors)
    return [q[rows], k, v]


def _jvp(case: Case, run: Run) -> tuple[Callable[[], object], str | None]:
    rows, directions = case.rows(), _directions(run)
    primals = tuple(leaf.detach() for leaf in run.qkv)

    def call() -> Tensor:
        tangent: Tensor = torch.func.jvp(run.function, primals, tuple(directions))[1]
        return tangent

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rows_of(case, rows, {"q": q, "k": k, "v": v})[0]

    point = tuple(_doubles(run, list(primals), rows))
    want = torch.func.jvp(truth, point, tuple(_doubles(run, directions, rows)))[1]
    return call, difference("the tangent of o", run.checked(call())[rows], want, LIMIT)


def _double_backward(case: Case, run: Run) -> tuple[Callable[[], object], str | None]:
    rows, directions = case.rows(), _directions(run)
    leaves = list(run.qkv)

    def twice(do: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        do = do.requires_grad_()
        grads = torch.autograd.grad(run.forward(), leaves, do, create_graph=True)
        return lambda: torch.autograd.grad(grads, [*leaves, do], directions, retain_graph=True)

    q, k, v = (leaf.requires_grad_() for leaf in _doubles(run, leaves, rows))
    weight = run.checked(run.do)[rows].double().requires_grad_()
    o = rows_of(case, rows, {"q": q, "k": k, "v": v})[0]
    grads = torch.autograd.grad(o, (q, k, v), weight, create_graph=True)
    wanted = torch.autograd.grad(grads, (q, k, v, weight), _doubles(run, directions, rows))
    found = [run.checked(grad) for grad in twice(sampled_weights(run, rows)[0])()]
    for name, got, want in zip(("q", "k", "v", "do"), found, wanted, strict=True):
        got = got[rows] if name in ("q", "do") else got
        wrong = difference(f"the second gradient of {name}", got, want, LIMIT)
        if wrong is not None:
            return lambda: None, wrong
    return twice(run.do.clone()), None
