"""sample_tokens() and token_logprobs(): from rows of logits to tokens, on their own device."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.step import register_step, step

MOST_LOGPROBS = 20
MOST_TOKENS = 1 << 20  # largest vocabulary: more would not fit a sum of integer weights


@names
def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    counters: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, each row by its own rule, without waiting for the device.

    A token is the inverse of the cumulative distribution, in the order of token ids, at number
    `counters` of the random stream `seeds` (Philox4x32-10, 53 bits; `philox.uniforms`). The
    distribution is softmax(logits / temperature), truncated in this order: the tokens with fewer
    than top_k more likely ones; of these, renormalised, those for which all more likely ones have
    less than top_p between them; of these those at least min_p times as likely as the most likely.
    Ties stand or fall together, and the most likely token stays.

    The token of a row depends on that row and its six numbers only, not on R nor on other rows.
    Probabilities are integers, 2^42 or more for the most likely token, and summed exactly; each is
    off by 4e-11 on a GPU (less on a CPU). Of draws from random logits fewer than 1e-5 differ from
    those of a float64 sampler: those whose number lies that near to a boundary.

    Args:
        logits: (R, V) float32, float16 or bfloat16, last dim contiguous, V at most 2^20; -inf
            forbids a token.
        temperature: float32 (R,); 0 takes the first of the largest logits. None is 0 for all.
        top_k: int32 (R,); below 1 or at least V keeps all. None keeps all in every row.
        top_p: float32 (R,) in (0, 1]; 1 keeps all. None is 1 for all.
        min_p: float32 (R,) in [0, 1]; 0 keeps all. None is 0 for all.
        seeds, counters: int64 (R,), needed with a temperature; their 64 bits count.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        token ids, int64 (R,), and whether the largest logit of a row is finite, bool (R,): where
        it is not (a NaN, an infinity, or nothing allowed) the id is some token's.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it. Values are not looked at.

    Source: Salmon et al., 2011, for the numbers; nothing here is sorted.

    Example:
        >>> logits = torch.randn(2, 1000)
        >>> stream = torch.zeros(2, dtype=torch.int64)
        >>> ids, is_finite = sample_tokens(
        ...     logits, temperature=torch.ones(2), seeds=stream, counters=stream)
    """
    if unknown:
        raise unknown_keyword(sample_tokens, unknown)
    tokens, is_finite = _sample_tokens(
        logits, temperature, top_k, top_p, min_p, seeds, counters, backend
    )
    return tokens, is_finite


@names
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    count: int,
    *,
    backend: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_softmax(logits) of one token a row, and of the `count` most likely ones.

    Args:
        logits: (R, V) float32, last dim contiguous, V at most 2^20.
        token_ids: int64 (R,), in [0, V); the log-probability of any other id is NaN.
        count: 0 ... 20, at most V.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        logprob float32 (R,); top_ids int64 and top_logprobs float32 (R, count), the most likely
        first, of equal ones the lower id first. A row that is not finite has NaN.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it. Values are not looked at.

    Example:
        >>> own, ids, values = token_logprobs(torch.randn(2, 100), torch.tensor([7, 8]), 5)
    """
    if unknown:
        raise unknown_keyword(token_logprobs, unknown)
    own, ids, values = _token_logprobs(logits, token_ids, count, backend)
    return own, ids, values


def _check(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    counters: Tensor | None,
    backend: str | None,
) -> None:
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            "logits must have dtype float32, float16 or bfloat16, "
            f"got {checks.dtype_name(logits.dtype)}"
        )
    _check_logits(logits)
    rows = (logits.shape[0],)
    for name, numbers, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("counters", counters, torch.int64),
    ):
        if numbers is not None:
            checks.check_same_dtype(name, numbers, dtype)
            checks.check_shape(name, numbers, rows)
            checks.check_device(name, numbers, logits.device)
            checks.check_last_dim_contiguous(name, numbers)
    if temperature is not None:
        for name, numbers in (("seeds", seeds), ("counters", counters)):
            if numbers is None:
                raise ValueError(f"{name} must be given with a temperature, got None")
    dispatch.check_backend_name(backend)


def _check_logprobs(logits: Tensor, token_ids: Tensor, count: int, backend: str | None) -> None:
    checks.check_same_dtype("logits", logits, torch.float32)
    _check_logits(logits)
    checks.check_same_dtype("token_ids", token_ids, torch.int64)
    checks.check_shape("token_ids", token_ids, (logits.shape[0],))
    checks.check_device("token_ids", token_ids, logits.device)
    checks.check_last_dim_contiguous("token_ids", token_ids)
    if not 0 <= count <= min(MOST_LOGPROBS, logits.shape[1]):
        raise ValueError(
            f"count must be in 0 ... {min(MOST_LOGPROBS, logits.shape[1])}, got {count}"
        )
    dispatch.check_backend_name(backend)


def _check_logits(logits: Tensor) -> None:
    checks.check_dims("logits", logits, "(R, V)")
    if not 1 <= logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"logits must have 1 ... {MOST_TOKENS} columns, got {logits.shape[1]}")
    checks.check_last_dim_contiguous("logits", logits)


def _name_of(logits: Tensor, backend: str | None) -> str:
    return dispatch.choose("sampling", ElementSpec(logits.device.type, torch.float32), backend)


def _chosen(logits: Tensor, *arguments: Any) -> partial[tuple[Tensor, Tensor]]:
    *numbers, backend = arguments
    name = _name_of(logits, backend)
    wide = logits if name == "triton" else logits.float()  # triton's kernels convert what they read
    return partial(dispatch.kernel_module("sampling", name).sample_tokens, wide, *numbers)


def _sample_fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)


def _chosen_logprobs(
    logits: Tensor, token_ids: Tensor, count: int, backend: str | None
) -> partial[tuple[Tensor, Tensor, Tensor]]:
    module = dispatch.kernel_module("sampling", _name_of(logits, backend))
    return partial(module.token_logprobs, logits, token_ids, count)


def _logprobs_fake(
    logits: Tensor, token_ids: Tensor, count: int, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    own = logits.new_empty(rows)
    return own, logits.new_empty((rows, count), dtype=torch.int64), logits.new_empty((rows, count))


register_step(
    "sample_tokens(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, Tensor? seeds, Tensor? counters, str? backend) -> (Tensor, Tensor)",
    _chosen,
    _sample_fake,
)
register_step(
    "token_logprobs(Tensor logits, Tensor token_ids, int count, str? backend) "
    "-> (Tensor, Tensor, Tensor)",
    _chosen_logprobs,
    _logprobs_fake,
)
_sample_tokens = step("sample_tokens", _check)
_token_logprobs = step("token_logprobs", _check_logprobs)
