"""LLM over rows and with overlap is LLM step by step: texts, stops, logprobs, failures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.engine.checkpoint import VOCAB, greedy_tokens, write_checkpoint
from tilewise.engine.captured import runner as device_runner
from tilewise.engine.captured.batch import DeviceBatch
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.steps.step_logprobs import StepLogprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompts(count=6):
    draw = random.Random(0)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 44))] for _ in range(count)]


def as_ids(given):
    return [{"prompt_token_ids": prompt} for prompt in given]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, write_checkpoint(path, "qwen3_norm_wide_heads")


def make(directory, *, on_device, batch_invariant=False, **settings):
    """An LLM on a CPU, whose engine keeps its batch in rows and overlaps if asked to."""
    settings = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 6, **settings}
    llm = LLM(directory, device="cpu", **settings)
    if on_device:
        runner = DeviceRunner(
            llm.model,
            llm.engine.runner.storage,
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=llm.engine.scheduler.limits.max_model_len,
            batch_invariant=batch_invariant,
        )
        llm.engine = Engine(llm.loop.new_scheduler(), runner, overlap=True)
    return llm


def assert_idle(llm):
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().scheduler.blocks_used == 0
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 64), (200, 7), (20, 32)])
def test_greedy_tokens_are_those_of_transformers(checkpoint, num_blocks, budget):
    directory, reference = checkpoint
    llm = make(directory, on_device=True, num_blocks=num_blocks, max_num_batched_tokens=budget)
    outputs = llm.generate(as_ids(prompts()), GREEDY)
    wanted = [greedy_tokens(reference, prompt, 24) for prompt in prompts()]
    assert [o.outputs[0].token_ids for o in outputs] == wanted
    assert_idle(llm)
    assert (llm.engine.stats().scheduler.num_preemptions > 0) == (num_blocks == 20)


def test_texts_stops_samples_and_logprobs_are_the_same(checkpoint):
    directory, _ = checkpoint
    plain = make(directory, on_device=False)
    ends = plain.generate(as_ids(prompts()), SamplingParams(seed=1, max_tokens=30))
    letters = [o.outputs[0].text[5:7] or "x" for o in ends]
    params = [
        SamplingParams(seed=1, max_tokens=30, stop=letters[0]),
        SamplingParams(seed=2, max_tokens=9, n=4, logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=0),
        SamplingParams(seed=3, max_tokens=30, stop_token_ids=list(range(100, 140))),
        SamplingParams(seed=4, max_tokens=1, n=2, top_k=5),
        SamplingParams(seed=5, max_tokens=20, top_p=0.7, min_p=0.1, temperature=1.4),
    ]
    found = []
    for on_device in (False, True):
        llm = make(directory, on_device=on_device)
        outputs = llm.generate(as_ids(prompts()), params)
        assert_idle(llm)
        found.append([sample for output in outputs for sample in output.outputs])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert list(mine) == list(theirs)
            assert all(math.isclose(mine[i], theirs[i], abs_tol=1e-4) for i in mine)
    assert any(sample.finish_reason == "stop" for sample in found[0])


@pytest.mark.parametrize("seats", [32, 3])
def test_beams_are_the_same(checkpoint, seats):
    directory, _ = checkpoint
    ends = list(range(0, VOCAB, 5))
    params = [
        BeamSearchParams(4, max_tokens=12, stop_token_ids=ends),
        BeamSearchParams(24, max_tokens=6),
        GREEDY,
    ]
    found = []
    for on_device in (False, True):
        llm = make(directory, on_device=on_device, max_num_seqs=seats)
        found.append(llm.generate(as_ids(prompts(3)), params))
        assert_idle(llm)
    for one, other in zip(*found, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        for mine, theirs in zip(one.outputs[:-1], other.outputs[:-1], strict=True):
            assert math.isclose(mine.cumulative_logprob, theirs.cumulative_logprob, abs_tol=1e-4)


def test_steps_of_a_search_read_log_probabilities_to_the_same_memory_in_turn(
    checkpoint, monkeypatch
):
    places, asked = [], []
    room_of, asking_of = StepLogprobs.room_of, StepLogprobs.asking

    def noted_room(self, found, place):
        room = room_of(self, found, place)
        assert [x.shape for x in room] == [x.shape for x in found]
        places.append((place, *(x.data_ptr() for x in room)))
        return room

    def noted_asking(self, samplers, rows):
        asking = asking_of(self, samplers, rows)
        assert sorted(asking.places) == list(range(len(samplers)))
        assert asking.rows.tolist() == [rows[i] for i in asking.places]
        asked.append(asking.rows.data_ptr())
        return asking

    monkeypatch.setattr(StepLogprobs, "room_of", noted_room)
    monkeypatch.setattr(StepLogprobs, "asking", noted_asking)
    llm = make(checkpoint[0], on_device=True)
    ids = llm.generate(as_ids(prompts(1)), BeamSearchParams(4, max_tokens=20))[0].outputs
    assert len(ids[0].token_ids) == 20
    assert len(places) > 3 * device_runner.RING
    assert len(set(places)) == device_runner.RING
    assert len(set(asked)) <= 4 < len(asked)  # the same few rows, sent once


def test_a_wide_search_beside_it_changes_no_bit_of_a_samples_log_probabilities(checkpoint):
    llm = make(checkpoint[0], on_device=True, batch_invariant=True, max_num_seqs=32)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=20)
    wide = BeamSearchParams(21, max_tokens=40, ignore_eos=True)
    first, second = as_ids(prompts(2))
    [alone] = llm.generate(first, params)
    assert llm.generate([first, second], [params, wide])[0].outputs == alone.outputs


def test_log_probabilities_that_are_read_late_are_those_of_their_step(checkpoint, monkeypatch):
    """As many steps are unread as have a place; more and fewer are asked for in turn."""
    directory, _ = checkpoint
    recorded = []

    def keeping(self, batch):
        handle = submit(self, batch)
        kept = [s._replace(block_ids=list(s.block_ids)) for s in batch.sequences]
        recorded.append((replace(batch, sequences=tuple(kept)), handle.result()))
        return handle

    submit = DeviceRunner.submit
    seats = {"max_num_seqs": 40, "num_blocks": 400}
    llm = make(directory, on_device=True, **seats)
    llm.engine.overlap, llm.engine.scheduler.max_in_flight = False, 1
    monkeypatch.setattr(DeviceRunner, "submit", keeping)
    llm.generate(
        as_ids(prompts(3)),
        [
            SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
            SamplingParams(seed=2, max_tokens=9, ignore_eos=True, logprobs=20),
            BeamSearchParams(30, max_tokens=5),  # more columns than a sample may ask for
        ],
    )
    monkeypatch.setattr(DeviceRunner, "submit", submit)
    again, unread = make(directory, on_device=True, **seats).engine.runner, []

    def read():
        handle, wanted = unread.pop(0)
        found = handle.result()
        assert found == wanted
        return sum(token.logprob is not None for tokens in found for token in tokens)

    num_read = 0
    for batch, wanted in recorded:
        unread.append((again.submit(batch), wanted))
        if len(unread) == device_runner.RING:
            num_read += read()
    num_read += sum(read() for _ in range(len(unread)))
    assert num_read > 24 + 9
    decodes = [b for b, _ in recorded if all(len(s.token_ids) == 1 for s in b.sequences)]
    assert len(decodes) > 5 * device_runner.RING


def test_a_row_that_goes_on_with_what_it_drew_itself_shows(checkpoint, monkeypatch):
    directory, _ = checkpoint
    follow = DeviceBatch._follow_decode

    def trusting(rows, batch, changes):
        sequences = tuple(run._replace(is_chosen=False) for run in batch.sequences)
        follow(rows, replace(batch, sequences=sequences), changes)

    # The best token of a beam goes on in its row, but for those that end.
    params = BeamSearchParams(4, max_tokens=12, stop_token_ids=list(range(0, 128, 2)))
    found = []
    for is_wrong in (False, True):
        if is_wrong:
            monkeypatch.setattr(DeviceBatch, "_follow_decode", trusting)
        llm = make(directory, on_device=True)
        outputs = llm.generate(as_ids(prompts()), params)
        found.append([c.token_ids for output in outputs for c in output.outputs])
    assert found[0] != found[1]


def test_a_stream_stops_in_time_and_a_dropped_one_leaves_nothing(checkpoint):
    directory, _ = checkpoint
    texts = []
    for on_device in (False, True):
        llm = make(directory, on_device=on_device)
        texts.append("".join(llm.stream("once upon", GREEDY)))
        stream = llm.stream("the quick", GREEDY)
        next(stream)
        stream.close()
        assert_idle(llm)
    assert texts[0] == texts[1]


def test_a_prompt_that_shares_its_beginning_gets_its_own_tokens(checkpoint):
    """Reading shared blocks once is for steps with prompts; on a CPU it is switched on by hand."""
    directory, reference = checkpoint
    beginning = prompts()[0] + [7] * 40
    given = [[*beginning, i, i + 1] for i in range(4)]
    llm = make(directory, on_device=True, max_num_batched_tokens=200)
    llm.engine.runner.sharing_tokens = 1
    llm.generate(as_ids(given[:1]), GREEDY)
    outputs = llm.generate(as_ids(given), GREEDY)
    assert all(o.num_cached_tokens >= 40 for o in outputs)
    wanted = [greedy_tokens(reference, prompt, 24) for prompt in given]
    assert [o.outputs[0].token_ids for o in outputs] == wanted


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_all_broken_end_every_request_of_their_step(
    checkpoint, monkeypatch, broken
):
    directory, reference = checkpoint
    llm = make(directory, on_device=True)
    compute, steps = llm.model.head_logits, []

    def breaking(hidden):
        steps.append(len(hidden))
        logits = compute(hidden)
        return logits.index_fill(1, torch.tensor([5]), broken) if len(steps) == 6 else logits

    monkeypatch.setattr(llm.model, "head_logits", breaking)
    with pytest.raises(FloatingPointError, match="logits must be finite"):
        llm.generate(as_ids(prompts(2)), GREEDY)
    assert_idle(llm)
    [output] = llm.generate(as_ids(prompts(1)), GREEDY)
    assert output.outputs[0].token_ids == greedy_tokens(reference, prompts(1)[0], 24)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [1, 2, 3, 6])
def test_a_step_that_fails_midway_leaves_a_clean_engine(checkpoint, monkeypatch, error, failing):
    directory, reference = checkpoint
    llm = make(directory, on_device=True)
    finish, steps, is_mended = device_runner.DeviceRunner._read, [], []

    def breaking(runner, *arguments):
        steps.append(1)
        if len(steps) >= failing and not is_mended:  # the halves of the step fail as well
            raise error("no")
        return finish(runner, *arguments)

    monkeypatch.setattr(DeviceRunner, "_read", breaking)
    with pytest.raises(error):
        llm.generate(as_ids(prompts(2)), GREEDY)
    assert_idle(llm)
    is_mended.append(True)
    outputs = llm.generate(as_ids(prompts(2)), GREEDY)
    wanted = [greedy_tokens(reference, prompt, 24) for prompt in prompts(2)]
    assert [o.outputs[0].token_ids for o in outputs] == wanted


def test_samples_of_wide_steps_are_drawn_in_parts(checkpoint, monkeypatch):
    directory, _ = checkpoint
    params = SamplingParams(n=20, seed=3, max_tokens=4)
    found = []
    for most in (VOCAB * 8, device_runner.MAX_SAMPLED):
        monkeypatch.setattr(device_runner, "MAX_SAMPLED", most)
        llm = make(directory, on_device=True, max_num_seqs=20)
        [output] = llm.generate(as_ids(prompts(1)), params)
        found.append([sample.token_ids for sample in output.outputs])
    assert found[0] == found[1]


def test_a_steady_step_makes_few_tensors(checkpoint):
    """On a GPU these are nodes of a graph; what Python sees of a step does not grow with it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    directory, _ = checkpoint

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for longest in (10, 60):
        llm = make(directory, on_device=True, max_num_batched_tokens=400)
        runner = llm.engine.runner
        for step in (runner.step_of(b) for b in runner.buckets):
            step.run = lambda: None  # stands for one replay of a graph
        runner.results.values.fill_(1)  # tokens that it left, all of finite rows
        for i in range(6):
            generation = llm.prepare({"prompt_token_ids": [5 + i] * longest}, GREEDY)
            llm.engine.add_request(generation.request)
        for _ in range(5):  # on this thread, whose calls are counted
            llm.engine.step()
        with Counter() as counter:
            for _ in range(4):
                llm.engine.step()
        counts.append(counter.calls)
    assert counts[0] == counts[1]
    assert counts[0] <= 4 * 12  # the copy of fresh blocks, that of the results, and views
