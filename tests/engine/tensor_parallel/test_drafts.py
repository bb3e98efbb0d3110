"""A draft model beside workers: the tokens of one process without guesses."""

from __future__ import annotations

import pytest

from tests.engine.tensor_parallel.conftest import (
    SETTINGS,
    assert_nothing_stays,
    write_windows,
)
from tests.engine.tensor_parallel.test_equal import _greedy, _prompts, _run
from tilewise.engine.config import DraftModel
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.tensor_parallel import runner

PARAMS = [
    _greedy(30), _greedy(30), _greedy(30, logprobs=2), _greedy(30),
    SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, n=2, max_tokens=16, ignore_eos=True),
]  # fmt: skip
PROMPTS = _prompts(20, 21, 22, 33, 18, 30)


def _guessing(path, draft, size, **settings):
    speculative = DraftModel(draft, num_tokens=3, is_adaptive=False)
    return LLM(
        path, tensor_parallel_size=size, speculative=speculative, **{**SETTINGS, **settings}
    )  # fmt: skip


def _guesses(llm):
    stats = llm.engine.stats().scheduler
    return stats.num_accepted_drafts, stats.num_drafts


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_that_guesses_for_itself(llms, checkpoint, size):
    """In chunks; sequences lose their blocks, by either way; forks; prefixes that are found."""
    with _guessing(checkpoint, checkpoint, size, num_blocks=34) as llm:
        for preemption in ("recompute", "swap"):
            want, *_ = _run(llms(1), PROMPTS, PARAMS, preemption)
            got, counts, _ = _run(llm, PROMPTS, PARAMS, preemption)
            assert got == want
            assert counts["num_preemptions"] > 0
            assert (counts["num_swapped"] > 0) == (preemption == "swap")
        common = [{"prompt_token_ids": [*PROMPTS[3]["prompt_token_ids"], i]} for i in range(4)]
        want, *_ = _run(llms(1), common, _greedy(9))
        got, counts, _ = _run(llm, common, _greedy(9))
        assert got == want
        assert counts["prefix_hit_tokens"] > 0
        want, *_ = _run(llms(1), _prompts(9), BeamSearchParams(3, max_tokens=8))
        got, *_ = _run(llm, _prompts(9), BeamSearchParams(3, max_tokens=8))
        assert got == want
        accepted, drafts = _guesses(llm)
        assert accepted > 0.5 * drafts > 20
    if size > 1:
        assert_nothing_stays(llm.engine.runner.workers)


def test_another_model_that_guesses_changes_nothing(llms, checkpoint, tmp_path):
    with _guessing(checkpoint, write_windows(tmp_path), 2) as llm:
        want, *_ = _run(llms(1), PROMPTS, PARAMS)
        got, *_ = _run(llm, PROMPTS, PARAMS)
        accepted, drafts = _guesses(llm)
    assert got == want
    assert accepted < 0.5 * drafts


def test_models_with_windows(tmp_path):
    path = write_windows(tmp_path)
    with LLM(path, **SETTINGS) as whole, _guessing(path, path, 2) as llm:
        want, *_ = _run(whole, PROMPTS, PARAMS)
        got, *_ = _run(llm, PROMPTS, PARAMS)
        accepted, drafts = _guesses(llm)
    assert got == want
    assert accepted > 0.5 * drafts > 20


def test_a_draft_model_of_other_tokens_leaves_no_worker_behind(checkpoint, monkeypatch):
    started, start = [], runner.start

    def note(*given, **settings):
        started.append(start(*given, **settings))
        return started[-1]

    monkeypatch.setattr(runner, "start", note)
    with pytest.raises(ValueError, match="the draft model's vocab_size must be the model's"):
        _guessing(checkpoint, "story", 2)
    assert_nothing_stays(started[0].workers)


def test_a_step_that_cannot_be_guessed_for_ends_its_requests_alone(checkpoint):
    """The workers have heard nothing of it, and go on."""
    with _guessing(checkpoint, checkpoint, 2) as llm:
        want, *_ = _run(llm, PROMPTS[:1], _greedy(8))
        guesser = llm.engine.runner.guesser
        submit = guesser.draft.submit

        def refuse(batch):
            if any(77 in run.token_ids for run in batch.sequences):
                raise MemoryError("no room to guess")
            return submit(batch)

        guesser.draft.submit = refuse
        with pytest.raises(MemoryError, match="no room to guess"):
            llm.generate({"prompt_token_ids": [77, 77, 1, 1]}, _greedy(8))
        got, *_ = _run(llm, PROMPTS[:1], _greedy(8))
    assert got == want
