"""A program that compiles kernels for a GPU that is not here, and writes them to a file.

    python -m tilewise.engine.captured.elsewhere TASK

TASK is a `Task` as JSON. Its own process, because it takes the place of torch's CUDA (see
`ops.absent_gpu`), and because Triton must not be in interpreter mode. Lines of progress go to
standard error; the last line of standard output is an `Outcome` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tilewise.children import environment
from tilewise.engine.captured.ahead import num_processes, slowest_first
from tilewise.engine.captured.prompt_steps import has_run
from tilewise.engine.captured.rehearsal import rehearse, runner_to_rehearse
from tilewise.engine.config import EngineConfig
from tilewise.engine.settings import model_directory, resolve, spec_of
from tilewise.errors import UnsupportedError
from tilewise.models.config import read_config
from tilewise.models.native import for_device
from tilewise.models.registry import empty_model
from tilewise.ops import absent_gpu
from tilewise.ops import compile_ahead as compiling
from tilewise.ops.precompile import attention_calls
from tilewise.progress import Progress

__all__ = ["SM_COUNTS", "Outcome", "Task", "compile_for"]

# Multiprocessors of the largest card of an architecture that people own (NVIDIA's data sheets):
# A100, RTX 3090, L40S, H200, B200, B300, RTX 5090. How work is split depends on them a little.
SM_COUNTS = {80: 108, 86: 82, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170}
_SECONDS = 3600.0  # for all kernels of a file


@dataclasses.dataclass(frozen=True)
class Task:
    """Kernels to compile for another machine.

    Attributes:
        arch: the compute capability, as 89; one of SM_COUNTS.
        to: the path of the file of compiled kernels that is written.
        head_dims, dtypes: heads of attention, and names of dtypes, as `ops.precompile` takes them;
            none with a model.
        needs_backward: True to compile gradients of dense and packed attention, too.
        options: options of an engine, `model` among them, or nothing without a model.
        sm_count: multiprocessors of the GPU; None for those of the largest card, see SM_COUNTS.
        workers: compiling processes; None takes one a core, at most 16.
    """

    arch: int
    to: str
    head_dims: Sequence[int] = ()
    dtypes: Sequence[str] = ()
    needs_backward: bool = True
    options: dict[str, Any] | None = None
    sm_count: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.arch not in SM_COUNTS:
            known = ", ".join(f"sm{arch}" for arch in SM_COUNTS)
            raise ValueError(f"arch must be one of {known}, got sm{self.arch}")
        for name in ("sm_count", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def about(self) -> str:
        """The purpose of the kernels in words, which is written to the file."""
        if self.options is not None:
            return f"an engine of {self.options['model']}"
        return f"attention with heads of {', '.join(map(str, self.head_dims))}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a task.

    Attributes:
        num_kernels: the number of kernels in the file.
        num_found: the number of those that had been compiled before.
        failures: the reasons why other kernels are missing, a line each.
    """

    num_kernels: int
    num_found: int
    failures: Sequence[str]


def compile_for(task: Task) -> Outcome:
    """Compile the kernels of a task into its file, in a process of its own; return the outcome.

    Raises:
        ValueError: the task, or the model, is wrong; the message says how.
        RuntimeError: the process ended without an answer.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(task))],
        env=environment(TRITON_INTERPRET="0"),
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    told: dict[str, Any] = {}
    with suppress(ValueError, IndexError):
        told = json.loads(lines[-1])
    if "error" in told:
        raise ValueError(told["error"])
    if "num_kernels" not in told:
        raise RuntimeError(f"the process that compiles ended with status {done.returncode}")
    return Outcome(**told)


def _run(task: Task) -> Outcome:
    from triton.backends.compiler import GPUTarget

    count = task.workers or max(1, num_processes())
    target = GPUTarget("cuda", task.arch, 32)
    sm_count = task.sm_count or SM_COUNTS[task.arch]
    failures: list[str] = []
    with (
        absent_gpu.stand_in(target, sm_count, needs_gradients=task.needs_backward),
        compiling.noted_launches(lambda _: None) as found,
    ):
        if task.options is not None:
            _rehearse(task.options)
        else:
            dtypes = [getattr(torch, name) for name in task.dtypes]
            failures += attention_calls(task.head_dims, dtypes, "cuda:0")
    requests = list(found.values())
    missing = [request for request in requests if not request.is_on_disk]
    with compiling.compilers(count) as processes:
        processes.begin()
        with Progress() as progress:
            outcome = processes.compile(
                slowest_first(missing),
                seconds=_SECONDS,
                show=lambda done, total: progress.show(
                    f"compiled {done} of {total} kernels", done / max(1, total)
                ),
            )
    failures += outcome.failures
    manifest = compiling.pack(Path(task.to), requests, arch=task.arch, about=task.about)
    return Outcome(len(manifest.kernels), len(requests) - len(missing), failures)


def _rehearse(options: dict[str, Any]) -> None:
    """Run an engine's start on the absent GPU, where launches are noted for compilation.

    Args:
        options: the fields of the engine's `EngineConfig`.

    Raises:
        UnsupportedError: the model's steps cannot be captured as CUDA graphs.
    """
    device = torch.device("cuda:0")
    asked = EngineConfig(**options)
    directory = model_directory(asked.model)
    model_config = for_device(read_config(directory), device)
    dtype = getattr(torch, model_config.dtype if asked.dtype == "auto" else str(asked.dtype))
    config = resolve(asked, device, model_config, dtype)
    if not config.has_graphs:
        raise UnsupportedError(f"model must be one whose steps are captured, got {asked.model}")
    model = empty_model(model_config, dtype, device).eval().requires_grad_(False)
    spec = spec_of(model_config, config)
    most = config.max_num_batched_tokens
    runner = runner_to_rehearse(
        model,
        spec,
        device,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=most if has_run(spec) else None,
        batch_invariant=config.batch_invariant,
        num_blocks=config.num_blocks,
    )
    rehearse(runner, max_num_batched_tokens=most, is_lazy=config.graphs == "lazy")


def main(text: str) -> None:
    """Run the task that `text` describes in JSON, and print its outcome as one line of JSON.

    An error of the task is printed as {"error": ...} likewise. What compilers print goes to
    standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever compilers print is no answer
    try:
        told = dataclasses.asdict(_run(Task(**json.loads(text))))
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        told = {"error": " ".join(str(error).split())}
    print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
