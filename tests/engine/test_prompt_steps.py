"""Steps with prompts are padded and captured in pieces; neither changes what they compute."""

from __future__ import annotations

import pytest
import torch

from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tests.engine.test_graphs import (
    GREEDY,
    make_runner,
    mixed_requests,
    new_scheduler,
    prompts,
    run,
)
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.prompt_steps import PromptSteps, prompt_sizes
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request
from tilewise.ops.call import Last


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


@pytest.mark.parametrize("most", [1, 15, 16, 17, 64, 100, 256, 300, 2048, 8192, 10_000])
def test_sizes_ascend_to_the_limit_and_waste_little(most: int):
    sizes = prompt_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(s for s in sizes if s >= count)
        assert size - count < (16 if count <= 16 else count if count <= 256 else count / 8)


CASES = (
    "llama", "qwen3_norm_wide_heads", "gpt2", "mistral_window", "qwen2_second_layer_window",
    "qwen2_layer_types", "deepseek", "deepseek_q_rank_biases",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_token(tmp_path, case):
    """Chunks of prompts beside sequences that decode, at 24 tokens a step."""
    reference = write_checkpoint(tmp_path, case)
    runner = make_runner(tmp_path, "cpu", dtype="float32", max_num_batched_tokens=24)
    assert runner.prompts is not None
    padded, compute = [], runner.prompts._compute

    def noting(size, *more):
        padded.append(size)
        return compute(size, *more)

    runner.prompts._compute = noting
    engine = Engine(new_scheduler(runner, max_num_batched_tokens=24), runner)
    given = [*prompts(5), [5, 6, 7]]
    tokens = run(engine, [Request(str(i), p, GREEDY) for i, p in enumerate(given)])
    tokens |= run(engine, [Request("alone", given[-1], GREEDY)])
    assert set(padded) == {16, 24}
    assert tokens["alone", 0] == tokens["5", 0]
    for i, prompt in enumerate(given):
        assert tokens[str(i), 0] == greedy_tokens(reference, prompt, 20)


def test_rows_of_the_padding_write_no_slot(directory):
    runner = make_runner(directory, "cpu", dtype="float32", max_num_batched_tokens=64)
    engine = Engine(new_scheduler(runner), runner)
    prompt = prompts(1)[0][:17] + [5] * 3
    run(engine, [Request("long", [7] * 60, GREEDY)])  # leaves slots in the buffers
    before = [layer[0].clone() for layer in runner.storage.layers]
    submit, batches = runner.submit, []

    def noting(batch):
        batches.append([list(sequence.block_ids) for sequence in batch.sequences])
        return submit(batch)

    runner.submit = noting
    engine.add_request(Request("short", prompt, GREEDY))
    engine.step()
    [[blocks]] = batches
    for old, (k_cache, *_) in zip(before, runner.storage.layers, strict=True):
        written = (old != k_cache).flatten(2).any(-1).nonzero()
        assert len(written) == len(prompt)
        assert {int(block) for block, _ in written} <= set(blocks)


def test_a_model_that_keeps_its_attention_is_refused(directory):
    runner = make_runner(directory, "cpu")
    with pytest.raises(ValueError, match="model must hand its attention over, got object"):
        PromptSteps(object(), runner.storage, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_captured_in_pieces_is_the_step_bit_for_bit(tmp_path, case, dtype):
    write_checkpoint(tmp_path, case)
    found = []
    for captures in (False, True):
        runner = make_runner(
            tmp_path, "cuda", block_size=16, dtype=dtype, max_num_batched_tokens=64
        )
        assert runner.prompts is not None
        if captures:
            prepare(runner, max_num_batched_tokens=64, is_lazy=False)
            assert all(runner.prompts.is_captured(size) for size in runner.prompts.sizes)
        seen: list[torch.Tensor] = []
        compute = runner.prompts.run

        def noting(*args, compute=compute, seen=seen):
            hidden = compute(*args)
            seen.append(hidden.clone())
            return hidden

        runner.prompts.run = noting
        tokens = run(Engine(new_scheduler(runner), runner, overlap=True), mixed_requests())
        assert all(x.isfinite().all() for x in seen)
        found.append((seen, tokens))
    (eager, drawn), (captured, drawn_captured) = found
    assert len(eager) == len(captured) > 5
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert drawn == drawn_captured


@pytest.mark.gpu
def test_layers_after_the_first_repeat_its_attention(directory, monkeypatch):
    """All of them, in every captured step, and with the tokens of layers that do not."""
    found, repeat, ran = [], Last.run, []

    def noting(last, *args):
        is_first = last._bound is None  # no layer has run before
        ran.append(repeat(last, *args) or is_first)
        return ran[-1] and not is_first

    for chosen in (noting, lambda *_: False):
        monkeypatch.setattr(Last, "run", chosen)
        runner = make_runner(
            directory, "cuda", block_size=16, dtype="bfloat16", max_num_batched_tokens=64
        )
        prepare(runner, max_num_batched_tokens=64, is_lazy=False)
        ran.clear()
        found.append(run(Engine(new_scheduler(runner), runner, overlap=True), mixed_requests()))
        if chosen is noting:
            assert len(ran) > 5
            assert all(ran)
    assert found[0] == found[1]


@pytest.mark.gpu
def test_shared_prefixes_stay_outside_of_the_graphs(directory):
    """The same captured pieces serve steps with and without groups."""
    shared = [7, 8, 9] * 50
    given = [[*shared, i] for i in range(4)] + prompts(3)
    found = []
    for sharing_tokens in (None, 1):
        runner = make_runner(
            directory, "cuda", block_size=4, dtype="float32", max_num_batched_tokens=64
        )
        runner.sharing_tokens = sharing_tokens
        prepare(runner, max_num_batched_tokens=64, is_lazy=False)
        engine = Engine(new_scheduler(runner, enable_prefix_caching=True), runner, overlap=True)
        found.append(run(engine, [Request(str(i), p, GREEDY) for i, p in enumerate(given)]))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.large  # beside what others have: all of it counts as used
def test_llm_captures_steps_with_prompts_and_sizes_its_cache_for_them(directory):
    llm = LLM(directory, device="cuda", max_num_seqs=8, gpu_memory_utilization=0.6)
    runner = llm.engine.runner
    assert runner.prompts is not None
    assert all(runner.prompts.is_captured(size) for size in runner.prompts.sizes)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts(20)], GREEDY)
    assert all(len(o.outputs[0].token_ids) == 20 for o in outputs)
    assert runner.compilations.names == []
    llm.close()
