"""Passes of the model that verify guesses, padded as CUDA graphs need them: no token changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.checkpoint import write_checkpoint
from tests.engine.test_own_head import _run, write
from tilewise.engine.config import DraftModel, OwnHead, PromptLookup
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import ResolvedConfig
from tilewise.engine.steps.verifying import VerifyingRunner, padded_places

HEAD = OwnHead(num_tokens=3, is_adaptive=False)
LOOKUP = PromptLookup(num_tokens=4, min_ngram=1, is_adaptive=False)
DRAFT = DraftModel("story", num_tokens=3, is_adaptive=False)
GPU: dict[str, Any] = {"device": "cuda", "batch_invariant": True}


@pytest.fixture
def padded(monkeypatch):
    """Pad steps on a CPU as graphs need them; return the sizes (sequences, width) that ran."""
    monkeypatch.setattr(
        ResolvedConfig, "has_verifying_graphs", property(lambda self: self.speculative is not None)
    )
    sizes: list[tuple[int, int]] = []
    step_of = VerifyingRunner._step_of

    def noted(self, count, width):
        sizes.append((count, width))
        return step_of(self, count, width)

    monkeypatch.setattr(VerifyingRunner, "_step_of", noted)
    return sizes


@pytest.mark.parametrize(
    ("lengths", "width", "places"),
    [
        ([3, 3], 3, [0, 1, 2, 3, 4, 5]),
        ([1, 3, 2], 3, [2, 3, 4, 5, 7, 8]),
        ([1, 1], 4, [3, 7]),
    ],
)
def test_the_rows_of_a_run_are_the_last_of_its_width(lengths, width, places):
    assert padded_places(lengths, width).tolist() == places


def test_places_of_random_runs_keep_their_order_and_end_where_their_run_ends():
    draw = np.random.default_rng(0)
    for _ in range(100):
        width = int(draw.integers(1, 9))
        lengths = draw.integers(1, width + 1, size=int(draw.integers(1, 20)))
        places = padded_places(lengths.tolist(), width)
        assert (np.diff(places) > 0).all()
        ends = np.cumsum(lengths) - 1
        assert (places[ends] == np.arange(1, len(lengths) + 1) * width - 1).all()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_padded_passes_of_a_model_and_its_head_give_the_tokens_without(kind, tmp_path, padded):
    path = write(tmp_path, kind, "states", 0.02)
    want, scores, _, _ = _run(path)
    assert not padded
    got, close, share, _ = _run(path, HEAD)
    assert got == want
    for mine, theirs in zip(close, scores, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert share > 0.6
    assert {width for _, width in padded} == {1, 4}
    assert len({count for count, _ in padded}) > 1


def is_seen(want, scores, got, found) -> bool:
    """Whether the comparison above fails."""
    return got != want or any(
        mine != pytest.approx(theirs, abs=1e-5) for mine, theirs in zip(found, scores, strict=True)
    )


def test_a_row_in_front_that_is_taken_for_one_behind_is_seen(tmp_path, padded, monkeypatch):
    path = write(tmp_path, "glm4_moe", "states", 0.5)
    want, scores, _, _ = _run(path)
    monkeypatch.setattr(
        "tilewise.engine.steps.verifying.padded_places",
        lambda lengths, width: np.concatenate(
            [i * width + np.arange(n) for i, n in enumerate(lengths)]
        ),
    )
    assert is_seen(want, scores, *_run(path, HEAD)[:2])


def test_slots_that_an_earlier_step_has_left_are_seen(tmp_path, padded, monkeypatch):
    path = write(tmp_path, "glm4_moe", "states", 0.5)
    want, scores, _, _ = _run(path)

    class Kept(torch.Tensor):
        def fill_(self, value):
            return self

    init = VerifyingRunner.__init__

    def keeping(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._slots = self._slots.as_subclass(Kept)

    monkeypatch.setattr(VerifyingRunner, "__init__", keeping)
    assert is_seen(want, scores, *_run(path, HEAD)[:2])


def story(speculative=None, **settings):
    """Return tokens of greedy and seeded texts of the packaged model."""
    texts = ["Once upon a time, once upon a", "The dog said", "Tom and Tom and Tom and"]
    params = [SamplingParams(max_tokens=24, temperature=0.5 * (i % 2), seed=i) for i in range(3)]
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 200} | settings
    with LLM("story", speculative=speculative, **options) as llm:
        outputs = llm.generate(texts, params)
        num_accepted = llm.engine.stats().scheduler.num_accepted_drafts
    return [o.outputs[0].token_ids for o in outputs], num_accepted


def test_padded_passes_of_a_draft_model_give_the_tokens_without(padded):
    """A model that drafts for itself: nearly all of its guesses are right."""
    want, _ = story()
    got, num_accepted = story(DRAFT)
    assert got == want
    assert num_accepted > 30
    assert {width for _, width in padded} == {1, 2, 4}  # two of the draft, where all were right


def test_padded_passes_of_an_unlike_draft_model_give_the_tokens_without(tmp_path, padded):
    for name, case in (("one", "llama"), ("other", "gpt2")):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, case)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 100, "max_model_len": 128}
    prompts = [{"prompt_token_ids": [5, 17, 3, 88, 41][: i + 1]} for i in range(4)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    found = []
    for draft in (None, DraftModel(tmp_path / "other", is_adaptive=False)):
        with LLM(tmp_path / "one", speculative=draft, **options) as llm:
            outputs = llm.generate(prompts, params)
        found.append([o.outputs[0].token_ids for o in outputs])
    assert found[0] == found[1]
    assert padded


def test_padded_lookups_give_the_tokens_without(padded):
    want, _ = story()
    got, num_accepted = story(LOOKUP)
    assert got == want
    assert num_accepted > 0
    assert {width for _, width in padded} == {1, 5}


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["lazy", "auto"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_graphs_that_verify_a_head_give_the_tokens_without(kind, graphs, tmp_path):
    path = write(tmp_path, kind, "states", 0.02)
    options = GPU | {"block_size": 16, "num_blocks": 40, "swap_space_gib": 0.0}
    want, scores, _, _ = _run(path, graphs="off", **options)
    got, close, share, _ = _run(path, HEAD, graphs=graphs, **options)
    assert got == want
    for mine, theirs in zip(close, scores, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert share > 0.6


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "lazy", "auto"])
def test_graphs_of_a_draft_model_give_the_tokens_without(graphs):
    options = GPU | {"dtype": "float32", "max_num_seqs": 8}
    want, _ = story(graphs="lazy", **options)
    got, num_accepted = story(DRAFT, graphs=graphs, **options)
    assert got == want
    assert num_accepted > 30


@pytest.mark.gpu
@pytest.mark.large
def test_a_draft_model_and_its_cache_leave_room_on_a_gpu():
    """The share of the memory that is asked for holds both caches and both models."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8}
    options |= {"graphs": "lazy", "gpu_memory_utilization": 0.5}
    with LLM("story", speculative=DRAFT, **options) as llm:
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.52 * total
        draft, own = llm.engine.runner.guesser.draft.storage, llm.engine.runner.storage
        assert draft.num_blocks == own.num_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_that_verify_lookups_give_the_tokens_without(dtype):
    options = GPU | {"dtype": dtype, "max_num_seqs": 8}
    want, _ = story(graphs="lazy", **options)
    got, num_accepted = story(LOOKUP, graphs="auto", **options)
    assert got == want
    assert num_accepted > 0
