"""Write the table of the engine's options into docs/serve.md, from the fields of `EngineConfig`.

python docs/options_table.py
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tilewise.engine.config import EngineConfig, options_of

PAGE = Path(__file__).resolve().parent / "serve.md"
HEAD = "| of `LLM` | flag of `serve` | default | what it is |\n|---|---|---|---|\n"
BEGIN, END = (
    "<!-- begin of the engine's options: python docs/options_table.py -->\n",
    "<!-- end -->\n",
)


def table(config: type = EngineConfig) -> str:
    """Return the table in Markdown, a row for each option."""
    defaults = {field.name: field.default for field in fields(config)}
    rows = []
    for name, said in options_of(config).items():
        flag = "" if said.flag is None else f"`--{said.flag.replace('_', '-')}`"
        values = f" ({said.rule.values})" if said.rule.values else ""
        text = f"{said.text}{values}. {said.more}".strip()
        rows.append(f"| `{name}` | {flag} | {defaults[name]} | {text} |\n")
    return HEAD + "".join(rows)


def written(page: str) -> str:
    """Return a page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
