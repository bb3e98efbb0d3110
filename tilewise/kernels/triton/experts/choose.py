"""Choose the experts of each token, and their weights.

what     scores of N logits, the k largest of them, with a correction and among the best groups if
         there are any, and the weights of these; and, where all tokens share a block, that block
         and its weight; see `ops.choose_experts`
grid     (tokens,)
program  a token: k maxima in turn
traffic  the logits once
numerics float32. Of equal scores the expert of the lower number is chosen. A token's program knows
         no other token, so neither do its bits. One whose logits are NaN has weights that are NaN
         and valid experts
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.elements import why_not as why_not

_SCORES = {"softmax": 0, "sigmoid": 1, "sparse_mixer": 2}
_SHARED = {"none": 0, "one": 1, "sigmoid": 2}


@triton.jit
def _among_groups(
    score,
    expert,
    group_size,
    GROUPS: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return bool (EXPERTS,), True for an expert in one of the ACTIVE_GROUPS best groups.

    The score of a group is the sum of its BEST (1 or 2) largest scores; of equal groups the first
    is better. score, expert: the score and the number of each expert, (EXPERTS,). SLOTS: a power of
    two of at least GROUPS.
    """
    own = expert // group_size
    group = tl.arange(0, SLOTS)
    total = tl.full([SLOTS], -float("inf"), tl.float32)
    for g in tl.range(0, GROUPS):
        part = tl.where(own == g, score, -float("inf"))
        best = tl.max(part, 0)
        if BEST == 2:
            first = tl.min(tl.where(part == best, expert, EXPERTS), 0)
            best += tl.max(tl.where(expert == first, -float("inf"), part), 0)
        total = tl.where(group == g, best, total)
    kept = tl.zeros([EXPERTS], tl.int32)
    for _ in tl.range(0, ACTIVE_GROUPS):
        top = tl.max(total, 0)
        which = tl.min(tl.where(total == top, group, SLOTS), 0)
        kept += (own == which).to(tl.int32)
        total = tl.where(group == which, -float("inf"), total)
    return kept > 0


@triton.jit
def choose_kernel(
    logits_ptr,
    bias_ptr,
    factor_ptr,
    chosen_ptr,
    weight_ptr,
    num_experts,
    stride_logits,
    group_size,
    norm_eps,
    scale,
    distance,
    SCORES: tl.constexpr,
    NORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    is_expert = expert < num_experts
    at = logits_ptr + token * stride_logits + expert
    logits = tl.load(at, mask=is_expert, other=-float("inf")).to(tl.float32)
    broken = tl.max((logits != logits).to(tl.int32), 0) > 0
    top = tl.max(tl.where(logits == logits, logits, -float("inf")), 0)
    total = tl.sum(tl.exp(logits - top), 0)
    if SCORES == 1:
        score = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORES == 0 and (CORRECTED or BEST == 2):
        score = tl.exp(logits - top) / total
    else:
        score = logits  # in the order of the probabilities
    if CORRECTED:
        score += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    # From here on: valid scores, then those of other groups, padding, and what was chosen.
    score = tl.where(score == score, tl.maximum(score, -3.0e38), -3.0e38)
    if GROUPS > 1:
        is_kept = _among_groups(
            score, expert, group_size, GROUPS, ACTIVE_GROUPS, BEST, EXPERTS, GROUP_SLOTS
        )
        score = tl.where(is_kept, score, -3.1e38)
    score = tl.where(is_expert, score, -3.2e38)
    best = tl.full([SLOTS], -float("inf"), tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    for j in tl.range(0, ACTIVE):
        largest = tl.max(score, 0)
        which = tl.min(tl.where(score == largest, expert, EXPERTS), 0)
        hit = expert == which
        own = tl.sum(tl.where(hit, logits, 0.0), 0)
        best = tl.where(slot == j, own, best)
        chosen = tl.where(slot == j, which, chosen)
        score = tl.where(hit, -float("inf"), score)
    if SCORES == 1:
        weight = tl.where(slot < ACTIVE, 1.0 / (1.0 + tl.exp(-best)), 0.0)
        if NORMALISED:
            weight = weight / (tl.sum(weight, 0) + norm_eps)
    elif SCORES == 2:
        second = tl.sum(tl.where(slot == 1, best, 0.0), 0)
        size = tl.abs(logits)
        near = is_expert & (top - logits <= distance * tl.maximum(size, top))
        first_sum = tl.sum(tl.where(near, tl.exp(logits - top), 0.0), 0)
        first = tl.sum(tl.where(slot == 0, chosen, 0), 0)
        near = is_expert & (second - logits <= distance * tl.maximum(size, second))
        near = near & (expert != first)
        second_sum = tl.sum(tl.where(near, tl.exp(logits - second), 0.0), 0)
        weight = 1.0 / tl.where(slot == 0, first_sum, second_sum)
    elif NORMALISED:
        weight = tl.exp(best - tl.max(best, 0))
        weight = weight / tl.sum(weight, 0)
    else:
        weight = tl.exp(best - top) / total
    weight *= scale
    if HAS_FACTORS:
        weight *= tl.load(factor_ptr + chosen).to(tl.float32)
    weight = tl.where(broken, float("nan"), weight)
    COUNT: tl.constexpr = ACTIVE + (SHARED > 0)
    if SHARED > 0:
        own = 1.0
        if SHARED == 2:
            gate = tl.load(logits_ptr + token * stride_logits + num_experts).to(tl.float32)
            own = 1.0 / (1.0 + tl.exp(-gate))
        weight = tl.where(slot == ACTIVE, own, weight)
        chosen = tl.where(slot == ACTIVE, num_experts, chosen)
    to = token * COUNT + slot
    tl.store(chosen_ptr + to, chosen, mask=slot < COUNT)
    tl.store(weight_ptr + to, weight, mask=slot < COUNT)


@planned
def launch(
    maker: Maker,
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
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, int32 (T, k) or (T, k + 1), and their weights, float32.

    The arguments are those of `ops.choose_experts`, whose docstring has the rules.
    """
    shared = _SHARED[shared_weight]
    tokens, num_experts = logits.shape[0], logits.shape[1] - (shared == 2)
    count = num_active + (shared > 0)
    chosen = maker.empty((tokens, count), torch.int32)
    weights = maker.empty((tokens, count), torch.float32)
    if tokens == 0:
        return chosen, weights
    experts = triton.next_power_of_2(num_experts)
    maker.launch(
        choose_kernel,
        tokens,
        logits,
        logits if correction_bias is None else correction_bias,
        logits if expert_scale is None else expert_scale,
        chosen,
        weights,
        num_experts,
        logits.stride(0),
        num_experts // num_groups,
        norm_eps,
        scale,
        2 * jitter,
        SCORES=_SCORES[scores],
        NORMALISED=normalised,
        CORRECTED=correction_bias is not None,
        HAS_FACTORS=expert_scale is not None,
        GROUPS=num_groups,
        ACTIVE_GROUPS=num_active_groups,
        BEST=best_in_group if num_groups > 1 else 1,
        GROUP_SLOTS=triton.next_power_of_2(num_groups),
        ACTIVE=num_active,
        SHARED=shared,
        EXPERTS=experts,
        SLOTS=triton.next_power_of_2(count),
        num_warps=1 if experts <= 256 else 4,
    )
    return chosen, weights
