"""swap_blocks(): move cache blocks between caches, between a GPU and main memory above all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks

__all__ = ["BlockTransfer", "swap_blocks"]


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Copies that may still run; the targets may be read only after `wait`.

    Attributes:
        event: the event that follows the last copy; None if all copies are complete.
        to_host: whether the targets are read by the host.
    """

    event: torch.cuda.Event | None
    to_host: bool

    def wait(self) -> None:
        """Make later work wait for the copies.

        On a GPU the current stream waits, the host does not; with a target in main memory the host
        does. A source in main memory may still be being read when a GPU has been told to wait:
        before the host itself writes there, call `synchronize`. Later swaps need no care, as all
        of a GPU run in turn.
        """
        if self.event is None:
            return
        if self.to_host:
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)

    def synchronize(self) -> None:
        """Let the host wait until all copies are complete; it may write source and target then."""
        if self.event is not None:
            self.event.synchronize()


@names
def swap_blocks(
    source_cache: Tensor | Sequence[Tensor],
    target_cache: Tensor | Sequence[Tensor],
    block_pairs: Tensor,
    **unknown: Never,
) -> BlockTransfer:
    """Copy blocks of one cache to blocks of another, in as few transfers as their order allows.

    target[t] = source[s] for every pair (s, t). Pairs whose sources and targets both follow one
    another are one transfer.

    Between a GPU and main memory, or two GPUs, the copies run on a stream of their own: they begin
    when the current stream has done what it was given before the call, and the call returns at
    once if main memory is pinned. Until `wait` has been called on the result, the target is not
    there and neither source nor target may be written.

    Args:
        source_cache, target_cache: (N, ...) and (M, ...) of one dtype, alike but for N and M; or as
            many tensors on each side, e.g. k_cache, v_cache, k_scale and v_scale, all of one
            device a side. They may be the same cache.
        block_pairs: (n, 2) int64 or int32 on the CPU, rows (source, target). Targets differ; within
            one cache no block is both.

    Returns:
        A BlockTransfer; already finished where both sides are in main memory.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: PagedAttention (2023), section 4.5: swapping as a way to preempt.

    Example:
        >>> transfer = swap_blocks(gpu.whole, host.whole, gpu.in_all_layers(pairs, host))
        >>> transfer.wait()
    """
    if unknown:
        raise unknown_keyword(swap_blocks, unknown)
    sources, targets = (
        [side] if isinstance(side, Tensor) else list(side) for side in (source_cache, target_cache)
    )
    _check_sides(sources, targets)
    runs = _runs(_checked_pairs(block_pairs, sources, targets))
    devices = {x.device for x in (*sources, *targets) if x.is_cuda}
    if not devices:
        _copy(sources, targets, runs, non_blocking=False)
        return BlockTransfer(None, to_host=True)
    gpu = targets[0].device if targets[0].is_cuda else sources[0].device
    stream = _stream(gpu)
    with torch.cuda.device(gpu):
        for device in devices:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _copy(sources, targets, runs, non_blocking=True)
        for tensor in (*sources, *targets):
            if tensor.device == gpu:
                tensor.record_stream(stream)  # its memory is not given to others meanwhile
        return BlockTransfer(stream.record_event(), to_host=not targets[0].is_cuda)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which all swaps run, made at the first call."""
    return torch.cuda.Stream(device)


def _copy(
    sources: list[Tensor], targets: list[Tensor], runs: list[list[int]], *, non_blocking: bool
) -> None:
    for source, target in zip(sources, targets, strict=True):
        for first, to, count in runs:
            part = source.narrow(0, first, count)
            target.narrow(0, to, count).copy_(part, non_blocking=non_blocking)


def _runs(pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Sort pairs (source, target) and join those whose blocks follow one another in both.

    Returns:
        One [first source, first target, number of blocks] for each run.
    """
    runs: list[list[int]] = []
    for source, target in sorted(pairs):
        last = runs[-1] if runs else [0, 0, 0]
        if last[2] and (source, target) == (last[0] + last[2], last[1] + last[2]):
            last[2] += 1
        else:
            runs.append([source, target, 1])
    return runs


def _check_sides(sources: list[Tensor], targets: list[Tensor]) -> None:
    if not sources or len(sources) != len(targets):
        raise ValueError(
            "target_cache must have as many tensors as source_cache, at least one, "
            f"got {len(targets)} and {len(sources)}"
        )
    for source, target in zip(sources, targets, strict=True):
        checks.check_same_dtype("target_cache", target, source.dtype)
        if source.dim() < 2 or source.shape[1:] != target.shape[1:]:
            raise ValueError(
                "target_cache must be (M, ...) with blocks like those of source_cache, "
                f"got shapes {tuple(target.shape)} and {tuple(source.shape)}"
            )
        if source.shape[0] != sources[0].shape[0] or target.shape[0] != targets[0].shape[0]:
            raise ValueError(
                "source_cache and target_cache must have one number of blocks a side, got "
                f"{tuple(source.shape)} beside {tuple(sources[0].shape)} and "
                f"{tuple(target.shape)} beside {tuple(targets[0].shape)}"
            )
        checks.check_device("source_cache", source, sources[0].device)
        checks.check_device("target_cache", target, targets[0].device)


def _checked_pairs(
    block_pairs: Tensor, sources: list[Tensor], targets: list[Tensor]
) -> list[tuple[int, int]]:
    """Return block_pairs (n, 2) as a list, checked: blocks exist and no target comes twice.

    Raises:
        ValueError, TypeError: a rule is broken, or a block is both read and written.
    """
    checks.check_integers("block_pairs", block_pairs, tuple(block_pairs.shape), block_pairs.device)
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(f"block_pairs must be (n, 2), got shape {tuple(block_pairs.shape)}")
    checks.check_device("block_pairs", block_pairs, torch.device("cpu"))
    pairs = [(source, target) for source, target in block_pairs.tolist()]
    for side, cache, name in ((0, sources[0], "source"), (1, targets[0], "target")):
        for pair in pairs:
            if not 0 <= pair[side] < cache.shape[0]:
                raise ValueError(
                    f"block_pairs must have {name} blocks in 0 ... {cache.shape[0] - 1}, "
                    f"got {pair[side]}"
                )
    written = {target for _, target in pairs}
    if len(written) < len(pairs):
        raise ValueError("block_pairs must have different target blocks, got one twice")
    shared = any(_overlap(s, t) for s, t in zip(sources, targets, strict=True))
    both = written & {source for source, _ in pairs} if shared else set()
    if both:
        raise ValueError(
            f"block_pairs must not read and write one block of a cache, got {min(both)} as both"
        )
    return pairs


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of one storage, even of parts that do not overlap."""
    return a.device == b.device and (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )
