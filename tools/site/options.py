"""Write the table of the engine's options into docs/reference/options.md.

python -m tools.site.options
"""

from __future__ import annotations

from dataclasses import fields

from tilewise.engine.config import EngineConfig, options_of
from tools.site import marks

PAGE = marks.ROOT / "docs" / "reference" / "options.md"
MARK = marks.begin("the engine's options", "options")


def table(config: type = EngineConfig) -> str:
    """Return the table in Markdown, a row for each option."""
    defaults = {field.name: field.default for field in fields(config)}
    rows = []
    for name, said in options_of(config).items():
        flag = "" if said.flag is None else f"`--{said.flag.replace('_', '-')}`"
        values = f" ({said.rule.values})" if said.rule.values else ""
        text = f"{said.text}{values}. {said.more}".strip()
        rows.append([f"`{name}`", flag, defaults[name], text])
    return marks.table(["of `LLM`", "flag of `serve`", "default", "what it is"], rows)


def written(page: str) -> str:
    """Return a page with the table between its two marks."""
    return marks.replaced(page, MARK, table())


if __name__ == "__main__":
    marks.write(PAGE, written)
