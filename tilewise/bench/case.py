"""The tensors of a problem: random inputs, a feature's arguments, weights of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise.bench.problem import BLOCK, Problem

DROPOUT_P, SOFTCAP, SEED = 0.1, 30.0, 7
ROWS = 16  # queries of one sequence that the truth is computed for


@dataclass(frozen=True)
class Case:
    """The tensors of a problem, which all of its peers share.

    Attributes:
        problem: the problem that they belong to.
        q, k, v: (B, N, H, D), or (T, H, D) of a packed batch; they require gradients.
        do: the weights of o, in its shape.
        dlse: the weights of lse (B, H, N), None where only o is asked for.
        options: keyword arguments of `ops.attention` beside the rule: a feature's.
        learned: the options that have a gradient, by name.
        cu_seqlens: int32 (B + 1,) of a packed batch.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    learned: dict[str, Tensor] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.q.device

    @property
    def checked_length(self) -> int:
        """Number of tokens of the last sequence, the one whose results are compared with the
        truth."""
        return self.problem.lengths[-1] if self.problem.lengths else self.problem.seqlen

    def checked(self, tensor: Tensor) -> Tensor:
        """Return the part (N, H, D) of q, k, v, o or do, or of their gradients, that is compared
        with the truth: that of the last sequence."""
        return tensor[-self.checked_length :] if self.problem.lengths else tensor[-1]

    def rows(self) -> Tensor:
        """Return the indices of the queries of the last sequence that are compared with the truth:
        at most `ROWS`, int64, evenly spaced from N // 16 to the last one.

        Earlier queries see too few keys: in a causal row of few keys dq is a difference of nearly
        equal numbers, rounded.
        """
        n = self.checked_length
        return torch.linspace(n // 16, n - 1, min(ROWS, n), device=self.device).long()

    def visible(self, rows: Tensor) -> Tensor:
        """Return which keys the queries `rows` of the last sequence see by the problem's rule, bool
        (rows, N)."""
        problem = self.problem
        keys = torch.arange(self.checked_length, device=self.device)
        distance = rows[:, None] - keys
        visible = torch.ones_like(distance, dtype=torch.bool)
        if problem.causal:
            visible &= distance >= 0
        if problem.window_left >= 0:
            visible &= distance <= problem.window_left
        if problem.density:
            layout = problem.layout().to(self.device)
            visible &= layout[rows[:, None] // BLOCK, keys // BLOCK]
        return visible


def make_case(problem: Problem, device: str) -> Case:
    """Draw the tensors of a problem on a device, with the same values in every call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    lead = (sum(problem.lengths),) if problem.lengths else (problem.batch, problem.seqlen)
    q = normal(*lead, problem.num_q_heads, problem.head_dim).requires_grad_()
    k = normal(*lead, problem.num_kv_heads, problem.head_dim).requires_grad_()
    v = normal(*lead, problem.num_kv_heads, problem.v_head_dim).requires_grad_()
    do = normal(*lead, problem.num_q_heads, problem.v_head_dim)
    cu_seqlens = None
    if problem.lengths:
        ends = torch.tensor([0, *problem.lengths]).cumsum(0)
        cu_seqlens = ends.to(device=device, dtype=torch.int32)
    options = FEATURES[problem.feature](problem, normal, device)
    dlse = None
    if "return_lse" in options:
        dlse = normal(problem.batch, problem.num_q_heads, problem.seqlen).float()
    learned = {
        name: value
        for name, value in options.items()
        if isinstance(value, Tensor) and value.requires_grad
    }
    return Case(problem, q, k, v, do, dlse, options, learned, cu_seqlens)


def block_mask(problem: Problem, device: torch.device | str) -> masks.BlockMask:
    """Return the problem's rule as a BlockMask of (N, N).

    A pair is shown that causality, the window and the layout of random blocks all show, those of
    them that the problem has; without any all pairs are.
    """
    n = problem.seqlen
    left = None if problem.window_left < 0 else problem.window_left
    right = 0 if problem.causal else None
    rule = masks.window(n, window=(left, right), device=device)
    if not problem.density:
        return rule
    blocks = masks.block_sparse(
        problem.layout(), block_size=BLOCK, seqlen_q=n, seqlen_k=n, device=device
    )
    return blocks if left is right is None else blocks & rule


Normal = Callable[..., Tensor]


def _alibi(problem: Problem, normal: Normal, device: str) -> dict[str, Any]:
    heads = problem.num_q_heads
    steps = torch.arange(1, heads + 1, device=device, dtype=torch.float32)
    return {"alibi_slopes": torch.exp2(-8 * steps / heads)}


def _bias(problem: Problem, normal: Normal, device: str) -> dict[str, Any]:
    return {"bias": normal(1, problem.num_q_heads, problem.seqlen, problem.seqlen)}


def _all_visible(problem: Problem, normal: Normal, device: str) -> dict[str, Any]:
    return {"mask": masks.window(problem.seqlen, window=(None, None), device=device)}


# Every feature leaves the visible entries as they are, so that its cost stands beside the plain
# call's: seqlens_k are full lengths, and the mask hides nothing.
FEATURES: dict[str, Callable[[Problem, Normal, str], dict[str, Any]]] = {
    "plain": lambda problem, normal, device: {},
    "random blocks": lambda problem, normal, device: {},  # its density is the problem's
    "deterministic": lambda problem, normal, device: {"deterministic": True},
    "GQA 8:1": lambda problem, normal, device: {},  # the problem has fewer key heads
    "return_lse": lambda problem, normal, device: {"return_lse": True},
    "seqlens_k": lambda problem, normal, device: {
        "seqlens_k": torch.full((problem.batch,), problem.seqlen, device=device).int()
    },
    "softcap": lambda problem, normal, device: {"softcap": SOFTCAP},
    "sinks": lambda problem, normal, device: {
        "sinks": normal(problem.num_q_heads).float().requires_grad_()
    },
    "ALiBi": _alibi,
    "BlockMask, all visible": _all_visible,
    "dropout 0.1": lambda problem, normal, device: {"dropout_p": DROPOUT_P, "seed": SEED},
    "bias": _bias,
    "bias, with gradient": lambda *arguments: {"bias": _bias(*arguments)["bias"].requires_grad_()},
}
