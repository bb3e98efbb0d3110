"""Models whose layers keep states, in the engine: the bits of each text alone, whatever meets."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.models.test_state_families import make
from tests.models.tiny import VOCAB, save_hf
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import PromptLookup
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams

# One of each kind of layer: gated delta beside attention, a state beside attention in one layer,
# latents beside Kimi's, a convolution alone, no attention, and blocks that layers share.
CASES = ("qwen3_5", "falcon_h1", "kimi_linear", "lfm2", "mamba2", "zamba2")
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


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_live_on_the_device_have_their_states_there(
    path: Any, truth: list[Any], overlap: bool
) -> None:
    """The runner of captured steps, which a CPU computes op by op."""
    llm = LLM(path, num_blocks=40, num_checkpoints=4, **ROOM)
    limits = llm.engine.scheduler.limits
    runner = DeviceRunner(
        llm.model,
        llm.engine.runner.storage,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        batch_invariant=True,
    )
    llm.engine = Engine(llm.loop.new_scheduler(), runner, overlap=overlap)
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    sums = set()  # this runner adds log-probabilities up in another order
    for _ in range(2):
        found = told(llm.generate(given, params()))
        sums.add(tuple(total for one in found for _, total in one))
        assert [[ids for ids, _ in one] for one in found] == [
            [ids for ids, _ in one] for one in truth
        ]
    assert len(sums) == 1
    llm.close()


class Breaking:
    """A runner whose steps fail now and then, after they have run."""

    def __init__(self, runner: Any, poison: tuple[int, ...]) -> None:
        self.runner, self.poison, self.num_failed, self.draw = runner, poison, 0, random.Random(3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, batch: Any) -> Any:
        handle = self.runner.submit(batch)
        is_poisoned = any(run.token_ids[-3:] == self.poison for run in batch.sequences)
        if is_poisoned or (len(batch.sequences) > 1 and self.draw.random() < 0.15):
            self.num_failed += 1
            raise RuntimeError("a step that failed when its states had changed")
        return handle


def test_a_step_that_failed_leaves_no_trace_in_states(path: Any, truth: list[Any]) -> None:
    """Its sequences go on from checkpoints; what fails each time ends alone."""
    llm = LLM(path, num_blocks=200, **ROOM)
    runner = Breaking(llm.engine.runner, poison=(2, 5, 6))
    llm.engine = Engine(llm.loop.new_scheduler(), runner)
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    bad = {"prompt_token_ids": [*prompts()[3][:100], 2, 5, 6]}
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(llm.generate, [bad], [SamplingParams(max_tokens=30)])
        assert told(llm.generate(given, params())) == truth
        with pytest.raises(RuntimeError, match="when its states had changed"):
            ended.result()
    assert runner.num_failed > 3
    llm.engine.scheduler.check_integrity()
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["together", "in small chunks", "few blocks", "main memory"])
def test_texts_have_the_bits_that_each_has_alone_on_a_gpu(path: Any, how: str) -> None:
    """With captured decode steps, in 16 bits."""
    room = ROOM | {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True}
    alone = LLM(path, num_blocks=200, enable_prefix_caching=False, **room)
    given = [{"prompt_token_ids": prompt} for prompt in prompts()]
    wanted = [
        told(alone.generate([prompt], [own]))[0]
        for prompt, own in zip(given, params(), strict=True)
    ]
    alone.close()
    llm = LLM(path, **room | {"num_blocks": 200} | HOWEVER[how])
    for _ in range(2):
        assert told(llm.generate(given, params())) == wanted
    llm.close()
