"""An embedding model is pooled as its makers say in 1_Pooling/config.json."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.pooling_default import pooling_default
from tilewise.engine.settings import packaged_model
from tilewise.errors import CheckpointError

ALL = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")


def modes(*on):
    return {f"pooling_mode_{name}": name in on for name in ALL} | {"word_embedding_dimension": 8}


def write(directory, config, folder="1_Pooling"):
    (directory / folder).mkdir()
    (directory / folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (None, "mean"),
        (modes("lasttoken"), "last"),
        (modes("mean_tokens"), "mean"),
        (modes(), "mean"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_what_the_file_says_is_read(tmp_path, config, pooling):
    if config is not None:
        write(tmp_path, config)
    assert pooling_default(tmp_path) == pooling


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (modes("cls_token"), "pooling_mode_cls_token"),
        (modes("mean_tokens", "max_tokens"), "pooling_mode_mean_tokens, pooling_mode_max_tokens"),
        (modes("weightedmean_tokens"), "pooling_mode_weightedmean_tokens"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_other_poolings_are_refused(tmp_path, config, named):
    write(tmp_path, config)
    message = f"1_Pooling/config.json must be the mean or the last .*, got {named}$"
    with pytest.raises(CheckpointError, match=message):
        pooling_default(tmp_path)


def test_the_module_that_pools_is_found_by_its_type(tmp_path):
    write(tmp_path, modes("lasttoken"), "2_Pool")
    write(tmp_path, modes("cls_token"), "1_Pooling")
    kind = "sentence_transformers.models."
    modules = [{"type": f"{kind}Transformer", "path": ""}, {"type": f"{kind}Pooling"}]
    file = tmp_path / "modules.json"
    file.write_text(json.dumps([modules[0], {**modules[1], "path": "2_Pool"}]))
    assert pooling_default(tmp_path) == "last"
    for path in ("../x", "/etc"):
        file.write_text(json.dumps([{**modules[1], "path": path}]))
        with pytest.raises(CheckpointError, match="must have paths below it"):
            pooling_default(tmp_path)
    file.write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="must be a list of modules with type and path"):
        pooling_default(tmp_path)


def test_embeddings_without_a_pooling_are_those_of_the_models_own(tmp_path):
    shutil.copytree(packaged_model(), tmp_path, dirs_exist_ok=True)
    write(tmp_path, modes("lasttoken"))
    with LLM(tmp_path, device="cpu", num_blocks=8, max_num_seqs=1) as llm:
        [own], [last], [mean] = (
            llm.embed("Once upon", **given)
            for given in ({}, {"pooling": "last"}, {"pooling": "mean"})
        )
        streamed = asyncio.run(AsyncLLM(llm).embed("Once upon"))
    assert own.pooling == streamed.pooling == "last"
    assert own.embedding == streamed.embedding
    assert own.embedding == last.embedding != mean.embedding
