"""Products of few rows with the weights of two models: cuBLAS, our Triton kernel, Hopper's own.

    python lab/linear_rows.py --json FILE [--seconds 110] [--weights o=2560x4096 ...]

Every form of Hopper's kernel (`RowsTile`), and for small weights of the Triton kernel
(`LinearTile`), is checked against float64, its rows for the same bits at every number of rows, and
its results in a graph for those outside; then timed in a CUDA graph over copies of the weight that
together are several times the L2 cache. All forms are compiled first, by
processes that need no GPU; each weight is measured by a process of its own, one at a time, so that
one that fails or hangs loses its own rows alone. A row of the JSON is one (weight, rows, form); a
person reads the best ones and commits them to `kernels.tiles.linear_rows`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.children import spawning
from tilewise.kernels.tiles import linear_rows as tiles
from tilewise.kernels.tiles.linear import MOST_ROWS, LinearTile
from tilewise.kernels.tiles.linear_rows import RowsTile

# (name, outputs, channels)
WEIGHTS = (
    ("llama gate_up", 28672, 4096),
    ("llama down", 4096, 14336),
    ("llama o", 4096, 4096),
    ("llama qkv", 6144, 4096),
    ("qwen qkv", 4096, 1024),
    ("qwen o", 1024, 2048),
    ("qwen gate_up", 6144, 1024),
    ("qwen down", 1024, 3072),
)
SWEPT_ROWS = (32, 1)  # with every form
OTHER_ROWS = (16, 64, 8, 4, 2)  # with the best ones
MANY_ROWS = 256
BEST = 3
ROOF = 4.4e12  # bytes a second
COPIES_BYTES, MOST_COPIES = 300 << 20, 64
CALLS, REPEATS = 20, 7
HANG_S = 40.0
# (tile_n, tile_k, CTAs of a multiprocessor) and how many CTAs a launch may have
FORMS = ((64, 64, 3), (64, 64, 4), (64, 128, 2), (64, 128, 3), (128, 64, 2), (128, 64, 1),
         (128, 128, 1), (128, 128, 2), (256, 64, 1))  # fmt: skip
PARTS = (1, 2, 3, 4, 6, 7, 8, 14, 16)
SMS, FEWEST_CTAS = 132, 96
SMALL, FEWEST_OF_SMALL = 1 << 23, 60  # elements of a weight whose parts cost more than they gain
# The Triton kernel's forms for weights of so few elements: outputs of a program, channels of a
# slice, warps that take slices in turn, parts.
PORTABLE_FORMS = ((8, 256, 4), (8, 256, 2), (8, 128, 4), (16, 256, 2), (16, 128, 4), (16, 256, 4),
                  (32, 128, 1), (8, 512, 4))  # fmt: skip
PORTABLE_PARTS = (1, 2, 4)
_CONTEXT = multiprocessing.get_context("spawn")
Form = RowsTile | LinearTile
Asked = list[tuple[int, str, Form | None]]


def forms_of(outputs: int, channels: int) -> Iterator[RowsTile]:
    """Yield the forms to try: one wave of CTAs, which is most of the multiprocessors at least."""
    seen = set()
    for tile_n, tile_k, ctas in FORMS:
        for parts in PARTS:
            form = RowsTile(tile_n, tile_k, parts, ctas)
            count = -(-outputs // tile_n) * parts
            units = -(-channels // tiles.PART_UNIT)
            fewest = FEWEST_OF_SMALL if outputs * channels < SMALL else FEWEST_CTAS
            if tiles.parts_of(form, channels) != parts or not fewest <= count <= SMS * ctas:
                continue
            if units % parts and parts not in (1, 3):  # the last part would be far shorter
                continue
            stages = tuple(tiles.stages_of(form, rows, channels) for rows in (8, 32))
            same = (tile_n, tile_k, parts, stages)
            if 0 not in stages and same not in seen:
                seen.add(same)
                yield form


def portable_forms_of(outputs: int, channels: int) -> Iterator[LinearTile]:
    """Yield the forms of the Triton kernel to try for a small weight; none for a large one."""
    if outputs * channels >= SMALL:
        return
    for tile_n, tile_k, ways in PORTABLE_FORMS:
        for parts in PORTABLE_PARTS:
            if parts * ways * tile_k > channels or -(-outputs // tile_n) * parts > 4 * SMS:
                continue
            yield LinearTile(tile_n, tile_k, ways, parts, ways if ways > 1 else 4, 3)


class _Stub:
    """A CUDA driver that knows its target and nothing else."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @staticmethod
    def is_active() -> bool:
        return False

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def prepare_compiling() -> None:
    """Make this process compile what others launch: it needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_Stub(GPUTarget("cuda", 90, 32)))
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only


def compile_one(job: tuple[int, int, int, Form | None]) -> str | None:
    """Compile a form, or our Triton kernel; return what went wrong."""
    outputs, channels, rows, form = job
    from tilewise.kernels.gluon.step import linear as own
    from tilewise.kernels.triton.step import linear as portable

    x, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((rows, channels), (outputs, channels))
    )
    try:
        if isinstance(form, RowsTile):
            own.launch(x, weight, None, form)
        else:
            portable.launch(x, weight, None, form)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return None


class Compilers:
    """Processes that compile, and what they could not."""

    def __init__(self, count: int) -> None:
        with spawning():
            self._pool = _CONTEXT.Pool(count, prepare_compiling)
        self._done: set[Any] = set()
        self.failed: list[str] = []

    def run(self, jobs: Sequence[tuple[int, int, int, Form | None]]) -> None:
        """Compile what has not been compiled for a weight of these divisors."""
        waiting = {}
        for outputs, channels, rows, form in jobs:
            padded = tiles.row_tile(rows)
            if not isinstance(form, RowsTile):  # has tiles of its own for each weight
                kind: tuple[Any, ...] = (outputs, channels, rows > 16, form)
            else:
                if padded > tiles.most_rows(form):
                    continue
                stages = tiles.stages_of(form, padded, channels)
                if stages == 0:
                    continue
                kind = (padded, stages, form._replace(ctas=0))
            if kind not in self._done:
                self._done.add(kind)
                waiting[kind] = (outputs, channels, rows, form)
        results = [(job, self._pool.apply_async(compile_one, (job,))) for job in waiting.values()]
        for job, result in results:
            try:
                wrong = result.get(60)
            except Exception as error:
                wrong = f"{type(error).__name__}"
            if wrong is not None:
                self.failed.append(f"{job}: {wrong}")

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()


class Problem:
    """A weight, its copies, and the true product of up to MANY_ROWS rows."""

    def __init__(self, outputs: int, channels: int, where: str = "cuda") -> None:
        self.size = outputs * channels * 2
        generator = torch.Generator(where).manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

        self.x = draw(MANY_ROWS, channels)
        first = draw(outputs, channels)
        count = min(MOST_COPIES, max(2, -(-COPIES_BYTES // self.size)))
        self.weights = [first, *(first.clone() for _ in range(count - 1))]
        self.truth = F.linear(self.x.double(), first.double())
        self.eager = F.linear(self.x, first)
        self.bits: dict[Form, Tensor] = {}


def call_of(name: str, form: Form | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product that a row of the JSON is about."""
    from tilewise.kernels.gluon.step import linear as own
    from tilewise.kernels.triton.step import linear as portable

    if name == "cublas":
        return F.linear
    if name == "triton":
        return lambda x, weight: portable.launch(x, weight, None, form)
    return lambda x, weight: own.launch(x, weight, None, form)


def measure(problem: Problem, rows: int, name: str, form: Form | None) -> dict[str, Any]:
    """Check one form and time it; a wrong or failing one has no time, only its reason."""
    row: dict[str, Any] = {"rows": rows, "name": name}
    if form is not None:
        row["form"] = list(form)
    try:
        call = call_of(name, form)
        x = problem.x[:rows]
        torch.full_like(problem.eager[:rows], float("nan"))  # the memory that y will get
        y = call(x, problem.weights[0])
        torch.cuda.synchronize()
        wrong = _what_is_wrong(problem, y, form)
        if wrong is not None:
            return {**row, "wrong": wrong}
        seconds, results = seconds_per_call(call, x, problem.weights)
        if form is not None and not all(torch.equal(y, other) for other in results):
            return {**row, "wrong": "results in a graph differ from those outside"}
    except Exception as error:
        return {**row, "wrong": f"{type(error).__name__}: {str(error)[-300:]}"}
    share = problem.size / seconds / ROOF
    return {**row, "us": round(seconds * 1e6, 2), "percent": round(100 * share, 1)}


def _what_is_wrong(problem: Problem, y: Tensor, form: Form | None) -> str | None:
    from tilewise.testing import budget_violation

    rows = y.shape[0]
    wrong = budget_violation(y, problem.truth[:rows], problem.eager[:rows])
    if wrong is not None or form is None:
        return wrong
    known = problem.bits.setdefault(form._replace(num_warps=4), y)
    both = min(rows, known.shape[0])
    if not torch.equal(known[:both], y[:both]):
        return f"rows have other bits among {rows} than among {known.shape[0]}"
    return None


def seconds_per_call(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    """Return the median time of one call in a replayed graph, and the graph's results."""
    from tilewise.kernels.host.memory import launches

    launches.zeros.clear()  # the graphs before are gone
    call(x, weights[0])
    graph = torch.cuda.CUDAGraph()
    count = len(weights) * -(-CALLS // len(weights))
    with torch.cuda.graph(graph):
        results = [call(x, weights[index % len(weights)]) for index in range(count)]
    for y in results:
        y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * REPEATS)]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [
        a.elapsed_time(b) / 1e3 / count for a, b in zip(events[::2], events[1::2], strict=True)
    ]
    return statistics.median(times), results


def serve(pipe: Connection, outputs: int, channels: int, where: str) -> None:
    """Measure what the parent asks for, until it closes the pipe."""
    problem = Problem(outputs, channels, where)
    pipe.send("ready")
    while True:
        try:
            asked, deadline = pipe.recv()
        except EOFError:
            return
        answer = []
        for rows, name, form in asked:
            if time.time() > deadline:
                break
            answer.append(measure(problem, rows, name, form))
        pipe.send(answer)


class Weight:
    """One weight and the process that measures it."""

    def __init__(self, name: str, outputs: int, channels: int, where: str) -> None:
        self.name, self.outputs, self.channels = name, outputs, channels
        self.forms = list(forms_of(outputs, channels))
        self.portable = list(portable_forms_of(outputs, channels))
        self.rows: list[dict[str, Any]] = []
        self.error: str | None = None
        self._pipe, other = _CONTEXT.Pipe()
        arguments = (other, outputs, channels, where)
        self._process = _CONTEXT.Process(target=serve, args=arguments, daemon=True)
        with spawning():
            self._process.start()
        other.close()
        self._ready = False

    def ask(self, asked: Asked, seconds: float) -> None:
        """Measure for about so long."""
        if self.error is not None:
            return
        try:
            if not self._ready:
                self._answer(2 * HANG_S)
                self._ready = True
            self._pipe.send((asked, time.time() + seconds))
            for row in self._answer(seconds + HANG_S):
                self.rows.append({"weight": self.name, **row})
        except (EOFError, OSError, TimeoutError) as error:
            self.error = f"{type(error).__name__}: {error}"
            self.close()

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join(5)

    def best(self, count: int) -> list[RowsTile]:
        """Return the forms that are fastest at the swept rows, together."""
        times: dict[RowsTile, list[float]] = {}
        for row in self.rows:
            if row["name"] == "own" and row["rows"] in SWEPT_ROWS:
                times.setdefault(RowsTile(*row["form"]), []).append(row.get("us", float("inf")))
        return sorted(times, key=lambda form: (-len(times[form]), sum(times[form])))[:count]


def baselines(rows: int) -> Asked:
    """Return what every number of rows is compared with."""
    return [
        (rows, name, None) for name in ("cublas", "triton") if name == "cublas" or rows <= MOST_ROWS
    ]


def wide(form: RowsTile) -> RowsTile:
    """Return the form for MANY_ROWS that adds in the same order: two warpgroups."""
    return form._replace(tile_n=128, tile_k=64, ctas=1, num_warps=8)


def run(weights: Sequence[Weight], compilers: Compilers, seconds: float) -> None:
    """Measure every form at the swept rows, then the best ones, also early, at the others."""
    end = time.time() + seconds
    compilers.run([
        (w.outputs, w.channels, rows, form)
        for w in weights for rows in SWEPT_ROWS for form in (None, *w.forms, *w.portable)
    ])  # fmt: skip
    _told(f"forms compiled, {end - time.time():.0f} s left")
    kept = 0.4 * (end - time.time())  # for the other rows
    for number, w in enumerate(weights):
        asked: Asked = []
        for rows in SWEPT_ROWS:
            asked += [*baselines(rows), *((rows, "own", form) for form in w.forms)]
            asked += [(rows, "triton", form) for form in w.portable]
        left = end - time.time() - kept
        w.ask(asked, max(2.0, left / (len(weights) - number)))
        _told(w.error or f"{w.name}: {len(w.rows)} of {len(asked)} rows, best {w.best(1)}")
    later = {}
    for w in weights:
        best = w.best(BEST)
        later[w.name] = best, [form._replace(early=True) for form in best[:2]]
    compilers.run([
        (w.outputs, w.channels, rows, form)
        for w in weights
        for rows in (*SWEPT_ROWS, *OTHER_ROWS)
        for form in (None, *later[w.name][0], *later[w.name][1])
        if form is not None or rows <= MOST_ROWS
    ] + [
        (w.outputs, w.channels, MANY_ROWS, wide(form)) for w in weights for form in later[w.name][0]
    ])  # fmt: skip
    _told(f"the best compiled for other rows, {end - time.time():.0f} s left")
    for number, w in enumerate(weights):
        best, early = later[w.name]
        asked = [(rows, "own", form) for rows in SWEPT_ROWS for form in early]
        for rows in OTHER_ROWS:
            asked += [*baselines(rows), *((rows, "own", form) for form in (*best, *early[:1]))]
        asked += [(MANY_ROWS, "cublas", None), *((MANY_ROWS, "own", wide(f)) for f in best)]
        w.ask(asked, max(1.0, (end - time.time()) / (len(weights) - number)))


def summary(weights: Sequence[Weight]) -> list[str]:
    """Return a line for each weight and number of rows: cuBLAS, Triton, the best form."""
    lines = []
    for w in weights:
        for rows in sorted({row["rows"] for row in w.rows}):
            mine = [row for row in w.rows if row["rows"] == rows]
            named = {row["name"]: row for row in mine if "form" not in row}
            timed = [row for row in mine if row["name"] == "own" and "us" in row]
            late = [row for row in timed if not RowsTile(*row["form"]).early]
            words = [f"{name} {row.get('us', row.get('wrong'))}" for name, row in named.items()]
            early = [row for row in timed if row not in late]
            portable = [row for row in mine if row["name"] == "triton" and "form" in row]
            portable = [row for row in portable if "us" in row]
            for kind, found in (("own", late), ("early", early), ("portable", portable)):
                if found:
                    best = min(found, key=lambda row: row["us"])
                    words.append(f"{kind} {best['us']} ({best['percent']} %) {best['form']}")
            lines.append(f"{w.name:14} {rows:4} rows: " + ", ".join(words))
    return lines


def _told(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def weight_of(text: str) -> tuple[str, int, int]:
    """Return the name, the outputs and the channels that NAME=NxK names."""
    name, _, sizes = text.partition("=")
    outputs, channels = map(int, sizes.split("x"))
    return name, outputs, channels


def main() -> int:
    """Measure and print; the JSON has every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument(
        "--weights", nargs="+", type=weight_of, metavar="NAME=NxK", default=WEIGHTS,
        help="others than the models'",
    )  # fmt: skip
    args = parser.parse_args()
    compilers = Compilers(args.workers)
    weights = [Weight(*each, "cuda") for each in args.weights]
    try:
        run(weights, compilers, args.seconds)
    finally:
        rows = [row for w in weights for row in w.rows]
        wrong = [row for row in rows if "wrong" in row]
        document = {
            "roof_bytes_per_second": ROOF,
            "failed_to_compile": compilers.failed,
            "errors": {w.name: w.error for w in weights if w.error is not None},
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        compilers.close()
        for w in weights:
            w.close()
        for line in compilers.failed[:5]:
            _told(f"failed to compile: {line}")
        for row in wrong[:15]:
            _told(f"wrong: {row}")
        print(f"{len(rows)} rows, {len(wrong)} wrong, errors {document['errors']}")
        print("\n".join(summary(weights)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
