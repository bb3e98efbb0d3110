"""Numbers for people say what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.engine.engine import EngineStats
from tilewise.engine.report import cache_report, stats_line, stats_record
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
