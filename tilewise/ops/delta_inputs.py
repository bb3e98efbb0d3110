"""delta_inputs(): what gated delta rule takes, of the projections of a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

__all__ = ["delta_inputs"]


def delta_inputs(
    mixed: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float = 1.0,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give queries and keys unit length, and make decays and betas, in one kernel.

    q = x / sqrt(sum(x^2) + eps) of the first Hk heads of `mixed`, k of the next Hk;
    beta = round(round(sigmoid(b)) * beta_scale); g = -exp(a_log) softplus(a + dt_bias). All is
    float32, rounded once to the dtype of `mixed`, but for g. Nothing is differentiable.

    Args:
        mixed: (T, C), float32, float16 or bfloat16, last dim contiguous: first Hk heads of queries
            and Hk of keys, of K channels.
        ba: (T, 2 H), the dtype of mixed, last dim contiguous: b, then a, of H heads.
        a_log, dt_bias: (H,) float32, contiguous.
        num_key_heads, key_dim: Hk and K.
        beta_scale: the factor of beta.
        eps: the number that is added to the sum of squares.
        backend: "triton" or "reference"; None chooses.

    Returns:
        q and k (T, Hk, K) in the dtype of mixed, g and beta (T, H) float32, as `gated_delta_step`
        reads them: q, k, g, beta.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated delta networks", section 3.3.

    Example:
        >>> mixed, ba = torch.randn(3, 512), torch.randn(3, 8)
        >>> q, k, g, beta = delta_inputs(
        ...     mixed, ba, torch.zeros(4), torch.ones(4), num_key_heads=2, key_dim=64)
    """
    q, k, g, beta = _delta_inputs(
        mixed, ba, a_log, dt_bias, num_key_heads, key_dim, float(beta_scale), eps, backend
    )
    return q, k, g, beta


def _check(
    mixed: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float,
    eps: float,
    backend: str | None,
) -> None:
    checks.check_float("mixed", mixed)
    least = 2 * num_key_heads * key_dim
    if min(num_key_heads, key_dim) < 1 or mixed.dim() != 2 or mixed.shape[1] < least:
        raise ValueError(
            f"mixed must be (T, C) with C at least 2 * num_key_heads * key_dim = {least} and above "
            f"0, got shape {tuple(mixed.shape)}"
        )
    checks.check_last_dim_contiguous("mixed", mixed)
    checks.check_same_dtype("ba", ba, mixed.dtype)
    checks.check_shape("ba", ba, (len(mixed), 2 * a_log.shape[-1]))
    checks.check_last_dim_contiguous("ba", ba)
    for name, tensor in (("a_log", a_log), ("dt_bias", dt_bias)):
        checks.check_same_dtype(name, tensor, torch.float32)
        checks.check_shape(name, tensor, (a_log.shape[-1],))
        checks.check_last_dim_contiguous(name, tensor)
    for name, tensor in (("ba", ba), ("a_log", a_log), ("dt_bias", dt_bias)):
        checks.check_device(name, tensor, mixed.device)
    dispatch.check_backend_name(backend)


def _chosen(mixed: Tensor, *given: Any) -> partial[Any]:
    *arguments, backend = given
    name = dispatch.choose("delta_inputs", ElementSpec(mixed.device.type, mixed.dtype), backend)
    return partial(dispatch.kernel_module("delta_inputs", name).delta_inputs, mixed, *arguments)


def _fake(
    mixed: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, heads: int, dim: int, *_: Any
) -> tuple[Tensor, ...]:
    q, k = (mixed.new_empty(len(mixed), heads, dim) for _ in range(2))
    g, beta = (
        mixed.new_empty((len(mixed), a_log.shape[-1]), dtype=torch.float32) for _ in range(2)
    )
    return q, k, g, beta


register_step(
    "delta_inputs(Tensor mixed, Tensor ba, Tensor a_log, Tensor dt_bias, int num_key_heads, "
    "int key_dim, float beta_scale, float eps, str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _chosen,
    _fake,
)
refuse_gradient("delta_inputs")
_delta_inputs = step("delta_inputs", _check)
