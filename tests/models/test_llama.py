"""The Llama family and DeepSeek-V2 equal transformers: logits, tokens of both paths, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import (
    CASES,
    DEEPSEEK_CASES,
    PROMPTS,
    VOCAB,
    PagedLoop,
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

STEPS = 14  # past the largest window, which is of 11 tokens


@pytest.fixture(params=[*CASES, *DEEPSEEK_CASES], scope="module")
def pair(request, tmp_path_factory):
    """transformers' model and ours, from the same files."""
    hf = make_hf(request.param)
    return hf, load_model(save_hf(hf, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def told(pair):
    """What transformers goes on with, greedily, for each prompt."""
    return [greedy_hf(pair[0], prompt, STEPS) for prompt in PROMPTS]


def test_logits_are_within_the_budget_of_float64(pair):
    hf, ours = pair
    ids = torch.randint(0, VOCAB, (2, 70))
    with torch.no_grad():
        logits, eager = ours.compute_logits(ours(ids)), hf(ids).logits
    assert logits.dtype == torch.float32
    assert_within_budget(logits, float64_logits(hf, ids), eager, name="logits")


def test_samplers_are_given_the_same_logits(pair):
    """Those that a device's sampler widens itself: nothing but the dtype may be another."""
    _, ours = pair
    with torch.no_grad():
        hidden = ours(torch.randint(0, VOCAB, (2, 9)))
        assert torch.equal(ours.head_logits(hidden).float(), ours.compute_logits(hidden))


def test_paged_path_gives_the_logits_of_the_dense_path_whatever_the_chunks(pair):
    hf, ours = pair
    ids = torch.randint(0, VOCAB, (2, 33))
    loop = PagedLoop(ours, max_tokens=33, num_seqs=2)
    first, second = ids.tolist()
    rows = [
        loop.step({0: first[:6]}),
        loop.step({1: second[:21], 0: first[6:7]})[[-1]],
        loop.step({0: first[7:33]}),
        loop.step({1: second[21:33]}),
    ]
    with torch.no_grad():
        truth, eager = float64_logits(hf, ids), hf(ids).logits
    assert_within_budget(
        torch.cat(rows), torch.cat([truth[0], truth[1, 21:]]), torch.cat([eager[0], eager[1, 21:]])
    )


def test_greedy_tokens_equal_transformers_through_the_paged_path(pair, told):
    _, ours = pair
    assert greedy_paged(ours, PROMPTS, steps=STEPS, chunk=3) == told
    assert greedy_paged(ours, PROMPTS[::-1], steps=STEPS, chunk=64) == told[::-1]


def test_greedy_tokens_equal_transformers_through_the_dense_path(pair, told):
    _, ours = pair
    assert greedy_dense(ours, PROMPTS[0], STEPS) == told[0]


def test_gradients_of_the_dense_path_equal_transformers(pair):
    assert_same_gradients(*pair)


def test_given_positions_equal_implied_ones(pair):
    _, ours = pair
    ids = torch.randint(0, VOCAB, (2, 9))
    positions = torch.arange(9).expand(2, 9)
    with torch.inference_mode():
        assert torch.equal(ours(ids, positions), ours(ids))


@pytest.mark.parametrize(
    "case", ["llama3_rope", "deepseek_yarn", "deepseek_q_rank_biases", "gemma3"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_transformers(tmp_path, dtype, case):
    hf = make_hf(case).to(dtype)
    ours = load_model(save_hf(hf, tmp_path))
    assert ours.embed_tokens.weight.dtype == dtype
    ids = torch.randint(0, VOCAB, (2, 40))
    with torch.no_grad():
        logits, eager = ours.compute_logits(ours(ids)), hf(ids).logits
    # Logits are rounded to the model's dtype before they are widened, as in transformers.
    assert logits.dtype == torch.float32
    assert_within_budget(logits.to(dtype), float64_logits(hf, ids), eager)
