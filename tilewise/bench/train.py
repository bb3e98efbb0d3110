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
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.bench.report import emit, format_table, say, write
from tilewise.bench.trainers.worker import WAYS
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
    """Measure the rows that the options ask for; return 0, or 1 where one failed.

    Being out of memory is a result, no failure.
    """
    options = _parse(argv)
    rows = [
        {"shape": shape, "way": way, "N": length, "B": max(1, tokens // length)}
        for shape in options.shapes
        for lengths, tokens in [_sizes(shape, options)]
        for length in lengths
        for way in options.ways
        if not (shape in BERT_SHAPES and way == "ours-packed")  # ours packs always
    ]
    document: Json = {"what": "train", "text": str(options.text or "random tokens"), "rows": []}
    end = None if options.seconds is None else time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        folders = _Texts(options.text, options.data or Path(scratch))
        for row in rows:
            if end is not None and time.perf_counter() >= end:
                say(f"no time was left for {len(rows) - len(document['rows'])} rows")
                break
            left = None if end is None else end - time.perf_counter()
            measured = row | _run(row, options, folders, left)
            document["rows"].append(measured)
            say(_line(measured))
            if options.json:
                write(document, options.json)
    say(format_table(document["rows"], COLUMNS))
    emit(document, options.json)
    failed = [row for row in document["rows"] if row.get("error", _OOM) != _OOM]
    return 1 if failed else 0


_OOM = "out of memory"


class _Texts:
    """The text of each kind of model, tokenised when it is first asked for."""

    def __init__(self, text: Path | None, folder: Path) -> None:
        self.text, self.folder = text, folder

    def folder_for(self, row: Json) -> str | None:
        """Return a prepared folder, None where tokens are drawn."""
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


def _run(row: Json, options: argparse.Namespace, texts: _Texts, left: float | None) -> Json:
    """Measure one row in a process of its own."""
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
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    limit = options.row_timeout if left is None else min(options.row_timeout, left)
    say(f"{row['shape']} {row['way']} N {row['N']} B {row['B']} ...")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilewise.bench.trainers.worker", json.dumps(spec)],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
            timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {limit:.0f} s"}
    lines = done.stdout.splitlines()
    if not lines:
        return {"error": f"ended with code {done.returncode} and without a result"}
    measured: Json = json.loads(lines[-1])
    return measured


def _line(row: Json) -> str:
    if "error" in row:
        return f"  {row['error']}"
    mfu = f", MFU {row['MFU']:.1%}, {row['GiB']:.1f} GiB" if "MFU" in row else ""
    return (
        f"  {row['tokens/s']:,.0f} tokens/s, {row['sequences/s']:,.1f} sequences/s{mfu}; "
        f"started in {row['start_s']:.0f} s"
    )


def _sizes(shape: str, options: argparse.Namespace) -> tuple[list[int], int]:
    """Lengths of a shape's rows and the tokens of a step."""
    lengths, tokens = DEFAULTS.get(shape, _TINY)
    return options.lengths or lengths, options.tokens or tokens


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(
        prog="tilewise bench train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shapes = [*DECODER_SHAPES, *BERT_SHAPES]
    add("--shapes", nargs="+", choices=shapes, metavar="NAME", default=list(DEFAULTS),
        help=f"of {', '.join(shapes)}; default {' '.join(DEFAULTS)}")  # fmt: skip
    add("--ways", nargs="+", choices=WAYS, metavar="WAY", default=list(WAYS), help="default: all")
    add("--lengths", nargs="+", type=int, metavar="N", help="default: each shape's own")
    add("--tokens", type=int, help="of a step; B is tokens / N, at least 1")
    add("--text", type=Path, help="folder of .txt files; default: random tokens")
    add("--data", type=Path, help="folder that keeps the text's tokens; default: a temporary one")
    add("--losses", type=int, default=20, help="first steps whose losses are noted; default 20")
    add("--lr", type=float, default=1e-4, help="constant; default 1e-4")
    add("--row-seconds", type=float, default=5.0, help="of measuring a row; default 5")
    add("--row-timeout", type=float, default=600.0, help="seconds of a row in all; default 600")
    add("--seconds", type=float, help="of all rows; those after it are left out")
    add("--memory-gib", type=float, help="limit of each row, as of a smaller card")
    add("--compile", default="default", metavar="MODE",
        help="of our own step's torch.compile; '' does not compile")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", metavar="FILE", help="write the document there, after each row")
    return parser.parse_args(argv)
