"""Audit and canary: what is right is equal, and each planted corruption is found."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.adapter_files import write_adapter
from tests.models.test_state_families import make as make_state_model
from tests.models.tiny import save_hf
from tilewise.cache.prefix import PrefixCache
from tilewise.cache.states import StateStorage
from tilewise.cache.storage import KVStorage
from tilewise.engine.canary import checksum
from tilewise.engine.config import RequestTerms
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.steps.adapter_slots import AdapterSlots
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tables.host_cache import HostCache
from tilewise.engine.waiter import Waiter, raise_first
from tilewise.errors import EngineClosedError

ASKED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    "Once upon a time there was a little dog who ran to the big red ball and",
    "Once upon a time there was a little dog who ran to the big red house and",
    "The cat sat",
    "One day Tom saw a bird in the tree. The bird said",
]


def make(**settings: Any) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "block_size": 4}
    llm = LLM("story", **{**given, "audit": 1.0, **settings})
    for whole in llm.engine.runner.storage.whole:
        whole.zero_()  # a wrong place then holds numbers, of which none ends a request
    return llm


def settle(llm: LLM) -> Any:
    """Wait until all that was noted is computed again; return the engine's counters."""
    end = time.monotonic() + 60

    def is_done() -> bool:
        auditor = llm.engine.auditor
        return not auditor._waiting and not auditor.is_watching

    while not llm.loop.call(is_done):
        assert time.monotonic() < end
        time.sleep(0.002)
    return llm.engine.stats()


def test_what_is_right_is_equal_whatever_happens_to_requests(tmp_path: Any) -> None:
    folder = write_adapter(tmp_path / "a", 1)
    settings = {"num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with make(**settings, canary=1.0, enable_lora=True, lora_modules={"a": folder}) as llm:
        every = [
            ASKED,
            SamplingParams(temperature=0, max_tokens=24),
            SamplingParams(n=3, seed=1, max_tokens=12, stop=["dog", "the"]),
            SamplingParams(seed=2, max_tokens=12, logprobs=3, presence_penalty=1.0),
        ]
        llm.generate(PROMPTS, every)
        llm.generate(PROMPTS, every, lora_request="a")
        llm.generate(PROMPTS[0], SamplingParams(best_of=3, seed=2, max_tokens=8))
        llm.generate(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=4))
        llm.embed(PROMPTS[0])
        stats = settle(llm)
        assert stats.scheduler.num_preemptions
        assert stats.num_audited == 9  # of beams and embeddings nothing is drawn
        assert stats.num_blocks_checked > 20
        assert not stats.num_audits_different + stats.num_blocks_broken, llm.engine.differences


def test_answers_are_those_without_an_audit() -> None:
    answers = []
    for share in (0.0, 1.0):
        with make(audit=share) as llm:
            outputs = llm.generate(PROMPTS * 2, ASKED)
            if share:
                settle(llm)
            outputs += llm.generate(PROMPTS, ASKED)
            assert all(o.outputs[0].logprobs is None for o in outputs)
            answers.append([o.outputs[0].token_ids for o in outputs])
    assert answers[0] == answers[1]


def test_a_share_of_the_requests_is_computed_again() -> None:
    with make(audit=0.3) as llm:
        llm.generate(["The"] * 60, SamplingParams(max_tokens=2))
        assert 5 <= settle(llm).num_audited <= 35


def test_requests_that_come_run_before_what_is_computed_again() -> None:
    with make() as llm:
        llm.generate(PROMPTS * 3, ASKED)
        before = llm.engine.stats().num_audited
        llm.generate("The", SamplingParams(max_tokens=1))
        assert llm.engine.stats().num_audited <= before + 2
        settle(llm)


def test_a_request_that_comes_shares_no_step_with_what_is_computed_again() -> None:
    with make() as llm:
        real, steps = llm.engine.runner.submit, []

        def submit(batch: Any) -> Any:
            live = llm.engine.scheduler.roster.live
            steps.append({live[run.seq_id].request.request_id[:6] for run in batch.sequences})
            return real(batch)

        llm.engine.runner.submit = submit
        llm.generate(PROMPTS, ASKED)
        for _ in range(6):
            before = len(steps)
            while {"audit-"} not in steps[before:] and llm.loop.call(
                lambda: bool(llm.engine.auditor._waiting) or llm.engine.auditor.is_watching
            ):
                time.sleep(0.001)
            llm.generate("The", SamplingParams(max_tokens=3, ignore_eos=True))
        stats = settle(llm)
        llm.engine.runner.submit = real
        assert {"audit-"} in steps
        assert all(len(kinds) == 1 for kinds in steps)
        assert (stats.num_audited, stats.num_audits_forgotten) == (10, 0)
        assert not stats.num_audits_different


def test_a_step_of_a_second_computation_that_fails_is_no_difference() -> None:
    with make() as llm:
        real = llm.engine.runner.submit

        def submit(batch: Any) -> Any:
            live = llm.engine.scheduler.roster.live
            if live[batch.sequences[0].seq_id].request.request_id.startswith("audit-"):
                raise MemoryError("too large")
            return real(batch)

        llm.engine.runner.submit = submit
        llm.generate(PROMPTS[0], ASKED)
        stats = settle(llm)
        llm.engine.runner.submit = real
        assert (stats.num_audited, stats.num_audits_forgotten) == (0, 1)
        assert not stats.num_audits_different


def test_other_weights_are_no_difference() -> None:
    with make() as llm:
        llm.generate(PROMPTS * 3, ASKED)
        llm.update_weights("story")
        llm.generate(PROMPTS, ASKED)
        stats = settle(llm)
        assert stats.num_audits_forgotten
        assert stats.num_audited >= 4
        assert not stats.num_audits_different
        llm.sleep()
        llm.wake()
        llm.generate(PROMPTS, ASKED)
        assert not settle(llm).num_audits_different


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_invariant": False}, "audit must be 0 where bits depend on other requests"),
        ({"audit": 1.5}, r"audit must be in \[0, 1\], got 1.5"),
        ({"canary": -0.1}, r"canary must be in \[0, 1\]"),
    ],
)
def test_what_cannot_be_audited_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_the_checksum_sees_every_byte_and_exchanged_words() -> None:
    with make(audit=0.0, num_blocks=8) as llm:
        storage: KVStorage = llm.engine.runner.storage
        for whole in storage.whole:
            whole.copy_(torch.randn(whole.shape))
        before = [checksum(storage, block) for block in range(8)]
        assert len(set(before)) == 8
        for whole in storage.whole:
            rows = whole.view(len(llm.model.layers), storage.num_blocks, -1)
            for layer in (0, len(rows) - 1):
                kept = rows[layer, 3].clone()
                rows[layer, 3, 7] += 1e-6
                assert checksum(storage, 3) != before[3]
                rows[layer, 3] = kept
                rows[layer, 3, [0, 2, 1, 3]] = kept[[2, 0, 3, 1]]
                assert checksum(storage, 3) != before[3]
                rows[layer, 3] = kept
        assert [checksum(storage, block) for block in range(8)] == before


# ---- planted corruptions


@contextmanager
def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, change(getattr(owner, name)))
        yield


@contextmanager
def broken(llm: LLM, owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let something be wrong for requests, and right for what is computed again afterwards."""
    auditor = llm.engine.auditor
    real = auditor.next_request
    auditor.next_request = lambda: None
    with patched(owner, name, change):
        yield
    auditor.next_request = real


# Found by the audit: what a request reads of its own is wrong while it runs.
def _damage(engine: Any, act: Callable[[Any, int], None]) -> None:
    storage, seq = engine.runner.storage, engine.scheduler.roster.running[0]
    rows = [whole.view(-1, storage.num_blocks, *whole.shape[1:]) for whole in storage.whole]
    act(rows, seq.block_ids[0])


def _zero(rows: Any, block: int) -> None:
    for each in rows:
        each[:, block] = 0


def _one_value(rows: Any, block: int) -> None:
    rows[0][-1, block, 0, 0, 0] += 0.5


def _flipped_bit(rows: Any, block: int) -> None:
    flat = rows[1][2, block].view(-1).view(torch.int32)
    flat[5] ^= 1 << 22


def _other_block(rows: Any, block: int) -> None:
    for each in rows:
        each[:, block] = each[:, (block + 1) % each.shape[1]]


def _token_late(rows: Any, block: int) -> None:
    for each in rows:
        each[:, block] = each[:, block].roll(1, dims=1)


def _heads_swapped(rows: Any, block: int) -> None:
    rows[0][0, block] = rows[0][0, block].flip(1)


def _k_for_v(rows: Any, block: int) -> None:
    rows[1][0, block] = rows[0][0, block]


def _one_layer_stale(rows: Any, block: int) -> None:
    rows[0][4, block] = rows[0][3, block]


IN_THE_CACHE = [
    _zero,
    _one_value,
    _flipped_bit,
    _other_block,
    _token_late,
    _heads_swapped,
    _k_for_v,
    _one_layer_stale,
]


@pytest.mark.parametrize("act", IN_THE_CACHE, ids=lambda act: act.__name__[1:])
def test_a_block_that_changes_while_a_request_reads_it_is_found_in_that_request(
    act: Callable[[Any, int], None],
) -> None:
    with make(canary=1.0) as llm:
        real = llm.engine.step
        calls = [0]

        def step() -> Any:
            calls[0] += 1
            if calls[0] == 6:
                _damage(llm.engine, act)
            return real()

        llm.engine.step = step
        llm.generate(PROMPTS, ASKED)
        llm.engine.step = real
        stats = settle(llm)
        assert stats.num_audits_different >= 1, "found by the audit of the request itself"
        broken = llm.loop.call(lambda: llm.engine.canary.check_all(0))
        assert broken
        assert llm.engine.stats().num_blocks_broken >= 1, "found by one sweep of the canary"


@pytest.mark.parametrize(
    "act",
    # Every kind of damage is found every day, in the test above; the others of a hit are slow.
    [IN_THE_CACHE[1], *(pytest.param(a, marks=pytest.mark.slow) for a in IN_THE_CACHE[2:])],
    ids=lambda act: act.__name__[1:],
)
def test_a_cached_block_that_changes_between_requests_is_found(
    act: Callable[[Any, int], None],
) -> None:
    """A hit of a broken block: within one request that is audited, and before it by the canary."""
    with make(canary=1.0) as llm:
        llm.generate(PROMPTS[0], ASKED)
        settle(llm)

        def damage() -> None:
            storage = llm.engine.runner.storage
            rows = [w.view(-1, storage.num_blocks, *w.shape[1:]) for w in storage.whole]
            node = llm.engine.canary._watched[0][0]
            act(rows, node.blocks[0])

        llm.loop.call(damage)
        [output] = llm.generate(PROMPTS[0], ASKED)
        assert output.num_cached_tokens
        stats = settle(llm)
        assert stats.num_audits_different == 1
        llm.loop.call(lambda: llm.engine.canary.check_all(0))
        assert llm.engine.stats().num_blocks_broken >= 1


def _wrong_forward(change: Callable[[Any, Any], None]) -> Callable[[Any], Any]:
    """Return a wrapper of `decode_inputs` that changes the arrays of later steps."""

    def wrap(real: Any) -> Any:
        calls = [0]

        def decode_inputs(self: Any, batch: Any) -> Any:
            arrays = real(self, batch)
            if arrays is not None:
                calls[0] += 1
                if calls[0] == 5 and len(batch.sequences) > 1:
                    change(arrays.rows, batch)
            return arrays

        return decode_inputs

    return wrap


def _table_one_off(rows: Any, batch: Any) -> None:
    rows.table[0, 0] = (rows.table[0, 0] + 1) % 256


def _table_of_another(rows: Any, batch: Any) -> None:
    rows.table[0, :1] = rows.table[-1, :1]


def _length_one_short(rows: Any, batch: Any) -> None:
    rows.lengths[0] -= 1


def _position_one_late(rows: Any, batch: Any) -> None:
    rows.positions[0] += 1


def _slot_of_another(rows: Any, batch: Any) -> None:
    rows.slots[0] = rows.slots[-1]


def _token_of_another(rows: Any, batch: Any) -> None:
    rows.ids[0] = (rows.ids[0] + 7) % 4000


def _rows_exchanged(rows: Any, batch: Any) -> None:
    rows.ids[[0, 1]] = rows.ids[[1, 0]]


IN_A_STEP = [
    _table_one_off,
    _table_of_another,
    _length_one_short,
    _position_one_late,
    _slot_of_another,
    _token_of_another,
    _rows_exchanged,
]


@pytest.mark.parametrize("change", IN_A_STEP, ids=lambda change: change.__name__[1:])
def test_a_step_with_wrong_tables_is_found_in_one_of_its_requests(
    change: Callable[[Any, Any], None],
) -> None:
    with make() as llm, patched(CompiledRunner, "decode_inputs", _wrong_forward(change)):
        llm.generate(PROMPTS, ASKED)
        assert settle(llm).num_audits_different >= 1
        [first, *_] = llm.engine.differences
        assert first.kind == "answer"
        assert first.blocks
        assert first.neighbours
        assert first.replay["answers"][0]["token_ids"]


def _swapped_samples(real: Any) -> Any:
    calls = [0]

    def compute(self: Any, batch: Any) -> Any:
        drawn = real(self, batch)
        calls[0] += 1
        if calls[0] == 6 and len(drawn) > 1:
            drawn[0], drawn[1] = drawn[1], drawn[0]
        return drawn

    return compute


def _stale_logits(real: Any) -> Any:
    """A step whose logits are those of the step before, as a graph over an old buffer has."""
    kept: list[Any] = []

    def forward(self: Any, inputs: Any) -> Any:
        logits = real(self, inputs)
        kept.append(logits.clone())
        if len(kept) == 7 and kept[-2].shape == logits.shape:
            return kept[-2]
        return logits

    return forward


def _noisy_logits(real: Any) -> Any:
    calls = [0]

    def forward(self: Any, inputs: Any) -> Any:
        logits = real(self, inputs)
        calls[0] += 1
        if calls[0] == 6:
            logits = logits.clone()
            logits[0] *= 1 + 2.0**-12
        return logits

    return forward


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_compute", _swapped_samples),
        ("forward", _stale_logits),
        ("forward", _noisy_logits),
    ],
    ids=["a sampler's rows exchanged", "logits of the step before", "one row a little off"],
)
def test_a_step_that_gives_wrong_numbers_is_found_in_one_of_its_requests(
    name: str, change: Callable[[Any], Any]
) -> None:
    with make() as llm, patched(CompiledRunner, name, change):
        llm.generate(PROMPTS, ASKED)
        assert settle(llm).num_audits_different >= 1


def test_a_hit_across_salts_of_a_block_of_another_prompt_is_found() -> None:
    """A prefix cache that finds whatever has as many tokens."""

    def wrong(real: Any) -> Any:
        def find(self: Any, token_ids: Any, salt: str = "", *given: Any, **more: Any) -> Any:
            if salt.startswith("\0\0audit"):
                return real(self, token_ids, salt, *given, **more)
            for root in self._roots.values():
                if root.children and not root.salt.startswith("\0\0audit"):
                    node = next(iter(root.children.values()))
                    if node.blocks[0] >= 0 and len(token_ids) > 8:
                        return [node]
            return []

        return find

    with make() as llm:
        llm.generate(PROMPTS[0], ASKED, cache_salt="a")
        settle(llm)
        with patched(PrefixCache, "find", wrong):
            llm.generate(PROMPTS[3], ASKED, cache_salt="b")
            assert settle(llm).num_audits_different == 1


def _saved_late(real: Any) -> Any:
    return lambda self, places: real(self, [(slot, c, at + 1) for slot, c, at in places])


def _restored_from_another(real: Any) -> Any:
    def restore(self: Any, places: Any) -> Any:
        other = [((c + 1) % self.num_checkpoints, slot, at) for c, slot, at in places]
        return real(self, other)

    return restore


@pytest.mark.parametrize(
    ("name", "change"),
    [("save", _saved_late), ("restore", _restored_from_another)],
    ids=["one token late", "of another"],
)
def test_a_wrong_checkpoint_of_states_is_found(
    name: str, change: Callable[[Any], Any], tmp_path: Any
) -> None:
    path = save_hf(make_state_model("qwen3_5"), tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 200, "max_model_len": 256}
    prompts = [{"prompt_token_ids": [(7 * i + n) % 101 for i in range(150)]} for n in (0, 1)]
    with LLM(path, audit=1.0, **settings) as llm:
        llm.engine.runner.storage.states.checkpoints.zero_()
        with patched(StateStorage, name, change):
            llm.generate(prompts, ASKED)
            assert not settle(llm).num_audits_different
            outputs = llm.generate(prompts, ASKED)
            assert all(output.num_cached_tokens for output in outputs)
            assert settle(llm).num_audits_different >= 1


def test_a_copy_before_a_write_that_is_lost_is_found() -> None:
    def lost(real: Any) -> Any:
        return lambda self, inputs: None

    with make() as llm:
        params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
        with broken(llm, ModelRunner, "copy_all", lost):
            llm.generate(PROMPTS[0], params)
        assert settle(llm).num_audits_different >= 1


def test_an_adapter_of_another_request_is_found(tmp_path: Any) -> None:
    def exchanged(real: Any) -> Any:
        def place(self: Any, runs: Any) -> Any:
            slots = real(self, runs)
            return slots if slots is None else slots[::-1].copy()

        return place

    folders = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    with make(enable_lora=True, lora_modules=folders) as llm:
        with broken(llm, AdapterSlots, "place", exchanged):
            asked = [llm.prepare(PROMPTS[0], ASKED, RequestTerms(lora_request=n)) for n in "ab"]
            waiter = Waiter(asked)
            llm.loop.submit(*asked)
            while not waiter.is_over:
                waiter.wait()
            raise_first(asked)
        assert settle(llm).num_audits_different == 2


SWAPPED = {"num_blocks": 22, "swap_space_gib": 0.02, "preemption": "swap"}
LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


def test_a_swap_to_the_wrong_slot_is_found() -> None:
    def wrong(real: Any) -> Any:
        return lambda self, pairs, group: real(self, tuple((a, b ^ 1) for a, b in pairs), group)

    with make(**SWAPPED) as llm:
        with broken(llm, HostCache, "_out", wrong):
            llm.generate(PROMPTS, LONG)
        stats = settle(llm)
        assert stats.scheduler.num_swapped
        assert stats.num_audits_different >= 1


def test_main_memory_that_changes_while_a_request_is_swapped_out_is_found() -> None:
    def changing(real: Any) -> Any:
        def back(self: Any, pairs: Any, group: int) -> Any:
            for slot, _ in pairs:
                arrays = self.read(slot, group)
                for array in arrays:
                    array[3] ^= 16
                self.write(slot, arrays, group)
            return real(self, pairs, group)

        return back

    with make(**SWAPPED, canary=1.0) as llm:
        with broken(llm, HostCache, "_in", changing):
            llm.generate(PROMPTS, LONG)
        llm.loop.call(lambda: llm.engine.canary.check_all(0))
        stats = settle(llm)
        assert stats.num_audits_different + stats.num_blocks_broken >= 1


def test_a_file_of_another_block_with_a_good_checksum_is_found(tmp_path: Any) -> None:
    settings = {"num_blocks": 24, "swap_space_gib": 0.0005, "offload_dir": tmp_path}
    with make(audit=0.0, **settings) as first:
        first.generate(PROMPTS[0], ASKED)
        first.generate([f"{i} {PROMPTS[3]}" for i in range(12)], ASKED)
    assert list(tmp_path.rglob("*"))
    written: list[Any] = []

    def wrong(real: Any) -> Any:
        def write(self: Any, slot: int, arrays: Any, group: int = 0) -> Any:
            written.append([array.copy() for array in arrays])
            own = written[-2] if len(written) > 1 else [np.roll(array, 256) for array in arrays]
            return real(self, slot, own, group)

        return write

    with make(**settings) as second:
        with broken(second, HostCache, "write", wrong):
            [output] = second.generate(PROMPTS[0], ASKED)
            assert written, "no block came from a file"
            assert output.num_cached_tokens
        assert settle(second).num_audits_different == 1


def test_a_weight_that_changes_while_requests_run_is_found() -> None:
    with make() as llm:
        real, calls = llm.engine.step, [0]

        def step() -> Any:
            calls[0] += 1
            if calls[0] == 6:
                llm.model.layers[3].mlp.down_proj.panels.words.view(torch.int32)[1000] ^= 1 << 23
            return real()

        llm.engine.step = step
        llm.generate(PROMPTS, ASKED)
        llm.engine.step = real
        assert settle(llm).num_audits_different >= 1


def test_a_seed_that_is_anothers_is_found() -> None:
    with make() as llm:
        real = llm.engine.auditor.note

        def note(request: Any, seed: int) -> None:
            real(request, seed)
            llm.engine.scheduler.roster.requests[request.request_id][0].seed = seed ^ 1

        llm.engine.auditor.note = note
        llm.generate(PROMPTS, ASKED)
        assert settle(llm).num_audits_different == 4


def test_the_difference_is_logged_with_all_that_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        make() as llm,
        patched(CompiledRunner, "decode_inputs", _wrong_forward(_token_of_another)),
        caplog.at_level(logging.ERROR, "tilewise.engine"),
    ):
        llm.generate(PROMPTS, ASKED)
        settle(llm)
    told = json.loads(caplog.records[0].getMessage().removeprefix("audit: "))
    assert told["request_id"].startswith("request-")
    assert "alone" in told["text"] or "differ" in told["text"]
    assert told["steps"][0] <= told["steps"][1]
    assert set(told["replay"]) == {
        "prompt_token_ids", "drawn_seed", "temperature", "answers"
    }  # fmt: skip


def test_an_engine_that_stops_at_a_difference_takes_no_more_requests() -> None:
    llm = make(audit_stop=True)
    with patched(CompiledRunner, "decode_inputs", _wrong_forward(_token_of_another)):
        llm.generate(PROMPTS, ASKED)
        end = time.monotonic() + 60
        while llm.loop.is_alive and time.monotonic() < end:
            time.sleep(0.002)
    assert not llm.loop.is_alive
    with pytest.raises(EngineClosedError, match="must have found no difference"):
        llm.generate("The", ASKED)
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("act", [_one_value, _other_block], ids=lambda act: act.__name__[1:])
def test_on_a_gpu_what_is_right_is_equal_and_a_changed_block_is_found(
    act: Callable[[Any, int], None],
) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "graphs": "lazy"}
    with make(**settings, batch_invariant=True, canary=1.0) as llm:
        long = [f"{text} {text} {text}" for text in PROMPTS]
        llm.generate(long * 4, ASKED)
        stats = settle(llm)
        assert stats.num_audited == 16
        assert not stats.num_audits_different + stats.num_blocks_broken, llm.engine.differences

        def damage() -> None:
            storage = llm.engine.runner.storage
            rows = [w.view(-1, storage.num_blocks, *w.shape[1:]) for w in storage.whole]
            act(rows, llm.engine.canary._watched[0][0].blocks[0])

        llm.loop.call(damage)
        llm.generate(long, ASKED)
        assert settle(llm).num_audits_different >= 1
        llm.loop.call(lambda: llm.engine.canary.check_all(0))
        assert llm.engine.stats().num_blocks_broken >= 1
