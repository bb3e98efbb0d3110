"""Choose the experts of each token, and sort the tokens' rows by expert.

what     the k largest of N logits a token, the softmax over them, and a stable counting sort of the
         T k assignments by expert
grid     (tiles of tokens,), twice: choose, then place
program  TOKENS tokens: choose takes k maxima in turn and counts its assignments of each expert;
         place adds the counts of the tiles before it and ranks its own
traffic  the logits once; N counts a tile of tokens, read by every later tile
numerics float32. Of equal logits the expert of the lower number is chosen. A token whose logits are
         NaN has weights that are NaN and valid experts, so that it affects no other token
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def choose_kernel(
    logits_ptr, expert_ptr, weight_ptr, count_ptr, tokens, num_experts, stride_logits,
    ACTIVE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    is_token, is_expert = token < tokens, expert < num_experts
    at = logits_ptr + token.to(tl.int64)[:, None] * stride_logits + expert[None, :]
    inside = is_token[:, None] & is_expert[None, :]
    logits = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max((logits != logits).to(tl.int32), 1) > 0
    # Logits that are chosen already become less than all others: float32's least, and -inf is a
    # logit.
    left = tl.where(inside & (logits == logits), tl.maximum(logits, -3.0e38), -3.2e38)
    best = tl.zeros([TOKENS, SLOTS], tl.float32)
    chosen = tl.zeros([TOKENS, SLOTS], tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    for j in tl.static_range(ACTIVE):
        top = tl.max(left, 1)
        is_top = (left == top[:, None]) & is_expert[None, :]
        which = tl.min(tl.where(is_top, expert[None, :], EXPERTS), 1)
        hit = expert[None, :] == which[:, None]
        own = tl.sum(tl.where(hit, logits, 0.0), 1)
        best = tl.where((slot == j)[None, :], own[:, None], best)
        chosen = tl.where((slot == j)[None, :], which[:, None], chosen)
        counts += tl.sum((hit & is_token[:, None]).to(tl.int32), 0)
        left = tl.where(hit, -float("inf"), left)
    is_slot = (slot < ACTIVE)[None, :]
    top = tl.max(tl.where(is_slot, best, -float("inf")), 1)
    p = tl.where(is_slot, tl.exp(best - top[:, None]), 0.0)
    weight = p / tl.sum(p, 1)[:, None]
    weight = tl.where(broken[:, None], float("nan"), weight)
    to = token.to(tl.int64)[:, None] * ACTIVE + slot[None, :]
    stored = is_token[:, None] & is_slot
    tl.store(expert_ptr + to, chosen, mask=stored)
    tl.store(weight_ptr + to, weight, mask=stored)
    tl.store(count_ptr + tl.program_id(0) * EXPERTS + expert, counts)


@triton.jit(do_not_specialize=["tokens"])
def place_kernel(
    expert_ptr, count_ptr, start_ptr, place_ptr, row_ptr, tokens,
    ACTIVE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
    for other in range(0, tiles):
        counts = tl.load(count_ptr + other * EXPERTS + expert)
        total += counts
        before += tl.where(other < tile, counts, 0)
    end = tl.cumsum(total, 0)
    start = end - total
    if tile == 0:
        tl.store(start_ptr + expert, start)
        tl.store(start_ptr + 1 + expert, end, mask=expert == EXPERTS - 1)
    # Assignments of this tile in order of token, then of slot; slots from ACTIVE on are unused.
    pair = tl.arange(0, TOKENS * SLOTS)
    token, slot = tile * TOKENS + pair // SLOTS, pair % SLOTS
    is_pair = (token < tokens) & (slot < ACTIVE)
    at = token.to(tl.int64) * ACTIVE + slot
    which = tl.load(expert_ptr + at, mask=is_pair, other=0)
    hit = ((expert[None, :] == which[:, None]) & is_pair[:, None]).to(tl.int32)
    rank = tl.cumsum(hit, 0) - hit
    place = tl.sum(hit * (rank + (start + before)[None, :]), 1)
    tl.store(place_ptr + at, place, mask=is_pair)
    tl.store(row_ptr + place, at.to(tl.int32), mask=is_pair)
