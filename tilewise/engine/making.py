"""How an LLM's engine is made on the thread that will own it: cache, runner and graphs."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.ahead import compile_ahead
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.prompt_steps import has_run
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import DraftModel, OwnHead
from tilewise.engine.engine import Engine
from tilewise.engine.live_adapter import LiveAdapter
from tilewise.engine.memory import check_memory, free_memory
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.settings import FAIR_PROMPT_TOKENS, ResolvedConfig, cache_spec
from tilewise.engine.sizing import (
    Blocks,
    StateMemory,
    allocate,
    blocks_on_cpu,
    blocks_on_cuda,
    cpu_budget,
    warm_up,
)
from tilewise.engine.steps.adapter_slots import AdapterSlots, empty_slots
from tilewise.engine.steps.cpu_step import CompiledRunner, runner_for
from tilewise.engine.steps.draft_runner import (
    DraftingRunner,
    captured_guesser_of,
    draft_spec,
    guesser_of,
    load_draft,
)
from tilewise.engine.steps.encoder_runner import EncoderRunner
from tilewise.engine.steps.head_guesser import HeadGuesser
from tilewise.engine.steps.runner import Runner
from tilewise.engine.steps.verifying import VerifyingRunner
from tilewise.engine.tables.block_files import BlockFiles, GroupFiles
from tilewise.engine.tables.offload import block_files, host_cache
from tilewise.engine.tables.state_tables import StateLimits
from tilewise.models.adapters import AdapterSite
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder
from tilewise.models.multi_token_head import MultiTokenHead, load_multi_token_head
from tilewise.models.transformers_encoder import TransformersEncoder
from tilewise.ops.compile_ahead import tell_first_run
from tilewise.progress import Progress

__all__ = [
    "EncoderMaker",
    "EngineMaker",
    "NewScheduler",
    "StartSeconds",
    "assembled",
    "settle_memory",
]


# Objects that a step makes for each of its rows, some of which live until the next one ends.
OBJECTS_A_ROW = 16


def settle_memory(max_num_seqs: int) -> None:
    """Make Python's garbage collections rare, and exclude the objects that live now from them.

    Each collection stops the host. With Python's threshold of 700 new objects a step of 4,096 rows
    has some thirty, of which one or two walk all sequences: 28 ms a step were 17 with one
    collection a step at most (Xeon, 2026-11-23). The threshold becomes 16 objects per sequence; a
    larger one, or 0, which is none, stays.
    """
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < OBJECTS_A_ROW * max_num_seqs:
        gc.set_threshold(OBJECTS_A_ROW * max_num_seqs, *others)


class StartSeconds(dict[str, float]):
    """The seconds of each part of a start, by the part's name, in the order of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Note the seconds of a part of the start, from the end of the part before it until now."""
        now = time.perf_counter()
        self[part], self._last = now - self._last, now

    def include(self, parts: Mapping[str, float]) -> None:
        """Add parts that were measured elsewhere, by name; the next part begins now."""
        self.update(parts)
        self._last = time.perf_counter()


@dataclass(frozen=True)
class NewScheduler:
    """Makes an engine's first scheduler and, after a failure that may have left it inconsistent, an
    empty one like it.

    Attributes:
        config: the engine's config.
        windows: the window of each group of layers, None for all keys.
        num_blocks: cache blocks of each group of layers, or one number for all of them.
        num_swap_blocks: blocks of main memory, for each group of layers or as one number.
        store: the files of blocks that main memory has no room for; None without any.
        seeds: numbers from which requests without a seed draw theirs, one for each scheduler.
        is_encoder: True if each prompt runs whole, and nothing follows it.
        states: the sizes of states; None for a model without.
        max_num_seqs: sequences that run at once, where states allow fewer; None is the config's.
    """

    config: ResolvedConfig
    windows: tuple[int | None, ...]
    num_blocks: Blocks
    num_swap_blocks: Blocks
    store: BlockFiles | GroupFiles | None
    seeds: Iterator[int]
    is_encoder: bool = False
    states: StateLimits | None = None
    max_num_seqs: int | None = None

    def __call__(self) -> Scheduler:
        """Return a new scheduler without requests."""
        config = self.config
        return Scheduler(
            self.num_blocks,
            config.block_size,
            windows=self.windows,
            max_num_seqs=self.max_num_seqs or config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_prefix_caching=config.enable_prefix_caching,
            seed=next(self.seeds),
            scheduling_policy=config.scheduling_policy,
            user_weights=config.user_weights,
            preemption=config.preemption,
            victim=config.victim,
            num_swap_blocks=self.num_swap_blocks,
            store=self.store,
            speculative=config.speculative,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            fair_prompt_tokens=FAIR_PROMPT_TOKENS[config.device.type],
            is_encoder=self.is_encoder,
            max_loras=config.max_loras if config.enable_lora else None,
            states=self.states,
        )


def assembled(
    config: ResolvedConfig,
    runner: Runner,
    identity: bytes,
    windows: tuple[int | None, ...],
    num_blocks: Blocks,
    num_swap_blocks: Blocks,
    states: StateLimits | None = None,
    max_num_seqs: int | None = None,
) -> Engine:
    """Return the engine of a runner, with a scheduler over its blocks, and its audits as
    configured.

    Args:
        config: the engine's config.
        runner: the runner that computes steps.
        identity: the fingerprint of the model and its cache, for blocks in files.
        windows, num_blocks, num_swap_blocks, states, max_num_seqs: see `NewScheduler`.
    """
    new_scheduler = NewScheduler(
        config,
        windows,
        num_blocks,
        num_swap_blocks,
        block_files(config.offload_dir, runner.host, identity, config.offload_gib),
        itertools.count(config.seed),
        states=states,
        max_num_seqs=max_num_seqs,
    )
    engine = Engine(
        new_scheduler(),
        runner,
        overlap=config.has_graphs,
        new_scheduler=new_scheduler,
        store=new_scheduler.store,
    )
    engine.watch(config.audit, config.canary, seed=config.seed, stops=config.audit_stop)
    return engine


def state_memory(config: ResolvedConfig, spec: CacheSpec) -> StateMemory | None:
    """Return the sizes of recurrent states, for the sharing of the cache's memory; None for a model
    without states."""
    if not spec.states:
        return None
    return StateMemory(
        spec,
        config.max_num_seqs,
        config.checkpoint_tokens,
        config.num_checkpoints,
        keeps_tokens=config.device.type != "cpu",
    )


def state_limits(
    config: ResolvedConfig, spec: CacheSpec, num_blocks: Blocks, num_processes: int = 1
) -> tuple[StateLimits | None, int]:
    """Return the sizes of states, and the number of slots: the sequences that may run at once.

    Without states they are None and 1. There are max_num_seqs slots, or on a CPU without a given
    num_blocks at most those that its memory holds. No checkpoints are kept without prefix caching.

    Args:
        config: the engine's config.
        spec: the spec of the cache.
        num_blocks: the blocks that were chosen.
        num_processes: the processes that share a CPU's memory, each with such a cache.
    """
    memory = state_memory(config, spec)
    if memory is None:
        return None, 1
    num_slots = config.max_num_seqs
    if config.device.type == "cpu" and config.num_blocks is None:
        num_slots = memory.num_slots(cpu_budget() // num_processes)
    first = num_blocks if isinstance(num_blocks, int) else num_blocks[0]
    num_tokens = first * spec.block_size
    if not spec.bytes_per_block:
        num_tokens = num_slots * memory.tokens_apart
    count = memory.checkpoints_for(num_tokens) if config.enable_prefix_caching else 0
    return StateLimits(count, memory.tokens_apart), num_slots


class _Guessing(NamedTuple):
    """The model or head that guesses tokens with a cache of its own, and the spec of that cache."""

    model: Decoder | MultiTokenHead
    spec: CacheSpec


@dataclass(frozen=True)
class EngineMaker:
    """Makes an engine; it keeps no reference to the LLM, so that an unused LLM can be freed.

    Attributes:
        config: the engine's config.
        directory: the directory of the checkpoint.
        model: the model, on the device.
        spec: the spec of its cache.
        identity: the fingerprint of the model and its cache, for blocks in files; b"" without any.
        num_parameters: the number of the model's parameters.
        num_threads: torch's threads on the thread of the LLM.
        start_seconds: a stopwatch, which notes the parts of the start.
        current_device: the GPU that was current on the thread of the LLM; None on a CPU.
        sites: the linear layers that may have adapters; empty without them.
        live: the adapter that is trained beside a model of this process; None without.
    """

    config: ResolvedConfig
    directory: Path
    model: Decoder
    spec: CacheSpec
    identity: bytes
    num_parameters: int
    num_threads: int
    start_seconds: StartSeconds
    current_device: int | None
    sites: Mapping[str, AdapterSite]
    live: LiveAdapter | None

    def __call__(self) -> Engine:
        """Return the engine, with its cache allocated and its kernels compiled.

        Raises:
            ValueError: the cache does not fit; see `sizing`.
        """
        config = self.config
        torch.set_num_threads(self.num_threads)
        if self.current_device is not None:
            torch.cuda.set_device(self.current_device)
        slots, guessing = self._slots(), self._guessing()
        if config.has_graphs and not self.spec.states:  # `rehearsal` has no layers with states
            self.start_seconds.include(self._compile_ahead(slots))
        num_blocks: Blocks | None = config.num_blocks
        if num_blocks is None:
            num_blocks = self._blocks_that_fit(slots, None if guessing is None else guessing.spec)
            self.start_seconds.end("memory measured")
        limits, num_slots = state_limits(config, self.spec, num_blocks)
        storage = allocate(
            self.spec,
            num_blocks,
            config.device,
            num_slots=num_slots,
            num_checkpoints=0 if limits is None else limits.num_checkpoints,
        )
        host = host_cache(storage, config.swap_space_gib)
        self.start_seconds.end("cache made")
        runner: Runner
        if config.has_graphs:
            runner = self._on_device(storage, slots)
        else:
            runner = self._op_by_op(storage, slots, guessing)
        runner.host = host
        num_swap_blocks = 0 if host is None else host.counts
        return assembled(
            config,
            runner,
            self.identity,
            self.spec.windows,
            num_blocks,
            num_swap_blocks,
            limits,
            None if limits is None else num_slots,
        )

    @property
    def _memory(self) -> StateMemory | None:
        """The memory of states, besides the blocks; None for a model without states."""
        return state_memory(self.config, self.spec)

    def _slots(self) -> AdapterSlots | None:
        """Return the memory of the device for adapters, allocated now; None without adapters.

        Raises:
            ValueError: the device has not that much memory.
        """
        config = self.config
        if self.live is not None:
            return AdapterSlots(self.model, self.live.weights, (self.live.number,))
        if not self.sites:
            return None
        try:
            slots = empty_slots(
                self.sites,
                count=config.max_loras,
                max_rank=config.max_lora_rank,
                device=config.device,
                dtype=self.model.dtype,
            )
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"max_loras and max_lora_rank must fit the memory of {config.device}, "
                f"got {config.max_loras} and {config.max_lora_rank}"
            ) from error
        return AdapterSlots(self.model, slots)

    def _guessing(self) -> _Guessing | None:
        """Load the head or draft model that guesses tokens with a cache of its own.

        It must be loaded before the free memory is measured.

        Returns:
            None without guesses or for guesses by lookup, and for a draft model that runs on a CPU
            op by op, which is loaded later.

        Raises:
            CheckpointError, ValueError: see `load_draft` and `load_multi_token_head`.
        """
        config, block_size = self.config, self.spec.block_size
        if isinstance(config.speculative, OwnHead):
            head = load_multi_token_head(
                self.directory,
                self.model,
                self.model.config,
                random_weights=config.random_weights,
            )
            own = cache_spec(head.config, block_size, self.model.dtype)
            return _Guessing(head, CacheSpec(1, block_size, own.kv))
        is_on_cpu = config.device.type == "cpu" and not config.has_verifying_graphs
        if not isinstance(config.speculative, DraftModel) or is_on_cpu:
            return None

        def fits(model: Decoder) -> None:
            share = config.gpu_memory_utilization if config.num_blocks is None else None
            check_memory(model, None, config.device, free_memory(config.device, share))

        draft = load_draft(
            config.speculative,
            config.device,
            self.model.config.vocab_size,
            config.max_model_len,
            self.spec.windows[0],
            fits,
        )
        return _Guessing(draft, draft_spec(draft, block_size))

    def _blocks_that_fit(self, slots: AdapterSlots | None, beside: CacheSpec | None) -> Blocks:
        config = self.config
        if config.device.type == "cpu":
            return blocks_on_cpu(
                self.spec,
                config.max_num_seqs,
                config.max_model_len,
                config.max_prompt_run,
                states=self._memory,
            )
        return blocks_on_cuda(
            self.model,
            self.spec,
            config.device,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
            has_graphs=config.has_graphs,
            captures_prompts=has_run(self.spec),
            adapters=slots,
            states=self._memory,
            beside=beside,
        )

    def _compile_ahead(self, slots: AdapterSlots | None) -> dict[str, float]:
        """Compile the kernels of the start in several processes; return the seconds of its parts by
        name."""
        config = self.config
        with Progress(config.use_progress) as progress:
            return compile_ahead(
                self.model,
                self.spec,
                config.device,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
                captures_prompts=has_run(self.spec),
                is_lazy=config.graphs == "lazy",
                batch_invariant=config.batch_invariant,
                num_blocks=config.num_blocks,
                adapters=slots,
                show=progress.show,
            )

    def _on_device(self, storage: KVStorage, slots: AdapterSlots | None) -> Runner:
        config = self.config
        most = config.max_num_batched_tokens
        runner = DeviceRunner(
            self.model,
            storage,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=most if has_run(self.spec) else None,
            batch_invariant=config.batch_invariant,
            adapters=slots,
        )
        with Progress(config.use_progress) as progress:
            prepare(
                runner,
                max_num_batched_tokens=most,
                is_lazy=config.graphs == "lazy",
                show=progress.show,
            )
        tell_first_run()
        settle_memory(config.max_num_seqs)
        self.start_seconds.include(runner.start_seconds)
        return runner

    def _op_by_op(
        self, storage: KVStorage, slots: AdapterSlots | None, guessing: _Guessing | None
    ) -> Runner:
        config = self.config
        runner = self._verifying(storage) or runner_for(
            self.model,
            storage,
            num_parameters=self.num_parameters,
            batch_invariant=config.batch_invariant,
        )
        if isinstance(runner, CompiledRunner):
            runner.warm_up()
        else:
            warm_up(self.model, self.spec, config.device, batch_invariant=config.batch_invariant)
        if slots is not None:
            runner.adapters = slots
            if isinstance(runner, CompiledRunner):  # whose steps with adapters are op by op
                warm_up(
                    self.model, self.spec, config.device, batch_invariant=config.batch_invariant
                )
            slots.warm_up()
        runner.count_compilations()
        self.start_seconds.end("kernels compiled")
        if isinstance(runner, VerifyingRunner):
            self._prepare(runner)
        if isinstance(config.speculative, DraftModel) and guessing is not None:
            assert isinstance(guessing.model, Decoder)
            captured = captured_guesser_of(
                guessing.model,
                storage.num_blocks,
                storage.spec.block_size,
                config.max_num_batched_tokens,
                self.spec.windows[0],
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                has_graphs=config.has_verifying_graphs,
            )
            assert isinstance(captured.draft, VerifyingRunner)
            self._prepare(captured.draft)
            return DraftingRunner(runner, captured)
        if isinstance(config.speculative, DraftModel):
            guesser = guesser_of(
                config.speculative,
                storage.num_blocks,
                storage.spec.block_size,
                self.model.config.vocab_size,
                config.max_model_len,
                config.max_num_batched_tokens,
                self.spec.windows[0],
            )
            return DraftingRunner(runner, guesser)
        if isinstance(config.speculative, OwnHead):
            assert guessing is not None
            assert isinstance(guessing.model, MultiTokenHead)
            cache = allocate(guessing.spec, storage.num_blocks, config.device)
            for tensor in cache.whole:
                tensor.zero_()  # keys of a prefix of others may be missing
            guesses = HeadGuesser(
                guessing.model,
                cache,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                num_drafts=config.speculative.num_tokens,
                has_graphs=config.has_verifying_graphs,
                batch_invariant=config.batch_invariant,
            )
            self._prepare(guesses.draft)
            return DraftingRunner(runner, guesses)
        return runner

    def _verifying(self, storage: KVStorage) -> VerifyingRunner | None:
        """Return a runner that verifies guesses by graphs; None without guesses or without such
        graphs."""
        config = self.config
        if config.speculative is None or not config.has_verifying_graphs:
            return None
        return VerifyingRunner(
            self.model,
            storage,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_drafts=config.speculative.num_tokens,
            batch_invariant=config.batch_invariant,
        )

    def _prepare(self, runner: VerifyingRunner) -> None:
        """Capture the graphs of a runner now, unless `graphs` is "lazy", which captures them when
        needed."""
        if self.config.graphs == "lazy":
            return
        with Progress(self.config.use_progress) as progress:
            runner.prepare(progress.show)
        self.start_seconds.end("steps captured")


@dataclass(frozen=True)
class EncoderMaker:
    """Makes the engine of an encoder: one seat for each text of a step, and no cache.

    Attributes:
        config: the engine's config, whose block_size is max_model_len: a seat is a block of it.
        model: the encoder, with its head, on the device.
        num_threads, start_seconds, current_device: see `EngineMaker`.
    """

    config: ResolvedConfig
    model: Encoder | TransformersEncoder
    num_threads: int
    start_seconds: StartSeconds
    current_device: int | None

    def __call__(self) -> Engine:
        """Return the engine, with its kernels compiled."""
        torch.set_num_threads(self.num_threads)
        if self.current_device is not None:
            torch.cuda.set_device(self.current_device)
        config, runner = self.config, EncoderRunner(self.model)
        runner.warm_up()
        self.start_seconds.end("kernels compiled")
        new_scheduler = NewScheduler(
            config, (None,), config.max_num_seqs, 0, None, itertools.count(config.seed), True
        )
        # A GPU computes one step while the host takes the vectors of the one before.
        overlaps = config.device.type == "cuda"
        return Engine(new_scheduler(), runner, overlap=overlaps, new_scheduler=new_scheduler)
