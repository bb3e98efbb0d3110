"""The benches refuse wrong results, count what they say, and lay out what they found."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from tilewise import attention
from tilewise.bench import decode, ops, peers, tables
from tilewise.bench.report import emit, format_table
from tilewise.bench.roofline import Ceilings
from tilewise.bench.timing import peak_memory, time_call

CEILINGS = Ceilings("cpu", "a processor", torch.__version__, 1e12, 1e10, 1e10)


def test_the_short_run_takes_the_passes_that_are_asked_for():
    problems = ops.plan("cuda", None, ("backward", "decode"))
    assert {problem.seqlen for problem in problems} == {1024, 4096, 16384}
    assert {problem.ops for problem in problems} == {("backward",)}
    assert {problem.peers for problem in problems} == {("tilewise", "sdpa_flash", "sdpa_cudnn")}
    assert ops.plan("cpu", None, ("decode",)) == []


@pytest.mark.usefixtures("timed_once")
def test_the_short_run_ends_with_its_document(monkeypatch, capsys):
    monkeypatch.setattr(ops, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(peers.ops, "attention", partial(attention, backend="reference"))
    monkeypatch.setitem(tables.SCALES, "cpu", replace(tables.SCALES["cpu"], tokens=64, hidden=64))
    monkeypatch.setitem(decode._DECODE, "cpu", [(2, 4, 2, 64)])
    assert ops.main(["--device", "cpu", "--seqlens", "64", "--only", "forward", "decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert [row["op"] for row in document["rows"]] == ["forward"] * 8 + ["decode"] * 5
    assert not [row for row in document["rows"] if "error" in row]


@pytest.mark.usefixtures("timed_once")
def test_decode_counts_the_bytes_of_keys_and_values():
    rows = decode._decode_rows((2, 4, 2, 64), "cpu", CEILINGS)
    assert [(row["peer"], row["dtype"]) for row in rows] == [
        ("tilewise", "bfloat16"),
        ("sdpa_contiguous", "bfloat16"),
        ("gather_sdpa", "bfloat16"),
        ("tilewise", "int8"),
        ("tilewise", "float8_e4m3fn"),
    ]
    for row in rows:
        head = 2 * 128 if row["dtype"] == "bfloat16" else 128 + 4  # channels, and a scale
        size = 2 * 2 * 64 * 2 * head  # k and v, sequences, tokens, heads
        assert row["GB/s"] * row["ms"] == pytest.approx(size / 1e6, rel=1e-6)


def test_a_call_is_timed_by_its_median():
    timing = time_call(lambda: time.sleep(0.002), "cpu", budget=0.05)
    assert timing.median >= 0.002
    assert timing.low <= timing.median <= timing.high
    assert timing.repeats >= 5


def test_a_first_call_that_loads_kernels_is_in_no_number():
    calls: list[float] = []

    def call():
        calls.append(0.2 if not calls else 0.0)
        time.sleep(calls[-1])

    assert time_call(call, "cpu", budget=0.05).high < 0.1
    assert calls[0] == 0.2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_a_call_takes_and_gives_back():
    taken = peak_memory(lambda: torch.ones(16 << 20, dtype=torch.float32).sum(), "cpu")
    assert 60 << 20 <= taken <= 100 << 20
    assert peak_memory(lambda: torch.ones(8).sum(), "cpu") < 8 << 20


def test_a_table_aligns_its_columns_and_shows_gaps():
    text = format_table([{"N": 1, "ms": 0.12345}, {"N": 4096}], ["N", "ms"])
    assert text.splitlines() == ["   N     ms", "----  -----", "   1  0.123", "4096      -"]


def test_the_last_line_is_the_document(tmp_path, capsys):
    emit({"rows": [1]}, str(tmp_path / "out.json"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"rows": [1]}
    assert json.loads((tmp_path / "out.json").read_text()) == {"rows": [1]}


@pytest.mark.parametrize(("path", "lines"), [(None, 0), ("out.json", 1)])
def test_a_terminal_gets_the_document_where_a_file_was_asked_for(
    tmp_path, monkeypatch, capsys, path, lines
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit({"rows": [1]}, None if path is None else str(tmp_path / path))
    assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("ops", ["--seqlens", "0"]),
        ("attention", ["--seqlens", "-4"]),
        ("train", ["--lengths", "0"]),
        ("train", ["--tokens", "many"]),
        ("engine", ["--batch", "0"]),
        ("context", ["--ranks", "0"]),
    ],
)
def test_a_count_below_one_is_refused_by_its_name(what, options, capsys):
    folder = "lab" if what == "context" else "tilewise.bench"
    main = importlib.import_module(f"{folder}.{what}").main
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", *options])
    said = capsys.readouterr().err
    assert f"{options[0]}: must be an integer of at least 1, got {options[1]!r}" in said


def test_a_row_of_no_tokens_is_refused(capsys):
    from tilewise.bench.train import main

    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "gpt2-tiny/ours/0"])
    assert "rows must be SHAPE/WAY/N, got 'gpt2-tiny/ours/0'" in capsys.readouterr().err
