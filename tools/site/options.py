"""Write the tables of the engine's and the server's options into docs/reference/options.md.

python -m tools.site.options
"""

from __future__ import annotations

from dataclasses import fields

from tilewise.engine.config import EngineConfig, options_of
from tilewise.server.options import FLAGS
from tools.site import marks

PAGE = marks.ROOT / "docs" / "reference" / "options.md"
MARK = marks.begin("the engine's options", "options")
OF_SERVER = marks.begin("the server's options", "options")


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


def table_of_server() -> str:
    """Return the tables of the server's own options in Markdown, one for each group."""
    of_engine = {said.flag for said in options_of(EngineConfig).values()}
    parts, groups = [], dict[str, list[list[object]]]()
    for flag in FLAGS:
        if flag.key not in of_engine:
            default = flag.default if flag.shown_default is None else flag.shown_default
            text = flag.text.replace("|", "\\|")
            groups.setdefault(flag.group, []).append([f"`{flag.flag}`", default, text])
    for group, rows in groups.items():
        parts.append(
            f"**{group[0].upper()}{group[1:]}**\n\n"
            + marks.table(["flag of `serve`", "default", "what it is"], rows)
        )
    return "\n".join(parts)


def written(page: str) -> str:
    """Return a page with the tables between their marks."""
    return marks.replaced(marks.replaced(page, MARK, table()), OF_SERVER, table_of_server())


if __name__ == "__main__":
    marks.write(PAGE, written)
