"""What a call of attention costs beside the GPU's time: the host, and the first call."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels.gluon.attention.plan import plan_fwd
from tilewise.kernels.plan import Call, LaunchPlan, Refusal
from tilewise.kernels.spec import AttentionTensors
from tilewise.ops.attention.arguments import Rule, prepare
from tilewise.ops.attention.op import make_spec

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


def measure() -> dict[str, Any]:
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
        environment = os.environ | {"TRITON_CACHE_DIR": folder}
        for name in ("first call, cold", "first call, cached"):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment,
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
    _, _, _, options = prepare(q, k, v, Rule(causal=True))
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
