"""Tiled attention on the CPU against the reference in float64: values and every gradient."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import warm
from tests.kernels import planned
from tilewise import ops
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.kernels.cpu.attention.problem import TILE_M, TILE_N
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.cpu.paged.decode import attend_rows
from tilewise.kernels.cpu.paged.decode_launch import run_decode
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import AttentionSpec
from tilewise.ops import call as memory
from tilewise.reference import standard
from tilewise.testing import accumulator_scales, assert_within_budget, make_qkv

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [dtype for dtype in DTYPES if why_not_dtype(dtype) is None]


@dataclass(frozen=True)
class Case:
    """A call by shape and options; tensors are drawn from a fixed seed."""

    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    options: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    seqlens_k: tuple[int, ...] | None = None


CASES = {
    "square": Case(batch=2),
    "causal off the tile": Case(seqlen_q=193, seqlen_k=193, options={"causal": True}),
    "one query": Case(seqlen_q=1, seqlen_k=301, heads=(8, 2)),
    "one key": Case(seqlen_q=70, seqlen_k=1),
    "more keys than queries, causal": Case(seqlen_q=37, seqlen_k=150, options={"causal": True}),
    "more queries than keys, causal": Case(seqlen_q=150, seqlen_k=37, options={"causal": True}),
    "group of 4": Case(seqlen_q=100, seqlen_k=140, heads=(8, 2), options={"causal": True}),
    "group of 7": Case(seqlen_q=65, seqlen_k=65, heads=(7, 1), options={"causal": True}),
    "head dim 96": Case(seqlen_q=80, seqlen_k=80, dims=(96, 96)),
    "head dim 256": Case(seqlen_q=70, seqlen_k=140, heads=(1, 1), dims=(256, 256)),
    "dims 192 and 128": Case(seqlen_q=66, seqlen_k=66, dims=(192, 128), options={"causal": True}),
    "dims 8 and 40": Case(seqlen_q=130, seqlen_k=130, dims=(8, 40)),
    "window of 1": Case(seqlen_q=90, seqlen_k=90, options={"window": 1}),
    "window of 100, long": Case(seqlen_q=400, seqlen_k=500, options={"window": 100}),
    # The last query that sees the first tile of keys is alone in a tile of queries.
    "window that ends past a tile": Case(
        seqlen_q=TILE_N + TILE_M, seqlen_k=TILE_N + TILE_M, heads=(1, 1),
        options={"window": ((1 - TILE_N) % TILE_M, None)},
    ),
    "window on both sides": Case(seqlen_q=200, seqlen_k=200, options={"window": (20, 10)}),
    "window to the right": Case(seqlen_q=150, seqlen_k=150, options={"window": (None, 5)}),
    "softcap": Case(seqlen_q=100, seqlen_k=130, options={"softcap": 5.0, "causal": True}),
    "bias": Case(batch=2, seqlen_q=70, seqlen_k=140, bias=(2, 2, 70, 140)),
    "bias of heads": Case(batch=3, seqlen_q=70, seqlen_k=140, heads=(4, 2), bias=(4, 70, 140)),
    "bias of positions": Case(batch=2, seqlen_q=70, seqlen_k=300, heads=(4, 2), bias=(70, 300)),
    "bias of keys": Case(batch=2, seqlen_q=70, seqlen_k=140, bias=(2, 1, 1, 140)),
    "bias of queries": Case(batch=2, seqlen_q=70, seqlen_k=140, bias=(1, 2, 70, 1)),
    "alibi": Case(seqlen_q=100, seqlen_k=150, heads=(4, 2), alibi=True, options={"causal": True}),
    "sinks": Case(seqlen_q=100, seqlen_k=90, sinks=True, options={"causal": True}),
    "key lengths": Case(batch=4, seqlen_q=50, seqlen_k=200, seqlens_k=(0, 1, 130, 200)),
    "everything": Case(
        batch=3, seqlen_q=90, seqlen_k=210, heads=(4, 2), dims=(64, 32), bias=(1, 4, 90, 210),
        alibi=True, sinks=True, seqlens_k=(3, 129, 210),
        options={"window": (60, 3), "softcap": 8.0, "softmax_scale": 0.2},
    ),
    "negative scale": Case(options={"softmax_scale": -0.3}),
    "zero scale": Case(options={"softmax_scale": 0.0}),
}  # fmt: skip


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the tensors that go with them, as the reference names them."""
    q, k, v = make_qkv(
        case.batch, case.seqlen_q, case.seqlen_k, *case.heads, case.dims[0],
        v_head_dim=case.dims[1], dtype=dtype,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    extra: dict[str, Any] = {}
    if case.bias is not None:
        extra["bias"] = torch.randn(case.bias, generator=generator).to(dtype)
    if case.alibi:
        extra["alibi_slopes"] = torch.rand(case.heads[0], generator=generator) * 0.1
    if case.sinks:
        extra["sinks"] = torch.randn(case.heads[0], generator=generator)
    if case.seqlens_k is not None:
        extra["seqlens_k"] = torch.tensor(case.seqlens_k, dtype=torch.int32)
    return [q, k, v], extra


def spec_of(qkv: list[Tensor], options: dict[str, Any], extra: dict[str, Any]) -> AttentionSpec:
    q, k, v = qkv
    left, right = standard.resolve_window(options.get("causal", False), options.get("window"))
    return AttentionSpec(
        device_type="cpu", dtype=q.dtype, batch=q.shape[0], max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1], num_q_heads=q.shape[2], num_kv_heads=k.shape[2],
        head_dim=q.shape[3], v_head_dim=v.shape[3], window_left=left, window_right=right,
        softmax_scale=options.get("softmax_scale", q.shape[3] ** -0.5),
        softcap=options.get("softcap", 0.0), has_seqlens_k="seqlens_k" in extra,
        has_bias="bias" in extra, has_alibi="alibi_slopes" in extra, has_sinks="sinks" in extra,
        needs_dbias="bias" in extra,
    )  # fmt: skip


def wide(extra: dict[str, Any]) -> dict[str, Any]:
    return {name: t.double() if t.is_floating_point() else t for name, t in extra.items()}


def named(o: Tensor, lse: Tensor, gradients: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    names = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
    return {n: t for n, t in zip(names, (o, lse, *gradients), strict=True) if t is not None}


def by_reference(
    qkv: list[Tensor], do: Tensor, dlse: Tensor, options: dict[str, Any], extra: dict[str, Any]
) -> dict[str, Tensor]:
    o, lse = standard.attention(*qkv, **options, **extra, return_lse=True)
    gradients = standard.attention_backward(do, *qkv, dlse=dlse, **options, **extra)
    return named(o, lse, gradients)


def by_kernel(
    qkv: list[Tensor], do: Tensor, dlse: Tensor | None, spec: AttentionSpec, extra: dict[str, Any]
) -> dict[str, Tensor]:
    o, lse = planned.forward(cpu, *qkv, spec, **extra)
    return named(o, lse, planned.backward(cpu, do, dlse, *qkv, o, lse, spec, **extra))


def cotangents(qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
    q, _, v = qkv
    generator = torch.Generator().manual_seed(2)
    do = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(q.dtype)
    dlse = torch.randn((q.shape[0], q.shape[2], q.shape[1]), generator=generator)
    return do, dlse.double() if q.dtype == torch.float64 else dlse


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_keep_the_budget(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    qkv, extra = inputs_of(case, dtype)
    do, dlse = cotangents(qkv)
    actual = by_kernel(qkv, do, dlse, spec_of(qkv, case.options, extra), extra)
    doubles = [tensor.double() for tensor in qkv]
    truth = by_reference(doubles, do.double(), dlse.double(), case.options, wide(extra))
    assert actual.keys() == truth.keys()
    if dtype == torch.float64:
        for key, value in actual.items():
            torch.testing.assert_close(
                value.double(), truth[key], rtol=1e-6 if key == "dsinks" else 0, atol=1e-10
            )
        return
    eager = by_reference(qkv, do, dlse, case.options, extra)
    scale = case.options.get("softmax_scale", case.dims[0] ** -0.5)
    scales = accumulator_scales(*qkv, do, abs(scale))
    # A gradient that sums the ds of many rows holds as many of them.
    ds = float((do.double().norm(dim=-1).max() * qkv[2].double().norm(dim=-1).max()).item())
    scales |= {"dbias": ds, "dsinks": ds * case.batch * case.seqlen_q}
    for key, value in actual.items():
        assert_within_budget(value, truth[key], eager[key], name=key, scale=scales[key])


def packed_inputs(lengths: list[tuple[int, int]], dtype: torch.dtype):
    total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
    q, _, _ = make_qkv(1, total_q, 1, 4, 2, 64, dtype=dtype)
    _, k, v = make_qkv(1, 1, total_k, 4, 2, 64, v_head_dim=32, dtype=dtype, seed=3)
    edges = [
        torch.tensor([0, *torch.tensor(side).cumsum(0).tolist()], dtype=torch.int32)
        for side in zip(*lengths, strict=True)
    ]
    return [q[0], k[0], v[0]], edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_packed_sequences_equal_each_alone(dtype: torch.dtype) -> None:
    lengths = [(70, 70), (0, 5), (1, 200), (130, 40), (3, 0), (64, 128)]
    (q, k, v), (edges_q, edges_k) = packed_inputs(lengths, dtype)
    sinks = torch.randn(4)
    spec = AttentionSpec(
        "cpu", dtype, len(lengths), 130, 200, 4, 2, 64, 32, window_left=50, window_right=0,
        softmax_scale=0.125, is_varlen=True, has_sinks=True,
    )  # fmt: skip
    extra = {"cu_seqlens_q": edges_q, "cu_seqlens_k": edges_k, "sinks": sinks}
    do = torch.randn(q.shape[0], 4, 32).to(dtype)
    dlse = torch.randn(4, q.shape[0])
    packed = by_kernel([q, k, v], do, dlse, spec, extra)
    dsinks = torch.zeros(4)
    for (q0, q1), (k0, k1) in zip(
        torch.stack([edges_q[:-1], edges_q[1:]], 1).tolist(),
        torch.stack([edges_k[:-1], edges_k[1:]], 1).tolist(),
        strict=True,
    ):
        part = [t[None] for t in (q[q0:q1], k[k0:k1], v[k0:k1])]
        alone_extra = {"sinks": sinks}
        alone_spec = spec_of(part, {"window": (50, 0)}, alone_extra)
        alone = by_kernel(
            part, do[None, q0:q1], dlse[None, :, q0:q1].contiguous(), alone_spec, alone_extra
        )
        if q1 - q0 == 1:
            # A dense call of one query runs on the decode kernel, whose sums have another order; a
            # packed call of this sequence alone gives the bits of the batch.
            unit = torch.finfo(dtype).eps
            for name, x in (("o", packed["o"][q0:q1]), ("lse", packed["lse"][:, q0:q1])):
                torch.testing.assert_close(x, alone[name][0], rtol=2 * unit, atol=2 * unit)
            single = spec._replace(batch=1, max_seqlen_q=1, max_seqlen_k=k1 - k0)
            edges = {"cu_seqlens_q": [0, 1], "cu_seqlens_k": [0, k1 - k0]}
            edges = {name: torch.tensor(x, dtype=torch.int32) for name, x in edges.items()}
            found = by_kernel(
                [t[0] for t in part], do[q0:q1], dlse[:, q0:q1].contiguous(), single,
                edges | alone_extra,
            )  # fmt: skip
            alone = {name: x if name == "dsinks" else x[None] for name, x in found.items()}
        torch.testing.assert_close(packed["o"][q0:q1], alone["o"][0], rtol=0, atol=0)
        torch.testing.assert_close(packed["lse"][:, q0:q1], alone["lse"][0], rtol=0, atol=0)
        torch.testing.assert_close(packed["dk"][k0:k1], alone["dk"][0], rtol=0, atol=0)
        torch.testing.assert_close(packed["dv"][k0:k1], alone["dv"][0], rtol=0, atol=0)
        torch.testing.assert_close(packed["dq"][q0:q1], alone["dq"][0], rtol=1e-2, atol=1e-3)
        dsinks += alone["dsinks"]
    torch.testing.assert_close(packed["dsinks"], dsinks, rtol=1e-4, atol=1e-4)


def test_rows_outside_every_packed_sequence_are_empty() -> None:
    (q, k, v), (edges_q, edges_k) = packed_inputs([(5, 5)], torch.float32)
    q = torch.cat([q, torch.full((3, 4, 64), math.nan)])
    spec = AttentionSpec("cpu", q.dtype, 1, 5, 5, 4, 2, 64, 32, is_varlen=True)
    o, lse = planned.forward(cpu, q, k, v, spec, cu_seqlens_q=edges_q, cu_seqlens_k=edges_k)
    assert bool((o[5:] == 0).all())
    assert bool((lse[:, 5:] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_strided_inputs_equal_contiguous_ones(dtype: torch.dtype) -> None:
    qkv, extra = inputs_of(Case(batch=2, seqlen_q=100, seqlen_k=70, heads=(4, 2)), dtype)
    do, dlse = cotangents(qkv)
    spec = spec_of(qkv, {"causal": True}, extra)
    plain = by_kernel(qkv, do, dlse, spec, extra)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (*qkv, do)]
    strided[0] = torch.cat([strided[0], strided[0]], dim=-1)[..., :64]
    again = by_kernel(strided[:3], strided[3], dlse, spec, extra)
    for key, value in plain.items():
        assert torch.equal(value, again[key]), key


@pytest.mark.parametrize("shape", [(1, 0, 5), (1, 5, 0), (0, 3, 3), (2, 0, 0)])
def test_empty_dims_give_empty_or_zero_results(shape: tuple[int, int, int]) -> None:
    qkv = list(make_qkv(*shape, 2, 2, 16))
    do, dlse = cotangents(qkv)
    results = by_kernel(qkv, do, dlse, spec_of(qkv, {}, {}), {})
    assert results["o"].shape == (*shape[:2], 2, 16)
    for key, value in results.items():
        assert bool((value == (-math.inf if key == "lse" else 0)).all()), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unseen_keys_never_leak(dtype: torch.dtype, poison: float) -> None:
    qkv, _ = inputs_of(Case(batch=2, seqlen_q=150, seqlen_k=200), dtype)
    extra = {"seqlens_k": torch.tensor([130, 200], dtype=torch.int32)}
    do, dlse = cotangents(qkv)
    options = {"causal": True}
    spec = spec_of(qkv, options, extra)
    clean = by_kernel(qkv, do, dlse, spec, extra)
    q, k, v = (t.clone() for t in qkv)
    k[0, 130:], v[0, 130:] = poison, poison  # past the sequence
    k[1, 140:], v[1, 140:] = poison, poison  # right of the diagonal of rows up to 89
    dirty = by_kernel([q, k, v], do, dlse, spec, extra)
    for key in ("o", "dq"):
        assert torch.equal(dirty[key][0], clean[key][0])
        torch.testing.assert_close(dirty[key][1, :90], clean[key][1, :90], rtol=2e-2, atol=1e-3)
        assert not bool(dirty[key][1, 90:].isfinite().any())
    assert bool((dirty["dk"][0, 130:] == 0).all())
    assert bool((dirty["dv"][0, 130:] == 0).all())


def test_infinite_bias_masks_whole_rows() -> None:
    qkv, _ = inputs_of(Case(seqlen_q=70, seqlen_k=70), torch.float32)
    bias = torch.zeros(70, 70)
    bias[3] = -math.inf
    bias[:, 5] = -math.inf
    do, dlse = cotangents(qkv)
    results = by_kernel(qkv, do, dlse, spec_of(qkv, {}, {"bias": bias}), {"bias": bias})
    assert bool((results["o"][:, 3] == 0).all())
    assert bool((results["lse"][..., 3] == -math.inf).all())
    assert bool((results["dq"][:, 3] == 0).all())
    assert bool((results["dv"][:, 5] == 0).all())
    assert all(bool(t.isfinite().all()) for key, t in results.items() if key != "lse")


def test_huge_logits_do_not_overflow() -> None:
    q, k, v = make_qkv(1, 70, 70, 1, 1, 64)
    qkv = [q * 100, k * 100, v]
    do, dlse = cotangents(qkv)
    results = by_kernel(qkv, do, dlse, spec_of(qkv, {}, {}), {})
    truth = standard.attention(*(t.double() for t in qkv))
    assert all(bool(t.isfinite().all()) for t in results.values())
    assert (results["o"] - truth).abs().max() < 1e-2


def test_bits_repeat_on_any_number_of_threads() -> None:
    case = Case(batch=2, seqlen_q=300, seqlen_k=333, heads=(4, 2), bias=(300, 333), sinks=True)
    qkv, extra = inputs_of(case, torch.bfloat16)
    do, dlse = cotangents(qkv)
    spec = spec_of(qkv, {"causal": True}, extra)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 7, 2):
            torch.set_num_threads(threads)
            runs.append(by_kernel(qkv, do, dlse, spec, extra))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(run[key], runs[0][key]) for key in run if key != "dsinks")


def test_a_call_like_one_before_reads_and_writes_its_own_tensors() -> None:
    case = Case(batch=2, seqlen_q=70, seqlen_k=150, alibi=True, sinks=True)
    qkv, extra = inputs_of(case, torch.bfloat16)
    spec = spec_of(qkv, {}, extra)
    do, dlse = cotangents(qkv)
    first_call = planned.tensors_of(*qkv, **extra)
    others = [tensor.flip(1).contiguous() for tensor in qkv]
    other_extra = {key: tensor.flip(-1).contiguous() for key, tensor in extra.items()}
    other_call = planned.tensors_of(*others, **other_extra)
    want = by_kernel(others, do, dlse, spec, other_extra)
    forward = planned.plan_fwd(cpu, spec, first_call)
    results = []
    for call in (first_call, other_call):
        o, lse = forward.run(*call)
        if not results:
            backward = cpu.plan_bwd(Call.of(spec, (do, dlse, o, lse, *call)))
        results.append(named(o, lse, backward.run(do, dlse, o, lse, *call)))
        if len(results) == 1:
            kept = {key: tensor.clone() for key, tensor in results[0].items()}
    first, again = results
    assert all(torch.equal(again[key], want[key]) for key in want)
    assert all(torch.equal(first[key], kept[key]) for key in kept)
    assert not torch.equal(first["o"], again["o"])


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_call_of_other_strides_is_described_anew(name: str) -> None:
    """What is remembered of a call are its numbers but for addresses; strides are among them."""
    tensors = dict(zip("qkv", make_qkv(2, 5, 7, 4, 2, 16), strict=True))
    spec = spec_of(list(tensors.values()), {}, {})
    want = planned.forward(cpu, **tensors, spec=spec)
    tensors[name] = _heads_first(tensors[name])
    for mine, other in zip(planned.forward(cpu, **tensors, spec=spec), want, strict=True):
        assert torch.equal(mine, other)


def test_slopes_of_heads_and_of_sequences_are_different_calls() -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16)
    slopes = torch.rand(2, 4)
    first = ops.attention(q, k, v, alibi_slopes=slopes[0].contiguous(), backend="cpu")
    both = ops.attention(q, k, v, alibi_slopes=slopes, backend="cpu")
    assert torch.equal(both[0], first[0])
    want = ops.attention(q, k, v, alibi_slopes=slopes, backend="reference")
    torch.testing.assert_close(both, want, rtol=1e-5, atol=1e-5)


# Of nobody's allocations but a new process's can the peak be told.
_FORWARD = """
import torch
from tilewise import ops

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))

for dtype in (torch.float32, torch.bfloat16):
    make = lambda length: torch.zeros(1, length, 1, 16, dtype=dtype)
    few, many = make(64), make(40_000)
    ops.attention(few, few, few, window=50, backend="cpu")
    before = peak()
    ops.attention(many, many, many, window=50, backend="cpu")
    print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_scratch_of_the_forward_pass_is_linear_in_the_sequence() -> None:
    """Kernels take memory that no dispatcher sees; 40,000 x 40,000 bytes would be 1.5 GiB."""
    run = warm.run([sys.executable, "-c", _FORWARD], timeout=500, check=True)
    grown = [int(line) for line in run.stdout.split()]
    assert len(grown) == 2
    assert max(grown) < 2**29


ONE_QUERY = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (60, 3)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.4},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "slopes": {"alibi_slopes": torch.linspace(0, 1, 4)},
    "lengths": {"seqlens_k": torch.tensor([600, 0, 17], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", ONE_QUERY)
def test_one_query_a_sequence_runs_on_the_decode_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(*args: Any, **options: Any) -> None:
        calls.append(args)
        run_decode(*args, **options)

    def spy_alone(*args: Any) -> None:  # of a short call without more
        calls.append(args)
        attend_rows(*args)

    monkeypatch.setattr(cpu, "run_decode", spy)
    monkeypatch.setattr(cpu, "attend_rows", spy_alone)
    monkeypatch.setattr(memory, "_memory", memory._Memory())  # plans have what they call
    q, k, v = make_qkv(3, 1, 700, 4, 2, 16, v_head_dim=24)
    k, v = _heads_first(k), v.flip(0)
    options = ONE_QUERY[name]
    got = ops.attention(q, k, v, return_lse=True, backend="cpu", **options)
    assert len(calls) == 1
    want = ops.attention(q, k, v, return_lse=True, backend="reference", **options)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_one_query_that_the_decode_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_decode", "attend_rows"):
        monkeypatch.setattr(cpu, name, lambda *args, **options: pytest.fail("was called"))
    monkeypatch.setattr(memory, "_memory", memory._Memory())
    q, k, v = make_qkv(2, 1, 40, 4, 2, 16)
    slopes = torch.rand(2, 4)
    for tensors, options in (
        ((q, k, v), {"bias": torch.randn(40)}),
        ((q, k, v), {"alibi_slopes": slopes}),
        ((q, k, v), {"dropout_p": 0.5, "seed": 3}),
        (make_qkv(2, 1, 40, 4, 2, 13), {}),
        ((q, k[:, :0], v[:, :0]), {}),
    ):
        got = ops.attention(*tensors, backend="cpu", **options)
        want = ops.attention(*tensors, backend="reference", **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_small_calls_stay_on_their_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking another takes longer than they do; larger ones are shared, with the same bits."""
    shared: list[str] = []
    for name in ("run_tasks", "run_on_team"):
        original = getattr(cpu, name)

        def spy(function, *args, _name=name, _original=original):
            shared.append(_name)
            _original(function, *args)

        monkeypatch.setattr(cpu, name, spy)
    results = []
    for limit in (2**20, 0):
        monkeypatch.setattr(cpu, "_SMALL", limit)
        monkeypatch.setattr(memory, "_memory", memory._Memory())
        q, k, v = make_qkv(1, 16, 16, 4, 2, 64, requires_grad=True)
        o = ops.attention(q, k, v, backend="cpu", causal=True)
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
        assert bool(shared) == (limit == 0)
    for alone, together in zip(*results, strict=True):
        assert torch.equal(alone, together)


def test_concurrent_python_threads_do_not_disturb_each_other() -> None:
    qkv, extra = inputs_of(Case(seqlen_q=200, seqlen_k=200), torch.bfloat16)
    spec = spec_of(qkv, {"causal": True}, extra)
    want, _ = planned.forward(cpu, *qkv, spec)
    wrong: list[int] = []

    def work() -> None:
        for index in range(20):
            if not torch.equal(planned.forward(cpu, *qkv, spec)[0], want):
                wrong.append(index)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any torch operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_is_linear_in_the_sequence() -> None:
    length = 3000
    qkv = list(make_qkv(1, length, length, 1, 1, 16, dtype=torch.bfloat16))
    do, dlse = cotangents(qkv)
    spec = spec_of(qkv, {"window": 50}, {})
    with _LargestTensor() as largest:
        by_kernel(qkv, do, dlse, spec, {})
    assert largest.elements <= 16 * length * 16  # dq's chunks, not length ** 2


def test_refuses_what_it_cannot_run() -> None:
    qkv, _ = inputs_of(Case(), torch.float32)
    spec = spec_of(qkv, {}, {})
    assert cpu.why_not(spec) is None
    gpu = AttentionSpec("cuda", torch.float32, 1, 1, 1, 1, 1, 8, 8)
    assert cpu.why_not(gpu) == "device must be cpu, got cuda"
    odd = AttentionSpec("cpu", torch.int32, 1, 1, 1, 1, 1, 8, 8)
    assert "dtype" in str(cpu.why_not(odd))


@pytest.mark.parametrize("step", [0.3, 3.0, 100.0])
def test_logits_that_grow_from_key_to_key_stay_in_range(step: float) -> None:
    """Maxima rise again and again, by little and by more than float32's exponents span."""
    q, k, v = make_qkv(1, 40, 300, 1, 1, 32, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 4.0, step * torch.arange(300).view(1, 300, 1)
    for options in ({}, {"causal": True}):
        spec = spec_of([q, k, v], options, {})
        o, lse = planned.forward(cpu, q, k, v, spec)
        truth = standard.attention(q.double(), k.double(), v.double(), **options, return_lse=True)
        assert (o.double() - truth[0]).abs().max() < 2.0**-7 * v.abs().max()
        assert torch.allclose(lse.double(), truth[1], rtol=1e-6, atol=1e-5)


def test_what_is_not_finite_stays_in_its_head() -> None:
    """Tasks of a thread share scratch, one after the other."""
    q, k, v, do = (torch.randn(3, 40, 4, 16) for _ in range(4))
    broken = [x.clone() for x in (q, k, v)]
    broken[0][0, 5, 0], broken[1][0, :, 1], broken[2][1, 3, 2] = math.nan, math.nan, math.inf
    found = []
    for tensors in ((q, k, v), broken):
        leaves = [x.requires_grad_() for x in tensors]
        o = ops.attention(*leaves, backend="cpu")
        found.append([o, *torch.autograd.grad(o, leaves, do)])
    clean = torch.ones(3, 4, dtype=torch.bool)
    clean[0, 0] = clean[0, 1] = clean[1, 2] = False
    for expected, got in zip(*found, strict=True):
        same = (expected == got).all(-1).all(1)
        assert same[clean].all()
    assert not found[1][0].isfinite().all(-1).all(1)[~clean].any()
