"""The replay of traces: allocators keep their promises, and every slot is counted once."""

from __future__ import annotations

import json

import pytest

from tilewise.bench import contiguous, waste
from tilewise.bench.contiguous import BuddyAllocator
from tilewise.bench.trace import TraceRequest, drawn_trace, fitting, read_trace

SIZES = {"max_len": 256, "budget": 64}
REQUESTS = [
    TraceRequest(0.0, prompt, output)
    for prompt, output in [(100, 20), (30, 90), (7, 3), (150, 100), (64, 64), (5, 200), (90, 1)] * 3
]


def test_buddies_join_again_and_do_not_overlap():
    buddy = BuddyAllocator(100)  # 64 + 32 + 4
    pieces = [buddy.allocate(count) for count in (30, 20, 5, 33, 16, 3)]
    assert pieces == [(64, 32), (0, 32), (32, 8), None, (48, 16), (96, 4)]
    for piece in filter(None, pieces):
        buddy.release(piece)
    assert buddy.allocate(64) == (0, 64)
    assert buddy.allocate(32) == (64, 32)
    assert buddy.allocate(5) is None


@pytest.mark.parametrize("policy", contiguous.POLICIES)
def test_contiguous_shares_sum_to_the_memory(policy):
    steps = list(contiguous.replay(REQUESTS, policy, 600, **SIZES))
    assert steps
    for step in steps:
        parts = (step.tokens, step.reserved, step.internal, step.external)
        assert sum(parts) == 600
        assert min(parts) >= 0
        assert policy != "max" or step.batch <= 2
        assert policy != "oracle" or step.internal == 0


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_no_sequence_has_more_than_one_partly_filled_block(block_size):
    row = waste.paged_row(REQUESTS, block_size, 600, **SIZES)
    assert row["slack/seq"] == block_size - 1
    parts = [row[name] for name in ("tokens", "reserved", "internal", "external")]
    assert sum(parts) == pytest.approx(100, abs=0.03)
    oracle = waste.contiguous_row(REQUESTS, "oracle", 600, **SIZES)
    assert row["tokens"] > oracle["tokens"]
    assert row["batch"] > oracle["batch"]


def test_samples_share_the_blocks_of_their_prompt():
    saved = [waste.sharing_row(REQUESTS, n, 8, 2000, **SIZES)["saved"] for n in (2, 4)]
    assert 10 < saved[0] < saved[1] < 75


def test_traces_are_read_in_order_and_cut_to_what_fits(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-16 18:17:03.9799600,480,10\n"
        "2023-11-16 18:17:05.0000000,480,0\n"
    )
    first, second = read_trace(str(azure))
    assert first == TraceRequest(0.0, 480, 10)
    assert (second.seconds, second.prompt) == (pytest.approx(0.052, abs=1e-3), 3180)
    assert fitting([first, second], 500, 9) == [first]
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 40, "input_length": 7, "output_length": 3}\n')
    assert read_trace(str(mooncake)) == [TraceRequest(0.0, 7, 3)]
    azure.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have the fields TIMESTAMP, .* got a, b"):
        read_trace(str(azure))


def test_the_command_writes_what_it_prints(capsys, tmp_path):
    path = tmp_path / "waste.json"
    arguments = ["--requests", "12", "--slots", "3000", "--max-len", "600"]
    assert waste.main([*arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    [trace] = document["traces"]
    assert len(trace["rows"]) == 3 + len(waste.BLOCK_SIZES)
    assert drawn_trace(5) == drawn_trace(5)
