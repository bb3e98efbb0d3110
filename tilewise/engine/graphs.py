"""Getting a device's runner ready: kernels compiled, decode steps captured, before requests come.

Triton compiles a kernel anew when an integer becomes 1 or a multiple of 16, and the tiles of
attention follow from the lengths of a step, so a few prompts of chosen lengths are computed, alone,
side by side, beside sequences that decode and after a common beginning. Steps with prompts and
decode steps are captured from the largest to the smallest, in one pool of memory: the smaller ones
find room in what the largest needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.engine.batch import Asked, Batch, ScheduledSequence
from tilewise.engine.compilations import Compilations
from tilewise.engine.device_runner import DeviceRunner
from tilewise.engine.request import SamplingParams

__all__ = ["MODES", "capture_all", "prepare", "warm_up_batches"]

MODES = ("auto", "lazy", "off")
# Prompts of a step in tokens: one token, few, a multiple of 16 and not, short and long ones; the
# same beside each other, beside a sequence that decodes, and as many as there are.
WARM_UP = (
    (2,), (16,), (33,), (64,), (65,), (128,), (250,), (512,), (1000,), (2048,), (4099,),
    (2, 2), (16, 16), (24, 40), (100, 156), (500, 524), (1000, 1000), (2000, 2096),
    (1, 2), (1, 15), (1, 63), (1, 127), (1, 256), (1, 1, 510), (1, 1, 1021), (1, 1, 1, 4000),
    (*[1] * 31, 33), (*[1] * 31, 500), (*[1] * 31, 2000), (*[1] * 63, 65), (*[1] * 127, 1000),
    (*[1] * 127, 2001), (*[1] * 200, 100), (*[1] * 200, 3001), (*[1] * 200, 7000),
    (17,) * 31, (64,) * 63, (100,) * 64, (31,) * 200, (900,) * 9, (16,) * 30 + (250,) * 8 + (2000,),
)  # fmt: skip
# New tokens of steps whose sequences share the 16 blocks before them.
SHARED = ((1, 2), (1, 1, 3), (16, 16, 16, 16), (61, 64), (12, 500), (1, 1, 1000))

# What `ops.adjust_logits` has kernels for: biases, masks, penalties, and the last two together.
ADJUSTED: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [0], "logit_bias": {0: 1.0}},
    {"presence_penalty": 1.0},
    {"allowed_token_ids": [0], "presence_penalty": 1.0},
)


def prepare(
    runner: DeviceRunner,
    *,
    max_num_batched_tokens: int,
    is_lazy: bool,
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Compile what steps need and capture the decode steps, or let them be captured when they run.

    Args:
        runner: it has no sequences.
        max_num_batched_tokens: tokens of one step.
        is_lazy: capture a decode step when it first runs.
        show: takes a line of progress.
    """
    batches = warm_up_batches(runner, max_num_batched_tokens)
    threshold = runner.sharing_tokens
    for i, (batch, shares) in enumerate(batches):
        show(f"compiling kernels, step {i + 1} of {len(batches)}")
        runner.sharing_tokens = 1 if shares and threshold is not None else threshold
        runner.submit(batch).result()  # keys that no step has written may be anything
    runner.sharing_tokens = threshold
    runner.reset()
    if not is_lazy:
        capture_all(runner, show)
    runner.captures = runner.device.type == "cuda"
    runner.compilations = Compilations()


def capture_all(runner: DeviceRunner, show: Callable[[str], None] = lambda _: None) -> None:
    """Capture every decode step and every step with prompts, the largest first."""
    sizes = [] if runner.prompts is None else runner.prompts.sizes[::-1]
    for i, size in enumerate(sizes):
        show(f"capturing steps with prompts, {i + 1} of {len(sizes)}")
        runner.capture_prompts(size)
    sizes = runner.buckets[::-1]
    for i, bucket in enumerate(sizes):
        show(f"capturing decode steps, {i + 1} of {len(sizes)}")
        runner.capture(bucket)
    torch.cuda.synchronize(runner.device)


def warm_up_batches(runner: DeviceRunner, max_num_batched_tokens: int) -> list[tuple[Batch, bool]]:
    """Return the steps of WARM_UP and SHARED that the limits allow, and whether they are of SHARED.

    Those of too many tokens are cut short. One step more copies blocks and draws two samples with
    their log-probabilities; three change logits in every way that is a kernel of its own.
    """
    rows, size = runner.rows, runner.block_size
    longest = min(rows.max_blocks, *runner.storage.counts) * size
    steps = dict.fromkeys(
        (tuple(min(n, max_num_batched_tokens - len(runs) + 1, longest) for n in runs), 0)
        for runs in WARM_UP
    )
    start = 16 * size
    steps |= dict.fromkeys((runs, start) for runs in SHARED if start + max(runs) <= longest)
    batches, first = [], 0
    for runs, start in steps:
        if len(runs) > rows.max_num_seqs or not 0 < sum(runs) <= max_num_batched_tokens:
            continue
        sequences = tuple(_sequence(first + i, n, start, size) for i, n in enumerate(runs))
        batches.append((Batch(sequences, left=tuple(range(first))), start > 0))
        first += len(runs)
    if min(runner.storage.counts) > 1 and longest > 1:
        asking = SamplingParams(n=2, logprobs=1)
        sequence = _sequence(first, 1, 0, size)._replace(
            num_samples=2, sampling=asking, seeds=(0, 1)
        )
        copies = ((0, 1),)
        batches.append((Batch((sequence,), copies, left=tuple(range(first))), False))
        for i, options in enumerate(ADJUSTED, start=1):
            sampling = SamplingParams(prompt_logprobs=1, **options)
            length = min(2, max_num_batched_tokens)
            adjusted = _sequence(first + i, length, 0, size)._replace(
                sampling=sampling, asked=Asked(True, (0,) * length, length)
            )
            batches.append((Batch((adjusted,), left=(first + i - 1,)), False))
    return batches


def _sequence(seq_id: int, num_tokens: int, start: int, block_size: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=seq_id,
        token_ids=(0,) * num_tokens,
        start=start,
        block_ids=range(-(-(start + num_tokens) // block_size)),
        num_samples=1,
        sampling=SamplingParams(),
        seeds=(0,),
    )
