"""Facts about the machine, read once, on which a choice of tiles or of a backend may depend."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

import torch

AMD = 0  # stands for a compute capability, which AMD's GPUs have none of


@functools.cache
def has_triton() -> bool:
    """Return whether triton can be imported."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Return whether Triton kernels run in its CPU interpreter: the environment has
    TRITON_INTERPRET=1, which counts only if it was set before Triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def runs_ptx() -> bool:
    """Return whether Triton kernels may hold NVIDIA's instructions: not in the interpreter, and not
    on an AMD GPU."""
    return not interpreting() and torch.version.hip is None


@functools.cache
def capability(index: int) -> int:
    """Return the compute capability of CUDA device `index` as major * 10 + minor, e.g. 90 for
    Hopper; AMD for one of AMD's, whose numbers torch returns in its place."""
    if torch.version.hip is not None:
        return AMD
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


@functools.cache
def sm_count(index: int) -> int:
    """Return the number of streaming multiprocessors of CUDA device `index`."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@functools.cache
def l2_bytes() -> int:
    """Return the bytes of the CPU's L2 cache, of one core or a few; 1 MiB if unknown."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as size:
            return int(size.read().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 1 << 20


def _index_of(device: torch.device) -> int:
    is_named = device.type == "cuda" and device.index is not None
    return device.index if is_named else torch.cuda.current_device()


def _is_gpu(device: torch.device) -> bool:
    """Return whether `device` is a GPU. "meta", where plans are made, counts as one if torch sees a
    GPU: it stands for the current one."""
    return device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())


def arch_of(device: torch.device) -> int:
    """Return the compute capability (90 for Hopper) to choose tiles for: the one of `device`, of
    the current GPU for "meta" or "cuda" without an index; 90 for a CPU, where the interpreter is
    treated as Hopper."""
    return capability(_index_of(device)) if _is_gpu(device) else 90


def sm_count_of(device: torch.device) -> int:
    """Return the number of multiprocessors that a launch on `device` should fill: those of the GPU,
    or 4 for a CPU, so few that tests in the interpreter split keys unevenly."""
    return sm_count(_index_of(device)) if _is_gpu(device) else 4


def why_not_hopper(device_type: str, *, needs_gpu: bool = False) -> str | None:
    """Return why kernels of Hopper's own cannot run on a device of this type, or None if they can.

    On a machine without a GPU "cuda" is treated as Hopper, so that calls can be planned there; with
    `needs_gpu` such a machine is refused. Any type but "cuda" is refused.
    """
    return why_not_gpu(device_type, (9,), needs_gpu=needs_gpu)


def why_not_gpu(
    device_type: str, generations: tuple[int, ...], *, needs_gpu: bool = False
) -> str | None:
    """Return why the current GPU has none of these major compute capabilities, or None if it has
    one.

    On a machine without a GPU "cuda" is treated as Hopper (9), so that calls can be planned there;
    with `needs_gpu` such a machine is refused. Any type but "cuda" is refused.
    """
    if device_type != "cuda":
        return f"device must be cuda, got {device_type}"
    has_gpu = torch.cuda.is_available()
    if needs_gpu and not has_gpu:
        return "torch sees no GPU"
    arch = arch_of(torch.device("cuda" if has_gpu else "cpu"))
    if arch // 10 in generations:
        return None
    *first, last = (f"{major}.x" for major in generations)
    if arch == AMD:
        return "needs a GPU of NVIDIA's, got one of AMD's"
    wanted = f"{', '.join(first)} or {last}" if first else last
    name = "a Hopper GPU" if generations == (9,) else "a GPU"
    return f"needs {name} (compute capability {wanted}), got {arch // 10}.{arch % 10}"
