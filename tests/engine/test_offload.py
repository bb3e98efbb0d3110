"""LLM with main memory and files: the tokens of an LLM with room, and idle memory afterwards."""

from __future__ import annotations

import time

import pytest
import torch

from tests.engine.checkpoint import VOCAB, write_checkpoint
from tilewise.engine.config import EngineConfig
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.tables.block_files import BlockFiles
from tilewise.engine.tables.offload import fingerprint

PROMPTS = [
    {"prompt_token_ids": [(7 * i + j) % (VOCAB - 3) + 3 for j in range(30)]} for i in range(8)
]
PARAMS = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, n=1 + i % 2) for i in range(8)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


def answers(directory, **settings) -> tuple[LLM, list[list[list[int]]]]:
    llm = LLM(directory, device="cpu", block_size=4, max_num_seqs=8, **settings)
    outputs = llm.generate(PROMPTS, PARAMS)
    stats = llm.engine.stats().scheduler
    assert (stats.blocks_used, stats.swap_blocks_used) == (0, 0)
    return llm, [[c.token_ids for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def truth(directory):
    return answers(directory, num_blocks=400)[1]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("victim", ["newest", "cheapest"])
def test_swapping_changes_no_token(directory, truth, victim, caching):
    llm, got = answers(
        directory, num_blocks=40, swap_space_gib=0.01, preemption="swap", victim=victim,
        enable_prefix_caching=caching, long_prefill_token_threshold=16,
    )  # fmt: skip
    assert got == truth
    assert llm.engine.stats().scheduler.num_swapped > 0


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_an_order_changes_no_token(directory, truth, policy):
    assert answers(directory, num_blocks=40, scheduling_policy=policy)[1] == truth


def test_close_writes_the_blocks_that_wait_for_their_files(directory, tmp_path, monkeypatch):
    write = BlockFiles._write

    def slowly(files, *block):
        time.sleep(0.02)
        write(files, *block)

    monkeypatch.setattr(BlockFiles, "_write", slowly)
    settings = {"num_blocks": 40, "swap_space_gib": 1e-5, "offload_dir": tmp_path / "blocks"}
    llm, _ = answers(directory, **settings)
    store = llm.engine.scheduler.tables.memory.stores[0]
    waiting = len(store._waiting)
    assert waiting > 1
    assert not llm.close(timeout_s=0.001)
    assert llm.close()
    assert not store._waiting
    assert len(list((tmp_path / "blocks").iterdir())) >= waiting


def test_files_are_found_by_the_next_llm_and_not_by_another_model(directory, truth, tmp_path):
    settings = {"num_blocks": 40, "swap_space_gib": 1e-5, "offload_dir": tmp_path / "blocks"}
    llm, got = answers(directory, **settings)
    assert got == truth
    store = llm.engine.scheduler.tables.memory.stores[0]
    store.flush()
    assert store.num_bytes > 0
    again, got = answers(directory, **settings)
    assert got == truth
    assert again.engine.scheduler.tables.memory.stores[0].num_hits > 0
    other, _ = answers(directory, kv_cache_dtype="int8", **settings)
    assert other.engine.scheduler.tables.memory.stores[0].num_hits == 0


def test_four_bits_go_through_main_memory_and_files_and_prefixes_are_found(directory, tmp_path):
    """Texts over 4 bits are those of a cache that holds all at once."""
    _, alone = answers(directory, kv_cache_dtype="int4", num_blocks=400)
    settings = {"num_blocks": 40, "swap_space_gib": 1e-5, "offload_dir": tmp_path / "blocks"}
    for _ in range(2):
        llm, got = answers(directory, kv_cache_dtype="int4", **settings)
        assert got == alone
        store = llm.engine.scheduler.tables.memory.stores[0]
        store.flush()
    assert store.num_hits > 0


def test_a_fingerprint_tells_weights_apart():
    model = torch.nn.Linear(3, 3)
    before = fingerprint(model, None, "auto")
    assert fingerprint(model, None, "auto") == before
    with torch.no_grad():
        model.weight[2, 1] += 1e-3
    assert fingerprint(model, None, "auto") != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, None, 1.0), "swap_space_gib must be finite and at least 0, got -1.0"),
        ((1.0, None, float("nan")), "offload_gib must be finite, got nan"),
        ((0.0, "/x", 1.0), "swap_space_gib and offload_gib must be above 0 with an offload_dir"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(arguments, message):
    names = ("swap_space_gib", "offload_dir", "offload_gib")
    with pytest.raises(ValueError, match=message):
        EngineConfig("story", **dict(zip(names, arguments, strict=True)))


def test_llm_refuses_before_it_reads_weights(directory):
    for settings, message in (
        ({"preemption": "swap"}, "preemption must be auto or recompute without swap space"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of"),
        ({"swap_space_gib": 1e-9}, "swap_space_gib must hold at least one cache block"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(directory, device="cpu", num_blocks=10, **settings)


def test_a_reset_forgets_files_too(directory, tmp_path):
    settings = {"num_blocks": 40, "swap_space_gib": 1e-5, "offload_dir": tmp_path}
    llm, _ = answers(directory, **settings)
    llm.engine.scheduler.tables.memory.stores[0].flush()
    assert list(tmp_path.iterdir())
    assert llm.reset_prefix_cache()
    assert not list(tmp_path.iterdir())
    assert llm.engine.stats().scheduler.swap_blocks_cold == 0
    assert [o.num_cached_tokens for o in llm.generate(PROMPTS[:2], PARAMS[:2])] == [0, 0]


def test_files_of_changed_weights_are_not_those_of_the_weights_of_the_start(
    directory, truth, tmp_path
):
    """An LLM whose weights are changed in place, and one that has the first ones later."""
    settings = {"num_blocks": 40, "swap_space_gib": 1e-5, "offload_dir": tmp_path / "blocks"}
    llm, _ = answers(directory, **settings)
    with torch.inference_mode():
        llm.model.layers[0].attention.qkv_proj.panels.words.mul_(-0.5)
    assert llm.reset_prefix_cache()
    outputs = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    got, again = ([[c.token_ids for c in o.outputs] for o in found] for found in outputs)
    assert got == again
    assert got != truth  # the change is seen
    assert llm.engine.scheduler.tables.memory.stores[0].num_hits > 0  # of its own files
    assert llm.close()
    assert list((tmp_path / "blocks").iterdir())
    later, got = answers(directory, **settings)
    assert got == truth
    store = later.engine.scheduler.tables.memory.stores[0]
    assert store.num_misses > 0  # they are looked at, and refused
    assert later.close()
