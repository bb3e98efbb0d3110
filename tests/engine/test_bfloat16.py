"""The packaged model in bfloat16: transformers' tokens, whatever a request goes through.

transformers rounds elsewhere, so near equals may change places. It is asked along the very text
that the engine wrote: each token is its best one, or within two steps of bfloat16 of the best. What
a request goes through (chunks, preemption, main memory, files, neighbours, guesses, steps that
overlap) changes no token at all.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import DraftModel, PromptLookup
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.sizing import allocate

STEM = "Once upon a time there was a little girl named Lily. She loved to play in the park"
PROMPTS = [
    STEM, f"{STEM} with her dog", f"{STEM} and one day she saw", "Tom had a red ball.",
    "The cat was very", "One day, a big bear",
]  # fmt: skip
STEPS = 26
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
SEEDED = SamplingParams(n=3, seed=5, max_tokens=STEPS, ignore_eos=True)
MODES = {
    "chunks": {"max_num_batched_tokens": 7},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_blocks": 14, "preemption": "recompute"},
    "swapped": {"num_blocks": 14, "preemption": "swap", "swap_space_gib": 0.01},
    "lookup": {"speculative": PromptLookup(4, min_ngram=1, is_adaptive=False)},
    "draft model": {"speculative": DraftModel("story", 3, is_adaptive=False)},
    "fair": {"scheduling_policy": "fair", "long_prefill_token_threshold": 5, "num_blocks": 14},
    "no prefix cache": {"enable_prefix_caching": False},
}


def make(**settings):
    settings = {"num_blocks": 200, "max_model_len": 128, **settings}
    llm = LLM("story", device="cpu", **settings)
    assert llm.model.dtype == torch.bfloat16
    return llm


def texts_of(llm, params=GREEDY):
    outputs = llm.generate(PROMPTS, params)
    assert llm.engine.stats().scheduler.blocks_used == 0
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def wanted():
    """Greedy and seeded tokens of each prompt alone, without a prefix cache."""
    llm = make(enable_prefix_caching=False)
    return {
        params: [[s.token_ids for s in llm.generate(p, params)[0].outputs] for p in PROMPTS]
        for params in (GREEDY, SEEDED)
    }


@pytest.fixture(scope="module")
def scores():
    """A function of prompt and tokens: transformers' logits before each of the tokens."""
    peer = AutoModelForCausalLM.from_pretrained(packaged_model(), dtype=torch.bfloat16).eval()

    def scores(prompt, tokens):
        with torch.no_grad():
            logits = peer(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        return logits[len(prompt) - 1 : -1]

    return scores


def test_greedy_tokens_are_the_best_of_transformers(wanted, scores):
    llm, num_equal = make(), 0
    for prompt, [tokens] in zip(PROMPTS, wanted[GREEDY], strict=True):
        rows = scores(llm.tokenizer.encode(prompt), tokens)
        best, taken = rows.max(dim=-1), rows[torch.arange(STEPS), torch.tensor(tokens)]
        assert (best.values - taken <= 2 * 2**-7 * best.values.abs()).all()
        num_equal += int((best.indices == torch.tensor(tokens)).sum())
    assert num_equal >= 0.95 * len(PROMPTS) * STEPS


@pytest.mark.parametrize("mode", MODES)
def test_what_a_request_goes_through_changes_no_token(wanted, mode):
    llm = make(**MODES[mode])
    # The second time is over what the first has left: nothing without a prefix cache, and one at a
    # time what others leave.
    for _ in range(1 if mode in ("one at a time", "no prefix cache") else 2):
        for params in (GREEDY, SEEDED):
            assert texts_of(llm, params) == wanted[params]
    stats = llm.engine.stats().scheduler
    assert (stats.num_preemptions > 0) == (mode in ("preempted", "swapped", "fair"))
    assert (stats.num_swapped > 0) == (mode == "swapped")
    assert (stats.num_accepted_drafts > 0) == (mode in ("lookup", "draft model"))
    assert (stats.prefix_hit_tokens > 0) == (mode != "no prefix cache")


def test_blocks_of_files_change_no_token(wanted, tmp_path):
    settings = {"num_blocks": 12, "swap_space_gib": 2e-4, "offload_dir": tmp_path}
    for _ in range(2):  # the second finds the files of the first
        with make(**settings) as llm:
            assert texts_of(llm) == wanted[GREEDY]
            assert texts_of(llm, SEEDED) == wanted[SEEDED]
    assert llm.engine.scheduler.tables.memory.stores[0].num_hits > 0


def test_steps_that_overlap_change_no_token(wanted):
    llm = make()
    storage = allocate(llm.engine.runner.storage.spec, 14, torch.device("cpu"))
    runner = DeviceRunner(
        llm.model, storage, max_num_seqs=8, max_model_len=128, batch_invariant=True
    )
    scheduler = Scheduler(14, 16, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)
    llm.engine = Engine(scheduler, runner, overlap=True)
    assert texts_of(llm) == wanted[GREEDY]
    assert texts_of(llm, SEEDED) == wanted[SEEDED]
    assert llm.engine.stats().scheduler.num_preemptions > 0


def test_beams_in_turns_are_those_of_beams_side_by_side_and_score_as_in_transformers(scores):
    params = BeamSearchParams(4, max_tokens=24, ignore_eos=True)
    ample, little = make(), make(num_blocks=9, max_num_seqs=3)
    for prompt in PROMPTS[2:]:
        [output], [again] = ample.generate(prompt, params), little.generate(prompt, params)
        assert again.outputs == output.outputs
        for beam in output.outputs:
            rows = scores(output.prompt_token_ids, beam.token_ids).log_softmax(dim=-1)
            total = float(rows[torch.arange(24), torch.tensor(beam.token_ids)].sum())
            assert abs(total - beam.cumulative_logprob) < 0.02 * 24
    assert little.engine.stats().scheduler.num_preemptions > 0


def test_a_search_of_one_beam_is_greedy(wanted):
    llm = make()
    params = BeamSearchParams(1, max_tokens=STEPS, ignore_eos=True)
    assert texts_of(llm, params) == wanted[GREEDY]
