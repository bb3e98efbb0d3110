"""The same call again and again, compared on the device: does every run give the same bits?

A case is a call of a kernel's launcher. Its runs are captured in a CUDA graph, each followed by a
comparison with the first result and by poison over its outputs, so that memory of an earlier run
cannot pass for what a run forgot to write. The host only replays; differences are counted on the
device, and the first differing outputs are kept. What may depend on the order of sums is compared
within rounding, all else bit by bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels import attention_problem
from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, make_problem, starts

Results = dict[str, Tensor]
RUNS_PER_GRAPH = 50
LOOK_EVERY = 0.25  # seconds that the host is ahead at most
# Of a sum whose order is free: part of the value, and of the root mean square of all values.
RELATIVE, ABSOLUTE = 2.0**-6, 2.0**-5


@dataclass(frozen=True)
class Prepared:
    """A call that can be run again and again.

    Attributes:
        run: makes results of memory of its own.
        rounded: names of results that may differ by the order of their sums.
        check: judges the first results; None where other tests do.
        is_alone: runs share memory, so that there may be one at a time.
    """

    run: Callable[[], Results]
    rounded: frozenset[str] = frozenset()
    check: Callable[[Results], None] | None = None
    is_alone: bool = False


@dataclass
class Found:
    """What came of a case."""

    name: str
    runs: int
    differing: int
    seconds: float
    graph: bool
    first: list[dict[str, Any]] = field(default_factory=list)  # how the first difference looks


class Watch:
    """Compares results on their device, and remembers there what differed."""

    def __init__(self, want: Results, rounded: frozenset[str] = frozenset()) -> None:
        # Contiguous ones and permuted ones keep their order in memory, those with gaps lose it.
        self.want = {
            name: x.clone(
                memory_format=torch.contiguous_format if flat(x) is None else torch.preserve_format
            )
            for name, x in want.items()
        }  # fmt: skip
        self.kept = {name: x.clone() for name, x in self.want.items()}
        self.rounded = rounded
        device = next(iter(want.values())).device
        # Runs that differed; whether the run that is being looked at does.
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._limits = {name: self._limit(self.want[name]) for name in rounded if name in want}

    @staticmethod
    def _limit(x: Tensor) -> Tensor:
        x = x.float()
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        return x.abs() * RELATIVE + finite.square().mean().sqrt() * ABSOLUTE

    def look(self, results: Results) -> None:
        """Count results that differ; overwrite them with poison."""
        if self._state.device.type == "cuda":
            self.look_in_kernels(results)
        else:
            self.look_in_torch(results)

    def look_in_kernels(self, results: Results) -> None:
        """Do so in a launch for each result: torch's operators take longer than a short call."""
        from tests.kernels.compare import compare, settle

        for name, got in results.items():
            limit = self._limits.get(name)
            view = flat(got)
            whole = flat(got.contiguous()) if view is None else view
            compare(
                whole, flat(self.want[name]), flat(self.kept[name]),
                None if limit is None else flat(limit), self._state,
            )  # fmt: skip
            if view is None:
                got.fill_(math.nan)
        settle(self._state)

    def look_in_torch(self, results: Results) -> None:
        differs = torch.zeros((), dtype=torch.bool)
        for name, got in results.items():
            want = self.want[name]
            if name in self.rounded:
                near = (got.float() - want.float()).abs() <= self._limits[name]
                differs = differs | ~(near | (bits(got) == bits(want))).all()
            else:
                differs = differs | (bits(got) != bits(want)).any()
        if differs and self._state[0] == 0:
            for name, got in results.items():
                self.kept[name].copy_(got)
        self._state[0] += differs
        for got in results.values():
            got.fill_(math.nan)

    @property
    def differing(self) -> int:
        """Runs that differed, so far."""
        return int(self._state[0])

    def first(self) -> list[dict[str, Any]]:
        """Say of each result where the first run that differed did."""
        report = []
        for name, kept in self.kept.items():
            want = self.want[name]
            wrong = bits(kept) != bits(want)
            if not wrong.any():
                continue
            far = (kept.float() - want.float()).abs()
            report.append(
                {
                    "result": name,
                    "shape": list(want.shape),
                    "elements": int(wrong.sum()),
                    "largest": float(far.nan_to_num(math.inf)[wrong].max()),
                    "nan": bool(kept.float()[wrong].isnan().any()),
                    # Indices along each axis at which something differs, and how many there are.
                    "where": [
                        _indices(wrong.any(dim=[d for d in range(wrong.dim()) if d != axis]))
                        for axis in range(wrong.dim())
                    ],
                }
            )
        return report


def flat(x: Tensor) -> Tensor | None:
    """Return the elements of x in their order in memory, as a view; None where they have gaps."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return x.as_strided((x.numel(),), (1,))


def bits(x: Tensor) -> Tensor:
    """Return x as integers, for which NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _indices(wrong: Tensor) -> dict[str, Any]:
    if wrong.dim() == 0:
        return {"count": int(wrong)}
    at = wrong.nonzero().flatten().tolist()
    return {"count": len(at), "of": wrong.numel(), "first": at[:16]}


class Captured:
    """A call in a CUDA graph, with the comparison after each run.

    Args:
        want: what its first run gave.
        lanes: how many runs of the call are on the device at once, each in a stream of its own.
            Most cases leave most of the device idle: lanes fill it, and disturb one another.
    """

    def __init__(
        self, prepared: Prepared, want: Results, runs_per_graph: int = RUNS_PER_GRAPH,
        lanes: int = 1,
    ) -> None:  # fmt: skip
        lanes = 1 if prepared.is_alone else lanes
        self.watches = [Watch(want, prepared.rounded) for _ in range(lanes)]
        self._prepared = prepared  # the graph reads its tensors
        each_lane = -(-runs_per_graph // lanes)
        self.runs, self._per_graph = 3 * lanes, each_lane * lanes
        streams = [torch.cuda.Stream() for _ in self.watches]
        for watch, stream in zip(self.watches, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what kernels remember of a stream is made before it
                for _ in range(3):
                    watch.look(prepared.run())
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        first, *others = streams
        with torch.cuda.graph(self._graph, stream=first):
            for stream in others:
                stream.wait_stream(first)
            for watch, stream in zip(self.watches, streams, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(each_lane):
                        watch.look(prepared.run())
            for stream in others:
                first.wait_stream(stream)
        self.replay(1)  # the first one brings the graph to the device
        started = time.perf_counter()
        self.replay(1)
        self.each = max((time.perf_counter() - started) / self._per_graph, 1e-8)

    def replay(self, times: int) -> None:
        """Replay the graph and wait for it."""
        for _ in range(times):
            self._graph.replay()
        torch.cuda.synchronize()
        self.runs += times * self._per_graph

    def stress(self, name: str, seconds: float, most_runs: int) -> Found:
        """Replay for so long, or so often; what was run before is counted too."""
        begin = now = time.perf_counter()
        each = self.each * self._per_graph
        while self.runs < most_runs and now - begin < seconds:
            left = min(LOOK_EVERY, seconds - (now - begin)) / each
            at_once = max(1, min(int(left), -(-(most_runs - self.runs) // self._per_graph)))
            started = now
            self.replay(at_once)
            now = time.perf_counter()
            each = max((now - started) / at_once, 1e-6)
        return _found(name, self.watches, self.runs, now - begin, True)


def first_run(prepared: Prepared) -> Results:
    """Run a call once and judge what it gives."""
    want = prepared.run()
    if prepared.check is not None:
        prepared.check({name: x.clone() for name, x in want.items()})
    return want


def stress(name: str, prepared: Prepared, seconds: float, most_runs: int = 1 << 60) -> Found:
    """Run a call for so long, or so often, at least once."""
    want = first_run(prepared)
    if next(iter(want.values())).device.type == "cuda":
        captured = Captured(prepared, want, min(RUNS_PER_GRAPH, max(1, most_runs)))
        return captured.stress(name, seconds, most_runs)
    return _repeat(name, prepared, Watch(want, prepared.rounded), seconds, most_runs)


def _repeat(
    name: str, prepared: Prepared, watch: Watch, seconds: float, most_runs: int
) -> Found:  # fmt: skip
    begin = time.perf_counter()
    runs = 0
    while runs == 0 or (runs < most_runs and time.perf_counter() - begin < seconds):
        watch.look(prepared.run())
        runs += 1
    return _found(name, [watch], runs, time.perf_counter() - begin, False)


def _found(name: str, watches: list[Watch], runs: int, seconds: float, graph: bool) -> Found:
    differing = [watch for watch in watches if watch.differing]
    first = differing[0].first() if differing else []
    return Found(name, runs, sum(watch.differing for watch in differing), seconds, graph, first)


# The cases.

_SHORT = ((20, 20), (64, 64), (100, 100), (1, 1), (130, 130), (70, 200), (128, 128), (33, 90))
LITTLE = {
    "packed_short": Call(
        heads=(16, 4), dims=(128, 128), dtype=BRAIN, window=CAUSAL, lengths=_SHORT * 8
    ),
    "packed_short_d64": Call(
        heads=(16, 4), dims=(64, 64), dtype=BRAIN, window=CAUSAL, lengths=_SHORT * 8
    ),
    "packed_short_d256": Call(
        heads=(8, 4), dims=(256, 256), dtype=BRAIN, window=CAUSAL, lengths=_SHORT * 4
    ),
    "packed_short_full": Call(heads=(16, 4), dims=(128, 128), dtype=BRAIN, lengths=_SHORT * 8),
    "packed_short_latent": Call(
        heads=(8, 8), dims=(192, 128), dtype=BRAIN, window=CAUSAL, lengths=_SHORT * 4
    ),
    "ragged_d128": Call(150, 150, (16, 4), (128, 128), 8, BRAIN, CAUSAL),
    "ragged_d64": Call(210, 210, (16, 4), (64, 64), 8, HALF),
}  # fmt: skip


# Forward passes that drop: many short tiles, of which some warpgroups see nothing, and longer ones.
DROPPING = {
    "packed_short": replace(LITTLE["packed_short"], dropout_p=0.2),
    "packed_short_d64": replace(LITTLE["packed_short_d64"], dropout_p=0.2),
    "packed_short_d256": replace(LITTLE["packed_short_d256"], dropout_p=0.2),
    "packed_short_full": replace(LITTLE["packed_short_full"], dropout_p=0.2),
    "ragged_d128": replace(LITTLE["ragged_d128"], dropout_p=0.2),
    "ragged_d64": replace(LITTLE["ragged_d64"], dropout_p=0.2),
    "full_d64": Call(1024, 1024, (16, 16), (64, 64), 1, BRAIN, dropout_p=0.1),
    "full_d256": Call(512, 512, (8, 8), (256, 256), 4, BRAIN, dropout_p=0.1),
    "window_d128": Call(700, 700, (16, 4), (128, 128), 1, BRAIN, (100, 0), dropout_p=0.1),
    "masked_d128": Call(
        500, 500, (8, 8), (128, 128), mask=(1, 8), mask_tile=(128, 128), dropout_p=0.1, dtype=BRAIN
    ),
}  # fmt: skip


_MOST_TILES = 160


def _shorter(call: Call, batch: int) -> Call:
    """Return a call with so many sequences at most: a shorter run hands over as often a second.

    One sequence is enough where its tiles of 128 rows are more than an H200 has multiprocessors,
    132: programs of a persistent kernel still go from tile to tile, and share what comes before and
    after them. Sequences with lengths or masks of their own are few, and each has its point.
    """
    if call.seqlens_k is not None or (call.mask or (1,))[0] > 1:
        return call
    if call.lengths is None:
        tiles = call.heads[0] * -(-max(call.seqlen_q, call.seqlen_k) // 128)
        batch = min(call.batch, batch, -(-_MOST_TILES // tiles))
        bias = call.bias
        if bias is not None and len(bias) == 4:
            bias = (min(bias[0], batch), *bias[1:])
        return replace(call, batch=batch, bias=bias)
    tiles = 0
    for count, lengths in enumerate(call.lengths, start=1):
        tiles += call.heads[0] * -(-max(lengths) // 128)
        if tiles >= _MOST_TILES and count >= len(_SHORT):
            break
    return replace(call, lengths=call.lengths[: min(count, len(_SHORT) * batch)])


def _forward(call: Call) -> Prepared:
    from tests.kernels.gluon.problem import assert_forward_right
    from tests.kernels.planned import hopper_forward

    problem = p = make_problem(call, "cuda")

    def run() -> Results:
        o, lse = hopper_forward(p.q, p.k, p.v, p.spec, **p.tensors)
        return {"o": o, "lse": lse}

    return Prepared(run, check=lambda results: assert_forward_right(problem, results))


def _backward(call: Call, deterministic: bool) -> Prepared:
    from tests.kernels.planned import forward, hopper_backward
    from tilewise.kernels.gluon.backward.launch import why_not_bwd
    from tilewise.kernels.triton.attention import plan as attention

    p = make_problem(call, "cuda")
    o, lse = forward(attention, p.q, p.k, p.v, p.spec, **p.tensors)
    spec = p.spec._replace(deterministic=deterministic)
    reason = why_not_bwd(spec)
    assert reason is None, reason

    def run() -> Results:
        gradients = hopper_backward(p.do, p.dlse, p.q, p.k, p.v, o, lse, spec, **p.tensors)
        named = zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, strict=True)
        return {name: x for name, x in named if x is not None}

    def check(results: Results) -> None:
        attention_problem.assert_right(p, {"o": o, "lse": lse} | results)

    return Prepared(run, frozenset() if deterministic else frozenset({"dq"}), check)


def _portable(call: Call) -> Prepared:
    p = make_problem(call, "cuda")
    return Prepared(
        lambda: attention_problem.computed(p),
        check=lambda results: attention_problem.assert_right(p, results),
    )


def _few(call: Call) -> Prepared:
    from tests.kernels.gluon import test_few as test_gluon_few

    p = make_problem(call, "cuda")
    return Prepared(lambda: test_gluon_few.launched(p))


def _bytes(shape: Any, window: Any, lengths: Any, added: Any = None) -> Prepared:
    from tests.kernels.planned import hopper_fp8
    from tilewise.kernels.spec import AttentionSpec, AttentionTensors
    from tilewise.testing import make_qkv

    q, k, v = make_qkv(*shape, dtype=BRAIN, device="cuda")
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim = shape
    added = added or {}
    spec = AttentionSpec(
        "cuda", torch.float8_e4m3fn, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim,
        head_dim, *window, head_dim**-0.5, softcap=added.get("softcap", 0.0),
        has_seqlens_k=lengths is not None, has_sinks="sinks" in added,
    )  # fmt: skip
    sinks = torch.linspace(-2.0, 9.0, heads, device="cuda") if "sinks" in added else None
    tensors = AttentionTensors(q, k, v, seqlens_k=seqlens, sinks=sinks)
    spec, tensors = _with_mask(spec, tensors, added)

    def run() -> Results:
        o, lse = hopper_fp8(tensors, spec)
        return {"o": o, "lse": lse}

    return Prepared(run)


def _packed_bytes(lengths: Any, heads: Any, head_dim: int, window: Any, added: Any) -> Prepared:
    from tests.kernels.planned import hopper_fp8
    from tilewise.kernels.spec import AttentionSpec, AttentionTensors
    from tilewise.testing import make_qkv

    cu_q, cu_k = (starts([pair[i] for pair in lengths], "cuda") for i in (0, 1))
    rows = (int(cu_q[-1]) + 3, int(cu_k[-1]) + 3)
    q, k, v = (x[0] for x in make_qkv(1, *rows, *heads, head_dim, dtype=BRAIN, device="cuda"))
    spec = AttentionSpec(
        "cuda", torch.float8_e4m3fn, len(lengths), max(n for n, _ in lengths),
        max(n for _, n in lengths), *heads, head_dim, head_dim, *window, head_dim**-0.5,
        softcap=added.get("softcap", 0.0), is_varlen=True, has_sinks="sinks" in added,
    )  # fmt: skip
    sinks = torch.linspace(-2.0, 9.0, heads[0], device="cuda") if "sinks" in added else None
    tensors = AttentionTensors(q, k, v, cu_q, cu_k, sinks=sinks)
    spec, tensors = _with_mask(spec, tensors, added)

    def run() -> Results:
        o, lse = hopper_fp8(tensors, spec)
        return {"o": o, "lse": lse}

    return Prepared(run)


def _with_mask(spec: Any, tensors: Any, added: Any) -> tuple[Any, Any]:
    """Add the mask that `added` asks for, in the words of the emulated cases."""
    from tests.kernels.gluon import test_fp8_emulated as test_gluon_fp8_emulated

    if "mask" not in added:
        return spec, tensors
    lengths = (spec.max_seqlen_q, spec.max_seqlen_k)
    _, mask = test_gluon_fp8_emulated.mask_of(added["mask"], *lengths)
    of_mask = {f"mask_{name}": x.cuda() for name, x in mask._asdict().items()}
    return spec._replace(mask_tile=(128, 128)), tensors._replace(**of_mask)


def _paged_bytes(case: Any, dtype: torch.dtype) -> Prepared:
    from tests.kernels.gluon import test_paged as test_gluon_paged
    from tilewise import paged_attention, plan_paged_attention

    (q, k, v, k_scale, v_scale, *_), options = test_gluon_paged._inputs(case, dtype)
    given = options | {"k_scale": k_scale, "v_scale": v_scale, "backend": "gluon"}
    plan = plan_paged_attention(q, k, v, **given)

    def run() -> Results:
        o, lse = paged_attention(q, k, v, plan=plan, return_lse=True, **given)
        return {"o": o, "lse": lse}

    return Prepared(run, is_alone=True)  # a plan counts the splits that ended


def _pair(launch: Callable[[Any], tuple[Tensor, Tensor]], inputs: Any) -> Prepared:
    def run() -> Results:
        o, lse = launch(inputs)
        return {"o": o, "lse": lse}

    return Prepared(run)


def _latents(case: Any) -> Prepared:
    from tests.kernels.gluon import test_mla as test_gluon_mla
    from tests.kernels.triton import test_mla as test_triton_mla

    inputs = test_triton_mla.make_inputs(case, "cuda")
    prepared = _pair(test_gluon_mla.launch, inputs)
    return replace(prepared, check=lambda x: test_gluon_mla.check(inputs, x["o"], x["lse"]))


def _latents_of_bytes(given: Any) -> Prepared:
    from tests.kernels.gluon import test_mla as test_gluon_mla
    from tests.kernels.gluon import test_mla_bytes as test_gluon_mla_bytes

    inputs = test_gluon_mla_bytes.make_bytes(given, "cuda")
    prepared = _pair(test_gluon_mla.launch, inputs)
    return replace(prepared, check=lambda x: test_gluon_mla_bytes.check(inputs, x["o"], x["lse"]))


def _portable_paged(case: Any) -> Prepared:
    from tests.kernels.triton import test_paged as test_triton_paged

    return _pair(test_triton_paged.launch, test_triton_paged.make_inputs(case, "cuda"))


def _portable_latents(case: Any) -> Prepared:
    from tests.kernels.triton import test_mla as test_triton_mla

    return _pair(test_triton_mla.launch, test_triton_mla.make_inputs(case, "cuda"))


def gpu_cases() -> Iterator[tuple[str, Callable[[], Prepared]]]:
    """Yield the cases of a Hopper GPU: "family/name" and what prepares it."""
    from tests.kernels.chains import chain_cases
    from tests.kernels.gluon import test_attention_bwd as test_gluon_attention_bwd
    from tests.kernels.gluon import test_attention_fwd as test_gluon_attention_fwd
    from tests.kernels.gluon import test_few as test_gluon_few
    from tests.kernels.gluon import test_fp8_emulated as test_gluon_fp8_emulated
    from tests.kernels.gluon import test_mla as test_gluon_mla
    from tests.kernels.gluon import test_mla_bytes as test_gluon_mla_bytes
    from tests.kernels.gluon import test_paged as test_gluon_paged
    from tests.kernels.stress_step import step_cases
    from tests.kernels.triton import test_mla as test_triton_mla
    from tests.kernels.triton import test_paged as test_triton_paged

    forward = LITTLE | test_gluon_attention_fwd.CASES
    backward = LITTLE | test_gluon_attention_bwd.CASES
    for name, call in forward.items():
        yield f"forward/{name}", partial(_forward, _shorter(call, 5))
    for name, call in DROPPING.items():
        yield f"forward_dropping/{name}", partial(_forward, call)
    for name, call in backward.items():
        yield f"backward/{name}", partial(_backward, _shorter(call, 5), False)
        yield f"backward_in_order/{name}", partial(_backward, _shorter(call, 5), True)
    for name, call in test_gluon_attention_bwd.WAYS.items():
        yield f"backward_own_way/{name}", partial(_backward, call, False)
    for name, call in test_gluon_few.CASES.items():
        yield f"few/{name}", partial(_few, call)
    fp8 = (
        test_gluon_fp8_emulated.CASES
        | test_gluon_fp8_emulated.ADDED
        | test_gluon_fp8_emulated.MASKED
        | {
            "short": ((8, 150, 150, 8, 2, 128), (-1, 0), None),
            "short_d64": ((8, 150, 150, 8, 2, 64), (-1, 0), None),
            "short_d256": ((8, 150, 150, 4, 2, 256), (-1, 0), None),
            "short_capped": ((8, 150, 150, 8, 2, 128), (-1, 0), None, test_gluon_fp8_emulated.BOTH),
        }
    )
    for name, given in fp8.items():
        yield f"8_bits/{name.replace(' ', '_')}", partial(_bytes, *given)
    packed = test_gluon_fp8_emulated.PACKED | test_gluon_fp8_emulated.MASKED_PACKED
    for name, given in packed.items():
        yield f"8_bits/{name.replace(' ', '_')}", partial(_packed_bytes, *given)
    for case in (*test_gluon_paged.CASES, *test_gluon_paged.STAYING):
        for kind, dtype in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn)):
            yield f"paged_{kind}/{case.name}", partial(_paged_bytes, case, dtype)
    for name, case in test_gluon_mla.CASES.items():
        yield f"latents/{name}", partial(_latents, case)
    for name, given in test_gluon_mla_bytes.CASES.items():
        yield f"latents_of_8_bits/{name}", partial(_latents_of_bytes, given)
    for name, call in backward.items():
        yield f"triton/{name}", partial(_portable, _shorter(call, 1))
    for case in test_triton_paged.CASES:
        yield f"triton_paged/{case.name}", partial(_portable_paged, case)
    for case in test_triton_mla.CASES:
        yield f"triton_latents/{case.name}", partial(_portable_latents, case)
    yield from step_cases()
    yield from chain_cases()
