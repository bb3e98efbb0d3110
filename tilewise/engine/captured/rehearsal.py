"""What a start will compile, found by going through it without launching a kernel.

A few layers stand for all, over a small cache of their own, on the device itself: sizes, strides,
addresses and the device's properties are those of the start. Kernels are noted in place of run
(`kernels.host.requests`), so that what they would have written holds what it held before: zeros,
where torch's own operations, which are computed, look something up by it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from tilewise.cache.spec import CacheSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.graphs import sizes_of_kinds, warm_up_batches
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.sizing import widest_batch
from tilewise.engine.steps.adapter_slots import AdapterSlots
from tilewise.models.decoder import Decoder

__all__ = ["few_layers", "kinds_of", "rehearse", "runner_to_rehearse"]

MOST_TOKENS = 16_384  # of the cache: longer sequences have no other kernels


def few_layers(model: Decoder, windows: Sequence[int | None]) -> tuple[Decoder, int]:
    """Return a model of the first layers, with one of every kind among them, and their number.

    It shares all weights. Kinds are told by the layers' modules and parameters, their windows and
    scales; one layer more than that comes along, as the first one adds no residual stream.

    Args:
        windows: the window of each layer, as the cache sees them.
    """
    kinds = [
        (window, scale, kind)
        for window, scale, kind in zip(
            windows, model.config.softmax_scales, kinds_of(model), strict=True
        )
    ]
    count = min(len(kinds), 1 + max(kinds.index(kind) for kind in kinds) + 1)
    few = copy.copy(model)
    layers: Any = model.layers
    few._modules = {**model._modules, "layers": nn.ModuleList(list(layers)[:count])}
    return few, count


def kinds_of(model: Decoder) -> list[tuple[object, ...]]:
    """Return, for each layer, what decides which kernels it needs: the types of its modules, and
    the dtypes, shapes, strides and alignments of its parameters."""
    layers: Any = model.layers
    return [tuple(_kind_of(layer)) for layer in layers]


def _kind_of(layer: nn.Module) -> Iterator[object]:
    for name, module in layer.named_modules():
        yield name, type(module)
    for name, x in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, x.dtype, x.shape, x.stride(), x.data_ptr() % 16


def runner_to_rehearse(
    model: Decoder,
    spec: CacheSpec,
    device: torch.device,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int | None,
    batch_invariant: bool = False,
    num_blocks: int | tuple[int, ...] | None = None,
    adapters: AdapterSlots | None = None,
) -> DeviceRunner:
    """Return a `DeviceRunner` of few layers, with a small cache, like the one that a start makes.

    It is for `rehearse`, and shares the model's weights.

    Args:
        num_blocks: the numbers of cache blocks of the start, where they are known.
        adapters: the slots of adapters.
    """
    groups = spec.group_of or (0,) * spec.num_layers
    windows = [spec.windows[group] for group in groups]
    few, count = few_layers(model, windows)
    kinds = [spec.groups[group].kind for group in groups[:count]]
    sources = spec.sources[:count]
    small = CacheSpec.of_layers(spec.block_size, kinds, windows[:count], sources)
    blocks = -(-min(max_model_len, MOST_TOKENS) // spec.block_size)
    if num_blocks is not None:
        blocks = min(blocks, num_blocks if isinstance(num_blocks, int) else min(num_blocks))
    storage = KVStorage(small, [blocks] * len(small.groups), device)
    return DeviceRunner(
        few,
        storage,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        batch_invariant=batch_invariant,
        adapters=adapters,
    )


@torch.inference_mode()
def rehearse(runner: DeviceRunner, *, max_num_batched_tokens: int, is_lazy: bool) -> None:
    """Run the steps that `graphs.prepare` runs at a start, without capturing a graph, and the step
    by which a start measures memory.

    The thread must note launches in place of launching (`kernels.host.requests`): the noted kernels
    are the result.

    The runner is not to be used afterwards.
    """
    prompts = [] if runner.prompts is None or is_lazy else runner.prompts.sizes
    kinds = (False,) if runner.adapters is None else (False, True)
    for size, adapted in product(reversed(prompts), kinds):
        assert runner.prompts is not None
        runner.prompts.try_out(size, adapted=adapted)
    buckets = sizes_of_kinds(runner) if is_lazy else runner.buckets
    for bucket, adapted in product(reversed(buckets), kinds):
        runner.step_of(bucket, adapted=adapted).run()
    for bucket in runner.greedy_buckets[-1:]:
        runner.step_of(bucket, is_greedy=True).run()
    step = runner.step_of(buckets[-1])
    step.run_model()  # widened, as it is drawn from where logits are changed
    step.sample()
    rows = runner.rows
    longest = rows.max_blocks * runner.block_size
    widest = widest_batch(rows.max_num_seqs, max_num_batched_tokens, longest, runner.block_size)
    runner.submit(widest).result()  # of which a start measures the memory
    threshold = runner.sharing_tokens
    for batch, shares in warm_up_batches(runner, max_num_batched_tokens):
        runner.sharing_tokens = 1 if shares and threshold is not None else None
        runner.submit(batch).result()
