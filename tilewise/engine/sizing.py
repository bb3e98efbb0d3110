"""How many cache blocks a device has room for, and the trial steps that tell."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.cache.states import checkpoint_bytes
from tilewise.cache.storage import KVStorage, num_blocks_for
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.memory import available_memory
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.adapter_slots import AdapterSlots
from tilewise.engine.steps.runner import CausalModel, ModelRunner
from tilewise.engine.tables.admission import window_blocks

__all__ = [
    "Blocks",
    "StateMemory",
    "allocate",
    "blocks_on_cpu",
    "blocks_on_cuda",
    "bytes_to_come",
    "cpu_budget",
    "run_once",
    "split_blocks",
    "warm_up",
    "widest_batch",
]

# Main memory is shared with everything else that runs, so the cache is modest unless told.
CPU_FRACTION = 0.25
# The share of a cache's memory that slots of states may take; fewer sequences run at once then.
SLOT_FRACTION = 0.5
# Tokens between two checkpoints. A prompt's runs end at each, so fewer would cost steps.
LEAST_INTERVAL, MOST_INTERVAL = 1024, 4096
# Full contexts whose tokens are known of a model without keys and values; a block takes no memory.
BLOCKS_WITHOUT_KEYS = 1024
Blocks = int | tuple[int, ...]  # of the only group of layers, or of each


def _demands(spec: CacheSpec, num_tokens: int, max_run: int) -> list[int]:
    """Return the most blocks of each group that a sequence of num_tokens owns at a time.

    Args:
        max_run: the largest number of its tokens in one step.
    """
    total = -(-num_tokens // spec.block_size)
    return [
        total if window is None else min(total, window_blocks(window, max_run, spec.block_size))
        for window in spec.windows
    ]


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory of states, besides the blocks of a cache.

    Attributes:
        spec: the cache spec with the states.
        num_seqs: the largest number of sequences that run at once.
        interval: the number of tokens between two checkpoints of a long text; None chooses.
        num_checkpoints: the number of checkpoints; None counts them by blocks.
        keeps_tokens: whether slots keep tokens, as on a GPU, see `StateSpec.recurrence`.
    """

    spec: CacheSpec
    num_seqs: int
    interval: int | None
    num_checkpoints: int | None
    keeps_tokens: bool

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot: the states of one running sequence in all layers."""
        each = (s.slot_bytes(keeps_tokens=self.keeps_tokens) for _, s in self.spec.states)
        return sum(each)

    @property
    def tokens_apart(self) -> int:
        """The number of tokens between two checkpoints: `interval`, if that is set.

        Else the number is doubled from LEAST_INTERVAL, up to MOST_INTERVAL, until the keys and
        values of that number of tokens take at least twice the bytes of a checkpoint. For a model
        without keys and values it is LEAST_INTERVAL.
        """
        if self.interval is not None:
            return self.interval
        own, tokens = checkpoint_bytes(self.spec.states), LEAST_INTERVAL
        while tokens < MOST_INTERVAL and 0 < tokens * self.spec.bytes_per_token < 2 * own:
            tokens *= 2
        return tokens

    def num_slots(self, budget_bytes: int) -> int:
        """Return the number of slots, and so of sequences that run at once: at most num_seqs, at
        least one.

        Args:
            budget_bytes: the memory of the whole cache, of which slots take at most SLOT_FRACTION.
        """
        most = int(budget_bytes * SLOT_FRACTION) // max(self.slot_bytes, 1)
        return max(1, min(self.num_seqs, most))

    def checkpoints_for(self, num_tokens: int) -> int:
        """Return the number of checkpoints beside blocks that hold num_tokens tokens."""
        if self.num_checkpoints is not None:
            return self.num_checkpoints
        return self.num_seqs + -(-num_tokens // self.tokens_apart)

    def left(self, budget_bytes: int) -> int:
        """Return the bytes that remain for blocks after slots and checkpoints are taken.

        The number of checkpoints is proportional to that of blocks, if it is not fixed.
        """
        own, block = checkpoint_bytes(self.spec.states), self.spec.bytes_per_block
        slots = self.num_slots(budget_bytes)
        rest = budget_bytes - slots * self.slot_bytes
        if self.num_checkpoints is not None:
            return max(rest - self.num_checkpoints * own, 0)
        rest = max(rest - (slots + 1) * own, 0)  # one more: their number is rounded up
        return int(rest * block / (block + own * self.spec.block_size / self.tokens_apart))


def split_blocks(
    spec: CacheSpec, budget_bytes: int, max_model_len: int, max_run: int | None = None
) -> Blocks:
    """Return how many blocks each group of layers gets of the memory for the cache.

    Short sequences want as many blocks of each group. The longest want most of the groups without a
    window. A group gets blocks in proportion to the larger of the two shares of the memory that it
    would have were all sequences short, or all as long as can be. So whatever length they have, of
    two groups none is full before more than half of the memory is used.

    Args:
        spec: the cache spec with the groups.
        budget_bytes: the bytes for all groups together.
        max_model_len: tokens of a sequence.
        max_run: tokens of one sequence in a step; None is max_model_len.

    Returns:
        The number of blocks, as a tuple where there are several groups. Blocks that take no memory,
        of a model without keys and values, count tokens: there are as many as 1,024 full contexts
        need.

    Raises:
        ValueError: not even one block of each group fits.
    """
    if not spec.bytes_per_block:  # blocks only count tokens
        return -(-max_model_len // spec.block_size) * BLOCKS_WITHOUT_KEYS
    num_blocks = num_blocks_for(spec, budget_bytes)
    if len(spec.groups) == 1:
        return num_blocks
    sizes = [spec.group_block_bytes(i) for i in range(len(spec.groups))]
    longest = _demands(spec, max_model_len, max_run or max_model_len)
    of_longest = sum(size * count for size, count in zip(sizes, longest, strict=True))
    shares = [max(1 / sum(sizes), count / of_longest) for count in longest]
    unit = budget_bytes / sum(size * share for size, share in zip(sizes, shares, strict=True))
    return tuple(max(1, int(unit * share)) for share in shares)


def allocate(
    spec: CacheSpec,
    num_blocks: Blocks,
    device: torch.device,
    *,
    num_slots: int = 1,
    num_checkpoints: int = 0,
) -> KVStorage:
    """Allocate the cache on a device, and return it.

    Args:
        spec: the spec of the cache.
        num_blocks: the blocks of each group of layers.
        device: the device that holds the cache.
        num_slots, num_checkpoints: see `KVStorage`.

    Raises:
        ValueError: the device has not that much memory.
    """
    try:
        return KVStorage(
            spec, num_blocks, device, num_slots=num_slots, num_checkpoints=num_checkpoints
        )
    except (RuntimeError, MemoryError, OverflowError) as error:
        counts, sizes = [num_blocks], [spec.bytes_per_block]
        if not isinstance(num_blocks, int):
            counts = list(num_blocks)
            sizes = [spec.group_block_bytes(i) for i in range(len(counts))]
        raise ValueError(
            f"num_blocks must fit the memory of {device} at "
            f"{' and '.join(f'{size:,}' for size in sizes)} bytes each, "
            f"got {' and '.join(f'{count:,}' for count in counts)}"
        ) from error


def cpu_budget() -> int:
    """Return the bytes for a cache whose size the user did not choose: a quarter of the free main
    memory."""
    return int(available_memory() * CPU_FRACTION)


def blocks_on_cpu(
    spec: CacheSpec,
    max_num_seqs: int,
    max_model_len: int,
    max_run: int | None = None,
    *,
    num_processes: int = 1,
    states: StateMemory | None = None,
) -> Blocks:
    """Return how many cache blocks a CPU engine allocates, for each group of layers.

    There are blocks for max_num_seqs sequences of max_model_len tokens, but no more than fit in a
    fixed share of the free memory (`cpu_budget`).

    Args:
        max_run: the largest number of tokens of one sequence in a step; a group with a window needs
            blocks for them and the window. None stands for max_model_len.
        num_processes: the number of processes that share this memory, each with a cache of its own.
        states: the recurrent states, whose memory is taken from the share first; None without.

    Raises:
        ValueError: not even one block of each group fits.
    """
    wanted = max_num_seqs * -(-max_model_len // spec.block_size)
    budget = cpu_budget() // num_processes
    if states is not None:
        budget = states.left(budget)
    there = split_blocks(spec, budget, max_model_len, max_run)
    if isinstance(there, int):
        return min(wanted, there)
    if wanted * spec.bytes_per_block <= budget:
        return (wanted,) * len(there)  # what no window needs keeps prefixes
    return tuple(min(wanted, count) for count in there)


def blocks_on_cuda(
    model: CausalModel,
    spec: CacheSpec,
    device: torch.device,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    has_graphs: bool = False,
    captures_prompts: bool = True,
    adapters: AdapterSlots | None = None,
    states: StateMemory | None = None,
    beside: CacheSpec | None = None,
) -> Blocks:
    """Return how many cache blocks fit the memory that weights, widest step and graphs leave of a
    GPU.

    The step is run once, and its temporaries stay with torch's allocator meanwhile; the two largest
    graphs of each kind are captured, and tell what the others will take, see `_graph_bytes`. What
    the driver then reports as free is what is left, other processes included.

    Args:
        captures_prompts: True if steps with prompts are captured, too, where graphs are used and
            the model allows it.
        adapters: the slots of adapters, which are there already.
        states: the memory that states take of what is left; None for a model without.
        beside: the spec of the cache of the draft model or head, which has as many blocks as the
            first group of layers; None without one.

    Raises:
        ValueError: not even one block of each group fits, or not even the step; the message has the
            sizes.
    """
    weights = torch.cuda.memory_allocated(device)
    before = _memory(device).used
    _, total = torch.cuda.mem_get_info(device)
    batch = widest_batch(max_num_seqs, max_num_batched_tokens, max_model_len, spec.block_size)
    graphs = 0
    try:
        if has_graphs:
            storage = KVStorage(spec, _blocks_of(batch), device)
            trial = DeviceRunner(
                model,
                storage,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens if captures_prompts else None,
                adapters=adapters,
            )
            trial.submit(batch).result()
            with_step = _memory(device).used
            graphs = _graph_bytes(trial, with_step)
            del trial, storage
        else:
            run_once(model, spec, batch, device)
            with_step = _memory(device).used
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"max_num_batched_tokens and max_num_seqs must be of a step that fits the memory of "
            f"{total / 2**30:.1f} GiB beside {weights / 2**30:.1f} GiB of weights, got "
            f"{max_num_batched_tokens} and {max_num_seqs}"
        ) from error
    budget = int(total * gpu_memory_utilization) - with_step - graphs
    if states is not None:
        budget = states.left(max(budget, 0))
    if beside is not None:
        own = spec.group_block_bytes(0)
        budget = budget * own // (own + beside.bytes_per_block)
    gc.collect()
    torch.cuda.empty_cache()
    if budget < spec.bytes_per_block:
        parts = {
            "weights": weights,
            "other programs and the driver": max(0, before - weights),
            "the widest step": with_step - before,
            "graphs": graphs,
        }
        sizes = ", ".join(f"{size / 2**30:.1f} GiB {what}" for what, size in parts.items())
        raise ValueError(
            "gpu_memory_utilization must leave room for the KV cache, or max_num_seqs and "
            f"max_num_batched_tokens be lower: of {total / 2**30:.1f} GiB, {sizes}, "
            f"got {gpu_memory_utilization}"
        )
    max_run = min(max_num_batched_tokens, max_model_len)
    return split_blocks(spec, budget, max_model_len, max_run)


class _Memory(NamedTuple):
    """The memory of a GPU in use now, in bytes.

    Attributes:
        used: the bytes that all processes and the driver use.
        reserved: the bytes of these that torch of this process has reserved.
        allocated: the bytes of the reserved ones that tensors have.
    """

    used: int
    reserved: int
    allocated: int


def _memory(device: torch.device) -> _Memory:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return _Memory(total - free, reserved, torch.cuda.memory_allocated(device))


def _graph_bytes(trial: DeviceRunner, before: int) -> int:
    """Capture the two largest graphs of each kind; return the bytes that the graphs of all sizes
    take.

    The largest finds room in the pool for what is needed while it runs; all others do with that.
    The additional memory of the second is what each other takes: tensors that it keeps, in
    proportion to its rows or tokens, and the driver's nodes, of which every size has as many.
    Decode steps in two halves are captured when they first run, as are those whose rows share
    prefixes, whole or in halves: all of them count.

    Args:
        trial: the runner, which has run the widest step.
        before: the used bytes of the device before any graph was captured.
    """
    decodes = 1 if trial.sharing_tokens is None else 2
    kinds: list[tuple[list[int], Callable[[int], None], int]] = [
        (trial.buckets, trial.capture, decodes),
        (trial.buckets, partial(trial.capture, of_model=True), decodes),
    ]
    if trial.prompts is not None:
        kinds.insert(0, (trial.prompts.sizes, trial.capture_prompts, 1))
    if trial.greedy_buckets:
        kinds.append((trial.greedy_buckets, partial(trial.capture, is_greedy=True), 1))
    if trial.adapters is not None:
        kinds += [
            (trial.buckets, partial(trial.capture, adapted=True), 1),
            (trial.buckets, partial(trial.capture, of_model=True, adapted=True), 1),
        ]
        if trial.prompts is not None:
            adapted = partial(trial.capture_prompts, adapted=True)
            kinds.insert(1, (trial.prompts.sizes, adapted, 1))
    later = 0
    for sizes, capture, count in kinds:
        capture(sizes[-1])
        if len(sizes) == 1:
            continue
        first = _memory(trial.device)
        capture(sizes[-2])
        second = _memory(trial.device)
        kept = max(0, second.allocated - first.allocated)
        nodes = max(0, (second.used - second.reserved) - (first.used - first.reserved))
        later += bytes_to_come(sizes, kept, nodes, count=count)
    return _memory(trial.device).used - before + later


def bytes_to_come(sizes: Sequence[int], kept: int, nodes: int, *, count: int = 1) -> int:
    """Return the bytes of the graphs that are still to be captured: all but one of each of the two
    largest sizes.

    Args:
        sizes: rows or tokens of the graphs, ascending, two at least.
        kept: bytes of tensors that the graph of the second largest keeps; the others' by size.
        nodes: bytes of the driver for each graph.
        count: graphs of each size that there will be.
    """
    each = [nodes + -(-kept * size // sizes[-2]) for size in sizes]
    return count * sum(each) - sum(each[-2:])


def widest_batch(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> Batch:
    """Return a batch of as many tokens and samples as the limits allow, to measure its memory.

    Its sequences share their blocks, which no real step does.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    shorter, longer = divmod(min(max_num_batched_tokens, num_seqs * max_model_len), num_seqs)
    sampling = SamplingParams(top_p=0.9)  # the costliest path of the sampler
    lengths = [shorter + (i < longer) for i in range(num_seqs)]
    return Batch(
        tuple(
            ScheduledSequence(
                seq_id=i,
                token_ids=(0,) * length,
                start=0,
                block_ids=tuple(range(-(-length // block_size))),
                num_samples=1,
                sampling=sampling,
                seeds=(i,),
            )
            for i, length in enumerate(lengths)
        )
    )


def run_once(
    model: CausalModel,
    spec: CacheSpec,
    batch: Batch,
    device: torch.device,
    *,
    batch_invariant: bool = False,
) -> None:
    """Run one step over a new cache of just the blocks that the batch names, and drop the
    results."""
    storage = KVStorage(spec, _blocks_of(batch), device)
    ModelRunner(model, storage, batch_invariant=batch_invariant).submit(batch)


def _blocks_of(batch: Batch) -> int:
    return 1 + max(block for s in batch.sequences for block in s.block_ids)


def warm_up(
    model: CausalModel, spec: CacheSpec, device: torch.device, *, batch_invariant: bool = False
) -> None:
    """Run the shortest prompt and the shortest decode, so that no request waits for kernels.

    Args:
        batch_invariant: True if the runner will be batch-invariant: its decode steps then take
            other kernels.
    """
    for length in (2, 1):
        batch = widest_batch(1, length, length, spec.block_size)
        run_once(model, spec, batch, device, batch_invariant=batch_invariant)
