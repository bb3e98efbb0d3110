"""Write docs/results/libraries.md: attention kernels beside every library that was measured.

`python -m tools.site.results` writes it with the other page of results. A table is one run of one
card, with all of its rows; a library that refused a shape has a dash there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tools.site.marks import ROOT, table
from tools.site.numbers import load, number, pair

PAGE = ROOT / "docs" / "results" / "libraries.md"
HEAD = """# Attention beside other libraries

How fast tilewise's attention is on a Hopper GPU beside FlashAttention-4, FlashAttention-3,
FlashAttention-2 and cuDNN (as torch's SDPA calls them), FlexAttention, torch's varlen_attn and
FlashMLA. Each table is one run on one card, with all of its rows, read from a committed file.
Clocks and cards differ from run to run: compare within a table only. The first table has all
libraries in one run. To measure them on your card:

```sh
python lab/hopper.py --only dense window varlen --json all.json  # the GPU's own time, in turns
tilewise bench attention --device cuda --peers fa3 fa4           # more shapes; the host's time, too
python lab/paged.py                                              # decoding over a paged cache
python lab/mla.py                                                # decoding over latents
```

FlashAttention-3 and FlashAttention-4 take part where `flash_attn_interface` and `flash_attn.cute`
can be imported. A result that differs from sampled rows in float64 gets no number.

**How to read a cell.** TFLOP/s of the forward pass / the backward pass, medians, bfloat16. FLOPs
are counted as in the FlashAttention papers: 4 B H N^2 D, half of it with a causal mask, and 2.5
times as many backward. Shapes have 16,384 tokens in all and 2,048 channels of all heads, unless a
table says otherwise. The fastest of each pass is bold. A dash: the library refused the shape, has
no such pass, or was not asked.

"""
NAMES = {
    "tilewise": "tilewise", "tilewise, planned": "tilewise, planned",
    "tilewise_triton": "tilewise, portable kernels", "tilewise_mask": "tilewise, as a BlockMask",
    "fa4": "FlashAttention-4", "fa3": "FlashAttention-3", "sdpa_cudnn": "cuDNN",
    "flex": "FlexAttention", "sdpa_flash": "FlashAttention-2", "sdpa_efficient": "SDPA efficient",
    "varlen_attn": "torch varlen_attn", "sdpa_padded": "SDPA, padded", "sdpa_math": "SDPA math",
    "standard": "written out in torch", "sdpa_contiguous": "SDPA, contiguous keys",
    "flex_contiguous": "FlexAttention, contiguous keys", "flash_mla": "FlashMLA",
}  # fmt: skip
Row = dict[str, Any]
Speeds = dict[str, dict[tuple[str, str], float | None]]


@dataclass(frozen=True)
class Board:
    """A table of the page: one run, its rows by shape and its columns by library.

    Attributes:
        title: heading of the table.
        file: name of the result's file, without its suffix.
        where: name of the card and the day.
        text: sentence about the shapes.
        rows: function from the file's content to head and rows.
    """

    title: str
    file: str
    where: str
    text: str
    rows: Callable[[Any], tuple[list[str], list[list[str]]]]


def _shape(row: Row) -> str:
    """Return the name of a row's shape, which tells it from the others of its table."""
    parts = []
    if row.get("Hk", row["H"]) != row["H"]:
        parts.append(f"{row['H']} heads on {row['Hk']}")
    wide = row.get("Dv", row["D"]) != row["D"]
    parts += [f"D {row['D']}" + (f", Dv {row['Dv']}" if wide else ""), f"N {row['N']:,}"]
    parts.append("causal" if row["causal"] else "full")
    if row.get("feature", "plain") != "plain":
        parts.append(row["feature"])
    return ", ".join(parts)


def _best(cells: list[float | None]) -> float:
    return max((x for x in cells if x is not None), default=0.0)


def speeds(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table of TFLOP/s, with the mean of the ratios at its end."""
    peers = [peer for peer in NAMES if any(row["peer"] == peer for row in rows)]
    by, found = by_shape(rows), []
    for shape, here in by.items():
        best = {op: _best([here.get((op, p)) for p in peers]) for op in ("forward", "backward")}
        cells = []
        for peer in peers:
            values = [(here.get((op, peer)), best[op]) for op in ("forward", "backward")]
            texts = [f"**{number(x)}**" if x is not None and x == b else number(x)
                     for x, b in values]  # fmt: skip
            cells.append("-" if texts == ["-", "-"] else " / ".join(texts))
        found.append([shape, *cells])
    if len(by) > 2:
        means = [ratio(by, peer) for peer in peers[1:]]
        found.append(["tilewise is faster by (geometric mean)", "", *means])
    return ["shape", *(NAMES[peer] for peer in peers)], found


def by_shape(rows: Sequence[Row]) -> Speeds:
    """Return TFLOP/s of a table's rows by shape, and there by pass and library."""
    by: Speeds = {}
    for row in sorted(rows, key=lambda r: (r["D"], r["N"], r["causal"])):
        by.setdefault(_shape(row), {})[row["op"], row["peer"]] = row.get("TFLOP/s")
    return by


def ratio(by: Speeds, peer: str) -> str:
    """Return how many times as fast as a peer tilewise is, by geometric mean."""
    means = []
    for op in ("forward", "backward"):
        both = [(here.get((op, "tilewise")), here.get((op, peer))) for here in by.values()]
        ratios = [ours / theirs for ours, theirs in both if ours and theirs]
        means.append(prod(ratios) ** (1 / len(ratios)) if ratios else None)
    return pair(means)


def _of(name: str, *, without: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Return a function that makes the table of a file's rows of that name."""

    def rows(data: Any) -> tuple[list[str], list[list[str]]]:
        return speeds(
            [r for r in data["rows"] if r["table"] == name and r["peer"] in NAMES
             and r["op"] in ("forward", "backward") and r["peer"] not in without]
        )  # fmt: skip

    return rows


def _decode(data: Any) -> tuple[list[str], list[list[str]]]:
    rows = [row for row in data["rows"] if row["table"] == "decode"]
    peers = [peer for peer in NAMES if any(row["peer"] == peer for row in rows)]
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        here = {row["peer"]: row for row in rows if row["case"] == case}
        best = max(row["TB/s"] for row in here.values())
        heads = next(iter(here.values()))["heads"]
        rates = [here[p]["TB/s"] if p in here else None for p in peers]
        texts = [f"**{number(x)}**" if x == best else number(x) for x in rates]
        found.append([f"{case}, {heads} heads", *texts])
    return ["sequences x tokens", *(NAMES[peer] for peer in peers)], found


def _latent(data: Any) -> tuple[list[str], list[list[str]]]:
    rows, found = data["rows"], []
    ways = (("tilewise", "bfloat16"), ("flash_mla", "bfloat16"), ("tilewise_triton", "bfloat16"),
            ("tilewise", "float8_e4m3fn"), ("tilewise", "int8"))  # fmt: skip
    for heads, b, n in dict.fromkeys((r["heads"], r["B"], r["N"]) for r in rows):
        ms = {(r["peer"], r["dtype"]): r["ms"] for r in rows
              if (r["heads"], r["B"], r["N"]) == (heads, b, n)}  # fmt: skip
        found.append([f"{heads} heads, {b} x {n:,} tokens", *(number(1e3 * ms[w]) for w in ways)])
    caches = {"bfloat16": "", "float8_e4m3fn": ", e4m3 cache", "int8": ", int8 cache"}
    return ["call", *(NAMES[peer] + caches[dtype] for peer, dtype in ways)], found


BOARDS = (
    Board("All of them in one run", "libraries_h200", "NVIDIA H200, 2026-11-30",
          "flash-attn-4 4.0.0b36; FlashAttention-3 is the build in vLLM 0.25.1, which has no "
          "backward pass; the others are torch's 2.11.", _of("dense")),
    Board("Every backend of torch", "attention_h200", "NVIDIA H200, 2026-11-20",
          "These times hold what the host needs where a call is too short to hide it. Beyond N "
          "16,384 one sequence.", _of("dense")),
    Board("Other head dims", "attention_h200", "NVIDIA H200, 2026-11-20",
          "As the table before.", _of("head_dims")),
    Board("Shapes of published models", "published_h100", "NVIDIA H100, 2026-11-27",
          "One sequence; heads of 64 channels with a window of 1,024, as in gpt-oss.",
          _of("published")),
    Board("A causal window of 1,024", "hopper_h200", "NVIDIA H200, 2026-11-22",
          "", _of("window")),
    Board("Packed sequences", "hopper_h200", "NVIDIA H200, 2026-11-22",
          "Six sequences of 512 to 8,192 tokens (N is the longest), 16 heads.", _of("varlen")),
    Board("Block masks", "attention_h200", "NVIDIA H200, 2026-11-20",
          "One tenth of the tiles of 128 x 128 at random; TFLOP/s of the tiles that are there.",
          _of("blocks")),
    Board("Paged decode", "decode_h200", "NVIDIA H200, 2026-11-22",
          "One new token for each sequence, D 128, blocks of 16; TB/s of keys and values, where a "
          "plain read reaches 4.41. torch's have no block table: their keys lie in one piece. "
          "Planned: the splits were decided once for all layers.", _decode),
    Board("Latent (MLA) decode", "mla_h200", "NVIDIA H200, 2026-11-22",
          "Latents of 512 + 64 channels, one new token for each sequence; microseconds.", _latent),
)  # fmt: skip


def page() -> str:
    """Return the page of all libraries."""
    parts = [HEAD]
    for board in BOARDS:
        text = f"{board.text} " if board.text else ""
        parts.append(
            f"## {board.title}\n\n{text}{board.where}; "
            f"[file](../../lab/results/{board.file}.json).\n\n"
            + table(*board.rows(load(board.file))) + "\n"
        )  # fmt: skip
    return "".join(parts).rstrip("\n") + "\n"
