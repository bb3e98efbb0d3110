"""Merge the results (o, lse) of attention over two disjoint sets of keys into those over both."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["merge_states"]


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial outputs, weighted by the log-sum-exp of their keys.

    lse = log(exp(lse_a) + exp(lse_b)); o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b. A side with
    lse = -inf has seen no key: its weight is 0, whatever its o contains. If both are -inf, o = 0
    and lse = -inf.

    Args:
        o_a, o_b: (T, H, Dv) or (B, S, H, Dv), of one dtype.
        lse_a, lse_b: (H, T) or (B, H, S), natural log.

    Returns:
        o in the shape and dtype of o_a; lse in the shape of lse_a, float32 or wider.

    Source: Stratos, "Efficient Attention", eq. 2, with two chunks.
    """
    wide = torch.promote_types(o_a.dtype, torch.promote_types(lse_a.dtype, torch.float32))
    lses = torch.stack([lse_a.to(wide), lse_b.to(wide)])
    seen = lses != -math.inf
    m = torch.where(seen, lses, -math.inf).detach().amax(dim=0)
    m = torch.where(m == -math.inf, 0.0, m)
    weights = torch.exp(lses - m)
    total = weights.sum(dim=0)
    empty = total == 0
    # replaced before the log and the division, so that no 0 * inf arises
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    share = (weights / total).transpose(-1, -2).unsqueeze(-1)  # (2, ..., T, H, 1)
    seen = seen.transpose(-1, -2).unsqueeze(-1)
    parts = torch.stack([o_a.to(wide), o_b.to(wide)])
    o = (share * torch.where(seen, parts, 0.0)).sum(dim=0)
    return o.to(o_a.dtype), lse
