"""choose_experts(): which experts of a mixture compute a token, and their weights in its sum."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

__all__ = ["MOST_ACTIVE", "MOST_EXPERTS", "MOST_GROUPS", "Scores", "SharedWeight", "choose_experts"]

Scores = Literal["softmax", "sigmoid", "sparse_mixer"]
SharedWeight = Literal["none", "one", "sigmoid"]
MOST_EXPERTS, MOST_ACTIVE, MOST_GROUPS = 1024, 32, 32


def choose_experts(
    logits: Tensor,
    num_active: int,
    *,
    scores: Scores = "softmax",
    normalised: bool = True,
    norm_eps: float = 0.0,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_groups: int = 1,
    num_active_groups: int = 1,
    best_in_group: int = 1,
    jitter: float = 0.01,
    shared_weight: SharedWeight = "none",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the `num_active` experts of each token, and their weights.

    The scores s of a token are the softmax of its logits or their sigmoids. The experts with the
    largest s + correction_bias are chosen (of equal ones the first) in descending order, with
    groups only among the experts of the `num_active_groups` best groups. An expert's weight is its
    s, divided by the sum of the chosen ones' s + norm_eps if `normalised`, times `scale` and the
    expert's own `expert_scale`. A normalised softmax is the softmax over the chosen logits.

    "sparse_mixer": the expert with the largest logit m1 has the probability of m1 in a softmax over
    the logits x with m1 - x <= 2 jitter max(|x|, m1), and the second, of the logit m2, that of m2
    among the others with m2 - x <= 2 jitter max(|x|, m2); `num_active` is 2. These are the weights
    of inference: training by this router draws its experts.

    A block that all tokens use may stand behind the N experts as expert N: it is then the last
    choice of each token, k + 1 in all, and its weight is 1 or the sigmoid of a logit of its own.

    A token with a logit that is NaN gets weights that are NaN, and valid experts. Nothing is
    differentiable.

    Args:
        logits: (T, N), or (T, N + 1) if the last is that of the shared block; float32, float16 or
            bfloat16, last dim contiguous, N at most 1,024.
        num_active: k, 1 ... N, at most 32.
        scores: "softmax", "sigmoid" or "sparse_mixer".
        normalised: True if the weights of a token sum to `scale`.
        norm_eps: the term that is added to that sum with sigmoids.
        scale: a factor of all weights.
        correction_bias: (N,) float32, what is added to the scores for the choice only.
        expert_scale: (N,) float32, float16 or bfloat16, a factor of each expert's weight.
        num_groups: the number of groups of N / num_groups consecutive experts, at most 32.
        num_active_groups: the number of groups among whose experts a token chooses.
        best_in_group: the number of largest scores, 1 or 2, whose sum is the score of a group.
        jitter: the relative distance of "sparse_mixer".
        shared_weight: the weight of expert N: "none" if there is none, "one", or the "sigmoid" of
            the last logit.
        backend: "triton" or "reference"; None chooses. There is no kernel for CPUs, where
            `nn.Experts` routes by torch's operations.

    Returns:
        chosen: int32 (T, k), or (T, k + 1) with a shared block.
        weights: float32, of the same shape.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Shazeer et al., 2017; DeepSeek-AI, 2024, "DeepSeek-V3 technical report" (groups and
        correction_bias); Liu et al., 2024, "GRIN: gradient-informed MoE" (sparse mixer).

    Example:
        >>> chosen, weights = choose_experts(router(x), 8, scores="sigmoid", correction_bias=bias)
    """
    found: tuple[Tensor, Tensor] = _choose_experts(
        logits,
        correction_bias,
        expert_scale,
        num_active,
        scores,
        normalised,
        float(norm_eps),
        float(scale),
        num_groups,
        num_active_groups,
        best_in_group,
        float(jitter),
        shared_weight,
        backend,
    )
    return found


def _check(
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    num_active: int,
    scores: str,
    normalised: bool,
    norm_eps: float,
    scale: float,
    num_groups: int,
    num_active_groups: int,
    best_in_group: int,
    jitter: float,
    shared_weight: str,
    backend: str | None,
) -> None:
    checks.check_float("logits", logits)
    checks.check_dims("logits", logits, "(T, N)")
    checks.check_last_dim_contiguous("logits", logits)
    if shared_weight not in get_args(SharedWeight):
        names = ", ".join(get_args(SharedWeight))
        raise ValueError(f"shared_weight must be one of {names}, got {shared_weight!r}")
    num_experts = logits.shape[1] - (shared_weight == "sigmoid")
    check_choice(
        num_experts,
        num_active,
        scores,
        correction_bias is not None,
        num_groups,
        num_active_groups,
        best_in_group,
    )
    if correction_bias is not None:
        checks.check_same_dtype("correction_bias", correction_bias, torch.float32)
        checks.check_shape("correction_bias", correction_bias, (num_experts,))
        checks.check_device("correction_bias", correction_bias, logits.device)
        checks.check_last_dim_contiguous("correction_bias", correction_bias)
    if expert_scale is not None:
        checks.check_float("expert_scale", expert_scale)
        checks.check_shape("expert_scale", expert_scale, (num_experts,))
        checks.check_device("expert_scale", expert_scale, logits.device)
        checks.check_last_dim_contiguous("expert_scale", expert_scale)
    dispatch.check_backend_name(backend)


def check_choice(
    num_experts: int,
    num_active: int,
    scores: str,
    has_correction_bias: bool,
    num_groups: int,
    num_active_groups: int,
    best_in_group: int,
) -> None:
    """Raise ValueError unless the options of `choose_experts` are in range and go together.

    No tensor is needed, so that a model may check its configuration by it.
    """
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts must be in 1 ... {MOST_EXPERTS}, got {num_experts}")
    most = min(num_experts, MOST_ACTIVE)
    if not 1 <= num_active <= most:
        raise ValueError(f"num_active must be in 1 ... {most}, got {num_active}")
    if scores not in get_args(Scores):
        raise ValueError(f"scores must be one of {', '.join(get_args(Scores))}, got {scores!r}")
    if not 1 <= num_groups <= MOST_GROUPS or num_experts % num_groups:
        raise ValueError(
            f"num_groups must be at most {MOST_GROUPS} and divide the {num_experts} experts, "
            f"got {num_groups}"
        )
    if not 1 <= num_active_groups <= num_groups:
        raise ValueError(
            f"num_active_groups must be in 1 ... {num_groups}, got {num_active_groups}"
        )
    size = num_experts // num_groups
    if num_active > num_active_groups * size:
        raise ValueError(
            f"num_active must be at most the {num_active_groups * size} experts of "
            f"num_active_groups, got {num_active}"
        )
    if best_in_group not in (1, 2) or best_in_group > size:
        raise ValueError(
            f"best_in_group must be 1 or 2, and at most the {size} experts of a group, "
            f"got {best_in_group}"
        )
    if scores == "sparse_mixer" and (num_active != 2 or num_groups != 1 or has_correction_bias):
        raise ValueError(
            "scores must be softmax or sigmoid with groups, a correction_bias, or other than 2 "
            f"experts a token, got {scores!r} with num_active {num_active}"
        )


def _chosen(
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    num_active: int,
    *options: Any,
) -> partial[tuple[Tensor, Tensor]]:
    *rest, backend = options
    name = dispatch.choose("choose_experts", ElementSpec(logits.device.type, logits.dtype), backend)
    launch = dispatch.kernel_module("choose_experts", name).launch
    return partial(launch, logits, correction_bias, expert_scale, num_active, *rest)


def _fake(
    logits: Tensor,
    correction_bias: Tensor | None,
    expert_scale: Tensor | None,
    num_active: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *_, shared_weight, _ = options
    shape = (logits.shape[0], num_active + (shared_weight != "none"))
    return (
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        torch.empty(shape, dtype=torch.float32, device=logits.device),
    )


register_step(
    "choose_experts(Tensor logits, Tensor? correction_bias, Tensor? expert_scale, int num_active, "
    "str scores, bool normalised, float norm_eps, float scale, int num_groups, "
    "int num_active_groups, int best_in_group, float jitter, str shared_weight, str? backend) "
    "-> (Tensor, Tensor)",
    _chosen,
    _fake,
)
refuse_gradient("choose_experts")
_choose_experts = step("choose_experts", _check)
