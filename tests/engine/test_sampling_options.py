"""What requests ask of their logits: transformers' tokens in every runner, plain rows untouched."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import weakref

import pytest
import torch

from tests.engine.checkpoint import VOCAB, write_checkpoint
from tests.engine.test_device_runner import as_ids, assert_idle, make
from tilewise.engine.config import NO_TERMS
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.steps.runner import ModelRunner
from tilewise.errors import RequestError

# On a CPU: the reference, the compiled step, and the rows of a device with overlap.
RUNNERS = ("plain", "compiled", "rows")
LENGTH = 24
PLAIN = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


def prompts(count=6, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(2, 44))] for _ in range(count)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, write_checkpoint(path, "qwen3_norm_wide_heads")


def engine_of(directory, runner, **settings) -> LLM:
    llm = make(directory, on_device=runner == "rows", **settings)
    if runner == "plain":
        llm.engine.runner = ModelRunner(llm.model, llm.engine.runner.storage)
    return llm


def asking(**options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | options
    )


_told = weakref.WeakKeyDictionary()  # of a model, what it told; rows of a test ask for the same


def transformers_tokens(model, prompt, **options):
    ids = torch.tensor([prompt])
    fixed = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    options = {"max_new_tokens": LENGTH, "eos_token_id": -1} | options
    told, asked = _told.setdefault(model, {}), json.dumps([prompt, options], sort_keys=True)
    if asked not in told:
        with torch.no_grad():
            told[asked] = model.generate(ids, **fixed, **options)[0, len(prompt) :].tolist()
    return list(told[asked])


def by_hand(model, prompt, change, length=LENGTH):
    """Greedy tokens of transformers' logits after change(prompt, output, logits)."""
    output = []
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        output.append(int(change(prompt, output, logits.clone()).argmax()))
    return output


def tokens_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def openai_penalties(frequency, presence):
    def change(prompt, output, logits):
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        return logits

    return change


@pytest.fixture(scope="module")
def mixture(checkpoint):
    """Prompts, one request of each kind beside plain ones, and what transformers makes of them."""
    _, model = checkpoint
    given = prompts()
    plain = [transformers_tokens(model, p) for p in given]
    options = [
        {},
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"stop_token_ids": plain[3][:3], "min_tokens": 12, "logit_bias": {plain[3][8]: -100.0}},
        {"allowed_token_ids": list(range(20, 60)), "presence_penalty": -2.0},
        {},
    ]
    wanted = [
        plain[0],
        transformers_tokens(model, given[1], repetition_penalty=1.7),
        by_hand(model, given[2], openai_penalties(1.5, 0.5)),
        None,
        None,
        plain[5],
    ]

    def third(prompt, output, logits):
        logits[plain[3][8]] -= 100.0
        if len(output) < 12:
            logits[plain[3][:3]] = -math.inf
        return logits

    def fourth(prompt, output, logits):
        logits[:20] = logits[60:] = -math.inf
        return openai_penalties(0.0, -2.0)(prompt, output, logits)

    wanted[3], wanted[4] = by_hand(model, given[3], third), by_hand(model, given[4], fourth)
    ends = [i for i, t in enumerate(wanted[3]) if i >= 12 and t in plain[3][:3]]
    wanted[3] = wanted[3][: ends[0] + 1] if ends else wanted[3]
    return given, options, wanted


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("blocks", "budget"), [(200, 64), (200, 7), (20, 32)])
def test_tokens_are_those_of_transformers_in_a_mixed_batch(
    checkpoint, mixture, runner, blocks, budget
):
    """Whole, in chunks, and with preemptions."""
    given, options, wanted = mixture
    llm = engine_of(checkpoint[0], runner, num_blocks=blocks, max_num_batched_tokens=budget)
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = llm.generate(as_ids(given), [asking(**o) for o in options])
        assert tokens_of(outputs) == wanted
        assert_idle(llm)
    assert (llm.engine.stats().scheduler.num_preemptions > 0) == (blocks == 20)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_repetition_penalty_bad_words_and_min_length_together(checkpoint, runner, penalty):
    directory, model = checkpoint
    given = prompts(4, seed=2)
    bad_ids = [[7], [9, 11]]
    llm = engine_of(directory, runner)
    requests, wanted = [], []
    for i, prompt in enumerate(given):
        first = transformers_tokens(model, prompt, repetition_penalty=penalty)
        words = [*bad_ids, [first[2]], [*first[6:8]]]
        wanted.append(
            transformers_tokens(
                model,
                prompt,
                repetition_penalty=penalty,
                bad_words_ids=words,
                min_new_tokens=10,
                eos_token_id=[first[0], first[4]],
            )
        )
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=LENGTH,
            repetition_penalty=penalty,
            bad_words=["stands for the ids below"],
            min_tokens=10,
        )
        requests.append(
            Request(
                str(i),
                prompt,
                sampling,
                (first[0], first[4]),
                bad_word_ids=tuple(map(tuple, words)),
            )
        )
    for request in requests:
        llm.engine.add_request(request)
    found: dict[str, list[int]] = {r.request_id: [] for r in requests}
    while llm.engine.has_unfinished():
        for event in llm.engine.step():
            assert event.error is None
            found[event.request_id].append(event.token.token_id)
        llm.engine.scheduler.check_integrity()
    assert list(found.values()) == wanted


@pytest.mark.parametrize("runner", RUNNERS)
def test_neighbours_that_ask_do_not_change_a_bit_of_plain_rows(checkpoint, runner):
    directory, _ = checkpoint
    given = prompts(6, seed=3)
    plain = [SamplingParams(seed=i, max_tokens=20, logprobs=2, ignore_eos=True) for i in range(3)]
    wild = SamplingParams(
        seed=9,
        max_tokens=20,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={5: 50.0},
        allowed_token_ids=range(3, 100),
        min_tokens=3,
    )
    calm = SamplingParams(seed=9, max_tokens=20, ignore_eos=True)
    found = []
    for other in (calm, wild):
        llm = engine_of(directory, runner)
        outputs = llm.generate(as_ids(given), [*plain, *[other] * 3])
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0][:3] == found[1][:3]
    assert all(a[0] != b[0] for a, b in zip(found[0][3:], found[1][3:], strict=True))


@pytest.mark.parametrize("runner", RUNNERS)
def test_seeded_samples_with_penalties_are_the_same_alone_and_preempted(checkpoint, runner):
    directory, _ = checkpoint
    given = prompts(5, seed=4)
    params = [
        SamplingParams(
            seed=i,
            n=3,
            max_tokens=24,
            ignore_eos=True,
            frequency_penalty=0.7,
            repetition_penalty=1.2,
            temperature=1.3,
        )
        for i in range(5)
    ]
    alone = engine_of(directory, runner)
    wanted = [
        [s.token_ids for s in alone.generate(as_ids([p]), [x])[0].outputs]
        for p, x in zip(given, params, strict=True)
    ]
    assert any(one[0] != one[1] for one in wanted)
    tight = engine_of(directory, runner, num_blocks=30, max_num_batched_tokens=16)
    outputs = tight.generate(as_ids(given), params)
    assert [[s.token_ids for s in o.outputs] for o in outputs] == wanted
    assert tight.engine.stats().scheduler.num_preemptions > 0
    assert_idle(tight)


def test_runners_agree_on_every_option_together(checkpoint):
    directory, _ = checkpoint
    params = SamplingParams(
        seed=3,
        n=4,
        max_tokens=24,
        temperature=1.2,
        top_p=0.95,
        logprobs=2,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        repetition_penalty=1.4,
        logit_bias={10: 3.0, 40: -20.0},
        bad_words=["the", "fox", "zq"],
        min_tokens=6,
        prompt_logprobs=3,
        logits_processors=[lambda prompt, output, logits: logits * 1.1],
    )
    found = []
    for runner in RUNNERS:
        [output] = engine_of(directory, runner).generate("once upon a time the", params)
        found.append(output)
    for other in found[1:]:
        assert [s.token_ids for s in other.outputs] == [s.token_ids for s in found[0].outputs]
        for mine, theirs in zip(found[0].prompt_logprobs, other.prompt_logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            for token in mine or ():
                assert math.isclose(mine[token], theirs[token], abs_tol=1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
def test_log_probabilities_are_of_the_models_own_distribution(checkpoint, runner):
    directory, model = checkpoint
    prompt = prompts(1)[0]
    llm = engine_of(directory, runner)
    params = asking(logprobs=2, repetition_penalty=1.5, logit_bias={40: 60.0}, max_tokens=5)
    [output] = llm.generate(as_ids([prompt]), params)
    tokens = output.outputs[0].token_ids
    assert 40 in tokens
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
    for i, (token, entry) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
        row = logits[len(prompt) - 1 + i]
        assert entry[token] == pytest.approx(float(row[token]), abs=1e-4)
        assert set(row.topk(2).indices.tolist()) <= set(entry)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("blocks", [14, 200])
def test_prompt_logprobs_in_chunks_after_hits_and_preempted(checkpoint, runner, budget, blocks):
    directory, model = checkpoint
    given = [[*range(30, 50), i, *range(60, 70)] for i in range(3)]
    llm = engine_of(directory, runner, num_blocks=blocks, max_num_batched_tokens=budget)
    llm.generate(as_ids(given), PLAIN)  # fills the prefix cache
    outputs = llm.generate(
        as_ids(given), [asking(prompt_logprobs=2), asking(prompt_logprobs=0), PLAIN]
    )
    assert outputs[2].prompt_logprobs is None
    for count, prompt, output in zip((2, 0), given, outputs, strict=False):
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == transformers_tokens(model, prompt)
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        scores = output.prompt_logprobs
        assert scores[0] is None
        assert len(scores) == len(prompt)
        for i in range(1, len(prompt)):
            row = wanted[i - 1]
            assert scores[i][prompt[i]] == pytest.approx(float(row[prompt[i]]), abs=1e-4)
            assert set(row.topk(count).indices.tolist()) <= set(scores[i])
            assert len(scores[i]) <= count + 1
    assert_idle(llm)


def test_prompts_are_scored_in_slices_of_bounded_memory(checkpoint, monkeypatch):
    from tilewise.engine.steps import prompt_scores

    directory, _ = checkpoint
    found = []
    for most in (prompt_scores.MAX_SCORED["cpu"], VOCAB * 3):
        monkeypatch.setitem(prompt_scores.MAX_SCORED, "cpu", most)
        for runner in RUNNERS:
            llm = engine_of(directory, runner)
            [output] = llm.generate(as_ids(prompts(1)), asking(prompt_logprobs=3, max_tokens=2))
            found.append(output.prompt_logprobs)
    for other in found[1:]:
        for mine, theirs in zip(found[0][1:], other[1:], strict=True):
            assert all(math.isclose(mine[t], theirs[t], abs_tol=1e-4) for t in mine)


def test_a_prompt_of_one_token_has_nothing_to_score(checkpoint):
    for runner in RUNNERS:
        llm = engine_of(checkpoint[0], runner)
        [output] = llm.generate(as_ids([[7]]), asking(prompt_logprobs=3, max_tokens=2))
        assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("runner", RUNNERS)
def test_processors_see_prompt_output_and_logits_in_order(checkpoint, runner):
    directory, model = checkpoint
    prompt, seen = prompts(1)[0], []

    def forbid(prompt_ids, output_ids, logits):
        seen.append((prompt_ids, output_ids))
        logits[output_ids] = -math.inf
        return logits

    def change(prompt, output, logits):
        logits[output] = -math.inf
        return logits / 2

    llm = engine_of(directory, runner)
    params = asking(logits_processors=[forbid, lambda p, o, logits: logits / 2])
    [output, plain] = llm.generate(as_ids([prompt, prompt]), [params, PLAIN])
    tokens = output.outputs[0].token_ids
    assert tokens == by_hand(model, prompt, change)
    assert seen == [(prompt, tokens[:i]) for i in range(LENGTH)]
    assert plain.outputs[0].token_ids == transformers_tokens(model, prompt)


def run_together(llm, generations):
    """Submit requests at once and return when all have ended, however they did."""
    ended = threading.Semaphore(0)
    for generation in generations:
        generation.on_end = ended.release
    llm.loop.submit(*generations)
    for _ in generations:
        assert ended.acquire(timeout=120)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("failing", ["raises", "exits", "is cancelled", "wrong shape", "nothing"])
def test_a_processor_that_fails_ends_its_own_request(checkpoint, runner, failing):
    directory, model = checkpoint

    def processor(prompt, output, logits):
        if len(output) < 5:
            return logits
        if failing == "raises":
            raise LookupError("no such thing")
        if failing == "exits":
            raise SystemExit(3)
        if failing == "is cancelled":  # no Exception either, as a panic of a library in Rust
            raise asyncio.CancelledError
        return logits[:-1] if failing == "wrong shape" else None

    llm = engine_of(directory, runner)
    first, second = prompts(2)
    mine = [
        llm._generation({"prompt_token_ids": p}, s, NO_TERMS, None)
        for p, s in ((first, asking(logits_processors=[processor])), (second, PLAIN))
    ]
    run_together(llm, mine)
    kinds = {"raises": LookupError, "exits": RuntimeError, "is cancelled": RuntimeError}
    assert isinstance(mine[0].error, kinds.get(failing, ValueError))
    assert mine[0].output.outputs[0].finish_reason == "error"
    assert len(mine[0].output.outputs[0].token_ids) == 5
    assert mine[1].error is None
    assert mine[1].output.outputs[0].token_ids == transformers_tokens(model, second)
    assert_idle(llm)


def test_a_request_that_allows_no_token_says_so(checkpoint):
    for runner in RUNNERS:
        llm = engine_of(checkpoint[0], runner)
        prompt, letter = [30] * 20, llm.tokenizer.encode("q")
        llm.generate(as_ids([prompt]), PLAIN)
        with pytest.raises(ValueError, match="must leave a token to draw, got none after 0 tokens"):
            llm.generate(as_ids([prompt]), asking(allowed_token_ids=letter, bad_words=["q"]))
        assert_idle(llm)
        [output] = llm.generate(as_ids([prompt]), PLAIN)
        assert output.num_cached_tokens > 0  # nothing was wrong with what it computed
        with pytest.raises(FloatingPointError, match="leaves no token"):
            llm.generate(
                as_ids(prompts(1)), asking(allowed_token_ids=[5], logits_processors=[_forbid_5])
            )
        assert_idle(llm)


def test_who_forbids_every_token_loses_nothing_but_this_request(checkpoint):
    """300 tokens end inside a word of the mask, whose other bits are nobody's."""
    for runner in RUNNERS:
        llm = engine_of(checkpoint[0], runner)
        prompt = [30] * 20
        llm.generate(as_ids([prompt]), PLAIN)
        every = list(range(llm.config.vocab_size))
        with pytest.raises(ValueError, match="must leave a token to draw, got none after 0 tokens"):
            llm.generate(as_ids([prompt]), asking(min_tokens=2, stop_token_ids=every))
        [output] = llm.generate(as_ids([prompt]), PLAIN)
        assert output.num_cached_tokens > 0  # nothing was wrong with what it computed
        assert_idle(llm)


def _forbid_5(prompt, output, logits):
    logits[5] = -math.inf
    return logits


def test_words_are_bad_with_and_without_a_space(checkpoint):
    directory, _ = checkpoint
    llm = engine_of(directory, "compiled")
    bias = {i: 20.0 for w in ("the", " the") for i in llm.tokenizer.encode(w)}
    free = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logit_bias=bias)
    [output] = llm.generate("once", free)
    assert "the" in output.outputs[0].text
    bad = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, logit_bias=bias, bad_words=["the"])
    [output] = llm.generate("once", bad)
    ids, words = output.outputs[0].token_ids, llm._options._bad_word_ids(["the"])
    assert len(words) == 2
    for word in words:
        assert not any(tuple(ids[i : i + len(word)]) == word for i in range(len(ids)))


def test_min_tokens_holds_stop_strings_and_end_tokens_back(checkpoint):
    directory, _ = checkpoint
    for runner in RUNNERS:
        llm = engine_of(directory, runner)
        [whole] = llm.generate("once", SamplingParams(seed=2, max_tokens=40, ignore_eos=True))
        letter = whole.outputs[0].text[0]
        stopped = SamplingParams(seed=2, max_tokens=40, ignore_eos=True, stop=letter)
        [output] = llm.generate("once", stopped)
        assert len(output.outputs[0].token_ids) < 9
        params = SamplingParams(seed=2, max_tokens=40, ignore_eos=True, stop=letter, min_tokens=9)
        [output] = llm.generate("once", params)
        assert len(output.outputs[0].token_ids) > 9
        assert (
            output.outputs[0].token_ids
            == whole.outputs[0].token_ids[: len(output.outputs[0].token_ids)]
        )


def test_the_stop_string_and_special_tokens_are_shown_when_asked_for(checkpoint):
    directory, _ = checkpoint
    llm = engine_of(directory, "compiled")
    end = llm.tokenizer._library.token_to_id("</s>")
    letter = llm.tokenizer.encode("q")[0]
    bias = {letter: 100.0}

    def text(**options):
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **options)
        return llm.generate("once", params)[0].outputs[0].text

    assert text(logit_bias=bias) == "q" * 6
    assert text(logit_bias=bias, stop="qq") == ""
    assert text(logit_bias=bias, stop="qq", include_stop_str_in_output=True) == "qq"
    assert text(logit_bias=bias, stop_token_ids=[letter]) == ""
    assert text(logit_bias=bias, stop_token_ids=[letter], include_stop_str_in_output=True) == "q"
    assert text(logit_bias={end: 100.0}) == ""
    assert text(logit_bias={end: 100.0}, skip_special_tokens=False) == "</s>" * 6


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("blocks", [40, 300])
def test_structured_json_always_parses(checkpoint, runner, blocks):
    directory, model = checkpoint
    llm = engine_of(directory, runner, num_blocks=blocks, max_num_batched_tokens=24)
    outputs_of = StructuredOutputs(json=SCHEMA)
    given = [llm.tokenizer.encode(text) for text in ("once upon", "the fox", "a cat: ", "lazy")]
    # A random model would be content with white space for ever.
    bias = {llm.tokenizer.encode(space)[-1]: -100.0 for space in " \n\r\t"}
    shared = {"max_tokens": 120, "structured": outputs_of, "logit_bias": bias}
    params = [
        SamplingParams(seed=1, n=4, **shared),
        SamplingParams(seed=2, temperature=2.0, presence_penalty=0.5, **shared),
        SamplingParams(temperature=0.0, ignore_eos=True, **shared),
        PLAIN,
    ]
    outputs = llm.generate(as_ids(given), params)
    texts = [s.text for o in outputs[:3] for s in o.outputs]
    assert len(texts) == 6
    assert len(set(texts[:4])) > 1
    for output in outputs[:3]:
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            found = json.loads(sample.text)
            assert set(found) == set(SCHEMA["required"])
            assert 0 <= found["age"] <= 99
            assert set(found["tags"]) <= {"a", "b"}
    assert outputs[3].outputs[0].token_ids == transformers_tokens(model, given[3])
    assert (llm.engine.stats().scheduler.num_preemptions > 0) == (blocks == 40)
    assert_idle(llm)


@pytest.mark.parametrize("runner", RUNNERS)
def test_choices_expressions_and_grammars_are_followed(checkpoint, runner):
    import re

    llm = engine_of(checkpoint[0], runner)
    choices = ["yes", 'no "quoted"', "née\nline"]
    cases = [
        StructuredOutputs(choice=choices),
        StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2}"),
        StructuredOutputs(grammar='start: "(" ("x" | start) ")"'),
        StructuredOutputs(grammar='root ::= "ab" | "cd" root'),
    ]
    rules = [
        lambda t: t in choices,
        lambda t: re.fullmatch(r"[a-f]{3}-[0-9]{2}", t),
        lambda t: re.fullmatch(r"(\(+)x(\)+)", t) and t.count("(") == t.count(")"),
        lambda t: re.fullmatch(r"(cd)*ab", t),
    ]
    for case, rule in zip(cases, rules, strict=True):
        params = SamplingParams(seed=5, n=5, max_tokens=200, structured=case)
        [output] = llm.generate("once", params)
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            assert rule(sample.text), sample.text


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_grammar_that_fails_while_it_runs_ends_its_own_request(checkpoint, runner, monkeypatch):
    directory, model = checkpoint
    llm = engine_of(directory, runner)
    first, second = prompts(2)
    params = SamplingParams(seed=1, max_tokens=60, structured=StructuredOutputs(regex="a{40}"))
    mine = [
        llm._generation({"prompt_token_ids": p}, s, NO_TERMS, None)
        for p, s in ((first, params), (second, PLAIN))
    ]
    fill = type(mine[0].request.new_matcher()).fill_mask
    calls = []

    def failing(matcher, words):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the grammar failed")
        fill(matcher, words)

    monkeypatch.setattr(type(mine[0].request.new_matcher()), "fill_mask", failing)
    run_together(llm, mine)
    assert "the grammar failed" in str(mine[0].error)
    assert mine[1].output.outputs[0].token_ids == transformers_tokens(model, second)
    assert_idle(llm)


def test_descriptions_that_do_not_compile_are_refused_and_others_go_on(checkpoint):
    llm = engine_of(checkpoint[0], "compiled")
    for outputs in (
        StructuredOutputs(regex="(a"),
        StructuredOutputs(json={"type": "nonsense"}),
        StructuredOutputs(grammar="start: nowhere"),
    ):
        with pytest.raises(RequestError, match="must compile"):
            llm.generate("once", SamplingParams(structured=outputs))
    assert_idle(llm)
    [output] = llm.generate("once", SamplingParams(structured=StructuredOutputs(regex="b{3}")))
    assert output.outputs[0].text == "bbb"


def test_a_matcher_rolls_back_and_copies_go_their_own_way(checkpoint):
    import numpy as np

    llm = engine_of(checkpoint[0], "compiled")
    params = SamplingParams(structured=StructuredOutputs(regex="ab|ba"))
    new_matcher = llm._options.prepare(params)["new_matcher"]
    one, other = new_matcher(), new_matcher()
    a, b = (llm.tokenizer.encode(c)[0] for c in "ab")

    def allowed(matcher):
        words = np.zeros(-(-VOCAB // 32), np.int32)
        matcher.fill_mask(words)
        return {t for t in range(VOCAB) if words[t // 32] >> (t % 32) & 1}

    start = allowed(one)
    assert {a, b} <= start
    one.accept(a)
    assert allowed(one) == {b}
    assert allowed(other) == start
    one.rollback(1)
    assert allowed(one) == start
    with pytest.raises(RuntimeError, match="the grammar failed"):
        one.accept(llm.tokenizer.encode("q")[0])


def test_structured_text_needs_llguidance_and_says_so(checkpoint, monkeypatch):
    import sys

    llm = engine_of(checkpoint[0], "compiled")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"tilewise\[structured\]"):
        llm.generate("once", SamplingParams(structured=StructuredOutputs(regex="a")))


def test_what_a_model_cannot_do_is_refused(checkpoint, tmp_path):
    llm = engine_of(checkpoint[0], "compiled")
    for options, message in (
        (
            {"allowed_token_ids": [VOCAB]},
            "allowed_token_ids must be of tokens in 0 ... 299, got 300",
        ),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be of tokens in 0 ... 299, got -1"),
        ({"bad_words": ["\ud800"]}, "bad_words must be valid Unicode"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate("once", SamplingParams(**options))
    write_checkpoint(tmp_path, "qwen3_norm_wide_heads", has_tokenizer=False)
    bare = LLM(tmp_path, device="cpu", num_blocks=20, max_num_seqs=2)
    for options in (
        {"bad_words": ["x"]},
        {"structured": StructuredOutputs(regex="a")},
        {"stop": "x"},
    ):
        name = next(iter(options))
        with pytest.raises(
            RequestError, match=f"{name} must be None for a model without tokenizer"
        ):
            bare.generate(as_ids([[5]]), SamplingParams(**options))


def test_a_request_without_what_its_options_need_is_refused():
    with pytest.raises(ValueError, match="bad_word_ids must be given"):
        Request("a", [1], SamplingParams(bad_words=["x"]))
    with pytest.raises(ValueError, match="new_matcher must be given"):
        Request("a", [1], SamplingParams(structured=StructuredOutputs(regex="a")))


def test_the_story_model_tells_what_transformers_tells_under_the_same_rules():
    from transformers import AutoModelForCausalLM

    from tilewise.engine.settings import model_directory

    llm = LLM("story", dtype="float32", num_blocks=64, max_num_seqs=4)
    model = AutoModelForCausalLM.from_pretrained(model_directory("story"), dtype=torch.float32)
    prompt = llm.tokenizer.encode("Once upon a time, there was a little rabbit")
    words = [" little", " rabbit", " happy"]
    bad_ids = [list(ids) for ids in llm._options._bad_word_ids(words)]
    ends = list(llm._end_ids)
    options = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": words}, {"bad_words_ids": bad_ids}),
        (
            {"repetition_penalty": 1.1, "bad_words": words, "min_tokens": 40},
            {"repetition_penalty": 1.1, "bad_words_ids": bad_ids, "min_new_tokens": 40},
        ),
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=48, **{"ignore_eos": False} | ours)
        for ours, _ in options
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params)
    for output, (_, theirs) in zip(outputs, options, strict=True):
        wanted = transformers_tokens(model, prompt, max_new_tokens=48, eos_token_id=ends, **theirs)
        assert output.outputs[0].token_ids == wanted
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}},
              "required": ["name"], "additionalProperties": False}  # fmt: skip
    sampling = SamplingParams(
        seed=1, max_tokens=200, structured=StructuredOutputs(json=schema), bad_words=["\n"]
    )
    for output in llm.generate(["The rabbit's name is"] * 4, sampling):
        if output.outputs[0].finish_reason == "stop":
            assert set(json.loads(output.outputs[0].text)) == {"name"}
        else:
            assert output.outputs[0].finish_reason == "length"
