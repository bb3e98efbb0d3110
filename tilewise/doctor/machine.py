"""Facts about the machine: processor, GPU, compilers, and the folders of compiled kernels."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numba
import torch

import tilewise
from tilewise.kernels.cpu.machine.features import features, grants_tiles

__all__ = ["GPU", "Cache", "Machine", "machine", "shown_path"]

# Instruction sets that decide which code the kernels of a CPU have, by LLVM's names.
_FEATURES = ("avx2", "avx512f", "avx512bf16", "amx-bf16", "amx-int8", "neon", "bf16", "i8mm")
_TILES = ("amx-bf16", "amx-int8")
_C_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU that torch sees.

    Attributes:
        name: the product's name.
        capability: the compute capability, such as "9.0".
        memory: the bytes of its memory.
        multiprocessors: the number of streaming multiprocessors.
    """

    name: str
    capability: str
    memory: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of compiled kernels.

    Attributes:
        name: the compiler that fills it, "numba" or "triton".
        path: the folder, with ~ for the home of the user.
        files: the number of files in it.
        size: the bytes of these files.
        is_writable: False if compiled kernels cannot be written there.
    """

    name: str
    path: str
    files: int
    size: int
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a report about the machine.

    Attributes:
        system: the operating system, its release and the architecture.
        python: the version of Python and its implementation.
        cpu: the product name of the processor.
        cores: the cores that this process may use.
        threads: the threads of torch's products.
        features: the instruction sets of the processor that kernels use.
        memory: the bytes of main memory, None where it is not known.
        gpus: the GPUs that torch sees.
        why_no_gpu: the reason why torch sees none, None where it sees one.
        driver: the version of NVIDIA's driver, None without one.
        triton: the version of Triton, None without it.
        why_no_triton: the reason why Triton cannot be used, None where it can.
        c_compiler: the C compiler that Triton builds launchers with, None without one.
        caches: the folders of compiled kernels.
        variables: the environment variables that change what runs, by name.
    """

    system: str
    python: str
    cpu: str
    cores: int
    threads: int
    features: list[str]
    memory: int | None
    gpus: list[GPU]
    why_no_gpu: str | None
    driver: str | None
    triton: str | None
    why_no_triton: str | None
    c_compiler: str | None
    caches: list[Cache]
    variables: dict[str, str]


def machine() -> Machine:
    """Return the facts about this machine; takes a second at most, and computes nothing."""
    gpus, why_no_gpu = _gpus()
    triton, why_no_triton = _triton()
    caches = [_cache("numba", _numba_folder(), "*.nb[ci]")]
    if triton is not None:
        from tilewise.ops.compile_ahead import cache

        caches.append(_cache("triton", cache()[0], "*"))
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_version()} {sys.implementation.name}",
        cpu=_cpu(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        features=_features(),
        memory=_memory(),
        gpus=gpus,
        why_no_gpu=why_no_gpu,
        driver=_driver(),
        triton=triton,
        why_no_triton=why_no_triton,
        c_compiler=_c_compiler(),
        caches=caches,
        variables=_variables(),
    )


def shown_path(path: Path) -> str:
    """Return a path as text with ~ for the home folder, so that a report does not name the user."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # it lies elsewhere, or there is no home
        return str(path)


def _gpus() -> tuple[list[GPU], str | None]:
    if not torch.cuda.is_available():
        return [], _why_no_gpu()
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        gpu = GPU(
            about.name,
            f"{about.major}.{about.minor}",
            int(about.total_memory),
            int(about.multi_processor_count),
        )
        found.append(gpu)
    return found, None


def _why_no_gpu() -> str:
    if torch.version.hip is not None:
        return f"this torch is built for ROCm {torch.version.hip} and sees no GPU"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; another build of it has CUDA"
    driver = _driver()
    if driver is None:
        return f"torch is built for CUDA {torch.version.cuda}, and there is no NVIDIA driver here"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return (
        f"torch is built for CUDA {torch.version.cuda} and finds no GPU by driver {driver}; an "
        f"older driver than that CUDA asks for is the usual cause"
    )


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d[\d.]*)\b", text)
    return found[1] if found else None


def _triton() -> tuple[str | None, str | None]:
    if find_spec("triton") is None:
        return None, "Triton is not installed; kernels for GPUs need it: pip install triton"
    try:
        import triton
    except Exception as error:  # a broken installation raises what it likes
        return None, f"Triton cannot be imported: {type(error).__name__}: {error}"
    return triton.__version__, None


def _c_compiler() -> str | None:
    named = os.environ.get("CC")
    for name in (named, *_C_COMPILERS) if named else _C_COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _features() -> list[str]:
    known = features()
    can_use_tiles = any(known.get(name) for name in _TILES) and grants_tiles()
    return [name for name in _FEATURES if known.get(name) and (name not in _TILES or can_use_tiles)]


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _numba_folder() -> Path:
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    return Path(tilewise.__file__).parent / "kernels" / "cpu"


def _cache(name: str, folder: Path, pattern: str) -> Cache:
    sizes = [path.stat().st_size for path in folder.rglob(pattern) if path.is_file()]
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent  # a folder that is not there yet is made below this one
    is_writable = os.access(nearest, os.W_OK)
    return Cache(name, shown_path(folder), len(sizes), sum(sizes), is_writable)


def _variables() -> dict[str, str]:
    """Return the environment variables of a fixed list, which change what runs, that are set; none
    is secret."""
    names = (
        "CUDA_VISIBLE_DEVICES",
        "NUMBA_CACHE_DIR",
        "NUMBA_CPU_NAME",
        "NUMBA_DISABLE_JIT",
        "NUMBA_NUM_THREADS",
        "OMP_NUM_THREADS",
        "TRITON_CACHE_DIR",
        "TRITON_INTERPRET",
    )
    return {name: os.environ[name] for name in names if name in os.environ}
