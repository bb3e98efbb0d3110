"""The float64 truth of a few rows, and of what those rows alone do to every gradient.

A backward pass is checked with weights that are zero but for the sampled rows: then dk, dv and the
gradients of a bias or sinks are sums over those rows only, and O(N) of memory holds all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.bench.case import Case
from tilewise.bench.peers import Run
from tilewise.ops.attention.dropout import philox_of
from tilewise.reference.dropout import dropout_rate, keep_mask
from tilewise.reference.standard import attention

# Relative errors of bfloat16 results, N 256 to 8,192 on an EPYC: 2e-3 ... 7e-3 of fused kernels,
# up to 1.2e-2 of standard attention.
LIMIT = 0.03
# Of 8-bit inputs from N(0, 1): 5e-2 of o, see docs/guide/fp8.md.
FP8_LIMIT = 0.12
# What dropout does to a row itself: sqrt(p / (1 - p)) is 0.33 of it.
OWN_DROPOUT_LIMIT = 0.6


@dataclass(frozen=True)
class Truth:
    """Float64 results of the sampled rows of the compared sequence.

    Attributes:
        rows: int64, the indices of the sampled queries.
        o, lse: (rows, H, Dv) and (rows, H).
        grads: the gradients by leaf: dq (rows, H, D), dk, dv (N, Hk, D), dbias (H, rows, N), dsinks
            (H,).
    """

    rows: Tensor
    o: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def _leaves(case: Case, rows: Tensor) -> dict[str, Tensor]:
    """Return the tensors from which the sampled rows are computed, in float64: q of these rows, k
    and v, and a bias or sinks."""
    leaves = {"q": case.checked(case.q)[rows], "k": case.checked(case.k)}
    leaves["v"] = case.checked(case.v)
    if "bias" in case.options:
        leaves["bias"] = case.options["bias"][0][:, rows]
    if "sinks" in case.options:
        leaves["sinks"] = case.options["sinks"]
    return {name: leaf.detach().double() for name, leaf in leaves.items()}


def rows_of(case: Case, rows: Tensor, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return o (rows, H, Dv) and lse (rows, H) of the sampled rows, computed from `leaves` in
    float64, differentiably."""
    problem, options = case.problem, case.options
    n = case.checked_length
    bias = leaves["bias"].unsqueeze(0) if "bias" in leaves else None
    if "alibi_slopes" in options:
        distance = (rows[:, None] - torch.arange(n, device=rows.device)).abs().double()
        bias = -options["alibi_slopes"].double()[:, None, None] * distance
    more: dict[str, Any] = {}
    if "dropout_p" in options:
        more = {"dropout_p": dropout_rate(options["dropout_p"]), "keep_mask": _kept(case, rows)}
    o, lse = attention(
        leaves["q"].unsqueeze(0),
        leaves["k"].unsqueeze(0),
        leaves["v"].unsqueeze(0),
        softmax_scale=problem.head_dim**-0.5,
        softcap=options.get("softcap", 0.0),
        bias=bias,
        sinks=leaves.get("sinks"),
        mask=case.visible(rows),
        return_lse=True,
        **more,
    )
    return o.squeeze(0), lse.squeeze(0).transpose(0, 1)


def _kept(case: Case, rows: Tensor) -> Tensor:
    """Return the keys that dropout keeps for sampled rows of the last sequence, bool (1, H, rows,
    N)."""
    problem, p = case.problem, case.options["dropout_p"]
    philox = philox_of(case.options["seed"], case.device)
    shape = (problem.batch, problem.num_q_heads, 1, problem.seqlen)
    kept = [keep_mask(philox, shape, p, first_query=row)[-1] for row in rows.tolist()]
    return torch.cat(kept, dim=1).unsqueeze(0)


def sample_truth(case: Case) -> Truth:
    """Return the truth of a case: o and lse of `ROWS` rows of its last sequence, and the gradients
    that the weights of these rows give."""
    rows = case.rows()
    leaves = {name: leaf.requires_grad_() for name, leaf in _leaves(case, rows).items()}
    o, lse = rows_of(case, rows, leaves)
    loss = (o * case.checked(case.do)[rows].double()).sum()
    if case.dlse is not None:
        loss = loss + (lse * case.dlse[-1].transpose(0, 1)[rows].double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return Truth(rows, o.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def sampled_weights(run: Run, rows: Tensor) -> tuple[Tensor, ...]:
    """Return copies of the run's do, and of dlse if there is one, that are zero but for the sampled
    rows of the compared sequence."""
    do = torch.zeros_like(run.do)
    run.checked(do)[rows] = run.checked(run.do)[rows]
    if run.dlse is None:
        return (do,)
    dlse = torch.zeros_like(run.dlse)
    dlse[-1, :, rows] = run.dlse[-1, :, rows]
    return do, dlse


def wrong_output(outputs: Any, truth: Truth, run: Run) -> str | None:
    """Return a text that says how o or lse differs from the truth; None if neither does.

    Args:
        outputs: o, or (o, lse), of the peer's forward pass.
        truth: the truth of the case.
        run: the peer's run, which says what is compared, and how far off it may be.
    """
    o, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    limit = OWN_DROPOUT_LIMIT if run.has_own_dropout else FP8_LIMIT if run.is_8_bit else LIMIT
    wrong = difference("o", run.checked(o.detach())[truth.rows], truth.o, limit)
    if wrong is None and lse is not None:
        rows = lse.detach()[-1].transpose(0, 1)[truth.rows]
        wrong = difference("lse", rows, truth.lse, limit)
    return wrong


def wrong_gradient(grads: Sequence[Tensor], truth: Truth, run: Run) -> str | None:
    """Return a text that says how a gradient differs from the truth; None if none does.

    Args:
        grads: the gradients of the run's leaves, in their order, with `sampled_weights`.
        truth: the truth of the case.
        run: the peer's run, which says what is compared, and how far off it may be.
    """
    limit = OWN_DROPOUT_LIMIT if run.has_own_dropout else LIMIT
    for (name, leaf), grad in zip(run.leaves.items(), grads, strict=True):
        if grad.shape != leaf.shape:
            return f"wrong result: d{name} has shape {tuple(grad.shape)}"
        if name in ("q", "k", "v"):
            grad = run.checked(grad)
            grad = grad[truth.rows] if name == "q" else grad
        elif name == "bias":
            grad = grad[0][:, truth.rows]
        parts = 16 if name in ("q", "k", "v") else 1
        wrong = difference(f"d{name}", grad, truth.grads[name], limit, parts)
        if wrong is not None:
            return wrong
    return None


def difference(name: str, got: Tensor, want: Tensor, limit: float, parts: int = 16) -> str | None:
    """Return a text that says by how much of its norm `got` differs from `want`; None if it is
    within `limit`.

    The norms are those of `parts` pieces along the first dimension, so that a few wrong rows do not
    drown in the others; a piece of less than half the median counts as half the median.
    """
    if got.shape != want.shape:
        return f"wrong result: {name} has shape {tuple(got.shape)}"
    pairs = zip((got.double() - want).tensor_split(parts), want.tensor_split(parts), strict=True)
    norms = torch.stack([torch.stack((gap.norm(), whole.norm())) for gap, whole in pairs])
    errors, wholes = norms.unbind(1)
    wholes = wholes.maximum(0.5 * wholes.median())
    if bool((errors <= limit * wholes).all()):  # false for NaN
        return None
    return f"wrong result: {name} is off by {float((errors / wholes).max()):.2g} of its norm"
