"""Cross-entropy of a linear head, in chunks of rows: the logits of a batch are never all there.

A training pass computes each chunk's gradient together with its loss, so that its logits live for
the time of three matrix products: at 32,768 rows and 50,304 columns float32 logits would take 6.6
GB and their gradient as much again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise import ops

__all__ = ["IGNORED", "LOSSES", "chunked_loss", "find_loss", "liger_loss", "token_logprobs"]

IGNORED = -100  # a target without a loss, as torch's cross_entropy counts it
# A chunk's logits, in elements: 8,192 rows of GPT-2's vocabulary. Larger products are faster, and
# the gradient of the head, which each chunk reads and writes, is moved less often.
CHUNK_ELEMENTS = 8192 * 50_304


def _chunk_rows(rows: int, columns: int) -> int:
    """Return the rows of a chunk, so that its logits have at most about CHUNK_ELEMENTS elements.

    All chunks (but the last) have this size, since each size is a shape of its own to a compiler.
    """
    count = max(1, -(-rows * columns // CHUNK_ELEMENTS))
    return -(-rows // count)


class _ChunkedLoss(torch.autograd.Function):
    """The function of `chunked_loss`, whose forward pass computes the gradients of x, weight and
    bias, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: int
    ) -> Tensor:
        size = _chunk_rows(x.shape[0], weight.shape[0])
        narrow = weight.to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 / (targets != IGNORED).sum().clamp(min=1).to(wide)
        total = torch.zeros((), dtype=wide, device=x.device)
        dweight = torch.zeros_like(weight, dtype=wide)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        dx = []
        for rows, wanted in zip(x.split(size), targets.split(size), strict=True):
            logits = _logits(rows, narrow, bias, columns)
            maximum = logits.amax(-1, keepdim=True)
            lse = (logits - maximum).exp().sum(-1, keepdim=True).log() + maximum
            has = (wanted != IGNORED)[:, None]
            safe = wanted.clamp(min=0)[:, None]
            picked = logits.gather(1, safe)
            total = total + torch.where(has, lse - picked, 0.0).sum()
            is_wanted = torch.arange(weight.shape[0], device=x.device) == safe
            p = (logits - lse).exp()
            dlogits = torch.where(has, (p - is_wanted.to(wide)) * scale, 0.0)
            if dbias is not None:
                dbias = dbias + dlogits.sum(0)
            narrowed = dlogits.to(x.dtype)
            dx.append(narrowed @ narrow)
            dweight = dweight + (narrowed.t() @ rows).to(wide)
        ctx.save_for_backward(torch.cat(dx), dweight.to(weight.dtype), dbias)
        return total * scale

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = ctx.saved_tensors
        return (
            dx * dloss.to(dx.dtype),
            dweight * dloss.to(dweight.dtype),
            None if dbias is None else dbias * dloss.to(dbias.dtype),
            None,
            None,
        )


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """Return the logits (rows, V) in float32 (float64 for float64); columns from `columns` on are
    -inf."""
    logits = F.linear(rows, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if bias is not None:
        logits = logits + bias
    if columns == weight.shape[0]:
        return logits
    is_word = torch.arange(weight.shape[0], device=rows.device) < columns
    return torch.where(is_word, logits, float("-inf"))


def chunked_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of softmax(x weight^T + bias) over rows that have a target.

    Args:
        x: (T, E) of the products' dtype; weight: (V, E) and bias: (V,) of the parameters' dtype.
        targets: int64 (T,) in 0 ... columns - 1, or IGNORED.
        columns: words of the vocabulary; those after it pad the weight. None is V.

    Returns:
        A float32 scalar (float64 for float64 x), in nats; 0 where no row has a target. Without
        gradients enabled only the loss is computed.

    Source: the gradient of softmax cross-entropy, p - onehot; chunked as in Liger-Kernel (2024).

    Example:
        >>> loss = chunked_loss(hidden, head.weight, None, targets)
        >>> loss.backward()
    """
    columns = weight.shape[0] if columns is None else columns
    if torch.is_grad_enabled():
        loss: Tensor = _ChunkedLoss.apply(x, weight, bias, targets, columns)  # type: ignore[no-untyped-call, unused-ignore]
        return loss
    size = _chunk_rows(x.shape[0], weight.shape[0])
    total, narrow = torch.zeros((), device=x.device), weight.to(x.dtype)
    for rows, wanted in zip(x.split(size), targets.split(size), strict=True):
        logits = _logits(rows, narrow, bias, columns)
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


class _TokenLogprobs(torch.autograd.Function):
    """The function of `token_logprobs`; it keeps the logits alone, and its gradient is dy (onehot -
    p)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor) -> Tensor:
        ctx.save_for_backward(logits, token_ids)
        if not logits.is_cuda:  # an engine on a CPU takes them from torch, too
            return logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
        return ops.token_logprobs(logits.contiguous(), token_ids.contiguous(), 0)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        logits, token_ids = ctx.saved_tensors
        d_logits = logits.softmax(-1).mul_(-dy[:, None])
        return d_logits.scatter_add_(-1, token_ids[:, None], dy[:, None]), None


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return log_softmax(logits) of one token a row: the bits of an engine, torch's gradient.

    With the logits of a model after `use_inference_bits` the values are those that a
    batch-invariant engine returned with the tokens.

    Args:
        logits: (R, V) float32.
        token_ids: int64 (R,), in [0, V).

    Returns:
        float32 (R,).

    Example:
        >>> logits = model.compute_logits(model(ids))[0, start - 1 : -1]
        >>> token_logprobs(logits, ids[0, start:])
    """
    found: Tensor = _TokenLogprobs.apply(logits, token_ids)  # type: ignore[no-untyped-call, unused-ignore]
    return found


def liger_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: int | None = None
) -> Tensor:
    """Return the loss of `chunked_loss`, computed by Liger-Kernel's fused linear cross-entropy; not
    within compiled graphs.

    Raises:
        ImportError: liger-kernel is not installed.
        ValueError: the vocabulary is padded, which Liger cannot hide.
    """
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise ImportError(
            "loss 'liger' needs Liger-Kernel: pip install 'tilewise[liger]'"
        ) from error
    if columns is not None and columns != weight.shape[0]:
        raise ValueError(
            f"columns must be all {weight.shape[0]} of the weight for loss 'liger', got {columns}"
        )
    narrow = None if bias is None else bias.to(x.dtype)
    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    loss: Tensor = fused(weight.to(x.dtype), x, targets, narrow)
    return loss


LOSSES = {"chunked": chunked_loss, "liger": liger_loss}


def find_loss(name: str) -> Any:
    """Return the loss function of this name, "chunked" or "liger".

    Raises:
        ValueError: no loss has that name.
    """
    if name not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {name!r}")
    return LOSSES[name]
