"""Adapters that are cut as their layers are: the tokens of one process from two."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapter_files import SITES, write_adapter
from tests.engine.tensor_parallel.conftest import SETTINGS
from tilewise.distributed.shards import shard_adapter, shard_config
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import packaged_model
from tilewise.engine.tensor_parallel.runner import ParallelRunner
from tilewise.errors import CheckpointError
from tilewise.models.adapters import adapter_sites, read_adapter
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (9, 30)]


def test_parts_of_the_ranks_add_up_to_the_adapter(tmp_path: Path) -> None:
    config = read_config(packaged_model())
    whole = read_adapter(write_adapter(tmp_path / "a", 1), SITES)
    parts = [shard_adapter(whole, config, rank, 2) for rank in range(2)]
    shards = adapter_sites(empty_model(shard_config(config, 2), "float32", "meta"))
    sizes = {(site.module, site.first): site for site in shards.values()}
    for module, wholes in whole.parts.items():
        for place, part in enumerate(wholes):
            ranks = [each.parts[module][place] for each in parts]
            for rank in ranks:
                site = sizes[module, rank.first]
                assert rank.a.shape[1] == site.in_features
                assert rank.b.shape[0] == site.out_features
            if module.endswith(("o_proj", "down_proj")):
                joined = torch.cat([rank.delta() for rank in ranks], 1)
            else:
                joined = torch.cat([rank.delta() for rank in ranks], 0)
            assert torch.equal(joined, part.delta())


def noted(runner: ParallelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the adapters that the workers are told to forget."""
    ended: list[int] = []
    forget = runner.forget_adapter

    def note(number: int) -> None:
        ended.append(number)
        forget(number)

    monkeypatch.setattr(runner, "forget_adapter", note)
    return ended


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = adapter_sites(empty_model(read_config(checkpoint), "float32", "meta"))
    folders = {name: write_adapter(tmp_path / name, i, sites=sites) for i, name in enumerate("ab")}
    settings: dict[str, Any] = SETTINGS | {"enable_lora": True, "lora_modules": {"a": folders["a"]}}
    found = []
    for size in (1, 2):
        with LLM(checkpoint, tensor_parallel_size=size, **settings) as llm:
            llm.load_lora_adapter("b", folders["b"])
            found.append(
                [
                    [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, lora_request=n)]
                    for n in ("", "a", "b")
                ]
            )
            if size == 2:
                runner = llm.engine.runner
                assert isinstance(runner, ParallelRunner)
                with pytest.raises(CheckpointError):
                    llm.load_lora_adapter("c", tmp_path / "nothing")
                ended = noted(runner, monkeypatch)
                llm.unload_lora_adapter("b")
                for name in ("", "a"):  # a step is remembered until the next one
                    llm.generate(PROMPTS[0], GREEDY, lora_request=name)
                gc.collect()
                assert ended == [2]
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0]}) == 3
