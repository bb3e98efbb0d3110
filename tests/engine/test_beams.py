"""Beams in the same steps as everything else: transformers' tokens and scores, whatever happens."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.beam_model import BeamModel, ContiguousBeams, search
from tests.engine.checkpoint import VOCAB, write_checkpoint
from tests.engine.simulator import Outputs
from tests.engine.test_scheduler_simulation import (
    Story,
    random_request,
)
from tilewise.engine.batch import SampledToken, TokenEvent
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.outputs import Generation
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling import beams
from tilewise.engine.scheduling.beams import MAX_BEAM_WIDTH, Beams, BeamSearch, BeamSearchParams
from tilewise.engine.scheduling.preemption import Preemption
from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.steps.sampler import most_likely
from tilewise.engine.tables import block_tables
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.errors import RequestError

STEPS = 16


# --- random schedules ---------------------------------------------------------------------------


def random_beams(rng: random.Random, request_id: str) -> Request:
    """A request that searches, with few distinct prompts."""
    request = random_request(rng, request_id)
    params = BeamSearchParams(
        rng.choice([1, 2, 3, 4, 6]),
        length_penalty=rng.choice([0.0, 1.0, 1.0, 2.0, -1.0]),
        early_stopping=rng.choice([False, True, "never"]),
        max_tokens=rng.choice([1, 2, 5, 9, 14]),
        stop_token_ids=rng.choice([None, [2], [2, 4]]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 2]),
    )
    return replace(request, sampling=params)


class BeamStory(Story):
    """A random run in which about half of the requests search, beside those that draw."""

    def __init__(self, seed: int, **settings) -> None:
        super().__init__(seed, **settings)
        self.model = BeamModel(self.scheduler, self.is_damaging)
        self.sums: dict[tuple[str, int], float] = {}

    def arrive(self, request_id: str) -> None:
        if self.rng.random() < 0.4:
            super().arrive(request_id)
            return
        request = random_beams(self.rng, request_id)
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests[request_id] = request

    def update(self, batch) -> None:
        outputs = self.outputs
        self.outputs = recorder = Recorder(outputs, self.sums)
        super().update(batch)
        assert self.outputs is recorder
        self.outputs = outputs

    def meddle(self) -> None:
        super().meddle()
        self.aborted |= {r for r, _ in self.stopped if is_search(self.requests[r])}

    def judge(self) -> None:
        draws = {k: r for k, r in self.requests.items() if not is_search(r)}
        every, self.requests = self.requests, draws
        firsts = self.first_runs
        arrived = [r for r in every if r in set(firsts)]
        assert firsts == arrived, "nobody overtakes"
        self.first_runs = [r for r in firsts if r in draws]
        super().judge()
        self.requests, self.first_runs = every, firsts
        for request_id, request in every.items():
            if not is_search(request):
                continue
            found = search(request, self.scheduler.limits.max_len(request))
            keys = [key for key in self.outputs.tokens if key[0] == request_id]
            if request_id in self.aborted or request_id in self.failed:
                assert not keys, "nothing of a search is shown before its end"
                continue
            assert sorted(keys) == [(request_id, i) for i in range(len(found))]
            for i, (tokens, score, why) in enumerate(found):
                key = request_id, i
                assert self.outputs.tokens[key] == tokens
                assert self.outputs.reasons[key] == why
                got = request.sampling.score(self.sums[key], len(tokens))
                assert got == pytest.approx(score, rel=1e-12)


class Recorder(Outputs):
    """Outputs that sum up log-probabilities, too, and go into others."""

    def __init__(self, outputs: Outputs, sums: dict[tuple[str, int], float]) -> None:
        self.tokens, self.reasons = outputs.tokens, outputs.reasons
        self.stop_reasons, self.sums = outputs.stop_reasons, sums

    def add(self, events) -> None:
        super().add(events)
        for event in events:
            if event.token is not None and event.token.logprob is not None:
                key = event.request_id, event.index
                self.sums[key] = self.sums.get(key, 0.0) + event.token.logprob


def is_search(request: Request) -> bool:
    return isinstance(request.sampling, BeamSearchParams)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(6))
def test_any_schedule_gives_the_beams_of_a_search_alone(part: int, overlap: bool):
    for seed in range(part * 25, (part + 1) * 25):
        story = BeamStory(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()


def test_blocks_taken_over_beside_an_unfinished_step_are_freed_children_first():
    story = BeamStory(10191, overlap=True, fails=True)
    story.play()
    story.judge()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_give_the_beams_of_a_search_alone(part: int, overlap: bool):
    for seed in range(10_000 + part * 500, 10_000 + (part + 1) * 500):
        story = BeamStory(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()


def test_what_two_tables_have_in_common_is_what_they_begin_with_alike():
    draw = random.Random(0)
    for _ in range(500):
        one, other = ([draw.randrange(1000) for _ in range(draw.randrange(6))] for _ in range(2))
        both = list(range(draw.randrange(40)))
        found = block_tables.num_common(both + one, both + other)
        pairs = zip(one, other, strict=False)
        alike = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))
        assert found == len(both) + alike


def test_the_random_schedules_reach_what_they_are_meant_to_test(monkeypatch):
    kinds = ("in turns", "preempted", "copies", "forks", "taken over", "dropped", "hits")
    seen = dict.fromkeys(kinds, 0)
    makes_way, fork = Beams.who_makes_way, BlockTables.fork
    take_copies, regroup = BlockTables.take_copies, Roster.regroup

    def making_way(self, seq, lacks_seat):
        found = makes_way(self, seq, lacks_seat)
        seen["in turns"] += found is not None
        return found

    def forking(self, parent, child, gone=None):
        seen["forks"] += isinstance(parent.request.sampling, BeamSearchParams)
        num_before = 0 if gone is None else len(gone.block_ids)
        fork(self, parent, child, gone)
        seen["taken over"] += gone is not None and len(gone.block_ids) < num_before

    def regrouping(self, family):
        seen["dropped"] += len(set(self.requests[family[0].request.request_id]) - set(family))
        regroup(self, family)

    def taking(self):
        copies = take_copies(self)
        seen["copies"] += len(copies)
        return copies

    monkeypatch.setattr(Beams, "who_makes_way", making_way)
    monkeypatch.setattr(BlockTables, "fork", forking)
    monkeypatch.setattr(BlockTables, "take_copies", taking)
    monkeypatch.setattr(Roster, "regroup", regrouping)
    for seed in range(60):
        story = BeamStory(seed, overlap=seed % 2 == 0)
        story.play()
        stats = story.scheduler.stats()
        seen["preempted"] += stats.num_preemptions
        seen["hits"] += stats.prefix_hit_tokens
        if all(count > 10 for count in seen.values()):
            return
    pytest.fail(f"not all came often: {seen}")


# --- real models --------------------------------------------------------------------------------


PROMPTS = [
    [random.Random(i).randrange(3, VOCAB) for _ in range(n)] for i, n in enumerate((1, 9, 30))
]
PARAMS = [
    {"beam_width": 4},
    {"beam_width": 3, "early_stopping": True, "length_penalty": 0.5},
    {"beam_width": 6, "early_stopping": "never", "length_penalty": 2.0},
    {"beam_width": 2, "length_penalty": -1.0},
]
STOPS = [7, 19, 30, 101, 205]  # of 300 tokens, so that beams end now and then


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request, tmp_path_factory):
    """A random model: its directory, transformers' own and what that finds."""
    directory = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(directory, request.param)
    found = {
        (i, j): of_transformers(model, prompt, params, STOPS)
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    }
    return directory, model, found


def of_transformers(model, prompt, params, ends, count=STEPS):
    """What generate(num_beams=) finds: (tokens, score) of all beams."""
    ids = torch.tensor([prompt])
    others = {k: v for k, v in params.items() if k != "beam_width"}
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            num_beams=params["beam_width"],
            num_return_sequences=params["beam_width"],
            return_dict_in_generate=True,
            output_scores=True,
            eos_token_id=ends,
            pad_token_id=0,
            **others,
        )
    hypotheses = []
    generated = found.sequences[:, len(prompt) :].tolist()
    for tokens, score in zip(generated, found.sequences_scores, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        hypotheses.append((tokens[:end], float(score)))
    return hypotheses


def beam_params(params, ends=STOPS, **more):
    return BeamSearchParams(
        **params, stop_token_ids=ends, ignore_eos=True, **{"max_tokens": STEPS, **more}
    )


def assert_same(output, params, wanted):
    got = [
        (c.token_ids, params.score(c.cumulative_logprob, len(c.token_ids))) for c in output.outputs
    ]
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    assert [s for _, s in got] == pytest.approx([s for _, s in wanted], rel=1e-5, abs=1e-5)
    scores = [score for _, score in got]
    assert scores == sorted(scores, reverse=True)


def assert_idle(llm):
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().scheduler.blocks_used == 0
    llm.engine.scheduler.check_integrity()


def checked(llm):
    """Let an engine check itself after each step."""
    step = llm.engine.step

    def stepping():
        events = step()
        llm.engine.scheduler.check_integrity()
        return events

    llm.engine.step = stepping
    return llm


SETTINGS = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "preempted": {"num_blocks": 16},
    "fewer seats than beams": {"max_num_seqs": 2},
    "one seat, no prefix cache": {"max_num_seqs": 1, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_beams_are_those_of_transformers(checkpoint, settings):
    directory, _, found = checkpoint
    llm = LLM(directory, device="cpu", **{"num_blocks": 200, "block_size": 4, **settings})
    checked(llm)
    asked = [(i, j) for i in range(len(PROMPTS)) for j in range(len(PARAMS))]
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i, _ in asked]
    params = [beam_params(PARAMS[j]) for _, j in asked]
    for output, sampling, key in zip(llm.generate(prompts, params), params, asked, strict=True):
        assert_same(output, sampling, found[key])
    if "num_blocks" in settings:
        assert llm.engine.stats().scheduler.num_preemptions > 0
    assert_idle(llm)


def test_a_prompt_that_is_found_in_the_cache_gives_the_same_beams(checkpoint):
    directory, _, found = checkpoint
    llm = checked(LLM(directory, device="cpu", num_blocks=100, block_size=4))
    for params, hits in ((PARAMS[0], 0), (PARAMS[0], 29), (PARAMS[1], 29)):
        [output] = llm.generate({"prompt_token_ids": PROMPTS[2]}, beam_params(params))
        assert output.num_cached_tokens == hits
        assert_same(output, beam_params(params), found[2, PARAMS.index(params)])
    assert_idle(llm)


def test_beams_run_beside_other_requests(checkpoint):
    directory, _, found = checkpoint
    llm = checked(LLM(directory, device="cpu", num_blocks=60, block_size=4, max_num_seqs=6))
    prompts = [{"prompt_token_ids": p} for p in (*PROMPTS, *PROMPTS)]
    drawn = SamplingParams(n=2, max_tokens=STEPS, seed=3, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    params = [beam_params(PARAMS[0])] * 3 + [drawn, greedy, drawn]
    order = [3, 0, 4, 1, 2, 5]
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert_idle(llm)
    alone = LLM(directory, device="cpu", num_blocks=200, block_size=4)
    for place, i in enumerate(order):
        if i < 3:
            assert_same(outputs[place], params[i], found[i, 0])
        else:
            [wanted] = alone.generate([prompts[i]], params[i])
            for a, b in zip(outputs[place].outputs, wanted.outputs, strict=True):
                assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)


def test_the_packaged_model_has_the_beams_of_transformers():
    model = AutoModelForCausalLM.from_pretrained(packaged_model(), dtype=torch.float32).eval()
    llm = LLM("story", dtype="float32", num_blocks=120, max_num_seqs=8)
    for text, params in (("Once upon a time", PARAMS[0]), ("The dog said", PARAMS[1])):
        ids = llm.tokenizer.encode(text)
        end = llm.tokenizer.encode(".")[-1]
        sampling = beam_params(params, [end])
        [output] = llm.generate(text, sampling)
        assert_same(output, sampling, of_transformers(model, ids, params, [end]))
        for beam in output.outputs:
            kept = beam.token_ids[: len(beam.token_ids) - (beam.finish_reason == "stop")]
            assert beam.text == llm.tokenizer.decode(kept)
    assert_idle(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_blocks_hold_what_whole_copies_would(dtype):
    llm = checked(LLM("story", dtype=dtype, num_blocks=64, max_num_seqs=8, max_model_len=96))
    plain = LLM("story", dtype=dtype, num_blocks=64, max_model_len=96)
    for text, params in (("Once upon a time", PARAMS[0]), ("The dog said", PARAMS[2])):
        sampling = beam_params(params, [plain.tokenizer.encode(".")[-1]], max_tokens=32)
        [output] = llm.generate(text, sampling)
        request = Request("r", plain.tokenizer.encode(text), sampling)
        rows = ContiguousBeams(plain.engine.runner, request.row_sampling, sampling.beam_width)
        wanted = search(request, len(request.prompt_token_ids) + 32, rows)
        assert [c.token_ids for c in output.outputs] == [tokens for tokens, *_ in wanted]
        assert [c.finish_reason for c in output.outputs] == [why for *_, why in wanted]
        scores = [sampling.score(c.cumulative_logprob, len(c.token_ids)) for c in output.outputs]
        assert scores == pytest.approx([score for _, score, _ in wanted], rel=1e-12)
    assert_idle(llm)


def test_beams_share_the_blocks_of_what_they_share():
    llm = LLM("story", num_blocks=200, max_num_seqs=8, block_size=16, enable_prefix_caching=False)
    prompt = {"prompt_token_ids": list(range(5, 5 + 160))}
    llm.generate(prompt, BeamSearchParams(8, max_tokens=20, ignore_eos=True))
    peak = llm.engine.stats().scheduler.blocks_peak
    assert 10 + 8 < peak + 8 <= 10 + 8 * 3  # 10 of the prompt, not 8 times 10
    assert_idle(llm)


def test_logprobs_are_reported_as_asked():
    llm = LLM("story", num_blocks=64)
    [plain] = llm.generate("Once upon", BeamSearchParams(2, max_tokens=5))
    [output] = llm.generate("Once upon", BeamSearchParams(2, max_tokens=5, logprobs=3))
    for beam, other in zip(output.outputs, plain.outputs, strict=True):
        assert beam.token_ids == other.token_ids
        assert other.logprobs is None
        assert beam.cumulative_logprob == other.cumulative_logprob
        for token, entry in zip(beam.token_ids, beam.logprobs, strict=True):
            assert token in entry
            assert 3 <= len(entry) <= 4
        own = [e[t] for t, e in zip(beam.token_ids, beam.logprobs, strict=True)]
        assert sum(own) == pytest.approx(beam.cumulative_logprob)


def test_a_beam_of_one_is_greedy():
    llm = LLM("story", num_blocks=64)
    [beam] = llm.generate("Once upon a time", BeamSearchParams(1, max_tokens=20, ignore_eos=True))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    [plain] = llm.generate("Once upon a time", greedy)
    assert beam.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_search_that_fails_ends_alone():
    llm = LLM("story", num_blocks=64)
    forward, runs = llm.engine.runner.forward, []

    def breaking(inputs):
        logits = forward(inputs).clone()
        runs.append(len(logits))
        if len(runs) == 4:
            logits[0] = float("nan")
        return logits

    llm.engine.runner.forward = breaking
    with pytest.raises(FloatingPointError):
        llm.generate("Once upon a time", BeamSearchParams(4, max_tokens=20))
    assert_idle(llm)
    assert llm.generate("Once upon a time", BeamSearchParams(4, max_tokens=5))[0].finished
    assert_idle(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width must be in 1"),
        ({"beam_width": MAX_BEAM_WIDTH + 1}, "beam_width must be in 1"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logprobs": 21}, "logprobs must be in 0 ... 20"),
        ({"top_p": 0.5}, "top_p must be 1.0 in a beam search, got 0.5"),
        ({"stop": "."}, "stop must be None in a beam search, got '.'"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids must be at most 64"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"beam_width": 2.0},
        {"length_penalty": "1"},
        {"width": 4},
        {"early_stopping": np.array([1, 2])},
    ],
)
def test_what_is_of_another_type_is_refused(arguments):
    with pytest.raises((TypeError, ValueError), match="must (be|have)"):
        BeamSearchParams(**arguments)


def test_a_search_is_copied_with_other_values():
    params = BeamSearchParams(3, max_tokens=5, stop_token_ids=[4], early_stopping="never")
    wanted = BeamSearchParams(3, max_tokens=9, stop_token_ids=[4], early_stopping="never")
    assert replace(params, max_tokens=9) == wanted
    assert pickle.loads(pickle.dumps(params)) == params
    assert BeamSearchParams(np.int64(3), temperature=0.0, n=1) == BeamSearchParams(3)


def test_a_search_can_be_neither_streamed_nor_wider_than_the_vocabulary(checkpoint):
    llm = LLM(checkpoint[0], device="cpu", num_blocks=20)
    with pytest.raises(RequestError, match="must be 1 to stream, got 4"):
        llm.stream("the quick", BeamSearchParams(4))
    llm.config = replace(llm.config, vocab_size=3)
    with pytest.raises(RequestError, match="beam_width must be at most vocab_size 3, got 4"):
        llm.generate({"prompt_token_ids": [1]}, BeamSearchParams(4))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_beams_on_a_gpu_are_those_of_a_cpu(graphs):
    settings = {"dtype": "float32", "num_blocks": 200, "max_num_seqs": 32}
    gpu = LLM("story", device="cuda", graphs=graphs, **settings)
    cpu = LLM("story", device="cpu", **settings)
    for width in (4, 24):  # 24 asks for more log-probabilities than the sampling kernel gives
        params = BeamSearchParams(width, max_tokens=24)
        [one], [other] = (llm.generate("Once upon a time", params) for llm in (gpu, cpu))
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    assert_idle(gpu)


# --- the best of more samples -------------------------------------------------------------------


def test_best_of_returns_the_samples_of_the_highest_sum():
    llm = LLM("story", num_blocks=120)
    every = SamplingParams(n=6, max_tokens=12, seed=5, logprobs=0)
    [drawn] = llm.generate("Once upon a time", every)
    wanted = sorted(drawn.outputs, key=lambda c: -c.cumulative_logprob)[:2]
    best = SamplingParams(n=2, best_of=6, max_tokens=12, seed=5)
    [output] = llm.generate("Once upon a time", best)
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in wanted]
    assert [c.index for c in output.outputs] == [0, 1]
    assert [c.text for c in output.outputs] == [c.text for c in wanted]
    for got, want in zip(output.outputs, wanted, strict=True):
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob)
        assert got.logprobs is None
    assert_idle(llm)


def test_best_of_ends_samples_at_their_stop_strings():
    llm = LLM("story", num_blocks=120)
    params = SamplingParams(n=2, best_of=5, max_tokens=60, seed=1, stop=[".", "!"])
    [output] = llm.generate("Once upon a time", params)
    assert len(output.outputs) == 2
    assert output.finished
    assert all("." not in c.text for c in output.outputs)
    assert {c.finish_reason for c in output.outputs} == {"stop"}
    assert_idle(llm)


def test_of_best_of_nothing_is_shown_before_the_best_are_known():
    request = Request("r", [1, 2], SamplingParams(n=2, best_of=3, max_tokens=2))
    generation = Generation(request, None, None)
    for i, logprob in ((0, -1.0), (1, -3.0), (2, -2.0)):
        generation.take(TokenEvent("r", i, SampledToken(5 + i, logprob)))
    assert [c.token_ids for c in generation.snapshot().outputs] == [[], []]
    for i in range(3):
        token = SampledToken(9, -1.0)
        generation.take(TokenEvent("r", i, token, FinishReason.LENGTH))
    shown = generation.snapshot()
    assert shown.finished
    assert [c.token_ids for c in shown.outputs] == [[5, 9], [7, 9]]
    assert [c.index for c in shown.outputs] == [0, 1]


def test_of_best_of_no_more_is_returned_when_it_is_aborted():
    request = Request("r", [1, 2], SamplingParams(n=1, best_of=3, max_tokens=2))
    generation = Generation(request, None, None)
    generation.take(TokenEvent("r", 1, SampledToken(5, -4.0)))
    generation.abort()
    assert [(c.token_ids, c.finish_reason) for c in generation.output.outputs] == [([5], "abort")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of must be in n ... 1024, got 2 for n of 3"),
        ({"best_of": 2000}, "best_of must be in n"),
        ({"best_of": 2, "temperature": 0.0}, "best_of must be 1 when temperature is 0"),
    ],
)
def test_a_wrong_best_of_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


# --- the most likely tokens of a row ------------------------------------------------------------


def test_of_equal_tokens_the_lower_one_is_taken():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (50, 40), generator=generator).float()
    for count in (0, 1, 3, 17, 40):
        values, ids = most_likely(rows, count)
        wanted = rows.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, wanted.values[:, :count])
        assert torch.equal(ids, wanted.indices[:, :count])


# --- planted mistakes ---------------------------------------------------------------------------


CHOOSE, TAKE, FOLLOW, ORDER = (
    BeamSearch.choose,
    BeamSearch.take,
    BeamSearch.follow,
    BeamSearch.order,
)
IS_DONE, RELEASE, FORK = BeamSearch._is_done, BlockTables.release, BlockTables.fork
BRANCH, PREEMPT = Roster.branch, Preemption.recompute


def keep_the_blocks_of_dropped_beams(tables, seq):
    *_, last = tables.trace.since(tables.trace.num_noted - 1)
    if last["kind"] != "finish" or last["reason"]:  # of a dropped beam there is none
        RELEASE(tables, seq)


def fork_without_owning(tables, parent, child, gone=None):
    FORK(tables, parent, child, gone)
    if isinstance(child.request.sampling, BeamSearchParams):
        tables.allocator.release(child.block_ids)


def take_over_what_is_not_common(one, other):
    return min(len(one), len(other))


def keep_what_was_taken_over(tables, parent, child, gone=None):
    kept = [] if gone is None else list(gone.block_ids)
    FORK(tables, parent, child, gone)
    if gone is not None:
        gone.block_ids = kept


def own_twice_what_was_taken_over(tables, parent, child, gone=None):
    before = 0 if gone is None else len(gone.block_ids)
    FORK(tables, parent, child, gone)
    if gone is not None:
        tables.allocator.share(parent.block_ids[: before - len(gone.block_ids)])


def write_where_others_read(tables, seq, end):
    grown = tables.blocks_for(end) - len(seq.block_ids)
    if grown > tables.allocator.num_free:
        return False
    seq.block_ids += tables.allocator.allocate(max(grown, 0))
    return True


def choose_from_the_worst_beam_first(search):
    search._beam_of = dict(reversed(search._beam_of.items()))
    return CHOOSE(search)


def let_any_continuation_end(search):
    width = search.params.beam_width
    object.__setattr__(search.params, "beam_width", 2 * width)
    try:
        return CHOOSE(search)[:width]
    finally:
        object.__setattr__(search.params, "beam_width", width)
        search._next, search._ended = search._next[:width], search._ended[:width]


def stop_at_the_first_that_ended(search, length):
    return IS_DONE(search, length) or bool(search._ended)


def never_stop_early(search, length):
    return not search._next


def forget_the_row_of_who_is_preempted(preemption, seq):
    search = preemption.beams.search_of(seq)
    if search is not None:
        search._beam_of[seq].row = None
    PREEMPT(preemption, seq)


def share_the_token_list(roster, parent, token_ids, index):
    return BRANCH(roster, parent, parent.token_ids, index)


def nobody_makes_way(self, seq, lacks_seat):
    return None


def leave_the_order(search, family):
    return family


def mix_up_the_beams(search, sequences):
    return FOLLOW(search, sequences[1:] + sequences[:1])


def ask_for_too_little(params, end_ids):
    return beams._Candidates(temperature=0.0, logprobs=params.beam_width)


def count_one_token_less(params, cumulative_logprob, num_tokens):
    return cumulative_logprob / max(num_tokens - 1, 1) ** params.length_penalty


MISTAKES = [
    (BlockTables, "release", keep_the_blocks_of_dropped_beams),
    (BlockTables, "fork", fork_without_owning),
    (BlockTables, "fork", keep_what_was_taken_over),
    (BlockTables, "fork", own_twice_what_was_taken_over),
    (block_tables, "num_common", take_over_what_is_not_common),
    (BlockTables, "extend", write_where_others_read),
    (BeamSearch, "choose", choose_from_the_worst_beam_first),
    (BeamSearch, "choose", let_any_continuation_end),
    (BeamSearch, "_is_done", stop_at_the_first_that_ended),
    (BeamSearch, "_is_done", never_stop_early),
    (BeamSearch, "order", leave_the_order),
    (BeamSearch, "follow", mix_up_the_beams),
    (Beams, "who_makes_way", nobody_makes_way),
    (Preemption, "recompute", forget_the_row_of_who_is_preempted),
    (Roster, "branch", share_the_token_list),
    (BeamSearchParams, "for_rows", ask_for_too_little),
    (BeamSearchParams, "score", count_one_token_less),
]


def test_no_order_of_beams_makes_a_copy_of_a_copy(monkeypatch):
    """Whoever is preempted while a step is built, no source of a copy is given away."""

    def apart(search, sequences):
        found = FOLLOW(search, sequences)
        return found[1::2] + found[0::2]  # beams of one parent no longer side by side

    monkeypatch.setattr(BeamSearch, "follow", apart)
    for seed in range(150):
        story = BeamStory(seed, overlap=seed % 2 == 0)
        story.play()
        story.judge()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
        BeamSearchParams(4, max_tokens=10, ignore_eos=True),
    ],
    ids=["n", "beams"],
)
def test_samples_and_beams_beyond_the_seats_of_an_llm(params):
    """On two seats they run in turns, beside others, and are what they are on eight."""
    prompts = ["Once upon a time there was a dog", "The sun"]
    found = []
    for seats in (8, 2):
        llm = LLM("story", device="cpu", max_num_seqs=seats, num_blocks=200)
        try:
            outputs = llm.generate(prompts, [params, SamplingParams(temperature=0.0, max_tokens=5)])
            found.append([[list(c.token_ids) for c in output.outputs] for output in outputs])
            assert llm.engine.stats().scheduler.blocks_used == 0
        finally:
            llm.close()
    assert found[0] == found[1]
    assert [len(some) for some in found[0]] == [params.num_samples, 1]
