"""Checkpoints whose layers have windows, or keep latents, through the engine: transformers' tokens.

A context is several windows long, so that blocks behind them have been given to others.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.checkpoint import VOCAB, greedy_tokens, write_checkpoint
from tilewise.cache.spec import LatentSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured import runner as device_runner
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.graphs import prepare
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import DraftModel, PromptLookup
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.settings import cache_spec
from tilewise.engine.steps.cpu_step import CompiledRunner, runner_for, why_not
from tilewise.models import load_model
from tilewise.testing import assert_within_budget

WINDOWS = (
    "mistral_window", "qwen2_second_layer_window", "qwen2_layer_types", "gemma3", "gpt_oss",
)  # fmt: skip
LATENTS = ("deepseek", "deepseek_q_rank_biases", "deepseek_yarn")
COUNT = 13  # more than a window, where a prompt is shorter
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def prompts():
    """Three that begin alike, and some others."""
    draw = random.Random(4)
    begin = [draw.randrange(3, VOCAB) for _ in range(37)]
    others = [[draw.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 18, 61)]
    return [begin, [*begin, 9], begin[:30] + [7] * 12, *others]


# Every day one window for all, layers with and without one, and latents plain and with YaRN; the
# engine treats the others alike, and tests/models has them.
SLOW = ("qwen2_second_layer_window", "deepseek_q_rank_biases")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW))
        for case in (*WINDOWS, *LATENTS)
    ],
)
def saved(request, tmp_path_factory):
    """The case, its checkpoint, and what transformers makes of the prompts."""
    directory = tmp_path_factory.mktemp(request.param)
    hf = write_checkpoint(directory, request.param, has_tokenizer=False)
    return request.param, directory, [greedy_tokens(hf, p, COUNT) for p in prompts()]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def asked(texts):
    return [{"prompt_token_ids": text} for text in texts]


MODES = {
    "together": {},
    "chunked": {"long_prefill_token_threshold": 3},
    "small_steps": {"max_num_batched_tokens": 8, "max_num_seqs": 3, "num_blocks": 60},
    "preempted": {"num_blocks": 24, "max_num_batched_tokens": 16},
    "swapped": {"num_blocks": 24, "max_num_batched_tokens": 16, "preemption": "swap"},
    "uncached": {"enable_prefix_caching": False, "num_blocks": 30, "block_size": 3},
    "looked_up": {"speculative": PromptLookup(3, max_ngram=2, min_ngram=1)},
}


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_transformers(saved, mode):
    case, directory, expected = saved
    settings = {"block_size": 4, "max_num_seqs": 8} | MODES[mode]
    if mode in ("preempted", "swapped") and case == "mistral_window":
        settings |= {"num_blocks": 5, "max_num_batched_tokens": 4}  # its windows hardly need more
    if mode == "swapped":
        settings["swap_space_gib"] = 0.001
    llm = LLM(directory, device="cpu", **settings)
    try:
        assert tokens_of(llm.generate(asked(prompts()), GREEDY)) == expected
        stats = llm.engine.stats().scheduler
        assert stats.num_preemptions > 0 or mode not in ("preempted", "swapped")
        assert stats.num_swapped > 0 or mode != "swapped"
        again = llm.generate(asked(prompts()), GREEDY)  # warm
        assert tokens_of(again) == expected
        if mode == "swapped":  # what the cache had no room for came back
            assert llm.engine.stats().scheduler.num_recalled_tokens > 0
        if "num_blocks" not in settings:
            found = [len(p) - 1 if len(p) > 4 else 0 for p in prompts()]
            assert [o.num_cached_tokens for o in again] == found, "to the token, inside a block"
        llm.loop.call(llm.engine.scheduler.check_integrity)
    finally:
        llm.close()


def test_prompts_that_part_inside_a_block_share_what_they_have_in_common(saved):
    """Blocks of 16 are longer than some windows here; what is copied gives transformers' tokens."""
    case, directory, expected = saved
    begin, other = prompts()[0], prompts()[-1]
    parted = [[*begin[:n], *other[: 40 - n]] for n in (36, 27, 17, 20)]
    cold = LLM(directory, device="cpu", block_size=16, enable_prefix_caching=False)
    try:
        wanted = tokens_of(cold.generate(asked(parted), GREEDY))
    finally:
        cold.close()
    llm = LLM(directory, device="cpu", block_size=16, max_num_batched_tokens=24)
    try:
        assert tokens_of(llm.generate(asked([begin]), GREEDY)) == expected[:1]
        outputs = llm.generate(asked(parted), GREEDY)
        assert tokens_of(outputs) == wanted
        assert [o.num_cached_tokens for o in outputs] == [36, 27, 17, 20], case
        llm.loop.call(llm.engine.scheduler.check_integrity)
    finally:
        llm.close()


def test_samples_share_a_prompt_and_part(saved):
    """Those that keep the most likely token only are all the greedy text."""
    _, directory, expected = saved
    llm = LLM(directory, device="cpu", block_size=4, num_blocks=40, max_num_seqs=6)
    try:
        sampling = SamplingParams(n=3, top_k=1, max_tokens=COUNT, ignore_eos=True)
        for output, tokens in zip(llm.generate(asked(prompts()), sampling), expected, strict=True):
            assert [list(sample.token_ids) for sample in output.outputs] == [tokens] * 3
        drawn = SamplingParams(n=3, seed=5, max_tokens=COUNT, ignore_eos=True)
        wide = [[s.token_ids for s in o.outputs] for o in llm.generate(asked(prompts()), drawn)]
        assert len({tuple(text) for text in wide[0]}) == 3
    finally:
        llm.close()
    llm = LLM(directory, device="cpu", block_size=4, num_blocks=22, max_num_batched_tokens=7)
    try:
        outputs = llm.generate(asked(prompts()), drawn)
        assert [[s.token_ids for s in o.outputs] for o in outputs] == wide
    finally:
        llm.close()


def test_a_window_frees_the_blocks_behind_it(tmp_path):
    """61 tokens and 13 more hold 3 + 1 blocks of 4 in a window of 7, whatever the length."""
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    llm = LLM(tmp_path, device="cpu", block_size=4, num_blocks=5, max_num_batched_tokens=4)
    try:
        [output] = llm.generate(asked([prompts()[-1]]), GREEDY)
        assert len(output.outputs[0].token_ids) == COUNT
        stats = llm.engine.stats().scheduler
        assert (stats.num_preemptions, stats.blocks_used) == (0, 0)
        assert stats.blocks_peak <= 4
    finally:
        llm.close()


def test_half_precision_logits_are_within_the_budget(tmp_path):
    """Log-probabilities of prompts through chunks and cache, against transformers in float64."""
    for case in ("mistral_window", "qwen2_layer_types", "deepseek_yarn"):
        directory = tmp_path / case
        hf = write_checkpoint(directory, case, has_tokenizer=False).to(torch.bfloat16)
        hf.save_pretrained(directory)
        prompt = prompts()[-1]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            eager = hf(ids).logits[0, :-1].float().log_softmax(-1)
            exact = hf.double()(ids).logits[0, :-1].log_softmax(-1)
        llm = LLM(directory, device="cpu", block_size=4, max_num_batched_tokens=9)
        try:
            scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            [output] = llm.generate(asked([prompt]), scored)
        finally:
            llm.close()
        picked = ids[0, 1:, None]
        found = [entry[token] for entry, token in zip(
            output.prompt_logprobs[1:], prompt[1:], strict=True)]  # fmt: skip
        assert_within_budget(
            torch.tensor(found),
            exact.gather(1, picked)[:, 0],
            eager.gather(1, picked)[:, 0],
            name=case,
        )


def test_what_is_not_built_is_refused_in_a_sentence(tmp_path):
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    write_checkpoint(tmp_path / "latents", "deepseek", has_tokenizer=False)
    with pytest.raises(ValueError, match="weight_dtype must be auto with latent attention"):
        LLM(tmp_path / "latents", device="cpu", weight_dtype="int8")


@pytest.mark.parametrize("num_blocks", [60, 5], ids=["roomy", "preempted"])
def test_a_draft_model_guesses_for_windows_alone(tmp_path, num_blocks):
    """It sees no more than the model: itself, it is right wherever it has seen as much."""
    hf = write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    draft = DraftModel(tmp_path, num_tokens=3, is_adaptive=False)
    llm = LLM(tmp_path, device="cpu", block_size=4, num_blocks=num_blocks,
              max_num_batched_tokens=8, speculative=draft)  # fmt: skip
    try:
        outputs = llm.generate(asked(prompts()), GREEDY)
        assert tokens_of(outputs) == [greedy_tokens(hf, p, COUNT) for p in prompts()]
        stats = llm.engine.stats().scheduler
        assert stats.num_preemptions > 0 or num_blocks > 5
        drafts, right = stats.num_drafts, stats.num_accepted_drafts
        assert right > (0.7 if num_blocks > 5 else 0.2) * drafts > 0
        llm.loop.call(llm.engine.scheduler.check_integrity)
    finally:
        llm.close()


def test_a_draft_model_for_windows_alone_keeps_keys(tmp_path):
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    write_checkpoint(tmp_path / "latents", "deepseek", has_tokenizer=False)
    with pytest.raises(ValueError, match="the draft model must keep keys and values in every"):
        LLM(tmp_path, device="cpu", speculative=DraftModel(tmp_path / "latents"))


def test_all_steps_are_compiled(saved):
    """A list of operations knows windows, in one group or several, latents and mixtures."""
    _, directory, _ = saved
    llm = LLM(directory, device="cpu", num_blocks=30)
    try:
        stats = llm.engine.stats()
        assert isinstance(llm.engine.runner, CompiledRunner)
        assert stats.why_not_compiled == ""
    finally:
        llm.close()


@pytest.mark.parametrize("case", ["qwen2_layer_types", "qwen2_second_layer_window"])
def test_the_compiled_list_is_cut_where_the_group_changes(tmp_path, case):
    write_checkpoint(tmp_path, case, has_tokenizer=False)
    model = load_model(tmp_path)
    model.pack_for_inference()
    spec = cache_spec(model.config, 4, model.dtype)
    storage = KVStorage(spec, 8)
    assert why_not(model, storage) is None
    runner = runner_for(model, storage)
    groups = [group for _, _, group in runner._segments]
    expected = [g for i, g in enumerate(spec.group_of) if i == 0 or g != spec.group_of[i - 1]]
    assert groups == expected
    edges = [edge for first, end, _ in runner._segments for edge in (first, end)]
    assert edges[0] == 0
    assert edges[1:-1:2] == edges[2::2]
    assert edges[-1] == len(runner.program)


def test_latents_in_4_bits_are_refused(tmp_path):
    write_checkpoint(tmp_path, "deepseek", has_tokenizer=False)
    with pytest.raises(ValueError, match="kv_cache_dtype must be .* with latents, got int4"):
        LLM(tmp_path, device="cpu", block_size=4, kv_cache_dtype="int4", num_blocks=60)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_latents_in_8_bits_and_their_copies(tmp_path, dtype):
    """The tokens of samples are those that each would have alone, blocks being copied."""
    write_checkpoint(tmp_path, "deepseek", has_tokenizer=False)
    llm = LLM(tmp_path, device="cpu", block_size=4, kv_cache_dtype=dtype, num_blocks=60)
    try:
        spec = llm.engine.runner.storage.spec
        assert isinstance(spec.kv, LatentSpec)
        assert spec.bytes_per_token == 2 * (24 + 8 + 8)
        assert llm.engine.stats().cache_bytes_per_token == spec.bytes_per_token
        prompt = asked(prompts()[:1])
        together = SamplingParams(n=4, seed=3, max_tokens=COUNT, ignore_eos=True)
        [wide] = llm.generate(prompt, together)
        [again] = llm.generate(prompt, together)
        texts = [tuple(sample.token_ids) for sample in wide.outputs]
        assert texts == [tuple(sample.token_ids) for sample in again.outputs]
        assert len(set(texts)) == 4
        top = SamplingParams(n=3, top_k=1, max_tokens=COUNT, ignore_eos=True)
        [greedy] = llm.generate(prompt, GREEDY)
        for sample in llm.generate(prompt, top)[0].outputs:
            assert sample.token_ids == greedy.outputs[0].token_ids
    finally:
        llm.close()


def test_a_window_that_nothing_outgrows_is_none(tmp_path):
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    config = load_model(tmp_path).config
    assert cache_spec(config, 4, torch.float32, 7).is_plain
    assert cache_spec(config, 4, torch.float32, 8).windows == (7,)
    assert cache_spec(config, 4, torch.float32).windows == (7,)


def device_engine(directory, device, *, overlap, dtype="auto", num_blocks=60, **settings):
    model = load_model(directory, dtype=dtype, device=torch.device(device))
    spec = cache_spec(model.config, 4, model.dtype, 200)
    storage = KVStorage(spec, [num_blocks] * len(spec.groups), device)
    for part in storage.parts:
        for tensor in part.whole:
            tensor.fill_(float("nan"))  # memory that nobody has written to
    runner = DeviceRunner(model, storage, max_num_seqs=5, max_model_len=200)
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 200} | settings
    scheduler = Scheduler(storage.counts, 4, windows=spec.windows, **limits)
    return Engine(scheduler, runner, overlap=overlap)


def run(engine, samplings):
    for i, (prompt, sampling) in enumerate(zip(prompts(), samplings, strict=True)):
        engine.add_request(Request(str(i), prompt, sampling))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for event in engine.step():
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).append(event.token.token_id)
        engine.scheduler.check_integrity()
    assert engine.stats().scheduler.blocks_used == 0
    return tokens


def drawn():
    return [
        SamplingParams(n=1 + i % 3, temperature=1.1, seed=i, max_tokens=COUNT, ignore_eos=True)
        for i in range(len(prompts()))
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [60, 24])
def test_rows_on_a_device_give_transformers_tokens(saved, overlap, num_blocks):
    """On a CPU, where a step is computed op by op; with few blocks sequences are preempted."""
    _, directory, expected = saved
    engine = device_engine(directory, "cpu", overlap=overlap, num_blocks=num_blocks)
    tokens = run(engine, [GREEDY] * len(expected))
    assert [tokens[str(i), 0] for i in range(len(expected))] == expected
    assert all(step.ctx.group_of == engine.runner.storage.spec.group_of
               for step in engine.runner.steps.values())  # fmt: skip


def test_a_steady_decode_sends_fresh_blocks_only(saved):
    """Beside a word a row and group when blocks begin, nothing, also while windows pass others."""
    _, directory, _ = saved
    engine = device_engine(directory, "cpu", overlap=False)
    num_groups = len(engine.runner.storage.parts)
    steady = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    for i, prompt in enumerate(prompts()[:4]):
        engine.add_request(Request(str(i), prompt, steady))
    for _ in range(7):
        engine.step()
    before = engine.runner.rows.num_bytes_sent
    for _ in range(8):
        engine.step()
    # Four sequences of different lengths begin two blocks each: at most eight steps send a word.
    assert engine.runner.rows.num_bytes_sent - before <= 8 * num_groups * 4 * 4
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_failed_once_is_run_again_with_the_blocks_it_was_told(saved, overlap):
    """Also where the step behind it has let go of what this one's window shows."""
    _, directory, expected = saved
    engine = device_engine(directory, "cpu", overlap=overlap)
    submit, count = engine.runner.submit, iter(range(10**6))

    def failing(batch):
        if len(batch.sequences) > 1 and next(count) % 6 == 5:  # one alone would end
            raise RuntimeError("once")
        return submit(batch)

    engine.runner.submit = failing
    tokens = run(engine, [GREEDY] * len(expected))
    assert [tokens[str(i), 0] for i in range(len(expected))] == expected
    assert next(count) > 12


def test_beams_fork_and_are_dropped_in_all_groups(saved):
    """Those of transformers, and the same where beams must make way for one another."""
    _, directory, _ = saved
    hf = AutoModelForCausalLM.from_pretrained(directory).eval()
    chosen = [prompts()[i] for i in (0, 3, 5)]
    for num_blocks in (400, 30):
        llm = LLM(directory, device="cpu", block_size=4, num_blocks=num_blocks, max_num_seqs=4)
        try:
            params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
            for prompt, output in zip(chosen, llm.generate(asked(chosen), params), strict=True):
                ids = torch.tensor([prompt])
                with torch.no_grad():
                    whole = hf.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
                        do_sample=False, num_beams=3, eos_token_id=-1, pad_token_id=0,
                    )  # fmt: skip
                assert list(output.outputs[0].token_ids) == whole[0, len(prompt) :].tolist()
        finally:
            llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_equals_the_eager_one_bit_for_bit(saved, dtype, monkeypatch):
    case, directory, _ = saved
    monkeypatch.setattr(device_runner, "DecodeStep", partial(DecodeStep, keeps_logits=True))
    found = []
    for graphs in (False, True):
        engine = device_engine(directory, "cuda", overlap=True, dtype=dtype)
        for part in engine.runner.storage.parts:
            for tensor in part.whole:
                tensor.zero_()  # what warm-up steps read
        if graphs:
            prepare(engine.runner, max_num_batched_tokens=32, is_lazy=False)
            assert all(step.is_captured for step in engine.runner.steps.values())
        logits = []
        decode = engine.runner._decode

        def noting(batch, adjusts, decode=decode, runner=engine.runner, logits=logits):
            handle = decode(batch, adjusts)
            bucket = next(b for b in runner.buckets if b >= runner.rows.num_rows)
            step = runner.steps[bucket]
            torch.cuda.synchronize()
            rows = {run.seq_id: row for run, row in zip(
                batch.sequences, handle._rows, strict=True)}  # fmt: skip
            logits.append({i: step.logits[row].clone().cpu() for i, row in rows.items()})
            return handle

        engine.runner._decode = noting
        tokens = run(engine, drawn())
        found.append((tokens, logits))
    (eager, eager_logits), (captured, captured_logits) = found
    assert captured == eager
    by_run = [
        {i: [step[i] for step in logits if i in step] for i in range(12)}
        for logits in (eager_logits, captured_logits)
    ]
    for i in by_run[0]:
        for one, other in zip(by_run[0][i], by_run[1][i], strict=False):
            assert torch.equal(one, other), (case, i)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_gpu_gives_transformers_tokens(saved, graphs):
    _, directory, expected = saved
    llm = LLM(
        directory, device="cuda", graphs=graphs, block_size=16, num_blocks=400, max_num_seqs=8,
        max_num_batched_tokens=64, max_model_len=200,
    )  # fmt: skip
    try:
        for _ in range(2):  # cold and warm
            assert tokens_of(llm.generate(asked(prompts()), GREEDY)) == expected
        assert graphs == "off" or llm.engine.runner.compilations.names == []
    finally:
        llm.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batch_invariance_holds_in_chunks_and_in_any_batch(saved, device):
    _, directory, _ = saved
    texts = []
    for budget, num_seqs in ((8, 2), (64, 8)):
        llm = LLM(
            directory, device=device, dtype="bfloat16", batch_invariant=True, num_blocks=400,
            max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=200,
        )  # fmt: skip
        try:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=COUNT, logprobs=0, ignore_eos=True
            )
            outputs = llm.generate(asked(prompts()), sampling)
            texts.append([[list(p.values()) for p in o.outputs[0].logprobs] for o in outputs])
        finally:
            llm.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("case", "kind"), [("deepseek", "latents"), ("mistral_window", "windows")])
def test_trees_of_guesses_are_refused_where_attention_takes_no_mask(tmp_path, case, kind):
    """Latent attention would let the rows of a branch see those of another: other tokens."""
    write_checkpoint(tmp_path, case, has_tokenizer=False)
    trees = PromptLookup(5, min_ngram=1, is_adaptive=False, num_branches=3)
    with pytest.raises(ValueError, match=f"num_branches must be 1 for a model with {kind}"):
        LLM(tmp_path, device="cpu", batch_invariant=False, speculative=trees)


def test_stats_and_picture_are_of_all_groups(tmp_path):
    """The fullest group says how full the cache is; known blocks hang on those before them."""
    write_checkpoint(tmp_path, "qwen2_second_layer_window", has_tokenizer=False)
    llm = LLM(tmp_path, device="cpu", block_size=4, num_blocks=40)
    try:
        llm.generate(asked(prompts()[:1]), GREEDY)
        told = llm.engine.picture()
        assert len(told["known"]) > 2
        assert told["parents"].count(-1) == 1  # one text, one tree
        stats = llm.engine.stats().scheduler
        assert stats.used_fraction == 0
        assert replace(stats, blocks_used=4, other_groups=((30, 40),)).used_fraction == 0.75
    finally:
        llm.close()


def test_ages_are_of_blocks_that_are_there(tmp_path):
    """A hit names -1 where its window has passed a block, which has no age."""
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    llm = LLM(tmp_path, device="cpu", block_size=4, num_blocks=80)
    try:
        for _ in range(3):
            llm.generate(asked(prompts()[:1]), GREEDY)
        events = llm.engine.trace()
        hits = [e["blocks"][: e["num_found"]] for e in events if e["kind"] == "admit"]
        assert sum(blocks.count(-1) for blocks in hits) > 0
        found = sum(block >= 0 for blocks in hits for block in blocks)
        assert sum(llm.engine.stats().scheduler.block_reuse_gap.counts) == found
    finally:
        llm.close()
