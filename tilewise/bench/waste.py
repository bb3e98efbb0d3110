"""How much of the cache memory holds tokens, on a trace of requests: `tilewise bench waste`.

The requests of a trace go through the engine's own scheduler and block tables, without a model, and
beside them through contiguous allocation (`contiguous.py`) of the same memory. All of them wait
from the beginning, and what counts are the steps in which some still wait: memory is what limits
the batch then. Numbers depend on the trace alone, not on the machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewise.bench import contiguous
from tilewise.bench.contiguous import Shares
from tilewise.bench.report import emit, format_table, say
from tilewise.bench.trace import TraceRequest, drawn_trace, fitting, read_trace
from tilewise.engine.batch import SampledToken
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.flags import Parser

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAMPLES = (2, 4, 6)  # of one prompt, as in figure 15 of the paper
# The paper's OPT-13B on a GPU of 40 GB: 12 GB of cache, 800 KB a token, contexts of 2,048.
NUM_SLOTS, MAX_LEN, BUDGET = 15_700, 2048, 2048
COLUMNS = [
    "allocator",
    "block",
    "tokens",
    "reserved",
    "internal",
    "external",
    "batch",
    "steps",
    "slack/seq",
    "again",
]


def paged_scheduler(
    requests: Sequence[TraceRequest],
    block_size: int,
    num_slots: int,
    *,
    max_len: int,
    budget: int,
    samples: int = 1,
) -> Scheduler:
    """Return a scheduler, without an engine, in which all requests wait; blocks are shared only by
    the samples of one request."""
    scheduler = Scheduler(
        num_slots // block_size,
        block_size,
        max_num_seqs=max(len(requests) * samples, 1),
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        enable_prefix_caching=samples > 1,  # where a preempted sample finds its prompt again
    )
    for number, request in enumerate(requests):
        params = SamplingParams(n=samples, max_tokens=request.output, ignore_eos=True)
        scheduler.add(Request(str(number), [number] * request.prompt, params))
    return scheduler


def steps_of(scheduler: Scheduler) -> Iterator[dict[int, int]]:
    """Run a scheduler's steps, with made-up tokens, until no sequence waits; yield for each step
    the number of cached tokens of each running sequence, by its seq_id."""
    token = itertools.count(len(scheduler.roster.requests))
    while scheduler.roster.waiting:
        batch = scheduler.schedule()
        if batch is None:
            return
        cached = {s.seq_id: s.num_computed_tokens for s in scheduler.roster.running}
        cached |= {run.seq_id: run.start + len(run.token_ids) for run in batch.sequences}
        if scheduler.roster.waiting:
            yield cached
        drawn = [
            [SampledToken(next(token)) for _ in range(run.num_samples)] for run in batch.sequences
        ]
        scheduler.update(batch, drawn)


def paged_row(
    requests: Sequence[TraceRequest], block_size: int, num_slots: int, *, max_len: int, budget: int
) -> dict[str, Any]:
    """Return the row of the engine's own allocation with blocks of one size: mean shares of the
    memory in percent, sequences, steps, the largest slack of a sequence, and preemptions."""
    scheduler = paged_scheduler(requests, block_size, num_slots, max_len=max_len, budget=budget)
    shares, slacks = [], [0]
    for cached in steps_of(scheduler):
        tokens, reserved, slack = 0, 0, 0
        for seq in scheduler.roster.running:
            held, known = len(seq.block_ids) * block_size, max(cached[seq.seq_id], seq.num_tokens)
            tokens += cached[seq.seq_id]
            reserved += known - cached[seq.seq_id]
            slack += held - known
            slacks.append(held - known)
        free = num_slots - tokens - reserved - slack
        shares.append(Shares(tokens, reserved, slack, free, len(scheduler.roster.running)))
    again = scheduler.stats().num_preemptions
    row = {"allocator": "paged", "block": block_size} | _means(shares, num_slots)
    return row | {"slack/seq": max(slacks), "again": again}


def contiguous_row(
    requests: Sequence[TraceRequest], policy: str, num_slots: int, *, max_len: int, budget: int
) -> dict[str, Any]:
    """Return the row of contiguous allocation by a policy, one of `contiguous.POLICIES`: mean
    shares of the memory in percent, sequences and steps."""
    shares = list(contiguous.replay(requests, policy, num_slots, max_len=max_len, budget=budget))
    return {"allocator": policy, "block": None} | _means(shares, num_slots)


def sharing_row(
    requests: Sequence[TraceRequest],
    samples: int,
    block_size: int,
    num_slots: int,
    *,
    max_len: int,
    budget: int,
) -> dict[str, Any]:
    """Return the row of what several samples of each prompt save by sharing its blocks.

    "saved" is a percentage: of the blocks that they would need without sharing, those not needed.
    """
    scheduler = paged_scheduler(
        requests, block_size, num_slots, max_len=max_len, budget=budget, samples=samples
    )
    held = used = 0
    for _ in steps_of(scheduler):
        held += sum(len(seq.block_ids) for seq in scheduler.roster.running)
        used += scheduler.tables.allocator.num_used
    return {"samples": samples, "block": block_size, "saved": round(100 * (1 - used / held), 1)}


def _means(shares: Sequence[Shares], num_slots: int) -> dict[str, Any]:
    """Return the means over the steps: the shares in percent of all slots, the number of sequences,
    and the number of steps.

    Raises:
        ValueError: there is no step in which a request waits.
    """
    if not shares:
        raise ValueError("requests must be more than fit the memory at once, got too few")
    parts = {
        name: round(100 * statistics.fmean(getattr(s, name) for s in shares) / num_slots, 2)
        for name in ("tokens", "reserved", "internal", "external")
    }
    batch = statistics.fmean(s.batch for s in shares)
    return parts | {"batch": round(batch, 2), "steps": len(shares)}


def replay(
    name: str, requests: Sequence[TraceRequest], num_slots: int, max_len: int
) -> dict[str, Any]:
    """Measure all allocators on one trace; return its part of the document, rows included."""
    sizes = {"max_len": max_len, "budget": BUDGET}
    rows = []
    for policy in contiguous.POLICIES:
        rows.append(contiguous_row(requests, policy, num_slots, **sizes))
        say(f"{name}, {policy}: {rows[-1]['tokens']} % hold tokens")
    for block_size in BLOCK_SIZES:
        rows.append(paged_row(requests, block_size, num_slots, **sizes))
        say(f"{name}, blocks of {block_size}: {rows[-1]['tokens']} % hold tokens")
    shared = [sharing_row(requests, n, 16, num_slots, **sizes) for n in SAMPLES]
    return {"trace": name, "requests": len(requests), "rows": rows, "sharing": shared}


def main(argv: Sequence[str]) -> int:
    """Run `tilewise bench waste`, which measures how much of the cache's memory holds tokens.

    Prints for each trace a table of allocators, and one of the memory that samples of a prompt save
    by sharing its blocks. Then it prints all results as JSON in one line, also written to the file
    that --json names; on a terminal the line is left out if there is no such file. Returns 0.
    """
    parser = Parser(prog="tilewise bench waste", description=__doc__)
    parser.add_argument(
        "--trace",
        action="append",
        metavar="FILE",
        help="CSV or JSONL, may be repeated; drawn lengths without one",
    )
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="the first N")
    parser.add_argument("--slots", type=int, default=NUM_SLOTS, metavar="N", help="of the cache")
    parser.add_argument("--max-len", type=int, default=MAX_LEN, metavar="N", help="of a sequence")
    parser.add_argument("--json", metavar="FILE", help="write the document there too")
    options = parser.parse_args(argv)
    traces = {Path(path).stem: read_trace(path) for path in options.trace or []}
    traces = traces or {"drawn": drawn_trace(4 * options.requests)}
    found = []
    for name, trace in traces.items():
        requests = fitting(trace, options.max_len, options.requests)
        found.append(replay(name, requests, options.slots, options.max_len))
        print(f"{name}: {len(requests)} requests")
        print(format_table(found[-1]["rows"], COLUMNS))
        print(format_table(found[-1]["sharing"], ["samples", "block", "saved"]))
    document = {
        "what": "shares of the cache memory in percent, means of the steps in which requests wait",
        "slots": options.slots,
        "max_len": options.max_len,
        "budget": BUDGET,
        "traces": found,
    }
    emit(document, options.json)
    return 0
