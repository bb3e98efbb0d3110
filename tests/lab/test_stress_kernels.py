"""The stress of all kernels: which case runs when and where, and what is left when time ends."""

from __future__ import annotations

import json
import os
import queue
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.kernels.stress_queue import Cases, Process, drive, former_records, merged

ROOT = Path(__file__).parents[2]
# Answers as a process of lab/stress_kernels.py does; what a case does is in its name.
FAKE = """
import json, os, sys, time
def answer(**message):
    print(json.dumps(message), flush=True)
answer(verb="there")
for line in sys.stdin:
    asked = json.loads(line)
    verb, name = asked["verb"], asked["name"]
    with open(sys.argv[1], "a") as log:
        log.write(f"{os.getpid()} {verb} {name}\\n")
    if verb == "warm":
        time.sleep(0.01)
        end = time.monotonic() + 60
        while "until_a_run" in name and time.monotonic() < end:
            if " run " in open(sys.argv[1]).read():
                break
            time.sleep(0.01)
        if "does_not_compile" in name:
            answer(verb=verb, error="ValueError: no such layout")
        elif "until_a_run" in name and time.monotonic() > end:
            answer(verb=verb, error="TimeoutError: nothing ran")
        else:
            answer(verb=verb, each=1e-6 if "cheap" in name else 1e-5)
    elif verb == "prepare":
        if "dies" in name:
            os._exit(7)
        if "hangs" in name:
            time.sleep(60)
        answer(verb=verb, each=1e-6 if "cheap" in name else 1e-5)
    else:
        each = 1e-6 if "cheap" in name else 1e-5
        runs = asked["runs"]
        if "endless" in name:
            time.sleep(asked["seconds"])
            runs = min(runs, 1000)
        found = {"name": name, "runs": runs, "differing": int("differs" in name),
                 "seconds": runs * each, "graph": True, "first": []}
        answer(verb=verb, found=found)
"""


def driven(
    tmp_path: Path, cases: Cases, seconds: float = 20.0, warmers: int = 2
) -> tuple[list[list[str]], list[str], list[dict[str, Any]]]:
    """Drive fake processes; return what they were asked, what was said, and all summaries."""
    script, log = tmp_path / "fake.py", tmp_path / "asked"
    script.write_text(FAKE)
    log.touch()
    said: list[str] = []
    notes: list[dict[str, Any]] = []

    def start(role: str, events: queue.Queue[tuple[Process, Any]]) -> Process:
        return Process([sys.executable, str(script), str(log)], role, events)

    drive(
        cases, start, warmers=warmers, runners=2, until=time.monotonic() + seconds,
        note=lambda: notes.append(json.loads(json.dumps(cases.summary()))), say=said.append,
        every=0.2,
    )  # fmt: skip
    return [line.split() for line in log.read_text().splitlines()], said, notes


def test_every_case_is_compiled_once_and_reaches_the_runs_asked(tmp_path: Path) -> None:
    names = [f"{family}/{name}" for family in ("a", "b") for name in ("cheap", "x", "y")]
    cases = Cases(names, asked=500)
    asked, _, notes = driven(tmp_path, cases)
    assert sorted(name for _, verb, name in asked if verb == "warm") == sorted(names)
    assert all(record["runs"] == 500 for record in notes[-1]["cases"])
    assert notes[-1]["cases_with_all_runs"] == 6
    # One name of all families is compiled by one process: the families share kernels.
    compiled = {(name.split("/")[1], process) for process, verb, name in asked if verb == "warm"}
    assert len(compiled) == 3


def test_what_is_compiled_runs_while_others_compile(tmp_path: Path) -> None:
    # One process compiles until it sees the run of what another has compiled, however late that is.
    cases = Cases(["a/compiles_until_a_run", "a/fast"], asked=10)
    _, said, notes = driven(tmp_path, cases, seconds=120.0)
    assert notes[-1]["failed"] == 0, said
    assert notes[-1]["cases_with_all_runs"] == 2


def test_failures_are_listed_and_stop_nothing(tmp_path: Path) -> None:
    names = ["a/does_not_compile", "a/dies", "a/differs", "a/cheap"]
    cases = Cases(names, asked=10)
    _, said, notes = driven(tmp_path, cases)
    records = {record["name"]: record for record in notes[-1]["cases"]}
    assert records["a/does_not_compile"]["error"] == "ValueError: no such layout"
    assert "its process ended (exit status 7)" in records["a/dies"]["error"]
    assert (records["a/differs"]["runs"], records["a/differs"]["differing"]) == (10, 1)
    assert records["a/cheap"]["runs"] == 10
    assert (notes[-1]["failed"], notes[-1]["differing"]) == (2, 1)
    assert any("1 runs differ" in line for line in said)


def test_the_time_is_a_bound_for_all_and_results_are_kept(tmp_path: Path) -> None:
    begin = time.monotonic()
    cases = Cases(["a/cheap", "a/endless", "a/hangs"], asked=1_000_000)
    _, _, notes = driven(tmp_path, cases, seconds=6.0)
    assert time.monotonic() - begin < 10.0
    records = {record["name"]: record for record in notes[-1]["cases"]}
    assert records["a/cheap"]["runs"] == 1_000_000
    assert records["a/endless"]["runs"] >= 1000
    assert "a/hangs" not in records


def test_an_answer_that_comes_too_late_costs_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.kernels import stress_queue

    monkeypatch.setitem(stress_queue.PATIENCE, "prepare", 1.0)
    cases = Cases(["a/hangs", "a/cheap"], asked=10)
    _, _, notes = driven(tmp_path, cases, seconds=15.0)
    records = {record["name"]: record for record in notes[-1]["cases"]}
    assert "no answer in time" in records["a/hangs"]["error"]
    assert records["a/cheap"]["runs"] == 10


def test_without_processes_that_compile_all_cases_are_ready(tmp_path: Path) -> None:
    asked, _, notes = driven(tmp_path, Cases(["a/x", "b/y"], 10, cold=False), warmers=0)
    assert {verb for _, verb, _ in asked} == {"prepare", "run"}
    assert notes[-1]["cases_with_all_runs"] == 2


def test_the_cheapest_of_those_that_ran_least_is_next() -> None:
    cases = Cases(["a/1", "a/2", "a/3"], asked=100, cold=False)
    for name, each, goes in (("a/1", 1e-3, 0), ("a/2", 1e-4, 0), ("a/3", 1e-6, 1)):
        cases.all[name].each, cases.all[name].goes = each, goes
    assert [cases.next_ready() for _ in range(4)] == ["a/2", "a/1", "a/3", None]


def test_a_case_may_take_a_few_shares_of_the_time_left() -> None:
    cases = Cases([f"a/{number}" for number in range(100)], asked=100)
    assert cases.seconds(200.0) == 8.0
    for left, seconds in ((2, 100.0), (1, 200.0)):
        for case in list(cases.all.values())[: 100 - left]:
            case.state = "done"
        assert cases.seconds(200.0) == seconds


def record(name: str, runs: int, **others: Any) -> dict[str, Any]:
    return {"name": name, "runs": runs, "differing": 0, "seconds": 1.0, "first": []} | others


def test_runs_of_an_earlier_stress_are_counted_on(tmp_path: Path) -> None:
    former = {
        "a/enough": record("a/enough", 100),
        "a/few": record("a/few", 30),
        "b/not_asked_for": record("b/not_asked_for", 5),
        "a/failed": record("a/failed", 0, error="old"),
    }
    cases = Cases(["a/enough", "a/few", "a/failed"], asked=100, former=former)
    asked, _, notes = driven(tmp_path, cases)
    assert {name for _, _, name in asked} == {"a/few", "a/failed"}
    records = {entry["name"]: entry for entry in notes[-1]["cases"]}
    assert {name: entry["runs"] for name, entry in records.items()} == {
        "a/enough": 100, "a/few": 100, "b/not_asked_for": 5, "a/failed": 100,
    }  # fmt: skip
    assert "error" not in records["a/failed"]
    assert notes[-1]["runs"] == 305


def test_fewer_runs_may_be_enough_of_an_earlier_stress() -> None:
    former = {"a/x": record("a/x", 30)}
    assert Cases(["a/x"], 100, former, enough=30).count("done") == 1
    assert Cases(["a/x"], 100, former, enough=31).count("cold") == 1


def test_the_first_difference_stays() -> None:
    first, second = [{"result": "o"}], [{"result": "lse"}]
    found = merged(record("a", 5, first=first, differing=1), record("a", 6, first=second))
    assert (found["first"], found["runs"], found["differing"]) == (first, 11, 1)
    assert merged(record("a", 5), record("a", 6, first=second))["first"] == second


def test_stalled_kernels_are_not_added_to_others(tmp_path: Path) -> None:
    path = tmp_path / "stress.json"
    summary = {"device": "GPU", "delays": None, "cases": [record("a", 5)]}
    path.write_text(json.dumps(summary))
    assert former_records(path, None)["a"]["device"] == "GPU"
    with pytest.raises(ValueError, match="delays 8,4096"):
        former_records(path, "8,4096")


def test_the_committed_results_can_be_counted_on() -> None:
    former = former_records(ROOT / "lab" / "results" / "stress_h200.json", None)
    assert min(entry["runs"] for entry in former.values()) > 0


def test_the_script_lists_its_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: test_delays.py of Gluon kernels lists cases in one of the script's own."""
    pytest.importorskip("triton")
    script = str(ROOT / "lab" / "stress_kernels.py")
    monkeypatch.setattr(sys, "argv", [script, "--list", "--cases", "few/", "latents/"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TILEWISE_STRESS_BEGAN", str(time.time()))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 0
    names = capsys.readouterr().out.split()
    assert names
    assert all(name.startswith(("few/", "latents/")) for name in names)


# A process of the script itself, with two cases of its own and no GPU.
WORKER = """
import runpy, sys, torch
from tests.kernels import kernel_stress
class Captured:
    each = 1e-5
    def __init__(self, prepared, want, lanes):
        assert lanes == 2
        self.watch = kernel_stress.Watch(want, prepared.rounded)
    def stress(self, name, seconds, runs):
        return kernel_stress.Found(name, runs, 0, 0.5, True)
def wrong():
    print("a compiler says", flush=True)
    raise ValueError("first\\nlast line")
def right():
    return kernel_stress.Prepared(lambda: {"o": torch.ones(3)})
kernel_stress.Captured = Captured
kernel_stress.gpu_cases = lambda: [("a/right", right), ("a/wrong", wrong)]
for name in ("init", "synchronize", "empty_cache"):
    setattr(torch.cuda, name, lambda: None)
sys.argv[1:] = ["--worker", "--lanes", "2"]
runpy.run_path("lab/stress_kernels.py", run_name="__main__")
"""


def test_a_process_of_the_script_answers_each_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)

    def start(role: str, events: queue.Queue[tuple[Process, Any]]) -> Process:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", WORKER]
        return Process(command, role, events, environment, tmp_path / role)

    cases = Cases(["a/right", "a/wrong"], asked=40)
    drive(
        cases, start, warmers=1, runners=1, until=time.monotonic() + 60, note=lambda: None,
        say=lambda line: None,
    )  # fmt: skip
    assert cases.records["a/right"]["runs"] == 40
    assert cases.records["a/wrong"]["error"] == "last line"
    assert "a compiler says" in (tmp_path / "warm").read_text()


def test_a_long_case_is_done_when_it_has_run_long_enough() -> None:
    ran = {"name": "a/long", "runs": 10, "differing": 0, "seconds": 4.9, "first": []}
    assert Cases(["a/long"], 100, {"a/long": ran}, most_seconds=5.0).count("done") == 1
    cases = Cases(["a/long", "a/short"], 100, cold=False, most_seconds=5.0)
    cases.all["a/long"].each = 1.0
    assert cases.missing_seconds(cases.all["a/long"]) == 5.0
    cases.ran("a/long", ran | {"seconds": 3.0})
    assert cases.all["a/long"].state == "ready"
    assert cases.missing_seconds(cases.all["a/long"]) == 2.0
    cases.ran("a/long", ran | {"seconds": 2.0})
    assert cases.all["a/long"].state == "done"
