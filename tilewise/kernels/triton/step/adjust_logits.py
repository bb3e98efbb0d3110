"""Change rows of logits in place by biases, masks and penalties.

what     biases added to single tokens, tokens forbidden by a bit mask, and penalties for tokens
         that a text already contains
grid     `_bias_kernel` (tiles of biases,), then `_adjust_kernel` (rows * chunks of TILE tokens,)
program  TILE_BIASES biases, no two of one token of a row; or a chunk of a row
traffic  the rows that change twice, their counts once, a bit a token of the mask
numerics float32, each operation rounded, in the order that `ops.adjust_logits` gives
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.spec import ElementSpec

TILE = 1024
TILE_BIASES = 128


@triton.jit(do_not_specialize=["number", "num_rows", "vocab"])
def _bias_kernel(
    logits_ptr, row_ptr, id_ptr, bias_ptr, number, stride, num_rows, vocab, TILE: tl.constexpr
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < number
    row = tl.load(row_ptr + at, mask=inside, other=0)
    token = tl.load(id_ptr + at, mask=inside, other=0)
    inside &= (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab)
    place = logits_ptr + row * stride + token
    logit = tl.load(place, mask=inside, other=0.0)
    tl.store(place, logit + tl.load(bias_ptr + at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_masks", "num_counts"])
def _adjust_kernel(
    logits_ptr,
    row_ptr,
    mask_ptr,
    mask_of_ptr,
    counts_ptr,
    counts_of_ptr,
    penalty_ptr,
    stride,
    counts_stride,
    words,
    vocab,
    chunks,
    num_rows,
    num_masks,
    num_counts,
    HAS_MASK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    index, chunk = program // chunks, program % chunks
    token = chunk * TILE + tl.arange(0, TILE)
    row = tl.load(row_ptr + index)
    inside = (token < vocab) & (row >= 0) & (row < num_rows)
    place = logits_ptr + row * stride + token
    logit = tl.load(place, mask=inside, other=0.0)
    if HAS_MASK:
        which = tl.load(mask_of_ptr + index).to(tl.int64)
        exists = (which >= 0) & (which < num_masks)
        word = tl.load(mask_ptr + which * words + token // 32, mask=inside & exists, other=-1)
        logit = tl.where((word >> (token % 32)) & 1 == 0, float("-inf"), logit)
    if HAS_COUNTS:
        which = tl.load(counts_of_ptr + index).to(tl.int64)
        exists = (which >= 0) & (which < num_counts)
        count = tl.load(counts_ptr + which * counts_stride + token, mask=inside & exists, other=0)
        repetition = tl.load(penalty_ptr + 3 * index)
        frequency = tl.load(penalty_ptr + 3 * index + 1)
        presence = tl.load(penalty_ptr + 3 * index + 2)
        repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where(count != 0, repeated, logit)
        penalised = logit - frequency * (count >> 1).to(tl.float32) - presence
        logit = tl.where(count > 1, penalised, logit)
    tl.store(place, logit, mask=inside)


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot run a call, or None if it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    return None


@planned
def launch(
    maker: Maker,
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
) -> None:
    """Add biases to logits (R, V), and apply masks and penalties to `rows` of them, in place.

    The arguments and the order of the changes are those of `ops.adjust_logits`.
    """
    vocab = logits.shape[1]
    if bias is not None and len(bias):
        maker.launch(
            _bias_kernel,
            triton.cdiv(len(bias), TILE_BIASES),
            logits,
            bias_rows,
            bias_ids,
            bias,
            len(bias),
            logits.stride(0),
            len(logits),
            vocab,
            TILE=TILE_BIASES,
            num_warps=4,
        )
    if len(rows) == 0 or (mask is None and counts is None):
        return
    chunks = triton.cdiv(vocab, TILE)

    def given(x: Tensor | None) -> Tensor:
        return rows if x is None else x

    maker.launch(
        _adjust_kernel,
        len(rows) * chunks,
        logits,
        rows,
        given(mask),
        given(mask_of),
        given(counts),
        given(counts_of),
        given(penalties),
        logits.stride(0),
        0 if counts is None else counts.stride(0),
        triton.cdiv(vocab, 32),
        vocab,
        chunks,
        len(logits),
        0 if mask is None else len(mask),
        0 if counts is None else len(counts),
        HAS_MASK=mask is not None,
        HAS_COUNTS=counts is not None,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
