"""Models whose layers keep states, in the engine: the bits of each text alone, whatever meets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.models.test_state_families import make
from tests.models.tiny import VOCAB, save_hf
from tilewise.engine.config import PromptLookup
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams

# One of each kind of layer: gated delta beside attention, a state beside attention in one layer,
# latents beside Kimi's, a convolution alone, and no attention.
CASES = ("qwen3_5", "falcon_h1", "kimi_linear", "lfm2", "mamba2")
ROOM = {"max_model_len": 256, "device": "cpu", "max_num_seqs": 6}


@pytest.fixture(scope="module", params=CASES)
def path(request: Any, tmp_path_factory: Any) -> Any:
    return save_hf(make(request.param), tmp_path_factory.mktemp(request.param))


def prompts() -> list[list[int]]:
    """Texts that begin alike, at, before and behind the ends of chunks."""
    draw = random.Random(4)
    text = [draw.randrange(3, VOCAB) for _ in range(170)]
    other = [draw.randrange(3, VOCAB) for _ in range(9)]
    return [text[:60], text[:130], text[:64] + other, text[:150], text[:130] + other, text[:128]]


def params() -> list[SamplingParams]:
    draws = [
        SamplingParams(
            seed=i, max_tokens=8 + 14 * (i % 3), ignore_eos=True, n=1 + i % 2, logprobs=1,
            temperature=0.5 * (i % 2) + 0.3 * (i > 1),
        )
        for i in range(5)
    ]  # fmt: skip
    return [*draws, BeamSearchParams(3, max_tokens=12)]


def told(outputs: Any) -> list[Any]:
    """Return tokens and their log-probabilities, of each continuation."""
    return [
        [(c.token_ids, c.cumulative_logprob) for c in output.outputs] for output in outputs
    ]  # fmt: skip


@pytest.fixture(scope="module")
def truth(path: Any) -> list[Any]:
    """Each text alone, in an engine that finds nothing."""
    llm = LLM(path, num_blocks=200, enable_prefix_caching=False, **ROOM)
    return [
        told(llm.generate([{"prompt_token_ids": p}], [own]))[0]
        for p, own in zip(prompts(), params(), strict=True)
    ]


HOWEVER = {
    "together": {},
    "in small chunks": {"max_num_batched_tokens": 37, "num_blocks": 200},
    "few blocks": {"num_blocks": 26, "num_checkpoints": 3},
    "main memory": {"num_blocks": 26, "num_checkpoints": 2, "swap_space_gib": 0.05},
    "guesses": {"speculative": PromptLookup(5, 2, 1, is_adaptive=False), "num_blocks": 200},
    "many checkpoints": {"checkpoint_tokens": 64, "num_blocks": 200, "block_size": 32},
    "wide blocks": {"block_size": 128, "num_blocks": 16},
}


@pytest.mark.parametrize("how", HOWEVER)
def test_texts_have_the_bits_that_each_has_alone(path: Any, truth: list[Any], how: str) -> None:
    llm = LLM(path, **ROOM | HOWEVER[how])
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    assert told(llm.generate(given, params())) == truth
    hits = llm.engine.stats().scheduler.prefix_hit_tokens
    assert told(llm.generate(given, params())) == truth
    stats = llm.engine.stats().scheduler
    assert stats.blocks_used == 0
    if how != "few blocks":
        assert stats.prefix_hit_tokens > hits, "what has been read is found"
    llm.close()
