"""Reports of compute-sanitizer's racecheck become a table, and each is explained or is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab.scripts import load

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tilewise" / "kernels" / "gluon"


racecheck = load("racecheck")


def line_of(file: str, text: str) -> int:
    """Return the number of the only line that has a text."""
    [number] = [
        number
        for number, line in enumerate((KERNELS / file).read_text().split("\n"), 1)
        if text in line
    ]
    return number


def at(file: str, line: int, name: str = "attention_fwd_kernel", offset: str = "0x4d0") -> str:
    return f"{name}+{offset} in {KERNELS / file}:{line}"


STORED = at("forward/loader.py", line_of("forward/loader.py", "shared.number.index(group).store"))
READ = at(
    "forward/warpgroup.py", line_of("forward/warpgroup.py", "shared.number.index(GROUP).load")
)


def analysis(first: str, second: str, hazards: int = 4) -> list[str]:
    return [
        f"========= Error: Race reported between Write access at {first}",
        f"=========     and Read access at {second} [{hazards} hazards]",
        "=========",
    ]


def hazard(kind: str, address: str, first: str, second: str, warps: tuple[int, int]) -> list[str]:
    return [
        f"========= Error: Potential {kind} hazard detected at __shared__ {address} in block "
        "(0,0,0) :",
        f"=========     Write Thread ({32 * warps[0]},0,0) at {first}",
        f"=========     Read Thread ({32 * warps[1] + 5},0,0) at {second}",
        "=========     Current Value : 0, Incoming Value : 1",
        "=========",
    ]


def test_a_pair_of_places_is_one_row_with_its_words_and_warps() -> None:
    log = [
        "========= COMPUTE-SANITIZER",
        *hazard("RAW", "0xc010", STORED, READ, (8, 0)),
        *hazard("WAR", "0xc014", READ, STORED, (4, 8)),
        *analysis(STORED, READ, 128),
        *analysis(READ, STORED, 2),
        "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
    ]
    [report] = racecheck.read_log("forward_causal", log)
    assert report.kernel == "attention_fwd_kernel"
    assert (report.reports, report.hazards) == (2, 130)
    assert report.kinds == ["RAW", "WAR"]
    assert report.words == ["0xc010", "0xc014"]
    assert report.warps == ["8 and 0", "4 and 8"]
    assert report.first.startswith("forward/loader.py:")
    assert report.first.endswith(" _announce")
    assert report.second.endswith(" compute_tiles")
    assert "q_full" in report.order
    row = racecheck.table([report]).split("\n")[2]
    assert row.count("|") == 9
    assert "0xc010 0xc014" in row


def test_one_report_may_name_several_places() -> None:
    other = at("forward/kernel.py", line_of("forward/kernel.py", "q_full = gl.allocate"))
    log = [*analysis(STORED, READ)[:2], *analysis(STORED, other)[1:]]
    assert [report.reports for report in racecheck.read_log("c", log)] == [1, 1]


@pytest.mark.parametrize(
    "where",
    [
        "0x4480 in {path}:{line}:attention_fwd_kernel",
        "attention_fwd_kernel+0x4480 in {path}:{line}",
        "attention_fwd_kernel(void *)+0x4480 in /elsewhere/tilewise/kernels/gluon/{file}:{line}",
    ],
)
def test_places_are_read_in_every_form(where: str) -> None:
    file = "forward/loader.py"
    line = line_of(file, "shared.number.index(group).store")
    place = racecheck.place_of(where.format(path=KERNELS / file, file=file, line=line))
    assert (place.file, place.line, place.function) == (file, line, "_announce")
    assert ".store(" in place.text


@pytest.mark.parametrize(
    ("kernel", "name", "file"),
    [
        ("attention_fwd_kernel", "loader.py", "forward/loader.py"),
        ("attention_bwd_kernel", "kernel.py", "backward/kernel.py"),
        ("attention_fp8_fwd_kernel", "kernel.py", "forward/fp8/kernel.py"),
        ("attention_fp8_fwd_kernel", "loader.py", "forward/fp8/loader.py"),
        ("attention_fwd_kernel", "compat.py", "device/compat.py"),
    ],
)
def test_a_file_without_folders_is_the_kernels_own(kernel: str, name: str, file: str) -> None:
    assert racecheck.place_of(f"{kernel}+0x4d0 in {name}:60").file == file


def test_what_no_rule_names_is_not_explained() -> None:
    tile = at("forward/epilogue.py", line_of("forward/epilogue.py", ".store(o)"))
    [report] = racecheck.read_log("c", analysis(tile, READ))
    assert report.order == ""
    assert "not explained" in racecheck.table([report])
    unknown = racecheck.read_log("c", analysis("attention_fwd_kernel+0x10", READ))
    assert unknown[0].first == "no line"
    assert unknown[0].order == ""


def test_every_rule_names_functions_that_are_there() -> None:
    """A rule whose function has been renamed explains nothing."""
    pairs = {
        ("forward/loader.py", "shared.number.index(group).store"): "_announce",
        ("forward/warpgroup.py", "shared.number.index(GROUP).load"): "compute_tiles",
        ("forward/fp8/loader.py", "slot.store(gl.full"): "_note",
        ("forward/fp8/loader.py", "def read_note"): "read_note",
    }
    for (file, text), function in pairs.items():
        assert racecheck.place_of(at(file, line_of(file, text))).function == function
    number = racecheck.place_of(
        at("forward/fp8/loader.py", line_of("forward/fp8/loader.py", "gl.atomic_add"))
    )
    begin = next(
        racecheck.place_of(at("forward/kernel.py", at_line))
        for at_line, line in enumerate((KERNELS / "forward/kernel.py").read_text().split("\n"), 1)
        if "warp_specialize(" in line
    )
    assert "atomic" in racecheck.order_of(number, number)
    assert "second barrier.sync 1" in racecheck.order_of(begin, number)
    assert "barrier.sync 1" in racecheck.order_of(begin, begin)


def test_logs_of_an_earlier_run_are_read_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forward_causal.log").write_text("\n".join(analysis(STORED, READ)))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--read", str(tmp_path), "--json", str(out)])
    assert racecheck.main() == 0
    assert "1 reports of 1 pairs of places; 0 not explained" in capsys.readouterr().out
    (tmp_path / "e4m3_full.log").write_text("\n".join(analysis("attention_fwd_kernel+0x1", READ)))
    assert racecheck.main() == 1
