"""What an 8-bit cache of latents costs in accuracy: `python lab/latents.py`.

Latents are normalised and rotated keys are not, so the sizes of the two parts of a row may differ
many times over. Compared are ways to keep a row, by the error of o in float64: nothing but what the
cache has rounded is wrong. Logits of both parts have a standard deviation of `spread` each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.bench.report import emit, format_table
from tilewise.reference.quantise import dequantise, quantise, row_scale

RANK, ROPE_DIM, TOKENS, QUERIES = 512, 64, 2048, 128
WAYS = ("bfloat16", "one scale", "two scales", "bfloat16 keys")


def error_rows(
    *, spread: float, ratio: float, outliers: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the relative RMS error of o, in percent, of each dtype and way to keep a row.

    Args:
        spread: standard deviation of the logits that either part makes.
        ratio: size of the rotated keys, that of the latents being 1.
        outliers: whether channels differ in size, log-normally with a sigma of 0.7.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    parts = []
    for width, size in ((RANK, 1.0), (ROPE_DIM, ratio)):
        channels = torch.exp(0.7 * draw(width)) if outliers else torch.ones(width).double()
        keys, queries = draw(TOKENS, width) * channels, draw(QUERIES, width)
        keys *= size / keys.std()
        parts.append((keys, queries * (spread / (queries @ keys.mT).std())))
    (z, q_latent), (k_rope, q_rope) = parts

    def attend(z: Tensor, k_rope: Tensor) -> Tensor:
        return (q_latent @ z.mT + q_rope @ k_rope.mT).softmax(-1) @ z

    truth = attend(z, k_rope)

    def percent(z: Tensor, k_rope: Tensor) -> float:
        error = attend(z, k_rope) - truth
        return 100 * float((error.square().mean() / truth.square().mean()).sqrt())

    narrow = [x.bfloat16().double() for x in (z, k_rope)]
    rows: list[dict[str, Any]] = []
    for dtype in (torch.int8, torch.float8_e4m3fn):
        one = _kept(torch.cat([z, k_rope], -1), dtype).split((RANK, ROPE_DIM), -1)
        two = _kept(z, dtype), _kept(k_rope, dtype)
        kept = (narrow, one, two, (two[0], narrow[1]))
        errors = {way: round(percent(*pair), 2) for way, pair in zip(WAYS, kept, strict=True)}
        name = str(dtype).removeprefix("torch.")
        rows.append({"dtype": name, "k_rope / z": ratio, "outliers": outliers} | errors)
    return rows


def _kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an 8-bit cache makes of rows with a scale each."""
    scale = row_scale(x, dtype)
    return dequantise(quantise(x, scale, dtype), scale, torch.float64)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors of all cases as a table, and as JSON in the last line."""
    parser = argparse.ArgumentParser(prog="lab/latents.py", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the document there too")
    options = parser.parse_args(argv)
    rows = [
        row
        for outliers in (False, True)
        for ratio in (1.0, 4.0, 16.0)
        for row in error_rows(spread=1.0, ratio=ratio, outliers=outliers)
    ]
    print(format_table(rows, ["dtype", "k_rope / z", "outliers", *WAYS]))
    sizes = {"rank": RANK, "rope_dim": ROPE_DIM, "tokens": TOKENS, "queries": QUERIES}
    emit({"what": "relative RMS error of o in percent", "sizes": sizes, "rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
