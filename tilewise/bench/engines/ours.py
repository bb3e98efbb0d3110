"""tilewise in the benchmark: `LLM` as users make it, and a look at where a step's time goes."""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewise
from tilewise.bench.engines.busy import busy_share, read_trace
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps import runner as runner_module
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.tensor_parallel.runner import ParallelRunner
from tilewise.ops.compile_ahead import listen

__all__ = ["Compilations", "Measured"]

_OPTIONAL = (
    "graphs",
    "weight_dtype",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "tensor_parallel_size",
)


class Compilations:
    """The numbers of kernels that Triton and numba compile in this process, counted from now on.

    Attributes:
        count: the number of compiled kernels.
        loaded: kernels that Triton took from its disk cache.
    """

    def __init__(self) -> None:
        self.count = self.loaded = 0
        self._listen_to_numba()
        listen(self._hear_triton)

    def _hear_triton(self, *, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.loaded += 1
        else:
            self.count += 1

    def _listen_to_numba(self) -> None:
        from numba.core import event

        counter = self

        class Listener(event.Listener):
            def on_start(self, event: Any) -> None:
                counter.count += 1

            def on_end(self, event: Any) -> None:
                pass

        event.register("numba:compile", Listener())


class Measured:
    """The engine of this package, `LLM`, as a `worker.Engine` of the benchmark.

    Args:
        settings: "directory", "device", "dtype", "random_weights", "max_num_seqs", "max_len",
            "memory" (the share of a GPU's), "num_blocks" (None is what that share holds),
            "prefix_caching", "threads", and what LLM calls
            "graphs", "weight_dtype", "max_num_batched_tokens", "kv_cache_dtype" and
            "tensor_parallel_size".

    Raises:
        ValueError: a setting is given that LLM does not have.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device: str = settings["device"]
        if settings.get("threads"):
            torch.set_num_threads(settings["threads"])
        given = {name: settings[name] for name in _OPTIONAL if settings.get(name) is not None}
        unknown = set(given) - set(inspect.signature(LLM.__init__).parameters)
        if unknown:
            raise ValueError(f"LLM must take {', '.join(sorted(unknown))}, it does not")
        blocks = settings.get("num_blocks")
        if (
            blocks is None and self.device == "cpu"
        ):  # as many as the workload needs, whatever is free
            blocks = settings["max_num_seqs"] * (-(-settings["max_len"] // 16) + 1)
        self.compilations = Compilations()
        self.llm = LLM(
            settings["directory"],
            device=self.device,
            dtype=settings["dtype"],
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=settings["max_len"],
            num_blocks=blocks,
            gpu_memory_utilization=settings["memory"],
            enable_prefix_caching=settings["prefix_caching"],
            random_weights=settings["random_weights"],
            **given,
        )
        self.at_start = (self.compilations.count, self.compilations.loaded)

    def facts(self) -> dict[str, Any]:
        """Return by name the versions, how many kernels were compiled until the engine was ready
        and how many since, and on a GPU the memory."""
        facts = {
            "version": tilewise.__version__,
            "torch": torch.__version__,
            "compiled at start": self.at_start[0],
            "compiled after start": self.compilations.count - self.at_start[0],
            "loaded after start": self.compilations.loaded - self.at_start[1],
        }
        runner = self.llm.engine.runner
        if isinstance(runner, DeviceRunner):
            facts |= {f"{part}, s": round(t, 2) for part, t in self.llm.start_seconds.items()}
            if runner.compilations.names:
                facts["kernels after start"] = list(runner.compilations.names)
        if isinstance(runner, ParallelRunner) and self.device == "cuda":
            facts["small sums"] = runner.why_no_symmetric_memory or "symmetric memory"
        elif self.device == "cuda":
            facts["GPU memory, GiB"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        return facts

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt's first sample, when all samples are done."""
        params = [
            SamplingParams(n=n, temperature=temperature, max_tokens=count, ignore_eos=True)
            for count in new_tokens
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a workload of equal lengths twice more, and look at its last decode steps.

        Args:
            request: as for generate, "prefill_s" (the seconds until the first token), and "trace"
                (a .json.gz file for torch's trace, or None).

        Returns:
            "host ms": the median of a decode step's time in the parts of the host's work that
            `_parts` finds, named in "host parts". "busy %": the share of the second half of the
            decode steps in which a kernel or a copy ran on the GPU, and "kernels a step".
        """
        arguments = (request["prompts"], request["new_tokens"], request["temperature"], 1)
        found: dict[str, Any] = {}
        with _host_time(self._parts()) as steps:
            self.generate(*arguments)
        decode = steps[len(steps) // 2 :]  # the later half has no prompts in it
        if decode:
            found["host ms"] = 1e3 * median(sum(step.values()) for step in decode)
            names = decode[0]
            found["host parts"] = {
                name: 1e3 * median(step.get(name, 0.0) for step in decode) for name in names
            }
        if self.device == "cuda" and self.llm.tensor_parallel_size == 1:
            found |= self._busy(arguments, request)
        return found

    def _parts(self) -> list[tuple[Any, str]]:
        """Return pairs (owner, attribute) that name the functions of the host's work in a step:
        schedule, prepare the inputs, and take the tokens in.

        The first is called once a step, before the others.
        """
        engine = self.llm.engine
        # On a GPU `submit` waits for nothing; elsewhere it computes the step.
        inputs: tuple[Any, str] = (runner_module, "build_inputs")
        if isinstance(engine.runner, DeviceRunner | ParallelRunner):
            inputs = (engine.runner, "submit")
        elif isinstance(engine.runner, CompiledRunner):
            inputs = (engine.runner, "decode_inputs")
        return [(engine.scheduler, "schedule"), inputs, (engine.scheduler, "update")]

    def _busy(self, arguments: tuple[Any, ...], request: dict[str, Any]) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            self.generate(*arguments)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(request.get("trace") or os.path.join(folder, "trace.json.gz"))
            profiler.export_chrome_trace(str(path))
            spans = read_trace(path)
        share, kernels = busy_share(spans, skip=request["prefill_s"])
        steps = (request["new_tokens"][0] - 1) / 2
        return {"busy %": 100 * share, "kernels a step": round(kernels / steps, 1)}


@contextmanager
def _host_time(parts: list[tuple[Any, str]]) -> Iterator[list[dict[str, float]]]:
    """Time functions while the block of a `with` runs; yield a list that gets, for each step, a
    table of the functions' seconds by attribute.

    Args:
        parts: pairs (owner, attribute) that name the functions; a call of the first begins a step.
    """
    steps: list[dict[str, float]] = []

    def timed(function: Callable[..., Any], name: str, is_first: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if is_first:
                    steps.append({})
                if steps:
                    seconds = time.perf_counter() - started
                    steps[-1][name] = steps[-1].get(name, 0.0) + seconds

        return call

    with ExitStack() as stack:
        for i, (owner, name) in enumerate(parts):
            function = getattr(owner, name)
            had = name in vars(owner)
            setattr(owner, name, timed(function, name, i == 0))
            if had:
                stack.callback(setattr, owner, name, function)
            else:
                stack.callback(delattr, owner, name)
        yield steps
