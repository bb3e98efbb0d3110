"""A mixture of experts: a router, and feed-forward blocks of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.layers import activate, project
from tilewise.nn.valued import valued
from tilewise.ops import panels
from tilewise.ops.mxfp4 import GROUP, unpack_mxfp4

__all__ = ["Experts", "ExpertsConfig"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The configuration of a mixture of experts.

    Attributes:
        num_experts: N, the number of experts.
        num_active: the number of experts of a token.
        is_packed: True if their weights are MXFP4, 4.25 bits an element.
        limit, alpha: the constants of the activation, see `ops.expert_mlp`.
    """

    num_experts: int
    num_active: int
    is_packed: bool = False
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ValueError(
                f"experts of a token must be 1 to {self.num_experts}, got {self.num_active}"
            )


class Experts(nn.Module):
    """y = sum over a token's experts e of p[e] down[e](act(up[e](x))); see `ops.expert_mlp`.

    In inference on a GPU that is one op. Elsewhere rows are sorted by expert and each expert
    multiplies its rows at once: in inference on a CPU by weights in panels (see
    `pack_for_inference`), with gradients by torch's products. The host then waits for the counts of
    rows.

    Args:
        hidden_size, intermediate_size: E and I; multiples of 32 with MXFP4.
        config: the numbers of experts and the activation.

    Attributes:
        router: the projection to the logits of the experts.
        up: (N, 2 I, E), rows of the gate and of its factor in alternation; MXFP4's blocks
            (N, 2 I, E / 32, 16) with `up_scale`.
        down: (N, E, I), or MXFP4's blocks with `down_scale`.
        is_invariant: True if a token's bits must not depend on other tokens, also on a GPU.
        has_inference_bits: True if the differentiable pass on a GPU returns the values of
            inference.
        multiply: a function for x @ weight.T + bias, where neither panels nor the op compute it.
        fuses_on_cpu: True if the activation on a CPU returns the values of packed inference.
    """

    up: nn.Parameter
    up_bias: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter
    up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None

    def __init__(self, hidden_size: int, intermediate_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.is_invariant = self.has_inference_bits = self.fuses_on_cpu = False
        self.multiply: Callable[..., Tensor] = F.linear
        count = config.num_experts
        self.router = nn.Linear(hidden_size, count)
        self.register_parameter("up_scale", None)
        self.register_parameter("down_scale", None)
        shapes = {
            "up": (count, 2 * intermediate_size, hidden_size),
            "down": (count, hidden_size, intermediate_size),
        }
        for name, (_, rows, columns) in shapes.items():
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(count, rows)))
            if not config.is_packed:
                weight = nn.Parameter(torch.empty(count, rows, columns))
                self.register_parameter(name, weight)
                continue
            if columns % GROUP:
                raise ValueError(f"{name} must have a multiple of {GROUP} columns, got {columns}")
            groups = (count, rows, columns // GROUP)
            for part, shape in ((name, (*groups, GROUP // 2)), (f"{name}_scale", groups)):
                empty = torch.zeros(shape, dtype=torch.uint8)
                self.register_parameter(part, nn.Parameter(empty, requires_grad=False))
        self._panels: list[tuple[panels.Panels, panels.Panels]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., E) to (..., E)."""
        rows = x.reshape(-1, x.shape[-1])
        logits = project(self.router, rows)
        if torch.is_grad_enabled() and (
            rows.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            y = self._by_expert(rows, logits)
            if self.has_inference_bits and rows.is_cuda:
                with torch.no_grad():
                    value = self._in_one(rows, logits)
                y = valued(y, value)
        elif rows.is_cuda and rows.dtype != torch.float64:
            y = self._in_one(rows, logits)
        else:
            y = self._by_expert(rows, logits)
        return y.view(x.shape)

    def pack_for_inference(self) -> None:
        """Replace the weights by the layout that this CPU reads fastest, if possible."""
        if any(panels.why_not_pack(self._plain(name, 0)) is not None for name in ("up", "down")):
            return
        up_bias, down_bias = self.up_bias, self.down_bias
        for e in range(self.config.num_experts):
            up = panels.pack(self._plain("up", e).detach(), up_bias[e].detach())
            down = panels.pack(self._plain("down", e).detach(), down_bias[e].detach())
            self._panels.append((up, down))
        self.fuses_on_cpu = True
        for name in ("up", "down", "up_bias", "down_bias", "up_scale", "down_scale"):
            delattr(self, name)

    def _in_one(self, x: Tensor, logits: Tensor) -> Tensor:
        config = self.config
        return ops.expert_mlp(
            x,
            logits,
            self.up,
            self.up_bias,
            self.down,
            self.down_bias,
            num_active=config.num_active,
            up_scale=self.up_scale,
            down_scale=self.down_scale,
            limit=config.limit,
            alpha=config.alpha,
            batch_invariant=self.is_invariant,
        )

    def _by_expert(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return y (T, E), computed expert by expert; a token's experts are added in order of
        logits."""
        active, (tokens, width) = self.config.num_active, x.shape
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top, chosen = wide.topk(active, dim=-1)
        weights = top.softmax(-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        rows = x[order // active].split(counts)
        parts = [self._expert(e, part) for e, part in enumerate(rows) if len(part)]
        if not parts:
            return torch.zeros_like(x)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        o = torch.cat(parts)[back].view(tokens, active, width)
        # Added one after the other: a sum over a dimension may depend on the number of tokens.
        y = weights[:, 0, None] * o[:, 0]
        for j in range(1, active):
            y = y + weights[:, j, None] * o[:, j]
        return y.to(x.dtype)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        """Return the output of one expert for its rows (T, E)."""
        if self._panels:
            up, down = self._panels[e]
            return panels.multiply(self._activate(panels.multiply(x, up)), down)
        both = self.multiply(x, self._plain("up", e), self.up_bias[e])
        return self.multiply(self._activate(both), self._plain("down", e), self.down_bias[e])

    def _activate(self, both: Tensor) -> Tensor:
        limit = self.config.limit
        gate, other = both[..., 0::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        share = activate(torch.sigmoid, self.config.alpha * gate, on_cpu=self.fuses_on_cpu)
        y: Tensor = (other + 1) * (gate * share)
        return y

    def _plain(self, name: str, e: int) -> Tensor:
        """Return the unpacked weight of an expert, (rows, columns)."""
        weight, scale = getattr(self, name)[e], getattr(self, f"{name}_scale")
        return weight if scale is None else unpack_mxfp4(weight, scale[e], self.up_bias.dtype)
