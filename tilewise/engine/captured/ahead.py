"""Compile the kernels of a start in several processes, before the start needs them one by one.

first start    `rehearsal` finds what will be compiled, `kernels.host.side_by_side` compiles it in
               several processes; a stamp beside Triton's cache then names the kernels
later starts   the stamp's kernels are on disk: nothing is rehearsed
failures       a process that dies, a limit of time, an error: one warning, and the start compiles
               a kernel that is missing when it needs it

Each rank of a host rehearses; a kernel that several of them need is compiled by the first to ask.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.engine.captured.rehearsal import kinds_of, rehearse, runner_to_rehearse
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.memory import available_memory
from tilewise.models.decoder import Decoder
from tilewise.ops import compile_ahead as compiling
from tilewise.progress import Show, silent

if TYPE_CHECKING:
    from tilewise.distributed.shard_group import ShardGroup
    from tilewise.engine.steps.adapter_slots import AdapterSlots
    from tilewise.ops.compile_ahead import Request

__all__ = ["PROCESSES", "compile_ahead", "num_processes"]

PROCESSES = "TILEWISE_COMPILE_PROCESSES"  # how many, in the environment; 0 is off
MOST_PROCESSES = 16
PROCESS_BYTES = 2 << 30  # of main memory for each
SECONDS = 300.0  # to wait for them at most
STAMPS = "tilewise-starts"


def num_processes(ranks: int = 1) -> int:
    """Return how many processes are to compile kernels for this one; 0 or 1 means not to start any.

    The environment's TILEWISE_COMPILE_PROCESSES says how many. Without it they are one for each
    core and 2 GiB of free memory, at most 16, divided among the ranks.

    Args:
        ranks: the number of this host's ranks, which compile the same kernels.

    Raises:
        ValueError: the environment's text is no number of processes.
    """
    asked = os.environ.get(PROCESSES, "").strip()
    if asked:
        if not asked.isdecimal():
            raise ValueError(
                f"{PROCESSES} must be a number of processes, 0 for none, got {asked!r}"
            )
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_PROCESSES, cores or 1, available_memory() // PROCESS_BYTES) // ranks


def compile_ahead(
    model: Decoder,
    spec: CacheSpec,
    device: torch.device,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    captures_prompts: bool,
    is_lazy: bool,
    batch_invariant: bool = False,
    num_blocks: int | tuple[int, ...] | None = None,
    group: ShardGroup | None = None,
    adapters: AdapterSlots | None = None,
    show: Show = silent,
) -> dict[str, float]:
    """Compile the kernels of a start into Triton's cache on disk, in several processes.

    Nothing is done on a CPU, for a model that is not native, where fewer than two processes may
    compile, or if a stamp on disk says that all kernels are there. A failure is a warning: the
    kernel is compiled when it is needed.

    Args:
        captures_prompts: True if steps with prompts are padded and captured.
        num_blocks: the number of the cache's blocks, where it is known.
        group: the group of the ranks that hold the model's shards.
        adapters: the slots of adapters.
        show: a function that takes lines of progress.

    Returns:
        The seconds of the parts of this work, by name; empty if there was nothing to compile.

    Raises:
        ValueError: the environment asks for no number of processes.
    """
    ranks = 1 if group is None else group.size
    count = num_processes(ranks)
    if count < 2 or device.type != "cuda" or not model.config.is_native:
        return {}
    limits: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "num_blocks": num_blocks,
        "batch_invariant": batch_invariant,
    }
    rank = None if group is None else (group.rank, group.size, group.why_no_inbox)
    kinds = None
    if adapters is not None:
        kinds = [(own.a.shape, own.b.shape) for own in adapters.weights.values()]
    facts = (max_num_batched_tokens, captures_prompts, is_lazy, rank, limits, kinds)
    try:
        stamp = _stamp_of(model, spec, device, facts)
        if _is_warm(stamp):
            return {}
        try:
            return _compile(
                lambda: runner_to_rehearse(
                    model,
                    spec,
                    device,
                    max_num_batched_tokens=max_num_batched_tokens if captures_prompts else None,
                    adapters=adapters,
                    **limits,
                ),
                max_num_batched_tokens,
                is_lazy,
                count,
                stamp,
                group,
                show,
            )
        finally:  # of the rehearsal nothing stays
            gc.collect()
            torch.cuda.empty_cache()
    except Exception as error:
        _warn(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return {}


def _compile(
    new_runner: Callable[[], DeviceRunner],
    max_num_batched_tokens: int,
    is_lazy: bool,
    count: int,
    stamp: Path,
    group: ShardGroup | None,
    show: Show,
) -> dict[str, float]:
    began = time.perf_counter()
    missing: list[Request] = []
    show("finding out which kernels are needed")
    with compiling.compilers(count) as processes:

        def note(request: Request) -> None:
            if not request.is_on_disk:
                missing.append(request)
                processes.begin()  # which takes seconds

        with compiling.noted_launches(note) as found, group.alone() if group else nullcontext():
            rehearse(new_runner(), max_num_batched_tokens=max_num_batched_tokens, is_lazy=is_lazy)
        rehearsed = time.perf_counter()
        outcome = processes.compile(
            slowest_first(missing),
            seconds=SECONDS,
            show=lambda done, total: show(
                f"compiling kernels, {done} of {total}", done / max(1, total)
            ),
        )
    missing = [request for request in missing if not request.is_on_disk]
    if missing:
        reasons = [*outcome.failures, "the rest would have taken too long"]
        _warn(f"{len(missing)} kernels; {reasons[0]}")
    else:
        _write(stamp, list(found.values()))
    return {"rehearsal": rehearsed - began, "compiling ahead": time.perf_counter() - rehearsed}


def slowest_first(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the kernels first that take longest to compile.

    So few processes wait for a single one at the end.
    """
    return sorted(requests, key=lambda request: _RANK.get(request.name, len(_RANK)))


# What compiles longest of what a start needs, by kernel.
_SLOW = ("_draw_kernel", "_rows_kernel", "_split_kernel", "_linear_kernel")
_RANK = {name: place for place, name in enumerate(_SLOW)}


def _warn(reason: str) -> None:
    warnings.warn(
        f"kernels are compiled one after another, as they could not be side by side ({reason}); "
        f"{PROCESSES}=0 does not try",
        RuntimeWarning,
        stacklevel=3,
    )


def _stamp_of(model: Decoder, spec: CacheSpec, device: torch.device, facts: object) -> Path:
    """Return the path of the file that lists the kernels which a start with these facts compiles.

    Its name is a digest of all that decides which kernels these are: versions, the package's
    sources, the GPU, the model, the cache and `facts`.
    """
    folder, version = compiling.cache()
    root = Path(__file__).parents[2]
    sources = [
        (str(path.relative_to(root)), (found := path.stat()).st_size, found.st_mtime_ns)
        for path in sorted(root.rglob("*.py"))
    ]
    properties = torch.cuda.get_device_properties(device)
    about = (
        version,
        torch.__version__,
        sources,
        properties.name,
        properties.major,
        properties.minor,
        properties.multi_processor_count,
        model.config,
        kinds_of(model),
        spec,
        facts,
    )
    digest = hashlib.sha256(repr(about).encode()).hexdigest()
    return folder / STAMPS / f"{digest}.json"


def _is_warm(stamp: Path) -> bool:
    """Return whether all kernels that the stamp lists are in Triton's cache on disk; False without
    one."""
    try:
        kernels = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    return all(compiling.is_on_disk(name, file) for name, file in kernels)


def _write(stamp: Path, requests: Sequence[Request]) -> None:
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        draft = stamp.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([(r.hash, r.file) for r in requests]))
        draft.replace(stamp)
