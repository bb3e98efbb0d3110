"""LLM over checkpoints and settings that are rare, and allowed: the same tokens as transformers."""

from __future__ import annotations

import pytest

from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams

PROMPT = [5, 17, 99, 4]


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_model_in_float64_says_what_it_says_in_transformers(tmp_path, case):
    peer = write_checkpoint(tmp_path, case).double()
    llm = LLM(tmp_path, device="cpu", dtype="float64", num_blocks=8, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params)
    llm.close()
    assert output.outputs[0].token_ids == greedy_tokens(peer, PROMPT, 12)
