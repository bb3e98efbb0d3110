"""What this machine reaches when it serves a model: `tilewise bench machine`.

Peaks are measured alone: a product of large matrices in each dtype, a read, a copy, and where
there is a GPU the link to main memory and the launch of a kernel. Efficiencies and overheads are
fitted (`bench.fit`) to steps of the engine itself: batches of many sizes run through scheduler and
runner. The result is a profile that `tilewise simulate --machine FILE` reads.

On a GPU host and device are measured apart. In turns as they come the host's parts are, whose
prompts have other lengths each time: a call of shapes that were not seen before is planned first.
In other turns the device is kept busy until a step has been submitted whole, so that nothing but
its own work lies between two events.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise.bench.engines.shapes import model_directory
from tilewise.bench.fit import MeasuredStep, by_class, errors, fit, of_device
from tilewise.bench.report import emit, format_table, positive, say
from tilewise.bench.roofline import measure_ceilings, product_flops
from tilewise.bench.timing import time_call
from tilewise.cache.allocator import BlockAllocator
from tilewise.cost import Sizes, StepWork, read_sizes
from tilewise.engine.batch import Batch
from tilewise.engine.llm import LLM
from tilewise.engine.memory import available_memory
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.cpu_step import MOST_WORK_BY_ROWS, CompiledRunner
from tilewise.engine.steps.runner import Runner, StepHandle
from tilewise.engine.virtual import Arrival, Timing, take, work_of
from tilewise.flags import Parser

__all__ = [
    "Crowd",
    "Room",
    "alone_steps",
    "few_pairs_of",
    "measure_peaks",
    "measure_steps",
    "medians",
    "one_turn",
    "together",
    "turn_of",
    "wear",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Sequences, tokens of a prompt, tokens of a step, sequences that come before each step (0: all at
# once): decode steps of 1 to 128 rows over short and long contexts, after prompts in chunks of
# several sizes; steps of a service, prompts among sequences that decode; and over a full cache.
BATCHES = (
    (1, 16, 16, 0),
    (1, 900, 256, 0),
    (4, 200, 64, 0),
    (8, 100, 512, 0),
    (16, 400, 2048, 0),
    (32, 24, 128, 0),
    (32, 250, 1024, 0),
    (64, 60, 2048, 0),
    (64, 30, 256, 0),
    (128, 12, 512, 0),
    (40, 300, 512, 1),
    (40, 80, 512, 2),
    (48, 500, 1024, 3),
    (48, 300, 512, 0),
    (20, 740, 512, 0),
)
NEW_TOKENS = 12
# On a GPU in place of the last ones, as far as seats and cache hold them: prompts alone, rows up to
# all seats over few keys, and services: a prompt or some come before one in so many steps, up to
# all seats over as many keys as users have: steps with prompts between steps that decode, and few
# after others of their kind, which took the host 0.5 ms less.
# Then: tokens of each answer, and of how many steps one is preceded by new sequences.
ON_A_GPU = 10
LARGE_BATCHES = (
    (1, 3500, 2048, 0, 12, 1),
    (256, 40, 2048, 0, 30, 1),
    (256, 900, 2048, 2, 300, 2),
    (160, 400, 2048, 4, 140, 4),
    (24, 900, 2048, 1, 60, 6),
    (40, 1300, 2048, 1, 90, 3),
    (60, 300, 512, 1, 120, 2),
    (12, 2600, 2048, 1, 40, 5),
    (24, 1800, 2048, 1, 3, 4),
    (24, 500, 2048, 1, 3, 4),
)
SEATS, SLOTS = 128, 16_384  # that the smaller ones need
LARGE_SEATS, LARGE_SLOTS = 256, 320_000  # and all, if there is memory
SHORTEST = 0.7  # of prompts whose lengths vary, as a share of the longest
# A GPU waits so long, in seconds, while a decode step, or another, is submitted; such a share of
# the steps is measured in this way, of two in a row one at most.
HELD_S = {True: 3e-3, False: 20e-3}
HELD_SHARE = {True: 0.3, False: 0.9}
# What has used the pool before: so many sequences side by side, each with a prompt of up to so many
# blocks, that grew by a block in turn or made way for the next one.
WORN_STEPS, WORN_SEQUENCES, WORN_BLOCKS = 4000, 24, 32


def measure_peaks(device: str) -> dict[str, Any]:
    """Return the fields of Machine that are measured without a model: name, FLOP/s by dtype,
    bandwidths and memory; on a GPU also the link to main memory and the times of launches."""
    ceilings = measure_ceilings(device)
    flops = {"float32": product_flops(1024, device, torch.float32)}
    size = 8192 if device == "cuda" else 2048
    for name in ("bfloat16", "float16"):
        # Where a CPU has no units for a dtype, torch may be a thousand times slower in it.
        if product_flops(256, device, _DTYPES[name]) > flops["float32"] / 10:
            flops[name] = product_flops(size, device, _DTYPES[name])
    found: dict[str, Any] = {
        "name": ceilings.name,
        "flops": flops,
        "read_bandwidth": ceilings.read_bytes,
        "copy_bandwidth": ceilings.copy_bytes,
        "memory_bytes": float(available_memory()),
    }
    if device == "cuda":
        found["memory_bytes"] = float(torch.cuda.get_device_properties(0).total_memory)
        found |= _measure_link() | _measure_launches()
    return found


def few_pairs_of(runner: Runner, sizes: Sizes) -> int:
    """Return the number of (query, key) pairs up to which the prompts of a step attend row by row,
    `Machine.few_pairs`; 0 for a runner other than the compiled one of a CPU."""
    if not isinstance(runner, CompiledRunner):
        return 0
    return MOST_WORK_BY_ROWS // (2 * sizes.num_q_heads * sizes.head_dim)  # half of n x n are pairs


def _measure_link() -> dict[str, float]:
    """Return the fields link_bandwidth, bytes/s between pinned main memory and a GPU in the slower
    direction, and link_s, the fixed seconds of a copy."""
    num_bytes = 256 << 20
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    into = time_call(lambda: device.copy_(host, non_blocking=True), "cuda").median
    out = time_call(lambda: host.copy_(device, non_blocking=True), "cuda").median
    few = time_call(lambda: device[:64].copy_(host[:64], non_blocking=True), "cuda").median
    return {"link_bandwidth": num_bytes / max(into, out), "link_s": few}


def _measure_launches() -> dict[str, float]:
    """Return the fields launch_s, the host's seconds to launch a small kernel, and kernel_s, the
    device's seconds for such a kernel in a CUDA graph."""
    count = 256
    x = torch.zeros(256, device="cuda")

    def kernels() -> None:
        for _ in range(count):
            x.add_(1.0)

    kernels()
    torch.cuda.synchronize()
    started = time.perf_counter()
    kernels()
    launch = (time.perf_counter() - started) / count
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    return {"launch_s": launch, "kernel_s": time_call(graph.replay, "cuda").median / count}


class Crowd(NamedTuple):
    """A batch of requests whose steps are measured.

    Attributes:
        sequences: the number of sequences that run.
        prompt: tokens of each prompt, at most where lengths vary.
        budget: tokens of a step.
        at_once: sequences that come before a step; 0 is all before the first.
        new_tokens: the number of tokens of each answer.
        every: the number of steps from one arrival of new sequences to the next.
    """

    sequences: int
    prompt: int
    budget: int
    at_once: int
    new_tokens: int = NEW_TOKENS
    every: int = 1

    @property
    def slots(self) -> int:
        """Number of slots of the cache that hold all of its sequences at once."""
        return self.sequences * (self.prompt + self.new_tokens + 16)


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes that a runner is made for.

    Attributes:
        seats, slots: the numbers of sequences at once and of tokens in the cache, whose blocks hold
            16.
        budget: the largest number of tokens of a step.
        max_len: the largest number of tokens of a sequence.
    """

    max_len: int = 1024
    seats: int = SEATS
    slots: int = SLOTS
    budget: int = 2048

    def crowds(self, *, large: bool) -> list[Crowd]:
        """Return the batches to run, with prompts cut to `max_len`: all of `BATCHES`, or, if
        `large`, for a GPU, the first of them and those of `LARGE_BATCHES` that fit."""
        found = [Crowd(*batch) for batch in BATCHES[: ON_A_GPU if large else None]]
        for batch in LARGE_BATCHES if large else ():
            crowd = Crowd(*batch)
            most = min(crowd.prompt, self.max_len - crowd.new_tokens)
            crowd = crowd._replace(budget=min(crowd.budget, self.budget), prompt=most)
            if crowd.sequences <= self.seats and crowd.slots <= self.slots and most > 0:
                found.append(crowd)
        return [c._replace(prompt=min(c.prompt, self.max_len - c.new_tokens)) for c in found]


def measure_steps(
    runner: Runner,
    sizes: Sizes,
    *,
    overlap: bool,
    repeats: int = 5,
    room: Room | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredStep]:
    """Run batches of many sizes and return their steps; on a CPU the medians of the repeats.

    Batches take turns, so that a machine whose speed drifts is fair to all. On a GPU the steps of
    `alone_steps` are added.

    Args:
        runner: a runner that is made for `room`.
        sizes: the sizes of its model.
        overlap: True to submit a step while one runs, as the engine does with this runner on a GPU.
        repeats: number of turns that count, after one to warm up.
        room: the sizes that the runner is made for; None is the least: `SEATS`, `SLOTS`.
        clock: the clock, in seconds.
    """
    room, turns = room or Room(), []
    for turn in range(repeats + 1):
        turns.append(turn_of(runner, sizes, overlap=overlap, room=room, turn=turn, clock=clock))
        say(f"turn {turn} of {repeats}")
    steps = together(turns[1:], overlap=overlap)
    if overlap:
        steps += alone_steps(runner, sizes, room=room, turn=len(turns))
    return steps


def turn_of(
    runner: Runner,
    sizes: Sizes,
    *,
    overlap: bool,
    room: Room,
    turn: int,
    clock: Callable[[], float],
) -> list[list[MeasuredStep]]:
    """Run each batch once and return the steps of each; with `overlap`, on a GPU, prompts have
    random lengths of this `turn`."""
    crowds = room.crowds(large=overlap)
    seed = turn if overlap else None
    return [_run_batch(runner, sizes, crowd, room, overlap, clock, seed) for crowd in crowds]


def one_turn(
    runner: Runner, sizes: Sizes, *, overlap: bool, max_len: int, clock: Callable[[], float]
) -> list[list[MeasuredStep]]:
    """Run each of BATCHES once, with prompts of full length, and return the steps of each."""
    room = Room(max_len=max_len)
    crowds = room.crowds(large=False)
    return [_run_batch(runner, sizes, crowd, room, overlap, clock, None) for crowd in crowds]


def together(
    turns: Sequence[Sequence[Sequence[MeasuredStep]]], *, overlap: bool
) -> list[MeasuredStep]:
    """Return the steps of all turns in one list: the medians of the turns, or with `overlap`, on a
    GPU, where the turns' prompts differ, all steps.

    Args:
        turns: the steps of each batch of each turn.
    """
    if not overlap:
        return medians(turns)
    return [step for turn in turns for batch in turn for step in batch]


def medians(turns: Sequence[Sequence[Sequence[MeasuredStep]]]) -> list[MeasuredStep]:
    """Return each step of each batch once, with the medians of its seconds over the turns.

    Args:
        turns: the steps of each batch of each turn, in which the same steps come in the same order.
    """
    names = ("scheduling", "submitting", "device", "updating")
    return [
        MeasuredStep(
            same[0].work, *(statistics.median(getattr(step, n) for step in same) for n in names)
        )
        for batch in zip(*turns, strict=True)
        for same in zip(*batch, strict=True)
    ]


def alone_steps(runner: Runner, sizes: Sizes, *, room: Room, turn: int) -> list[MeasuredStep]:
    """Run each batch once more on a GPU, and return those of its steps that ran alone, with nothing
    but their own time, see `MeasuredStep.is_alone`."""
    held = _Held(turn)
    for crowd in room.crowds(large=True):
        _run_batch(runner, sizes, crowd, room, True, time.perf_counter, turn, held)
    return held.steps


class _Held:
    """Submit some steps while the GPU is kept waiting, so that they run without waiting for the
    host, and measure them.

    Args:
        seed: the seed that chooses the measured steps.
    """

    def __init__(self, seed: int) -> None:
        self.steps: list[MeasuredStep] = []
        self._rng, self._was_last = random.Random(seed), False
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 10_000_000
        for _ in range(2):  # the first one loads it
            self._begin.record()
            torch.cuda._sleep(cycles)
            self._end.record()
            self._end.synchronize()
        self._cycles_a_second = cycles / self._seconds()

    def submit(self, runner: Runner, batch: Batch) -> tuple[StepHandle, bool]:
        """Submit a step; return its handle, and whether it was chosen to be measured and the GPU
        did wait until it had been submitted whole."""
        # The events are those of one step until it has been waited for.
        is_drawn = self._rng.random() < HELD_SHARE[batch.decodes]
        self._was_last = is_drawn and not self._was_last
        if not self._was_last:
            return runner.submit(batch), False
        torch.cuda._sleep(int(HELD_S[batch.decodes] * self._cycles_a_second))
        self._begin.record()
        handle = runner.submit(batch)
        was_held = not self._begin.query()
        self._end.record()
        return handle, was_held

    def note(self, work: StepWork) -> None:
        """Wait for the end of the step that was measured last, and append it, with its work and
        seconds, to `steps`."""
        self._end.synchronize()
        self.steps.append(MeasuredStep(work, 0.0, 0.0, self._seconds(), 0.0, is_alone=True))

    def _seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


def _run_batch(
    runner: Runner,
    sizes: Sizes,
    crowd: Crowd,
    room: Room,
    overlap: bool,
    clock: Callable[[], float],
    seed: int | None,
    held: _Held | None = None,
) -> list[MeasuredStep]:
    """Run a batch of requests through a new scheduler to its end, and return its steps.

    Args:
        seed: the seed of the lengths of prompts; None makes all prompts the longest.
        held: the object that measures the device alone in some of the steps; None measures none
            so.
    """
    runner.reset()
    scheduler = Scheduler(
        room.slots // 16,
        16,
        max_num_seqs=max(SEATS, crowd.sequences),
        max_num_batched_tokens=max(crowd.budget, crowd.sequences),
        max_model_len=room.max_len,
        max_in_flight=2 if overlap else 1,
    )
    wear(scheduler.tables.allocator)
    coming = _requests(sizes, crowd, seed)
    timings: dict[str, Timing] = {}
    unfinished: deque[tuple[Batch, StepHandle, float, float, float, bool]] = deque()
    steps: list[MeasuredStep] = []
    ended = adding = 0.0
    before: Batch | None = None
    rounds = 0
    while coming or scheduler.has_unfinished() or unfinished:
        if rounds % crowd.every == 0 or not scheduler.has_unfinished():
            started = clock()
            for _ in range(min(crowd.at_once or crowd.sequences, len(coming))):
                arrival = coming.popleft()
                timings[arrival.request.request_id] = Timing.of(arrival)
                scheduler.add(arrival.request)
            adding += clock() - started
        rounds += 1
        while len(unfinished) < scheduler.max_in_flight:
            started = clock()
            batch = scheduler.schedule()
            scheduled = clock()
            if batch is None:
                break
            was_held = False
            if held is None:
                handle = runner.submit(batch)
            else:
                handle, was_held = held.submit(runner, batch)
            submitted = clock()
            scheduling, adding = scheduled - started + adding, 0.0
            unfinished.append(
                (batch, handle, scheduling, submitted - scheduled, scheduled, was_held)
            )
        batch, handle, scheduling, submitting, began, was_held = unfinished.popleft()
        drawn = handle.result()
        now = clock()
        # As whoever serves them: tokens are looked at one by one.
        take(timings, scheduler.update(batch, drawn), now)
        updating = clock() - now
        device = now - max(began, ended)
        work = work_of(batch, 16, before)
        before = batch
        if held is not None and was_held:
            held.note(work)
        steps.append(MeasuredStep(work, scheduling, submitting, device, updating))
        ended = now
        while unfinished and not (coming or scheduler.has_unfinished()):
            batch, handle, *_ = unfinished.popleft()
            handle.result()
            scheduler.discard(batch)
    return steps


def _requests(sizes: Sizes, crowd: Crowd, seed: int | None) -> deque[Arrival]:
    ids, lengths = random.Random(0), random.Random(seed)
    params = SamplingParams(max_tokens=crowd.new_tokens, ignore_eos=True)
    found: deque[Arrival] = deque()
    for number in range(crowd.sequences):
        length = crowd.prompt
        if seed is not None:
            length = lengths.randint(max(1, int(SHORTEST * crowd.prompt)), crowd.prompt)
        prompt = [ids.randrange(sizes.vocab_size) for _ in range(length)]
        found.append(Arrival(0.0, Request(str(number), prompt, params)))
    return found


def wear(allocator: BlockAllocator) -> None:
    """Leave the free blocks of a pool in the order in which a long service leaves them.

    A sequence then has blocks that others freed, here and there, which a CPU reads more slowly than
    neighbours: 19 sequences of 320 tokens, blocks of 4 KiB, decoded in 32 ms in place of 21 (one
    thread of a Xeon, 2026-11-23, a load of 14).
    """
    rng, held = random.Random(1), list[list[int]]()
    for _ in range(WORN_STEPS):
        grows = len(held) == WORN_SEQUENCES
        blocks = held[rng.randrange(len(held))] if grows else []
        wanted = 1 if grows else rng.randrange(1, WORN_BLOCKS)
        if allocator.num_free < wanted or len(blocks) >= 2 * WORN_BLOCKS:
            allocator.release(held.pop(rng.randrange(len(held))))
            continue
        blocks += allocator.allocate(wanted)
        if not grows:
            held.append(blocks)
    for blocks in held:
        allocator.release(blocks)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tilewise bench machine", description=__doc__)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument(
        "--model",
        default="story",
        help="whose steps are measured: story, a shape of the engine's benchmark "
        "with random weights, or a directory",
    )
    parser.add_argument("--dtype", help="of its parameters (default: the checkpoint's own)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of torch, on a CPU")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="of each batch")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="seconds of the processor, for a machine that others use: what waits "
        "for a core does not count; on a CPU, with --threads 1",
    )
    parser.add_argument("--json", metavar="FILE", help="write the profile there")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `tilewise bench machine`, which measures this machine and fits its profile.

    Prints how near the profile's predictions come to the measured steps; then a document with the
    profile as JSON in one line, unless standard output is a terminal and no --json names a file for
    the profile. Returns 0.
    """
    options = _parser().parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.cpu_time and (device != "cpu" or torch.get_num_threads() > 1):
        raise ValueError("--cpu-time must be of one thread on a CPU: --device cpu --threads 1")
    peaks = measure_peaks(device)
    say(f"{peaks['name']}: read {peaks['read_bandwidth'] / 1e9:.4g} GB/s")
    with tempfile.TemporaryDirectory() as folder:
        directory, is_random = model_directory(options.model, Path(folder))
        sizes = read_sizes(json.loads((directory / "config.json").read_text()))
        room = Room(max_len=min(1024, sizes.max_len))
        if device == "cuda":
            room = Room(min(4096, sizes.max_len), LARGE_SEATS, LARGE_SLOTS)
        llm = LLM(
            directory,
            device=device,
            dtype=options.dtype or "auto",
            num_blocks=None if device == "cuda" else room.slots // 16,
            max_num_seqs=room.seats,
            max_model_len=room.max_len,
            random_weights=is_random,
        )
    engine = llm.engine
    storage = engine.runner.storage
    if storage is None:
        raise ValueError(f"model must be a decoder, got the encoder {options.model!r}")
    room = replace(room, slots=min(room.slots, 16 * storage.num_blocks))
    peaks["few_pairs"] = few_pairs_of(engine.runner, sizes)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    steps = measure_steps(
        engine.runner,
        sizes,
        overlap=engine.overlap,
        repeats=options.repeats,
        room=room,
        clock=time.process_time if options.cpu_time else time.perf_counter,
    )
    where = f"{peaks['name']}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    found = fit(
        peaks, sizes, steps, dtype=dtype, captures=engine.overlap, overlaps_steps=engine.overlap
    )
    origins = {name: f"measured: {where}" for name in peaks if name != "name"}
    origins["fitted"] = f"the rest, to {len(steps)} steps of {options.model} in {dtype}: {where}"
    found = replace(found, origins=origins)
    known = of_device(steps)
    off = errors(found, sizes, known, {"dtype": dtype})
    rows = [
        {
            "tokens": s.work.tokens,
            "sequences": s.work.sequences,
            "keys": s.work.keys,
            "measured ms": 1e3 * s.device,
            "predicted ms": 1e3 * s.device * (1 + e),
        }
        for s, e in zip(known, off, strict=True)
    ]
    print(format_table(rows[:: max(1, len(rows) // 40)], list(rows[0])))
    classes = by_class([(s, s.device * (1 + e)) for s, e in zip(known, off, strict=True)])
    print(format_table(classes, list(classes[0])))
    off = sorted(map(abs, off))
    document = {
        "what": "a machine's profile for tilewise simulate: seconds, bytes and FLOP/s",
        "model": options.model,
        "dtype": dtype,
        "clock": "processor" if options.cpu_time else "wall",
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "fit": {
            "steps": len(known),
            "median error %": 100 * off[len(off) // 2],
            "p90 error %": 100 * off[len(off) * 9 // 10],
        },
        "classes": classes,
        "machine": found.as_dict(),
        "steps": rows,
    }
    print(
        f"error of a step's time: median {document['fit']['median error %']:.1f} %, "
        f"p90 {document['fit']['p90 error %']:.1f} %"
    )
    emit(document, options.json)
    return 0
