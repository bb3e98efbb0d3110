"""Where the time of a captured decode step goes, kernel by kernel, beside the roof of each part.

    python lab/profile_decode.py --json F [--shape qwen3-0.6b llama-3-8b]
        [--batch 1 32 256] [--context 1024] [--limits 4.4e12 750e12] [--batch-invariant]
        [--cache-dtype bfloat16]

The model has random weights and the cache random keys. A step is captured as the engine captures
it. Its replays are timed by CUDA events without a profiler, then traced. Which part of the model a
kernel belongs to is found in a run op by op with a marker on the device at each part's begin and
end: the kernels of a graph come in the same order.

    us        time in which the kernel ran and none before it did
    gap us    time before it in which nothing ran
    % roof    the slower of reading (weights; keys and values) and multiplying, over `us`

The last line is JSON.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

import tilewise
from tilewise import ops
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import model_directory, read_sizes
from tilewise.bench.report import emit, format_table, say
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured import decode_step
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.models import load_model
from tilewise.nn import attention, layers

MARKER = "spin_kernel"  # of torch.cuda._sleep
TIMED, TRACED = 40, 12  # replays; the context grows by one token in each
BLOCK = 16
COLUMNS = ["part", "kernels", "us", "gap us", "us each", "roof us", "% roof", "GB/s"]


class Kernel(NamedTuple):
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


class Slice(NamedTuple):
    """A kernel's share of the timeline; microseconds."""

    name: str
    own: float
    gap: float


def read_kernels(path: Path) -> list[Kernel]:
    """Return kernels, copies and fills of a Chrome trace by torch's profiler, by their begin."""
    events = json.loads(path.read_bytes())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Kernel(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("ph") == "X" and e.get("cat") in kinds
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def slices(kernels: Sequence[Kernel]) -> list[Slice]:
    """Divide the time from the first begin to the last end among kernels and gaps before them."""
    reached, found = kernels[0].start, []
    for kernel in kernels:
        gap = max(0.0, kernel.start - reached)
        own = max(0.0, kernel.end - max(kernel.start, reached))
        found.append(Slice(kernel.name, own, gap))
        reached = max(reached, kernel.end)
    return found


def labels_of(names: Sequence[str], marked: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return the part of the model of each kernel of a step.

    Args:
        names: of the step's kernels.
        marked: those of the run with markers.
        parts: what begins, or goes on, at each marker.
    """
    known, own, count = [], [], 0
    for name in marked:
        if MARKER in name:
            count += 1
        else:
            known.append(name)
            own.append(parts[count - 1] if count else "other")
    labels = ["unknown"] * len(names)
    matcher = difflib.SequenceMatcher(None, known, list(names), autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        labels[b : b + size] = own[a : a + size]
    return labels


@contextmanager
def marking(step: DecodeStep, mark: Callable[[str], None]) -> Iterator[None]:
    """Call `mark` with the name of a part of the model where it begins or goes on."""
    model: Any = step.model
    names = {id(m): n.rpartition(".")[2] for n, m in model.named_modules()}
    open_parts = ["other"]

    with ExitStack() as stack:

        def wrap(owner: Any, attribute: str, part: str | Callable[..., str]) -> None:
            function = getattr(owner, attribute)

            def call(*args: Any, **kwargs: Any) -> Any:
                open_parts.append(part if isinstance(part, str) else part(*args))
                mark(open_parts[-1])
                try:
                    return function(*args, **kwargs)
                finally:
                    open_parts.pop()
                    mark(open_parts[-1])

            if attribute in vars(owner):
                stack.callback(setattr, owner, attribute, function)
            else:
                stack.callback(delattr, owner, attribute)
            setattr(owner, attribute, call)

        def project_of(linear: nn.Module, *_: Any) -> str:
            return str(names.get(id(linear), "project"))

        for owner in (attention, layers):
            wrap(owner, "project", project_of)
            wrap(owner, "project_in_parts", project_of)
        for name, part in {
            "paged_attention": "attention",
            "rope_write_kv_cache": "rope and write",
            "rms_norm": "norm",
            "add_rms_norm": "norm",
            "gated_mul": "activation",
            "sample_tokens": "sampling",
        }.items():
            wrap(ops, name, part)
        wrap(ops.PagedPlan, "update", "attention's plan")
        wrap(decode_step, "begin_decode", "begin")
        wrap(decode_step, "start_decode", "begin")
        wrap(decode_step, "finish_decode", "finish")
        wrap(decode_step, "draw_decode", "sampling")
        wrap(model, "head_logits", "head")
        wrap(model.embed_tokens, "forward", "embedding")
        wrap(model.rotary, "forward", "angles")
        yield


def costs(roof: Roof, rows: int, context: int) -> dict[str, tuple[float, float]]:
    """Return bytes that a step must read, and FLOPs, by part of the model."""
    sizes = roof.sizes
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    found: dict[str, tuple[float, float]] = {}
    for name, (inner, outer) in zip(names, sizes.products, strict=True):
        weights = sizes.num_layers * inner * outer
        found[name] = (weights * roof.weight_bytes, 2.0 * rows * weights)
    head = sizes.head[0] * sizes.head[1]
    found["head"] = (head * roof.weight_bytes, 2.0 * rows * head)
    cached = float(rows * context * sizes.cache_bytes(roof.cache_bytes))
    per_token = 4 * sizes.num_layers * sizes.num_q_heads * sizes.head_dim
    found["attention"] = (cached, float(per_token * rows * context))
    return found


def table_of(
    timeline: Sequence[Slice], labels: Sequence[str], steps: int, roof: Roof,
    rows: int, context: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each part of the model, the slowest first, per step."""
    counts: defaultdict[str, int] = defaultdict(int)
    own: defaultdict[str, float] = defaultdict(float)
    gaps: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
    for at, each in enumerate(timeline):
        part = labels[at % len(labels)]
        counts[part] += 1
        own[part] += each.own / steps
        gaps[part] += each.gap / steps
        kernel = kernels[part].setdefault(each.name, [0, 0.0, 0.0])
        kernel[0] += 1 / steps
        kernel[1] += each.own / steps
        kernel[2] += each.gap / steps
    needed, found = costs(roof, rows, context), []
    for part in sorted(own, key=lambda name: -(own[name] + gaps[name])):
        row: dict[str, Any] = {
            "part": part,
            "kernels": counts[part] / steps,
            "us": own[part],
            "gap us": gaps[part],
            "us each": own[part] * steps / counts[part],
        }
        if part in needed:
            read, flops = needed[part]
            least = 1e6 * max(read / roof.read_bytes, flops / roof.flops)
            row |= {"bytes": read, "roof us": least, "% roof": 100 * least / own[part]}
            row["GB/s"] = 1e-3 * read / own[part]
        row["by kernel"] = [
            {"name": name[:120], "count": round(count, 2), "us": us, "gap us": gap}
            for name, (count, us, gap) in sorted(kernels[part].items(), key=lambda i: -i[1][1])
        ]
        found.append(row)
    return found


def decoding(
    rows: int, context: int, num_steps: int, first: int, temperature: float = 0.6
) -> Batch:
    """Return a step of sequences with `context` tokens, each with blocks for `num_steps` more."""
    blocks = -(-(context + num_steps) // BLOCK)
    sampling = SamplingParams(temperature=temperature)
    sequences = tuple(
        ScheduledSequence(
            seq_id=first + row, token_ids=(row % 1000,), start=context - 1,
            block_ids=range(row * blocks, (row + 1) * blocks), num_samples=1, sampling=sampling,
            seeds=(row,), num_generated=1,
        )
        for row in range(rows)
    )  # fmt: skip
    return Batch(sequences, left=tuple(range(first)))


def traced(run: Callable[[], None], folder: Path) -> list[Kernel]:
    """Run something under torch's profiler; return what the device did."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return read_kernels(path)


def profile_step(
    runner: DeviceRunner, rows: int, context: int, first: int, roof: Roof, folder: Path
) -> dict[str, Any]:
    """Time and trace the decode step of so many rows."""
    num_steps = TIMED + TRACED + 8
    handle = runner.submit(decoding(rows, context, num_steps, first))
    handle.result()
    bucket = next(b for b in runner.buckets if b >= rows)
    step, state = runner.step_of(bucket), runner.rows

    def rewind() -> None:
        state.position[:rows].fill_(context - 1)

    def replay(count: int) -> list[float]:
        rewind()
        began = []
        for _ in range(count):
            at = time.perf_counter()
            step.run()
            began.append(time.perf_counter() - at)
        return began

    replay(8)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    host = replay(TIMED)
    events[1].record()
    torch.cuda.synchronize()
    step_us = 1e3 * events[0].elapsed_time(events[1]) / TIMED
    rewind()
    torch.cuda.synchronize()

    def trace() -> None:
        for _ in range(TRACED):
            step.run()

    kernels = traced(trace, folder)
    size, rest = divmod(len(kernels), TRACED)
    if rest or not size:
        raise RuntimeError(f"{TRACED} steps must be alike, got {len(kernels)} kernels in all")
    timeline = slices(kernels)[size:]  # the first step's begin is the profiler's
    parts: list[str] = []

    def mark(part: str) -> None:
        parts.append(part)
        torch.cuda._sleep(1)

    def op_by_op() -> None:
        with torch.inference_mode(), marking(step, mark):
            step._compute()

    rewind()
    marked = traced(op_by_op, folder)
    names = [kernel.name for kernel in kernels[:size]]
    labels = labels_of(names, [kernel.name for kernel in marked], parts)
    table = table_of(timeline, labels, TRACED - 1, roof, rows, context)
    busy = sum(each.own for each in timeline) / (TRACED - 1)
    gaps = sum(each.gap for each in timeline) / (TRACED - 1)
    between = sum(each.gap for each in timeline[::size]) / (TRACED - 1)
    least = 1e6 * roof.step(rows, rows * context)
    return {
        "batch": rows,
        "bucket": bucket,
        "context": context,
        "step us": step_us,
        "roof us": least,
        "% roof": 100 * least / step_us,
        "tok/s": 1e6 * rows / step_us,
        "kernels a step": size,
        "traced: kernels us": busy,
        "traced: gaps us": gaps,
        "traced: of these between steps us": between,
        "replay's host us": 1e6 * median(host),
        "unknown kernels": labels.count("unknown"),
        "parts": table,
    }


def fill(storage: KVStorage) -> None:
    """Write normal keys and values; those of 8 bits have scales between 0.01 and 0.02."""
    torch.manual_seed(0)
    for layer in storage.layers:
        for x in layer:
            if x.dim() == 3:
                x.uniform_(0.01, 0.02)
            elif x.dtype.itemsize == 1:
                x.copy_(32 * torch.randn(x.shape, dtype=torch.bfloat16, device=x.device))
            else:
                x.normal_()


def profile_shape(options: argparse.Namespace, shape: str, folder: Path) -> list[dict[str, Any]]:
    """Profile the steps of one model."""
    began = time.perf_counter()
    directory, is_random = model_directory(shape, folder)
    sizes = read_sizes(json.loads((directory / "config.json").read_text()))
    device = torch.device("cuda")
    model = load_model(directory, dtype="bfloat16", device=device, random_weights=is_random)
    cache_bytes = getattr(torch, options.cache_dtype).itemsize
    roof = Roof(sizes, *options.limits, cache_bytes=cache_bytes)
    longest = options.context + TIMED + TRACED + 8
    spec = cache_spec(model.config, BLOCK, getattr(torch, options.cache_dtype), longest)
    storage = KVStorage(spec, max(options.batch) * -(-longest // BLOCK), device)
    fill(storage)
    if options.batch_invariant:
        model.use_invariant_linears()
    runner = DeviceRunner(
        model,
        storage,
        max_num_seqs=max(options.batch),
        max_model_len=longest,
        batch_invariant=options.batch_invariant,
    )
    runner.captures = True
    torch.cuda.synchronize()
    say(f"{shape}: loaded in {time.perf_counter() - began:.1f} s")
    rows, first = [], 0
    for batch in options.batch:
        began = time.perf_counter()
        row = {"shape": shape} | profile_step(runner, batch, options.context, first, roof, folder)
        first += batch
        rows.append(row)
        say(f"{shape}, batch {batch}: measured in {time.perf_counter() - began:.1f} s")
        print(
            f"{shape}, batch {batch}: {row['step us']:,.0f} us a step = {row['% roof']:.1f} % of "
            f"the roof; {row['kernels a step']} kernels, {row['traced: kernels us']:,.0f} us of "
            f"kernels and {row['traced: gaps us']:,.0f} us of gaps under the profiler"
        )
        print(format_table(row["parts"], COLUMNS), flush=True)
    return rows


def main() -> None:
    """Measure, print tables, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b", "llama-3-8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--limits", nargs=2, type=float, default=[4.4e12, 750e12], metavar=("BYTES", "FLOPS")
    )
    parser.add_argument("--cache-dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true", help="as `LLM` takes it")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can see")
    document: dict[str, Any] = {
        "version": tilewise.__version__,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "limits": options.limits,
        "batch_invariant": options.batch_invariant,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            document["rows"] += profile_shape(options, shape, Path(folder))
            gc.collect()
            torch.cuda.empty_cache()
    emit(document, options.json)


if __name__ == "__main__":
    main()
