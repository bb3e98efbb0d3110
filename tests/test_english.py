"""A field's text says what the value is, and the glossary lists the words of the house."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tilewise"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
MOST_WORDS = 60

# A text that begins so says how the value came, for whom it is or when it counts: not what it is.
NO_NOUNS = frozenset(
    ("and", "by", "called", "computes", "divides", "for", "gets", "gives", "holds", "how",
     "if", "it", "its", "makes", "multiplies", "of", "returns", "says", "takes", "that",
     "their", "them", "they", "those", "to", "what", "when", "where", "which", "who", "whom",
     "whose")
)  # fmt: skip
_FIELD = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")
_NO_NAME = re.compile(r"(What|Who|Whatever|Where|As|By|Of|For)\b")
_RAISES = re.compile(
    r"^    \w+(?:, \w+)*: ((?:it|they|one (?:is|of these)|there is none|neither|none(?! of))\b.*)",
    flags=re.MULTILINE,
)
_SAYS_WHEN = re.compile(r"\b(True|False|[Ww]hether|if)\b")
_SECTION = re.compile(r"(Args|Attributes):$")
# Docstrings at which readers stopped who restated them without the code.
_VERBS = (
    "Add|Allocate|Begin|Bound|Compile|Compute|Cut|Do|Drop|Fail|Forget|Give|Keep|Learn|Let|Map|Note|"
    "Optimise|Order|Print|Raise|Record|Refuse|Run|Say|Serve|Take|Tell|View|Whether|Write|Zero"
)
_VAGUE = (
    (re.compile(r"(Return|Yield) what\b"), "must name the result by a noun, not by `what`"),
    (re.compile(rf"({_VERBS}) what\b"), "must name the object by a noun, not by `what`"),
    (re.compile(r"(It|They|That|Those|These|Its|Their)\b"), "must begin with a noun or a verb"),
    (
        re.compile(r"\w+( \w+)? (it|them|those)\b(?! (that|who|which|of the|of these)\b)"),
        "must name its object by a noun: nothing before says what a pronoun means",
    ),
    (re.compile(r"\w+ that of\b"), "must name its object by a noun, not by `that of`"),
    (
        re.compile(r".*\bsee there\b", flags=re.DOTALL),
        "must name the place or say the fact, not `see there`",
    ),
    (
        re.compile(r".*\bit is (another|some other) thing\b", flags=re.DOTALL),
        "must say of which argument an error tells",
    ),
    (re.compile(r"(See|As) [`\w.]+\.?\Z"), "must say the one fact that is needed, not only where"),
    (
        re.compile(r".*\bso (many|much|few)\b(?![^.]*\b(that|as)\b)", flags=re.DOTALL),
        "must name the number, not `so many`",
    ),
)


def fields(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the text of each field of a docstring's Args and Attributes."""
    names: str | None = None
    text: list[str] = []
    is_inside = False
    for line in [*docstring.split("\n"), "end"]:
        field = _FIELD.match(line) if is_inside else None
        if names is not None and (field or not line.startswith("        ")):
            yield names, " ".join(text)
            names = None
        if field:
            names, text = field[1], [field[2].strip()]
        elif names is not None:
            text.append(line.strip())
        elif line and not line.startswith(" "):
            is_inside = bool(_SECTION.match(line))


def _annotations(node: ast.AST) -> dict[str, str]:
    """Return the annotations of a function's arguments, or of a class's fields and arguments."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation}
    found: dict[str, str] = {}
    for child in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(child, ast.AnnAssign):
            found[ast.unparse(child.target)] = ast.unparse(child.annotation)
        elif isinstance(child, ast.FunctionDef) and child.name == "__init__":
            found |= _annotations(child)
    return found


def mistakes(source: str) -> Iterator[str]:
    """Yield the faults of a module's docstrings and of their fields."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        owner, docstring = getattr(node, "name", "the module"), ast.get_docstring(node) or ""
        yield from (f"{owner}: {rule}" for pattern, rule in _VAGUE if pattern.match(docstring))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _NO_NAME.match(docstring):
            yield f"{owner}: must begin with a verb, or with the noun of a property"
        for error in _RAISES.findall(docstring.partition("\nRaises:\n")[2].split("\n\n")[0]):
            yield f"{owner}: Raises: {error!r} must begin with the noun that is wrong"
        types = _annotations(node)
        for names, text in fields(docstring):
            words = text.split()
            if words[:1] == ["see"] or text.startswith("("):  # a reference, or a shape
                continue
            are_bools = all(types.get(name, "").startswith("bool") for name in names.split(", "))
            if are_bools and words[:1] != ["as"] and not _SAYS_WHEN.search(text):
                yield f"{owner}: {names}: {text!r} must say when it is true: True if ..., whether"
            if len(words) < 3:
                yield f"{owner}: {names}: {text!r} must have at least three words"
            elif words[0].lower().strip(",.;:`") in NO_NOUNS:
                yield f"{owner}: {names}: {text!r} must begin with a noun"


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir()))
def test_a_fields_text_begins_with_what_the_value_is(room):
    path = PACKAGE / room
    found = [
        f"{file.relative_to(ROOT)}: {mistake}"
        for file in ([path] if path.suffix == ".py" else sorted(path.rglob("*.py")))
        for mistake in mistakes(file.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("caller: for whom the request is.", "noun"),
        ("caller: the client.", "three words"),
        ("caller: the HTTP client that sent\n        the request.", None),
        ("x, y: of\n        the other two tensors.", "noun"),
        ("x, y: those of the other call.", "noun"),
        ("make: returns a new model.", "noun"),
        ("q: (T, Hq, D).", None),
    ],
)
def test_faults_of_a_field_are_seen(text, fault):
    source = f'class Job:\n    """A job.\n\n    Attributes:\n        {text}\n    """\n'
    if "\n" in text:
        source = source.replace("\n        the", "\n            the")
    found = list(mistakes(source))
    assert (fault in found[0]) if fault else not found


def test_an_error_names_what_is_wrong():
    docstring = '"""Check words.\n\n    Raises:\n        {}\n    """'
    for text, is_fault in (
        ("TypeError: it is no list.", True),
        ("ValueError: words has too many texts.", False),
    ):
        found = list(mistakes(f"def check():\n    {docstring.format(text)}\n"))
        assert any("that is wrong" in fault for fault in found) == is_fault


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("the step is captured.", True),
        ("True if the step is captured.", False),
        ("whether the step is captured.", False),
        ("as of `capture`.", False),
    ],
)
def test_the_text_of_a_bool_says_when_it_is_true(text, is_fault):
    docstring = f'"""Run.\n\n    Args:\n        captured: {text}\n    """'
    found = list(mistakes(f"def run(captured: bool):\n    {docstring}\n"))
    assert any("when it is true" in fault for fault in found) == is_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Return what a step takes.", "noun"),
        ("Return the seconds of a step.", None),
        ("Refuse what the model cannot do.", "noun"),
        ("Decide what runs in each step.", None),
        ("Those of each kernel, by part.", "noun"),
        ("What the engine can serve.", "noun"),
        ("Of the processes, by rank.", "noun"),
        ("Run it for the tensors of a call.", "pronoun"),
        ("Return that of a request.", "that of"),
        ("Return those that wait.", None),
        ("Return a list; see there for the rule.", "fact"),
        ("Refuse a text. Raises TypeError: it is another thing.", "argument"),
        ("See `Rule`.", "fact"),
        ("See the class; None is no bound.", None),
        ("Return the blocks of so many tokens.", "number"),
        ("Refuse a body with so many parts that parsing takes long.", None),
    ],
)
def test_vague_docstrings_are_seen(text, fault):
    found = list(mistakes(f'def run():\n    """{text}"""\n'))
    assert (fault in found[0]) if fault else not found


def _entries() -> list[str]:
    return re.findall(r"^\| \*\*(.+?)\*\* \|", GLOSSARY.read_text(), flags=re.MULTILINE)


def test_the_glossary_is_short_and_in_order():
    entries = _entries()
    assert 20 <= len(entries) <= MOST_WORDS
    assert len(set(entries)) == len(entries)
    assert entries == sorted(entries, key=str.lower)


def test_the_package_uses_each_word_of_the_glossary():
    text = " ".join(path.read_text().lower() for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"[a-z0-9]+", text))
    missing = [
        entry
        for entry in _entries()
        if not all(w in words or f"{w}s" in words for w in re.findall(r"[a-z0-9]+", entry.lower()))
    ]
    assert not missing
