"""Two workers on one GPU: gloo and buffers that both read, in graphs, too; the tokens of one.

The workers' kernels take turns on the GPU, and a sum waits for the other's turn: this shows what is
right, not what is fast.
"""

from __future__ import annotations

import pytest

from tests.engine.tensor_parallel.conftest import (
    assert_nothing_stays,
    write_latents,
    write_model,
    write_windows,
)
from tests.engine.tensor_parallel.test_on_gpus import (
    MARGINS,
    assert_same_up_to_ties,
    generate,
)
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS = {
    "max_num_seqs": 4, "num_blocks": 64, "max_model_len": 128, "max_num_batched_tokens": 64,
    "swap_space_gib": 0.01,
}  # fmt: skip
# Graphs where sums are in them; few of them: each is captured by two processes that take turns.
KINDS = {
    "plain": (write_model, "off", "bfloat16"),
    "graphs": (write_model, "lazy", "bfloat16"),
    "windows": (write_windows, "off", "float32"),
    "latents": (write_latents, "off", "float32"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_on_one_gpu_give_the_tokens_of_one(kind, tmp_path, capsys):
    write, graphs, dtype = KINDS[kind]
    path = write(tmp_path, head_dim=64) if write is write_model else write(tmp_path)
    settings = {**SETTINGS, "graphs": graphs, "dtype": dtype, "device": "cuda:0"}
    whole = LLM(path, **settings)
    want = generate(whole)
    whole.close()
    llm = LLM(path, tensor_parallel_size=2, **settings)
    try:
        with capsys.disabled():
            print("\nsymmetric memory:", llm.engine.runner.why_no_symmetric_memory or "yes")
        assert_same_up_to_ties(generate(llm), want, MARGINS[dtype])
        params = SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=8, ignore_eos=True)
        first, second = (llm.generate([{"prompt_token_ids": [5, 6, 7]}], params) for _ in range(2))
        assert [c.token_ids for c in first[0].outputs] == [c.token_ids for c in second[0].outputs]
    finally:
        llm.close()
    assert_nothing_stays(llm.engine.runner.workers)


def test_workers_on_one_gpu_must_be_told_how_many_blocks(tmp_path):
    settings = {**SETTINGS, "num_blocks": None, "device": "cuda:0"}
    with pytest.raises(ValueError, match="num_blocks must be given where 2 workers share cuda:0"):
        LLM(write_model(tmp_path), tensor_parallel_size=2, **settings)
