"""LLM on small random checkpoints: transformers' tokens, whatever the batch, chunk or pool."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.engine.checkpoint import VOCAB, greedy_tokens, write_checkpoint
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.outputs import Generation
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps import inputs
from tilewise.errors import CheckpointError, QueueFullError, RequestError
from tilewise.ops import shared_prefixes

STEPS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
CASES = ("llama", "qwen3_norm_wide_heads", "gpt2")


def _prompts():
    draw = random.Random(0)
    return [[draw.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 16, 17, 30, 43)]


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Per case: the directory, transformers' model, and its continuation of each prompt."""
    found = {}
    for case in CASES:
        directory = tmp_path_factory.mktemp(case)
        model = write_checkpoint(directory, case)
        found[case] = (directory, model, [greedy_tokens(model, p, STEPS) for p in PROMPTS])
    return found


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints["llama"][0]


@pytest.fixture(scope="module")
def llm(directory):
    return make(directory)


def make(directory, **settings):
    return LLM(directory, device="cpu", **{"num_blocks": 200, "block_size": 4, **settings})


def as_ids(prompts):
    return [{"prompt_token_ids": p} for p in prompts]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm):
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().scheduler.blocks_used == 0
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_tokens_are_those_of_transformers(checkpoints, case, chunk):
    directory, _, wanted = checkpoints[case]
    llm = make(directory, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
    assert tokens_of(llm.generate(as_ids(PROMPTS), GREEDY)) == wanted
    assert_idle(llm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_keeps_the_tokens(checkpoints, case, enable_prefix_caching):
    directory, _, wanted = checkpoints[case]
    llm = make(
        directory,
        num_blocks=24,
        max_num_batched_tokens=32,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert tokens_of(llm.generate(as_ids(PROMPTS), GREEDY)) == wanted
    assert llm.engine.stats().scheduler.num_preemptions > 0
    assert_idle(llm)


@pytest.mark.parametrize(("num_blocks", "parts"), [
    (None, ["weights loaded", "memory measured", "cache made", "kernels compiled"]),
    (8, ["weights loaded", "cache made", "kernels compiled"]),
])  # fmt: skip
def test_a_start_tells_what_its_parts_took(directory, num_blocks, parts):
    began = time.perf_counter()
    with LLM(directory, device="cpu", num_blocks=num_blocks) as llm:
        whole = time.perf_counter() - began
        assert list(llm.start_seconds) == parts
        assert min(llm.start_seconds.values()) > 0
        assert sum(llm.start_seconds.values()) < whole


def test_the_queue_of_an_llm_is_bounded(checkpoints):
    directory, _, _ = checkpoints["llama"]
    llm = make(directory, max_num_seqs=1, max_waiting_requests=2, max_waiting_tokens=1000)
    assert len(llm.generate(as_ids(PROMPTS[:2]), GREEDY)) == 2
    with pytest.raises(QueueFullError, match="waiting requests must be at most 2") as caught:
        llm.generate(as_ids([[5, 6]] * 5), GREEDY)
    assert caught.value.__notes__ == ["This ended prompts[2]."]
    assert_idle(llm)
    assert len(llm.generate(as_ids(PROMPTS[:2]), GREEDY)) == 2
    with pytest.raises(ValueError, match="max_waiting_tokens must be at least 1, got 0"):
        make(directory, max_waiting_tokens=0)
    with pytest.raises(TypeError, match="max_waiting_requests must be an integer or None"):
        make(directory, max_waiting_requests="2")


def test_equal_beginnings_are_computed_once_and_change_nothing(checkpoints):
    directory, model, _ = checkpoints["llama"]
    llm = make(directory)
    prompts = [[*PROMPTS[4], 5], [*PROMPTS[4], 6, 7]]
    first, second = (llm.generate(as_ids([p]), GREEDY)[0] for p in prompts)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 30)
    for output, prompt in zip((first, second), prompts, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(model, prompt, STEPS)


def test_text_goes_in_and_comes_out(llm):
    prompts = ["once upon a time", "the quick"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        [sample] = output.outputs
        assert sample.text == llm.tokenizer.decode(sample.token_ids)
        assert (sample.finish_reason, sample.stop_reason) == ("length", None)
        assert (sample.index, sample.logprobs, sample.cumulative_logprob) == (0, None, None)
        assert output.finished
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_every_form_of_prompt_is_taken(llm):
    text = "the lazy dog"
    ids = llm.tokenizer.encode(text)
    [alone] = llm.generate(text, GREEDY)
    [alone_ids] = llm.generate({"prompt_token_ids": ids}, GREEDY)
    mixed = llm.generate([text, {"prompt_token_ids": tuple(ids)}], [GREEDY, GREEDY])
    assert tokens_of([alone, alone_ids]) == tokens_of(mixed)
    arrays = [{"prompt_token_ids": np.array(ids)}, {"prompt_token_ids": torch.tensor(ids)}]
    other = llm.generate((p for p in [{"prompt": text}, *arrays]), iter([GREEDY] * 3))
    assert tokens_of(other) == tokens_of([alone] * 3)
    assert [type(i) for i in other[1].prompt_token_ids] == [int] * len(ids)
    assert [o.prompt for o in other] == [text, None, None]
    assert alone_ids.prompt is None
    assert alone_ids.outputs[0].text == alone.outputs[0].text
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    short = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["the", "once"], [short, GREEDY])
    assert [len(ids) for ids in tokens_of(outputs)] == [3, STEPS]
    with pytest.raises(ValueError, match="as many as the 2 prompts, got 1"):
        llm.generate(["the", "once"], [short])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, GREEDY, "prompts must be one or a list of them, got NoneType"),
        (5, GREEDY, "prompts must be one or a list of them, got int"),
        ("the", {"max_tokens": 3}, "sampling_params must be one or a list of them, got dict"),
        (["the", "once"], [GREEDY, None], "sampling_params must be SamplingParams, got NoneType"),
        ("the", 5, "sampling_params must be one or a list of them, got int"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_named(llm, prompts, params, message):
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts, params)


def test_seeded_samples_are_reproducible_in_any_company(directory):
    params = SamplingParams(n=3, seed=7, temperature=1.2, top_p=0.9, max_tokens=10)
    llm = make(directory, num_blocks=40, max_num_seqs=6)
    [alone] = llm.generate("once upon", params)
    crowd = llm.generate(["the quick", "once upon", "a small cat"], [GREEDY, params, GREEDY])
    samples = [c.token_ids for c in alone.outputs]
    assert [c.token_ids for c in crowd[1].outputs] == samples
    assert len(set(map(tuple, samples))) == 3
    assert [c.index for c in alone.outputs] == [0, 1, 2]
    [first] = llm.generate("once upon", SamplingParams(seed=7, temperature=1.2, top_p=0.9))
    assert first.outputs[0].token_ids[:10] == samples[0]


def test_unseeded_samples_follow_the_seed_of_the_engine(directory):
    def draw(seed):
        llm = make(directory, seed=seed)
        return tokens_of(llm.generate(["the", "the"], SamplingParams(max_tokens=8)))

    one, again, other = draw(1), draw(1), draw(2)
    assert one == again != other
    assert one[0] != one[1]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_text_before_it(llm, length):
    [whole] = llm.generate("the quick brown", GREEDY)
    text = whole.outputs[0].text
    stop = text[9 : 9 + length]
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, stop=["@@", stop])
    [output] = llm.generate("the quick brown", params)
    [sample] = output.outputs
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.token_ids == whole.outputs[0].token_ids[: len(sample.token_ids)]
    assert stop in llm.tokenizer.decode(sample.token_ids)
    assert_idle(llm)


def test_a_stop_token_ends_the_text_and_is_no_part_of_it(llm):
    [whole] = llm.generate("the quick brown", GREEDY)
    ids = whole.outputs[0].token_ids
    stop = ids[6]
    count = ids.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, stop_token_ids=[stop])
    [sample] = llm.generate("the quick brown", params)[0].outputs
    assert sample.token_ids == ids[:count]
    assert sample.text == llm.tokenizer.decode(ids[: count - 1])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_the_models_end_token_ends_the_text_unless_ignored(tmp_path, checkpoints):
    _, model, wanted = checkpoints["llama"]
    end = wanted[1][5]
    config = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end]
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = config
    llm = make(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS)
    stopped, ignored = llm.generate(as_ids([PROMPTS[1]] * 2), [params, GREEDY])
    assert stopped.outputs[0].token_ids == wanted[1][: wanted[1].index(end) + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason is None
    assert ignored.outputs[0].token_ids == wanted[1]


def test_logprobs_are_those_of_the_model(checkpoints):
    directory, model, wanted = checkpoints["llama"]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    [sample] = make(directory).generate(as_ids([PROMPTS[2]]), params)[0].outputs
    assert sample.token_ids == wanted[2][:5]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[2], *wanted[2][:4]]])).logits[0, -5:]
    truth = logits.double().log_softmax(-1)
    assert len(sample.logprobs) == 5
    total = 0.0
    for row, token, entry in zip(truth, sample.token_ids, sample.logprobs, strict=True):
        top = row.topk(3)
        assert list(entry) == top.indices.tolist()
        assert list(entry.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
        total += row[token].item()
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_drawn_token_outside_the_best_has_its_logprob_too(llm):
    params = SamplingParams(temperature=5.0, seed=3, max_tokens=6, logprobs=1)
    [sample] = llm.generate("the", params)[0].outputs
    assert all(
        token in entry for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)
    )
    assert max(len(entry) for entry in sample.logprobs) == 2


def test_the_context_ends_a_text_without_max_tokens(directory):
    llm = make(directory, max_model_len=40)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    [output] = llm.generate(as_ids([PROMPTS[4]]), params)
    assert len(output.outputs[0].token_ids) == 10
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_token_ids": []}, "at least 1 token, got 0"),
        ({"prompt_token_ids": [5, VOCAB]}, "below vocab_size 300, got 300"),
        ({"prompt_token_ids": [5, -1]}, "got -1"),
        ({"prompt_token_ids": [5, 1.5]}, "must be integers, got 1.5"),
        ({"prompt_token_ids": [5] * 300}, "at most 255 tokens"),
        ({"prompt_token_ids": 5}, "must be a list, got int"),
        ({"prompt_token_ids": torch.tensor(5)}, "must be a list, got Tensor"),
        ({"prompt_token_ids": b"the"}, "must be a list, got bytes"),
        ({"prompt_token_ids": {5: 6}}, "must be a list, got dict"),
        ({"prompt_token_ids": {5, 6}}, "must be a list, got set"),
        ({"prompt_token_ids": [True]}, "must be integers, got True"),
        ({"prompt_token_ids": None}, "must be a str, .* got dict"),
        ({"text": "the"}, "must have no keys but prompt and prompt_token_ids, got 'text'"),
        (7, "must be a str, .* got int"),
        (b"the", "must be a str, .* got bytes"),
        ("the \udcff", r"valid Unicode, got '.udcff' at character 4"),
        ("", "at least 1 token, got 0"),
    ],
)
def test_a_bad_prompt_is_named_before_any_work(llm, bad, message):
    before = llm.engine.stats()
    with pytest.raises(RequestError, match=rf"^prompts\[1\]: .*{message}"):
        llm.generate(["the", bad, "once"], GREEDY)
    assert llm.engine.stats() == before
    assert len(llm.generate("the", GREEDY)[0].outputs[0].token_ids) == STEPS
    if not isinstance(bad, int):
        with pytest.raises(RequestError, match=rf"^(?!prompts).*{message}"):
            llm.generate(bad, GREEDY)


def test_what_is_asked_beside_the_prompt_reaches_the_request(llm, monkeypatch):
    asked = {"user": "a", "priority": 3, "deadline_s": 60.0, "max_queue_s": 30}
    added, add = [], llm.engine.scheduler.add

    def adding(request):
        added.append(request)
        add(request)

    monkeypatch.setattr(llm.engine.scheduler, "add", adding)
    [output] = llm.generate("the quick", GREEDY, cache_salt="s", **asked)
    text = "".join(llm.stream("the quick", GREEDY, cache_salt="s", **asked))
    assert text == output.outputs[0].text
    for request in added:
        assert {name: getattr(request, name) for name in asked} == asked
        assert request.salt == "s"
    assert len(added) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"user": 1}, "user must be a str, got int"),
        ({"cache_salt": None}, "cache_salt must be a str, got NoneType"),
        ({"user": "a" * 2000}, "user must be of at most 1024 characters, got 2000"),
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"deadline_s": -1}, "deadline_s must be finite and at least 0, got -1"),
        ({"deadline_s": 10**400}, "deadline_s must be finite and at least 0, got inf"),
        ({"max_queue_s": float("nan")}, "max_queue_s must be finite and at least 0, got nan"),
        ({"deadline_s": "1"}, "deadline_s must be a number of seconds or None, got '1'"),
    ],
)
def test_what_is_asked_beside_the_prompt_is_checked(llm, asked, message):
    with pytest.raises(RequestError, match=message):
        llm.generate("the", GREEDY, **asked)
    with pytest.raises(RequestError, match=message):
        llm.stream("the", GREEDY, **asked)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_aborts_everything_and_leaves_the_engine_clean(directory, monkeypatch, error):
    llm = make(directory)
    whole, steps = llm.engine.runner.forward, []

    def interrupted(inputs):
        steps.append(inputs)
        if len(steps) >= 5:  # the halves of the step that failed as well
            raise error
        return whole(inputs)

    monkeypatch.setattr(llm.engine.runner, "forward", interrupted)
    with pytest.raises(error):
        llm.generate(["the quick", "once"], GREEDY)
    assert_idle(llm)
    monkeypatch.undo()
    assert tokens_of(llm.generate("once", GREEDY)) == tokens_of(
        make(directory).generate("once", GREEDY)
    )


def test_an_interrupt_inside_the_bookkeeping_leaves_a_clean_engine(directory, monkeypatch):
    llm = make(directory)
    broken = llm.engine.scheduler

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(broken.tables, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the quick", "once"], GREEDY)
    assert_idle(llm)
    wanted = make(directory).generate("once", GREEDY)
    assert tokens_of(llm.generate("once", GREEDY)) == tokens_of(wanted)


def test_streaming_gives_the_text_in_pieces(llm, monkeypatch):
    [output] = llm.generate("once upon a", GREEDY)
    read, step, unread = threading.Semaphore(1), llm.engine.step, Generation.unread_text

    def after_the_reader():
        assert read.acquire(timeout=60)  # a reader that is late would get several steps at once
        return step()

    def reading(generation):
        text = unread(generation)
        read.release()
        return text

    monkeypatch.setattr(llm.engine, "step", after_the_reader)
    monkeypatch.setattr(Generation, "unread_text", reading)
    deltas = list(llm.stream("once upon a", GREEDY))
    assert "".join(deltas) == output.outputs[0].text
    assert len(deltas) > 5
    assert all(deltas)
    assert_idle(llm)


def test_a_dropped_stream_is_aborted(llm, monkeypatch):
    steps, whole, taken = threading.Semaphore(8), llm.engine.step, []

    def step():
        taken.append(steps.acquire(timeout=60))
        return whole()

    monkeypatch.setattr(llm.engine, "step", step)
    deltas = llm.stream("once upon a", GREEDY)
    next(deltas)
    assert llm.engine.has_unfinished()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(deltas.close)
        # Until the engine's thread has been asked, or, between two steps, has done it already.
        while llm.loop._core.inbox.empty() and not closing.done():
            time.sleep(0.001)
        steps.release()
        closing.result(timeout=60)
    assert_idle(llm)
    assert len(taken) < STEPS


def test_a_stream_and_other_requests_share_the_engine(llm):
    alone = [o.outputs[0].text for o in llm.generate(["once", "the"], GREEDY)]
    deltas = llm.stream("once", GREEDY)
    text = next(deltas)
    [other] = llm.generate("the", GREEDY)
    assert [text + "".join(deltas), other.outputs[0].text] == alone
    assert_idle(llm)


def test_threads_share_the_engine_and_its_steps(directory):
    llm = make(directory, num_blocks=60)
    params = SamplingParams(n=2, seed=3, max_tokens=STEPS, ignore_eos=True)
    prompts = ["the quick", "once upon", "a small cat", "the lazy dog"]
    wanted = [[c.text for c in o.outputs] for o in llm.generate(prompts, params)]
    texts = [o.outputs[0].text for o in llm.generate(prompts, GREEDY)]

    def work(i):
        for _ in range(3):
            [output] = llm.generate(prompts[i], params)
            assert [c.text for c in output.outputs] == wanted[i]
            assert "".join(llm.stream(prompts[i], GREEDY)) == texts[i]
            next(llm.stream(prompts[i], GREEDY))

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(work, range(len(prompts))))
    assert_idle(llm)


def test_a_failed_step_in_one_thread_leaves_no_other_waiting(directory, monkeypatch):
    llm = make(directory)
    whole, both_live = llm.engine.runner.forward, threading.Event()

    def fails_with_two(inputs):
        if both_live.is_set() or len(inputs.ctx.seqlens_k) == 2:
            both_live.set()
            raise RuntimeError("out of luck")
        return whole(inputs)

    monkeypatch.setattr(llm.engine.runner, "forward", fails_with_two)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)

    def work(prompt):
        try:
            while not both_live.is_set():
                llm.generate(prompt, params)
            return "served"
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        assert "out of luck" in list(pool.map(work, ["the", "once"]))
    assert_idle(llm)


def test_a_stream_is_checked_when_it_is_asked_for(llm):
    with pytest.raises(RequestError, match="must be 1 to stream, got 2"):
        llm.stream("once", SamplingParams(n=2))
    with pytest.raises(RequestError, match="at least 1 token"):
        llm.stream("")


def test_a_model_without_tokenizer_takes_token_ids(tmp_path, checkpoints):
    write_checkpoint(tmp_path, "llama", has_tokenizer=False)
    llm = make(tmp_path)
    [output] = llm.generate(as_ids([PROMPTS[1]]), GREEDY)
    assert output.outputs[0].token_ids == checkpoints["llama"][2][1]
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="must be token ids"):
        llm.generate("the")
    with pytest.raises(RequestError, match="stop must be None"):
        llm.generate(as_ids([PROMPTS[1]]), SamplingParams(stop="x"))


# For a Llama a list of operations of its own would be compiled for this pair of dtypes.
@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_cache_may_be_narrower_than_the_model(checkpoints, case):
    directory, _, wanted = checkpoints[case]
    llm = make(directory, kv_cache_dtype="bfloat16")
    spec = llm.engine.runner.storage.spec
    assert spec.kv.dtype == torch.bfloat16
    assert llm.engine.stats().cache_bytes_per_token == spec.bytes_per_token
    if case == "llama":
        assert spec.bytes_per_token == 2 * 2 * 8 * 2 * 2
    [output] = llm.generate(as_ids([PROMPTS[3]]), GREEDY)
    assert output.outputs[0].token_ids[0] == wanted[3][0]


# Largest error of a logit in standard deviations of all logits, about twice what was seen (story
# model in float32): half a step is 1 / 254 of the largest channel, or 1 / 16 of each.
# Both are read by one kernel, whose tests know both; every day the engine reads one of them.
@pytest.mark.parametrize(
    ("name", "bound"),
    [("int8", 0.05), pytest.param("fp8_e4m3", 0.2, marks=pytest.mark.slow), ("int4", 0.6)],
)
@pytest.mark.parametrize("tokens_per_step", [64, 1], ids=["prefill", "decode"])
def test_logits_over_a_narrow_cache_of_the_story_model_are_close(name, bound, tokens_per_step):
    prompt = "Once upon a time, there was a little rabbit who lived in the"
    last, bytes_per_token = {}, {}
    for kind in ("float32", name):
        llm = LLM(
            "story",
            dtype="float32",
            kv_cache_dtype=kind,
            num_blocks=16,
            max_num_seqs=1,
            max_model_len=128,
            max_num_batched_tokens=tokens_per_step,
        )
        forward = llm.engine.runner.forward

        def kept(inputs, kind=kind, forward=forward):
            last[kind] = forward(inputs)
            return last[kind]

        llm.engine.runner.forward = kept
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        bytes_per_token[kind] = llm.engine.stats().cache_bytes_per_token
    error = float((last[name] - last["float32"]).abs().max() / last["float32"].std())
    assert 0 < error < bound
    # A byte for four, or for eight, and a float32 beside each 32 channels.
    bytes_of_32 = 16 + 4 if name == "int4" else 32 + 4
    assert bytes_per_token[name] * 4 * 32 == bytes_per_token["float32"] * bytes_of_32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be auto"),
        ({"device": "meta"}, "device must be cpu or cuda, got 'meta'"),
        ({"device": "gpu"}, "device must be cpu or cuda, got 'gpu'"),
        ({"device": "cuda:99"}, "device must be one of the .* GPUs that torch sees, got 'cuda:99'"),
        ({"device": None}, "device must be cpu or cuda, got None"),
        ({"dtype": "int3"}, "dtype must be 'auto' or a floating point dtype"),
        ({"kv_cache_dtype": torch.float64}, "kv_cache_dtype must be auto, .* got torch.float64"),
        ({"block_size": 16.0}, "block_size must be an integer, got 16.0"),
        ({"num_blocks": "9"}, "num_blocks must be an integer or None, got '9'"),
        ({"max_model_len": 64.0}, "max_model_len must be an integer or None, got 64.0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be an integer or None"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"num_blocks": 10**12}, "num_blocks must fit the memory of cpu at .* bytes each"),
        ({"max_model_len": 257}, "max_model_len must be in 2 ... 256 .* got 257"),
        ({"max_model_len": 1}, "max_model_len must be in"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be in"),
        ({"gpu_memory_utilization": "9"}, "gpu_memory_utilization must be a number, got '9'"),
        ({"swap_space_gib": None}, "swap_space_gib must be a number, got None"),
        ({"offload_gib": 10**400}, "offload_gib must be finite, got an integer of 1329 bits"),
        ({"offload_dir": 5}, "offload_dir must be a directory or None, got 5"),
        ({"user_weights": ["a"]}, "user_weights must be a dict or None, got .'a'."),
        ({"user_weights": {1: 2.0}}, "user_weights must have users' names as keys, got 1"),
        ({"user_weights": {"a": "b"}}, "user_weights must have numbers as values, got 'b'"),
        ({"user_weights": {"a": 0}}, "user_weights must be above 0 and finite, got 0 for 'a'"),
        ({"random_weights": "no"}, "random_weights must be True or False, got 'no'"),
        ({"victim": None}, "victim must be a str, got None"),
        ({"graphs": "on"}, "graphs must be one of auto, lazy, off, got 'on'"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(directory, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(directory, **{"device": "cpu", "num_blocks": 8, **settings})


def test_a_number_of_blocks_may_be_numpys(directory):
    assert LLM(directory, device="cpu", num_blocks=np.int64(8)).generate("once")


def test_a_missing_model_is_named():
    with pytest.raises(
        TypeError, match="model must be a directory, a hub name or 'story', got None"
    ):
        LLM(None)
    with pytest.raises(CheckpointError, match="no/such/model"):
        LLM("no/such/model")


def test_neither_models_nor_a_generation_import_what_they_can_do_without(directory):
    """Of models none asks for a compiler or a server, loaded or not; nor for transformers."""
    code = (
        "import sys, tilewise.models\n"
        "heavy = {'torch._dynamo', 'sympy', 'triton', 'transformers', 'fastapi'}\n"
        "print(*(heavy | {'numba', 'tokenizers'}) & set(sys.modules))\n"
        f"tilewise.models.load_model({str(directory)!r}, dtype='bfloat16')\n"
        "print(*heavy & set(sys.modules))\n"
        f"tilewise.LLM({str(directory)!r}, device='cpu', num_blocks=9).generate('the')\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n" * 3


def test_the_packaged_model_says_what_it_says_in_transformers():
    from transformers import AutoModelForCausalLM

    llm = LLM("story", device="cpu", dtype="float32", max_num_seqs=1)
    [output] = llm.generate("Once upon a time", GREEDY)
    peer = AutoModelForCausalLM.from_pretrained(packaged_model(), dtype=torch.float32).eval()
    wanted = greedy_tokens(peer, output.prompt_token_ids, STEPS)
    assert output.outputs[0].token_ids == wanted
    assert output.outputs[0].text == llm.tokenizer.decode(wanted)
    assert output.outputs[0].text.startswith((",", " "))


def test_prompts_that_share_a_prefix_get_the_tokens_of_each_alone(directory, monkeypatch):
    """A CPU shares nothing by itself; here it must, from the first saved key on."""
    draw = random.Random(1)
    system = [draw.randrange(3, VOCAB) for _ in range(48)]
    prompts = [system + [draw.randrange(3, VOCAB) for _ in range(n)] for n in (3, 9, 1, 14)]
    llm = make(directory)
    want = [tokens_of(llm.generate(as_ids([prompt]), GREEDY))[0] for prompt in prompts]
    assert llm.engine.runner.sharing_tokens is None
    llm.engine.runner.sharing_tokens = 1
    found = []

    def find(*args, **kwargs):
        found.append(shared_prefixes(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(inputs, "shared_prefixes", find)
    assert tokens_of(llm.generate(as_ids(prompts), GREEDY)) == want
    assert sum(shared is not None for shared in found) >= STEPS - 1
    assert_idle(llm)


def test_random_weights_need_neither_tensors_nor_a_tokenizer(tmp_path):
    write_checkpoint(tmp_path, "llama")
    for file in tmp_path.iterdir():
        if file.name != "config.json":
            file.unlink()
    llm = LLM(tmp_path, device="cpu", random_weights=True, max_num_seqs=2, max_model_len=64)
    assert llm.tokenizer is None
    [first], [again] = (llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY) for _ in range(2))
    assert len(first.outputs[0].token_ids) == STEPS
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(tmp_path, device="cpu")
