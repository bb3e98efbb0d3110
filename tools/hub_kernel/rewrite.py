"""Copy the modules that attention needs, so that the copy works under any name.

A kernel of the hub is imported from a path, under a name that is unique to its version; another
version, and an installed tilewise, may be in the same process. So imports become relative, and the
registered ops have a namespace of their own.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

__all__ = ["copy", "modules"]

ROOT = Path(__file__).resolve().parents[2] / "tilewise"
# What calls start from; the kernels and the oracles are imported by name when a call needs them.
_BEGIN = ("integrations/flash_attn", "kernels", "ops", "masks", "reference")
# The names by which torch knows the ops and the mask, in all modules that are copied.
_NAMESPACES = (
    ('Library("tilewise", "DEF")', 'Library("{}", "DEF")'),
    ('f"tilewise::{name}"', 'f"{}::{{name}}"'),
    ("torch.ops.tilewise,", "torch.ops.{},"),
    ('serialized_type_name="tilewise.', 'serialized_type_name="{}.'),
)


def modules() -> list[Path]:
    """Return the files that the copy holds, relative to the package."""
    waiting = [path for name in _BEGIN for path in (ROOT / name).rglob("*.py")]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        relative = path.relative_to(ROOT)
        if relative in found:
            continue
        found.add(relative)
        for folder in relative.parents:
            if (ROOT / folder / "__init__.py").exists() and folder != Path("."):
                waiting.append(ROOT / folder / "__init__.py")
        for name in _imported(ast.parse(path.read_text())):
            waiting += _files_of(name)
    return sorted(found - {Path("integrations/__init__.py")})


def _imported(tree: ast.Module) -> list[str]:
    """Return the dotted names below tilewise that a module imports, anywhere in it."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilewise":
            names.append(str(node.module))
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [a.name for a in node.names if a.name.split(".")[0] == "tilewise"]
    return names


def _files_of(name: str) -> list[Path]:
    """Return the file of a module, or of a package, or none for another name."""
    path = ROOT.joinpath(*name.split(".")[1:])
    places = (path.with_suffix(".py"), path / "__init__.py")
    return [place for place in places if place.exists() and place != ROOT / "__init__.py"]


def copy(out: Path, namespace: str) -> None:
    """Write the modules to a folder, with relative imports and the ops in a namespace.

    Args:
        out: the folder of the copy, which is made.
        namespace: the name of the ops' library in torch, an identifier.

    Raises:
        ValueError: namespace is no identifier, or a module says "tilewise" where a copy cannot.
    """
    if not namespace.isidentifier():
        raise ValueError(f"namespace must be an identifier, got {namespace!r}")
    for relative in modules():
        source = _relative((ROOT / relative).read_text(), relative)
        for old, new in _NAMESPACES:
            source = source.replace(old, new.format(namespace))
        left = _names_in_code(source)
        if left:
            raise ValueError(f"{relative} must not name the package in code, got {left}")
        place = out / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source)
    for folder in {path.parent for path in out.rglob("*.py")}:
        (folder / "__init__.py").touch()


def _relative(source: str, relative: Path) -> str:
    """Return a module's source with imports of the package relative to its place."""
    dots = "." * len(relative.parts)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilewise":
            name = str(node.module)
            inner = name.partition(".")[2]
            at = node.lineno - 1
            lines[at] = lines[at].replace(f"from {name} import", f"from {dots}{inner} import", 1)
        elif isinstance(node, ast.Import):
            [*names] = [a.name for a in node.names if a.name.split(".")[0] == "tilewise"]
            for name in names:
                inner, _, last = name.partition(".")[2].rpartition(".")
                at = node.lineno - 1
                lines[at] = lines[at].replace(
                    f"import {name}", f"from {dots}{inner} import {last} as _{last}", 1
                )
    return "".join(lines)


def _names_in_code(source: str) -> list[str]:
    """Return strings and names of code that still say which package this is.

    Docstrings and messages may: a user reads them. What would be imported or registered may not.
    """
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and re.fullmatch(r"tilewise(::?|(\.\w+)*\.?)", node.value)
    ]
    owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found += [n.id for n in owners if isinstance(n, ast.Name) and n.id == "tilewise"]
    return found
