"""Embeddings: the hidden states that transformers has, pooled, beside whatever else runs."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.engine.checkpoint import VOCAB, write_checkpoint
from tests.engine.test_device_runner import make
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


POOLS = {
    "mean": lambda rows: rows.mean(dim=0),
    "last": lambda rows: rows[-1],
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.amax(dim=0),
    "weightedmean": lambda rows: (
        (torch.arange(1, len(rows) + 1, dtype=torch.float64) @ rows / (len(rows) * (len(rows) + 1)))
        * 2
    ),
}


def prompts(lengths=(1, 2, 7, 16, 33, 50)):
    return [[(31 * n + 7 * i) % (VOCAB - 10) for i in range(n)] for n in lengths]


def states(peer, ids):
    """transformers' hidden states of one prompt after its last norm, (T, E) float64."""
    with torch.no_grad():
        found = peer(torch.tensor([ids]), output_hidden_states=True)
    return found.hidden_states[-1][0].double()


def assert_like_transformers(peer, outputs, given, pooling):
    for output, ids in zip(outputs, given, strict=True):
        assert output.prompt_token_ids == ids
        assert output.pooling == pooling
        rows = states(peer, ids)
        wanted = POOLS[pooling](rows)
        found = torch.tensor(output.embedding, dtype=torch.float64)
        assert (found - wanted).abs().max() < 2e-5 * max(1.0, float(wanted.abs().max()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return path, write_checkpoint(path, "llama")


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint[0], device="cpu", num_blocks=64, block_size=4, max_num_seqs=8)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_of_the_states_that_transformers_has(checkpoint, llm, pooling):
    outputs = llm.embed([{"prompt_token_ids": p} for p in prompts()], pooling=pooling)
    assert_like_transformers(checkpoint[1], outputs, prompts(), pooling)
    assert llm.engine.stats().scheduler.blocks_used == 0


@pytest.mark.parametrize("case", ["gpt2", "qwen2_second_layer_window"])
def test_other_models_and_the_plain_runner_give_theirs(tmp_path, case):
    peer = write_checkpoint(tmp_path, case)
    llm = LLM(tmp_path, device="cpu", num_blocks=64, block_size=4)
    for pooling in ("mean", "last"):
        outputs = llm.embed([{"prompt_token_ids": p} for p in prompts()], pooling=pooling)
        assert_like_transformers(peer, outputs, prompts(), pooling)


@pytest.mark.parametrize("pooling", POOLS)
@pytest.mark.parametrize("on_device", [False, True])
def test_chunks_and_preemptions_change_nothing(checkpoint, pooling, on_device):
    # Twenty blocks of four hold one long prompt and a half: the rest is preempted or waits.
    llm = make(
        checkpoint[0], on_device=on_device, num_blocks=20, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=11,
    )  # fmt: skip
    given = prompts((1, 50, 33, 16, 47, 2))
    outputs = llm.embed([{"prompt_token_ids": p} for p in given], pooling=pooling)
    assert_like_transformers(checkpoint[1], outputs, given, pooling)


def test_a_mean_reads_every_position_and_a_last_one_what_the_cache_has_not(checkpoint):
    llm = LLM(checkpoint[0], device="cpu", num_blocks=64, block_size=4)
    [long] = prompts((41,))
    asked = {"prompt_token_ids": long}
    [first] = llm.embed(asked, pooling="last")
    [again] = llm.embed(asked, pooling="last")
    [mean] = llm.embed(asked, pooling="mean")
    assert (first.num_cached_tokens, again.num_cached_tokens, mean.num_cached_tokens) == (0, 40, 0)
    assert_like_transformers(checkpoint[1], [first, again], [long, long], "last")
    assert_like_transformers(checkpoint[1], [mean], [long], "mean")
    [salted] = llm.embed(asked, pooling="last", cache_salt="another")
    assert salted.num_cached_tokens == 0


@pytest.mark.parametrize("on_device", [False, True])
def test_requests_that_run_meanwhile_draw_the_same_tokens(checkpoint, on_device):
    llm = make(checkpoint[0], on_device=on_device, num_blocks=80, block_size=4, max_num_seqs=8,
               max_num_batched_tokens=16)  # fmt: skip
    given = prompts((5, 9))
    wanted = [o.outputs[0].token_ids for o in llm.generate(
        [{"prompt_token_ids": p} for p in given], GREEDY)]  # fmt: skip

    async def both():
        engine = AsyncLLM(llm)

        async def text(ids):
            async for output in engine.generate({"prompt_token_ids": ids}, GREEDY):
                last = output
            return last.outputs[0].token_ids

        async def vector(ids):
            return await engine.embed({"prompt_token_ids": ids}, pooling="mean")

        found = await asyncio.gather(*map(text, given), *map(vector, prompts()))
        await engine.aclose()
        return found

    found = asyncio.run(both())
    assert found[:2] == wanted
    assert_like_transformers(checkpoint[1], found[2:], prompts(), "mean")


def test_a_task_that_is_cancelled_leaves_nothing(llm):
    async def leave():
        engine = AsyncLLM(llm)
        llm.loop.pause()
        task = asyncio.create_task(engine.embed({"prompt_token_ids": [1, 2, 3]}))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        llm.loop.resume()
        await engine.aclose()

    asyncio.run(leave())
    llm.loop.call(lambda: None)
    assert llm.loop.num_live == 0
    assert llm.engine.stats().scheduler.blocks_used == 0


def test_a_deadline_that_passes_and_what_is_wrong_are_said(llm):
    with pytest.raises(ValueError, match="pooling must be mean, last, .*, got 'sum'"):
        llm.embed([1], pooling="sum")
    with pytest.raises(RequestError, match="prompt"):
        llm.embed({"prompt_token_ids": []})
    with pytest.raises(RequestError, match="vocab_size"):
        llm.embed({"prompt_token_ids": [VOCAB]})
    with pytest.raises(TimeoutError, match="deadline"):
        llm.embed({"prompt_token_ids": [1, 2]}, deadline_s=0.0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_after_a_scheduler_that_broke_nothing_of_its_prompts_is_left(checkpoint, pooling):
    """The next scheduler counts its sequences from 0 again."""
    llm = LLM(checkpoint[0], device="cpu", num_blocks=64, block_size=4, max_num_batched_tokens=8)
    whole, num_updates = llm.engine.scheduler.update, 0

    def update(*given):
        nonlocal num_updates
        num_updates += 1
        if num_updates == 3:
            raise AttributeError("broken")
        return whole(*given)

    llm.engine.scheduler.update = update
    long, short = prompts((50, 7))
    with pytest.raises(AttributeError, match="broken"):
        llm.embed({"prompt_token_ids": long})
    assert llm.loop.num_restarts == 1
    outputs = llm.embed([{"prompt_token_ids": short}], pooling=pooling)
    assert_like_transformers(checkpoint[1], outputs, [short], pooling)
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_on_a_gpu_vectors_are_those_of_transformers_too(checkpoint, graphs):
    llm = LLM(
        checkpoint[0], device="cuda", num_blocks=64, max_num_seqs=8, max_num_batched_tokens=40,
        graphs=graphs,
    )  # fmt: skip
    try:
        for pooling in ("mean", "last"):
            outputs = llm.embed([{"prompt_token_ids": p} for p in prompts()], pooling=pooling)
            for output, ids in zip(outputs, prompts(), strict=True):
                rows = states(checkpoint[1], ids)
                wanted = rows.mean(dim=0) if pooling == "mean" else rows[-1]
                found = torch.tensor(output.embedding, dtype=torch.float64)
                assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 1 - 1e-5
                assert (found - wanted).norm() < 5e-3 * wanted.norm()
    finally:
        llm.close()
