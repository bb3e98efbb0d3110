"""Moving a step's blocks: the order of out, in, copies and writes, on each runner."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.test_engine import CacheReader, expected_tokens
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tables.host_cache import HostCache

SPEC = CacheSpec(3, 4, KVSpec(2, 8, 6, torch.bfloat16))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_over(*blocks: int) -> ScheduledSequence:
    return ScheduledSequence(0, (1,), 4 * len(blocks) - 1, blocks, 1, SamplingParams(), (0,))


def bits(storage: KVStorage, block: int) -> list[torch.Tensor]:
    shape = (SPEC.num_layers, storage.num_blocks, -1)
    return [t.view(torch.int16).view(shape)[:, block].cpu().clone() for t in storage.whole]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=DEVICES)
def host(request) -> HostCache:
    storage = KVStorage(SPEC, 6, request.param)
    for tensor in storage.whole:
        raw = tensor.view(torch.int16)
        raw.copy_(torch.randint(-100, 100, raw.shape, dtype=torch.int16))
    return HostCache(storage, 5)


def test_blocks_go_out_before_others_come_in_to_their_places(host):
    kept = bits(host.storage, 2)
    host.move(Batch((run_over(5),), swap_out=((2, 0), (3, 1))))
    for tensor in host.storage.whole:
        tensor.zero_()
    host.move(Batch((run_over(2),), swap_out=((2, 3),), swap_in=((0, 2),)))
    assert same(bits(host.storage, 2), kept)
    host.move(Batch((run_over(2),)))
    assert not any(t.any() for t in bits(host.blocks, 3))


def test_a_slot_that_is_filled_in_a_step_may_come_back_in_it(host):
    kept = bits(host.storage, 1)
    host.move(Batch((run_over(4),), swap_out=((1, 2),), swap_in=((2, 4),)))
    assert same(bits(host.storage, 4), kept)


def test_what_is_read_can_be_written_again_elsewhere(host):
    host.move(Batch((run_over(5),), swap_out=((2, 0),)))
    arrays = host.read(0)
    host.write(4, arrays)
    assert [a.nbytes for a in arrays] == host.sizes()
    assert sum(host.sizes()) == SPEC.bytes_per_block
    assert same(bits(host.blocks, 4), bits(host.storage, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_each_group_of_layers_moves_blocks_of_its_own(device):
    spec = CacheSpec.of_windows(4, SPEC.kv, [None, 5, None])
    storage = KVStorage(spec, [6, 4], device)
    for tensor in (t for part in storage.parts for t in part.whole):
        raw = tensor.view(torch.int16)
        raw.copy_(torch.randint(-100, 100, raw.shape, dtype=torch.int16))
    host = HostCache(storage, (5, 3))
    assert host.group_shares == (2 / 3, 1 / 3)

    def block_of(group: int, block: int) -> list[torch.Tensor]:
        part = storage.parts[group]
        shape = (part.spec.num_layers, part.num_blocks, -1)
        return [t.view(torch.int16).view(shape)[:, block].cpu().clone() for t in part.whole]

    kept = block_of(0, 5), block_of(1, 3)
    run = run_over(1)._replace(others=((run_over(2).block_ids, 0),))
    host.move(Batch((run,), swap_out=((5, 4),), other_moves=((((3, 1),), ()),)))
    host.move(Batch((run,)))
    for tensor in (t for part in storage.parts for t in part.whole):
        tensor.zero_()
    host.move(Batch((run,), swap_in=((4, 0),), other_moves=(((), ((1, 2),)),)))
    host.move(Batch((run,)))
    assert same(block_of(0, 0), kept[0])
    assert same(block_of(1, 2), kept[1])
    assert not any(t.any() for t in block_of(0, 1) + block_of(1, 3))
    assert host.measure() > 0


def test_measuring_changes_nothing(host):
    before = [bits(host.storage, block) for block in range(6)]
    assert host.measure() > 0
    assert all(same(bits(host.storage, block), was) for block, was in enumerate(before))


def engine_of(kind: str, device: str, **settings) -> Engine:
    storage = KVStorage(CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32)), 9, device)
    runner = (
        ModelRunner(CacheReader(), storage)
        if kind == "plain"
        else DeviceRunner(CacheReader(), storage, max_num_seqs=4, max_model_len=64)
    )
    runner.host = HostCache(storage, 30)
    scheduler = Scheduler(
        9, 4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_swap_blocks=30,
        preemption="swap", **settings,
    )  # fmt: skip
    return Engine(scheduler, runner, overlap=kind == "overlap")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("victim", ["newest", "cheapest"])
@pytest.mark.parametrize("kind", ["plain", "device", "overlap"])
def test_swapped_sequences_draw_the_tokens_of_each_alone(kind, victim, caching, device):
    engine = engine_of(kind, device, victim=victim, enable_prefix_caching=caching)
    rng = random.Random(3)
    prompts = {f"r{i}": [rng.randrange(50) for _ in range(rng.randrange(3, 9))] for i in range(6)}
    params = {name: SamplingParams(temperature=0.0, max_tokens=18) for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, params[name]))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for event in engine.step():
            tokens[event.request_id].append(event.token.token_id)
        engine.scheduler.check_integrity()
    for name, prompt in prompts.items():
        assert tokens[name] == expected_tokens(prompt, params[name])
    stats = engine.stats().scheduler
    assert stats.num_swapped > 0
    assert (stats.blocks_used, stats.swap_blocks_used) == (0, 0)


@pytest.mark.parametrize("num_failures", [1, 2, 3, 1000])
@pytest.mark.parametrize("kind", ["plain", "device", "overlap"])
@pytest.mark.parametrize("way", ["_out", "_in"])
def test_a_transfer_that_fails_ends_nobody_and_what_did_not_move_is_computed_again(
    monkeypatch, way, kind, num_failures
):
    engine = engine_of(kind, "cpu", enable_prefix_caching=False)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    params = SamplingParams(temperature=0.0, max_tokens=18)
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, params))
    move, failed = getattr(HostCache, way), []

    def failing(host, *moved):
        if len(failed) < num_failures:
            failed.append(moved)
            raise RuntimeError("copy failed")
        return move(host, *moved)

    monkeypatch.setattr(HostCache, way, failing)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].append(event.token.token_id)
        engine.scheduler.check_integrity()
    assert failed
    for name, prompt in prompts.items():
        assert tokens[name] == expected_tokens(prompt, params)
    assert engine.stats().scheduler.swap_blocks_used == 0


def test_a_request_that_breaks_steps_which_move_blocks_is_found_all_the_same(monkeypatch):
    """It is not the transfer: the next step moves nothing, and is run in halves."""
    engine = engine_of("plain", "cpu", enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=18)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for name, prompt in prompts.items():
        engine.add_request(Request(name, prompt, params))
    submit, moved = engine.runner.submit, []

    def breaking(batch):
        moved.extend(batch.swap_out)
        live = engine.scheduler.roster.live
        if moved and any(live[run.seq_id].request.request_id == "a" for run in batch.sequences):
            raise RuntimeError("a breaks it")
        return submit(batch)

    monkeypatch.setattr(engine.runner, "submit", breaking)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    ended = {}
    while engine.has_unfinished():
        for event in engine.step():
            if event.error is not None:
                ended[event.request_id] = str(event.error)
            else:
                tokens[event.request_id].append(event.token.token_id)
        engine.scheduler.check_integrity()
    assert moved
    assert ended == {"a": "a breaks it"}
    for name in "bc":
        assert tokens[name] == expected_tokens(prompts[name], params)


def test_explain_says_that_a_request_is_in_main_memory_and_since_when():
    engine = engine_of("plain", "cpu", enable_prefix_caching=False)
    now = [0.0]
    engine.scheduler.trace.clock = lambda: now[0]
    params = SamplingParams(temperature=0.0, max_tokens=18)
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}.items():
        engine.add_request(Request(name, prompt, params))
    while not engine.scheduler.preemption.num_swapped:
        engine.step()
    now[0] = 5.0
    told = engine.explain("c")
    assert told["state"] == "waiting"
    assert told["num_swapped_blocks"] == len(engine.scheduler.roster.waiting[0].swap_slots) > 0
    assert told["swapped_s"] == 5.0
    assert told["waits_for"].startswith("waiting: ")
    assert (engine.explain("a")["num_swapped_blocks"], engine.explain("a")["swapped_s"]) == (
        0,
        None,
    )
