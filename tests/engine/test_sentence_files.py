"""An embedding model is pooled as its makers say in the files of sentence-transformers."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.sentence_files import read_sentence_files
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
        (None, None),
        (modes("lasttoken"), "last"),
        (modes("mean_tokens"), "mean"),
        (modes(), None),
        (modes("cls_token"), "cls"),
        (modes("max_tokens"), "max"),
        (modes("weightedmean_tokens"), "weightedmean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_what_the_file_says_is_read(tmp_path, config, pooling):
    if config is not None:
        write(tmp_path, config)
    assert read_sentence_files(tmp_path).pooling == pooling


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (modes("mean_tokens", "max_tokens"), "pooling_mode_mean_tokens, pooling_mode_max_tokens"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len_tokens"),
    ],
)
def test_other_poolings_are_refused(tmp_path, config, named):
    write(tmp_path, config)
    message = f"1_Pooling/config.json must be one of cls, last, max, mean, .*, got {named}$"
    with pytest.raises(CheckpointError, match=message):
        read_sentence_files(tmp_path)


def write_modules(directory, *kinds):
    modules = [{"type": f"a.b.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))


def test_layers_behind_and_prompts_are_read(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", "Dropout", "Dense", "Normalize")
    write(tmp_path, modes("cls_token"), "1_Pooling")
    write(tmp_path, {"out_features": 7, "bias": False}, "3_Dense")
    prompts = {"prompts": {"a": "x: "}, "default_prompt_name": "a"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    found = read_sentence_files(tmp_path)
    dense, unit = found.stages
    assert (dense.size, dense.bias, dense.activation, dense.folder) == (7, None, "tanh", "3_Dense")
    assert (found.pooling, unit.kind) == ("cls", "unit")
    assert (found.prompts, found.default_prompt) == ({"a": "x: "}, "a")
    write_modules(tmp_path, "Transformer", "LogitScore")
    write(tmp_path, {"true_token_id": 5, "false_token_id": 4}, "1_LogitScore")
    assert read_sentence_files(tmp_path).score_ids == (5, 4)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("LSTM", {}, "must be of Transformer, Pooling, .*, got 'LSTM'"),
        ("Pooling", {"include_prompt": False}, "include_prompt of 0_Pooling/.* must be true"),
        ("Dense", {"out_features": 2, "activation_function": "torch.nn.Cube"}, "activation_functi"),
        ("Dense", {}, "must hold out_features, got none"),
        ("LogitScore", {}, "must hold true_token_id, got"),
    ],
)
def test_modules_that_are_not_built_are_refused(tmp_path, kind, config, message):
    write_modules(tmp_path, kind)
    write(tmp_path, config, f"0_{kind}")
    with pytest.raises(CheckpointError, match=message):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"prompts": ["a"]}, {"default_prompt_name": "b"}, {"similarity_fn_name": "taxi"}]
)
def test_prompts_that_are_no_texts_are_refused(tmp_path, wrong):
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": {"a": "x"}} | wrong))
    with pytest.raises(CheckpointError, match="config_sentence_transformers.json must be"):
        read_sentence_files(tmp_path)


def test_the_module_that_pools_is_found_by_its_type(tmp_path):
    write(tmp_path, modes("lasttoken"), "2_Pool")
    write(tmp_path, modes("cls_token"), "1_Pooling")
    kind = "sentence_transformers.models."
    modules = [{"type": f"{kind}Transformer", "path": ""}, {"type": f"{kind}Pooling"}]
    file = tmp_path / "modules.json"
    file.write_text(json.dumps([modules[0], {**modules[1], "path": "2_Pool"}]))
    assert read_sentence_files(tmp_path).pooling == "last"
    for path in ("../x", "/etc"):
        file.write_text(json.dumps([{**modules[1], "path": path}]))
        with pytest.raises(CheckpointError, match="must have paths below it"):
            read_sentence_files(tmp_path)
    file.write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="must be a list of modules with type and path"):
        read_sentence_files(tmp_path)


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
