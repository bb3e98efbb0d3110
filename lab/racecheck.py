"""Run small calls of Hopper's kernels under racecheck; put its reports in a table.

    python lab/racecheck.py --json racecheck.json --logs FOLDER
    python lab/racecheck.py --cases forward_causal --seconds 200
    python lab/racecheck.py --read FOLDER       # logs of an earlier run, without a GPU

compute-sanitizer's racecheck looks at shared memory only, and follows neither mbarriers nor the
copy engine, so it reports words that these hand over. A row for each pair of places in the source:
kernel, hazard, words, both places, the warps that met, and what orders them, as
docs/design/reproducibility.md proves it. A pair that none of these rules names is "not explained",
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZE = 300  # queries and keys, D 64
CASES = tuple(f"{f}_{w}" for f in ("forward", "backward", "e4m3") for w in ("causal", "full"))
_WINDOWS = {"causal": (-1, 0), "full": (-1, -1)}
_KERNELS = re.compile(r"attention_\w+_kernel|paged_decode_kernel|mla_\w+_kernel")
_WHERE = r"(?P<where>.+?)"
_ANALYSIS = re.compile(
    rf"(?:Race reported between|and) (?P<verb>Read|Write) access at {_WHERE}"
    r"(?: \[(?P<hazards>\d+) hazards?\])?\s*$"
)
_HAZARD = re.compile(
    r"Potential (?P<kind>RAW|WAR|WAW) hazard detected at __shared__ (?P<address>0x[0-9a-f]+)"
)
_THREAD = re.compile(
    rf"(?P<verb>Read|Write) Thread \((?P<x>\d+),(?P<y>\d+),(?P<z>\d+)\) at {_WHERE}\s*$"
)
_PLACE = re.compile(r" in (?P<file>\S+?):(?P<line>\d+)(?::(?P<name>.*))?$")


@dataclass(frozen=True)
class Place:
    """Where an access is: "forward/loader.py", a line, its function; empty where none is known."""

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}" if self.file else "no line"


@dataclass
class Report:
    """What racecheck says of one pair of places.

    Attributes:
        reports: how often the pair stands in its analysis (once a launch, usually).
        hazards: pairs of threads.
        kinds, words, warps: of the hazards that it lists singly.
        order: what orders the two, by docs/design/reproducibility.md.
    """

    case: str
    kernel: str
    first: str
    second: str
    reports: int = 0
    hazards: int = 0
    kinds: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    warps: list[str] = field(default_factory=list)
    order: str = ""


def _begins_partitions(place: Place) -> bool:
    return place.file.endswith(("kernel.py", "decode.py", "dkdv.py", "dq.py")) and (
        "warp_specialize" in place.text or place.function.endswith("_kernel")
    )


def _in(function: str) -> Callable[[Place], bool]:
    return lambda place: place.function == function


def _finds_a_number(place: Place) -> bool:
    return "atomic_add" in place.text


# What orders two places: the rule of docs/design/reproducibility.md that names both.
ORDERS: tuple[tuple[Callable[[Place], bool], Callable[[Place], bool], str], ...] = (
    (
        _begins_partitions, _begins_partitions,
        "Triton's words of a CTA (arguments, which partition a warp runs): barrier.sync 1",
    ),
    (
        _finds_a_number, _finds_a_number,
        "the number that an atomic found: bar.warp.sync, or the barrier of the two warps",
    ),
    (
        _finds_a_number, _begins_partitions,
        "that number where the arguments were: the second barrier.sync 1",
    ),
    (
        _in("_announce"), _in("compute_tiles"),
        "the number of a tile: q_full before it is read, q_empty before it is written",
    ),
    (
        _in("_note"), _in("read_note"),
        "the notes of a tile: q_full before they are read, q_empty before they are written",
    ),
)  # fmt: skip


def order_of(first: Place, second: Place) -> str:
    """Return what orders two places, or "" where no rule names them."""
    for one, other, order in ORDERS:
        if (one(first) and other(second)) or (one(second) and other(first)):
            return order
    return ""


@functools.cache
def _source_of(kernel: str, name: str) -> Path | None:
    """Find the file of a name without folders: beside the kernel, or the only one there is."""
    gluon = ROOT / "tilewise" / "kernels" / "gluon"
    for file in gluon.rglob("*.py"):
        if f"def {kernel}(" in file.read_text() and (file.parent / name).is_file():
            return file.parent / name
    files = list(gluon.rglob(name))
    return files[0] if len(files) == 1 else None


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    tree = ast.parse(path.read_text())
    return [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def place_of(where: str) -> Place:
    """Read what racecheck prints behind "at": an offset, and a file and a line if it knows them.

    The sanitizer may leave the file's folders out; they are then found by the kernel's name.
    """
    match = _PLACE.search(where)
    if match is None:
        return Place()
    name, line = match["file"], int(match["line"])
    gluon = ROOT / "tilewise" / "kernels" / "gluon"
    _, found, inside = name.rpartition("kernels/gluon/")
    path: Path | None = gluon / inside
    if "/" not in name and (kernel := _KERNELS.search(where)):
        path = _source_of(kernel[0], name)
        inside = "" if path is None else path.relative_to(gluon).as_posix()
    elif not found:
        path = None
    if path is None or not path.is_file():
        return Place(name, line)
    around = [(begin, name) for begin, end, name in _functions(path) if begin <= line <= end]
    lines = path.read_text().split("\n")
    text = lines[line - 1].strip() if line <= len(lines) else ""
    return Place(inside, line, max(around)[1] if around else "", text)


def _add(values: list[str], value: str) -> None:
    if value not in values:
        values.append(value)


def read_log(case: str, lines: Iterable[str]) -> list[Report]:
    """Return the reports of a log, one for each kernel and pair of places."""
    found: dict[tuple[str, Place, Place], Report] = {}
    first: tuple[str, Place] | None = None  # of an analysis
    hazard: tuple[str, str] | None = None  # kind, address
    thread: tuple[int, Place] | None = None

    def report(where: str, one: Place, other: Place) -> Report:
        kernel = _KERNELS.search(where)
        name = kernel[0] if kernel else "?"
        key = (name, one, other) if (name, one, other) in found else (name, other, one)
        if key not in found:
            key = (name, one, other)
            found[key] = Report(case, name, str(one), str(other), order=order_of(one, other))
        return found[key]

    for line in lines:
        if match := _HAZARD.search(line):
            hazard, thread = (match["kind"], match["address"]), None
        elif match := _THREAD.search(line):
            if hazard is None:
                continue
            warp, place = int(match["x"]) // 32, place_of(match["where"])
            if thread is None:
                thread = warp, place
                continue
            entry = report(match["where"], thread[1], place)
            _add(entry.kinds, hazard[0])
            _add(entry.words, hazard[1])
            _add(entry.warps, f"{thread[0]} and {warp}")
            hazard = thread = None
        elif match := _ANALYSIS.search(line):
            place = place_of(match["where"])
            if "Race reported between" in line:
                first = match["where"], place
            elif first is not None:
                entry = report(first[0] + match["where"], first[1], place)
                entry.reports += 1
                entry.hazards += int(match["hazards"] or 1)
    return list(found.values())


def table(reports: list[Report]) -> str:
    """Return the reports as a table of Markdown."""
    lines = [
        "| kernel (call) | hazard | words | first access | second access | warps | hazards | "
        "what orders them |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        words = (
            report.words[:1] + (["..."] if len(report.words) > 2 else []) + report.words[1:][-1:]
        )
        lines.append(
            f"| {report.kernel} ({report.case}) | {', '.join(report.kinds)} | {' '.join(words)} | "
            f"{report.first} | {report.second} | {'; '.join(report.warps[:4])} | "
            f"{report.hazards} | {report.order or 'not explained'} |"
        )
    return "\n".join(lines)


def _run_case(case: str) -> None:
    """Run one call, here and now, on the GPU."""
    import torch

    from tests.kernels import kernel_stress
    from tests.kernels.attention_problem import BRAIN, Call

    family, _, which = case.partition("_")
    window = _WINDOWS[which]
    torch.manual_seed(0)
    if family == "e4m3":
        prepared = kernel_stress._bytes((1, SIZE, SIZE, 2, 2, 64), window, None)
    else:
        call = Call(SIZE, SIZE, (2, 2), (64, 64), 1, BRAIN, window)
        make: Any = kernel_stress._forward if family == "forward" else kernel_stress._backward
        prepared = make(call) if family == "forward" else make(call, False)
    prepared.run()
    torch.cuda.synchronize()


def _under_racecheck(case: str, log: Path, seconds: float) -> str:
    """Run a case in a process under racecheck; return "" or what went wrong."""
    child = [sys.executable, __file__, "--child", case]
    checked = [
        "compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all",
        "--print-limit", "100000", "--log-file", str(log), *child,
    ]  # fmt: skip
    # Compiled before, so that the sanitizer's time is the kernels'.
    for command in (child, checked):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"{command[0]} took more than {seconds:.0f} s"
        if done.returncode and command is child:
            return (done.stderr.strip().split("\n") or [""])[-1][:300]
    return "" if log.exists() else "compute-sanitizer left no log"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all cases")
    parser.add_argument("--logs", type=Path, default=Path("racecheck"), help="folder of raw logs")
    parser.add_argument("--read", type=Path, help="only read the logs of this folder")
    parser.add_argument("--json", type=Path, help="file for the table's rows")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _run_case(arguments.child)
        return 0
    folder = arguments.read or arguments.logs
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + arguments.seconds
    reports: list[Report] = []
    failed: dict[str, str] = {}
    for case in arguments.cases:
        log = folder / f"{case}.log"
        if arguments.read is None:
            wrong = _under_racecheck(case, log, max(1.0, until - time.monotonic()))
            if wrong:
                failed[case] = wrong
                print(f"{case}: {wrong}", flush=True)
        if log.exists():
            reports += read_log(case, log.read_text(errors="replace").splitlines())
    print(table(reports))
    unexplained = [report for report in reports if not report.order]
    count = sum(report.reports for report in reports)
    print(
        f"{count} reports of {len(reports)} pairs of places; {len(unexplained)} not explained; "
        f"{len(failed)} cases failed"
    )
    if arguments.json is not None:
        rows = [asdict(report) for report in reports]
        arguments.json.write_text(json.dumps({"reports": rows, "failed": failed}) + "\n")
    return int(bool(unexplained or failed))


if __name__ == "__main__":
    sys.exit(main())
