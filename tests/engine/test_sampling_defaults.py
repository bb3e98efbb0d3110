"""A model's generation_config.json is what a call without params asks for, as in vLLM."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_defaults import sampling_defaults
from tilewise.engine.settings import packaged_model
from tilewise.errors import CheckpointError

QWEN = {
    "bos_token_id": 5, "do_sample": True, "eos_token_id": [7, 5], "pad_token_id": 5,
    "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "transformers_version": "4.37.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        (QWEN, {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ({"min_p": 0.1, "max_new_tokens": 40}, {"min_p": 0.1, "max_tokens": 40}),
        ({**QWEN, "do_sample": False}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"temperature": None, "num_beams": 1, "suppress_tokens": None, "typical_p": 1.0}, {}),
        ({"_from_model_config": True, "max_length": 20, "guidance_scale": 1}, {}),
    ],
)
def test_fields_become_arguments(tmp_path, given, found):
    (tmp_path / "generation_config.json").write_text(json.dumps(given), encoding="utf-8-sig")
    assert sampling_defaults(tmp_path) == found


def test_no_file_says_nothing(tmp_path):
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    "given", [{"no_repeat_ngram_size": 3}, {"suppress_tokens": [4]}, {"num_beams": 4}, {"top_z": 1}]
)
def test_other_ways_to_draw_are_named(tmp_path, given):
    (tmp_path / "generation_config.json").write_text(json.dumps({**QWEN, **given}))
    [name] = given
    with pytest.warns(UserWarning, match=f"generation_config.json has fields .* out: '{name}'$"):
        assert sampling_defaults(tmp_path)["top_k"] == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json must be valid JSON"),
        ("[]", "generation_config.json must be a JSON object"),
        ('{"temperature": -1}', "must be usable, got: temperature must be finite and at least 0"),
        ('{"top_p": "x"}', "must be usable, got: top_p must be"),
        ('{"do_sample": "no"}', "do_sample must be true or false, got 'no'"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        sampling_defaults(tmp_path)


def test_a_call_without_params_draws_as_the_model_says(tmp_path):
    shutil.copytree(packaged_model(), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": False, "eos_token_id": 0, "max_new_tokens": 5}))
    with LLM(tmp_path, device="cpu", num_blocks=16, max_num_seqs=2) as llm:
        assert llm.default_params == SamplingParams(temperature=0.0, max_tokens=5)
        greedy = SamplingParams(temperature=0.0, max_tokens=5)
        [wanted] = llm.generate("Once upon", greedy)
        outputs = llm.generate(["Once upon"] * 2)
        assert [o.outputs[0].token_ids for o in outputs] == [wanted.outputs[0].token_ids] * 2
        assert "".join(llm.stream("Once upon")) == wanted.outputs[0].text

        async def last():
            async for output in AsyncLLM(llm).generate("Once upon"):
                text = output.outputs[0].text
            return text

        assert asyncio.run(last()) == wanted.outputs[0].text
