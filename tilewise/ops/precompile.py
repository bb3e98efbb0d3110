"""precompile(): compile the usual kernels before the first call needs them.

Nothing is tuned at run time, so a first call waits for the compiler alone: about a second a kernel.
Triton and numba store compiled kernels on disk, where every later process finds them.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Never

import torch

from tilewise.children import spawning
from tilewise.errors import UnsupportedError
from tilewise.keywords import names, unknown_keyword
from tilewise.ops.attention.api import attention, attention_varlen
from tilewise.ops.latent.api import mla_decode, write_latent_cache
from tilewise.ops.paged.api import paged_attention, plan_paged_attention
from tilewise.ops.paged.cache import write_kv_cache
from tilewise.ops.paged.shared_prefixes import shared_prefixes
from tilewise.progress import Progress

__all__ = ["USUAL_HEAD_DIMS", "Precompiled", "attention_calls", "precompile"]

USUAL_HEAD_DIMS = (64, 128, 256)
_TOKENS = 256  # a whole tile of every kernel, and more than one of most
_BLOCK_SIZE = 16
_LATENT = (16, 512, 64, 64)  # heads, R and Dr of DeepSeek's models, tokens of a cache block


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of an op, which compiles the kernels that it launches."""

    kind: str  # "dense", "packed", "paged" or "latent"
    head_dim: int
    dtype: torch.dtype
    causal: bool
    ragged: bool  # lengths that do not fit the tiles, for which some kernels have separate code
    needs_backward: bool


@dataclass(frozen=True, slots=True)
class Precompiled:
    """The result of `precompile`: the number of calls made, one line for each that failed with the
    reason, and the wall time in seconds."""

    calls: int
    failures: tuple[str, ...]
    seconds: float


@names
def precompile(
    *,
    head_dims: Sequence[int] = USUAL_HEAD_DIMS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    device: str | None = None,
    needs_backward: bool = True,
    workers: int | None = None,
    shows_progress: bool = False,
    **unknown: Never,
) -> Precompiled:
    """Compile attention for these heads into the caches on disk: dense, packed, paged and latent.

    Paged calls are prompts, single tokens with and without a plan, and shared prefixes. Latent ones
    have DeepSeek's sizes, whatever head_dims says.

    Args:
        head_dims: D of q, k and v.
        dtypes: a list of float16, bfloat16 or float32.
        device: the device, "cuda" or "cpu"; None takes a GPU if there is one.
        needs_backward: True to compile also the gradients of dense and packed attention.
        workers: the number of compiling processes; None is one a core, at most 16.
        shows_progress: True to write progress to standard error.

    Raises:
        ValueError: head_dims, dtypes or workers is empty or not positive.
        UnsupportedError: device="cuda" without a GPU.
    """
    if unknown:
        raise unknown_keyword(precompile, unknown)
    if not head_dims or min(head_dims) < 1:
        raise ValueError(f"head_dims must be positive numbers, got {list(head_dims)}")
    if not dtypes:
        raise ValueError("dtypes must name at least one dtype, got none")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError("device must be one that torch can see, got 'cuda' without a GPU")
    jobs = list(_jobs(head_dims, dtypes, needs_backward))
    begin = time.monotonic()
    failures = _run(jobs, device, workers or min(16, os.cpu_count() or 1), shows_progress)
    return Precompiled(len(jobs), tuple(failures), time.monotonic() - begin)


def _jobs(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], needs_backward: bool
) -> Iterator[_Job]:
    for dtype, head_dim, causal in itertools.product(dtypes, head_dims, (False, True)):
        for ragged in (False, True):
            yield _Job("dense", head_dim, dtype, causal, ragged, needs_backward)
        yield _Job("packed", head_dim, dtype, causal, True, needs_backward)
        if causal:
            yield _Job("paged", head_dim, dtype, causal, True, False)
    for dtype in dtypes:
        yield _Job("latent", _LATENT[1], dtype, True, True, False)


def attention_calls(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], device: str
) -> list[str]:
    """Make every call of `precompile` in this process, without gradients, which compiles kernels.

    Returns:
        One line for each call that failed, with the reason.
    """
    jobs = list(_jobs(head_dims, dtypes, needs_backward=False))
    return _run(jobs, device, workers=1, shows_progress=False)


def _run(jobs: list[_Job], device: str, workers: int, shows_progress: bool) -> list[str]:
    """Make every call in one of `workers` new processes, or in this one if `workers` is 1.

    Returns:
        One line for each call that failed, with the reason.
    """
    if workers == 1:
        return _collect((_attempt((job, device)) for job in jobs), len(jobs), shows_progress)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with spawning(), context.Pool(min(workers, len(jobs))) as pool:
        outcomes = pool.imap_unordered(_attempt, [(job, device) for job in jobs])
        return _collect(outcomes, len(jobs), shows_progress)


def _collect(outcomes: Iterable[str | None], total: int, shows_progress: bool) -> list[str]:
    failures = []
    with Progress(shows_progress) as progress:
        for number, failure in enumerate(outcomes, 1):
            if failure is not None:
                failures.append(failure)
            progress.show(f"compiled {number} of {total} calls", number / total)
    return failures


def _attempt(work: tuple[_Job, str]) -> str | None:
    """Make the call of a job on a device and wait for it.

    Returns:
        None, or one line that names the job and the exception: none is raised.
    """
    job, device = work
    try:
        _CALLS[job.kind](job, device)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return f"{job.kind} {job.head_dim} {job.dtype}: {type(error).__name__}: {reason}"
    return None


def _random(job: _Job, device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(job.dtype).requires_grad_(job.needs_backward)


def _dense(job: _Job, device: str) -> None:
    tokens = _TOKENS - 7 if job.ragged else _TOKENS
    q, k, v = (_random(job, device, 1, tokens, heads, job.head_dim) for heads in (2, 1, 1))
    o = attention(q, k, v, causal=job.causal)
    if job.needs_backward:
        o.sum().backward()


def _packed(job: _Job, device: str) -> None:
    starts = torch.tensor([0, 100, _TOKENS], dtype=torch.int32, device=device)
    q, k, v = (_random(job, device, _TOKENS, heads, job.head_dim) for heads in (2, 1, 1))
    o = attention_varlen(
        q,
        k,
        v,
        causal=job.causal,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=_TOKENS - 100,
        max_seqlen_k=_TOKENS - 100,
    )
    if job.needs_backward:
        o.sum().backward()


def _paged(job: _Job, device: str) -> None:
    """Call paged attention for prompts of two sequences, then for one token of each of them.

    The single tokens are computed alone, with a plan, and with a common prefix. The calls, and one
    that writes to the cache, compile the kernels.
    """
    length = _TOKENS // 2
    blocks = length // _BLOCK_SIZE
    shape = (2 * blocks, _BLOCK_SIZE, 1, job.head_dim)
    k_cache, v_cache = (_random(job, device, *shape) for _ in "kv")
    table = torch.arange(2 * blocks, dtype=torch.int32).view(2, blocks)
    common = table.clone()
    common[1, : blocks // 2] = common[0, : blocks // 2]
    lengths = torch.tensor([length, length], dtype=torch.int32)
    k, v = (_random(job, device, 2, 1, job.head_dim) for _ in "kv")
    write_kv_cache(k, v, k_cache, v_cache, torch.arange(2, device=device))
    for tokens in (length, 1):
        starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
        q = _random(job, device, 2 * tokens, 2, job.head_dim)
        call = functools.partial(
            paged_attention,
            q,
            k_cache,
            v_cache,
            seqlens_k=lengths.to(device),
            cu_seqlens_q=starts.to(device),
            max_seqlen_q=tokens,
        )
        call(block_table=table.to(device))
    plan = plan_paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=table.to(device),
        seqlens_k=lengths.to(device),
        cu_seqlens_q=starts.to(device),
        max_seqlen_q=1,
    )
    call(block_table=table.to(device), plan=plan)
    shared = shared_prefixes(
        common, lengths, starts, block_size=_BLOCK_SIZE, min_blocks=blocks // 2, device=device
    )
    call(block_table=common.to(device), shared=shared)


def _latent(job: _Job, device: str) -> None:
    """Call the write of a latent cache and `mla_decode` for one token, which compiles the kernels.

    Sizes are those of DeepSeek's models, whatever the job's head dim is.
    """
    heads, rank, rope, block_size = _LATENT
    blocks = _TOKENS // block_size
    cache = _random(job, device, blocks, block_size, rank + rope)
    z, k_rope = (_random(job, device, 1, width) for width in (rank, rope))
    write_latent_cache(z, k_rope, cache, torch.zeros(1, dtype=torch.int64, device=device))
    mla_decode(
        _random(job, device, 1, heads, rank),
        _random(job, device, 1, heads, rope),
        cache,
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        seqlens_k=torch.tensor([_TOKENS - 7], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen_q=1,
        softmax_scale=(rank + rope) ** -0.5,
    )


_CALLS = {"dense": _dense, "packed": _packed, "paged": _paged, "latent": _latent}
