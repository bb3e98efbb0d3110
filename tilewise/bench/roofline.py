"""What the machine can do at best, measured in the same process as the kernels."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

import torch

from tilewise.bench.timing import time_call


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of a device: FLOP/s of a large matrix product, bytes/s of a large read and of
    a large copy, which counts what is read and what is written."""

    device: str
    name: str
    torch_version: str
    matmul_flops: float
    read_bytes: float
    copy_bytes: float

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.name}, torch {self.torch_version}: matmul {self.matmul_flops / 1e12:.3g} "
            f"TFLOP/s, read {self.read_bytes / 1e9:.3g} GB/s"
        )


def device_name(device: str) -> str:
    """Return the product name of the GPU, or of the processor with torch's number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as info:
            model = next(line.split(":", 1)[1].strip() for line in info if "model name" in line)
    except (OSError, StopIteration):
        model = platform.processor() or "CPU"
    return f"{model}, {torch.get_num_threads()} threads"


def measure_ceilings(device: str, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Measure a matrix product in `dtype` and streaming memory on "cpu" or "cuda"; return the
    limits.

    A CPU without units for `dtype`, where torch may be a thousand times slower in it, is measured
    in float32, to which kernels widen there.
    """
    n = 8192
    if device == "cpu":
        n = 2048
        dtype = max((dtype, torch.float32), key=lambda kind: product_flops(256, device, kind))
    matmul = product_flops(n, device, dtype)
    words = 1 << (30 if device == "cuda" else 27)
    x = torch.randn(words // 64, device=device).repeat(64)
    y = torch.empty_like(x)
    read = x.nbytes / _fastest_read(x, device)
    copy = 2 * x.nbytes / time_call(lambda: y.copy_(x), device).median
    return Ceilings(device, device_name(device), torch.__version__, matmul, max(read, copy), copy)


def product_flops(n: int, device: str, dtype: torch.dtype) -> float:
    """Return the measured FLOP/s of a product of two n x n matrices in `dtype`."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device).median


def _fastest_read(x: torch.Tensor, device: str) -> float:
    """Return the seconds of the fastest of a few ways to read every byte of `x` once."""
    rows = x.view(1024, -1)
    ways = (lambda: x.sum(), lambda: x.amax(), lambda: rows.sum(1), lambda: torch.dot(x, x))
    return min(time_call(way, device, budget=0.3).median for way in ways)
