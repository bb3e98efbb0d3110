"""Recipes: an answer can be computed again from its own, and one that lies is found."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapter_files import write_adapter
from tests.engine.checkpoint import write_checkpoint
from tilewise import cli
from tilewise.engine import recipe as recipes
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.errors import RequestError, UnsupportedError

PROMPT = "Once upon a time there was a"
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 128, "dtype": "float32"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"), 1)
    with LLM("story", enable_lora=True, lora_modules={"own": folder}, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def good(llm: LLM) -> dict[str, Any]:
    return made(llm, SamplingParams(n=2, seed=3, max_tokens=10, logprobs=0))


def made(llm: LLM, params: SamplingParams, **terms: Any) -> dict[str, Any]:
    """Return a recipe that has been JSON."""
    [output] = llm.generate(PROMPT, params, **terms)
    told = llm.recipe(output, params, **terms)
    return json.loads(json.dumps(told))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=10, logprobs=2),
        SamplingParams(n=3, seed=3, max_tokens=10, logprobs=0, top_p=0.9, stop=["dog"]),
        SamplingParams(seed=1, max_tokens=10, logprobs=0, logit_bias={5: 2.0}, bad_words=["the"]),
        SamplingParams(seed=1, max_tokens=10, logprobs=0, best_of=3, presence_penalty=0.5),
        SamplingParams(
            seed=1, max_tokens=6, logprobs=0, structured=StructuredOutputs(choice=["yes", "no"])
        ),
    ],
    ids=["greedy", "samples", "biases", "best of", "structured"],
)
def test_an_answer_is_computed_again_from_its_recipe(llm: LLM, params: SamplingParams) -> None:
    if params.structured is not None:
        pytest.importorskip("llguidance")
    told = made(llm, params)
    assert recipes.sampling_of(told) == params or params.stop or params.bad_words
    verdict = llm.verify(told)
    assert verdict.is_equal
    assert str(verdict).startswith("equal: all of ")
    assert verdict.num_tokens == sum(len(a["token_ids"]) for a in told["answers"])


def test_it_is_equal_whatever_ran_beside_the_answer() -> None:
    params = SamplingParams(seed=3, max_tokens=40, logprobs=0, ignore_eos=True)
    with LLM(
        "story", **SETTINGS | {"num_blocks": 8}, max_num_batched_tokens=7, max_num_seqs=7
    ) as crowded:
        every = [replace(params, seed=seed) for seed in range(6)]
        outputs = crowded.generate([PROMPT] * 6, every)
        assert crowded.engine.scheduler.stats().num_preemptions
        told = crowded.recipe(outputs[-1], every[-1])
    with LLM("story", **SETTINGS) as other:
        assert other.verify(told).is_equal


def test_an_adapter_is_part_of_a_recipe(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=10, logprobs=0)
    told = made(llm, params, lora_request="own")
    assert told["answers"] != made(llm, params)["answers"]
    assert llm.verify(told).is_equal
    with pytest.raises(RequestError, match="must be of an adapter that is loaded"):
        llm.verify({**told, "adapter": "0" * 64})


def signed(told: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the digest of its answers, as a liar would write it."""
    return {**told, "digest": recipes._digest(told["answers"])}


def test_the_first_difference_is_named_and_how_large_it_is(llm: LLM, good: Any) -> None:
    told = copy.deepcopy(good)
    told["answers"][1]["logprobs"][3] += 1e-3
    verdict = llm.verify(signed(told))
    assert (verdict.is_equal, verdict.sample, verdict.position) == (False, 1, 3)
    assert verdict.difference == pytest.approx(1e-3, rel=1e-3)
    assert "log-probabilities differ by 0.001" in str(verdict)
    told["answers"][0]["token_ids"][5] += 1
    verdict = llm.verify(signed(told))
    assert (verdict.sample, verdict.position) == (0, 5)
    assert verdict.recorded == told["answers"][0]["token_ids"][5] == verdict.found + 1
    assert "the recipe has token" in str(verdict)
    short = copy.deepcopy(good)
    for name in ("token_ids", "logprobs"):
        short["answers"][0][name].pop()
    verdict = llm.verify(signed(short))
    assert (verdict.position, verdict.recorded) == (9, None)


def test_other_reasons_and_samples_are_differences(llm: LLM, good: Any) -> None:
    told = copy.deepcopy(good)
    told["answers"][1]["finish_reason"] = "stop"
    verdict = llm.verify(signed(told))
    assert (verdict.is_equal, verdict.num_tokens) == (False, 20)
    assert (verdict.sample, verdict.position) == (1, -1)
    assert str(verdict) == (
        "different: sample 1: the recipe has finish_reason 'stop', computed is 'length'"
    )
    told["answers"].pop()
    verdict = llm.verify(signed(told))
    assert (verdict.sample, verdict.position, verdict.recorded) == (1, 0, None)
    assert "the recipe has no token" in str(verdict)
    told["answers"] = [*good["answers"], {"finish_reason": "stop", "token_ids": [], "logprobs": []}]
    verdict = llm.verify(signed(told))
    assert (verdict.is_equal, verdict.sample) == (False, 2)
    assert str(verdict).endswith("the recipe has finish_reason 'stop', computed is None")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(form="mine"), "must be an object of form 'tilewise recipe 1'"),
        (lambda r: r.pop("digest"), "must have digest, got none"),
        (lambda r: r["answers"][0]["token_ids"].append(3), "tokens with their log-prob"),
        (lambda r: r["answers"][0]["logprobs"].__setitem__(0, 1e300), "tokens with their log"),
        (lambda r: r["answers"][0]["logprobs"].__setitem__(0, -9.0), "it was changed"),
        (lambda r: r["answers"][0].pop("finish_reason"), "finish_reason 'stop' or 'length', got N"),
        (lambda r: r["answers"][0].update(finish_reason=[]), r"or 'length', got \[\]"),
        (lambda r: r["facts"].update(weights="0" * 64), "this engine's weights, .*got '0000"),
        (lambda r: r["facts"].update(config="0" * 64), "this engine's config"),
        (
            lambda r: r["facts"]["order"].update(device="x86_64 avx2"),
            "this engine's class, device .*, got 'x86_64 avx2'",
        ),
        (lambda r: r["facts"]["order"].update(dtype="bfloat16"), "dtype float32, got 'bfloat16'"),
        (lambda r: r["facts"].pop("order"), "must have facts with an order"),
        (lambda r: r["sampling"].pop("seed"), "seed must be given"),
        (lambda r: r["sampling"].update(heat=3), "must have sampling parameters"),
        (lambda r: r.update(prompt_token_ids=[]), "must have prompt_token_ids"),
        (lambda r: r.update(answers=[]), "must have answers"),
        (lambda r: r.update(adapter=3), "sampling parameters and an adapter"),
    ],
)
def test_a_recipe_that_lies_or_is_of_another_class_is_refused_in_one_sentence(
    llm: LLM, good: Any, change: Any, message: str
) -> None:
    told = copy.deepcopy(good)
    change(told)
    with pytest.raises(RequestError, match=message) as refused:
        llm.verify(told)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("told", [None, 3, [], "recipe"])
def test_what_is_no_recipe_is_refused(llm: LLM, told: Any) -> None:
    with pytest.raises(RequestError, match="recipe must be an object"):
        llm.verify(told)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(logprobs=0), "seed must be given"),
        (SamplingParams(seed=1), "logprobs must be given"),
        (SamplingParams(seed=1, logprobs=0, logits_processors=[lambda p, o, x: x]), "functions"),
    ],
)
def test_an_answer_that_cannot_be_computed_again_has_no_recipe(
    llm: LLM, params: SamplingParams, reason: str
) -> None:
    [output] = llm.generate(PROMPT, params)
    with pytest.raises(RequestError, match=reason):
        llm.recipe(output, params)


def test_other_weights_of_the_same_model_are_told_apart(tmp_path: Path, llm: LLM) -> None:
    facts = llm.facts()
    assert llm.facts() is facts
    with LLM("story", **SETTINGS) as other:
        assert other.facts() == facts
        weights = {name: tensor.clone() for name, tensor in _checkpoint(other).items()}
        weights["model.norm.weight"][0] += 1
        other.update_weights(weights)
        assert other.facts().weights != facts.weights
        assert other.facts().config == facts.config
    write_checkpoint(tmp_path, "llama")
    with LLM(tmp_path, **SETTINGS) as unlike:
        assert unlike.facts().config != facts.config
        assert unlike.facts().tokenizer != facts.tokenizer
    with (
        LLM("story", **SETTINGS, batch_invariant=False) as loose,
        pytest.raises(UnsupportedError, match="batch_invariant must be True for recipes"),
    ):
        loose.facts()


def _checkpoint(llm: LLM) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    from tilewise.engine.settings import packaged_model

    [file] = packaged_model().glob("*.safetensors")
    return {name: tensor.float() for name, tensor in load_file(file).items()}


def test_the_command_line_verifies(
    good: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"id": "cmpl-1", "recipe": good}))
    assert cli.main(["verify", str(path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "equal: all of 20 tokens and log-probabilities, to the bit\n"
    wrong = copy.deepcopy(good)
    wrong["answers"][0]["token_ids"][2] += 1
    path.write_text(json.dumps(signed(wrong)))
    assert cli.main(["verify", str(path), "--device", "cpu", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["sample"], told["position"]) == (0, 2)
    path.write_text(json.dumps(wrong))
    assert cli.main(["verify", str(path), "--device", "cpu"]) == 2
    assert "it was changed" in capsys.readouterr().err
    path.write_text("{")
    assert cli.main(["verify", str(path)]) == 2
