"""All that `tilewise doctor` finds, as text to paste into an issue or as JSON."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tilewise.doctor.packages import Package, packages
from tilewise.progress import is_wanted, say, writes_over
from tilewise.version import __version__

if TYPE_CHECKING:
    from tilewise.doctor.backends import Support
    from tilewise.doctor.machine import Machine
    from tilewise.doctor.selftest import Trial

__all__ = ["Report", "doctor", "examine"]


@dataclass(frozen=True)
class Report:
    """The findings of one run of `tilewise doctor`.

    Attributes:
        version: the version of the package.
        packages: the requirements against what is installed, None for a package without metadata.
        machine: the facts about the machine; None if the package or torch cannot be imported.
        support: the backend of each op on each type of device.
        trials: the rows of the self-test.
        problems: sentences about what does not work or is slow, each with a remedy where there is
            one.
        notes: sentences about what is missing but not needed.
        seconds: the seconds that the run took.
    """

    version: str
    packages: list[Package] | None
    machine: Machine | None
    support: Sequence[Support]
    trials: Sequence[Trial]
    problems: list[str]
    notes: list[str]
    seconds: float


def doctor(*, as_json: bool = False, seconds: float | None = None) -> int:
    """Print the report of `examine` to standard output; return the exit code, 1 if it has problems,
    else 0.

    Args:
        as_json: True for one JSON object in place of text.
        seconds: the time after which no further row of the self-test begins, 20 by default; 0
            leaves the self-test out.

    Raises:
        ValueError: seconds is negative or not finite.
    """
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 0 and finite, got {seconds}")
    report = examine(seconds)
    if as_json:
        print(json.dumps(asdict(report), indent=1))
    else:
        print(text_of(report))
    return 1 if report.problems else 0


def examine(seconds: float | None = None) -> Report:
    """Look at packages and machine, run the self-test, and return the findings.

    If tilewise or torch cannot be imported, that is a problem of the report. `seconds` as in
    `doctor`.
    """
    begin = time.monotonic()
    found = packages()
    problems, notes = list(_of_packages(found)), list(_notes_of_packages(found))
    try:
        # Only here, so that a broken torch is a line of the report and no traceback.
        from tilewise.doctor.backends import support
        from tilewise.doctor.machine import machine
        from tilewise.doctor.selftest import SECONDS, trials
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        problems.insert(0, f"the package cannot be imported: {said}")
        spent = time.monotonic() - begin
        return Report(__version__, found, None, [], [], problems, notes, spent)
    about = machine()
    if about.gpus and about.why_no_triton is not None:
        problems.append(about.why_no_triton)
    elif about.why_no_triton is not None:
        notes.append(about.why_no_triton)
    if about.why_no_gpu is not None:
        notes.append(f"no GPU: {about.why_no_gpu}; everything runs on the CPU")
    if about.gpus and about.c_compiler is None:
        problems.append(
            "Triton needs a C compiler to launch kernels, and none is in PATH: install gcc or "
            "clang, or set CC"
        )
    problems += [
        f"compiled kernels cannot be kept: {cache.path} is not writable; set "
        f"{cache.name.upper()}_CACHE_DIR to a folder that is"
        for cache in about.caches
        if not cache.is_writable
    ]
    if about.variables.get("NUMBA_DISABLE_JIT", "0") != "0":
        problems.append("NUMBA_DISABLE_JIT is set: kernels of a CPU run as Python, which is slow")
    if about.gpus and about.variables.get("TRITON_INTERPRET", "0") != "0":
        problems.append("TRITON_INTERPRET is set: kernels of a GPU are interpreted, which is slow")
    supported = support()
    rows: list[Trial] = []
    limit = SECONDS if seconds is None else seconds
    if limit > 0:
        for row in trials(supported, limit):
            rows.append(row)
            _say(f"{row.op} {row.device} {row.dtype}: {_outcome(row)}")
    problems += [
        f"{row.op} ({row.dtype}, {row.device}, {row.backend}) is wrong here: {row.wrong}"
        for row in rows
        if row.wrong is not None
    ]
    if any(row.left_out for row in rows):
        notes.append(
            "compiling took the time of the self-test; run it again for the rows that were left out"
        )
    spent = time.monotonic() - begin
    return Report(__version__, found, about, supported, rows, problems, notes, spent)


def _say(line: str) -> None:
    """Write a line of progress to standard error if it is a terminal and progress is wanted."""
    if is_wanted() and writes_over(sys.stderr):
        say(line)


def _of_packages(found: list[Package] | None) -> Iterator[str]:
    for package in found or ():
        if package.fits or (package.installed is None and package.extra is not None):
            continue  # an extra that is not installed is a note
        said = f"{package.installed} is installed" if package.installed else "it is not installed"
        needs = f"{package.name}{package.wanted}"
        whose = f", of the extra {package.extra}" if package.extra else ""
        yield f"{needs} is required{whose}, and {said}: pip install '{needs}'"


def _notes_of_packages(found: list[Package] | None) -> Iterator[str]:
    if found is None:
        yield "tilewise has no metadata here, so versions of other packages are not judged"
        return
    missing: dict[str, list[str]] = {}
    for package in found:
        if package.extra is not None and package.installed is None:
            missing.setdefault(package.extra, []).append(package.name)
    for extra, names in missing.items():
        yield f"without {', '.join(names)}: pip install 'tilewise[{extra}]'"


def _outcome(row: Trial) -> str:
    if row.left_out:
        return "left out, the time was up"
    if row.wrong is not None:
        return f"WRONG: {row.wrong}"
    return f"right, {row.speed:.3g} {row.unit}"


def text_of(report: Report) -> str:
    """Return a report as plain text, one fact a line, to paste into an issue."""
    lines = [f"tilewise {report.version}"]
    lines += _machine_lines(report)
    lines += ["", "packages"]
    shown = {p.name: p for p in report.packages or () if p.extra is None or p.installed}
    width = max(map(len, shown), default=0) + 2
    for name, package in shown.items():
        allowed = f"(needs {package.wanted})" if package.wanted else ""
        mark = "" if package.fits else "  <- does not fit"
        told = package.installed or "missing"
        lines.append(f"  {name:<{width}}{told:<18}{allowed}{mark}".rstrip())
    lines += _support_lines(report)
    lines += _trial_lines(report)
    for title, sentences in (("problems", report.problems), ("notes", report.notes)):
        if sentences:
            lines += ["", title, *(f"  - {sentence}" for sentence in dict.fromkeys(sentences))]
    verdict = "something does not work, see problems" if report.problems else "all is well"
    return "\n".join([*lines, "", f"{verdict} ({report.seconds:.0f} s)"])


def _machine_lines(report: Report) -> list[str]:
    if report.machine is None:
        return []
    about = report.machine
    memory = "" if about.memory is None else f", {about.memory / 2**30:.0f} GiB"
    cores = f"{about.cores} core{'s' * (about.cores > 1)}"
    rows = [
        ("Python", about.python),
        ("system", about.system),
        ("processor", f"{about.cpu}, {cores}, torch uses {about.threads}{memory}"),
        ("its features", " ".join(about.features) or "none that kernels use"),
    ]
    for gpu in about.gpus:
        size = f"{gpu.memory / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors"
        rows.append(("GPU", f"{gpu.name}, compute capability {gpu.capability}, {size}"))
    if not about.gpus:
        rows.append(("GPU", f"none: {about.why_no_gpu}"))
    rows.append(("driver", about.driver or "none"))
    rows.append(("Triton", about.triton or f"none: {about.why_no_triton}"))
    rows.append(("C compiler", about.c_compiler or "none"))
    for cache in about.caches:
        files = f"{cache.files} files, {cache.size / 2**20:.0f} MiB"
        state = "" if cache.is_writable else ", not writable"
        rows.append((f"{cache.name}'s cache", f"{cache.path}: {files}{state}"))
    rows += [(name, value) for name, value in about.variables.items()]
    return [f"  {name:<18}{value}" for name, value in rows]


def _support_lines(report: Report) -> list[str]:
    lines = ["", "backends"] if report.support else []
    for row in report.support:
        lines.append(f"  {row.op:<18}{row.device:<6}{row.backend or 'none can run it'}")
        lines += [
            f"    not {name:<8} {why}" for name, why in row.refusals.items() if row.device == "cuda"
        ]
    return lines


def _trial_lines(report: Report) -> list[str]:
    lines = ["", "self-test"] if report.trials else []
    for row in report.trials:
        first = "" if row.first_s is None else f", first call {row.first_s:.1f} s"
        where = f"{row.device}, {row.backend}"
        lines.append(f"  {row.op:<18}{row.dtype:<10}{where:<14}{_outcome(row)}{first}")
    return lines
