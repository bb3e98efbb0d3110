"""A step of one row: fewer kernels, the same values to rounding."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.models.tiny import VOCAB, PagedLoop, float64_logits, make_hf, save_hf
from tilewise import LLM, SamplingParams, ops
from tilewise.models import load_model
from tilewise.testing import assert_within_budget

TEXT = [5, 17, 3, 88, 41, 9, 60]


def _counted(monkeypatch, backend):
    """Let every weight be one that a row gains by, and return the list of calls."""
    found = []

    def call(name, function, *args, **options):
        found.append(name)
        return function(*args, **options, **({} if backend is None else {"backend": backend}))

    for name in ("add_rms_norm_linear", "row_linear_parts"):
        monkeypatch.setattr(ops, name, functools.partial(call, name, getattr(ops, name)))
    monkeypatch.setattr(ops, "row_linear_pays", lambda weight: weight.dtype == torch.bfloat16)
    return found


def _assert_rows(ours, hf, calls, per_row):
    """Run a prompt and a text token by token; look at logits, and at the calls of each step."""
    ids = torch.tensor([TEXT])
    with torch.inference_mode():
        loop = PagedLoop(ours, max_tokens=len(TEXT), num_seqs=1)
        loop.step({0: TEXT[:3]})
        assert calls == []
        rows = [loop.step({0: [token]}) for token in TEXT[3:]]
        eager = hf(ids).logits[0, 3:]
    assert len(calls) == per_row * len(rows)
    logits = torch.cat(rows).to(torch.bfloat16)
    assert_within_budget(logits, float64_logits(hf, ids)[0, 3:], eager)


# Of two layers the first reads an embedding, which is no sum: it is computed op by op.
CALLS = {
    "qwen2_bias_tied": 4,
    "llama_mha_tied": 4,
    "qwen3_norm_wide_heads": 4,
    "llama_mqa_biases": 0,
    "gemma3": 0,
}


@pytest.mark.parametrize("case", CALLS)
def test_layers_of_one_row_multiply_beside_their_norms(case, tmp_path, monkeypatch):
    hf = make_hf(case).bfloat16()
    ours = load_model(save_hf(hf, tmp_path), dtype="bfloat16")
    calls = _counted(monkeypatch, "reference")
    _assert_rows(ours, hf, calls, CALLS[case])


def test_two_rows_a_batch_invariant_step_and_gradients_do_not(tmp_path, monkeypatch):
    ours = load_model(save_hf(make_hf("qwen2_bias_tied").bfloat16(), tmp_path), dtype="bfloat16")
    calls = _counted(monkeypatch, "reference")
    loop = PagedLoop(ours, max_tokens=8, num_seqs=2)
    with torch.inference_mode():
        loop.step({0: [5], 1: [6]})
    ours(torch.randint(0, VOCAB, (1, 1)))
    assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, calls in CALLS.items() if calls])
def test_an_engine_of_one_row_is_as_exact_as_transformers(case, tmp_path, monkeypatch):
    hf = make_hf(case).bfloat16()
    folder = save_hf(hf, tmp_path)
    calls = _counted(monkeypatch, None)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(folder, dtype="bfloat16", device="cuda", num_blocks=32) as llm:
        found = llm.generate({"prompt_token_ids": TEXT}, params)[0].outputs[0]
    assert calls
    text = torch.tensor([[*TEXT, *found.token_ids]])
    at = torch.arange(len(TEXT) - 1, text.shape[1] - 1)

    def errors(logprobs):
        chosen = logprobs[at, text[0, len(TEXT) :]].double()
        return (chosen - truth).abs().mean()

    with torch.no_grad():
        wide = float64_logits(hf, text)[0].log_softmax(-1)
        truth = wide[at, text[0, len(TEXT) :]]
        eager = errors(hf(text).logits[0].float().log_softmax(-1))
    pairs = zip(found.logprobs, found.token_ids, strict=True)
    own = torch.tensor([each[token] for each, token in pairs]).double()
    assert (own - truth).abs().mean() < 2 * eager + 2e-3
