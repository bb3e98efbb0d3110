"""`tilewise bench train`: training steps of transformers' models and of ours, side by side.

    tilewise bench train --text FOLDER --json train.json
    tilewise bench train --shapes gpt2-small --ways sdpa ours --lengths 1024 4096

Ways: eager, sdpa and tilewise are transformers' own model with that attn_implementation, nothing
else changed (float32 parameters, bfloat16 autocast, fused AdamW); with -compiled its model goes
through torch.compile. ours is the step of examples/train_gpt2.py on the same rows, ours-packed on
as many tokens of packed documents; a BERT's texts are padded for transformers, packed for ours.

Each row is a process of its own, and the document is written after each. A row that needs more
memory than there is says so. MFU counts products and the visible part of attention, forward and
backward, of real tokens, against the vendor's peak (`training.flops`).

A row that compiles waits for its CPU most of the time. --together N prepares N rows side by side
(their first steps among it) and then times them one after the other, while the others hold their
parameters and do nothing; one that finds no memory beside others is measured alone. --rows names
rows and which of them prepare side by side: --rows A/ours/1024,B/ours/1024 A/sdpa/1024.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewise.bench.report import emit, format_table, positive, say, write
from tilewise.bench.trainers.worker import READY, WAYS
from tilewise.children import environment
from tilewise.flags import Parser
from tilewise.training.corpus import prepare
from tilewise.training.shapes import BERT_SHAPES, DECODER_SHAPES

__all__ = ["main"]

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
COLUMNS = [
    "shape",
    "way",
    "N",
    "B",
    "tokens/s",
    "sequences/s",
    "MFU",
    "GiB",
    "ms",
    "spread",
    "error",
]
# Lengths and tokens of a step where no option says otherwise.
DEFAULTS = {
    "gpt2-small": ([1024], 32_768),
    "gpt2-medium": ([1024], 16_384),
    "bert-large": ([512], 32_768),
    "llama-1b": ([4096], 16_384),
}
_TINY = ([128], 1024)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tilewise bench train`: measure the rows that the options select, and print the table to
    standard error; then all results as JSON in one line, unless standard output is a terminal and
    no --json names a file for them.

    Returns the exit status: 0, or 1 if a row failed; being out of memory is a result, not a
    failure.
    """
    options = _parse(argv)
    groups = _groups(options)
    count = sum(map(len, groups))
    document: Json = {"what": "train", "text": str(options.text or "random tokens"), "rows": []}
    end = None if options.seconds is None else time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        texts = _Texts(options.text, options.data or Path(scratch))
        for measured in _measure(groups, options, texts, end):
            document["rows"].append(measured)
            say(_line(measured))
            if options.json:
                write(document, options.json)
    if len(document["rows"]) < count:
        say(f"no time was left for {count - len(document['rows'])} rows")
    say(format_table(document["rows"], COLUMNS))
    emit(document, options.json)
    failed = [row for row in document["rows"] if row.get("error", _OOM) != _OOM]
    return 1 if failed else 0


_OOM = "out of memory"


def _groups(options: argparse.Namespace) -> list[list[Json]]:
    """Return the rows to measure that the options ask for, in groups that prepare side by side.

    Raises:
        ValueError: a name of --rows is wrong.
    """
    if options.rows:
        return [[_row(name, options) for name in group.split(",")] for group in options.rows]
    rows = [
        {"shape": shape, "way": way, "N": length, "B": max(1, tokens // length)}
        for shape in options.shapes
        for lengths, tokens in [_sizes(shape, options)]
        for length in lengths
        for way in options.ways
        if not (shape in BERT_SHAPES and way == "ours-packed")  # ours packs always
    ]
    size = options.together
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _row(name: str, options: argparse.Namespace) -> Json:
    """Return the row to measure that is named SHAPE/WAY/N: its shape, way, N and B.

    Raises:
        ValueError: the name has another form, or its shape or way is unknown.
    """
    shape, way, length, *more = [*name.split("/"), "", ""]
    known = (shape in DECODER_SHAPES or shape in BERT_SHAPES) and way in WAYS
    if not (known and length.isdecimal() and int(length) > 0 and more == ["", ""]):
        raise ValueError(f"--rows must be SHAPE/WAY/N, got {name!r}")
    _, tokens = _sizes(shape, options)
    return {"shape": shape, "way": way, "N": int(length), "B": max(1, tokens // int(length))}


class _Texts:
    """The training text, tokenised for each kind of model when it is first asked for.

    `text` is the folder of text files, or None to draw random tokens; `folder` keeps the tokens.
    """

    def __init__(self, text: Path | None, folder: Path) -> None:
        self.text, self.folder = text, folder

    def folder_for(self, row: Json) -> str | None:
        """Return the folder with the text's tokens for a row's model, prepared if it is not there;
        None where random tokens are drawn."""
        if self.text is None:
            return None
        is_masked = row["shape"] in BERT_SHAPES
        words = (
            BERT_SHAPES[row["shape"]].vocab_size
            if is_masked
            else int(DECODER_SHAPES[row["shape"]]["vocab_size"])
        )
        words = min(words, 50_257)
        folder = self.folder / (f"masked-{words}-{row['N']}" if is_masked else f"decoder-{words}")
        prepare(self.text, folder, words=words, longest=row["N"] if is_masked else None)
        return str(folder)


class _Worker:
    """The process that measures one row: it loads libraries, after `go` it makes its first steps,
    and after another line it times its steps and ends."""

    def __init__(self, row: Json, options: argparse.Namespace, texts: _Texts) -> None:
        spec = row | {
            "device": options.device,
            "text": texts.folder_for(row),
            "losses": options.losses,
            "seconds": options.row_seconds,
            "lr": options.lr,
            "seed": options.seed,
            "compile": options.compile,
            "memory_gib": options.memory_gib,
        }
        self.row = row
        self.result: Json | None = None
        self._said = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewise.bench.trainers.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment(),
        )

    def go(self) -> None:
        """Send the process the line on which it goes on; if it has ended, the next read of its
        output shows that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")

    def prepare(self, limit: float) -> None:
        """Wait until the row's process can be timed, or has ended with a result.

        Args:
            limit: the seconds to wait; after them the result is an error.
        """
        line = self._line(limit)
        if line is not None and line != READY:
            self.result = json.loads(line)

    def measure(self, limit: float) -> Json:
        """Tell the process to time its steps, wait for the result, and return it with the row.

        Args:
            limit: the seconds to wait.
        """
        if self.result is None:
            self.go()
            line = self._line(limit)
            if line is not None:
                self.result = json.loads(line)
        self.end()
        assert self.result is not None
        return self.row | self.result

    def end(self) -> None:
        """Kill the process, whatever it does, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self, limit: float) -> str | None:
        """Return the next line that the process writes; None if none comes within `limit` seconds
        or the process ends: `result` then has an error."""
        assert self._process.stdout is not None
        end = time.perf_counter() + limit
        while b"\n" not in self._said:
            left = max(0.0, end - time.perf_counter())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self.result = {"error": f"no result in {limit:.0f} s"}
                return None
            some = self._process.stdout.read(1 << 16)
            if not some:
                code = self._process.wait()
                self.result = {"error": f"ended with code {code} and without a result"}
                return None
            self._said += some
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()


def _measure(
    groups: Sequence[list[Json]], options: argparse.Namespace, texts: _Texts, end: float | None
) -> Iterator[Json]:
    """Measure groups in turn; yield each row when it is measured, none that begins after `end`.

    Rows of a group prepare side by side and are timed one after the other. With a GPU the processes
    of the next group load their libraries meanwhile. A row that is out of memory beside others is
    measured again, alone, at the end.
    """

    most = float(options.row_timeout)

    def limit() -> float:
        return most if end is None else max(0.0, min(most, end - time.perf_counter()))

    left = list(groups)
    workers: list[_Worker] = []
    following: list[_Worker] = []
    try:
        while left and limit() > 0:
            rows = left.pop(0)
            workers = following or [_Worker(row, options, texts) for row in rows]
            for worker in workers:
                say(_name(worker.row) + " ...")
                worker.go()
            following = []
            if left and options.device != "cpu":
                following = [_Worker(row, options, texts) for row in left[0]]
            for worker in workers:
                worker.prepare(limit())
            for worker in workers:
                measured = worker.measure(limit())
                if measured.get("error") == _OOM and len(workers) > 1:
                    left.append([worker.row])
                else:
                    yield measured
    finally:
        for worker in workers + following:
            worker.end()


def _name(row: Json) -> str:
    return f"{row['shape']} {row['way']} N {row['N']} B {row['B']}"


def _line(row: Json) -> str:
    name = f"  {_name(row)}:"
    if "error" in row:
        return f"{name} {row['error']}"
    mfu = f", MFU {row['MFU']:.1%}, {row['GiB']:.1f} GiB" if "MFU" in row else ""
    return (
        f"{name} {row['tokens/s']:,.0f} tokens/s, {row['sequences/s']:,.1f} sequences/s{mfu}; "
        f"ready after {row['start_s']:.0f} s"
    )


def _sizes(shape: str, options: argparse.Namespace) -> tuple[list[int], int]:
    """Return the lengths N of a shape's rows, and the tokens of a training step."""
    lengths, tokens = DEFAULTS.get(shape, _TINY)
    return options.lengths or lengths, options.tokens or tokens


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = Parser(
        prog="tilewise bench train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shapes = [*DECODER_SHAPES, *BERT_SHAPES]
    add(
        "--shapes",
        nargs="+",
        choices=shapes,
        metavar="NAME",
        default=list(DEFAULTS),
        help=f"of {', '.join(shapes)}; default {' '.join(DEFAULTS)}",
    )
    add("--ways", nargs="+", choices=WAYS, metavar="WAY", default=list(WAYS), help="default: all")
    add("--lengths", nargs="+", type=positive, metavar="N", help="default: each shape's own")
    add("--tokens", type=positive, help="of a step; B is tokens / N, at least 1")
    add(
        "--rows",
        nargs="+",
        metavar="ROWS",
        help="SHAPE/WAY/N, or several with commas between, instead of the above",
    )
    add("--text", type=Path, help="folder of .txt files; default: random tokens")
    add("--data", type=Path, help="folder that keeps the text's tokens; default: a temporary one")
    add("--losses", type=int, default=20, help="first steps whose losses are noted; default 20")
    add("--lr", type=float, default=1e-4, help="constant; default 1e-4")
    add("--row-seconds", type=float, default=5.0, help="of measuring a row; default 5")
    add(
        "--row-timeout",
        type=float,
        default=600.0,
        help="seconds until a row is ready, then until it is measured; default 600",
    )
    add("--together", type=positive, default=1, help="rows that prepare side by side; default 1")
    add("--seconds", type=float, help="of all rows; those after it are left out")
    add("--memory-gib", type=float, help="limit of each row, as of a smaller card")
    add(
        "--compile",
        default="default",
        metavar="MODE",
        help="of our own step's torch.compile; '' does not compile",
    )
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", metavar="FILE", help="write the document there, after each row")
    options: argparse.Namespace = parser.parse_args(argv)
    try:
        _groups(options)
    except ValueError as error:
        parser.error(str(error))
    return options
