"""Draw the picture of README.md: attention in tiles, its cache in blocks, a step in tokens.

python lab/plots/overview_plot.py
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "docs" / "images" / "overview.svg"
BLUE, ORANGE, GREEN, PURPLE = "#1f6feb", "#d9730d", "#1a7f37", "#8250df"
PALE = {BLUE: "#dbe9ff", ORANGE: "#ffe8d1", GREEN: "#d6f2dc", PURPLE: "#eadfff"}
INK, GREY, LINE = "#1f2328", "#59636e", "#d0d7de"
WIDTH, HEIGHT = 960, 340
WHAT = (
    "Three pictures. Attention: the logits of queries and keys are computed one tile at a time, "
    "tiles above the diagonal are never computed, and each row keeps a maximum, a sum and an "
    "output. Cache: three sequences have tables that point to blocks of one pool, and two of them "
    "share a block. Engine: a step has one budget of tokens, filled by one token of each running "
    "sequence and a chunk of a prompt, and it answers over HTTP."
)


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, more: str = "") -> str:
    """Return words that are centred at x."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="middle" {more}>'
        f"{words}</text>"
    )


def box(x: float, y: float, w: float, h: float, fill: str, edge: str = LINE, r: int = 3) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" fill="{fill}" '
        f'stroke="{edge}"/>'
    )


def arrow(x0: float, y0: float, x1: float, y1: float, colour: str = GREY) -> str:
    """Return an arrow."""
    return (
        f'<path d="M{x0:g} {y0:g} L{x1:g} {y1:g}" stroke="{colour}" stroke-width="1.5" fill="none" '
        'marker-end="url(#tip)"/>'
    )


def tiles(left: float, top: float) -> list[str]:
    """Return the logits of a causal call in tiles, one row of tiles under way."""
    side, count, active = 24, 7, 4
    parts = [text(left + side * count / 2, top - 10, "keys, tile by tile", 12, GREY)]
    for i in range(count):
        for j in range(count):
            fill, edge = "#ffffff", LINE
            if j > i:
                fill = "#f0f2f4"
            elif i < active or (i == active and j < 3):
                fill, edge = PALE[BLUE], BLUE
            elif i == active and j == 3:
                fill, edge = BLUE, BLUE
            parts.append(box(left + j * side, top + i * side, side - 3, side - 3, fill, edge, 2))
    y = top + active * side + 10
    right = left + side * count
    parts.append(arrow(right + 4, y, right + 26, y))
    for k, name in enumerate(("m", "l", "o")):
        parts.append(box(right + 30 + 24 * k, y - 11, 21, 21, PALE[ORANGE], ORANGE))
        parts.append(text(right + 40.5 + 24 * k, y + 4, name, 12))
    parts.append(text(right + 60, y + 27, "all a row keeps", 11, GREY))
    turned = f'transform="rotate(-90 {left - 12:g} {top + 82:g})"'
    parts.append(text(left - 12, top + 82, "queries", 12, GREY, turned))
    parts.append(text(right + 50, top + 14, "above the", 11, GREY))
    parts.append(text(right + 50, top + 28, "diagonal: not", 11, GREY))
    parts.append(text(right + 50, top + 42, "computed", 11, GREY))
    return parts


def blocks(left: float, top: float) -> list[str]:
    """Return three block tables and the pool of blocks that they point to."""
    rows = (
        ("A", BLUE, (0, 3, 5)),
        ("B", ORANGE, (0, 2)),
        ("C", GREEN, (6, 1)),
    )
    parts = [text(left + 60, top - 10, "block tables", 12, GREY)]
    pool_left, owners = left + 170, dict[int, list[str]]()
    for _, colour, ids in rows:
        for block in ids:
            owners.setdefault(block, []).append(colour)
    parts.append(text(pool_left + 36, top - 10, "cache", 12, GREY))
    for block in range(8):
        x, y = pool_left, top + block * 21
        colours = owners.get(block, [])
        for part in range(4):  # four tokens a block
            fill = PALE[colours[part % len(colours)]] if colours else "#ffffff"
            if colours and block in (5, 2, 1) and part > 1:
                fill = "#ffffff"  # the last block of a sequence is not full
            edge = colours[part % len(colours)] if colours else LINE
            parts.append(box(x + part * 18, y, 16, 17, fill, edge, 2))
    for i, (name, colour, ids) in enumerate(rows):
        y = top + 8 + i * 60
        parts.append(text(left - 4, y + 16, name, 14, colour, 'font-weight="700"'))
        for j, block in enumerate(ids):
            x = left + 12 + j * 28
            parts.append(box(x, y, 25, 24, PALE[colour], colour))
            parts.append(text(x + 12.5, y + 17, str(block), 13))
        end = left + 12 + len(ids) * 28 + 2
        for block in ids:
            parts.append(arrow(end, y + 12, pool_left - 5, top + block * 21 + 8, colour))
    return parts


def step(left: float, top: float) -> list[str]:
    """Return a step's budget of tokens, and what comes out."""
    parts = [text(left + 110, top - 10, "one step: a budget of tokens", 12, GREY)]
    colours = (BLUE, ORANGE, GREEN, *(PURPLE,) * 7)
    for i, colour in enumerate(colours):
        parts.append(box(left + i * 22, top, 19, 30, PALE[colour], colour))
    parts.append(text(left + 31, top + 46, "decoding", 11, GREY))
    parts.append(text(left + 142, top + 46, "a chunk of a prompt", 11, GREY))
    parts.append(arrow(left + 110, top + 54, left + 110, top + 72))
    parts.append(box(left + 10, top + 76, 200, 28, "#ffffff", INK, 5))
    parts.append(text(left + 110, top + 95, "model, one packed call a layer", 12))
    parts.append(arrow(left + 110, top + 106, left + 110, top + 122))
    for i, colour in enumerate((BLUE, ORANGE, GREEN)):
        parts.append(box(left + 72 + i * 26, top + 126, 23, 22, colour, colour))
    parts.append(text(left + 110, top + 164, "tokens, streamed over HTTP", 12, GREY))
    return parts


def picture() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="name what" font-family="system-ui, -apple-system, Segoe UI, Helvetica, '
        'Arial, sans-serif">',
        '<title id="name">tilewise, from the kernel to the server</title>',
        f'<desc id="what">{WHAT}</desc>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#59636e"/></marker>'
        "</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
    ]
    panels = (
        (0, "Attention, tile by tile", "exact, forward and backward,", "without an N x N matrix"),
        (1, "Its cache, block by block", "no gaps; equal beginnings", "are stored once"),
        (2, "An engine and a server", "prompts and answers", "in the same steps"),
    )
    for i, name, *lines in panels:
        middle = 160 + 320 * i
        parts.append(text(middle, 36, name, 18, INK, 'font-weight="700"'))
        for k, line in enumerate(lines):
            parts.append(text(middle, 296 + 19 * k, line, 14, GREY))
        if i:
            parts.append(f'<path d="M{320 * i} 24 V{HEIGHT - 24}" stroke="{LINE}"/>')
    parts += tiles(36, 90) + blocks(366, 90) + step(690, 90)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(picture(), encoding="utf-8")
