"""No process of this package imports what lies in the folder that it runs in."""

from __future__ import annotations

import ast
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tilewise import children
from tilewise.distributed.environment import worker_environment
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.engine.trials import Trials
from tilewise.server.engine_process import remote
from tilewise.server.templates import Templates

ROOT = Path(__file__).parents[1]
# What Python and the package's first line import before any of ours could forbid it: of `python -m`
# all modules are looked for in the current folder first, whatever is run.
BEFORE_US = {
    "__future__", "_typing", "abc", "ast", "collections", "contextlib", "copyreg", "dis", "enum",
    "functools", "importlib", "inspect", "keyword", "linecache", "numbers", "opcode", "operator",
    "pkgutil", "re", "reprlib", "runpy", "tokenize", "token", "types", "typing", "warnings",
    "weakref", "zipimport",
}  # fmt: skip
STARTS = [f"subprocess.{n}" for n in ("Popen", "run", "call", "check_call", "check_output")]


@pytest.fixture
def poisoned(tmp_path, monkeypatch):
    """Be in a folder where every module of the standard library, and others, end the process."""
    others = {"jinja2", "markupsafe", "numpy", "torch", "msgspec", "triton", "numba", "llguidance"}
    for name in (set(sys.stdlib_module_names) | others | {"sitecustomize"}) - BEFORE_US:
        (tmp_path / f"{name}.py").write_text(f"import os\nos.write(2, b'{name}')\nos._exit(77)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the tests may have been started with more


def _ended(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def test_the_folder_is_poisoned(poisoned):
    assert _ended(sys.executable, "-c", "import json").returncode == 77
    assert _ended(sys.executable, "-m", "json.tool").returncode == 77


def test_the_command_line_imports_nothing_of_the_folder(poisoned):
    done = _ended(sys.executable, "-m", "tilewise", "key", "alice")
    assert done.returncode == 0, done.stderr


def test_processes_of_the_command_line_are_forbidden_to(poisoned):
    code = (
        "import sys; del sys.path[0]; sys.argv[1:] = ['key', 'alice']\n"
        "import contextlib, os, subprocess, tilewise.cli as cli\n"
        "with contextlib.suppress(SystemExit): cli.main()\n"
        "sys.exit(subprocess.run([sys.executable, '-c', 'import json']).returncode)\n"
    )
    done = _ended(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_template_is_rendered_by_modules_of_this_environment(poisoned):
    templates = Templates()
    try:
        assert templates.render("{{ messages | tojson }}", {"messages": ["a"]}) == '["a"]'
    finally:
        templates.close()


def test_multiprocessing_starts_nothing_of_the_folder(poisoned):
    context = multiprocessing.get_context("spawn")
    with children.spawning():
        process = context.Process(target=os.getpid)
        process.start()
        process.join()
    assert process.exitcode == 0
    assert "PYTHONSAFEPATH" not in os.environ


def test_the_engines_process_is_forbidden_to(poisoned, monkeypatch):
    begin = subprocess.Popen

    def started(command, **options):
        assert command[:2] == [sys.executable, "-P"]
        return begin([sys.executable, "-c", "import json, tilewise, sys; sys.exit(5)"], **options)

    monkeypatch.setattr(remote.subprocess, "Popen", started)
    with pytest.raises(RuntimeError, match="ended with 5$"):
        remote.RemoteEngine("story", {})


def _calls(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(ast.unparse(n.func), n.keywords) for n in nodes if isinstance(n, ast.Call)]


def test_every_process_has_the_environment_that_forbids_it():
    found = 0
    for path in (ROOT / "tilewise").rglob("*.py"):
        if "subprocess" not in path.read_text():
            continue
        for name, keywords in _calls(path):
            if name in STARTS:
                found += 1
                env = next((ast.unparse(k.value) for k in keywords if k.arg == "env"), "")
                assert env == "own" or "environment(" in env, f"{path} starts one in {env!r}"
    assert found >= 9


def test_every_start_of_multiprocessing_is_within_spawning():
    """Else `python -c` looks for multiprocessing itself in the current folder."""
    files = [p for folder in ("tilewise", "lab") for p in (ROOT / folder).rglob("*.py")]
    spawn = [p for p in files if 'get_context("spawn")' in p.read_text()]
    assert len(spawn) >= 6
    assert [p for p in spawn if "with spawning()" not in p.read_text()] == []


def test_a_grammar_is_compiled_by_modules_of_this_environment(poisoned):
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(ROOT / "tilewise" / "assets" / "story")
    trials = Trials(tokenizer.to_json(), 4096, [tokenizer.eos_token_id])
    with trials.passed("regex", "a", ""):
        pass


def test_workers_of_several_gpus_and_compilers_are_forbidden_to(poisoned):
    for env in (worker_environment(), children.environment("x", A="b")):
        done = _ended(sys.executable, "-c", "import json, tilewise", env=env)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_in_the_folder_serves_with_all_its_processes(poisoned):
    command = [sys.executable, "-m", "tilewise", "serve", "--port", "0", "--engine-process",
               "--num-blocks", "64"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        lines, url = [], None
        for line in server.stderr:
            lines.append(line)
            if " at http" in line:
                url = line.split(" at ")[1].split()[0]
                break
        assert url is not None, "".join(lines)
        for path, body in (
            ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = httpx.post(url + path, json={**body, "max_tokens": 2}, timeout=120)
            assert answer.status_code == 200, answer.text
        server.terminate()
        for _ in server.stderr:
            pass
        assert server.wait(60) == 0
