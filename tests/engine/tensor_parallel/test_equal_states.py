"""Models whose layers keep states: the tokens and log-probabilities of one process, from two."""

from __future__ import annotations

import pytest

from tests.engine.tensor_parallel.test_equal import _prompts
from tests.engine.tensor_parallel.test_equal_kinds import assert_two_give_what_one_gives
from tests.models.test_state_families import make
from tests.models.tiny import VOCAB, save_hf
from tilewise.engine.llm import LLM

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "num_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 256,
}
# Both kinds of recurrence, a norm over the channels of all ranks, and a gate of attention.
CASES = ["qwen3_5", "bamba"]


@pytest.mark.parametrize("case", CASES)
def test_states_are_cut_and_give_the_tokens_of_one_process(case, tmp_path):
    """In chunks, with lost blocks and with hits where a checkpoint is."""
    path = save_hf(make(case), tmp_path)
    prompts = _prompts(70, 131, 3, 66, 129)
    [long] = _prompts(140)
    common = [{"prompt_token_ids": [*long["prompt_token_ids"], i]} for i in range(3)]
    for prompt in (*prompts, *common):
        prompt["prompt_token_ids"] = [3 + i % (VOCAB - 3) for i in prompt["prompt_token_ids"]]
    assert_two_give_what_one_gives(path, SETTINGS, [(prompts, 30), (common, 8)])


def test_main_memory_for_states_is_refused(tmp_path):
    path = save_hf(make("qwen3_5"), tmp_path)
    with pytest.raises(ValueError, match="swap_space_gib must be 0 with tensor_parallel_size"):
        LLM(path, tensor_parallel_size=2, swap_space_gib=0.1, **SETTINGS)
