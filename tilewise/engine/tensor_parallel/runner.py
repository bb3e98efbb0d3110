"""The parent's side of tensor parallelism: a runner whose steps other processes compute.

batch -> wire -> N workers -> samples of the first

The scheduler and its block tables are here, once: a block id means the same block on every worker,
which holds its heads' part of it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.distributed.shards import check_shards, shard_config
from tilewise.engine.batch import Batch
from tilewise.engine.config import DraftModel
from tilewise.engine.engine import Engine
from tilewise.engine.loop import EngineLoop
from tilewise.engine.making import assembled, state_limits, state_memory
from tilewise.engine.settings import ResolvedConfig, plain, spec_of
from tilewise.engine.sizing import Blocks, blocks_on_cpu
from tilewise.engine.steps.draft_runner import Guesser, guesser_of
from tilewise.engine.steps.runner import Drawn
from tilewise.engine.tables.state_tables import StateLimits
from tilewise.engine.tensor_parallel.processes import Workers
from tilewise.engine.tensor_parallel.remote_host import RemoteHost
from tilewise.engine.tensor_parallel.wire import BatchWriter, read_samples
from tilewise.errors import WorkerLostError
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder

__all__ = ["ParallelRunner", "RemoteStorage", "check_tensor_parallel", "engine_of_workers", "start"]

GIB = 2**30


def check_tensor_parallel(
    size: int,
    config: ModelConfig,
    device: torch.device,
    *,
    num_blocks: int | None,
    batch_invariant: bool,
    swap_space_gib: float = 0.0,
) -> None:
    """Refuse a number of workers that a model, or this machine, does not have.

    Args:
        size: the number of workers.
        config: the config of the whole model.
        device: the device of the workers; with a number the one GPU that they share.
        num_blocks: as `LLM` takes it.
        batch_invariant, swap_space_gib: as `LLM` takes them.

    Raises:
        ValueError: size is below 1, above the number of GPUs or does not divide the model; a CPU
            has a number; workers share a GPU without num_blocks; or the engine is to swap states,
            or to be batch-invariant on GPUs.
    """
    if size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {size}")
    if size == 1:
        return
    shares_gpu = device.type == "cuda" and device.index is not None
    if device.index is not None and not shares_gpu:
        raise ValueError(
            "device must be cpu without a number with tensor_parallel_size above 1, "
            f"got {str(device)!r}"
        )
    if shares_gpu and num_blocks is None:
        raise ValueError(
            f"num_blocks must be given where {size} workers share {device}, as none of them can "
            "tell what the others will take, got None"
        )
    if device.type == "cuda" and not shares_gpu and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size must be at most the {torch.cuda.device_count()} GPUs that "
            f"torch sees, got {size}"
        )
    check_shards(config, size)
    if swap_space_gib and any(layer.mixer is not None for layer in config.layers):
        raise ValueError(
            "swap_space_gib must be 0 with tensor_parallel_size above 1 for layers that remember "
            f"by a state, got {swap_space_gib}"
        )
    if batch_invariant and device.type == "cuda":
        raise ValueError(
            "batch_invariant must be False with tensor_parallel_size above 1 on GPUs, where the "
            "order of a sum depends on its size, got True"
        )


class RemoteStorage:
    """The sizes of a cache that lies in other processes.

    Attributes:
        spec: the cache spec of all workers together; of latents, which each worker holds whole, the
            spec of one.
        num_blocks: the number of blocks of each worker, for every group of layers where there are
            several.
        states: the sizes of states, None for a model without, and how many sequences run at once.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: Blocks,
        states: tuple[StateLimits | None, int] = (None, 1),
    ) -> None:
        self.spec, self.num_blocks, self.states = spec, num_blocks, states


class _Handle:
    """A step that the workers compute, told by its number."""

    def __init__(self, runner: ParallelRunner, number: int) -> None:
        self._runner, self._number = runner, number

    def result(self) -> Drawn:
        """Wait for the step and return its tokens; the runner's `num_compilations` is updated.

        Raises:
            WorkerLostError: a worker is lost, or has failed where others have not.
            Exception: the error with which all workers have failed in this step.
        """
        _, _, samples, num_compilations = self._runner.workers.answer(self._number)
        self._runner.num_compilations = num_compilations
        return read_samples(samples)


class ParallelRunner:
    """Has batches computed by workers; see `engine.steps.runner.Runner`.

    Args:
        workers: the workers, which are ready.
        storage: the description of the workers' caches.
        host: the workers' main memory; None if batches move no blocks.

    Attributes:
        num_compilations: the number of compilations of the first worker.
        why_no_symmetric_memory: the reason why NCCL adds small sums of the ranks; None where GPUs
            add them through each other's memory, or on a CPU.
        identity: the identity of the model's shards and their caches, for blocks in files; b""
            without files.
        guesser: the guesser of a draft model, which this process holds whole; None where no draft
            model guesses.
    """

    def __init__(self, workers: Workers, storage: RemoteStorage, host: RemoteHost | None) -> None:
        self.workers = workers
        self.storage: Any = storage
        self.host: Any = host
        self.num_compilations = 0
        self.why_no_symmetric_memory: str | None = None
        self.identity = b""
        self.guesser: Guesser | None = None
        self._writer = BatchWriter()
        self._number = 0
        self._forgotten: deque[int] = deque()  # numbers of adapters
        self._finalizer = weakref.finalize(self, workers.close)

    def submit(self, batch: Batch) -> _Handle:
        """Send a step to all workers and return its handle; a draft model fills in guesses before.

        Raises:
            WorkerLostError: a worker is lost.
        """
        if self.guesser is not None:
            batch = self.guesser.guess(batch)
        while self._forgotten:
            self.workers.tell(["forget_adapter", self._forgotten.popleft()])
        self._number += 1
        self.workers.submit(self._number, self._writer.write(batch))
        return _Handle(self, self._number)

    def load_adapter(self, number: int, path: str) -> None:
        """Let all workers read an adapter, each its part; from any thread.

        Raises:
            WorkerLostError: a worker is lost, or has failed where others have not.
            Exception: the error with which all workers have failed.
        """
        self.workers.call("load_adapter", number, path)

    def forget_adapter(self, number: int) -> None:
        """Let the workers forget an adapter before the next step; from any thread."""
        self._forgotten.append(number)

    def reset(self) -> None:
        """Forget all sequences, in this process, in the workers and in the draft model."""
        self._writer.reset()
        self.workers.tell(["reset"])
        if self.guesser is not None:
            self.guesser.reset()

    def is_lost(self) -> bool:
        """Whether a worker is lost."""
        return self.workers.error is not None

    def end_with_workers(self, loop: EngineLoop) -> None:
        """Let an engine's loop end with the error as soon as a worker is lost, even between
        steps."""
        known = weakref.ref(loop)  # only its users keep a loop alive

        def end(error: WorkerLostError) -> None:
            loop = known()
            if loop is not None:
                loop.end(error)

        self.workers.on_lost = end
        if self.workers.error is not None:
            end(self.workers.error)

    def close(self) -> None:
        """End the workers' processes; later calls do nothing."""
        self._finalizer()


def engine_of_workers(
    config: ResolvedConfig, directory: Path, model: Decoder, end_ids: tuple[int, ...]
) -> Engine:
    """Start worker processes and return an engine whose steps they compute.

    A draft model guesses in this process, which else waits while the workers compute. The workers
    verify the guesses that a step's batch has, and know nothing of the draft model.

    Args:
        config: the engine's config.
        directory: the directory of the checkpoint.
        model: the shape of the model, without weights.
        end_ids: tokens that end a text.

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        ValueError: the cache does not fit.
        WorkerLostError: a worker ended.
    """
    runner = start(config, directory, model, end_ids)
    num_blocks = runner.storage.num_blocks
    try:
        if isinstance(config.speculative, DraftModel):
            runner.guesser = guesser_of(
                config.speculative,
                num_blocks if isinstance(num_blocks, int) else num_blocks[0],
                config.block_size,
                model.config.vocab_size,
                config.max_model_len,
                config.max_num_batched_tokens,
                runner.storage.spec.windows[0],
            )
        num_swap_blocks = 0 if runner.host is None else runner.host.num_blocks
        windows, (limits, num_slots) = runner.storage.spec.windows, runner.storage.states
        return assembled(
            config,
            runner,
            runner.identity,
            windows,
            num_blocks,
            num_swap_blocks,
            limits,
            None if limits is None else num_slots,
        )
    except BaseException:
        runner.close()
        raise


def fewest(found: Sequence[Any]) -> Blocks:
    """Return the number of blocks that every worker has room for, the least of their numbers.

    Where each worker gives a list, a number for each group of layers, so is the result.
    """
    if isinstance(found[0], int):
        return int(min(found))
    return tuple(min(counts) for counts in zip(*found, strict=True))


def start(
    config: ResolvedConfig, directory: Path, model: Decoder, end_ids: tuple[int, ...]
) -> ParallelRunner:
    """Start the worker processes, each with its shard of the model and of the cache; return a
    runner.

    If a worker fails at the start, all are ended and its error is raised.

    Args:
        config: the resolved config.
        directory: the checkpoint's folder.
        model: the shape of the model, without weights.
        end_ids: the tokens that end a text.

    Raises:
        ValueError: swap_space_gib is too small for one block.
    """
    size, device, shape = config.tensor_parallel_size, config.device, model.config
    part = shard_config(shape, size)
    spec = spec_of(part, config)
    block_bytes = max(size * spec.bytes_per_block, 1)
    num_swap_blocks = int(config.swap_space_gib * GIB) // block_bytes
    if config.swap_space_gib and num_swap_blocks < 1:
        raise ValueError(
            f"swap_space_gib must hold at least one cache block of "
            f"{block_bytes:,} bytes, got {config.swap_space_gib}"
        )
    workers = Workers(
        size,
        {
            "config": plain(replace(config, model=directory.resolve(), speculative=None)),
            "end_ids": end_ids,
            "num_threads": max(torch.get_num_threads() // size, 1),
            "vocab_size": shape.vocab_size,
        },
    )
    try:
        num_blocks: Blocks | None = config.num_blocks
        found, shards = zip(*workers.words(), strict=True)
        if num_blocks is None and device.type == "cuda":
            num_blocks = fewest(found)
        elif num_blocks is None:
            num_blocks = blocks_on_cpu(
                spec,
                config.max_num_seqs,
                config.max_model_len,
                config.max_prompt_run,
                num_processes=size,
                states=state_memory(config, spec),
            )
        limits, num_slots = state_limits(
            config, spec, num_blocks, size if device.type == "cpu" else 1
        )
        num_checkpoints = 0 if limits is None else limits.num_checkpoints
        workers.tell(["size", num_blocks, num_swap_blocks, num_slots, num_checkpoints])
        rates, refusals, sizes = zip(*workers.words(), strict=True)
        held = [attention.num_kv_heads * size for attention in part.attentions]
        whole = spec_of(shape.with_kv_heads(held), config)
        storage = RemoteStorage(whole, num_blocks, (limits, num_slots))
        host = None
        if num_swap_blocks:
            host = RemoteHost(workers, num_swap_blocks, min(rates), storage, sizes[0])
    except BaseException:
        workers.close()
        raise
    runner = ParallelRunner(workers, storage, host)
    if config.offload_dir is not None:
        runner.identity = hashlib.blake2b("/".join(shards).encode(), digest_size=32).digest()
    runner.why_no_symmetric_memory = refusals[0]
    return runner
