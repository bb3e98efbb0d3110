"""Short calls of the ops on this machine: errors against float64, and speed.

Every result is judged by the rule of the tests, `testing.budget_violation`: at most twice as wrong
as eager PyTorch in the same dtype. Rows begin while there is time left, so a machine that has
nothing compiled runs fewer of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.bench.timing import time_call
from tilewise.cost import visible_pairs
from tilewise.doctor.backends import Support, devices
from tilewise.ops import attention, mla_decode, paged_attention
from tilewise.reference import mla, paged, standard
from tilewise.testing import accumulator_scales, budget_violation, make_paged_cache, make_qkv

__all__ = ["SECONDS", "Trial", "trials"]

SECONDS = 20.0
_TIMING_S = 0.25  # of one speed

Check = tuple[str, Any, Any, Any, float]  # name, result, truth, eager, scale


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the self-test of one op on one backend and dtype.

    Attributes:
        op: the name of the op.
        device: the type of the device, "cpu" or "cuda".
        backend: the backend that is chosen for the op.
        dtype: the dtype of the op's tensors.
        wrong: the fault of a result, or the text of an exception; None if all results are right or
            the row was left out.
        first_s: the seconds of the first call, which compiles what no cache has.
        speed: the rate of later calls of a larger shape; None if it was not measured.
        unit: the unit of `speed`, "TFLOP/s" or "GB/s".
        left_out: True if the time was up before this row, which then was not run.
    """

    op: str
    device: str
    backend: str
    dtype: str
    wrong: str | None = None
    first_s: float | None = None
    speed: float | None = None
    unit: str = "TFLOP/s"
    left_out: bool = False


def trials(supported: list[Support], seconds: float = SECONDS) -> Iterator[Trial]:
    """Run the self-test: yield a Trial for each op, device and dtype, on the backend that is chosen
    there.

    Args:
        supported: the ops and their backends, from `backends.support`.
        seconds: the time after which no further row begins.
    """
    end = time.monotonic() + seconds
    runs: dict[str, Callable[[Support, torch.dtype], Trial]] = {
        "attention": _attention,
        "paged_attention": _paged,
        "mla_decode": _latent,
    }
    rows = [row for row in supported if row.backend is not None and row.device in devices()]
    wanted = [(row, torch.bfloat16) for row in rows]
    # Products of 32 bits have kernels of their own.
    wanted += [(row, torch.float32) for row in rows if row.op == "attention"]
    for row, dtype in wanted:
        if time.monotonic() < end:
            yield runs[row.op](row, dtype)
        else:
            name = str(dtype).removeprefix("torch.")
            yield Trial(row.op, row.device, str(row.backend), name, left_out=True)


def _trial(
    row: Support,
    dtype: torch.dtype,
    run: Callable[[], list[Check]],
    speed: Callable[[], float],
    unit: str,
) -> Trial:
    """Run the self-test of one op and return its Trial; an exception becomes the trial's fault.

    Args:
        row: the op, its device and its backend.
        dtype: the dtype of the tensors.
        run: a function that computes the results and returns them as checks against the budget.
        speed: a function that measures the op and returns its rate.
        unit: the unit of that rate.
    """
    name, backend = str(dtype).removeprefix("torch."), str(row.backend)
    op, where = row.op, row.device
    begin = time.perf_counter()
    try:
        checks = run()
        first_s = time.perf_counter() - begin
        for part, result, truth, eager, scale in checks:
            violation = budget_violation(result, truth, eager, scale=scale)
            if violation is not None:
                return Trial(op, where, backend, name, f"{part}: {violation}", first_s, None, unit)
        return Trial(op, where, backend, name, None, first_s, speed(), unit)
    except Exception as error:  # a report says what failed, whatever it is
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Trial(op, where, backend, name, wrong, None, None, unit)


def _attention(row: Support, dtype: torch.dtype) -> Trial:
    """Return the trial of attention, causal with two query heads a key head, forward and
    backward."""
    where = row.device

    def results(
        function: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], do: Tensor
    ) -> dict[str, Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        o, lse = function(*leaves, causal=True, return_lse=True)
        grads = torch.autograd.grad(o, leaves, do.to(o.dtype))
        return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    q, k, v = make_qkv(1, 150, 150, 4, 2, 64, dtype=dtype, device=where)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)

    def run() -> list[Check]:
        ours = results(attention, (q, k, v), do)
        if where == "cuda":
            torch.cuda.synchronize()
        truth = results(standard.attention, tuple(x.double() for x in (q, k, v)), do.double())
        eager = results(standard.attention, (q, k, v), do)
        scales = accumulator_scales(q, k, v, do, q.shape[-1] ** -0.5)
        return [
            (part, ours[part], truth[part], eager[part], scales.get(part, 0.0)) for part in ours
        ]

    def speed() -> float:
        n, heads, dim = (4096, 16, 128) if where == "cuda" else (1024, 8, 64)
        inputs = make_qkv(1, n, n, heads, heads, dim, dtype=dtype, device=where)
        timing = time_call(lambda: attention(*inputs, causal=True), where, budget=_TIMING_S)
        return 4 * heads * dim * visible_pairs(n, n, window_right=0) / timing.median / 1e12

    return _trial(row, dtype, run, speed, "TFLOP/s")


def _rows(batch: int, where: str) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=where)


def _paged(row: Support, dtype: torch.dtype) -> Trial:
    """Return the trial of paged_attention: a decode step over a cache with shuffled blocks and NaN
    in free slots."""
    where = row.device

    def arguments(
        lengths: list[int], heads: tuple[int, int]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        k_cache, v_cache, table, seqlens_k = make_paged_cache(
            lengths, 16, heads[1], 128, dtype=dtype, device=where
        )
        q = torch.randn(len(lengths), heads[0], 128, generator=torch.Generator().manual_seed(1))
        step: dict[str, Any] = {"block_table": table, "seqlens_k": seqlens_k}
        step["cu_seqlens_q"] = _rows(len(lengths), where)
        return (q.to(k_cache), k_cache, v_cache), step

    def run() -> list[Check]:
        tensors, step = arguments([1, 33, 170], (8, 2))
        o = paged_attention(*tensors, **step, max_seqlen_q=1)
        if where == "cuda":
            torch.cuda.synchronize()
        truth = paged.paged_attention(*(x.double() for x in tensors), **step)
        return [("o", o, truth, paged.paged_attention(*tensors, **step), 0.0)]

    def speed() -> float:
        batch, length = (64, 2048) if where == "cuda" else (4, 2048)
        tensors, step = arguments([length] * batch, (8, 2))
        timing = time_call(
            lambda: paged_attention(*tensors, **step, max_seqlen_q=1), where, budget=_TIMING_S
        )
        return 2 * batch * length * 2 * 128 * dtype.itemsize / timing.median / 1e9

    return _trial(row, dtype, run, speed, "GB/s")


def _latent(row: Support, dtype: torch.dtype) -> Trial:
    """Return the trial of mla_decode: a decode step over cached latents of DeepSeek's shape."""
    where = row.device
    rank, rope, scale = 512, 64, 192**-0.5

    def arguments(lengths: list[int], heads: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        _, cache, table, seqlens_k = make_paged_cache(
            lengths, 64, 1, 8, v_head_dim=rank + rope, dtype=dtype, device=where
        )
        drawn = torch.randn(
            len(lengths), heads, rank + rope, generator=torch.Generator().manual_seed(1)
        ).to(cache)
        q_latent, q_rope = drawn.split((rank, rope), dim=-1)
        step: dict[str, Any] = {"block_table": table, "seqlens_k": seqlens_k}
        step["cu_seqlens_q"] = _rows(len(lengths), where)
        step["softmax_scale"] = scale
        return (q_latent.contiguous(), q_rope.contiguous(), cache.squeeze(2)), step

    def run() -> list[Check]:
        tensors, step = arguments([1, 33, 170], 16)
        o = mla_decode(*tensors, **step, max_seqlen_q=1)
        if where == "cuda":
            torch.cuda.synchronize()
        truth = mla.mla_decode(*(x.double() for x in tensors), **step)
        return [("o", o, truth, mla.mla_decode(*tensors, **step), 0.0)]

    def speed() -> float:
        batch, length = (64, 2048) if where == "cuda" else (2, 1024)
        tensors, step = arguments([length] * batch, 128 if where == "cuda" else 16)
        timing = time_call(
            lambda: mla_decode(*tensors, **step, max_seqlen_q=1), where, budget=_TIMING_S
        )
        return batch * length * (rank + rope) * dtype.itemsize / timing.median / 1e9

    return _trial(row, dtype, run, speed, "GB/s")
