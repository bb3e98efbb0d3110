"""`tilewise simulate`: traces of three formats, every allocator, rows that repeat, wrong words."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.cost.test_step import HYBRID as HYBRID_CONFIG
from tilewise import cli
from tilewise.bench import simulate
from tilewise.bench.contiguous import POLICIES, ContiguousTables
from tilewise.bench.simulate import ALLOCATORS, MODELS, Setting, model_sizes, report, serve
from tilewise.bench.trace import (
    HASHED_TOKENS,
    TraceRequest,
    drawn_trace,
    poisson,
    prompt_ids,
    read_trace,
    with_prefix,
)
from tilewise.cost import machine, read_sizes
from tilewise.engine.batch import SampledToken
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler

SMALL = Setting(
    MODELS["opt-13b"], machine("a100"), num_slots=1500, max_num_seqs=16, budget=128, max_len=256
)


HYBRID = Setting(
    read_sizes(HYBRID_CONFIG), machine("h200"), num_slots=40_000, max_num_seqs=8, budget=512,
    max_len=1024,
)  # fmt: skip


@pytest.mark.parametrize("num_checkpoints", [None, 40, 0])
def test_a_prefix_of_a_hybrid_is_found_where_a_checkpoint_is(num_checkpoints):
    setting = replace(HYBRID, num_checkpoints=num_checkpoints)
    shared = list(range(5, 505))
    requests = [TraceRequest(float(i), 520, 4) for i in range(4)]
    engine = serve(
        requests,
        setting,
        ids_of=lambda _, i: [*shared, *range(1000 * (i + 1), 1000 * (i + 1) + 20)],
    )
    found = [timing.cached_tokens for timing in engine.timings.values()]
    assert all(timing.output_tokens == 4 for timing in engine.timings.values())
    # The second prompt shows where the two part, and leaves a checkpoint there.
    want = [0, 0, 448, 448]
    assert found == ([0] * 4 if num_checkpoints == 0 else want)
    engine.scheduler.check_integrity()


def test_slots_of_states_take_memory_from_blocks():
    few, many = (replace(HYBRID, num_slots=None, max_num_seqs=n).slots for n in (8, 256))
    states = HYBRID.sizes.states
    taken = 248 * (states.slot_bytes + states.checkpoint_bytes)
    token = HYBRID.sizes.cache_bytes() + states.checkpoint_bytes / 1024
    assert few - many == pytest.approx(taken / token, abs=2)
    with pytest.raises(ValueError, match="paged or prefix for layers that keep states, got 'pow2'"):
        serve([TraceRequest(0.0, 5, 5)], HYBRID, "pow2")


def requests_of(seed: int, count: int = 40) -> list[TraceRequest]:
    rng = random.Random(seed)
    lengths = [(rng.randint(1, 150), rng.randint(1, 90)) for _ in range(count)]
    return poisson([TraceRequest(0.0, *pair) for pair in lengths], rate=20.0, seed=seed)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_allocator_serves_every_request_whole(allocator, n):
    requests = requests_of(1)
    engine = serve(requests, SMALL, allocator, n)
    for timing, request in zip(engine.timings.values(), requests, strict=True):
        assert timing.output_tokens == n * request.output
        assert timing.reason == "length"
    row = report(engine)
    assert row["requests"] == len(requests)
    assert row["tok/s"] * row["seconds"] == pytest.approx(n * sum(r.output for r in requests))
    assert 0 <= row["waste %"] < 100
    assert row["ttft p50"] <= row["ttft p90"] <= row["ttft p99"]
    assert engine.steps.memory, "the memory was looked at"
    for _, held, taken in engine.steps.memory:
        assert held <= taken <= SMALL.slots
    tables = engine.scheduler.tables
    if allocator in POLICIES:
        assert isinstance(tables, ContiguousTables)
        assert tables.pieces.slots_taken == tables.pieces.num_used == 0
        assert tables.pieces.take(1024, 1), "all pieces came back and joined"
        assert not tables._reserved
    else:
        assert tables.allocator.num_used == 0


def test_blocks_serve_more_than_pieces_and_waste_less():
    rows = {a: report(serve(requests_of(2), SMALL, a)) for a in ALLOCATORS}
    assert rows["max"]["s/token"] > rows["oracle"]["s/token"] > rows["paged"]["s/token"]
    assert rows["max"]["running"] < rows["oracle"]["running"] < rows["paged"]["running"]
    assert rows["paged"]["waste %"] < 10 < rows["oracle"]["waste %"] < rows["max"]["waste %"]


def test_a_shared_prompt_is_computed_once_with_a_prefix_cache():
    requests = with_prefix([TraceRequest(0.1 * i, 20, 10) for i in range(20)], 64)
    without, cached = (serve(requests, SMALL, a) for a in ("paged", "prefix"))
    assert without.steps.computed - cached.steps.computed == 19 * 64
    assert report(cached)["hit %"] > 70


def test_rows_repeat_and_depend_on_the_seed_of_arrivals():
    first, again, other = (
        report(serve(poisson(requests_of(3), 15.0, seed), SMALL)) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_pieces_are_checked_against_the_memory():
    with pytest.raises(ValueError, match="num_slots must fit one piece of 256 tokens, got 200"):
        ContiguousTables(200, "max", 256)
    with pytest.raises(ValueError, match="policy must be one of max, pow2, oracle, got 'best'"):
        ContiguousTables(2000, "best", 256)


def mooncake(tmp_path, lines: str) -> str:
    path = tmp_path / "m.jsonl"
    path.write_text(lines)
    return str(path)


def test_prompts_share_what_their_hash_ids_share(tmp_path):
    path = mooncake(
        tmp_path,
        '{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]}\n'
        "\n"
        '{"timestamp": 1500, "input_length": 1030, "output_length": 4, "hash_ids": [5, 8, 9]}\n',
    )
    first, second = read_trace(path)
    assert (first.seconds, second.seconds) == (0.0, 1.0)
    a, b = prompt_ids(first, 0), prompt_ids(second, 1)
    assert (len(a), len(b)) == (700, 1030)
    assert a[:HASHED_TOKENS] == b[:HASHED_TOKENS]
    assert not set(a[HASHED_TOKENS:]) & set(b[HASHED_TOKENS:])
    scheduler = Scheduler(200, 16, max_num_seqs=2, max_num_batched_tokens=4096, max_model_len=2000)
    for number, ids in enumerate((a, b)):
        scheduler.add(Request(str(number), ids, SamplingParams(max_tokens=1)))
        batch = scheduler.schedule()
        assert batch.num_tokens == (700 if number == 0 else 1030 - 512)
        scheduler.update(batch, [[SampledToken(number)]])


def test_our_own_format_has_samples_users_prefixes_and_ids(tmp_path):
    path = mooncake(
        tmp_path,
        '{"seconds": 2, "prompt": [7, 8, 9], "output": 4, "n": 2, "user": "a", "salt": "s"}\n'
        '{"seconds": 1.5, "prompt": 90, "output": 1, "prefix": ["system", 64], "priority": 3}\n'
        '{"seconds": 3, "prompt": 70, "output": 1, "prefix": ["system", 64]}\n',
    )
    early, ids, late = read_trace(path)
    assert (early.seconds, early.prompt, early.priority) == (0.0, 90, 3)
    assert (ids.seconds, ids.n, ids.user, ids.salt) == (0.5, 2, "a", "s")
    assert prompt_ids(ids, 4) == [7, 8, 9]
    assert prompt_ids(early, 0)[:64] == prompt_ids(late, 2)[:64]
    assert prompt_ids(early, 0)[64] != prompt_ids(late, 2)[64]
    with pytest.raises(ValueError, match="prefix must be 0 for prompts that are token ids"):
        with_prefix([ids], 5)


GOOD = '{"timestamp": 0, "input_length": 7, "output_length": 3}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 must be a request"),
        ("[1]", "an object is wanted, got list"),
        ('{"timestamp": 0, "input_length": 7}', "got no output_length"),
        ('{"timestamp": "x", "input_length": 7, "output_length": 3}', "'x' for a time"),
        ('{"timestamp": NaN, "input_length": 7, "output_length": 3}', "nan for a time"),
        ('{"timestamp": 0, "input_length": -7, "output_length": 3}', "-7 for a number of tokens"),
        ('{"timestamp": 0, "input_length": 7, "output_length": 3, "hash_ids": [1, 2]}',
         "2 hash_ids for 7 tokens"),
        ('{"timestamp": 0, "input_length": 7, "output_length": 3, "hash_ids": ["a"]}', "hash_ids"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_refused_with_its_number(tmp_path, line, said):
    path = mooncake(tmp_path, GOOD + "\n" + line + "\n")
    with pytest.raises(ValueError, match=said) as caught:
        read_trace(path)
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"seconds": 0, "prompt": 5, "output": 1, "size": 3}', "the unknown field size"),
        ('{"seconds": 0, "prompt": ["a"], "output": 1}', "no list of token ids"),
        ('{"seconds": 0, "prompt": 5, "output": 1, "n": 0}', "n 0"),
        ('{"seconds": 0, "prompt": 5, "output": 1, "user": 7}', "a user or salt that is no string"),
        ('{"seconds": 0, "prompt": 5, "output": 1, "prefix": ["a", 9]}', "a prefix of 9 tokens"),
        ('{"seconds": 0, "prompt": 5, "output": 1, "prefix": 9}', "no .name, tokens."),
    ],
)
def test_a_malformed_line_of_ours_is_refused(tmp_path, line, said):
    path = mooncake(tmp_path, '{"seconds": 0, "prompt": 5, "output": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"line 2 must be a request, got .*{said}"):
        read_trace(path)


def test_a_malformed_line_of_a_csv_is_refused_with_its_number(tmp_path):
    path = tmp_path / "a.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n"
    for line in ("2023-11-16 18:17:04,many,3", "yesterday,3,3", "2023-11-16 18:17:04,3"):
        path.write_text(head + line + "\n")
        with pytest.raises(ValueError, match="line 3 must be a request"):
            read_trace(str(path))
    for empty in ("", "{}\n"):
        with pytest.raises(ValueError, match="must have the fields"):
            read_trace(mooncake(tmp_path, empty))


def test_the_command_writes_what_it_prints(capsys, tmp_path):
    path = tmp_path / "simulate.json"
    arguments = ["--requests", "8", "--rates", "3", "9", "--allocators", "oracle", "prefix",
                 "--gpu", "h100", "--model", "llama-1b", "--block-size", "8", "32",
                 "--scheduler", "seed=0,1", "--scheduler", "max_num_seqs=3",
                 "--json", str(path)]  # fmt: skip
    assert simulate.main(arguments) == 0
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = document["rows"]
    assert len(rows) == 2 * 2 * (1 + 2)
    by_seed = [row for row in rows if row["allocator"] == "oracle" and row["rate"] == 3]
    assert len(by_seed) == 2
    assert by_seed[0]["s/token"] == by_seed[1]["s/token"]
    assert all(row["running"] <= 3 for row in rows)
    assert document["machine"]["name"] == "NVIDIA H100 SXM"


def test_the_command_line_has_it_and_it_needs_no_torch(capfd):
    words = ["simulate", "--requests", "4", "--model", "llama-1b"]
    script = f"import sys, tilewise.cli; print(tilewise.cli.main({words}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert cli.main(["simulate", "--gpu", "tpu"]) == 2
    assert "gpu must be one of h200" in capfd.readouterr().err


def test_wrong_words_are_refused():
    requests = drawn_trace(2)
    with pytest.raises(ValueError, match="allocator must be one of max, .* got 'best'"):
        serve(requests, SMALL, "best")
    with pytest.raises(ValueError, match="model must be qwen3-0.6b, .* got 'gpt-9'"):
        model_sizes("gpt-9")
    with pytest.raises(ValueError, match="scheduler must be KEY=VALUE .* got 'speed=3'"):
        simulate.main(["--requests", "2", "--scheduler", "speed=3"])
    with pytest.raises(ValueError, match="rate must be finite and above 0, got 0"):
        poisson(requests, 0)
    with pytest.raises(ValueError, match="model must fit 0.9 of a machine's .* takes "):
        simulate.main(["--gpu", "cpu", "--model", "opt-13b"])
    with pytest.raises(ValueError, match="requests must hold one that can be served"):
        simulate.of_timings([])
