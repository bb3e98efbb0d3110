"""Passes of attention on Hopper in forms that differ by constants of modules, in turns.

    python lab/attention_forms.py lab/attention_forms.toml --json F
        [--rows NAME ...] [--only FORM ...] [--rounds 5] [--workers 12] [--seconds 200]

The list has [forms.NAME] tables, module -> {constant = value}, and, under "tile", fields of the
forward pass's Tile, or a peer = "fa4" (FlashAttention-4's public call, left out where it is not
installed); and [[rows]]: name, part ("forward" or "backward"), d, n, causal, feature
("plain", "dropout", "bias" shared by all sequences, "own bias", "deterministic") and the forms
that they compare, d, n and causal as lists. All have 16,384 tokens of 2,048 channels. A form's
results are compared with those of the row's first form: the largest distance, relative to the norm
of a tensor, and whether all bits are the same; NaN among them is an error. Times are medians of
rounds in which all forms take turns, the call without a feature among them as "plain". Processes
of their own compile beforehand. What is measured is written after each row; the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.bench.report import say
from tilewise.kernels.gluon.attention import plan as hopper
from tilewise.kernels.gluon.forward import launch as fwd_launch
from tilewise.kernels.gluon.forward import tiles
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call, Plan
from tilewise.kernels.spec import AttentionSpec, AttentionTensors

TOKENS, CHANNELS = 16384, 2048
_TIMED_MS = 4.0  # that the calls of one turn take
Form = dict[str, Any]


class Case(NamedTuple):
    """A row of the list with one value for each key."""

    part: str
    d: int
    n: int
    causal: bool
    feature: str

    @property
    def name(self) -> str:
        """Return it in words."""
        return (
            f"{self.part} d{self.d} n{self.n} {'causal' if self.causal else 'full'} {self.feature}"
        )

    @property
    def tera(self) -> float:
        """Return 1e12 FLOPs, as the papers count them."""
        forward = 4 * TOKENS * self.n * CHANNELS / (2 if self.causal else 1)
        return forward * (2.5 if self.part == "backward" else 1) / 1e12


class Inputs:
    """The tensors of a case, with and without its feature."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        draw = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)

        batch, heads = TOKENS // case.n, CHANNELS // case.d
        self.q, self.k, self.v, self.do = (normal(batch, case.n, heads, case.d) for _ in range(4))
        own = case.feature == "own bias"
        has_bias = own or case.feature == "bias"
        drops = case.feature == "dropout"
        self.bias = normal(batch if own else 1, heads, case.n, case.n) if has_bias else None
        self.philox = torch.tensor([1234, 0], device=device) if drops else None
        self.plain = AttentionSpec(
            "cuda", torch.bfloat16, batch, case.n, case.n, heads, heads, case.d, case.d,
            window_right=0 if case.causal else -1, softmax_scale=case.d**-0.5,
        )  # fmt: skip
        self.spec = self.plain._replace(
            has_bias=has_bias, dropout_p=0.1 if drops else 0.0,
            deterministic=case.feature == "deterministic",
        )  # fmt: skip

    def tensors(self, spec: AttentionSpec) -> AttentionTensors:
        """Return those of a call."""
        more = {"bias": self.bias} if spec.has_bias else {}
        more |= {"philox": self.philox} if spec.dropout_p else {}
        return AttentionTensors(self.q, self.k, self.v, **more)


def forward_plan(spec: AttentionSpec, tensors: AttentionTensors, changes: Form) -> Plan:
    """Plan a forward pass, whose tile has some changes."""
    maker = Maker(Call.of(spec, tensors))
    original = fwd_launch.tile_config_fwd

    def changed(*arguments: Any, **options: Any) -> tiles.Tile:
        tile = original(*arguments, **options)._replace(**changes)
        return tile._replace(rows=tiles.GROUP_ROWS * tile.warpgroups)

    fwd_launch.tile_config_fwd = changed
    try:
        return maker.finish(fwd_launch.add_fwd(maker, spec, maker.tensors))
    finally:
        fwd_launch.tile_config_fwd = original


@contextlib.contextmanager
def applied(form: Form) -> Iterator[Form]:
    """Let modules have a form's constants; yields the changes of its tile."""
    kept = []
    for name, constants in form.items():
        if name == "tile":
            continue
        module = importlib.import_module(name)
        for constant, value in constants.items():
            kept.append((module, constant, getattr(module, constant)))
            setattr(module, constant, value)
    try:
        yield form.get("tile", {})
    finally:
        for module, constant, value in kept:
            setattr(module, constant, value)


class FlashAttention4:
    """The plain call by FlashAttention-4, compiled at its first run."""

    def __init__(self, inputs: Inputs) -> None:
        self._function = importlib.import_module("flash_attn.cute").flash_attn_func
        self._inputs = inputs
        self._leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        self._o = self._forward(self._leaves) if inputs.case.part == "backward" else None

    def _forward(self, qkv: list[Tensor]) -> Tensor:
        result = self._function(*qkv, causal=self._inputs.case.causal)
        return result[0] if isinstance(result, tuple) else result

    def run(self) -> tuple[Tensor, ...]:
        """Return o, or the gradients of q, k and v."""
        if self._o is not None:
            return torch.autograd.grad(self._o, self._leaves, self._inputs.do, retain_graph=True)
        return (self._forward([self._inputs.q, self._inputs.k, self._inputs.v]),)


class Runs:
    """The calls of one case in all forms."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.inputs = Inputs(case, device)
        self.case = case
        self.calls: dict[str, tuple[Plan | FlashAttention4, tuple[Any, ...]]] = {}
        self.first: tuple[Tensor, ...] = ()
        self._forward: dict[bool, tuple[Tensor | None, ...]] = {}

    def add(self, name: str, form: Form, *, plain: bool = False) -> dict[str, Any]:
        """Plan a form and run it once; returns how its results differ from the first form's."""
        if "peer" in form:
            return self._keep(name, FlashAttention4(self.inputs), ())
        spec = self.inputs.plain if plain else self.inputs.spec
        tensors = self.inputs.tensors(spec)
        given: tuple[Any, ...] = tuple(tensors)
        if self.case.part == "backward":
            if plain not in self._forward:
                self._forward[plain] = forward_plan(spec, tensors, {}).run(*tensors)
            given = (self.inputs.do, None, *self._forward[plain][:2], *tensors)
            with applied(form):
                plan = hopper.plan_bwd(Call.of(spec, given))
        else:
            with applied(form) as changes:
                plan = forward_plan(spec, tensors, changes)
        return self._keep(name, plan, given, plain=plain)

    def _keep(
        self, name: str, plan: Plan | FlashAttention4, given: tuple[Any, ...], *,
        plain: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        results = tuple(x for x in plan.run(*given) if x is not None)
        self.calls[name] = plan, given
        if plain:
            return {}
        if any(not bool(x.isfinite().all()) for x in results if x.dtype == torch.bfloat16):
            raise ValueError("results are not finite")
        self.first = self.first or results
        pairs = list(zip(results, self.first, strict=True))
        far = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        return {"distance": far, "equal": all(torch.equal(a, b) for a, b in pairs)}

    def time(self, name: str, count: int) -> float:
        """Return milliseconds of a call."""
        plan, given = self.calls[name]
        plan.run(*given)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            plan.run(*given)
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]) / count)


def cases_of(document: dict[str, Any], names: list[str] | None) -> list[tuple[Case, list[str]]]:
    """Return the cases of the list's rows with their forms."""
    found = []
    for row in document["rows"]:
        if names and row["name"] not in names:
            continue
        for d, n, causal in itertools.product(row["d"], row["n"], row["causal"]):
            case = Case(row["part"], d, n, causal, row["feature"])
            found.append((case, [name for name in row["forms"] if _fits(name, d)]))
    return found


def _fits(name: str, d: int) -> bool:
    """Whether a form is meant for a head dim: all but those that end in "@" and another one."""
    return "@" not in name or name.endswith(f"@{d}")


_NUMBERS = {"SHORT_SHARE", "SHORT_AHEAD", "SHORT_BYTES", "ORDERED_WAVES"}


def with_code_of_their_own(names: list[str], forms: dict[str, Form]) -> list[str]:
    """Return the forms that must be compiled: others differ from one before by numbers alone."""
    found: list[str] = []
    codes: list[Form] = []
    for name in names:
        if "peer" in forms[name]:
            continue
        code = {
            module: {key: value for key, value in constants.items() if key not in _NUMBERS}
            for module, constants in forms[name].items()
        }
        code = {module: constants for module, constants in code.items() if constants}
        if code not in codes:
            codes.append(code)
            found.append(name)
    return found


def compile_ahead(path: Path, options: argparse.Namespace, jobs: int) -> None:
    """Let processes plan and run once all that is compiled."""
    command = [sys.executable, __file__, str(path), "--warm"]
    more = ["--rows", *options.rows] if options.rows else []
    count = min(options.workers, jobs)
    workers = [
        subprocess.Popen([*command, f"{index}/{count}", *more], env=os.environ)
        for index in range(count)
    ]
    for process in workers:
        process.wait()


def warm(jobs: list[tuple[Case, str, Form]], index: int, count: int) -> None:
    """Run every `count`th job."""
    for case, name, form in jobs[index::count]:
        try:
            Runs(case).add(name, form)
        except Exception as error:
            say(f"{case.name} {name}: {type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()


def measure(
    case: Case, names: list[str], forms: dict[str, Form], rounds: int
) -> dict[str, dict[str, Any]]:
    """Compare and time one case."""
    runs, rows = Runs(case), dict[str, dict[str, Any]]()
    for name in names:
        try:
            rows[name] = runs.add(name, forms[name])
        except ModuleNotFoundError as error:
            say(f"{name} is left out: {error}")
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    if case.feature != "plain":
        rows["plain"] = runs.add("plain", {}, plain=True)
    runs.first = ()
    timed = [name for name in rows if "error" not in rows[name]]
    count = {name: max(1, round(_TIMED_MS / runs.time(name, 2))) for name in timed}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name in timed:
            times[name].append(runs.time(name, count[name]))
    for name, found in times.items():
        ms = median(found)
        rows[name] |= {"ms": round(ms, 4), "spread": round((max(found) - min(found)) / ms, 3)}
        rows[name]["tflops"] = round(case.tera / ms * 1e3, 1)
        rows[name]["x first"] = round(median(times[timed[0]]) / ms, 3)
        if "plain" in times:
            rows[name]["x plain"] = round(median(times["plain"]) / ms, 3)
    return rows


def main() -> int:
    """Measure, print a line for each form, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("--rows", nargs="+", metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="FORM", help="besides each row's first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    document = tomllib.loads(options.list.read_text())
    forms: dict[str, Form] = document["forms"]
    cases = cases_of(document, options.rows)
    if options.only:
        kept = options.only
        cases = [(case, [n for n in names if n in kept or n == names[0]]) for case, names in cases]
    jobs = [
        (case, name, forms[name])
        for case, names in cases
        for name in with_code_of_their_own(names, forms)
    ]
    if options.warm:
        index, count = map(int, options.warm.split("/"))
        warm(jobs, index, count)
        return 0
    if options.workers:
        compile_ahead(options.list, options, len(jobs))
        say(f"compiled in {time.monotonic() - began:.0f} s")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": {},
    }  # fmt: skip
    for case, names in cases:
        if time.monotonic() - began > options.seconds:
            say(f"out of time before {case.name}")
            break
        rows = found["rows"][case.name] = measure(case, names, forms, options.rounds)
        torch.cuda.empty_cache()
        for name, row in rows.items():
            print(f"{case.name:40s} {name:24s} {json.dumps(row)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return int(any("error" in row for rows in found["rows"].values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
