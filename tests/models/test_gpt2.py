"""GPT-2 equals transformers, from either layout of its checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import (
    GPT2_CASES,
    PROMPTS,
    VOCAB,
    assert_same_gradients,
    float64_logits,
    greedy_dense,
    greedy_hf,
    greedy_paged,
    make_hf,
    save_hf,
)
from tilewise.models import load_model
from tilewise.testing import assert_within_budget


@pytest.fixture(params=GPT2_CASES, scope="module")
def pair(request, tmp_path_factory):
    """transformers' model and ours, from the same files."""
    hf = make_hf(request.param)
    return hf, load_model(save_hf(hf, tmp_path_factory.mktemp(request.param)))


def test_logits_are_within_the_budget_of_float64(pair):
    hf, ours = pair
    ids = torch.randint(0, VOCAB, (2, 50))
    with torch.no_grad():
        logits, eager = ours.compute_logits(ours(ids)), hf(ids).logits
    assert_within_budget(logits, float64_logits(hf, ids), eager, name="logits")


def test_greedy_tokens_equal_transformers_through_both_paths(pair):
    hf, ours = pair
    expected = [greedy_hf(hf, prompt, 22) for prompt in PROMPTS]
    assert greedy_paged(ours, PROMPTS, steps=22, chunk=4) == expected
    assert greedy_dense(ours, PROMPTS[0], 22) == expected[0]


def test_gradients_of_the_dense_path_equal_transformers(pair):
    assert_same_gradients(*pair)


def test_bare_checkpoint_with_its_causal_masks_loads(tmp_path):
    """The first published GPT-2 files have no "transformer." prefix and hold attn.bias masks."""
    hf = make_hf("gpt2")
    save_hf(hf, tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
    bare["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, file)
    ids = torch.randint(0, VOCAB, (1, 12))
    ours = load_model(tmp_path)
    with torch.no_grad():
        assert_within_budget(
            ours.compute_logits(ours(ids)), float64_logits(hf, ids), hf(ids).logits
        )


def test_a_sequence_longer_than_the_learned_positions_is_refused(pair):
    _, ours = pair
    with pytest.raises(ValueError, match="ids must have at most 128 tokens a row, got 129"):
        ours(torch.zeros(1, 129, dtype=torch.int64))
