"""What warm_up() runs: no ordinary request waits for a compiler then, and nothing is left."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from numba import njit

from tests import warm
from tests.engine.checkpoint import write_checkpoint
from tilewise.engine.config import DraftModel
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.tables.admission import Limits
from tilewise.engine.usual_steps import usual_steps, warm_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (2, 9, 40)]


def test_no_ordinary_request_waits_for_a_compiler():
    command = [sys.executable, "-m", "tests.engine.ordinary_requests"]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        before, after, told = json.loads(process.communicate(timeout=300)[0])
    assert {"run_list", "attention_forward", "_decode"} <= set(before)
    assert (after, told) == ([], 0)


def test_what_is_compiled_while_requests_wait_is_counted():
    with LLM("story", device="cpu", num_blocks=100) as llm:
        warm_up(llm)
        before = llm.engine.stats().num_compilations
        inner = njit(lambda number: number + 1)
        outer = njit(lambda number: inner(number) * 2)
        assert [outer(2), outer(2.5)] == [6, 7]
        assert llm.engine.stats().num_compilations == before + 2


@pytest.mark.parametrize("case", ["llama", "deepseek", "gemma3"])
@pytest.mark.parametrize("settings", [
    {"num_blocks": 200},
    {"num_blocks": 12, "max_num_seqs": 1, "max_num_batched_tokens": 1},
], ids=["wide", "narrow"])  # fmt: skip
def test_it_leaves_nothing_behind(tmp_path, case, settings):
    write_checkpoint(tmp_path, case, has_tokenizer=False)
    with LLM(tmp_path, device="cpu", block_size=4, **settings) as llm:
        wanted = [told(output) for output in llm.generate(PROMPTS, GREEDY)]
    with LLM(tmp_path, device="cpu", block_size=4, **settings) as llm:
        warm_up(llm)
        runner = llm.engine.runner
        for left in (runner._scores._scores, runner._adjuster._states, runner._drawn):
            assert not left
        assert llm.engine.stats().scheduler.blocks_used == 0
        assert [told(output) for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert list(llm.start_seconds)[-1] == "kernels of long prompts and options compiled"


def told(output):
    return output.outputs[0].token_ids, output.prompt_logprobs


def test_an_engine_that_guesses_is_warmed_up():
    with LLM("story", device="cpu", num_blocks=100, speculative=DraftModel("story")) as llm:
        warm_up(llm)
        [output] = llm.generate("Once upon a time", GREEDY)
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_its_steps_fit_the_limits():
    draw = random.Random(0)
    for _ in range(300):
        limits = Limits(
            num_blocks=draw.choice((1, 2, 9, 1000)),
            block_size=draw.choice((1, 4, 16)),
            max_num_seqs=draw.choice((1, 2, 3, 256)),
            max_num_batched_tokens=draw.choice((1, 2, 30, 1024)),
            max_model_len=draw.choice((2, 30, 4096)),
            other_blocks=draw.choice(((), (1,), (5, 70))),
        )
        fewest = min(limits.num_blocks, *limits.other_blocks, limits.num_blocks)
        first, last = usual_steps(limits, draw.choice((64, 384, 1 << 25)))
        assert len(first.sequences) <= max(2, limits.max_num_seqs)
        tokens = sum(len(run.token_ids) for run in first.sequences)
        assert tokens <= max(2, limits.max_num_batched_tokens)
        for run in (*first.sequences, *last.sequences):
            assert 0 < len(run.token_ids) <= limits.max_model_len
            assert len(run.block_ids) * limits.block_size >= len(run.token_ids)
            assert max(run.block_ids) < fewest
            assert len(run.others) == len(limits.other_blocks)
        assert all(max(pair) < fewest for pair in first.block_copies), "each group copies it"
        assert {run.seq_id for run in first.sequences} == set(last.left)
