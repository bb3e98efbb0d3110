"""A mixture of experts: a router, and feed-forward blocks of which each token uses a few."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.nn.layers import (
    ACTIVATIONS,
    FUSED_ON,
    MLP,
    GatedMLP,
    RMSNorm,
    activate,
    multiply,
    name_of,
    project,
)
from tilewise.nn.packed import PackedLinear, can_pack
from tilewise.nn.quantised import QuantisedLinear
from tilewise.nn.valued import valued
from tilewise.ops import QuantisedWeight, cpu_step, panels
from tilewise.ops.choose_experts import (
    MOST_ACTIVE,
    MOST_EXPERTS,
    Scores,
    SharedWeight,
    check_choice,
)
from tilewise.ops.expert_mlp import ExpertActivation
from tilewise.ops.mxfp4 import GROUP, mxfp4_rows, unpack_mxfp4

__all__ = ["Experts", "ExpertsConfig"]


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The configuration of a mixture of experts.

    Attributes:
        num_experts: N, the number of experts.
        num_active: the number of experts of a token.
        intermediate_size: I of each expert.
        scores: the scores of experts, which choose and weigh them: the "softmax" or "sigmoid" of
            the logits, or "sparse_mixer", a rule for two experts; see `ops.choose_experts`.
        normalised, norm_eps: whether a token's routing weights are divided by their sum, and the
            term that is added to that sum with sigmoids.
        num_groups, num_active_groups, best_in_group: the number of groups of consecutive experts,
            the number of groups among which a token chooses, and the number of best scores, 1 or 2,
            whose sum is the score of a group.
        jitter: the relative distance of logits in "sparse_mixer".
        weight_scale: a factor of all routing weights.
        has_correction_bias: True if a term that is learnt is added to the scores for the choice.
        router_bias: True if the router has a bias.
        routes_in_float32: True if the router's weight is float32 in a model of 16 bits, and its
            products, too.
        router_norm_eps: the eps of an RMS norm before the router; None if there is none.
        logit_scale: a factor of the router's logits.
        scales_experts: True if each expert has a learnt factor of its routing weights.
        weighs_input: True if routing weights multiply the inputs of experts, not their outputs.
        activation: the function of the gate, one of `nn.layers.ACTIVATIONS` that `ops.expert_mlp`
            computes, or "clamped": (b + 1) g sigmoid(alpha g) with g = min(a, limit) of the gate's
            output a and b of the other, clamped to [-limit, limit].
        limit, alpha: the constants of the activation "clamped".
        has_bias: True if the products of the experts have biases.
        is_interleaved: True if the rows of gate and up alternate; False if the gate's come first.
        is_packed: True if the experts' weights are MXFP4, 4.25 bits an element.
        shared_size: the intermediate size of the shared block, which all tokens use; 0 for none.
        shared_bias: True if the shared block's projections have biases.
        shared_is_gated: True if the shared block's output is multiplied by sigmoid(w x) of the
            token.
        is_gated: False if experts and the shared block are act(x W) without a second factor.
        latent_size: the channels that experts read and write: tokens are projected to them before
            the experts and back after them. 0 for no projections.
        latent_bias: True if the two projections of latent_size have biases.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    scores: Scores = "softmax"
    normalised: bool = True
    norm_eps: float = 0.0
    weight_scale: float = 1.0
    has_correction_bias: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    best_in_group: int = 1
    jitter: float = 0.01
    router_bias: bool = False
    routes_in_float32: bool = False
    router_norm_eps: float | None = None
    logit_scale: float = 1.0
    scales_experts: bool = False
    weighs_input: bool = False
    activation: str = "silu"
    limit: float = 7.0
    alpha: float = 1.702
    has_bias: bool = False
    is_interleaved: bool = False
    is_packed: bool = False
    shared_size: int = 0
    shared_bias: bool = False
    shared_is_gated: bool = False
    is_gated: bool = True
    latent_size: int = 0
    latent_bias: bool = False

    def __post_init__(self) -> None:
        check_choice(
            self.num_experts,
            self.num_active,
            self.scores,
            self.has_correction_bias,
            self.num_groups,
            self.num_active_groups,
            self.best_in_group,
        )
        if self.activation not in [*ACTIVATION_OF, _CLAMPED]:
            names = ", ".join([*ACTIVATION_OF, _CLAMPED])
            raise ValueError(f"activation must be one of {names}, got {self.activation!r}")
        if self.shared_size and self.activation == _CLAMPED:
            raise ValueError(f"shared_size must be 0 with {_CLAMPED}, got {self.shared_size}")
        if not self.is_gated and (self.activation == _CLAMPED or self.is_interleaved):
            raise ValueError("is_gated must be true with clamped or interleaved rows, got false")

    @property
    def are_gated_tokens(self) -> bool:
        """Whether experts have gates and read the tokens themselves, as most do."""
        return self.is_gated and self.latent_size == 0


_CLAMPED = "clamped"
# The most tokens for which the shared block is one more expert: kernels do not sort their choices.
# A step of 8 layers of Qwen3.5-35B-A3B takes 0.787 ms in place of 0.845 at 1 row, and 1.975 in
# place of 2.038 at 16 (H200, 2026-11-30, lab/results/shared_expert_h200.json).
_FEW_TOKENS = 16
# Hugging Face's names of the activations that `ops.expert_mlp` computes, and its own.
ACTIVATION_OF: dict[str, ExpertActivation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
assert {*ACTIVATION_OF.values(), _CLAMPED} == {*get_args(ExpertActivation)}


class _Shared(NamedTuple):
    """The output of the block that all tokens use.

    Attributes:
        rows: (T, E).
        gate: (T, 1), the logit of each row's gate; None for a block without gates.
    """

    rows: Tensor
    gate: Tensor | None


class _WithShared(NamedTuple):
    """Weights whose expert N is the block that all tokens use.

    Attributes:
        up: (N + 1, 2 I, E).
        down: (N + 1, E, I).
        router: (N + 1, E), whose last row is the gate's; None for a block without gates.
    """

    up: Tensor
    down: Tensor
    router: Tensor | None = None


class Experts(nn.Module):
    """y = sum over a token's experts e of weight[e] down[e](act(gate[e](x)) up[e](x)), and the
    block that all tokens use; see `ops.choose_experts` and `ops.expert_mlp`. Without gates an
    expert is down[e](act(up[e](x))), and so is that block.

    In inference on a GPU these ops compute it, the shared block of a few tokens as one more expert
    where `place_on_gpu` found it to be like one. On a CPU the operations of a compiled step do,
    once `pack_for_inference` was called. Elsewhere rows are sorted by expert and each expert
    multiplies its rows at once by torch's products; the host then waits for the counts of rows.
    Gradients flow through the experts' outputs and weights, not through the choice.

    Args:
        hidden_size: E; like the experts' intermediate size a multiple of 32 with MXFP4.
        config: the numbers of experts, the router and the activation.

    Attributes:
        router: the projection to the logits of the experts.
        router_norm: the norm before it, or None.
        correction_bias: float32 (N,), see `ExpertsConfig.has_correction_bias`; or None.
        expert_scale: (N,), see `ExpertsConfig.scales_experts`; or None.
        up: (N, 2 I, E), or (N, I, E) without gates; MXFP4's blocks (N, 2 I, E / 32, 16) with
            `up_scale`; or all experts' rows as a `QuantisedLinear` holds them, see `hold`.
        down: (N, E, I), or MXFP4's blocks with `down_scale`, or likewise.
        shared, shared_gate: the block that all tokens use and the projection to its gate, or None.
        latent_proj, latent_out_proj: the projections to what experts read and back, or None.
        is_invariant: True if a token's bits must not depend on other tokens, also on a GPU.
        has_inference_bits: True if the differentiable pass returns the values of inference.
        packed: the mixture as a compiled step takes it, once packed; else None.
        fuses_on_cpu: True if the activation on a CPU returns the values of packed inference.
    """

    up: nn.Parameter | QuantisedLinear
    up_bias: nn.Parameter | None
    down: nn.Parameter | QuantisedLinear
    down_bias: nn.Parameter | None
    up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None
    correction_bias: nn.Parameter | None
    expert_scale: nn.Parameter | None

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.is_invariant = self.has_inference_bits = self.fuses_on_cpu = False
        count, inner = config.num_experts, config.intermediate_size
        wide = torch.float32 if config.routes_in_float32 else None
        self.router = nn.Linear(hidden_size, count, bias=config.router_bias, dtype=wide)
        eps = config.router_norm_eps
        self.router_norm = None if eps is None else RMSNorm(hidden_size, eps)
        term, factor = torch.zeros(count, dtype=torch.float32), torch.ones(count)
        self.correction_bias = (
            nn.Parameter(term, requires_grad=False) if config.has_correction_bias else None
        )
        self.expert_scale = nn.Parameter(factor) if config.scales_experts else None
        self._width = config.latent_size or hidden_size
        width, rows_of_up = self._width, inner * (1 + config.is_gated)
        shapes = {"up": (count, rows_of_up, width), "down": (count, width, inner)}
        for name, (_, rows, columns) in shapes.items():
            bias = nn.Parameter(torch.zeros(count, rows)) if config.has_bias else None
            self.register_parameter(f"{name}_bias", bias)
            self.register_parameter(f"{name}_scale", None)
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
        self.latent_proj: nn.Linear | None = None
        self.latent_out_proj: nn.Linear | None = None
        if config.latent_size:
            self.latent_proj = nn.Linear(hidden_size, width, bias=config.latent_bias)
            self.latent_out_proj = nn.Linear(width, hidden_size, bias=config.latent_bias)
        self.shared: GatedMLP | MLP | None = None
        self.shared_gate: nn.Linear | None = None
        if config.shared_size:
            kind = GatedMLP if config.is_gated else MLP
            self.shared = kind(
                hidden_size, config.shared_size, config.activation, bias=config.shared_bias
            )
            if config.shared_is_gated:
                self.shared_gate = nn.Linear(hidden_size, 1, bias=False)
        self.packed: cpu_step.Mixture | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Apply `fn` to all tensors as Module._apply does, but keep two in float32 if `fn` would
        narrow them.

        They are correction_bias, and the router's weight and bias with `routes_in_float32`; they
        only move to the new device.
        """
        held: list[Tensor | None] = [self.correction_bias]
        if self.config.routes_in_float32 and isinstance(self.router, nn.Linear):
            held += [self.router.weight, self.router.bias]
        before = [None if parameter is None else parameter.data for parameter in held]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter, wide in zip(held, before, strict=True):
            if parameter is not None and wide is not None and parameter.dtype.itemsize < 4:
                parameter.data = wide.to(parameter.device)
        return self

    def forward(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Map x (..., E) to (..., E): the sum of each token's experts, and of the shared block if
        there is one.

        Experts are chosen by `router_input`, of the shape of x, or by x if None.
        """
        tokens = rows = x.reshape(-1, x.shape[-1])
        routed = rows if router_input is None else router_input.reshape(rows.shape)
        few = self._few(rows, routed)
        if few is not None:
            return few.view(x.shape)
        logits = self._logits(routed)
        if self.latent_proj is not None:
            rows = project(self.latent_proj, rows)
        shared = None if self.shared is None else self._shared(tokens)
        if self.latent_out_proj is None:
            y = self._mixed(rows, logits, shared)
        else:
            y = self._added(project(self.latent_out_proj, self._mixed(rows, logits, None)), shared)
        return y.view(x.shape)

    def _mixed(self, rows: Tensor, logits: Tensor, shared: _Shared | None) -> Tensor:
        """Return (T, E), each token's weighted sum of its chosen experts, plus `shared`, if any.

        `logits` (T, N) are those of the router, before logit_scale, for rows (T, E).
        """
        if self.packed is not None:
            return self._added(cpu_step.mix(rows, logits, self.packed), shared)
        learns = self._learns(rows)
        if rows.is_cuda and rows.dtype != torch.float64 and not learns:
            return self._in_one(rows, logits, shared)
        y = self._added(self._by_expert(rows, *self._choose(logits)), shared)
        if learns and self.has_inference_bits:
            with torch.no_grad():
                if rows.is_cuda:
                    value = self._in_one(rows, logits, shared)
                else:
                    value = self._added(cpu_step.mix(rows, logits, self._packed()), shared)
            y = valued(y, value)
        return y

    def _learns(self, rows: Tensor) -> bool:
        """Return whether autograd follows a pass of these rows."""
        return torch.is_grad_enabled() and (
            rows.requires_grad or any(p.requires_grad for p in self.parameters())
        )

    def _few(self, rows: Tensor, routed: Tensor) -> Tensor | None:
        """Return the output (T, E) of a few tokens in inference on a GPU, for which the shared
        block is expert N; None if it cannot be, see `_with_shared`.

        Args:
            rows: (T, E), the tokens.
            routed: (T, E), the input of the router.
        """
        if rows.device.type not in FUSED_ON or not 0 < len(rows) <= _FEW_TOKENS:
            return None
        if self.packed is not None or self.is_invariant or self.has_inference_bits:
            return None
        if torch.is_autocast_enabled() or torch.compiler.is_compiling():
            return None
        whole = None if self._learns(rows) else self._with_shared()
        is_gated = self.shared_gate is not None
        if whole is None or whole.up.dtype != rows.dtype or (is_gated and routed is not rows):
            return None
        if whole.router is None:
            choice = self._chosen(self._logits(routed), "one")
        else:
            choice = self._chosen(multiply(rows, whole.router), "sigmoid")
        return self._multiplied(
            rows,
            *choice,
            None,
            functools.partial(
                ops.expert_mlp,
                up=whole.up,
                down=whole.down,
                up_scale=None,
                down_scale=None,
            ),
        )

    def _with_shared(self) -> _WithShared | None:
        """Return the weights with the shared block as expert N, without a copy.

        None if the block is no such expert or does not lie behind the others in memory.
        """
        found = []
        for weight, last in self._beside_shared():
            both = _with_last(weight, last)
            if both is None:
                return None
            found.append(both)
        return _WithShared(*found) if found else None

    def _beside_shared(self) -> list[tuple[Tensor, Tensor]]:
        """Return up, down and, for a block with a gate, the router's weight, each with the shared
        block's weight of the same shape; nothing if the block is not like an expert."""
        config, shared, gate = self.config, self.shared, self.shared_gate
        has_biases = config.has_bias or config.shared_bias or config.router_bias
        is_other = config.is_interleaved or config.weighs_input or not config.are_gated_tokens
        is_full = config.num_experts >= MOST_EXPERTS or config.num_active >= MOST_ACTIVE
        if type(shared) is not GatedMLP or has_biases or is_other or is_full:
            return []
        linears = [shared.gate_up_proj, shared.down_proj]
        others: list[Tensor | QuantisedLinear] = [self.up, self.down]
        if gate is not None:
            if self.router_norm is not None or config.logit_scale != 1.0:
                return []
            linears += [gate, self.router]
            others += [self.router.weight]
        if shared.gate_scale != 1.0 or any(type(linear) is not nn.Linear for linear in linears):
            return []
        pairs = list(zip(others, [linear.weight for linear in linears[:3]], strict=True))
        for weight, last in pairs:
            if not isinstance(weight, Tensor) or weight.dtype != last.dtype:
                return []
            if weight[0].numel() != last.numel() or weight.shape[-1] != last.shape[-1]:
                return []
        return cast(list[tuple[Tensor, Tensor]], pairs)

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Replace the experts' weights and the router by the layout that this CPU reads fastest.

        Nothing changes if the weights cannot be packed or are quantised. Otherwise the parameters
        of the experts are deleted, and the module is for inference only. The shared block is left
        as it is.

        Args:
            is_int8: True to store the experts' weights as int8 with a scale for every 64 inputs;
                the router keeps its dtype.

        Raises:
            ValueError: `is_int8` with a weight that is not finite.
        """
        if isinstance(self.up, QuantisedLinear):
            return
        if any(panels.why_not_pack(self._plain(name, 0)) is not None for name in ("up", "down")):
            return

        self.packed = self._packed(is_int8=is_int8)
        self.fuses_on_cpu = True
        for name in ("up", "down", "up_bias", "down_bias", "up_scale", "down_scale"):
            delattr(self, name)
        if can_pack(self.router.weight):
            self.router = PackedLinear(self.router.weight, self.router.bias)  # type: ignore[assignment]

    def hold(self, up: QuantisedWeight, down: QuantisedWeight, dtype: torch.dtype) -> None:
        """Replace the parameters `up` and `down`, in place, by quantised weights of all experts.

        Args:
            up, down: (N 2 I, E), or (N I, E) without gates, and (N E, I), all experts one below
                another, perhaps on "meta"; columns may follow, see `QuantisedWeight.padded`.
            dtype: the dtype of the model.
        """
        for name, weight in (("up", up), ("down", down)):
            delattr(self, name)
            self.register_parameter(f"{name}_scale", None)
            setattr(self, name, QuantisedLinear([weight], None, dtype))

    def place_on_gpu(self) -> None:
        """Rearrange weights, in place, as kernels of a GPU read them.

        MXFP4 weights become a copy in the order of those kernels, if this GPU has them and they
        were not rearranged before. The weights of a shared block that is like an expert are put
        behind those of the experts, as of expert N. Others are left.
        """
        if not self.config.is_packed or isinstance(self.up, QuantisedLinear):
            for weight, last in self._beside_shared():
                if _with_last(weight, last) is None:
                    both = torch.cat((weight.detach(), last.detach().view(1, *weight.shape[1:])))
                    weight.data, last.data = both[:-1], both[-1].view(last.shape)
            return
        assert self.up_scale is not None
        assert self.down_scale is not None
        assert isinstance(self.down, Tensor)
        up, down = mxfp4_rows(self.up, self.up_scale), mxfp4_rows(self.down, self.down_scale)
        dtype = self.router.weight.dtype if self.up_bias is None else self.up_bias.dtype
        placed = ops.placed_experts(up, down, up.shape[1], down.shape[1], dtype)
        if not isinstance(placed, str):
            self.hold(*placed, dtype)

    def refill(self, given: Mapping[str, Tensor]) -> None:
        """Write other weights of the experts into the packed panels, in place; int8 panels get the
        weights rounded to int8.

        `given` maps the names that the parameters had before `pack_for_inference` to tensors: up
        and down, their biases and scales, correction_bias and expert_scale. Router and shared block
        are not written.
        """
        packed = self.packed
        assert packed is not None
        with torch.device("meta"):
            whole = Experts(given["down"].shape[1], self.config)
        for name, tensor in given.items():
            setattr(whole, name, nn.Parameter(tensor.detach(), requires_grad=False))
        for name, all_panels in (("up", packed.up), ("down", packed.down)):
            for e, into in enumerate(all_panels):
                whole._panels_of(name, e, is_int8=into.is_narrow, into=into)
        for name in ("correction_bias", "expert_scale"):
            own = getattr(self, name)
            if own is not None and name in given:
                own.data.copy_(given[name])

    @property
    def num_active_weights(self) -> int:
        """The number of packed weights in the experts of one token, padding included; 0 before
        packing."""
        packed = self.packed
        if packed is None:
            return 0
        return packed.num_active * (packed.up[0].num_weights + packed.down[0].num_weights)

    def _packed(self, *, is_int8: bool = False) -> cpu_step.Mixture:
        """Return a new `cpu_step.Mixture`, as a compiled CPU step takes it: all experts packed into
        panels."""
        config = self.config
        panels_of = functools.partial(self._panels_of, is_int8=is_int8)
        is_clamped = config.activation == _CLAMPED
        return cpu_step.Mixture(
            [panels_of("up", e) for e in range(config.num_experts)],
            [panels_of("down", e) for e in range(config.num_experts)],
            config.num_active,
            scores=config.scores,
            normalised=config.normalised,
            norm_eps=config.norm_eps,
            scale=config.weight_scale,
            correction_bias=self._held("correction_bias"),
            num_groups=config.num_groups,
            num_active_groups=config.num_active_groups,
            best_in_group=config.best_in_group,
            jitter=config.jitter,
            expert_scale=self._held("expert_scale"),
            logit_scale=config.logit_scale,
            weighs_input=config.weighs_input,
            function=_CLAMPED if is_clamped else name_of(ACTIVATIONS[config.activation]),
            limit=config.limit,
            alpha=config.alpha,
            is_gated=config.is_gated,
        )

    def _panels_of(
        self, name: str, e: int, *, is_int8: bool, into: panels.Panels | None = None
    ) -> panels.Panels:
        """Pack weight `name` ("up" or "down") and its bias of expert `e` into panels, and return
        them.

        Rows of gate and up are put in the order of the panels. `into`: panels to overwrite; None
        makes new ones.
        """
        held = getattr(self, f"{name}_bias")
        weight = self._plain(name, e).detach()
        bias = None if held is None else held[e].detach()
        if name == "up":
            if self.config.is_interleaved:
                weight = torch.cat((weight[0::2], weight[1::2]))
                bias = None if bias is None else torch.cat((bias[0::2], bias[1::2]))
            if self.config.is_gated:
                weight, bias = panels.interleave(weight, bias)
        if is_int8:
            return panels.pack_int8(weight, bias, into=into)[0]
        return panels.pack(weight, bias, into=into)

    def _held(self, name: str) -> cpu_step.Held | None:
        """Return a function that looks up parameter `name` at each call; None if the module has no
        such one."""
        return None if getattr(self, name) is None else lambda: cast(Tensor, getattr(self, name))

    def _logits(self, rows: Tensor) -> Tensor:
        """Return the router's logits (T, N) of rows (T, E), normalised first by router_norm;
        logit_scale is not applied."""
        config = self.config
        if self.router_norm is not None:
            rows = self.router_norm(rows)
        if config.routes_in_float32 and rows.dtype.itemsize < 4:
            rows = rows.float()
        return project(self.router, rows)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return logits * logit_scale, in float32 unless the factor is 1."""
        scale = self.config.logit_scale
        return logits if scale == 1.0 else logits.float() * scale

    def _in_one(self, x: Tensor, logits: Tensor, shared: _Shared | None) -> Tensor:
        """Return the result of `_mixed`, by the ops of inference on a GPU.

        Nothing is differentiable.
        """
        call: Callable[..., Tensor]
        if isinstance(self.up, QuantisedLinear):
            assert isinstance(self.down, QuantisedLinear)
            call = functools.partial(
                ops.quantised_expert_mlp,
                up=self.up.parts[0],
                down=self.down.parts[0],
                inner_size=self.config.intermediate_size,
            )
        else:
            assert isinstance(self.down, Tensor)
            call = functools.partial(
                ops.expert_mlp,
                up=self.up,
                down=self.down,
                up_scale=self.up_scale,
                down_scale=self.down_scale,
            )
        return self._multiplied(x, *self._chosen(logits, "none"), shared, call)

    def _chosen(self, logits: Tensor, shared_weight: SharedWeight) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights by `ops.choose_experts`."""
        config = self.config
        return ops.choose_experts(
            self._scaled(logits),
            config.num_active,
            scores=config.scores,
            normalised=config.normalised,
            norm_eps=config.norm_eps,
            scale=config.weight_scale,
            correction_bias=self.correction_bias,
            expert_scale=self.expert_scale,
            num_groups=config.num_groups,
            num_active_groups=config.num_active_groups,
            best_in_group=config.best_in_group,
            jitter=config.jitter,
            shared_weight=shared_weight,
        )

    def _multiplied(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        shared: _Shared | None,
        call: Callable[..., Tensor],
    ) -> Tensor:
        """Return the weighted sum of the chosen experts, and `shared` if there is one, by an op
        `call` that has its weights."""
        config = self.config
        # Under autocast the block's rows may have another dtype.
        beside = [None if part is None else part.to(x.dtype) for part in shared or (None, None)]
        return call(
            x,
            chosen,
            weights.float(),
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            shared=beside[0],
            shared_gate=beside[1],
            activation=cast(ExpertActivation, ACTIVATION_OF.get(config.activation, _CLAMPED)),
            interleaved=config.is_interleaved,
            limit=config.limit,
            alpha=config.alpha,
            weighs_input=config.weighs_input,
            batch_invariant=self.is_invariant,
        )

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, each (T, k), by torch's operations.

        The rule is that of `ops.choose_experts`; the weights are differentiable.
        """
        config, logits = self.config, self._scaled(logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if config.scores == "sparse_mixer":
            chosen, weights = _mixed(wide, config.jitter)
        else:
            is_softmax = config.scores == "softmax"
            scores = wide.softmax(-1) if is_softmax else self._sigmoid(wide)
            chosen = self._best(wide, scores).detach()
            if is_softmax and config.normalised:
                weights = wide.gather(1, chosen).softmax(-1)
            else:
                weights = scores.gather(1, chosen)
                if config.normalised:
                    # One after the other: a sum may depend on the number of tokens.
                    weights = weights / (weights.cumsum(-1)[:, -1:] + config.norm_eps)
        if config.weight_scale != 1.0:
            weights = weights * config.weight_scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return chosen, weights

    def _sigmoid(self, x: Tensor) -> Tensor:
        return activate(torch.sigmoid, x, on_cpu=self.fuses_on_cpu)

    @torch.no_grad()
    def _best(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the indices (T, k) of the experts with the best scores, in descending order.

        correction_bias is added first, and with groups only the best groups' experts count. Of
        equal scores the first expert wins.
        """
        config = self.config
        is_plain = config.num_groups == 1 or config.best_in_group == 1
        if config.scores == "softmax" and self.correction_bias is None and is_plain:
            scores = logits  # in the order of the probabilities, and finer
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if config.num_groups > 1:
            groups = scores.unflatten(1, (config.num_groups, -1))
            best = groups.topk(config.best_in_group, -1).values.sum(-1)
            kept = best.argsort(dim=1, descending=True, stable=True)[:, : config.num_active_groups]
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
            scores = groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.argsort(dim=1, descending=True, stable=True)[:, : config.num_active]

    def _by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return y (T, E), each token's weighted sum of its experts, computed expert by expert,
        differentiably.

        A token's results are added in the order of choice. The host waits for the number of rows of
        each expert.

        Args:
            x: (T, E).
            chosen, weights: (T, k), the experts of each token and their weights.
        """
        active, (tokens, width) = self.config.num_active, x.shape
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        sorted_rows = x[order // active]
        if self.config.weighs_input:
            sorted_rows = (sorted_rows * weights.flatten()[order, None]).to(x.dtype)
        rows = sorted_rows.split(counts)
        parts = [self._expert(e, part) for e, part in enumerate(rows) if len(part)]
        if not parts:
            return torch.zeros_like(x)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        o = torch.cat(parts)[back].view(tokens, active, width)
        if self.config.weighs_input:
            weights = torch.ones_like(weights)
        # Added one after the other: a sum over a dimension may depend on the number of tokens.
        y = weights[:, 0, None] * o[:, 0]
        for j in range(1, active):
            y = y + weights[:, j, None] * o[:, j]
        return y.to(x.dtype)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        """Return the output of expert `e` for its rows x (T, E): up, activation and down, not yet
        weighted."""
        up_bias, down_bias = (
            None if bias is None else bias[e] for bias in (self.up_bias, self.down_bias)
        )
        both = F.linear(x, self._plain("up", e), up_bias)
        return F.linear(self._activate(both), self._plain("down", e), down_bias)

    def _activate(self, both: Tensor) -> Tensor:
        config = self.config
        if not config.is_gated:
            return activate(ACTIVATIONS[config.activation], both, on_cpu=self.fuses_on_cpu)
        if config.is_interleaved:
            gate, other = both[..., 0::2], both[..., 1::2]
        else:
            gate, other = both.chunk(2, dim=-1)
        if config.activation != _CLAMPED:
            function = ACTIVATIONS[config.activation]
            gate = gate.contiguous() if config.is_interleaved else gate
            return activate(function, gate, on_cpu=self.fuses_on_cpu) * other
        limit = config.limit
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
        y: Tensor = (other + 1) * (gate * self._sigmoid(config.alpha * gate))
        return y

    def _shared(self, x: Tensor) -> _Shared:
        assert self.shared is not None
        y = cast(Tensor, self.shared(x))
        return _Shared(y, None if self.shared_gate is None else project(self.shared_gate, x))

    def _added(self, y: Tensor, shared: _Shared | None) -> Tensor:
        """Return y (T, E) plus the shared block's rows times the sigmoids of their gates.

        None adds nothing.
        """
        if shared is None:
            return y
        if shared.gate is None:
            return y + shared.rows
        return y + self._sigmoid(shared.gate) * shared.rows

    def _plain(self, name: str, e: int) -> Tensor:
        """Return weight `name` ("up" or "down") of expert `e` as floats (rows, columns),
        dequantised if needed."""
        held = getattr(self, name)
        if isinstance(held, QuantisedLinear):
            rows, columns = held.out_features // self.config.num_experts, held.in_features
            part = held.parts[0].cut((e * rows, (e + 1) * rows), (0, columns))
            own = self.config.intermediate_size if name == "down" else self._width
            return part.dequantise().to(held.dtype)[:, :own]
        weight, scale = held[e], getattr(self, f"{name}_scale")
        if scale is None:
            return cast(Tensor, weight)
        held = self.router.weight if self.up_bias is None else self.up_bias
        return unpack_mxfp4(weight, scale[e], held.dtype)


def _with_last(weight: Tensor, last: Tensor) -> Tensor | None:
    """Return weight (N, ...) and `last`, of the size of one of the N, as one tensor (N + 1, ...).

    It is a view: None if `last` does not lie behind `weight` in memory.
    """
    is_behind = last.data_ptr() == weight.data_ptr() + weight.nbytes
    of_one = weight.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    if not (is_behind and of_one and weight.is_contiguous() and last.is_contiguous()):
        return None
    return weight.detach().as_strided((len(weight) + 1, *weight.shape[1:]), weight.stride())


def _mixed(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the two chosen experts and their weights, each (T, 2), by the rule "sparse_mixer".

    See `ops.choose_experts` for the rule; weights are differentiable.
    """
    size, left = logits.abs(), logits
    chosen, weights = [], []
    for _ in range(2):
        with torch.no_grad():
            best = left.argsort(dim=1, descending=True, stable=True)[:, :1]
            top = left.gather(1, best)
            far = (top - logits) / torch.maximum(size, top) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        chosen.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1)
