"""Serve a trace in virtual time: `tilewise simulate`.

The engine's own scheduler and block tables run every step of every request; only the model is a
clock, `tilewise.cost.StepCost`, with the profile of a machine. Beside blocks, contiguous allocation
of the same memory serves the same requests under the same scheduler. Numbers depend on the trace,
the model and the profile, not on the machine that simulates.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewise.bench.contiguous import POLICIES, ContiguousTables, use_tables
from tilewise.bench.engines.shapes import SHAPES, model_directory
from tilewise.bench.fleet import ROUTERS, Fleet, Place, asked_of, places_of
from tilewise.bench.report import emit, format_table, say, write
from tilewise.bench.trace import (
    TraceRequest,
    drawn_trace,
    fitting,
    poisson,
    prompt_ids,
    read_trace,
    with_prefix,
)
from tilewise.cost import (
    MACHINES,
    Machine,
    Sizes,
    StepCost,
    machine,
    read_machine,
    read_sizes,
    recompute_seconds,
)
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tables.state_tables import StateLimits
from tilewise.engine.virtual import Arrival, Steps, Timing, VirtualEngine
from tilewise.flags import Parser

__all__ = ["ALLOCATORS", "MODELS", "Setting", "arrivals_of", "model_sizes", "report", "serve"]

ALLOCATORS = (*POLICIES, "paged", "prefix")  # blocks without and with it
# What neither weights nor cache take: temporaries of a step and graphs. 3.3 GB of Qwen3-0.6B's
# shape on an H200 (lab/results/engine_h200.json).
WORKSPACE_BYTES = 3.5e9
MEMORY_SHARE = 0.9  # LLM's gpu_memory_utilization
COLUMNS = [
    "gpus",
    "parallel",
    "replicas",
    "routing",
    "allocator",
    "rate",
    "n",
    "prefix",
    "block",
    "budget",
    "options",
    "req/s",
    "tok/s",
    "ttft p50",
    "ttft p90",
    "tpot p50",
    "s/token",
    "running",
    "queue",
    "preempted",
    "again %",
    "hit %",
    "waste %",
]

MODELS: dict[str, Sizes] = {name: read_sizes(config) for name, config in SHAPES.items()} | {
    # Llama 3.1's: Llama 3's sizes and more positions.
    "llama-8b": replace(read_sizes(SHAPES["llama-3-8b"]), max_len=131_072),
    "llama-70b": replace(read_sizes(SHAPES["llama-3-70b"]), max_len=131_072),
    # The model of the PagedAttention paper's figures: Zhang et al. 2022, table 1.
    "opt-13b": Sizes(
        products=((5120, 15_360), (5120, 5120), (5120, 20_480), (20_480, 5120)),
        head=(5120, 50_272),
        num_layers=40,
        num_q_heads=40,
        num_kv_heads=40,
        head_dim=128,
        vocab_size=50_272,
        max_len=2048,
    ),
}


def model_sizes(name: str) -> Sizes:
    """Return the sizes of a model: one of `MODELS`, "story", or a checkpoint directory.

    Raises:
        ValueError: `name` is none of these.
    """
    if name in MODELS:
        return MODELS[name]
    try:
        directory, _ = model_directory(name, Path())
    except ValueError:
        known = ", ".join((*MODELS, "story"))
        raise ValueError(
            f"--model must be {known} or a directory with config.json, got {name!r}"
        ) from None
    return read_sizes(json.loads((directory / "config.json").read_text()))


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a machine, and how it is served.

    Attributes:
        sizes, machine, dtype: the arguments of StepCost.
        num_slots: tokens that the cache holds; None is what the machine's memory leaves.
        block_size: tokens of a block.
        max_num_seqs: sequences that run at once.
        budget: tokens of a step.
        max_len: tokens of a sequence; None is the model's.
        overlap: True to submit a step while one runs; None takes the profile's.
        scheduler_options: keywords of Scheduler, which count before the fields above.
        tensor_parallel: machines that hold a shard of the model each.
        num_checkpoints: checkpoints of states that are kept, in a model whose layers keep states;
            None is one for each of max_num_seqs sequences and one for every `checkpoint_tokens`
            tokens of the cache.
        checkpoint_tokens: tokens between two checkpoints of a long text.
    """

    sizes: Sizes
    machine: Machine
    dtype: str = "bfloat16"
    num_slots: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    budget: int = 8192
    max_len: int | None = None
    overlap: bool | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel: int = 1
    num_checkpoints: int | None = None
    checkpoint_tokens: int = 1024

    @property
    def states(self) -> StateLimits | None:
        """The number of checkpoints of states and the tokens between two; None for a model whose
        layers keep none."""
        if self.sizes.states is None:
            return None
        count = self.num_checkpoints
        if count is None:
            count = self.max_num_seqs + -(-self.slots // self.checkpoint_tokens)
        return StateLimits(count, self.checkpoint_tokens)

    @property
    def slots(self) -> int:
        """The number of tokens that the cache holds: `num_slots`, or as many as the memory of a
        machine holds beside the weights, temporaries and states.

        Raises:
            ValueError: the weights leave no memory.
        """
        if self.num_slots is not None:
            return self.num_slots
        shard = self.sizes.shard(self.tensor_parallel)
        free = self.machine.memory_bytes * MEMORY_SHARE - 2 * shard.parameters
        free -= WORKSPACE_BYTES
        token = float(shard.cache_bytes())
        if shard.states is not None:
            own = shard.states.checkpoint_bytes
            free -= self.max_num_seqs * shard.states.slot_bytes
            if self.num_checkpoints is None:  # one for each sequence, and some for each token
                free, token = free - self.max_num_seqs * own, token + own / self.checkpoint_tokens
            else:
                free -= self.num_checkpoints * own
        slots = int(free / token)
        if slots < self.block_size:
            there, taken = self.machine.memory_bytes, 2 * shard.parameters + WORKSPACE_BYTES
            raise ValueError(
                f"--model must fit {MEMORY_SHARE:g} of a machine's {there / 1e9:.1f} GB with a "
                f"block of the cache, got one that takes {taken / 1e9:.1f} GB"
            )
        return slots

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.max_len or self.sizes.max_len


def arrivals_of(
    requests: Sequence[TraceRequest],
    n: int | None = None,
    ids_of: Callable[[TraceRequest, int], list[int]] = prompt_ids,
) -> Iterator[Arrival]:
    """Yield the requests of a trace with the times of their arrival, in the trace's order.

    Args:
        n: the number of samples of each prompt; None takes the trace's.
        ids_of: a function from a request and its number to the token ids of its prompt.
    """
    for number, request in enumerate(requests):
        params = SamplingParams(n=n or request.n, max_tokens=request.output, ignore_eos=True)
        ids = ids_of(request, number)
        yield Arrival(
            request.seconds,
            Request(
                str(number),
                ids,
                params,
                salt=request.salt,
                user=request.user,
                priority=request.priority,
            ),
        )


def serve(
    requests: Sequence[TraceRequest],
    setting: Setting,
    allocator: str = "prefix",
    n: int | None = None,
    ids_of: Callable[[TraceRequest, int], list[int]] = prompt_ids,
) -> VirtualEngine:
    """Serve a trace in virtual time and return the engine, with the timings of its requests and
    steps.

    Args:
        requests: the requests of the trace.
        setting: the model, the machine and the options.
        allocator: the name of a way to allocate the cache, one of ALLOCATORS.
        n, ids_of: as of `arrivals_of`.

    Raises:
        ValueError: the allocator is unknown, or the setting does not fit.
        TypeError: scheduler_options has a keyword that Scheduler does not take.
    """
    engine = new_engine(setting, allocator)
    engine.run(arrivals_of(requests, n, ids_of))
    return engine


def new_engine(setting: Setting, allocator: str = "prefix") -> VirtualEngine:
    """Return a virtual engine that has served nothing.

    Raises:
        ValueError: the allocator is unknown or not for this model, or the setting does not fit.
    """
    if allocator not in ALLOCATORS:
        raise ValueError(f"allocator must be one of {', '.join(ALLOCATORS)}, got {allocator!r}")
    is_paged = allocator not in POLICIES
    block_size = setting.block_size if is_paged else 1
    options: dict[str, Any] = {
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.budget,
        "max_model_len": setting.longest,
        "enable_prefix_caching": allocator == "prefix",
    }
    if setting.sizes.states is not None:
        if not is_paged:
            raise ValueError(
                f"allocator must be paged or prefix for layers that keep states, got {allocator!r}"
            )
        limits = setting.states
        assert limits is not None
        options["states"] = limits if allocator == "prefix" else replace(limits, num_checkpoints=0)
    options |= setting.scheduler_options
    scheduler = Scheduler(setting.slots // block_size, block_size, **options)
    slots_taken = None
    if not is_paged:
        tables = ContiguousTables(setting.slots, allocator, setting.longest)
        use_tables(scheduler, tables)

        def slots_taken() -> int:
            return tables.pieces.slots_taken

    overlap = setting.machine.overlaps_steps if setting.overlap is None else setting.overlap
    cost = StepCost(
        setting.sizes, setting.machine, dtype=setting.dtype, tensor_parallel=setting.tensor_parallel
    )
    engine = VirtualEngine(scheduler, cost, overlap=overlap, slots_taken=slots_taken)
    _tell(scheduler, engine, cost, setting)
    return engine


def serve_fleet(
    requests: Sequence[TraceRequest],
    setting: Setting,
    place: Place,
    allocator: str = "prefix",
    n: int | None = None,
) -> Fleet:
    """Serve a trace in virtual time by several replicas behind a router; return the fleet.

    Args:
        requests: the requests of the trace.
        setting: the model, the machine and the options of each replica's engine.
        place: the number of replicas and the kind of router.
        allocator: the name of a way to allocate the cache, one of `ALLOCATORS`.
        n: the number of samples of each prompt; None takes the trace's.

    Raises:
        ValueError: the machine has no room for a cache beside the weights.
    """
    fleet = Fleet(
        lambda: new_engine(setting, allocator),
        place.replicas,
        ROUTERS[place.routing](),
        setting.slots,
    )
    fleet.run(zip(arrivals_of(requests, n), map(asked_of, requests), strict=True))
    return fleet


def report_fleet(fleet: Fleet) -> dict[str, Any]:
    """Return the statistics of a run over all replicas: counts are summed, shares averaged."""
    used = [engine for engine in fleet.engines if engine.timings]
    each = [_of_steps(engine.steps, engine) for engine in used]
    told = of_timings([t for engine in used for t in engine.timings.values()])
    for name in ("steps", "preempted", "computed", "again", "copied blocks", "swapped tokens"):
        told[name] = sum(row[name] for row in each)
    for name in ("running", "queue", "busy %", "waste %"):
        told[name] = statistics.fmean(row[name] for row in each)
    stats = [engine.scheduler.stats() for engine in used]
    told["queue max"] = max(row["queue max"] for row in each)
    told["again %"] = 100 * told["again"] / told["computed"]
    told["hit %"] = (
        100
        * sum(s.prefix_hit_tokens for s in stats)
        / max(sum(s.prefix_query_tokens for s in stats), 1)
    )
    told["busiest"] = max(fleet.sent) * len(fleet.sent) / sum(fleet.sent)
    return told


def _tell(scheduler: Scheduler, engine: VirtualEngine, cost: StepCost, setting: Setting) -> None:
    """Give a scheduler with a clock the engine's virtual time, and one that weighs swapping the
    rates of the machine: prompt tokens a second, and blocks a second over the link."""
    if hasattr(scheduler, "clock"):
        scheduler.clock = lambda: engine.now
    rates = getattr(getattr(scheduler, "preemption", None), "rates", None)
    if rates is not None and setting.machine.link_bandwidth:
        tokens = setting.budget
        rates.prefill_tokens = tokens / recompute_seconds(cost, tokens, tokens)
        block = cost.cache_bytes * setting.block_size
        rates.link_blocks = setting.machine.link_bandwidth / block


def report(engine: VirtualEngine) -> dict[str, Any]:
    """Return the statistics of a run: rates a second, times in seconds, shares in percent."""
    timings = list(engine.timings.values())
    return of_timings(timings) | _of_steps(engine.steps, engine)


def of_timings(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the statistics of requests: rates and latencies.

    TTFT is from arrival to the first token, TPOT between two tokens of a sample in the mean, and
    normalised latency from arrival to the last token for each token of the longest sample (Kwon et
    al. 2023, section 6.1).

    Raises:
        ValueError: no request was served.
    """
    done = [t for t in timings if not t.refusal]
    if not done:
        raise ValueError("requests must hold one that can be served, got none")
    seconds = max(t.last_token for t in done) - min(t.arrival for t in done)
    first = sorted(t.first_token - t.arrival for t in done)
    long = [t for t in done if t.output_tokens > t.samples]
    each = sorted((t.last_token - t.first_token) / (t.output_tokens / t.samples - 1) for t in long)
    latency = [(t.last_token - t.arrival) / (t.output_tokens / t.samples) for t in done]
    output = sum(t.output_tokens for t in done)
    found: dict[str, Any] = {
        "requests": len(done),
        "refused": len(timings) - len(done),
        "seconds": seconds,
        "req/s": len(done) / seconds,
        "tok/s": output / seconds,
        "total tok/s": (output + sum(t.prompt_tokens for t in done)) / seconds,
        "s/token": statistics.fmean(latency),
        "s/token p90": _percentile(sorted(latency), 90),
    }
    for percent in (50, 90, 99):
        found[f"ttft p{percent}"] = _percentile(first, percent)
        found[f"tpot p{percent}"] = _percentile(each, percent) if each else None
    return found


def _of_steps(steps: Steps, engine: VirtualEngine) -> dict[str, Any]:
    spans = [b - a for a, b in itertools.pairwise([0.0, *steps.ended])]
    whole = sum(spans)
    stats = engine.scheduler.stats()
    weighed = [0.0, 0.0]  # slots that hold a token, slots that sequences have, by time
    last = (steps.ended[-1], 0, 0)
    for (begin, held, taken), (end, _, _) in itertools.pairwise([*steps.memory, last]):
        weighed[0] += (end - begin) * held
        weighed[1] += (end - begin) * taken
    return {
        "steps": len(spans),
        "running": sum(map(_times, steps.sequences, spans)) / whole,
        "queue": sum(map(_times, steps.waiting, spans)) / whole,
        "queue max": max(steps.waiting),
        "busy %": 100 * sum(steps.device) / steps.ended[-1],
        "preempted": stats.num_preemptions,
        "computed": steps.computed,
        "again": steps.again,
        "again %": 100 * steps.again / steps.computed,
        "copied blocks": steps.copied,
        "swapped tokens": steps.swapped,
        "hit %": 100 * stats.prefix_hit_tokens / max(stats.prefix_query_tokens, 1),
        "waste %": 100 * (1 - weighed[0] / weighed[1]) if weighed[1] else 0.0,
    }


def _times(a: float, b: float) -> float:
    return a * b


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values; 0 if there are none."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def sweep(
    requests: Sequence[TraceRequest], setting: Setting, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Serve the requests once for each combination of the values that the command line lists, and
    yield a row of results for each; progress goes to standard error."""
    choices = _choices(options.scheduler)
    for prefix, n, block_size, budget, chosen, allocator, place, rate in itertools.product(
        options.prefix,
        options.n or [None],
        options.block_size,
        options.max_batched_tokens,
        choices,
        options.allocators,
        places_of(options),
        options.rates or [None],
    ):
        is_paged = allocator not in POLICIES
        if not is_paged and block_size != options.block_size[0]:
            continue  # it has no blocks
        trace = with_prefix(_enough(requests, options.requests_per_gpu, place.gpus), prefix)
        if rate is not None and options.rates_per_gpu:
            rate *= place.gpus
        if rate is not None:
            trace = poisson(trace, rate, options.seed)
        at = replace(
            setting,
            block_size=block_size,
            budget=budget,
            scheduler_options=chosen,
            tensor_parallel=place.tensor_parallel,
        )
        started = time.process_time()
        if place.replicas > 1:
            told = report_fleet(serve_fleet(trace, at, place, allocator, n))
        else:
            told = report(serve(trace, at, allocator, n))
        said = ",".join(f"{key}={value}" for key, value in chosen.items()) or None
        row = {
            "allocator": allocator,
            "rate": rate,
            "n": n,
            "prefix": prefix or None,
            "block": block_size if is_paged else None,
            "budget": budget,
            "options": said,
        }
        if options.replicas or options.gpus or options.tensor_parallel:
            row = place.as_row() | row | {"slots": at.slots}
        row |= told
        say(
            f"{place}{allocator}, rate {rate or 'of the trace'}: {row['seconds']:.1f} s served in "
            f"{time.process_time() - started:.1f} s, {row['s/token']:.3g} s/token"
        )
        yield row


def _enough(
    requests: Sequence[TraceRequest], each: int | None, gpus: int
) -> Sequence[TraceRequest]:
    """Return `each` requests for each GPU; a shorter trace is repeated, None takes it as it is."""
    if each is None:
        return requests
    return [*itertools.islice(itertools.cycle(requests), each * gpus)]


def _choices(pairs: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of the scheduler options in texts KEY=VALUE,VALUE, as keyword
    arguments of Scheduler.

    Raises:
        ValueError: a text has another form, or its key is no keyword of Scheduler.
    """
    known = inspect.signature(Scheduler.__init__).parameters
    lists = []
    for pair in pairs:
        key, sign, values = pair.partition("=")
        if not sign or key not in known:
            raise ValueError(
                f"--scheduler must be KEY=VALUE with a keyword of Scheduler, got {pair!r}"
            )
        lists.append([(key, _value(text)) for text in values.split(",")])
    return [dict(chosen) for chosen in itertools.product(*lists)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tilewise simulate", description=__doc__)
    trace = parser.add_argument_group("what is asked")
    trace.add_argument("--trace", metavar="FILE", help="CSV or JSONL; drawn lengths without one")
    trace.add_argument(
        "--requests", type=int, metavar="N", help="the first N that fit the model; 1,000 drawn ones"
    )
    trace.add_argument(
        "--rates",
        type=float,
        nargs="+",
        metavar="R",
        help="Poisson arrivals of R a second in place of the trace's",
    )
    trace.add_argument("--seed", type=int, default=0, metavar="N", help="of these arrivals")
    trace.add_argument("--n", type=int, nargs="+", metavar="N", help="samples of each prompt")
    trace.add_argument(
        "--prefix",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="tokens that all prompts begin with, before their own",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpu", default="h200", help=f"{', '.join(MACHINES)} (default: h200)")
    where.add_argument("--machine", metavar="FILE", help="a profile by tilewise bench machine")
    where.add_argument(
        "--model",
        default="llama-8b",
        help=f"{', '.join(MODELS)}, story or a directory (default: llama-8b)",
    )
    where.add_argument("--dtype", default="bfloat16", help="of the products")
    where.add_argument(
        "--tensor-parallel", type=int, nargs="+", metavar="N", help="GPUs that share a model each"
    )
    where.add_argument(
        "--replicas", type=int, nargs="+", metavar="N", help="servers behind one address"
    )
    where.add_argument(
        "--gpus", type=int, nargs="+", metavar="N", help="the same, counted in GPUs of all replicas"
    )
    where.add_argument(
        "--requests-per-gpu",
        type=int,
        metavar="N",
        help="requests for each GPU, the trace again from its beginning where it has fewer",
    )
    where.add_argument(
        "--routing",
        nargs="+",
        choices=ROUTERS,
        default=["prefix"],
        help="which replica a request goes to (default: prefix)",
    )
    where.add_argument(
        "--rates-per-gpu", action="store_true", help="--rates are for each GPU of all replicas"
    )
    how = parser.add_argument_group("how it is served")
    how.add_argument(
        "--allocators",
        nargs="+",
        default=["prefix"],
        choices=ALLOCATORS,
        help="contiguous (longest, next power of two, true length), blocks, with prefix cache",
    )
    how.add_argument("--block-size", type=int, nargs="+", default=[16], metavar="N")
    how.add_argument("--slots", type=int, metavar="N", help="tokens that the cache holds")
    how.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    how.add_argument("--max-batched-tokens", type=int, nargs="+", metavar="N", help="of a step")
    how.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a sequence")
    how.add_argument(
        "--scheduler",
        action="append",
        default=[],
        metavar="KEY=VALUE[,VALUE]",
        help="a keyword of Scheduler, may be repeated; several values are compared",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, as they come")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `tilewise simulate`, which serves a trace in virtual time.

    Prints a table with a row for each combination of the options' values; then all results as JSON
    in one line, unless standard output is a terminal and no --json names a file for them. Returns
    0.
    """
    options = _parser().parse_args(argv)
    profile = read_machine(options.machine) if options.machine else machine(options.gpu)
    setting = Setting(
        model_sizes(options.model),
        profile,
        options.dtype,
        num_slots=options.slots,
        max_num_seqs=options.max_num_seqs,
        max_len=options.max_model_len,
    )
    if options.requests_per_gpu and not options.rates:
        raise ValueError(
            "--requests-per-gpu must come with --rates, as a trace that is repeated has no "
            f"times of its own, got {options.requests_per_gpu} alone"
        )
    if options.requests_per_gpu is not None and options.requests_per_gpu < 1:
        raise ValueError(f"--requests-per-gpu must be at least 1, got {options.requests_per_gpu}")
    requests = read_trace(options.trace) if options.trace else drawn_trace(options.requests or 1000)
    longest = setting.longest - max(options.prefix)
    fit = fitting(requests, longest, options.requests or len(requests))
    if not options.max_batched_tokens:
        options.max_batched_tokens = [8192 if profile.captures else 2048]
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "what": "requests served in virtual time: rates a second, times in seconds",
        "trace": Path(options.trace).name if options.trace else "drawn",
        "requests": len(fit),
        "model": options.model,
        "machine": profile.as_dict(),
    }
    for row in sweep(fit, setting, options):
        rows.append(row)
        document |= {
            "slots": rows[0].get("slots") or setting.slots,
            "max_num_seqs": setting.max_num_seqs,
            "max_len": setting.longest,
            "rows": rows,
        }
        if options.json is not None:
            write(document, options.json)
    shown = [c for c in COLUMNS if any(row.get(c) is not None for row in rows)]
    print(f"{profile.name}, {options.model}: a cache of {document['slots']:,} tokens")
    print(format_table(rows, shown))
    emit(document, options.json)
    return 0
