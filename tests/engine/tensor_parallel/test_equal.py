"""The same tokens from 1, 2 and 4 processes, in every mode of the engine."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tensor_parallel.conftest import SETTINGS
from tilewise.engine.config import PromptLookup
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.errors import RequestError

SIZES = (2, 4)


def _prompts(*lengths):
    return [{"prompt_token_ids": [(7 * i + n) % 290 for i in range(n)]} for n in lengths]


def _greedy(max_tokens=16, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def _run(llm, prompts, params, preemption="recompute"):
    """Generate with an empty prefix cache; return tokens, and what the scheduler counted."""
    assert llm.reset_prefix_cache()

    def prepare():
        llm.engine.scheduler.preemption.preemption = preemption
        return llm.engine.scheduler.stats()

    before = llm.loop.call(prepare)
    outputs = llm.generate(prompts, params)
    after = llm.engine.stats().scheduler
    llm.loop.call(llm.engine.scheduler.check_integrity)
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("num_preemptions", "num_swapped", "prefix_hit_tokens")
    }
    return [[c.token_ids for c in o.outputs] for o in outputs], counts, outputs


@pytest.mark.parametrize("size", SIZES)
def test_prompts_in_chunks_beside_one_another(llms, size):
    prompts = _prompts(1, 60, 3, 24, 25, 17)
    want, *_ = _run(llms(1), prompts, _greedy(8))
    got, *_ = _run(llms(size), prompts, _greedy(8))
    assert got == want


@pytest.mark.parametrize("size", SIZES)
def test_steps_that_go_on_are_told_in_a_word(llms, size, monkeypatch):
    prompts, llm, told = _prompts(5, 9, 6), llms(size), []
    write = llm.engine.runner._writer.write
    monkeypatch.setattr(
        llm.engine.runner._writer, "write", lambda batch: told.append(write(batch)) or told[-1]
    )
    want, *_ = _run(llms(1), prompts, _greedy(20))
    got, *_ = _run(llm, prompts, _greedy(20))
    assert got == want
    assert sum(message[0] == "later" for message in told) > 10


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("size", SIZES)
def test_sequences_that_lose_their_blocks(llms, size, preemption):
    prompts = _prompts(20, 21, 22, 23, 18, 30)
    want, *_ = _run(llms(1), prompts, _greedy(14), preemption)
    got, counts, _ = _run(llms(size), prompts, _greedy(14), preemption)
    assert counts["num_preemptions"] > 0
    assert (counts["num_swapped"] > 0) == (preemption == "swap")
    assert got == want


@pytest.mark.parametrize("size", SIZES)
def test_common_beginnings(llms, size):
    [long] = _prompts(33)
    ids = long["prompt_token_ids"]
    prompts = [{"prompt_token_ids": [*ids, i]} for i in range(4)]
    llm = llms(size)
    want, *_ = _run(llms(1), prompts, _greedy(6))
    got, counts, _ = _run(llm, prompts, _greedy(6))
    assert counts["prefix_hit_tokens"] > 0
    assert got == want


@pytest.mark.parametrize("size", SIZES)
def test_forks_that_are_drawn(llms, size):
    # Drawn tokens are equal, too, unless a rounded sum lies on a boundary of 1 in 2^48.
    params = SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=11, max_tokens=10)
    want, *_ = _run(llms(1), _prompts(9, 14), params)
    got, *_ = _run(llms(size), _prompts(9, 14), params)
    assert got == want
    assert len({tuple(c) for c in got[0]}) > 1


@pytest.mark.parametrize("size", SIZES)
def test_beams(llms, size):
    params = BeamSearchParams(3, max_tokens=8)
    want, *_ = _run(llms(1), _prompts(9), params)
    got, *_ = _run(llms(size), _prompts(9), params)
    assert got == want


def test_guesses_that_are_verified(llms, checkpoint):
    """Tokens are those without guesses, of one process: greedy, drawn, and in a grammar."""
    params = [
        _greedy(24), _greedy(24),
        SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, structured=StructuredOutputs(regex="a{9}b")),
        _greedy(8, logprobs=2),
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * count} for count in (2, 9, 5, 4, 7)]
    want, *_ = _run(llms(1), prompts, params)
    guessing = LLM(
        checkpoint, tensor_parallel_size=2, **SETTINGS,
        speculative=PromptLookup(num_tokens=4, is_adaptive=False),
    )  # fmt: skip
    with guessing as llm:
        got, *_ = _run(llm, prompts, params)
        assert llm.engine.stats().scheduler.num_accepted_drafts > 0
    assert got == want


@pytest.mark.parametrize("size", SIZES)
def test_what_requests_ask_of_logits(llms, size):
    params = [
        _greedy(12, logprobs=3, prompt_logprobs=2),
        _greedy(12, presence_penalty=1.5, repetition_penalty=1.3),
        _greedy(12, logit_bias={5: 50.0}, min_tokens=4),
        _greedy(12, allowed_token_ids=list(range(100, 130)), bad_words=["the"]),
        SamplingParams(
            temperature=0.0, max_tokens=12, structured=StructuredOutputs(regex="[ab]{5}")
        ),
    ]
    prompts = _prompts(30, 8, 9, 10, 11)
    want, _, whole = _run(llms(1), prompts, params)
    got, _, shards = _run(llms(size), prompts, params)
    assert got == want
    assert shards[4].outputs[0].text == whole[4].outputs[0].text
    for mine, theirs in zip(
        shards[0].outputs[0].logprobs, whole[0].outputs[0].logprobs, strict=True
    ):
        assert list(mine) == list(theirs)
        for token, value in theirs.items():
            ours = mine[token]
            assert getattr(ours, "logprob", ours) == pytest.approx(
                getattr(value, "logprob", value), abs=1e-4
            )


def test_functions_do_not_leave_their_process(llms):
    params = SamplingParams(logits_processors=[lambda prompt, output, row: row])
    with pytest.raises(RequestError, match="logits_processors must be None"):
        llms(2).generate(_prompts(3), params)


def test_a_step_that_all_ranks_refuse_ends_its_request_alone(llms):
    llm = llms(2)
    runner = llm.engine.runner
    write = runner._writer.write

    def spoil(batch):
        message = write(batch)
        for row in [] if message[0] == "later" else message[0]:
            if row[1][:2] == (77, 77):
                row[1] = ["no token"]
        return message

    runner._writer.write = spoil
    try:
        good, bad = _prompts(8)[0], {"prompt_token_ids": [77, 77, 1, 1]}
        want, *_ = _run(llms(1), [good], _greedy(4))
        with pytest.raises((TypeError, ValueError), match="no token|str"):
            llm.generate(bad, _greedy(4))
        got, *_ = _run(llm, [good], _greedy(4))
    finally:
        runner._writer.write = write
    assert got == want


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_of_prompts(llms, pooling):
    """Hidden states are whole on every rank; a last one begins behind what the cache has."""
    found = []
    for llm in (llms(1), llms(2)):
        assert llm.reset_prefix_cache()
        outputs = [o for _ in range(2) for o in llm.embed(_prompts(1, 60, 24, 25), pooling=pooling)]
        found.append(torch.tensor([output.embedding for output in outputs]))
        assert (sum(o.num_cached_tokens for o in outputs) > 0) == (pooling == "last")
    want, got = found
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
