"""The product with a weight of 8 or 4 bits on a CPU: the values of a part, then torch's product.

An engine does not come here: it packs weights for its compiled step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec

__all__ = ["launch", "why_not"]

_AT_ONCE = 1 << 22
"""Values of a part: 16 MiB of float32."""


def why_not(spec: QuantisedLinearSpec) -> str | None:
    """Return why this product cannot run `spec`, or None if it can: all but batch-invariant
    calls."""
    if spec.batch_invariant:
        return "a row's bits depend on the others in torch's products"
    return None


def launch(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """Return y = x W^T + bias, (..., N) of x's dtype, for x (..., K), a quantised weight (N, K) and
    bias (N,) or None; some rows of the weight are dequantised at a time."""
    rows, columns = weight.shape
    shape, x = x.shape[:-1], x.reshape(x.shape[:-1].numel(), columns)
    y = torch.empty((len(x), rows), dtype=x.dtype)
    each = max(1, _AT_ONCE // columns)
    for first in range(0, rows, each):
        end = min(first + each, rows)
        values = weight.cut((first, end), (0, columns)).dequantise().to(x.dtype)
        y[:, first:end] = F.linear(x, values, None if bias is None else bias[first:end])
    return y.view(*shape, rows)
