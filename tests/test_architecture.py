"""The rules of docs/design/architecture.md: import direction, file sizes, mirrored tests."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tilewise.ops import dispatch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tilewise"
FILES = sorted(PACKAGE.rglob("*.py"))

# room -> the rooms it may import; its own folder is always allowed.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "keywords": set(),
    "progress": set(),
    "children": set(),
    "flags": set(),
    "version": set(),
    "huge_pages": set(),
    "cost": {"errors"},
    "masks": {"errors"},
    "reference": {"keywords", "errors"},
    "kernels": {"children", "errors", "huge_pages", "progress", "version"},
    "cache": {"errors", "huge_pages"},
    "ops": {"children", "kernels", "reference", "masks", "cost", "keywords", "progress", "errors"},
    "nn": {"ops", "cache", "errors"},
    "models": {"nn", "ops", "cache", "masks", "progress", "errors"},
    "distributed": {"children", "models", "nn", "ops", "cache", "keywords", "errors"},
    "engine": {
        "children",
        "distributed",
        "models",
        "nn",
        "ops",
        "cache",
        "cost",
        "flags",
        "keywords",
        "progress",
        "version",
        "errors",
    },
    "server": {"children", "engine", "flags", "errors"},
    "cluster": {"server", "engine", "errors"},
    "training": {"models", "nn", "ops", "progress", "errors"},
    "integrations": {"ops", "nn", "cache", "masks", "errors"},
    "testing": {"reference", "errors"},
    "bench": {
        "children",
        "flags",
        "cluster",
        "distributed",
        "integrations",
        "engine",
        "training",
        "models",
        "nn",
        "ops",
        "masks",
        "kernels",
        "cache",
        "reference",
        "testing",
        "cost",
        "errors",
    },
    "doctor": {
        "bench",
        "ops",
        "kernels",
        "reference",
        "testing",
        "cost",
        "progress",
        "version",
        "errors",
    },
    "cli": {
        "doctor",
        "cluster",
        "server",
        "engine",
        "bench",
        "ops",
        "models",
        "cache",
        "cost",
        "flags",
        "errors",
    },
}
# room of the engine -> the rooms of the engine that it may import.
ENGINE_ROOMS: dict[str, set[str]] = {
    "record": set(),
    "tables": {"record"},
    "scheduling": {"tables", "record"},
    "steps": {"scheduling", "tables", "record"},
    "captured": {"steps", "scheduling", "tables", "record"},
    "tensor_parallel": {"captured", "steps", "scheduling", "tables", "record"},
}
NO_TORCH = (
    "cache/allocator.py",
    "cache/contents.py",
    "cache/prefix.py",
    "engine/scheduling/scheduler.py",
    "engine/request.py",
    "engine/scheduling/order.py",
    "engine/scheduling/preemption.py",
    "engine/tables/block_tables.py",
    "engine/tables/holdings.py",
    "engine/tables/swap_space.py",
    "engine/scheduling/deadlines.py",
    "engine/scheduling/beams.py",
    "engine/scheduling/results.py",
    "engine/scheduling/speculative.py",
    "cluster/router.py",
    "cluster/prompts.py",
)
BANNED_NAMES = {"utils.py", "common.py", "base.py", "manager.py", "helpers.py"}


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def _imports(path: Path) -> list[str]:
    """Every module imported anywhere in the file, but for type-checking-only blocks."""
    return _read(path).when_run


class _File(NamedTuple):
    """What a file imports as it runs, and for types, too; whether it is empty or says its idea."""

    when_run: list[str]
    for_types: list[str]
    has_docstring: bool


@functools.cache
def _read(path: Path) -> _File:
    """Parse a file once."""
    tree, when_run, for_types = ast.parse(path.read_text()), list[str](), list[str]()

    def visit(node: ast.AST, *, runs: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in map(_name, ast.walk(node.test)):
            runs = False
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for_types.extend(names)
        when_run.extend(names if runs else ())
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which holds no statement
                visit(child, runs=runs)

    visit(tree, runs=True)
    is_told = not tree.body or ast.get_docstring(tree) is not None
    return _File(when_run, for_types, is_told)


def _name(node: ast.AST) -> str | None:
    return getattr(node, "id", None) or getattr(node, "attr", None)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    for name in _imports(path):
        if not name.startswith("tilewise."):
            continue
        target = name.split(".")[1]
        if target in (room, "__version__"):
            continue
        assert target in ALLOWED[room], f"{room} must not import {target} ({name})"


@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_rooms_of_the_engine_stand_on_one_another(room):
    for path in (PACKAGE / "engine" / room).rglob("*.py"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[:2] == ["tilewise", "engine"] and parts[2] in ENGINE_ROOMS:
                assert parts[2] in ENGINE_ROOMS[room] | {room}, f"{path.name} imports {name}"


def test_files_import_one_another_in_an_order():
    """No file needs one that needs it, be it for its types alone."""
    assert not (found := _circles()), f"these import one another in a circle: {found}"


def _circles() -> set[frozenset[str]]:
    """Return the largest sets of files of which each can be reached from each by imports."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    needs = {
        module: {_file_of(name, files) for name in _read(path).for_types} & files.keys() - {module}
        for module, path in files.items()
    }
    while free := [module for module, below in needs.items() if not below & needs.keys()]:
        for module in free:  # it needs nothing that could need it
            del needs[module]
    reached: dict[str, set[str]] = {}
    for module in needs:
        seen, todo = set[str](), [module]
        while todo:
            more = needs[todo.pop()] & needs.keys() - seen
            seen |= more
            todo += more
        reached[module] = seen
    return {
        frozenset(other for other in seen if module in reached[other])
        for module, seen in reached.items()
        if module in seen
    }


def _file_of(name: str, files: Mapping[str, Path]) -> str:
    """Return the module that an imported name is, or is of."""
    return name if name in files else name.rpartition(".")[0]


def test_nn_sees_only_the_spec_of_the_cache():
    for path in (PACKAGE / "nn").glob("*.py"):
        for name in _imports(path):
            if name.startswith("tilewise.cache"):
                assert name.startswith("tilewise.cache.spec"), f"{path.name} imports {name}"


@pytest.mark.parametrize("name", NO_TORCH)
def test_bookkeeping_knows_no_tensors(name):
    assert not [n for n in _imports(PACKAGE / name) if n.split(".")[0] in ("torch", "numba")]


def test_backends_do_not_import_one_another():
    # The portable kernels know nothing of Hopper's, which take from them what needs no WGMMA.
    below = {"gluon": {"gluon", "triton", "host"}, "triton": {"triton", "host"}}
    backends = {path.name for path in (PACKAGE / "kernels").iterdir() if path.is_dir()}
    for backend in backends - {"__pycache__", "tiles"}:  # which are tables
        for path in (PACKAGE / "kernels" / backend).rglob("*.py"):
            for name in _imports(path):
                parts = name.split(".")
                if parts[:2] == ["tilewise", "kernels"] and parts[2] in backends - {"tiles"}:
                    allowed = below.get(backend, {backend})
                    assert parts[2] in allowed, f"{path.name} imports {name}"


def test_files_are_named_for_what_they_hold():
    for path in FILES:
        assert path.name not in BANNED_NAMES, f"{path.relative_to(ROOT)} is a drawer, not an idea"


def test_every_module_says_what_it_is():
    for path in FILES:
        assert _read(path).has_docstring, f"{path.relative_to(ROOT)} has no docstring"


def test_every_op_has_an_oracle_a_kernel_for_each_backend_and_a_test():
    for backend in ("reference", "cpu", "triton"):
        planner = dispatch.kernel_module("attention", backend)
        assert callable(planner.plan_fwd)
        assert callable(planner.plan_bwd)
        for op in ("paged_attention", "mla_decode"):
            assert callable(dispatch.kernel_module(op, backend).plan_fwd)
    for op in (
        "cache_ops",
        "rope",
        "merge",
        "norm",
        "activation",
        "adjust_logits",
    ):
        for backend in ("reference", "cpu", "triton"):
            assert callable(dispatch.kernel_module(op, backend).why_not)


def test_two_places_remember_calls_and_launches():
    """Of what begins empty and calls fill, and of names that functions bind anew."""
    found, bound = set(), set()
    for folder in ("ops", "kernels/host", "kernels/gluon"):
        for path in (PACKAGE / folder).rglob("*.py"):
            tree, name = ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix()
            holders = {
                node.name for node in tree.body if isinstance(node, ast.ClassDef) and _fills(node)
            }
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and _is_empty(node.value, holders):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.add(f"{name} {_name(target)}")
            bound |= {
                f"{name} {each}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Global)
                for each in node.names
            }
    registries = {"ops/library.py _kernels", "ops/derivatives.py _nodes"}  # filled by imports
    recordings = {"kernels/host/requests.py _recordings"}  # of threads that compile and run nothing
    memories = {"ops/call.py _memory", "kernels/host/memory.py launches"}
    assert found - registries - recordings == memories
    assert not bound


# Functions of few values that remember what they returned: facts, and what is made of a type.
REMEMBERED = {
    "kernels/device.py": {"has_triton", "capability", "sm_count", "l2_bytes"},
    "kernels/gluon/quantised/linear.py": {"kind_and_table"},
    "kernels/host/descriptors.py": {
        "tile_layout",
        "_form_of_tiles",
        "_form_of_chunks",
        "_form_of_matrix",
        "_form_of_numbers",
        "driver",
    },
    "kernels/host/first_run.py": {"first_run"},  # whether this process is one
    "kernels/host/plan.py": {"_visited"},
    "kernels/plan.py": {"_steps"},
    "ops/call.py": {"_numbers_of"},
    "ops/dispatch.py": {"kernel_module", "choose"},
    "ops/paged/swap.py": {"_stream"},
}


def test_functions_remember_facts_only():
    found: dict[str, set[str]] = {}
    for folder in ("ops", "kernels/host", "kernels/gluon", "kernels/device.py", "kernels/plan.py"):
        path = PACKAGE / folder
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                for each in getattr(node, "decorator_list", ()):
                    called = each.func if isinstance(each, ast.Call) else each
                    if _name(called) in ("cache", "lru_cache"):
                        name = file.relative_to(PACKAGE).as_posix()
                        found.setdefault(name, set()).add(node.name)
    assert found == REMEMBERED


def test_a_thread_carries_one_thing_that_launches_read():
    """What thread-locals there are: which kernels of a chain begin early."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (_name(node.value), node.attr) == ("threading", "local")
    }
    assert found == {"kernels/early.py"}


def written_parameters(source: str) -> set[tuple[str, str]]:
    """Return the functions that write to a dict which they are given, each with its parameter."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = {
            each.arg
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if each.annotation is not None and _is_dict(each.annotation)
        }
        bound = set()  # which stand for another dict, a copy mostly
        for each in ast.walk(node):
            if isinstance(each, ast.Assign):
                bound |= {_name(target) for target in each.targets if isinstance(target, ast.Name)}
        written = set()
        for each in ast.walk(node):
            targets = getattr(each, "targets", [getattr(each, "target", None)])
            if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
                written |= {_name(t.value) for t in targets if isinstance(t, ast.Subscript)}
            if isinstance(each, ast.AugAssign):
                written.add(_name(each.target))
            if isinstance(each, ast.Call) and getattr(each.func, "attr", "") in WRITING:
                written.add(_name(each.func.value))
        found |= {(node.name, name) for name in (written & given) - bound}
    return found


def _is_dict(annotation: ast.expr) -> bool:
    names = {_name(node) for node in ast.walk(annotation)}
    return bool(names & {"dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict"})


WRITING = {"clear", "pop", "popitem", "setdefault", "update"}


def test_no_function_writes_to_a_dict_that_it_is_given():
    found = {
        path.relative_to(PACKAGE).as_posix(): written
        for path in FILES
        if (written := written_parameters(path.read_text()))
    }
    # The memory of launches bounds those of all plans, each of which is a plan's own.
    assert found == {"kernels/host/memory.py": {("add_met", "met")}}


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("terms['a'] = 1", True),
        ("terms.pop('a')", True),
        ("terms |= {'a': 1}", True),
        ("terms = {**terms, 'a': 1}; terms['b'] = 2", False),
        ("return terms['a']", False),
    ],
)
def test_a_dict_that_is_written_to_is_seen(line, is_seen):
    source = f"def f(terms: dict[str, int]):\n    {line}"
    assert bool(written_parameters(source)) == is_seen


def test_what_describes_is_frozen():
    """Classes named Config, Spec, Terms, Layout, Settings and Limits are frozen or named tuples."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith(DESCRIBES):
                bases = {_name(base) for base in node.bases}
                frozen = any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
                assert frozen or bases & UNCHANGED, f"{path.name} {node.name}"


DESCRIBES = ("Config", "Spec", "Terms", "Layout", "Settings", "Limits")
UNCHANGED = {"NamedTuple", "Protocol", "Structure", "TypedDict"}


@pytest.mark.parametrize("option", ["causal", "window", "softcap", "deterministic"])
def test_an_option_of_attention_is_written_in_at_most_four_files_above_kernels(option):
    """The public function, the signature, the registered op, and second derivatives in tiles.

    Attention in 8 bits is another op; oracles take what a spec says.
    """
    found = set()
    for path in (PACKAGE / "ops" / "attention").rglob("*.py"):
        if path.name not in ("fp8.py", "fp8_op.py"):
            tree = ast.parse(path.read_text())
            names = {getattr(node, "arg", None) or _name(node) for node in ast.walk(tree)}
            if option in names:
                found.add(path.name)
    assert {"api.py", "arguments.py"} <= found <= {"api.py", "arguments.py", "op.py", "tiles.py"}


CONTAINERS = {"dict", "list", "set", "OrderedDict", "defaultdict", "deque", "WeakKeyDictionary"}


def _is_empty(value: ast.AST | None, holders: set[str] = frozenset()) -> bool:
    """Whether a value is a container without contents, or an object of a class that holds one."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call) and not value.args:
        function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        name = function.attr if isinstance(function, ast.Attribute) else _name(function)
        return name in CONTAINERS | holders
    return isinstance(value, ast.List) and not value.elts


def _fills(node: ast.ClassDef) -> bool:
    """Whether objects of a class hold an empty container to begin with."""
    return any(
        isinstance(each, ast.Assign | ast.AnnAssign) and _is_empty(each.value)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for each in method.body
    )
