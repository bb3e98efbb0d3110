"""Inputs and the single tolerance rule, shared by the tests and the benchmarks.

The truth is float64 on the *same rounded inputs*. A kernel may be at most twice as wrong as eager
PyTorch in the same dtype, plus one rounding: nothing else decides whether a result is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "accumulator_scales",
    "assert_within_budget",
    "budget_violation",
    "make_paged_cache",
    "make_qkv",
]


def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q (B, Sq, Hq, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) from N(0, 1) in float32,
    rounded to `dtype`.

    The same seed gives the same numbers on every device.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    shapes = (
        (batch, seqlen_q, num_q_heads, head_dim),
        (batch, seqlen_k, num_kv_heads, head_dim),
        (batch, seqlen_k, num_kv_heads, v_head_dim),
    )
    q, k, v = (
        torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes
    )
    if requires_grad:
        q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    return q, k, v


def make_paged_cache(
    seqlens_k: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    spare_blocks: int = 3,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a paged cache for sequences of seqlens_k tokens, with shuffled blocks and NaN in unowned
    slots.

    `spare_blocks` blocks belong to no sequence.

    Returns k_cache (N, P, Hk, D), v_cache (N, P, Hk, Dv), block_table (B, max_blocks) int32, with
    -1 past a sequence's last block, and seqlens_k (B,) int32.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    counts = [-(-length // block_size) for length in seqlens_k]
    num_blocks = sum(counts) + spare_blocks
    order = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"))
    v_cache = torch.full((num_blocks, block_size, num_kv_heads, v_head_dim), float("nan"))
    block_table = torch.full((len(seqlens_k), max([*counts, 1])), -1, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(seqlens_k, counts, strict=True)):
        for column in range(count):
            block = order.pop()
            block_table[row, column] = block
            filled = min(block_size, length - column * block_size)
            for cache in (k_cache, v_cache):
                cache[block, :filled] = torch.randn(
                    cache[block, :filled].shape, generator=generator
                )
    lengths = torch.tensor(seqlens_k, dtype=torch.int32)
    return (
        k_cache.to(device=device, dtype=dtype),
        v_cache.to(device=device, dtype=dtype),
        block_table.to(device),
        lengths.to(device),
    )


def accumulator_scales(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, softmax_scale: float
) -> dict[str, float]:
    """Return bounds of the values that attention's accumulators hold, by result ("o", "lse", "dq"
    ...), for `scale` of `budget_violation`; empty for empty tensors.

    Rounding a logit s once changes p by |s| eps, and so o by |s| max|v| eps. In the gradient dp and
    delta cancel: with one visible key dq is 0, and only the rounding of both is left. Both |s| and
    |dp| are bounded by Cauchy-Schwarz.
    """
    if min(q.numel(), k.numel(), v.numel(), do.numel()) == 0:
        return {}
    q_norm, k_norm, v_norm, do_norm = (float(t.double().norm(dim=-1).max()) for t in (q, k, v, do))
    s = softmax_scale * q_norm * k_norm
    ds = do_norm * v_norm * softmax_scale * max(1.0, s)
    return {
        "o": s * float(v.abs().max()),
        "lse": s,
        "dv": s * float(do.abs().max()),
        "dq": ds * float(k.abs().max()),
        "dk": ds * float(q.abs().max()),
        "dbias": do_norm * v_norm * max(1.0, s),
        "dsinks": do_norm * v_norm * max(1.0, s),
    }


def budget_violation(
    actual: Tensor, truth: Tensor, eager: Tensor, *, factor: float = 2.0, scale: float = 0.0
) -> str | None:
    """Return a text that says how `actual` exceeds the error budget; None if it does not.

    max|actual - truth| <= factor * max|eager - truth| + eps * max|truth| + eps_acc * scale, and the
    same for the root mean square; eps is that of actual's dtype, eps_acc that of the accumulators
    (float32, or float64 for float64). Infinities must stand in the same places.

    Args:
        actual: the result under test, any float dtype.
        truth: float64, from the same rounded inputs, same shape.
        eager: plain PyTorch in the dtype of the inputs, same shape.
        factor: the allowed multiple of eager's error.
        scale: the magnitude of the accumulators where it exceeds the result's: rounding them once
            is no mistake (see `accumulator_scales`).
    """
    if actual.shape != truth.shape:
        return f"shape must be {tuple(truth.shape)}, got {tuple(actual.shape)}"
    if actual.numel() == 0:
        return None
    eps = torch.finfo(actual.dtype).eps
    eps_acc = min(eps, torch.finfo(torch.float32).eps)
    got, want, plain = (t.detach().double().cpu() for t in (actual, truth, eager))
    finite = want.isfinite()
    if bool(want.isnan().any()):
        return "truth must not hold NaN"
    if not torch.equal(got[~finite], want[~finite]):
        expected, found = want[~finite][:4].tolist(), got[~finite][:4].tolist()
        return f"must equal {expected} where infinite, got {found}"
    got, want, plain = got[finite], want[finite], plain[finite]
    if got.numel() == 0:
        return None
    if not bool(got.isfinite().all()):
        return f"must be finite, got {int((~got.isfinite()).sum())} values that are not"
    for name, norm in (("max", _largest), ("rms", _rms)):
        error = norm(got - want)
        allowance = factor * norm(plain - want) + eps * norm(want) + eps_acc * scale
        if error > allowance:
            return f"{name} error must be at most {allowance:.3e}, got {error:.3e}"
    return None


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def assert_within_budget(
    actual: Tensor,
    truth: Tensor,
    eager: Tensor,
    *,
    name: str = "result",
    factor: float = 2.0,
    scale: float = 0.0,
) -> None:
    """Raise AssertionError, with `name` in the message, if `budget_violation`, which states the
    rule, finds an error too large."""
    violation = budget_violation(actual, truth, eager, factor=factor, scale=scale)
    if violation is not None:
        raise AssertionError(f"{name}: {violation}")
