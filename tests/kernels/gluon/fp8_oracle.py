"""What e4m3 attention on a tensor core may be off by: from the formats, not from what came out.

Four roundings stand between a kernel and float64 on the dequantised values: probabilities to e4m3
(`reference.fp8.probability_bound`); logits, summed by the tensor core in about 14 bits and, on the
portable backend, from operands of 16 bits; sums over a tile of values, in 14 bits again; and o to
its dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.reference import fp8, standard

# Largest relative error of a sum of e4m3 products, 32 at a time: 13 bits after the leading one
# survive each time. Logits have up to 256 channels, a tile of values 128 keys.
_EPS_SUM = 8 * 2.0**-13
_EPS_TILE = 4 * 2.0**-13
_EPS_16_BITS = 2.0**-8  # two operands of 8 significant bits
_EPS_TANH = 2.0**-10.9  # of the special function unit, where logits are capped


class Truth(NamedTuple):
    """Float64 results, and how far each may be missed."""

    o: Tensor
    lse: Tensor
    o_bound: Tensor
    o_typical: Tensor
    s_bound: Tensor  # of logits, by query: (B, Hq, Sq)


def dequantised_truth(
    q: Tensor, k: Tensor, v: Tensor, *, per_token: bool = False, **rule: Any
) -> Truth:
    """Return attention of the dequantised values in float64 with its bounds; 16-bit inputs."""
    seqlens = rule.get("seqlens_k")
    of_q_and_k = fp8.quantize_tokens if per_token else fp8.quantize_heads
    q8, k8, v8 = (
        fp8.dequantize_heads(*quantize(x, seqlens=lengths))
        for x, lengths, quantize in (
            (q, None, of_q_and_k), (k, seqlens, of_q_and_k), (v, seqlens, fp8.quantize_heads)
        )
    )  # fmt: skip
    o, lse = standard.attention(q8, k8, v8, return_lse=True, **rule)
    scale = q.shape[-1] ** -0.5
    visible = standard.visible_keys(
        q8, k8, causal=rule.get("causal", False), window=rule.get("window"), seqlens_k=seqlens,
        mask=rule.get("mask"),
    )  # fmt: skip
    group = q.shape[2] // k.shape[2]
    keys = k8.transpose(1, 2).repeat_interleave(group, dim=1)
    values = v8.transpose(1, 2).repeat_interleave(group, dim=1)
    queries = q8.transpose(1, 2)
    s = queries @ keys.transpose(-1, -2) * scale
    cap = rule.get("softcap", 0.0)
    eps = _EPS_SUM + _EPS_16_BITS
    if cap > 0:
        s, eps = cap * torch.tanh(s / cap), eps + _EPS_TANH  # and the cap widens no error before it
    # lse counts a sink; a row that sees nothing has p = 0.
    p = torch.exp(s.masked_fill(~visible, -torch.inf) - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    largest, typical = fp8.probability_bound(p, values)
    products = queries.abs() @ keys.abs().transpose(-1, -2)
    s_bound = (products * scale).masked_fill(~visible, 0.0).amax(dim=-1) * eps
    # exp(s) moves by s_bound of itself, in the numerator and in the row sum.
    sums = p @ values.abs()
    moved = (2 * s_bound.unsqueeze(-1) + _EPS_TILE) * sums
    # Independent roundings of a logit's products, and of a row's probabilities, add up as squares.
    s_typical = (queries.square() @ keys.square().transpose(-1, -2)).sqrt() * scale
    s_typical *= eps / 3**0.5
    squares = typical.square() + (p * s_typical).square() @ values.square()
    rounding = torch.finfo(q.dtype).eps * o.abs()
    bound = (largest + moved).transpose(1, 2) + rounding
    typical = (squares.sqrt() + _EPS_TILE * sums).transpose(1, 2) + rounding
    return Truth(o, lse, bound, typical, s_bound)


def packed_truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    per_token: bool = False,
    **rule: Any,
) -> Truth:
    """Return `dequantised_truth` of each sequence of a packed batch, all in one as it is packed."""
    parts = []
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = [*pairwise(edges_q), (edges_q[-1], q.shape[0])]  # those of no sequence see no key
    keys = [*pairwise(edges_k), (0, 0)]
    for b, ((first, last), (first_k, last_k)) in enumerate(zip(rows, keys, strict=True)):
        own = (q[None, first:last], k[None, first_k:last_k], v[None, first_k:last_k])
        given = dict(rule)
        if "mask" in given:
            given["mask"] = crop(given["mask"], b, last - first, last_k - first_k)
        if b == len(edges_q) - 1:
            given.pop("sinks", None)
        if last_k == first_k:  # a key that no query sees stands for none
            own = (own[0], *(x.new_zeros((1, 1, *x.shape[1:])) for x in (k, v)))
            given["mask"] = torch.zeros(1, 1, last - first, 1, dtype=torch.bool, device=q.device)
        if last > first:
            parts.append(dequantised_truth(*own, per_token=per_token, **given))
    o, lse, o_bound, o_typical, s_bound = zip(*parts, strict=True)
    return Truth(
        torch.cat(o, 1)[0], torch.cat(lse, 2)[0], torch.cat(o_bound, 1)[0],
        torch.cat(o_typical, 1)[0], torch.cat(s_bound, 2)[0],
    )  # fmt: skip


def crop(mask: Tensor, b: int, rows: int, keys: int) -> Tensor:
    """Return what a mask (Bm, Hm, Sq, Sk) says of sequence b of a packed batch."""
    return mask[min(b, mask.shape[0] - 1)][None, :, :rows, :keys]


def assert_within_format(o: Tensor, lse: Tensor, truth: Truth) -> None:
    """Raise AssertionError when a result is further off than the formats explain."""
    error = (o.double() - truth.o).abs()
    assert bool(o.isfinite().all())
    excess = (error / (truth.o_bound + 1e-30)).max().item()
    assert excess <= 1.0, f"o is {excess:.2f} times as far off as its bound"
    rms, allowed = (x.square().mean().sqrt().item() for x in (error, truth.o_typical))
    assert rms <= allowed, f"rms error must be at most {allowed:.3e}, got {rms:.3e}"
    seen = truth.lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    missed = (lse.double() - truth.lse)[seen].abs()
    assert bool((missed <= truth.s_bound[seen] + 1e-5 * (1 + truth.lse[seen].abs())).all())
