"""Getting a device's runner ready: kernels compiled, decode steps captured, before requests come.

The tiles of attention, and whether keys are split, follow from the lengths of a step, so steps of
chosen lengths are computed, alone, side by side, beside sequences that decode and after a common
beginning. (Lengths themselves are compiled into no kernel, see tests/engine/test_compiled_ahead.)
Steps with prompts and decode steps are captured before, from the largest to the smallest, in one
pool of memory: the smaller ones find room in what the largest needed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from tilewise.engine.batch import Asked, Batch, ScheduledSequence
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.compilations import Compilations
from tilewise.progress import Show, silent

__all__ = ["capture_steps", "prepare", "sizes_of_kinds", "warm_up_batches"]

# Rows from which decode steps launch other kernels: those of one row, products padded to 8, 16 or
# 32 rows, and those of cuBLAS.
ROWS_OF_KERNELS = (1, 2, 9, 17, 33)
# New tokens of runs for which attention has tiles of their own: those of few rows end at 16, 32 and
# 64 of a key head, whatever the number of its queries.
RUNS = (1, 2, 4, 8, 16, 32, 64, 100)
# Other prompts, alone: few tiles of rows have their keys split, many have not; kernels of attention
# over whole prompts, as latents take it, know odd lengths from others.
PROMPTS = (37, 101, 250, 500, 1001, 2048, 4099)
# (sequences that decode, new tokens of one beside them): few rows are merged by other programs than
# many.
MIXED = (
    (1, 2),
    (1, 15),
    (1, 100),
    (1, 1000),
    (4, 16),
    (4, 64),
    (7, 8),
    (31, 8),
    (31, 100),
    (31, 2000),
    (63, 8),
    (63, 100),
    (127, 2),
    (127, 1000),
    (200, 8),
    (200, 100),
    (200, 7000),
)
# (sequences, new tokens of each): many tiles of rows of each width.
MANY = ((200, 1), (40, 8), (64, 16), (64, 32), (16, 64), (9, 900))
FEWER = 100  # sequences that decode after a shared prefix: other tiles than of 128 and more
FAR = 512  # tokens before the new ones, where they matter: keys are split, and sequences merged
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
    show: Show = silent,
) -> None:
    """Capture a runner's steps, then run steps of many lengths so that their kernels are compiled.

    Afterwards the runner has no sequences, captures further steps when they first run (on a GPU),
    and counts compilations from 0.

    Args:
        runner: the runner, which has no sequences yet.
        max_num_batched_tokens: the largest number of tokens of one step.
        is_lazy: True to capture only decode steps of a few sizes now, and others when they first
            run.
        show: a function that takes lines of progress.
    """
    # Before the steps, which then launch little beside attention.
    capture_steps(runner, is_lazy=is_lazy, show=show)
    captured = time.perf_counter()
    batches = warm_up_batches(runner, max_num_batched_tokens)
    threshold = runner.sharing_tokens
    for i, (batch, shares) in enumerate(batches):
        show(f"compiling kernels, step {i + 1} of {len(batches)}", i / len(batches))
        # The sequences of all steps lie in the same blocks, most of which are not to be shared.
        runner.sharing_tokens = 1 if shares and threshold is not None else None
        runner.submit(batch).result()  # keys that no step has written may be anything
    runner.sharing_tokens = threshold
    runner.reset()
    runner.start_seconds |= {"warm-up steps": time.perf_counter() - captured}
    runner.captures = runner.device.type == "cuda"
    runner.compilations = Compilations()


def capture_steps(runner: DeviceRunner, *, is_lazy: bool, show: Show = silent) -> None:
    """Capture decode steps and steps with prompts in CUDA graphs, the largest first.

    The seconds of each kind are added to the runner's `start_seconds`.

    Args:
        runner: the runner; for one on a CPU, which has no graphs, `is_lazy` must be True and
            nothing is done.
        is_lazy: True to capture only one decode step of every kind, as the others launch the same
            kernels, and no steps with prompts.
        show: a function that takes lines of progress.
    """
    if is_lazy and runner.device.type != "cuda":
        return
    prompts = [] if is_lazy or runner.prompts is None else runner.prompts.sizes
    decode = sizes_of_kinds(runner) if is_lazy else runner.buckets
    greedy = runner.greedy_buckets[-1:] if is_lazy else runner.greedy_buckets
    kinds: list[tuple[str, list[int], Callable[[int], None]]] = [
        ("steps with prompts", prompts, runner.capture_prompts),
        ("decode steps", decode, runner.capture),
        ("greedy steps", greedy, functools.partial(runner.capture, is_greedy=True)),
    ]
    if runner.adapters is not None:
        adapted_prompts = functools.partial(runner.capture_prompts, adapted=True)
        kinds += [
            ("steps with prompts and adapters", prompts, adapted_prompts),
            ("decode steps with adapters", decode, functools.partial(runner.capture, adapted=True)),
        ]
    for kind, sizes, capture in kinds:
        if not sizes:
            continue
        began = time.perf_counter()
        for i, size in enumerate(reversed(sizes)):
            show(f"capturing {kind}, {i + 1} of {len(sizes)}", i / len(sizes))
            capture(size)
        torch.cuda.synchronize(runner.device)
        runner.start_seconds[f"capturing {kind}"] = time.perf_counter() - began


def sizes_of_kinds(runner: DeviceRunner) -> list[int]:
    """Return numbers of rows, ascending, whose decode steps together launch all kernels of such
    steps.

    They are those of the runner's `buckets` that hold the first rows of each kind, ROWS_OF_KERNELS.
    """
    buckets = runner.buckets
    return sorted(
        {min(b for b in buckets if b >= rows) for rows in ROWS_OF_KERNELS if rows <= buckets[-1]}
    )


def warm_up_steps(
    max_num_seqs: int, max_tokens: int, max_len: int, block_size: int
) -> list[tuple[tuple[int, ...], int, bool]]:
    """Return steps that together launch every kernel of attention that a step may need.

    Args:
        max_num_seqs, max_tokens: the largest numbers of sequences and tokens of one step.
        max_len: the largest number of tokens of a sequence.
        block_size: the number of tokens of a cache block.

    Returns:
        For each step the number of new tokens of each sequence, the number of tokens before them,
        and whether all sequences share these earlier tokens.
    """
    plain: list[tuple[int, ...]] = [(run,) for run in (*RUNS, *PROMPTS)]
    plain += [(*[1] * count, run) for count, run in MIXED] + [(run,) * n for n, run in MANY]
    wanted = [(runs, start, False) for start in (0, FAR) for runs in plain]
    shared: list[tuple[int, ...]] = [(run, run) for run in (*RUNS, 500)] + [
        (run,) * n for n, run in (*MANY[:-1], (FEWER, 1))
    ]
    # So few blocks as are shared at all, and more keys than one split has.
    starts = sorted({8 * block_size, -(-max(8 * block_size, 272) // block_size) * block_size})
    wanted += [(runs, start, True) for start in starts for runs in (*shared, (1, 1, 1000))]
    steps = dict.fromkeys(
        _cut(runs, start, shares, max_num_seqs, max_tokens, max_len)
        for runs, start, shares in wanted
    )
    return [step for step in steps if step is not None]


def _cut(
    runs: tuple[int, ...],
    start: int,
    shares: bool,
    max_num_seqs: int,
    max_tokens: int,
    max_len: int,
) -> tuple[tuple[int, ...], int, bool] | None:
    """Return (runs, start, shares) of a step, cut to the limits; None if no run fits them.

    Args:
        runs: the numbers of tokens of the runs, the longest last.
        start: the position at which the runs start.
        shares: True if the sequences share their first `start` tokens.
        max_num_seqs, max_tokens, max_len: the limits on runs, tokens of a step, and positions.
    """
    runs = runs[-min(max_num_seqs, max(1, max_tokens // 2)) :]  # the last is the longest
    if not shares:
        start = max(0, min(start, max_len - runs[-1]))
    if len(set(runs)) == 1:
        runs = tuple(min(run, max_len - start, max_tokens) for run in runs)
        runs = runs[: max_tokens // runs[0]] if runs[0] > 0 else ()
    else:
        longest = min(max_len - start, max_tokens - len(runs) + 1)
        runs = (*runs[:-1], min(runs[-1], longest))
    if not runs or runs[-1] < 1 or (shares and len(runs) < 2):
        return None
    return runs, start, shares


def warm_up_batches(runner: DeviceRunner, max_num_batched_tokens: int) -> list[tuple[Batch, bool]]:
    """Return pairs of a batch and True if its sequences share a prefix: the steps of
    `warm_up_steps`.

    A decode step comes before them. Behind them come a step that copies blocks and draws two
    samples with log-probabilities, three that change logits in every way that is a kernel of its
    own, and a decode step of changed logits. Steps that share are left out where the runner never
    shares.
    """
    rows, size = runner.rows, runner.block_size
    longest = min(rows.max_blocks, *runner.storage.counts) * size
    steps = warm_up_steps(rows.max_num_seqs, max_num_batched_tokens, longest, size)
    batches, first = [(Batch((_sequence(0, 1, 0, size),)), False)], 1
    for runs, start, shares in steps:
        if shares and runner.sharing_tokens is None:
            continue
        # Runs of one token that draw nothing are no decode step.
        draws = int(max(runs) > 1)
        sequences = tuple(
            _sequence(first + i, n, start, size)._replace(num_samples=draws, seeds=(0,) * draws)
            for i, n in enumerate(runs)
        )
        batches.append((Batch(sequences, left=tuple(range(first))), shares))
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
        # A decode step draws from changed logits, wider than its own, and moves its rows on.
        last = first + len(ADJUSTED)
        decodes = _sequence(last + 1, 1, 0, size)._replace(
            sampling=SamplingParams(**ADJUSTED[0]), asked=Asked(True, (0,), 1)
        )
        batches.append((Batch((decodes,), left=(last,)), False))
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
