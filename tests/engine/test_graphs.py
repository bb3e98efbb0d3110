"""A captured step is the step computed op by op, and neither graphs nor overlap change a token."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.engine.checkpoint import VOCAB, greedy_tokens, write_checkpoint
from tests.engine.test_sizing import KEPT_PER_ROW
from tests.waits import waits_are_errors
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import SampledToken
from tilewise.engine.captured import decode_step
from tilewise.engine.captured import runner as device_runner
from tilewise.engine.captured.decode_step import DecodeStep, buckets
from tilewise.engine.captured.graphs import prepare, warm_up_batches
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.settings import cache_spec
from tilewise.models import load_model
from tilewise.ops import decode_rows

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def prompts(count, seed=0, longest=60):
    draw = random.Random(seed)
    return [
        [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, longest))] for _ in range(count)
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 300, 8192])
def test_buckets_ascend_to_the_limit_and_waste_little(most: int):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows < (rows if rows < 8 else 8 if rows <= 64 else 16 if rows <= 256 else 32)


def make_runner(
    directory, device, *, block_size=4, num_blocks=400, max_num_seqs=9, dtype="auto",
    max_num_batched_tokens=None,
):  # fmt: skip
    model = load_model(directory, dtype=dtype, device=torch.device(device))
    parameter_dtype = model.embed_tokens.weight.dtype
    storage = KVStorage(cache_spec(model.config, block_size, parameter_dtype), num_blocks, device)
    for layer in storage.layers:
        for tensor in layer:
            tensor.zero_()
    return DeviceRunner(
        model,
        storage,
        max_num_seqs=max_num_seqs,
        max_model_len=model.config.max_position_embeddings,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def new_scheduler(runner, **settings):
    limits = {
        "max_num_seqs": runner.rows.max_num_seqs,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
    }
    storage = runner.storage
    windows = storage.spec.windows
    return Scheduler(storage.counts, runner.block_size, windows=windows, **(limits | settings))


def run(engine, requests):
    for request in requests:
        engine.add_request(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for event in engine.step():
            if event.error is not None:
                raise event.error
            tokens.setdefault((event.request_id, event.index), []).append(event.token.token_id)
        engine.scheduler.check_integrity()
    assert engine.stats().scheduler.blocks_used == 0
    return tokens


def mixed_requests(seed=1):
    """Greedy and drawn, alone and forked, long and short."""
    draw = random.Random(seed)
    requests = []
    for i, prompt in enumerate(prompts(12, seed)):
        sampling = SamplingParams(
            n=draw.choice([1, 1, 3]),
            temperature=draw.choice([0.7, 1.3]),
            top_p=draw.choice([1.0, 0.8]),
            top_k=draw.choice([0, 20]),
            min_p=draw.choice([0.0, 0.05]),
            seed=i,
            max_tokens=draw.choice([3, 9, 17]),
        )
        requests.append(Request(str(i), prompt, GREEDY if i % 3 == 0 else sampling, (2,)))
    return requests


def asking_requests(seed=1):
    """The same, every second one with options that change its logits."""
    requests, draw = mixed_requests(seed), random.Random(seed)
    for request in requests[::2]:
        options = draw.sample(
            [
                {"frequency_penalty": 1.1, "presence_penalty": 0.3},
                {"repetition_penalty": 1.4},
                {"allowed_token_ids": list(range(3, 200))},
                {"logit_bias": {11: 5.0, 40: -5.0}},
                {"logits_processors": [lambda prompt, output, logits: logits * 0.9]},
                {"prompt_logprobs": 1, "logprobs": 1},
            ],
            3,
        )
        for option in options:
            request.sampling = replace(request.sampling, **option)
        request.__post_init__()
    return requests


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


@pytest.mark.parametrize("requests", [mixed_requests, asking_requests])
@pytest.mark.parametrize("num_blocks", [400, 40])
def test_overlap_changes_no_token(directory, num_blocks, requests):
    """On a CPU, where the step is computed op by op; with 40 blocks sequences are preempted."""
    found = []
    for overlap in (False, True):
        runner = make_runner(directory, "cpu", num_blocks=num_blocks)
        engine = Engine(new_scheduler(runner), runner, overlap=overlap)
        found.append(run(engine, requests()))
        assert (engine.stats().scheduler.num_preemptions > 0) == (num_blocks == 40)
    assert found[0] == found[1]


@pytest.mark.parametrize(("num_blocks", "budget"), [(30, 100), (1, 100), (2, 1), (300, 2000)])
def test_a_warm_up_step_fits_the_limits(directory, num_blocks, budget):
    runner = make_runner(directory, "cpu", max_num_seqs=3, num_blocks=num_blocks)
    assert not any(shares for _, shares in warm_up_batches(runner, budget))
    runner.sharing_tokens = 10**9
    batches = warm_up_batches(runner, max_num_batched_tokens=budget)
    assert len(batches) == len({str(batch.sequences) for batch, _ in batches})
    for batch, shares in batches:
        assert batch.num_tokens <= budget
        assert len(batch.sequences) <= 3
        for run in batch.sequences:
            assert max(run.block_ids) < num_blocks
            assert run.start >= 8 * runner.block_size or not shares
        runner.submit(batch).result()
    assert any(batch.block_copies for batch, _ in batches) == (num_blocks > 1)
    assert any(shares for _, shares in batches) == (num_blocks == 30 or num_blocks == 300)
    runner.reset()
    assert runner.rows.num_rows == 0


def test_the_steps_that_warm_up_share_prefixes_where_a_gpu_would(directory, monkeypatch):
    runner = make_runner(directory, "cpu", max_num_seqs=3, num_blocks=60)
    runner.sharing_tokens = 10**9
    for tensor in runner.storage.whole:
        tensor.fill_(float("nan"))  # memory that nobody has written to
    found = []
    share = device_runner.shared_prefixes

    def noting(*arguments, **options):
        found.append(share(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(device_runner, "shared_prefixes", noting)
    prepare(runner, max_num_batched_tokens=200, is_lazy=True)
    assert sum(shared is not None for shared in found) >= 2
    assert runner.sharing_tokens == 10**9


def test_compilations_are_counted_from_when_the_runner_is_ready(directory):
    knobs = pytest.importorskip("triton").knobs
    runner = make_runner(directory, "cpu", max_num_seqs=2, num_blocks=30)

    def compile_one(name):
        knobs.compilation.listener(
            src=SimpleNamespace(name=name), metadata={}, metadata_group={},
            times=SimpleNamespace(total=0), cache_hit=False,
        )  # fmt: skip

    compile_one("before")
    lines = []
    prepare(
        runner,
        max_num_batched_tokens=40,
        is_lazy=True,
        show=lambda line, share=None: lines.append(line),
    )
    assert lines[0].startswith("compiling kernels, step 1 of")
    assert not runner.captures  # there is no graph on a CPU
    engine = Engine(new_scheduler(runner), runner)
    assert engine.stats().num_compilations == 0
    compile_one("after")
    assert engine.stats().num_compilations == 1
    assert runner.compilations.names == ["after"]
    # With that, Triton would write constants as JSON, and those of 8-bit attention are not plain.
    assert knobs.runtime.jit_post_compile_hook is None


class Replay:
    """A graph on a CPU: what was captured, done again."""

    def __init__(self, compute):
        self.replay = compute


@pytest.fixture
def replays(monkeypatch):
    """Let steps be captured on a CPU; return the number of those that were."""
    captured = []

    def capture(self, compute, pool, stream):
        compute()
        captured.append(self.bucket)
        return Replay(compute)

    monkeypatch.setattr(DecodeStep, "_captured", capture)
    monkeypatch.setattr(DeviceRunner, "_captured_in", lambda self: (None, None))
    return captured


def drawn(runner, requests):
    """Run requests; return all that their events say."""
    engine = Engine(new_scheduler(runner), runner, overlap=True)
    for request in requests:
        engine.add_request(request)
    found: dict[tuple[str, int], list[SampledToken]] = {}
    while engine.has_unfinished():
        for event in engine.step():
            found.setdefault((event.request_id, event.index), []).append(event.token)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_halves_of_a_captured_step_are_the_step_bit_for_bit(directory, dtype, replays):
    """Rows that ask for log-probabilities, or change their logits, beside rows that do not."""
    found = []
    for captures, asks in ((False, True), (True, True), (True, False)):
        requests = mixed_requests()
        for i, request in enumerate(requests):
            option = {"logprobs": 4} if i % 3 == 1 else {"presence_penalty": 0.0}
            request.sampling = replace(request.sampling, **(option if asks and i % 3 else {}))
            request.__post_init__()
        runner = make_runner(directory, "cpu", dtype=dtype)
        runner.captures = captures
        found.append(drawn(runner, requests))
        assert all(step.logits is None for step in runner.steps.values())
        rooms = {s._hidden.data_ptr() for s in runner.steps.values() if s._hidden is not None}
        assert len(rooms) == (1 if captures and asks else 0)
    assert found[0] == found[1]
    assert all(
        [t.token_id for t in found[2][key]] == [t.token_id for t in tokens]
        for key, tokens in found[1].items()
    )
    assert len(replays) > 2


def test_a_captured_step_keeps_nothing_but_where_its_rows_belong(directory, replays):
    """Logits of 4,096 rows of a vocabulary of 128,256 are 1 GB: there are 143 such steps."""
    before = _logits_alive()  # of other tests; held, so that no other tensor gets their ids
    runner = make_runner(directory, "cpu", max_num_seqs=64)
    runner.captures = True
    for of_model in (False, True):
        for bucket in runner.buckets:
            runner.capture(bucket, of_model=of_model)
    assert len(replays) == 2 * len(runner.buckets)
    for bucket, step in runner.steps.items():
        own = [step._positions, step._place, step._graph_logits, step.logits, step.ctx.seqlens_k,
               step.ctx.cu_seqlens_q, step.ctx.slot_mapping]  # fmt: skip
        kept = sum(x.untyped_storage().nbytes() for x in own if x is not None)
        assert kept == KEPT_PER_ROW * bucket + 4 + 8
        assert step._hidden.data_ptr() == runner.steps[64]._hidden.data_ptr()
        assert step.ctx.block_table.data_ptr() == runner.rows.table.data_ptr()
    known = set(map(id, before))
    assert not [x.shape for x in _logits_alive() if id(x) not in known]


def _logits_alive() -> list[torch.Tensor]:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return [x for x in tensors if x.dim() == 2 and x.shape[1] == VOCAB]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_is_the_step_bit_for_bit(directory, dtype, monkeypatch):
    keeping = partial(DecodeStep, keeps_logits=True)
    monkeypatch.setattr(device_runner, "DecodeStep", keeping)
    logits: list[list[torch.Tensor]] = []
    for captures in (False, True):
        runner = make_runner(directory, "cuda", block_size=16, dtype=dtype)
        if captures:
            prepare(runner, max_num_batched_tokens=64, is_lazy=False)
            assert all(runner.steps[b].is_captured for b in runner.buckets)
        seen: list[torch.Tensor] = []
        compute = runner._decode

        def decode(batch, adjusts, compute=compute, runner=runner, seen=seen):
            handle = compute(batch, adjusts)
            step = runner.steps[next(b for b in runner.buckets if b >= runner.rows.num_rows)]
            seen.append(step.logits[: runner.rows.num_rows].clone())
            return handle

        runner._decode = decode
        run(Engine(new_scheduler(runner), runner, overlap=True), mixed_requests())
        logits.append(seen)
    assert len(logits[0]) == len(logits[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_fewer_kernels_change_no_bit_and_no_row(directory, monkeypatch):
    """What looks up as it begins, and what moves on as it draws; interpreted, too."""
    triton_rows = pytest.importorskip("tilewise.kernels.triton.step.decode_rows")
    found = []
    embedding_of = decode_step._embedding_of
    for looks_up, module in ((False, None), (True, None), (True, triton_rows)):
        monkeypatch.setattr(
            decode_step, "_embedding_of", embedding_of if looks_up else lambda model: None
        )
        calls: list[str] = []
        for name in ("start_decode", "draw_decode", "begin_decode", "finish_decode"):
            function = getattr(decode_rows, name)

            def call(*args, name=name, function=function, calls=calls, **kwargs):
                calls.append(name)
                return function(*args, **kwargs)

            monkeypatch.setattr(decode_step, name, call)
        if module is not None:
            monkeypatch.setattr(decode_rows, "_module", lambda *_, module=module: module)
        runner = make_runner(directory, "cpu", dtype="float32")
        requests = mixed_requests()[: 4 if module is triton_rows else None]
        found.append(drawn(runner, requests))
        assert set(calls) == {"start_decode" if looks_up else "begin_decode", "draw_decode"}
    assert found[1] == found[0]
    few = {key: tokens for key, tokens in found[0].items() if int(key[0]) < 4}
    assert {k: [t.token_id for t in v] for k, v in found[2].items()} == {
        k: [t.token_id for t in v] for k, v in few.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama", "qwen3_norm_wide_heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_graphs_nor_overlap_change_a_token(tmp_path, case, dtype):
    reference = write_checkpoint(tmp_path, case)
    given = prompts(6)
    as_ids = [{"prompt_token_ids": prompt} for prompt in given]
    found = {}
    for graphs in ("off", "lazy", "auto"):
        llm = LLM(
            tmp_path, device="cuda", dtype=dtype, num_blocks=400, max_num_seqs=9, graphs=graphs,
            max_num_batched_tokens=64,
        )  # fmt: skip
        for overlap in (False, True):
            if graphs == "off" and overlap:
                continue
            llm.engine = Engine(llm.loop.new_scheduler(), llm.engine.runner, overlap=overlap)
            outputs = llm.generate(as_ids, GREEDY)
            found[graphs, overlap] = [o.outputs[0].token_ids for o in outputs]
            assert llm.engine.stats().scheduler.blocks_used == 0
        if graphs == "auto":
            assert llm.engine.runner.compilations.names == []
    assert all(tokens == found["auto", True] for key, tokens in found.items() if key[0] != "off")
    if dtype == "float32":
        assert found["off", False] == found["auto", True]
        assert found["auto", True] == [greedy_tokens(reference, p, 20) for p in given]


def test_sequences_that_change_their_logits_overlap_unless_the_host_must_know(directory):
    runner = make_runner(directory, "cpu")
    engine = Engine(new_scheduler(runner), runner, overlap=True)
    steps = []
    submit = runner.submit

    def noting(batch):
        steps.append({run.seq_id for run in batch.sequences})
        return submit(batch)

    runner.submit = noting
    options = ({}, {"presence_penalty": 1.0}, {"logits_processors": [lambda p, o, x: x]})
    for i, option in enumerate(options):
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **option)
        engine.add_request(Request(str(i), [5, 6, 7], sampling))
    while engine.has_unfinished():
        engine.step()
    first = steps[1:19]
    assert all({0, 1} <= step for step in first)
    assert [2 in step for step in first] == [False, True] * 9
    assert sum(2 in step for step in steps) == 20


@pytest.mark.gpu
def test_a_step_in_two_halves_is_the_whole_step_bit_for_bit(directory):
    """Neighbours that ask for nothing keep their logits, captured in halves or in one."""
    asking = replace(GREEDY, presence_penalty=0.0, logit_bias={3: 1.0})
    found = []
    for logprobs, other in ((None, GREEDY), (5, GREEDY), (5, asking)):
        plain = Request("plain", prompts(1)[0], replace(GREEDY, logprobs=logprobs))
        runner = make_runner(directory, "cuda", block_size=16, dtype="bfloat16")
        prepare(runner, max_num_batched_tokens=64, is_lazy=False)
        engine = Engine(new_scheduler(runner), runner, overlap=True)
        engine.add_request(plain)
        engine.add_request(Request("other", prompts(1, seed=5)[0], other))
        events = []
        while engine.has_unfinished():
            events += [e.token for e in engine.step() if e.request_id == "plain"]
        found.append(events)
        assert runner.compilations.names == []
        has_halves = any(s.is_model_captured for s in runner.steps.values())
        assert has_halves == (logprobs is not None)
    assert found[1] == found[2]
    assert [t.token_id for t in found[0]] == [t.token_id for t in found[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{}, {"presence_penalty": 0.5, "logit_bias": {5: 1.0}}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_decode_step_waits_for_nothing(directory, option, dtype):
    params = replace(GREEDY, **option)
    runner = make_runner(directory, "cuda", block_size=16, dtype=dtype)
    prepare(runner, max_num_batched_tokens=64, is_lazy=False)
    engine = Engine(new_scheduler(runner), runner, overlap=True)
    for i, prompt in enumerate(prompts(6)):
        engine.add_request(Request(str(i), prompt, params))
    for _ in range(4):
        engine.step()
    submit = runner.submit

    def watched(batch):
        with waits_are_errors():
            return submit(batch)

    runner.submit = watched
    for _ in range(10):
        engine.step()
    for i, prompt in enumerate(prompts(3, seed=9)):  # and neither does a step with prompts
        engine.add_request(Request(f"new {i}", prompt, params))
    while engine.has_unfinished():
        engine.step()


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [mixed_requests, asking_requests])
def test_drawn_tokens_are_the_same_with_graphs_and_without(directory, requests):
    found = []
    for captures, overlap in ((False, False), (True, False), (True, True)):
        runner = make_runner(directory, "cuda", block_size=16, num_blocks=60, dtype="float32")
        runner.captures = captures
        engine = Engine(new_scheduler(runner), runner, overlap=overlap)
        found.append(run(engine, requests()))
    assert found[0] == found[1] == found[2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_8_bit_caches_take_the_same_path(tmp_path, kind):
    write_checkpoint(tmp_path, "llama")
    found = []
    for graphs in ("off", "auto"):
        llm = LLM(
            tmp_path, device="cuda", dtype="float32", kv_cache_dtype=kind, num_blocks=400,
            max_num_seqs=4, graphs=graphs,
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts(6)], GREEDY)
        found.append([o.outputs[0].token_ids for o in outputs])
    assert found[0] == found[1]
