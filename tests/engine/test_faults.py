"""A failure ends the request that it belongs to: all others get the tokens that they get alone."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.checkpoint import VOCAB, greedy_tokens, write_checkpoint
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.errors import DeviceLostError

STEPS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
POISON = 7  # the token whose embedding a test makes NaN


def prompt_of(length, seed):
    draw = random.Random(seed)
    return [draw.randrange(POISON + 1, VOCAB) for _ in range(length)]


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((3, 9, 21, 14, 6))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory and the greedy continuation of each prompt, in which POISON does not occur."""
    path = tmp_path_factory.mktemp("llama")
    model = write_checkpoint(path, "llama")
    wanted = [greedy_tokens(model, prompt, STEPS) for prompt in PROMPTS]
    assert not any(POISON in tokens for tokens in wanted)
    return path, wanted


@pytest.fixture(
    params=[(kind, overlap) for kind in ("plain", "compiled", "device") for overlap in (0, 1)],
    ids=lambda value: f"{value[0]} with overlap" if value[1] else value[0],
)
def make(request, checkpoint):
    """Return a function that makes an LLM over one of the runners."""
    kind, overlap = request.param

    def build(**settings):
        settings = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 6, **settings}
        llm = LLM(checkpoint[0], device="cpu", **settings)
        runner = llm.engine.runner
        assert isinstance(runner, CompiledRunner)
        if kind == "plain":
            runner = ModelRunner(llm.model, runner.storage)
        elif kind == "device":
            limits = llm.engine.scheduler.limits
            runner = DeviceRunner(
                llm.model,
                runner.storage,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
            )
        llm.engine = Engine(llm.loop.new_scheduler(), runner, overlap=bool(overlap))
        step, scheduler = llm.engine.step, llm.engine.scheduler

        def checked():
            events = step()
            scheduler.check_integrity()
            return events

        llm.engine.step = checked
        return llm

    return build


def poison(llm, value=float("nan")):
    """Damage POISON's embedding; returns a function that mends it."""
    row = llm.model.embed_tokens.weight.data[POISON]
    clean = row.clone()
    row.fill_(value)
    return lambda: row.copy_(clean)


def as_ids(prompt):
    return {"prompt_token_ids": prompt}


def assert_idle(llm):
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().scheduler.blocks_used == 0
    llm.engine.scheduler.check_integrity()


def run(engine, requests):
    """Run to the end; returns tokens and last events by (request id, index)."""
    for request in requests:
        engine.add_request(request)
    tokens, last = {}, {}
    while engine.has_unfinished():
        for event in engine.step():
            key = (event.request_id, event.index)
            assert key not in last, "nothing follows an end"
            if event.token is not None:
                tokens.setdefault(key, []).append(event.token.token_id)
            if event.finish_reason is not None:
                last[key] = event
    return tokens, last


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize(
    "bad",
    [GREEDY, SamplingParams(n=3, seed=1, max_tokens=5), SamplingParams(logprobs=2, top_p=0.9)],
    ids=["greedy", "three samples", "logprobs"],
)
def test_logits_that_are_not_finite_end_their_own_request(make, checkpoint, budget, bad):
    llm = make(max_num_batched_tokens=max(budget, 6))
    poison(llm)
    requests = [Request(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
    requests.insert(2, Request("bad", [*prompt_of(9, 9), POISON, *prompt_of(4, 8)], bad))
    tokens, last = run(llm.engine, requests)
    assert tokens == {(str(i), 0): wanted for i, wanted in enumerate(checkpoint[1])}
    failed = {key: event for key, event in last.items() if event.finish_reason != "length"}
    assert list(failed) == [("bad", i) for i in range(bad.n)]
    for event in failed.values():
        assert event.finish_reason is FinishReason.ERROR
        assert isinstance(event.error, FloatingPointError)
    assert_idle(llm)


def test_a_request_that_fails_while_it_decodes_keeps_its_tokens_and_no_others(make, checkpoint):
    llm = make()
    engine = llm.engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, GREEDY))
    tokens, last = {}, {}
    while engine.has_unfinished():
        for event in engine.step():
            key = (event.request_id, event.index)
            if event.token is not None:
                tokens.setdefault(key, []).append(event.token.token_id)
            if event.finish_reason is not None:
                last[key] = event.finish_reason
        if len(tokens.get(("2", 0), ())) == 4 and not last:
            [seq] = engine.scheduler.sequences("2")
            for k_cache, *_ in engine.runner.storage.layers:
                k_cache[seq.block_ids[2]] = float("nan")
    assert last.pop(("2", 0)) == "error"
    assert set(last.values()) == {"length"}
    failed = tokens.pop(("2", 0))
    assert 4 <= len(failed) < STEPS
    assert failed == checkpoint[1][2][: len(failed)]
    assert tokens == {(str(i), 0): w for i, w in enumerate(checkpoint[1]) if i != 2}
    assert_idle(llm)
    [again] = llm.generate(as_ids(PROMPTS[2]), GREEDY)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == checkpoint[1][2]


@pytest.mark.parametrize("budget", [6, 64])
def test_a_retry_finds_no_damaged_block(make, checkpoint, budget):
    llm = make(max_num_batched_tokens=budget)
    prompt = [*PROMPTS[2][:6], POISON, *PROMPTS[2][7:]]
    stranger = PROMPTS[1]
    llm.generate([as_ids(stranger), as_ids(PROMPTS[2][:6])], GREEDY)
    truth = llm.generate(as_ids(prompt), GREEDY)[0].outputs[0].token_ids
    assert llm.engine.scheduler.reset_prefix_cache()
    llm.generate([as_ids(stranger), as_ids(PROMPTS[2][:6])], GREEDY)
    mend = poison(llm)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="logits must be finite"):
            llm.generate(as_ids(prompt), GREEDY)
        assert_idle(llm)
    mend()
    [again] = llm.generate(as_ids(prompt), GREEDY)
    assert again.num_cached_tokens == 0  # what it had found is not trusted either
    assert again.outputs[0].token_ids == truth
    [other] = llm.generate(as_ids(stranger), GREEDY)
    assert other.num_cached_tokens == 8


def test_who_shares_blocks_with_a_failed_request_makes_no_more_of_them_findable(make, checkpoint):
    llm = make()
    engine = llm.engine
    prompt = PROMPTS[2]
    engine.add_request(Request("sharer", prompt, GREEDY))
    for _ in range(3):
        engine.step()
    mend = poison(llm)
    engine.add_request(Request("bad", [*prompt[:12], POISON, 9, 9], GREEDY))
    tokens, last = run(engine, [])
    mend()
    assert last["bad", 0].finish_reason == "error"
    assert last["bad", 0].num_cached_tokens == 12
    assert tokens["sharer", 0] == checkpoint[1][2][-len(tokens["sharer", 0]) :]
    [again] = llm.generate(as_ids(prompt), GREEDY)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == checkpoint[1][2]


def test_among_five_threads_one_gets_the_error_and_four_their_tokens(make, checkpoint):
    llm = make()
    poison(llm)
    prompts = [*PROMPTS[:2], [*PROMPTS[2], POISON, 9], *PROMPTS[3:]]

    def work(i):
        seen = []
        for _ in range(3):
            try:
                [output] = llm.generate(as_ids(prompts[i]), GREEDY)
                seen.append(output.outputs[0].token_ids)
            except FloatingPointError as error:
                seen.append(str(error))
        return seen

    with ThreadPoolExecutor(5) as pool:
        seen = list(pool.map(work, range(5)))
    message = "logits must be finite, got NaN or infinity from the model"
    assert seen == [[message if i == 2 else checkpoint[1][i]] * 3 for i in range(5)]
    assert_idle(llm)


def test_the_error_names_the_prompt_of_a_list_and_a_stream_raises_it_too(make):
    llm = make()
    poison(llm)
    bad = [9, POISON, 9]
    with pytest.raises(FloatingPointError) as caught:
        llm.generate([as_ids(PROMPTS[0]), as_ids(bad)], GREEDY)
    assert caught.value.__notes__ == ["This ended prompts[1]."]
    assert_idle(llm)
    with pytest.raises(FloatingPointError):
        list(llm.stream(as_ids(bad), GREEDY))
    assert_idle(llm)


def test_a_step_that_fails_as_a_whole_tells_everybody_why(make, monkeypatch):
    llm = make(max_num_seqs=3)
    submit, long = llm.engine.runner.submit, SamplingParams(max_tokens=None, ignore_eos=True)
    is_broken = []

    def failing(batch):
        if is_broken or len(batch.sequences) == 3:
            is_broken.append(batch)
            raise RuntimeError("out of luck")
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", failing)

    def work(i):
        while True:
            llm.generate(as_ids(PROMPTS[i]), long)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, i) for i in range(3)]:
            with pytest.raises(RuntimeError, match="out of luck"):
                future.result(timeout=60)
    assert_idle(llm)


class Panic(BaseException):
    """As a library in Rust raises where it panics: no Exception."""


@pytest.mark.parametrize("kind", [LookupError, Panic])
@pytest.mark.parametrize("part", ["push", "finish"])
def test_a_text_that_fails_ends_its_own_request(make, checkpoint, monkeypatch, part, kind):
    llm = make()
    make_detokenizer = llm.tokenizer.detokenizer

    def breaking(prompt):
        whole = make_detokenizer(prompt)
        if list(prompt) == PROMPTS[3]:
            method = "push" if part == "push" else "flush"

            def fail(*arguments):
                raise kind("no such letter")

            monkeypatch.setattr(whole, method, fail)
        return whole

    monkeypatch.setattr(type(llm.tokenizer), "detokenizer", lambda self, prompt: breaking(prompt))

    def work(i):
        try:
            [output] = llm.generate(as_ids(PROMPTS[i]), GREEDY)
            return output.outputs[0].token_ids
        except kind as error:
            return str(error)

    with ThreadPoolExecutor(5) as pool:
        seen = list(pool.map(work, range(5)))
    assert seen == ["no such letter" if i == 3 else checkpoint[1][i] for i in range(5)]
    assert_idle(llm)
    with pytest.raises(kind):
        list(llm.stream(as_ids(PROMPTS[3]), GREEDY))
    assert_idle(llm)


def breaking_submit(llm, monkeypatch, breaks):
    """Let the runner raise where breaks(batch) says so; returns the sizes of the failed batches."""
    submit, failed = llm.engine.runner.submit, []

    def failing(batch):
        if breaks(batch):
            failed.append(len(batch.sequences))
            raise RuntimeError("out of luck")
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", failing)
    return failed


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_fails_once_is_made_good_by_its_halves(make, checkpoint, monkeypatch, step):
    llm = make()
    count = []

    def breaks(batch):
        count.append(batch)
        return len(count) == step

    failed = breaking_submit(llm, monkeypatch, breaks)
    outputs = llm.generate([as_ids(p) for p in PROMPTS], GREEDY)
    assert failed == [len(PROMPTS)]
    assert [o.outputs[0].token_ids for o in outputs] == checkpoint[1]
    assert_idle(llm)


@pytest.mark.parametrize("first_len", [0, 15])
@pytest.mark.parametrize("bad", range(5))
def test_who_breaks_the_step_ends_alone(make, checkpoint, monkeypatch, bad, first_len):
    """first_len: tokens that it has when it begins to break its steps; 0 is with its prompt."""
    llm = make()
    seq_ids = set()

    def breaks(batch):
        for run in batch.sequences:
            if run.start == 0 and list(run.token_ids) == PROMPTS[bad]:
                seq_ids.add(run.seq_id)
        return any(s.seq_id in seq_ids and s.start >= first_len for s in batch.sequences)

    failed = breaking_submit(llm, monkeypatch, breaks)

    def work(i):
        try:
            [output] = llm.generate(as_ids(PROMPTS[i]), GREEDY)
            return output.outputs[0].token_ids
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(5) as pool:
        llm.loop.pause()  # so that they come into one step
        seen = [pool.submit(work, i) for i in range(5)]
        while llm.loop.num_live < 5:
            time.sleep(0.001)
        llm.loop.resume()
        seen = [future.result(timeout=60) for future in seen]
    breaks_ever = first_len < len(PROMPTS[bad]) + STEPS - 1
    wanted = ["out of luck" if i == bad and breaks_ever else checkpoint[1][i] for i in range(5)]
    assert seen == wanted
    assert len(failed) <= 4  # 5, 3, 2, 1
    assert_idle(llm)


def test_samples_of_a_request_that_breaks_the_step_end_together(make, checkpoint, monkeypatch):
    llm = make()
    drawn = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    failed = breaking_submit(
        llm,
        monkeypatch,
        lambda batch: any(s.sampling is drawn and s.start > 8 for s in batch.sequences),
    )
    requests = [Request(str(i), p, GREEDY) for i, p in enumerate(PROMPTS[:3])]
    requests.insert(1, Request("bad", PROMPTS[4], drawn))
    tokens, last = run(llm.engine, requests)
    assert failed
    assert {key for key, event in last.items() if event.error} == {("bad", i) for i in range(3)}
    for i in range(3):
        assert tokens[str(i), 0] == checkpoint[1][i]
    assert_idle(llm)


@pytest.mark.parametrize("share", [True, False], ids=["forked", "alone"])
def test_seeded_tokens_are_those_of_a_run_without_failures(make, monkeypatch, share):
    """Halves repeat the copies of a fork and the draws of every sample."""
    params = SamplingParams(n=3 if share else 1, seed=4, max_tokens=9, ignore_eos=True)
    prompts = [as_ids(p) for p in PROMPTS]
    wanted = [
        [c.token_ids for c in o.outputs] for o in make(max_num_seqs=16).generate(prompts, params)
    ]
    llm = make(max_num_seqs=16)
    count = []

    def breaks(batch):
        count.append(batch)
        return len(count) % 4 in (0, 1) and len(batch.sequences) > 1

    assert breaking_submit(llm, monkeypatch, breaks) == []
    outputs = llm.generate(prompts, params)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == wanted
    assert len(count) > 20
    assert_idle(llm)


@pytest.mark.parametrize("loses", ["with its step", "alone"])
def test_a_lost_device_fails_all_with_the_reason_and_ends_the_loop(make, monkeypatch, loses):
    llm = make()
    lost, submit = [], llm.engine.runner.submit

    def failing(batch):
        if len(batch.sequences) == (3 if loses == "with its step" else 1):
            lost.append(True)
            raise RuntimeError("illegal address")
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", failing)
    monkeypatch.setattr(llm.engine.runner, "is_lost", lambda: bool(lost))
    prompts = PROMPTS[:3] if loses == "with its step" else PROMPTS[:1]

    def work(prompt):
        with pytest.raises(DeviceLostError, match="device is lost: illegal address") as caught:
            llm.generate(as_ids(prompt), GREEDY)
        return caught.value

    with ThreadPoolExecutor(3) as pool:
        llm.loop.pause()
        errors = [pool.submit(work, prompt) for prompt in prompts]
        while llm.loop.num_live < len(prompts):
            time.sleep(0.001)
        llm.loop.resume()
        errors = [future.result(timeout=60) for future in errors]
    assert all(isinstance(error.__cause__, RuntimeError) for error in errors)
    assert len({id(error) for error in errors}) == len(errors), "each has an exception of its own"
    assert llm.close(timeout_s=60)
    assert not llm.loop.is_alive
    with pytest.raises(DeviceLostError, match="device is lost"):
        llm.generate(as_ids(PROMPTS[0]), GREEDY)
