"""Every option of the engine is declared once; all that tells of it is made of its field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import tilewise
from tilewise.engine.config import EngineConfig, PromptLookup, RequestTerms, Terms, options_of
from tilewise.engine.settings import of_plain, plain, resolve
from tilewise.errors import RequestError
from tilewise.models.config import read_config
from tools.site import options

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tilewise" / "engine"
STORY = ROOT / "tilewise" / "assets" / "story"

# A process in which the source of the config has one field more.
WITH_A_FIELD = """
import contextlib, importlib.util, inspect, io, json, runpy, sys
name, path = "tilewise.engine.config", sys.argv[1]
field = '''    dummy_pages: int = field(
        default=3,
        metadata=option(Integer(1), "pages that nobody reads", flag="dummy_pages", metavar="N"),
    )
'''
source = open(path, encoding="utf-8").read()
mark = "    tensor_parallel_size: int = field("
assert source.count(mark) == 1
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
sys.modules[name] = module
exec(compile(source.replace(mark, field + mark), path, "exec"), vars(module))

from tilewise import LLM, cli
from tilewise.server import options

told = {"default": inspect.signature(LLM).parameters["dummy_pages"].default}
told["docstring"] = LLM.__doc__
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    cli.main(["serve", "--help"])
told["help"] = said.getvalue()
told["given"] = vars(cli._parser().parse_args(["serve", "--dummy-pages", "7"]))["dummy_pages"]
told["variable"] = options.resolve({}, {"TILEWISE_DUMMY_PAGES": "5"})["dummy_pages"]
told["is_known"] = options.unknown_variables({"TILEWISE_DUMMY_PAGES": "5"}) is None
with open(sys.argv[2], "w") as file:
    file.write("dummy-pages = 6")
told["file"] = options.resolve({"config": sys.argv[2]}, {})["dummy_pages"]
told["table"] = runpy.run_module(sys.argv[3])["table"]()
try:
    LLM("story", dummy_pages=0)
except ValueError as error:
    told["refusal"] = str(error)
print(json.dumps(told))
"""


def test_a_field_that_is_added_is_everywhere_without_another_edit(tmp_path):
    files = [ENGINE / "config.py", tmp_path / "options.toml", "tools.site.options"]
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_FIELD, *map(str, files)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    told = json.loads(done.stdout)
    assert (told["default"], told["given"], told["variable"], told["file"]) == (3, 7, 5, 6)
    assert told["is_known"]
    assert "\n        dummy_pages: pages that nobody reads (at least 1).\n" in told["docstring"]
    assert "--dummy-pages N pages that nobody reads (default: 3)" in " ".join(told["help"].split())
    assert (
        "| `dummy_pages` | `--dummy-pages` | 3 | pages that nobody reads (at least 1). |"
        in told["table"]
    )
    assert told["refusal"] == "dummy_pages must be at least 1, got 0"


def test_the_table_of_options_is_that_of_the_fields():
    page = options.PAGE.read_text(encoding="utf-8")
    assert options.written(page) == page, "python -m tools.site.options writes it"


def test_every_option_says_what_its_value_is():
    told = options_of(EngineConfig)
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    assert ["model", *told] == names
    for name, said in told.items():
        assert f"\n        {name}: {said.text.split()[0]}" in tilewise.LLM.__doc__
        assert not said.text.endswith(".")
        assert said.more == "" or said.more.endswith(".")


def test_a_signature_is_that_of_the_fields_and_near_names_are_told():
    (model, *options) = inspect.signature(tilewise.LLM).parameters.values()
    assert (model.name, model.kind) == ("model", model.POSITIONAL_OR_KEYWORD)
    assert {option.kind for option in options} == {model.KEYWORD_ONLY}
    for given, message in (
        ({"blok_size": 4}, "got an unexpected keyword argument 'blok_size'; did you mean 'block_s"),
        ({"model": "story"}, "multiple values for argument 'model'"),
    ):
        with pytest.raises(TypeError, match=message):
            tilewise.LLM("story", **given)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        tilewise.LLM()


@pytest.mark.parametrize(
    "function",
    [
        tilewise.LLM.generate,
        tilewise.LLM.embed,
        tilewise.LLM.stream,
        tilewise.AsyncLLM.generate,
        tilewise.AsyncLLM.embed,
    ],
    ids=lambda function: function.__qualname__,
)
def test_terms_of_a_request_are_keywords_of_all_that_take_one(function):
    terms = {field.name: field.default for field in dataclasses.fields(RequestTerms)}
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in terms} == terms
    assert {shown[name].kind for name in terms} == {inspect.Parameter.KEYWORD_ONLY}


def test_terms_are_declared_as_keywords_of_the_same_types_for_type_checkers():
    assert Terms.__annotations__.keys() == {f.name for f in dataclasses.fields(RequestTerms)}
    assert get_type_hints(Terms) == get_type_hints(RequestTerms)


def test_terms_that_are_wrong_or_unknown_are_named():
    message = r"embed\(\) got an unexpected keyword argument 'usr'; did you mean 'user'"
    with pytest.raises(TypeError, match=message):
        RequestTerms.given_to(tilewise.LLM.embed, {"usr": "a"})
    for given, message in (
        ({"user": 3}, "user must be a str, got int"),
        ({"cache_salt": "a" * 1025}, "cache_salt must be of at most 1024 characters, got 1025"),
        ({"priority": 0.5}, "priority must be an integer, got 0.5"),
        ({"deadline_s": -1}, "deadline_s must be finite and at least 0, got -1"),
        ({"max_queue_s": 10**400}, "max_queue_s must be finite and at least 0, got inf"),
    ):
        with pytest.raises(RequestError, match=message):
            RequestTerms(**given)


def test_a_config_is_frozen_and_travels_to_other_processes():
    weights = {"a": 2.0}
    config = EngineConfig(
        STORY, scheduling_policy="fair", user_weights=weights, speculative=PromptLookup()
    )
    weights["b"] = 1.0
    assert config.user_weights == {"a": 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(
        TypeError, match="speculative must be PromptLookup, DraftModel, OwnHead or None"
    ):
        EngineConfig(STORY, speculative="often")


def test_what_is_resolved_leaves_nothing_to_decide_and_can_be_told():
    device = torch.device("cpu")
    config = EngineConfig(str(STORY), offload_dir=Path("files"), swap_space_gib=1.0)
    decided = resolve(config, device, read_config(STORY), torch.bfloat16)
    assert (decided.graphs, decided.batch_invariant) == ("off", True)
    assert decided.max_model_len == read_config(STORY).context_length
    assert (decided.kv_cache_dtype, decided.max_num_batched_tokens) == (torch.bfloat16, 2048)
    again = of_plain(json.loads(json.dumps(plain(decided))))
    assert again == dataclasses.replace(decided, offload_dir="files")


def _dataclasses_of(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if text == "dataclass" or text.startswith("dataclass("):
                    yield node.name, text


def test_what_describes_is_frozen():
    """A class of options, limits or terms does not change once it is made."""
    endings = ("Config", "Limits", "Params", "Terms", "Options", "Option", "Flag", "Spec", "Maker")
    changing, found = [], 0
    for path in sorted((ROOT / "tilewise").rglob("*.py")):
        of_config = path in (ENGINE / "config.py", ENGINE / "settings.py", ENGINE / "making.py")
        for name, text in _dataclasses_of(ast.parse(path.read_text(encoding="utf-8"))):
            if of_config or name.endswith(endings):
                found += 1
                if "frozen=True" not in text:
                    changing.append(f"{path.name}: {name}")
    assert not changing
    assert found > 20


WRITES = {"clear", "pop", "popitem", "setdefault", "update"}


def test_no_function_of_the_engine_writes_into_a_table_that_it_was_given():
    written = [
        f"{path.name}:{line} {name}"
        for path in sorted(ENGINE.rglob("*.py"))
        for name, line in _written(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not written
    mistake = "def f(found: dict[str, int] | None) -> None:\n    found['a'] = 1\n"
    assert list(_written(ast.parse(mistake))) == [("found", 2)]


def _written(tree: ast.Module):
    """Yield parameters that are declared as a dict or a Mapping, and the lines that write there."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = function.args
        given = {
            argument.arg
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if argument.annotation is not None
            and any(kind in ast.unparse(argument.annotation) for kind in ("dict[", "Mapping["))
        }
        for node in ast.walk(function):
            target: ast.AST | None = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = node.value
            elif isinstance(node, ast.AugAssign):
                target = node.target
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = node.func.value if node.func.attr in WRITES else None
            if isinstance(target, ast.Name) and target.id in given:
                yield target.id, node.lineno
