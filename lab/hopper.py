"""The Hopper kernels beside our portable ones and those of other libraries.

All peers of a row are measured in turn, in short blocks, so that they see the same clocks; ratios
of one run are what counts. backward is the whole gradient, with what comes before and after the
products. FLOPs are counted as in the FlashAttention papers. FlashAttention-3 and -4 are measured
where `flash_attn_interface` and `flash_attn.cute` can be imported. A result that differs from
sampled float64 rows, or their gradients, gets no number.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import ops
from tilewise.bench.attention import document
from tilewise.bench.case import Case, make_case
from tilewise.bench.compile_ahead import compile_ahead
from tilewise.bench.measure import compare_features, compare_peers
from tilewise.bench.passes import WrongResult
from tilewise.bench.peers import OURS, PEERS, Run
from tilewise.bench.problem import Problem
from tilewise.bench.report import emit, format_table, positive, say, write
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.bench.timing import time_together
from tilewise.bench.truth import (
    Truth,
    sample_truth,
    sampled_weights,
    wrong_gradient,
    wrong_output,
)
from tilewise.children import environment
from tilewise.errors import UnsupportedError
from tilewise.kernels.gluon.attention.plan import plan_fwd
from tilewise.kernels.plan import Call, LaunchPlan, Refusal
from tilewise.kernels.spec import AttentionTensors
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.op import make_spec

_TOKENS, _HIDDEN = 16384, 2048  # the scheme of the FlashAttention papers
_SEQLENS = (1024, 4096, 16384)
_HEAD_DIMS = (64, 128, 256)
_LENGTHS = (512, 1024, 2048, 4096, 8192, 512)
_WINDOW = 1023  # keys to the left: 1,024 with the query's own
_OPS = ("forward", "backward")
_BACKWARD_SHARE = 0.5  # of a row's rounds: a backward pass takes three times as long
_FEATURES = (
    "plain", "deterministic", "GQA 8:1", "seqlens_k", "softcap", "sinks", "ALiBi",
    "BlockMask, all visible", "dropout 0.1", "bias", "return_lse",
)  # fmt: skip
_COLUMNS = ["feature", "op", "peer", "N", "D", "causal", "ms", "spread", "TFLOP/s", "% of matmul"]
_COLUMNS += ["x best peer", "x plain", "error"]

_CALLS = 300
# A process of its own: what the first call waits for, torch and its context already there.
_FIRST_CALL = """
import time, torch
import tilewise
q, k, v = (torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
torch.cuda.synchronize()
begin = time.perf_counter()
o = tilewise.attention(q, k, v, causal=True)
torch.cuda.synchronize()
forward = time.perf_counter() - begin
o.sum().backward()
torch.cuda.synchronize()
print(forward, time.perf_counter() - begin - forward)
"""

Row = dict[str, Any]


def _problem(table: str, n: int, d: int, causal: bool, peers: tuple[str, ...]) -> Problem:
    heads = _HIDDEN // d
    batch = max(1, _TOKENS // n)
    return Problem(table, batch, n, heads, heads, d, d, peers, causal, ops=_OPS)


def dense() -> list[Problem]:
    """18 shapes, forward and backward, by every library that has them."""
    peers = ("tilewise", "tilewise_triton", "fa4", "fa3", "sdpa_cudnn", "sdpa_flash", "flex")
    return [
        _problem("dense", n, d, causal, peers)
        for d in _HEAD_DIMS
        for n in _SEQLENS
        for causal in (False, True)
    ]


def wide() -> list[Problem]:
    """Heads of 512 channels beside heads of 256."""
    peers = ("tilewise", "tilewise_triton", "sdpa_efficient", "flex")
    return [
        _problem("wide", n, d, causal, peers)
        for d in (256, 512)
        for n in _SEQLENS
        for causal in (False, True)
    ]


def features() -> list[Problem]:
    """What each feature costs, causal, D 128, N 4,096; none changes what is visible."""
    problems = []
    for feature in _FEATURES:
        plain = _problem("features", 4096, 128, True, ("tilewise",))
        if feature == "GQA 8:1":
            plain = replace(plain, num_kv_heads=plain.num_q_heads // 8)
        problems.append(replace(plain, feature=feature))
    return problems


def deterministic() -> list[Problem]:
    """The reproducible backward pass beside the fastest one."""
    return [
        replace(_problem("deterministic", n, d, causal, ("tilewise",)), feature=feature)
        for d in (64, 128)
        for n in _SEQLENS
        for causal in (False, True)
        for feature in ("plain", "deterministic")
    ]


def window() -> list[Problem]:
    """A causal window of 1,024 keys."""
    peers = ("tilewise", "tilewise_triton", "flex", "fa3")
    return [
        replace(_problem("window", n, 128, True, peers), window_left=_WINDOW) for n in _SEQLENS[1:]
    ]


def varlen() -> list[Problem]:
    """A packed causal batch."""
    peers = ("tilewise", "tilewise_triton", "varlen_attn", "fa3")
    shape = Problem("varlen", len(_LENGTHS), max(_LENGTHS), 16, 16, 128, 128, peers, True, ops=_OPS)
    return [replace(shape, lengths=_LENGTHS)]


TABLES: dict[str, Callable[[], list[Problem]]] = {
    "dense": dense,
    "wide": wide,
    "window": window,
    "varlen": varlen,
    "features": features,
    "deterministic": deterministic,
}


def measure(
    problems: Sequence[Problem], ceilings: Ceilings, rounds: int, device: str = "cuda"
) -> list[Row]:
    """Measure problems that belong together: all peers of all of them, in turn."""
    runs: dict[tuple[Problem, str], tuple[Case, Truth, Run]] = {}
    rows = {
        (problem, peer, op): {"op": op, "peer": peer, **problem.columns()}
        for problem in problems
        for op in _OPS
        for peer in problem.peers
    }
    failed: dict[tuple[Problem, str], str] = {}
    for problem in problems:
        case = make_case(problem, device)
        truth = sample_truth(case)
        for peer in problem.peers:
            try:
                runs[problem, peer] = case, truth, PEERS[peer](case)
            except Exception as error:
                failed[problem, peer] = _reason(error)
    for op, make in (("forward", _forward), ("backward", _backward)):
        calls: dict[tuple[Problem, str], Callable[[], object]] = {}
        for key, (_, truth, run) in runs.items():
            try:
                calls[key] = make(run, truth)
            except Exception as error:
                rows[*key, op]["error"] = _reason(error)
        share = rounds if op == "forward" else max(3, round(rounds * _BACKWARD_SHARE))
        for (problem, peer), timing in time_together(calls, rounds=share).items():
            flops = problem.flops(op)
            row = rows[problem, peer, op]
            row |= {"ms": timing.median * 1e3, "spread": timing.spread, "repeats": timing.repeats}
            if flops is not None:
                row["TFLOP/s"] = flops / timing.median / 1e12
                row["% of matmul"] = 100 * flops / timing.median / ceilings.matmul_flops
    for (problem, peer, _), row in rows.items():
        if (problem, peer) in failed:
            row["error"] = failed[problem, peer]
    return list(rows.values())


def _forward(run: Run, truth: Truth) -> Callable[[], object]:
    """Check the forward pass and return it as a call."""
    with torch.no_grad():
        _raise(wrong_output(run.forward(), truth, run))

    def call() -> object:
        with torch.no_grad():
            return run.forward()

    return call


def _backward(run: Run, truth: Truth) -> Callable[[], object]:
    """Check the backward pass and return it as a call."""
    if run.no_backward is not None:
        raise NotImplementedError(run.no_backward)
    outputs, leaves = run.forward(), list(run.leaves.values())
    call = functools.partial(torch.autograd.grad, outputs, leaves, retain_graph=True)
    _raise(wrong_gradient(call(sampled_weights(run, truth.rows)), truth, run))
    weights = (run.do,) if run.dlse is None else (run.do, run.dlse)
    return functools.partial(call, weights)


def _raise(wrong: str | None) -> None:
    if wrong is not None:
        raise WrongResult(wrong)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def groups(names: Sequence[str]) -> list[list[Problem]]:
    """Problems to be measured together: a feature beside its plain call, else each alone."""
    found: list[list[Problem]] = []
    for name in names:
        problems = TABLES[name]()
        if name == "features":
            plain = problems[0]
            found += [[plain]] + [[plain, other] for other in problems[1:]]
        elif name == "deterministic":
            found += [problems[i : i + 2] for i in range(0, len(problems), 2)]
        else:
            found += [[problem] for problem in problems]
    return found


def measure_host() -> dict[str, Any]:
    """Return microseconds of host time a call, and seconds of first calls."""
    leaves = _tensors((128, 1), (128, 1), requires_grad=True)
    few = _tensors((1, 64), (32768, 8))
    results: dict[str, Any] = {
        "launch of the forward kernel, us": _host_time(_launch(leaves)),
        "forward from its plan on, us a call": _host_time(_planned(leaves)),
        "forward, us a call": _host_time(_inference(leaves)),
        **_differentiated("", lambda: ops.attention(*leaves, causal=True), leaves),
        "split keys (1 query, 64 heads on 8, 32,768 keys), us a call": _host_time(_inference(few)),
        **_cudnn([x.detach().transpose(1, 2).contiguous() for x in leaves]),
        "forward replayed from a graph, us a call": _host_time(_graph(_inference(leaves)).replay),
    }
    with tempfile.TemporaryDirectory() as folder:
        own = environment(TRITON_CACHE_DIR=folder)
        for name in ("first call, cold", "first call, cached"):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=own,
                capture_output=True,
                text=True,
                check=True,
            )
            forward, backward = map(float, done.stdout.split())
            results[name] = {"forward, s": forward, "backward, s": backward}
    return results


def _tensors(
    queries: tuple[int, int], keys: tuple[int, int], *, requires_grad: bool = False
) -> list[torch.Tensor]:
    """Return q, k and v of (rows, heads)."""
    return [
        torch.randn(
            (1, *shape, 128), device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad
        )
        for shape in (queries, keys, keys)
    ]


def _inference(tensors: list[torch.Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return ops.attention(*tensors, causal=True)

    return call


def _differentiated(
    name: str, call: Callable[[], torch.Tensor], leaves: list[torch.Tensor]
) -> dict[str, float]:
    """Measure a forward pass that will be differentiated, and its gradient."""
    o = call()
    do = torch.randn_like(o)
    return {
        f"{name}forward that will be differentiated, us a call": _host_time(call),
        f"{name}backward, us a call": _host_time(
            lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
        ),
    }


def _cudnn(tensors: list[torch.Tensor]) -> dict[str, float]:
    """Measure cuDNN's calls by torch; the choice of a backend is made outside of them."""
    q, k, v = leaves = [x.requires_grad_() for x in tensors]

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with torch.no_grad():
            forward = _host_time(call)
        found = _differentiated("SDPA cuDNN ", call, leaves)
    return {"SDPA cuDNN forward, us a call": forward} | found


def _plan(tensors: list[torch.Tensor]) -> tuple[LaunchPlan, AttentionTensors]:
    """Return the plan of a forward pass, and its tensors."""
    q, k, v = (tensor.detach() for tensor in tensors)
    options = AttentionSignature(q, k, v, causal=True).bind().options
    given = AttentionTensors(q, k, v)
    plan = plan_fwd(Call.of(make_spec(q, k, v, options), given))
    if isinstance(plan, Refusal):
        raise UnsupportedError(plan.reason)
    return plan, given


def _planned(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a forward pass without the checks and the search for its plan."""
    plan, given = _plan(tensors)
    return functools.partial(plan.run, *given)


def _launch(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return what starts the kernels of a forward pass into memory that is already there."""
    plan, given = _plan(tensors)
    return plan.launcher(given)


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _host_time(call: Callable[[], object]) -> float:
    """Return microseconds that the host spends in a call while the GPU keeps up."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_CALLS):
        call()
    spent = (time.perf_counter() - begin) / _CALLS
    torch.cuda.synchronize()
    return spent * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lab/hopper.py", description=__doc__)
    tables = (*TABLES, "host")
    parser.add_argument(
        "--only", nargs="+", choices=tables, default=tables, metavar="TABLE",
        help=f"which tables: {', '.join(tables)}; default: all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=10, help="blocks of each call")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile beforehand; 0 for none"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU that torch can see")
    warnings.simplefilter("ignore")  # torch warns why a peer refuses; the row says it
    measured = groups([name for name in TABLES if name in options.only])
    if options.workers:
        jobs = [problem for group in measured for problem in group]
        failed = compile_ahead(jobs, options.workers, 120.0)
        say(f"{failed} of the compiling processes failed")
    ceilings = measure_ceilings("cuda")
    print(ceilings)
    rows: list[Row] = []
    for group in measured:
        found = measure(group, ceilings, options.rounds)
        compare_features(found)
        rows += found if len(group) == 1 else [row for row in found if row["feature"] != "plain"]
        if group[0].table == "deterministic":
            rows += [row for row in found if row["feature"] == "plain"]
        ours = [f"{r['op']} {r['ms']:.3f} ms" for r in found if "ms" in r and r["peer"] == OURS]
        say(f"{group[-1].label}: {', '.join(ours) or 'nothing of ours'}")
        if options.json is not None:
            write(document(rows, ceilings), options.json)
    compare_peers([row for row in rows if row["feature"] == "plain"])
    for name in TABLES:
        mine = [row for row in rows if row["table"] == name]
        if mine:
            print(f"\n{name}\n{format_table(mine, _COLUMNS)}")
    result = document(rows, ceilings)
    if "host" in options.only:
        result["host"] = measure_host()
        print("\nhost")
        for name, value in result["host"].items():
            print(f"{name}: {value}")
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
