"""S_dmask: the matrix by which flash-attn's own tests check dropout.

It is for tests only, as it takes O(Sq Sk) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import ops
from tilewise.integrations.flash_attn.rule import Rule

# (largest head dim, keys of a step) of flash-attn's kernels with dropout. They scale S_dmask by the
# maximum known at each step, and their tests undo that scale, so the steps must be the same.
_KEYS_PER_STEP = ((32, 128), (64, 64), (96, 64), (128, 32))
_KEYS_PER_WIDE_STEP = 64


def signed_probabilities(
    q: Tensor,
    k: Tensor,
    rule: Rule,
    seed: Tensor,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
) -> Tensor:
    """Return flash-attn's S_dmask of a call with dropout: probabilities with a sign.

    Entry (i, j) is exp(s_ij - m_ij), negative where dropped, 0 where i does not see j; m_ij is the
    largest logit of row i from the step of j, a tile of keys, to the last one (flash-attn's kernel
    goes from right to left). Times exp(m_ij - lse_i) it is the probability before dropout. A
    dropped entry that would round to 0 becomes minus the smallest normal number, so that it always
    has a sign.

    Args:
        q: (B, Sq, Hq, D); k: (B, Sk, Hk, D).
        rule: the scale, window, softcap, slopes and dropout of the call.
        seed: int64 (2,), the seed of the call.
        lengths_q, lengths_k: (B,) int32, the rows and keys of each sequence; None means all.

    Returns:
        (B, Hq, Sq, Sk) in q's dtype, without gradient.
    """
    with torch.no_grad():
        s = _logits(q, k, rule, lengths_q, lengths_k)
        batch, heads, seqlen_q, seqlen_k = s.shape
        shape = (batch, heads, seqlen_q, seqlen_k)
        keep = ops.dropout_keep_mask(shape, dropout_p=rule.dropout_p, seed=seed, device=s.device)
        p = torch.exp(s - _maximum_so_far(s, _keys_per_step(q.shape[-1]))).to(q.dtype)
        tiny = torch.finfo(q.dtype).tiny
        return torch.where(s.isneginf(), 0, torch.where(keep, p, -p.clamp(min=tiny)))


def dense_rows(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Copy packed rows (T, H, D) to (B, max_seqlen, H, D); rows after a sequence's end are
    arbitrary."""
    rows = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=x.device)
    return (
        x[rows.clamp(max=max(x.shape[0] - 1, 0))]
        if x.shape[0]
        else x.new_zeros((*rows.shape, *x.shape[1:]))
    )


def _logits(
    q: Tensor, k: Tensor, rule: Rule, lengths_q: Tensor | None, lengths_k: Tensor | None
) -> Tensor:
    """Return logits (B, Hq, Sq, Sk) in float32 (float64 for float64), -inf where not visible."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k.to(wide)) * rule.softmax_scale
    if rule.softcap > 0:
        s = rule.softcap * torch.tanh(s / rule.softcap)
    seqlen_q, seqlen_k = s.shape[-2:]
    i = torch.arange(seqlen_q, device=s.device).view(-1, 1)
    j = torch.arange(seqlen_k, device=s.device)
    end_q = seqlen_q if lengths_q is None else lengths_q.view(-1, 1, 1, 1)
    end_k = seqlen_k if lengths_k is None else lengths_k.view(-1, 1, 1, 1)
    right_of = j - (i + end_k - end_q)  # number of keys from the diagonal of row i to j
    if rule.alibi_slopes is not None:
        slopes = rule.alibi_slopes.to(wide).reshape(-1, s.shape[1], 1, 1)
        s = s - slopes * right_of.abs()
    seen = (i < end_q) & (j < end_k)
    left, right = rule.window
    if left >= 0:
        seen = seen & (right_of >= -left)
    if right >= 0:
        seen = seen & (right_of <= right)
    return torch.where(seen, s, float("-inf"))


def _keys_per_step(head_dim: int) -> int:
    for widest, keys in _KEYS_PER_STEP:
        if head_dim <= widest:
            return keys
    return _KEYS_PER_WIDE_STEP


def _maximum_so_far(s: Tensor, keys: int) -> Tensor:
    """Return for each key of s (..., Sk) the maximum of its row from the key's step to the end,
    like s.

    A step is `keys` consecutive keys. A maximum of -inf becomes 0.
    """
    seqlen_k = s.shape[-1]
    steps = torch.nn.functional.pad(s, (0, -seqlen_k % keys), value=float("-inf"))
    largest = steps.unflatten(-1, (-1, keys)).amax(-1)
    if seqlen_k:
        largest = largest.flip(-1).cummax(-1).values.flip(-1)
    spread = largest.repeat_interleave(keys, -1)[..., :seqlen_k]
    return torch.where(spread.isneginf(), 0, spread)
