"""A model that is trained, whole or by adapters of low rank, and the numbers that its steps change.

Parameters of 16 bits have masters of 32 bits, which the optimizer changes; each step ends with the
masters rounded into the model, which the engine and the training forward pass read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tilewise.models.adapters import adapter_sites
from tilewise.models.decoder import Decoder
from tilewise.training.loss import token_logprobs

__all__ = ["Policy", "log_probabilities"]


class _LowRank(nn.Module):
    """A weight with what an adapter adds: W (N, K) becomes W + scale B A, in W's dtype."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.scale = 2.0
        self.a = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the sum."""
        return weight + (self.scale * (self.b @ self.a)).to(weight.dtype)


class Policy:
    """A model and what of it is learnt.

    Args:
        model: the decoder; with `rank` its linear layers get parametrisations.
        rank: the rank of adapters, which alone are then learnt; 0 learns all parameters.
        lr: the step size of Adam, after a warm-up of 5 steps.
    """

    def __init__(self, model: Decoder, *, rank: int, lr: float) -> None:
        self.model, self.lr, self._steps = model, lr, 0
        if rank:
            modules = dict.fromkeys(site.module for site in adapter_sites(model).values())
            model.requires_grad_(False)
            for name in modules:
                linear = model.get_submodule(name)
                low = _LowRank(linear.out_features, linear.in_features, rank)
                parametrize.register_parametrization(linear, "weight", low)
        self._learnt = [p for p in model.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for p in self._learnt
        ]
        self._optimizer = torch.optim.Adam(self._masters, lr=lr, betas=(0.9, 0.95))

    @property
    def num_learnt(self) -> int:
        """How many numbers are learnt."""
        return sum(parameter.numel() for parameter in self._learnt)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._learnt, self._masters, strict=True)

    def step(self) -> float:
        """Change the weights by their gradients; return the norm of these."""
        for parameter, master in self._pairs():
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self._masters, 1.0).item()
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, self._steps / 5)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in self._pairs():
                if master is not parameter:
                    parameter.copy_(master)
                parameter.grad = master.grad = None
        return norm


def log_probabilities(model: Decoder, rows: list[list[int]], firsts: list[int]) -> Tensor:
    """Return the log-probabilities of the tokens of rows, from one forward pass.

    Args:
        model: the model.
        rows: token ids, prompt and answer.
        firsts: the place of the first token of each answer.

    Returns:
        float32 (tokens of all answers, one row after another,), differentiable.
    """
    longest = max(map(len, rows))
    device = next(model.parameters()).device
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    places = [
        (i, t)
        for i, (row, first) in enumerate(zip(rows, firsts, strict=True))
        for t in range(first, len(row))
    ]
    row, column = torch.tensor(places, device=device).T
    hidden = model(ids)[row, column - 1]  # causal: what pads a row is seen by none of its tokens
    return token_logprobs(model.compute_logits(hidden), ids[row, column])
