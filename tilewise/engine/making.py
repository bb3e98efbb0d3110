"""How an LLM's engine is made on the thread that will own it: cache, runner and graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.engine.captured.ahead import compile_ahead
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.prompt_steps import has_run
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.report import Progress, terminal
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.speculative import DraftModel
from tilewise.engine.sizing import allocate, blocks_on_cpu, blocks_on_cuda, warm_up
from tilewise.engine.steps.cpu_step import CompiledRunner, runner_for
from tilewise.engine.steps.draft_runner import DraftingRunner, guesser_of
from tilewise.engine.steps.runner import Runner
from tilewise.engine.tables.block_files import BlockFiles, GroupFiles
from tilewise.engine.tables.offload import block_files, host_cache
from tilewise.models.decoder import Decoder

__all__ = ["EngineMaker", "StartSeconds", "settle_memory"]


# Objects that a step makes for each of its rows, some of which live until the next one ends.
OBJECTS_A_ROW = 16


def settle_memory(max_num_seqs: int) -> None:
    """Let Python's collections be few, and pass over what lives now, which lives on.

    Each stops the host. After every 700 new objects, as Python begins, there are some thirty in a
    step of 4,096 rows, of which one or two walk all sequences: 28 ms a step were 17 with one
    collection a step at most (Xeon, 2026-11-23). A larger threshold that is set already stays.
    """
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < OBJECTS_A_ROW * max_num_seqs:
        gc.set_threshold(OBJECTS_A_ROW * max_num_seqs, *others)


class StartSeconds(dict[str, float]):
    """Seconds that the parts of a start took, by what was done, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Note a part that began where the one before it ended."""
        now = time.perf_counter()
        self[part], self._last = now - self._last, now

    def include(self, parts: Mapping[str, float]) -> None:
        """Note parts that others measured; the next one begins now."""
        self.update(parts)
        self._last = time.perf_counter()


@dataclass
class EngineMaker:
    """Makes an engine; holds nothing of the LLM, whose end must end it.

    Attributes:
        model, spec, device: the model, the kind of its cache, and where both are.
        settings: the scheduler's, read by new_scheduler; how many blocks there are goes in there.
        new_scheduler: makes a scheduler of `settings`.
        graphs: a mode of `graphs.MODES`; "off" on a CPU.
        identity: of the model and its cache, for blocks in files.
        num_parameters: of the model.
        num_threads: torch's, on the thread of the LLM.
        current_device: the GPU that was current there; None on a CPU.
        start_seconds: its parts are put there.
        files: "store" is put there, where blocks go to files.

    The others are as `LLM` takes them.
    """

    model: Decoder
    spec: CacheSpec
    device: torch.device
    settings: dict[str, Any]
    new_scheduler: Callable[[], Scheduler]
    graphs: str
    batch_invariant: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int | None
    gpu_memory_utilization: float
    swap_space_gib: float
    offload_dir: str | Path | None
    offload_gib: float
    identity: bytes
    speculative: object
    use_progress: bool | None
    num_parameters: int
    num_threads: int
    start_seconds: StartSeconds
    files: dict[str, BlockFiles | GroupFiles] = field(default_factory=dict)
    current_device: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Read what only the thread of the LLM knows."""
        on_gpu = self.device.type == "cuda"
        self.current_device = torch.cuda.current_device() if on_gpu else None

    def __call__(self) -> Engine:
        """Make the engine.

        Raises:
            ValueError: the cache does not fit; see `sizing`.
        """
        torch.set_num_threads(self.num_threads)
        if self.current_device is not None:
            torch.cuda.set_device(self.current_device)
        has_graphs = self.graphs != "off"
        if has_graphs:
            self.start_seconds.include(self._compile_ahead())
        if self.settings["num_blocks"] is None:
            self.settings["num_blocks"] = self._blocks_that_fit()
            self.start_seconds.end("memory measured")
        storage = allocate(self.spec, self.settings["num_blocks"], self.device)
        host = host_cache(storage, self.swap_space_gib)
        if host is not None:
            self.settings["num_swap_blocks"] = host.blocks.counts
            store = block_files(self.offload_dir, host, self.identity, self.offload_gib)
            self.settings["store"] = store
            if store is not None:
                self.files["store"] = store
        self.start_seconds.end("cache made")
        runner = self._on_device(storage) if has_graphs else self._op_by_op(storage)
        runner.host = host
        return Engine(self.new_scheduler(), runner, overlap=has_graphs)

    def _blocks_that_fit(self) -> Any:
        most = self.max_num_batched_tokens
        if self.device.type == "cpu":
            run = min(self.long_prefill_token_threshold or most, most, self.max_model_len)
            return blocks_on_cpu(self.spec, self.max_num_seqs, self.max_model_len, run)
        return blocks_on_cuda(
            self.model,
            self.spec,
            self.device,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=most,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            has_graphs=self.graphs != "off",
            captures_prompts=has_run(self.spec),
        )

    def _compile_ahead(self) -> dict[str, float]:
        """Let the kernels of the start be compiled side by side; return what took how long."""
        progress = Progress(terminal(self.use_progress))
        try:
            return compile_ahead(
                self.model,
                self.spec,
                self.device,
                max_num_seqs=self.max_num_seqs,
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.max_num_batched_tokens,
                captures_prompts=has_run(self.spec),
                is_lazy=self.graphs == "lazy",
                batch_invariant=self.batch_invariant,
                num_blocks=self.settings["num_blocks"],
                show=progress.show,
            )
        finally:
            progress.close()

    def _on_device(self, storage: Any) -> Runner:
        most = self.max_num_batched_tokens
        runner = DeviceRunner(
            self.model,
            storage,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=most if has_run(self.spec) else None,
            batch_invariant=self.batch_invariant,
        )
        progress = Progress(terminal(self.use_progress))
        try:
            prepare(
                runner,
                max_num_batched_tokens=self.max_num_batched_tokens,
                is_lazy=self.graphs == "lazy",
                show=progress.show,
            )
        finally:
            progress.close()
        settle_memory(self.max_num_seqs)
        self.start_seconds.include(runner.start_seconds)
        return runner

    def _op_by_op(self, storage: Any) -> Runner:
        runner = runner_for(
            self.model,
            storage,
            num_parameters=self.num_parameters,
            batch_invariant=self.batch_invariant,
        )
        if isinstance(runner, CompiledRunner):
            runner.warm_up()
        else:
            warm_up(self.model, self.spec, self.device, batch_invariant=self.batch_invariant)
        runner.count_compilations()
        self.start_seconds.end("kernels compiled")
        if isinstance(self.speculative, DraftModel):
            guesser = guesser_of(
                self.speculative,
                storage.num_blocks,
                storage.spec.block_size,
                self.model.config.vocab_size,
                self.max_model_len,
                self.max_num_batched_tokens,
                self.spec.windows[0],
            )
            return DraftingRunner(runner, guesser)
        return runner
