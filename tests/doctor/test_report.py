"""`tilewise doctor`: what it says of packages, machine and results, right and wrong ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise.cli import main
from tilewise.doctor import backends, machine, packages, report, selftest

METADATA = [
    "torch>=2.11",
    "numpy>=2.0",
    "nothing-of-this-name>=1",
    'winonly>=1; sys_platform == "another"',
    'triton>=99; extra == "gpu"',
    'not-there-either; extra == "serve"',
    'uvicorn>=0.34; extra == "serve"',
    'tilewise[serve]; extra == "ray"',
    'pytest>=8; extra == "test"',
]
INSTALLED = {"torch": "2.13.0+cpu", "numpy": "1.26", "triton": "3.7.1", "uvicorn": "0.54.0rc1"}


@pytest.fixture
def metadata(monkeypatch):
    """A package whose requirements are met in every way and not met in every way."""

    def version(name):
        if name not in INSTALLED:
            raise packages.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(packages, "requires", lambda name: METADATA)
    monkeypatch.setattr(packages, "version", version)


def test_requirements_are_judged_with_those_of_extras(metadata):
    found = {(p.name, p.extra): (p.installed, p.fits) for p in packages.packages()}
    assert found == {
        ("torch", None): ("2.13.0+cpu", True),
        ("numpy", None): ("1.26", False),
        ("nothing-of-this-name", None): (None, False),
        ("triton", "gpu"): ("3.7.1", False),
        ("not-there-either", "serve"): (None, False),
        ("uvicorn", "serve"): ("0.54.0rc1", True),
        ("not-there-either", "ray"): (None, False),
        ("uvicorn", "ray"): ("0.54.0rc1", True),
    }


def test_wrong_versions_are_problems_and_absent_extras_are_notes(metadata, capsys):
    code = report.doctor(seconds=0)
    text = capsys.readouterr().out
    assert code == 1
    assert "numpy>=2.0 is required, and 1.26 is installed: pip install 'numpy>=2.0'" in text
    assert "nothing-of-this-name>=1 is required, and it is not installed" in text
    assert "triton>=99 is required, of the extra gpu, and 3.7.1 is installed" in text
    assert "without not-there-either: pip install 'tilewise[serve]'" in text
    assert "winonly" not in text
    assert "something does not work, see problems" in text


def test_a_package_without_metadata_is_no_error(monkeypatch):
    def requires(name):
        raise packages.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "requires", requires)
    assert packages.packages() is None
    assert any("no metadata" in note for note in report.examine(0).notes)


def test_a_torch_that_cannot_be_imported_is_a_line_of_the_report(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tilewise.doctor.machine", None)
    assert report.doctor(seconds=0) == 1
    out = capsys.readouterr().out
    assert "the package cannot be imported: ModuleNotFoundError" in out
    assert "Traceback" not in out


def test_json_has_the_same_and_is_one_object(capsys):
    main(["doctor", "--json", "--seconds", "0"])
    told = json.loads(capsys.readouterr().out)
    assert told["trials"] == []
    assert {row["op"] for row in told["support"] if row["device"] == "cpu"} == {
        "attention",
        "paged_attention",
        "mla_decode",
    }
    assert all(row["backend"] == "cpu" for row in told["support"] if row["device"] == "cpu")
    assert told["machine"]["cores"] >= 1


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(seconds, capsys):
    assert main(["doctor", f"--seconds={seconds}"]) == 2
    assert "seconds must be at least 0 and finite" in capsys.readouterr().err


def _about(**changed):
    return replace(machine.machine(), **changed)


def test_no_gpu_and_no_triton_are_said_plainly_and_are_no_problem(monkeypatch, capsys):
    about = _about(
        gpus=[], why_no_gpu="torch is built without CUDA", triton=None, why_no_triton="no Triton"
    )
    monkeypatch.setattr(machine, "machine", lambda: about)
    found = report.examine(0)
    assert "no GPU: torch is built without CUDA; everything runs on the CPU" in found.notes
    assert "no Triton" in found.notes
    text = report.text_of(found)
    assert "GPU               none: torch is built without CUDA" in text
    assert "Triton            none: no Triton" in text


def test_a_gpu_without_triton_or_a_compiler_is_a_problem(monkeypatch):
    gpu = machine.GPU("A card", "9.0", 2**36, 132)
    why = "Triton is not installed"
    about = _about(gpus=[gpu], why_no_gpu=None, why_no_triton=why, c_compiler=None)
    monkeypatch.setattr(machine, "machine", lambda: about)
    found = report.examine(0)
    assert why in found.problems
    assert any("C compiler" in problem for problem in found.problems)
    assert "A card, compute capability 9.0, 64 GiB, 132 multiprocessors" in report.text_of(found)


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch):
    cache = machine.Cache("numba", "~/somewhere", 3, 2**20, is_writable=False)
    about = _about(caches=[cache])
    monkeypatch.setattr(machine, "machine", lambda: about)
    assert any("~/somewhere is not writable" in said for said in report.examine(0).problems)


@pytest.mark.parametrize(
    ("cuda", "driver", "visible", "said"),
    [
        (None, None, None, "built without CUDA"),
        ("13.0", None, None, "there is no NVIDIA driver"),
        ("13.0", "580.65.06", "", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("13.0", "470.1", None, "finds no GPU by driver 470.1; an older driver"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, cuda, driver, visible, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.machine()
    assert found.gpus == []
    assert said in found.why_no_gpu


def test_paths_below_the_home_do_not_name_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.shown_path(tmp_path / "a" / "b") == "~/a/b"
    assert machine.shown_path(Path("/elsewhere")) == "/elsewhere"


ROW = backends.Support("attention", "cpu", "bfloat16", "cpu", {})


@pytest.fixture
def untimed(monkeypatch):
    """Speeds that take no time."""
    timing = type("Timing", (), {"median": 1.0})
    monkeypatch.setattr(selftest, "time_call", lambda call, *_, **__: timing)


@pytest.mark.parametrize("op", ["attention", "paged_attention", "mla_decode"])
def test_ops_are_right_here(untimed, op):
    rows = list(selftest.trials([replace(ROW, op=op)], 60))
    assert [row.wrong for row in rows] == [None] * len(rows)
    assert all(row.speed > 0 for row in rows)


def test_a_wrong_result_is_seen_and_named(untimed, monkeypatch):
    right = selftest.attention
    monkeypatch.setattr(
        selftest,
        "attention",
        lambda *args, **options: tuple(1.1 * x for x in right(*args, **options)),
    )
    wrong = [row.wrong for row in selftest.trials([ROW], 60)]
    assert all("o: max error must be at most" in said for said in wrong)


def test_an_error_is_what_is_wrong(untimed, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(selftest, "paged_attention", fails)
    [row] = selftest.trials([replace(ROW, op="paged_attention")], 60)
    assert row.wrong == "RuntimeError: no kernel image"


def test_rows_without_time_are_left_out_and_said(monkeypatch):
    rows = list(selftest.trials([ROW], -1))
    assert [row.left_out for row in rows] == [True, True]
    monkeypatch.setattr(selftest, "trials", lambda supported, seconds: iter(rows))
    found = report.examine(5)
    assert any("run it again" in note for note in found.notes)
    assert "left out, the time was up" in report.text_of(found)


def test_a_wrong_row_is_a_problem_of_the_report(monkeypatch):
    bad = selftest.Trial("attention", "cpu", "cpu", "bfloat16", wrong="o: max error")
    monkeypatch.setattr(selftest, "trials", lambda supported, seconds: iter([bad]))
    found = report.examine(5)
    assert any("attention (bfloat16, cpu, cpu) is wrong here" in said for said in found.problems)
    assert "WRONG: o: max error" in report.text_of(found)
