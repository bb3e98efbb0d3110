"""Calls of the attention kernels: their tensors, their truth in float64, and their judge."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks
from tilewise.kernels import device as facts
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.reference import dropout, standard
from tilewise.testing import accumulator_scales, assert_within_budget, make_qkv

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CAUSAL = (-1, 0)
# Where a portable kernel runs.
ON_CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(not facts.interpreting(), reason="the interpreter is off")
)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def everyday(cases: Iterable[str], names: Container[str]) -> list[Any]:
    """Return parameters of all cases, of which those that are not in `names` are slow."""
    return [pytest.param(case, marks=[] if case in names else pytest.mark.slow) for case in cases]


@dataclass(frozen=True)
class Call:
    """One dense call, or a packed one when `lengths` is given."""

    seqlen_q: int = 128
    seqlen_k: int = 128
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    dtype: torch.dtype = SINGLE
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "sequences": who has slopes of its own
    sinks: bool = False
    bias: tuple[int, ...] | None = None  # its shape
    bias_dtype: torch.dtype | None = None  # that of q
    mask: tuple[int, int] | None = None  # (Bm, Hm) of a random mask with empty and full tiles
    mask_tile: tuple[int, int] = (64, 64)
    dropout_p: float = 0.0
    seqlens_k: tuple[int, ...] | None = None
    lengths: tuple[tuple[int, int], ...] | None = None  # (queries, keys) of each packed sequence


@dataclass
class Problem:
    """The tensors of one call."""

    call: Call
    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    philox: Tensor | None = None
    visible: Tensor | None = None  # what `mask` says, bool (Bm, Hm, Sq, Sk)
    mask: MaskTensors | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqlens_k: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """The launchers' keyword arguments."""
        names = (
            "cu_seqlens_q",
            "cu_seqlens_k",
            "seqlens_k",
            "bias",
            "alibi_slopes",
            "sinks",
            "philox",
            "mask",
        )
        return {name: getattr(self, name) for name in names}


def starts(lengths: list[int], device: str) -> Tensor:
    """Return cu_seqlens of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).to(
        device
    )


def random_mask(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Draw a bool mask with full, empty and mixed 64 x 64 tiles and a row that sees nothing."""
    kinds = torch.randint(0, 3, (batch, heads, seqlen_q // 64 + 1, seqlen_k // 64 + 1))
    kinds = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :seqlen_q, :seqlen_k]
    visible = (kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape) < 0.4))
    visible[:, :, seqlen_q // 2] = False
    visible[..., seqlen_k // 2] = False
    return visible


def make_problem(call: Call, device: str) -> Problem:
    """Draw the tensors of a call."""
    (heads_q, heads_k), (d, dv) = call.heads, call.dims
    batch, seqlen_q, seqlen_k = call.batch, call.seqlen_q, call.seqlen_k
    if call.lengths is not None:
        batch, seqlen_q, seqlen_k = 1, *(sum(pair[i] for pair in call.lengths) for i in (0, 1))
    q, k, v = make_qkv(
        batch, seqlen_q, seqlen_k, heads_q, heads_k, d, v_head_dim=dv, dtype=call.dtype,
        device=device,
    )  # fmt: skip
    do = torch.randn(batch, seqlen_q, heads_q, dv).to(device, call.dtype)
    dlse = torch.randn(batch, heads_q, seqlen_q).to(device)
    cu_seqlens_q = cu_seqlens_k = None
    if call.lengths is not None:
        q, k, v, do, dlse = (x.squeeze(0) for x in (q, k, v, do, dlse))
        batch = len(call.lengths)
        seqlen_q, seqlen_k = (max(pair[i] for pair in call.lengths) for i in (0, 1))
        cu_seqlens_q, cu_seqlens_k = (
            starts([pair[i] for pair in call.lengths], device) for i in (0, 1)
        )
    spec = AttentionSpec(
        device_type=device,
        dtype=call.dtype,
        batch=batch,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        num_q_heads=heads_q,
        num_kv_heads=heads_k,
        head_dim=d,
        v_head_dim=dv,
        window_left=call.window[0],
        window_right=call.window[1],
        softmax_scale=d**-0.5 if call.scale is None else call.scale,
        softcap=call.softcap,
        is_varlen=call.lengths is not None,
        has_seqlens_k=call.seqlens_k is not None,
        has_bias=call.bias is not None,
        needs_dbias=call.bias is not None,
        has_alibi=call.alibi is not None,
        has_sinks=call.sinks,
        mask_tile=call.mask_tile if call.mask else None,
        dropout_p=call.dropout_p,
    )
    problem = Problem(
        call, spec, q, k, v, do, dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    if call.bias is not None:
        problem.bias = torch.randn(call.bias).to(device, call.bias_dtype or call.dtype)
    if call.alibi is not None:
        slopes = torch.linspace(0.05, 0.4, heads_q).to(device)
        rates = torch.linspace(1.0, 2.0, batch).to(device)
        problem.alibi_slopes = slopes if call.alibi == "heads" else rates[:, None] * slopes
    if call.sinks:
        problem.sinks = torch.randn(heads_q).to(device)
    if call.dropout_p > 0:
        problem.philox = torch.tensor([-(2**61) + 12345, 2**33 + 77]).to(device)
    if call.mask is not None:
        problem.visible = random_mask(*call.mask, seqlen_q, seqlen_k).to(device)
        mask = masks.dense(problem.visible, tile=call.mask_tile)
        problem.mask = MaskTensors(*mask.tensors())
    if call.seqlens_k is not None:
        problem.seqlens_k = torch.tensor(call.seqlens_k, dtype=torch.int32).to(device)
    return problem


def expected(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the reference and its autograd in `dtype`: float64 is the truth, others are the peer."""
    spec = problem.spec
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    wide = torch.promote_types(dtype, torch.float32)
    sinks = None if problem.sinks is None else problem.sinks.to(wide).detach().requires_grad_()
    bias = problem.bias
    if bias is not None:
        bias = (bias.double() if dtype == torch.float64 else bias).detach().requires_grad_()
    options: dict[str, Any] = {
        "window": problem.call.window,
        "softmax_scale": spec.softmax_scale,
        "softcap": problem.call.softcap,
        "bias": bias,
        "alibi_slopes": problem.alibi_slopes,
        "sinks": sinks,
        "mask": problem.visible,
        "return_lse": True,
    }
    if problem.philox is not None:
        shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
        options["keep_mask"] = dropout.keep_mask(problem.philox, shape, spec.dropout_p)
        options["dropout_p"] = spec.dropout_threshold / 256
    if problem.call.lengths is None:
        o, lse = standard.attention(q, k, v, seqlens_k=problem.seqlens_k, **options)
    else:
        o, lse = standard.attention_varlen(
            q, k, v, cu_seqlens_q=problem.cu_seqlens_q, cu_seqlens_k=problem.cu_seqlens_k, **options
        )
    wanted = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}
    wanted = {name: x for name, x in wanted.items() if x is not None}
    gradients = torch.autograd.grad(
        (o, lse), list(wanted.values()), (problem.do.to(dtype), problem.dlse.to(wide))
    )
    return {"o": o, "lse": lse} | dict(zip(wanted, gradients, strict=True))


def computed(problem: Problem) -> dict[str, Tensor]:
    """Run the kernels, forward and backward."""
    from tests.kernels.planned import backward, forward
    from tilewise.kernels.triton.attention import plan as kernels

    p = problem
    o, lse = forward(kernels, p.q, p.k, p.v, p.spec, **p.tensors)
    dq, dk, dv, dbias, dsinks = backward(
        kernels, p.do, p.dlse, p.q, p.k, p.v, o, lse, p.spec, **p.tensors
    )
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    return {name: result for name, result in results.items() if result is not None}


def assert_right(problem: Problem, results: dict[str, Tensor] | None = None) -> None:
    """Judge all results of a call, computed here unless given, by the error budget."""
    results = computed(problem) if results is None else results
    truth = expected(problem, torch.float64)
    eager = expected(problem, problem.call.dtype)
    kept = problem.spec.dropout_scale if problem.philox is not None else 1.0
    scales = accumulator_scales(
        problem.q, problem.k, problem.v, problem.do * kept, abs(problem.spec.softmax_scale)
    )
    assert results.keys() == truth.keys()
    for name, result in results.items():
        dtype = SINGLE if name in ("lse", "dsinks") else problem.call.dtype
        assert result.dtype == (problem.bias.dtype if name == "dbias" else dtype), name
        # A sink's gradient is read off o as it was rounded for the caller; eager does without o.
        factor = 3.0 if name == "dsinks" else 2.0
        assert_within_budget(
            result, truth[name], eager[name], name=name, factor=factor, scale=scales.get(name, 0.0)
        )
