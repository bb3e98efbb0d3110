"""Getting a device's runner ready: kernels compiled, decode steps captured, before requests come.

Triton compiles a kernel anew when an integer becomes 1 or a multiple of 16, and the tiles of
attention follow from the lengths of a step, so a few prompts of chosen lengths are computed, alone,
side by side and beside sequences that decode. The decode steps are captured from the largest to the
smallest, in one pool of memory: the smaller ones find room in what the largest needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.engine.batch import Batch, ScheduledSequence
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
    for i, batch in enumerate(warm_up_batches(runner, max_num_batched_tokens)):
        show(f"compiling kernels, step {i + 1} of {len(WARM_UP)}")
        runner.submit(batch).result()
    runner.reset()
    if not is_lazy:
        capture_all(runner, show)
    runner.captures = runner.device.type == "cuda"
    runner.compilations = Compilations()


def capture_all(runner: DeviceRunner, show: Callable[[str], None] = lambda _: None) -> None:
    """Capture every decode step, the largest first."""
    sizes = runner.buckets[::-1]
    for i, bucket in enumerate(sizes):
        show(f"capturing decode steps, {i + 1} of {len(sizes)}")
        runner.capture(bucket)
    torch.cuda.synchronize(runner.device)


def warm_up_batches(runner: DeviceRunner, max_num_batched_tokens: int) -> list[Batch]:
    """Return the steps of WARM_UP that the limits allow, those of too many tokens cut short."""
    rows, size = runner.rows, runner.block_size
    longest = min(rows.max_blocks, runner.storage.num_blocks) * size
    batches, seen, first = [], set[tuple[int, ...]](), 0
    for lengths in WARM_UP:
        room = min(max_num_batched_tokens - len(lengths) + 1, longest)
        lengths = tuple(min(length, room) for length in lengths)
        is_too_much = len(lengths) > rows.max_num_seqs or sum(lengths) > max_num_batched_tokens
        if is_too_much or lengths in seen:
            continue
        seen.add(lengths)
        sequences = tuple(
            ScheduledSequence(
                seq_id=first + i,
                token_ids=(0,) * length,
                start=0,
                block_ids=range(-(-length // size)),
                num_samples=1,
                sampling=SamplingParams(),
                seeds=(0,),
            )
            for i, length in enumerate(lengths)
        )
        batches.append(Batch(sequences, left=tuple(range(first))))
        first += len(lengths)
    return batches
