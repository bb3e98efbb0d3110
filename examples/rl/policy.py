"""A model that is trained, whole or by an adapter of low rank, and what its steps change.

Parameters of 16 bits have masters of 32 bits, which the optimizer changes; each step ends with the
masters rounded into the model, which the engine and the training forward pass read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tilewise.models import Decoder, train_adapter
from tilewise.training.loss import token_logprobs

__all__ = ["Policy", "log_probabilities"]


class Policy:
    """A model and what of it is learnt.

    Args:
        model: the decoder, before `use_inference_bits`; with `rank` it gets an adapter.
        rank: the rank of the adapter, which alone is then learnt; 0 learns all parameters.
        lr: the step size of Adam, after a warm-up of 5 steps.
    """

    def __init__(self, model: Decoder, *, rank: int, lr: float) -> None:
        self.model, self.lr, self._steps = model, lr, 0
        if rank:
            train_adapter(model, rank=rank, alpha=2.0 * rank)
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
