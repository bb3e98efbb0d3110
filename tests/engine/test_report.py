"""Numbers for people say what was measured."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.engine import report
from tilewise.engine.engine import EngineStats
from tilewise.engine.report import Progress, cache_report, stats_line, stats_record
from tilewise.engine.stats import SchedulerStats

STATS = EngineStats(
    scheduler=SchedulerStats(
        num_running=0,
        num_waiting=0,
        num_blocks=64,
        block_size=16,
        blocks_used=0,
        blocks_peak=10,
        slots_used=0,
        slots_peak=156,
        prefix_query_tokens=27,
        prefix_hit_tokens=16,
        num_preemptions=0,
    ),
    cache_bytes_per_token=2048,
    prefill_tokens=3000,
    prefill_seconds=2.0,
    decode_tokens=90,
    decode_seconds=0.5,
)


def test_the_closing_line_has_speed_and_cache():
    assert stats_line(STATS) == (
        "prefill 1,500 tok/s | decode 180 tok/s | KV blocks 10/64 at peak, 2.5% of their slots "
        "empty | 2,048 bytes a token | prefix cache had 16 of 27 tokens"
    )


def test_the_closing_line_has_preemptions_when_there_were_any():
    scheduler = dataclasses.replace(STATS.scheduler, num_preemptions=3)
    line = stats_line(dataclasses.replace(STATS, scheduler=scheduler))
    assert line == stats_line(STATS) + " | 3 preemptions for want of blocks"


def test_the_record_is_json_with_rates_and_counts():
    record = json.loads(json.dumps(stats_record(STATS)))
    assert record["decode_tokens_per_second"] == 180
    assert record["prefill_tokens_per_second"] == 1500
    assert round(record["peak_wasted_fraction"], 6) == 0.025
    assert record["scheduler"]["blocks_peak"] == 10


def test_the_size_of_a_cache_is_spelled_out():
    spec = CacheSpec(32, 16, KVSpec(8, 128, 128, torch.bfloat16))
    lines = cache_report(spec, 8192).splitlines()
    assert lines[0].split(maxsplit=2)[2] == (
        "128.00 KiB = 32 layers x 8 heads x (128 + 128) channels x 2 bytes (bfloat16)"
    )
    assert lines[1].endswith("2.00 MiB = 16 tokens")
    assert lines[2].endswith("1.00 GiB = 8,192 tokens")
    assert lines[3].endswith("8,192 tokens")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_scales_of_an_8_bit_cache_are_spelled_out(dtype):
    lines = cache_report(CacheSpec(2, 16, KVSpec(8, 128, 128, dtype)), 8192).splitlines()
    assert lines[0].split(maxsplit=2)[2] == (
        "4,224 B = 2 layers x 8 heads x ((128 + 128) channels x 1 byte + 8 of scales) "
        f"({str(dtype).removeprefix('torch.')})"
    )


def test_progress_is_written_over_and_wiped():
    stream = io.StringIO()
    progress = Progress(stream, interval=0.0)
    progress.show("1/2")
    progress.show("2/2")
    progress.close()
    assert stream.getvalue() == "\r\x1b[K1/2\r\x1b[K2/2\r\x1b[K"
    progress.close()
    assert stream.getvalue().count("\r") == 3


def test_progress_is_not_written_more_often_than_its_interval():
    stream = io.StringIO()
    progress = Progress(stream, interval=1000.0)
    for i in range(5):
        progress.show(str(i))
    assert stream.getvalue() == "\r\x1b[K0"


def test_progress_without_a_terminal_writes_nothing():
    progress = Progress(None)
    progress.show("1/2")
    progress.close()


def _at(monkeypatch, seconds):
    """Let the clock of progress stand so many seconds after its start."""
    monkeypatch.setattr(report.time, "monotonic", lambda: seconds)


@pytest.mark.parametrize(
    ("seconds", "share", "said"),
    [
        (10.0, 0.5, ", 10 s left"), (10.0, 0.25, ", 30 s left"), (60.0, 0.1, ", 9 min left"),
        (3600.0, 0.2, ", 4 h left"), (1.0, 0.5, ""), (10.0, 0.0, ""), (10.0, None, ""),
        (10.0, 1.0, ""),
    ],
)  # fmt: skip
def test_the_time_left_follows_from_the_share_that_is_done(monkeypatch, seconds, share, said):
    stream = io.StringIO()
    _at(monkeypatch, 100.0)
    progress = Progress(stream, interval=0.0)
    _at(monkeypatch, 100.0 + seconds)
    progress.show("1/2", share)
    assert stream.getvalue() == f"\r\x1b[K1/2{said}"


class Terminal(io.StringIO):
    """A terminal of ten columns."""

    def fileno(self):
        return 0

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("columns", "shown"), [(10, "capturin…"), (20, "capturing steps"), (15, "capturing ste…"),
                           (0, "capturing steps")],
)  # fmt: skip
def test_a_line_is_cut_to_the_width_of_the_terminal(monkeypatch, columns, shown):
    monkeypatch.setattr(report.os, "get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    stream = Terminal()
    Progress(stream).show("capturing steps")
    assert stream.getvalue() == f"\r\x1b[K{shown}"


def test_a_terminal_that_cannot_write_over_a_line_gets_none(monkeypatch):
    monkeypatch.setattr(report.sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert report.terminal() is report.sys.stderr
    monkeypatch.setenv("TERM", "dumb")
    assert report.terminal() is None
    assert report.terminal(True) is report.sys.stderr
    monkeypatch.setattr(report.sys, "stderr", io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    assert report.terminal() is None
