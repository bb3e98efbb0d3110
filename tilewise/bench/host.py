"""What a call of attention costs beside the GPU's time: the host, and the first call."""

from __future__ import annotations

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
from tilewise.kernels.gluon.attention import launch_fwd
from tilewise.ops._attention_args import prepare_dense
from tilewise.ops._attention_op import make_spec

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
    tensors = [
        torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    q, k, v = (tensor.detach().transpose(1, 2).contiguous() for tensor in tensors)

    def cudnn() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    o = ops.attention(*tensors, causal=True)
    do = torch.randn_like(o)
    results: dict[str, Any] = {
        "forward, us a call": _host_time(_inference(tensors)),
        "forward from the kernels' launcher on, us a call": _host_time(_launcher(tensors)),
        "forward that will be differentiated, us a call": _host_time(
            lambda: ops.attention(*tensors, causal=True)
        ),
        "backward, us a call": _host_time(
            lambda: torch.autograd.grad(o, tensors, do, retain_graph=True)
        ),
        "SDPA cuDNN forward, us a call": _host_time(cudnn),
        "forward replayed from a graph, us a call": _host_time(_graph(_inference(tensors)).replay),
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder}
        for name in ("first call, cold", "first call, cached"):
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            forward, backward = map(float, done.stdout.split())
            results[name] = {"forward, s": forward, "backward, s": backward}
    return results


def _inference(tensors: list[torch.Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return ops.attention(*tensors, causal=True)

    return call


def _launcher(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return a forward pass without the checks, the op and the choice of a backend."""
    q, k, v, options = prepare_dense(*(tensor.detach() for tensor in tensors), causal=True)
    spec, given = make_spec(q, k, v, options), options.tensors()
    return lambda: launch_fwd(q, k, v, spec, **given)


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
