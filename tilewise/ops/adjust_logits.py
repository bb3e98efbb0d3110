"""adjust_logits(): apply biases, masks and penalties of requests to logits, in one call."""

from __future__ import annotations

from functools import partial
from typing import Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.step import register_step, step

__all__ = ["adjust_logits", "words_of"]


@names
def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    *,
    mask: Tensor | None = None,
    mask_of: Tensor | None = None,
    bias_rows: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    counts_of: Tensor | None = None,
    penalties: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> None:
    """Change rows of logits in place by biases, masks and penalties.

    Rows that are not in `rows` and have no bias are neither read nor written. The changes, in this
    order, each operation rounded to float32:

    1. logits[bias_rows[e], bias_ids[e]] += bias[e], also in a row that is not in `rows`;
    2. the logit of a token whose mask bit is 0 becomes -inf;
    3. the logit of a token that occurs in the prompt or the output (its number in counts is not 0)
       is divided by the repetition penalty if the logit is positive, otherwise multiplied by it;
    4. the logit of a token that was generated n > 0 times loses n * frequency penalty, then the
       presence penalty.

    Args:
        logits: (R, V) float32, last dim contiguous.
        rows: int64 (A,), distinct rows of logits, to which masks and penalties apply.
        mask: int32 (M, ceil(V / 32)), contiguous; bit t % 32 of word t // 32 allows token t.
        mask_of: int32 (A,), the index of each row's mask; -1 for none. Given with mask.
        bias_rows, bias_ids: int64 (E,), a row of logits and a token each, no pair twice.
        bias: float32 (E,), the biases. The three are given together.
        counts: int32 (S, V), last dim contiguous: 2 * times generated + (1 in the prompt).
        counts_of: int32 (A,), the index of each row's counts; -1 for none. Given with counts.
        penalties: float32 (A, 3), contiguous: repetition (above 0), frequency, presence. Given with
            counts.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it. Values are not
            checked: "cpu" and "triton" skip a row, token, mask or count that does not exist.
        UnsupportedError: the backend cannot run this call; the message says why.

    Source: Keskar et al., 2019, "CTRL", for the repetition penalty; the OpenAI API for the others.

    Example:
        >>> logits, rows = torch.zeros(2, 64), torch.tensor([1])
        >>> only = torch.tensor([[0b1000, 0]], dtype=torch.int32)
        >>> adjust_logits(logits, rows, mask=only, mask_of=torch.zeros(1, dtype=torch.int32))
        >>> logits[1].argmax()  # 3
    """
    if unknown:
        raise unknown_keyword(adjust_logits, unknown)
    _adjust_logits(
        logits,
        rows,
        mask,
        mask_of,
        bias_rows,
        bias_ids,
        bias,
        counts,
        counts_of,
        penalties,
        backend,
    )


def _check(
    logits: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    mask_of: Tensor | None,
    bias_rows: Tensor | None,
    bias_ids: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    counts_of: Tensor | None,
    penalties: Tensor | None,
    backend: str | None,
) -> None:
    checks.check_same_dtype("logits", logits, torch.float32)
    checks.check_dims("logits", logits, "(R, V)")
    checks.check_last_dim_contiguous("logits", logits)
    checks.check_same_dtype("rows", rows, torch.int64)
    checks.check_dims("rows", rows, "(A)")
    number, vocab = len(rows), logits.shape[1]
    groups = (
        (("mask", mask, torch.int32), ("mask_of", mask_of, torch.int32)),
        (
            ("bias_rows", bias_rows, torch.int64),
            ("bias_ids", bias_ids, torch.int64),
            ("bias", bias, torch.float32),
        ),
        (
            ("counts", counts, torch.int32),
            ("counts_of", counts_of, torch.int32),
            ("penalties", penalties, torch.float32),
        ),
    )
    for group in groups:
        given = [name for name, x, _ in group if x is not None]
        if 0 < len(given) < len(group):
            missing = next(name for name, x, _ in group if x is None)
            raise ValueError(f"{missing} must be given with {given[0]}, got None")
        for name, x, dtype in group:
            if x is not None:
                checks.check_same_dtype(name, x, dtype)
                checks.check_device(name, x, logits.device)
                checks.check_last_dim_contiguous(name, x)
    checks.check_device("rows", rows, logits.device)
    if mask is not None and mask_of is not None:
        checks.check_shape("mask", mask, (len(mask), words_of(vocab)))
        checks.check_shape("mask_of", mask_of, (number,))
        if not mask.is_contiguous():
            raise ValueError(f"mask must be contiguous, got strides {tuple(mask.stride())}")
    if bias_rows is not None and bias_ids is not None and bias is not None:
        checks.check_dims("bias", bias, "(E)")
        checks.check_shape("bias_rows", bias_rows, bias.shape)
        checks.check_shape("bias_ids", bias_ids, bias.shape)
    if counts is not None and counts_of is not None and penalties is not None:
        checks.check_shape("counts", counts, (len(counts), vocab))
        checks.check_shape("counts_of", counts_of, (number,))
        checks.check_shape("penalties", penalties, (number, 3))
        if not penalties.is_contiguous():
            raise ValueError(
                f"penalties must be contiguous, got strides {tuple(penalties.stride())}"
            )
    dispatch.check_backend_name(backend)


def words_of(vocab: int) -> int:
    """Return the number of 32-bit words of a mask's row: one bit for each of `vocab` tokens."""
    return -(-vocab // 32)


def _chosen(logits: Tensor, rows: Tensor, *arguments: object) -> partial[None]:
    *tensors, backend = arguments
    assert backend is None or isinstance(backend, str)
    spec = ElementSpec(logits.device.type, logits.dtype)
    name = dispatch.choose("adjust_logits", spec, backend)
    return partial(dispatch.kernel_module("adjust_logits", name).launch, logits, rows, *tensors)


def _fake(logits: Tensor, *_: object) -> None:
    return None


register_step(
    "adjust_logits(Tensor(a!) logits, Tensor rows, Tensor? mask, Tensor? mask_of, "
    "Tensor? bias_rows, Tensor? bias_ids, Tensor? bias, Tensor? counts, Tensor? counts_of, "
    "Tensor? penalties, str? backend) -> ()",
    _chosen,
    _fake,
)
_adjust_logits = step("adjust_logits", _check)
