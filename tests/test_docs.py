"""What documents say of the repository: links, files, imports, names and commands are real."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
from pathlib import Path

import pytest

import tilewise
from tilewise import cli

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tilewise/**/*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
# CHANGELOG.md tells of files as they were. These four are names that nothing may have.
OF_NO_FILE = {"utils.py", "common.py", "base.py", "manager.py"}
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)


RECORDS = sorted((ROOT / "docs/design").glob("[0-9]*.md"))


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(document), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in plain}


@each_document
def test_links_lead_to_files_and_to_headings_in_them(document):
    wrong = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", document.read_text()):
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("record", RECORDS, ids=[record.stem for record in RECORDS])
def test_a_decision_record_says_what_why_what_else_and_when(record):
    text = record.read_text()
    number = record.name[:3]
    assert re.match(
        rf"# {number}\. .+\n\n- Status: (in force|being|replaced|removed).*\n(  .*\n)*"
        r"- Decided: \d{4}-\d\d-\d\d, [0-9a-f]{8}",
        text,
    )
    headings = re.findall(r"^\*\*(Decision|Why|Also tried)\b", text, re.MULTILINE)
    assert headings == ["Decision", "Why", "Also tried"]


@pytest.mark.parametrize("page", ["docs/design/README.md", "docs/design/architecture.md"])
def test_every_decision_record_is_listed_by_its_title(page):
    links = re.findall(r"\[(\d{3})\]\((?:design/)?(\S+)\) ([^|\n]+)", (ROOT / page).read_text())
    titles = [(r.name[:3], r.name, r.read_text().split("\n")[0][7:]) for r in RECORDS]
    assert [(number, name, title.strip()) for number, name, title in links] == titles
    assert [number for number, _, _ in titles] == [f"{i:03d}" for i in range(1, len(titles) + 1)]


# Files of which a checkpoint or a server has its own.
OF_CHECKPOINTS = {
    "1_Pooling/config.json", "adapter_config.json", "added_tokens.json", "config.json",
    "config_sentence_transformers.json", "generation_config.json", "modules.json",
    "hf_quant_config.json", "quant_config.json", "quantize_config.json", "params.json",
    "model.safetensors.index.json", "sentence_bert_config.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
}  # fmt: skip


@each_document
def test_files_that_are_named_exist(document):
    if document.name == "CHANGELOG.md":
        return
    text = prose(document)
    named = set(re.findall(r"`([\w*][\w./*-]*\.(?:py|md|json|toml))`", text)) - OF_NO_FILE
    missing = {name for name in named if not any(ROOT.glob(f"**/{name}"))}
    assert missing - OF_CHECKPOINTS == set()


def has(owner: object, name: str) -> bool:
    """Whether a module or an object has a name, or would if what it needs were installed."""
    try:
        if hasattr(owner, name):
            return True
        return inspect.ismodule(owner) and bool(importlib.import_module(f"{owner.__name__}.{name}"))
    except ImportError as error:
        return "pip install" in str(error)


@each_document
def test_snippets_import_and_name_what_there_is(document):
    for code in blocks(document, "python"):
        tree = compile(
            code, document.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilewise":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert has(module, alias.name), f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "tilewise":
                        importlib.import_module(alias.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "tilewise"
            ):
                assert hasattr(tilewise, node.attr), f"tilewise.{node.attr}"


@each_document
def test_names_of_the_package_in_the_text_are_real(document):
    """`tilewise.attention` and the like, by import or as attributes."""
    text = prose(document)
    for path in sorted(set(re.findall(r"`(tilewise(?:\.[A-Za-z_]\w*)+)", text))):
        owner: object = tilewise
        for part in path.split(".")[1:]:
            assert has(owner, part), path
            try:
                owner = getattr(owner, part)
            except ImportError:  # what it needs is not installed
                break


def commands() -> list[tuple[str, str]]:
    """Every line of a shell block, and of a text in backticks, that begins with tilewise."""
    found = []
    for document, name in zip(DOCUMENTS, NAMES, strict=True):
        if document.name == "CHANGELOG.md":
            continue
        for block in blocks(document, "(?:sh|bash)"):
            joined = block.replace("\\\n", " ")
            found += [(name, line) for line in joined.splitlines() if line.startswith("tilewise ")]
        inline = re.findall(r"`(tilewise [a-z]+ [^`\n]*--[^`\n]*)`", prose(document))
        found += [(name, line) for line in inline]
    return found


@pytest.mark.parametrize(("document", "command"), commands())
def test_commands_have_options_that_exist(document, command):
    words = shlex.split(command.split(" |")[0].split(" >")[0], comments=True)[1:]
    words = [word for word in words if word not in ("&", "...")]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _, unknown = cli._parser().parse_known_args(words)
    except SystemExit as error:
        pytest.fail(f"{document}: {command}: {error} {said.getvalue()}")
    assert not [word for word in unknown if word.startswith("-")], (document, command)
