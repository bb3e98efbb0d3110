"""Run the parts of a list of measurements one after another, and keep what each gave at once.

    python lab/parts.py lab/h200.toml --list
    python lab/parts.py lab/h200.toml train stress --seconds 540 --pack found.tgz

Time on a GPU is scarce and may end at any moment. A part therefore has a time of its own, none
begins that cannot end in what is left, and after each part all results so far are packed anew.

The list is TOML, a table of it for each part:

    [products]
    about = "one sentence"
    seconds = 120                    # what it takes; at twice of it, or at the end, it is stopped
    command = "python lab/same_bits.py --device cuda --json {out}/same_bits.json"
    [products.constants]             # optional: runs in a copy of the tree in which these differ
    "tilewise/kernels/tiles/linear_rows.py" = {MOST_STAGES = "5"}

A command is bash and runs in the tree, which is first on PYTHONPATH. {out} is the folder of the
part's results, {tree} the tree that the part runs in, {plain} the tree without other constants.
What a part prints goes to {out}/log.txt. The last line is JSON: seconds and exit code of each part,
"left out" or "stopped" among them. The exit code is 1 where a part failed or was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_KILL_S = 5.0  # between the interrupt and the end of a part that goes on
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")


@dataclass(frozen=True)
class Part:
    """One measurement: a bash command, the seconds it takes, and constants it runs with."""

    name: str
    about: str
    seconds: float
    command: str
    constants: dict[str, dict[str, str]] = field(default_factory=dict)


def read(path: Path) -> dict[str, Part]:
    """Return the parts of a list, in its order.

    Raises:
        ValueError: a part lacks an entry or has an unknown one.
    """
    parts = {}
    for name, entries in tomllib.loads(path.read_text()).items():
        try:
            parts[name] = Part(name=name, **entries)
        except TypeError as error:
            raise ValueError(f"part {name!r} of {path}: {error}") from None
    return parts


def with_constants(tree: Path, constants: dict[str, dict[str, str]], into: Path) -> Path:
    """Copy a tree into a folder and give constants of its modules other values.

    Args:
        tree: the tree.
        constants: for each file, names and the values' Python text.
        into: a folder that does not exist.

    Raises:
        ValueError: a file does not set such a name exactly once at the beginning of a line.
    """
    shutil.copytree(tree, into, ignore=_NOT_COPIED)
    for file, values in constants.items():
        path = into / file
        text = path.read_text()
        for name, value in values.items():
            text, count = re.subn(
                rf"^({re.escape(name)}(?:: [^=\n]+)?) = .*$", rf"\1 = {value}", text, flags=re.M
            )
            if count != 1:
                raise ValueError(f"{file} must set {name} once, and does so {count} times")
        path.write_text(text)
    return into


def run(part: Part, out: Path, work: Path, limit_s: float) -> tuple[int | str, float]:
    """Run a part for at most limit_s seconds; return its exit code, or "stopped", and its time."""
    out.mkdir(parents=True)
    tree = ROOT
    if part.constants:
        tree = with_constants(ROOT, part.constants, work / f"tree-{part.name}")
    command = part.command
    for name, folder in (("out", out), ("tree", tree), ("plain", ROOT)):
        command = command.replace(f"{{{name}}}", str(folder))
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with (out / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {command}"], cwd=tree, env=environment,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | str
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = "stopped"
        finally:
            _end(process)
    return code, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a part and all that it started; kill what is there a little later."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack(out: Path, file: Path) -> None:
    """Pack a folder; a reader finds the old archive or the new one, never half of one."""
    unfinished = file.with_name(f"{file.name}.part")
    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(out, arcname=out.name)
    os.replace(unfinished, file)


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("file", type=Path, help="the list, TOML")
    parser.add_argument("names", nargs="*", help="parts in the order in which they run (all)")
    parser.add_argument("--list", action="store_true", help="only say which parts there are")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--out", type=Path, help="new folder for results (a temporary one)")
    parser.add_argument("--pack", type=Path, help="archive of the results, made after each part")
    parser.add_argument("--tail", type=int, default=25, help="lines printed of each part's log")
    options = parser.parse_args(argv)
    ends = time.monotonic() + options.seconds
    parts = read(options.file)
    unknown = [name for name in options.names if name not in parts]
    if unknown:
        parser.error(f"no part {', '.join(unknown)} in {options.file}; it has {', '.join(parts)}")
    chosen = [parts[name] for name in options.names] or list(parts.values())
    if options.list:
        for part in chosen:
            print(f"{part.seconds:6.0f} s  {part.name}: {part.about}")
        return 0
    if options.out is not None and options.out.exists():
        parser.error(f"--out {options.out} exists already")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="parts-") as work:
        out = options.out or Path(work) / "results"
        for part in chosen:
            left = ends - time.monotonic() - _KILL_S
            if part.seconds > left:
                found[part.name] = {"code": "left out", "seconds": 0.0}
                print(f"# {part.name}: left out, {left:.0f} s of {part.seconds:.0f} are left")
                continue
            code, seconds = run(part, out / part.name, Path(work), min(left, 2 * part.seconds))
            found[part.name] = {"code": code, "seconds": round(seconds, 1)}
            print(f"# {part.name}: {code}, {seconds:.1f} s", flush=True)
            print(_tail(out / part.name / "log.txt", options.tail), flush=True)
            (out / "found.json").write_text(json.dumps(found, indent=1))
            if options.pack is not None:
                pack(out, options.pack)
    print(json.dumps(found))
    return int(any(each["code"] not in (0, "left out") for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
