"""What a file takes is told with what its processes take, ended and living."""

from __future__ import annotations

import json
import re

from tests.test_side_by_side import run_tests

BUSY = "t = time.process_time()\nwhile time.process_time() < t + 0.3: pass\n"
FILE = f'''
import subprocess, sys, time

BUSY = """import time
{BUSY}"""

def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
'''
TESTS = {
    "here": "def test_one():\n    exec(BUSY)\n",
    "ended": "def test_one():\n    assert start(BUSY).wait() == 0\n",
    "living": """
living = []
def test_one():
    living.append(start(BUSY + "print(flush=True); time.sleep(5)"))
    assert living[0].stdout.read(1)
""",
    "waits": "def test_one():\n    time.sleep(0.5)\n\ndef test_two():\n    pass\n",
}


def test_own_seconds_and_those_of_processes_are_told_by_file(tmp_path):
    for name, text in TESTS.items():
        (tmp_path / f"test_{name}.py").write_text(FILE + text)
    rows = tmp_path / "rows.jsonl"
    status, said = run_tests(tmp_path, "-p", "tests.seconds", "--seconds-to", rows)
    assert status == 0, said
    each = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted(row["test"] for row in each) == [
        "test_ended.py::test_one", "test_here.py::test_one", "test_living.py::test_one",
        "test_waits.py::test_one", "test_waits.py::test_two",
    ]  # fmt: skip
    by_test = {row["test"]: row for row in each}
    assert by_test["test_ended.py::test_one"]["core s"] >= 0.3
    assert by_test["test_waits.py::test_one"]["s"] >= 0.5
    assert {(row["outcome"], row["GiB"]) for row in each} == {("passed", 0.0)}
    told = re.findall(r"^ +([\d.]+) +(\d+) tests +test_(\w+)\.py$", said, re.MULTILINE)
    seconds = {name: float(number) for number, _, name in told}
    assert seconds.keys() == TESTS.keys()
    assert {name: int(count) for _, count, name in told} == {**dict.fromkeys(TESTS, 1), "waits": 2}
    for name in ("here", "ended", "living"):
        assert seconds[name] >= 0.3
    assert seconds["waits"] < 0.3


# An engine of the first test counts kernels, too, before anybody else has asked to be told.
COMPILES = """
import types, pytest

count = []

def compile(name, times=types.SimpleNamespace(total=2_000_000)):
    from triton import knobs
    told = dict(src=types.SimpleNamespace(name=name), metadata={}, metadata_group={}, times=times)
    knobs.compilation.listener(**told, cache_hit=False)
    knobs.compilation.listener(**told, cache_hit=True)

def test_a():
    from tilewise.engine.steps.compilations import Compilations
    count.append(Compilations())
    compile("first")

def test_b():
    compile("second")
    assert count[0].names == ["first", "first", "second", "second"]

def test_c():
    compile("not timed", None)
"""


def test_kernels_are_told_beside_an_engine_that_counts_them(tmp_path):
    (tmp_path / "test_it.py").write_text(COMPILES)
    rows = tmp_path / "rows.jsonl"
    status, said = run_tests(tmp_path, "-p", "tests.seconds", "--seconds-to", rows, count=1)
    assert status == 0, said
    each = [json.loads(line)["kernels"] for line in rows.read_text().splitlines()]
    assert each[1:] == [[["second", 2.0]], [["not timed", 0.0]]]
