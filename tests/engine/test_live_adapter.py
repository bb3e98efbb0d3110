"""Engines over a model of this process beside which an adapter is trained: updates by it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams
from tilewise.errors import CheckpointError, RequestError
from tilewise.models import adapter_tensors, load_model, train_adapter
from tilewise.models.decoder import Decoder
from tilewise.nn.adapted_linear import AdaptedLinear, LowRankWeights
from tilewise.training.loss import token_logprobs

ASKED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = ["Once upon a time", "The little dog ran to the big red ball and"]
SETTINGS: dict[str, Any] = {"num_blocks": 128, "block_size": 4, "device": "cpu"}


def step(learnt: list[torch.nn.Parameter], seed: int = 1) -> None:
    """Change the adapter as a step of an optimizer does, much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learnt:
            parameter += (torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter)


def live(dtype: str = "float32", own: torch.dtype | None = None, **settings: Any) -> Any:
    """Return a model, the parameters of its adapter, and an engine over both."""
    device = settings.get("device", "cpu")
    model = load_model(packaged_model(), dtype=dtype, device=device)
    learnt = train_adapter(model, dtype=own)
    model.use_inference_bits()
    step(learnt)
    return model, learnt, LLM(model, tokenizer=packaged_model(), **SETTINGS | settings)


def gap(model: Decoder, llm: LLM) -> float:
    """Return max |logp_train - logp_rollout| over answers; gradients are added up."""
    largest = 0.0
    for output in llm.generate(PROMPTS, ASKED):
        [answer], first = output.outputs, len(output.prompt_token_ids)
        device = next(model.parameters()).device
        ids = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]], device=device)
        hidden = model(ids)[0, first - 1 : -1]
        found = token_logprobs(model.compute_logits(hidden), ids[0, first:])
        old = [told[token] for told, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        largest = max(largest, (found.detach().cpu() - torch.tensor(old)).abs().max().item())
        found.sum().backward()
    return largest


def answers(llm: LLM, **terms: Any) -> list[Any]:
    return [o.outputs[0].logprobs for o in llm.generate(PROMPTS, ASKED, **terms)]


@pytest.mark.parametrize(
    ("dtype", "own"),
    [("float32", None), ("bfloat16", None), ("bfloat16", torch.float32)],
    ids=["float32", "bfloat16", "bfloat16 with an adapter in float32"],
)
def test_training_and_sampling_differ_by_zero_while_the_adapter_alone_changes(
    dtype: str, own: torch.dtype | None
) -> None:
    model, learnt, llm = live(dtype, own)
    assert llm._live_adapter.is_shared is (own is None)
    words = [m.panels.words for m in llm.model.modules() if hasattr(m, "panels")]
    before, found = [w.clone() for w in words], []
    optimizer = torch.optim.SGD(learnt, lr=1e-2)
    for _ in range(3):
        assert gap(model, llm) == 0.0
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learnt)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="must follow a change of the model's parameters"):
            answers(llm)
        llm.update_weights()
        found.append(answers(llm))
    assert found[0] != found[1] != found[2]
    assert all(torch.equal(old, now) for old, now in zip(before, words, strict=True))
    llm.close()


def test_an_update_by_the_adapter_reads_and_writes_no_other_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, learnt, llm = live()
    monkeypatch.setattr("tilewise.engine.llm.refill", None)  # not callable
    monkeypatch.setattr("tilewise.engine.weights.LiveWeights.check", None)
    step(learnt, 2)
    llm.update_weights()
    assert gap(model, llm) == 0.0
    monkeypatch.undo()
    with torch.no_grad():  # the base may change as well: then it is packed anew
        model.layers[0].mlp.down_proj.weight *= 1.01
    with pytest.raises(RuntimeError, match="must follow a change"):
        answers(llm)
    llm.update_weights()
    assert gap(model, llm) == 0.0
    llm.close()


def test_blocks_of_the_old_adapter_are_found_no_more() -> None:
    _, learnt, llm = live()
    [first, again] = (llm.generate(PROMPTS[1], ASKED)[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    step(learnt, 2)
    llm.update_weights()
    [now, later] = (llm.generate(PROMPTS[1], ASKED)[0] for _ in range(2))
    assert now.num_cached_tokens == 0
    assert later.num_cached_tokens > 0
    assert first.outputs[0].logprobs != now.outputs[0].logprobs == later.outputs[0].logprobs
    llm.close()


def test_answers_and_recipes_are_those_of_the_adapter_loaded_elsewhere() -> None:
    model, learnt, llm = live()
    with LLM("story", dtype="float32", enable_lora=True, max_lora_rank=16, **SETTINGS) as other:
        other.load_lora_adapter("policy", adapter_tensors(model))
        assert answers(llm) == answers(other, lora_request="policy") != answers(other)
        [output] = llm.generate(PROMPTS[0], ASKED)
        recipe = llm.recipe(output, ASKED)
        assert llm.verify(recipe).is_equal
        assert other.verify(recipe).is_equal
        step(learnt, 2)
        llm.update_weights()
        with pytest.raises(RequestError, match="must be of an adapter that is loaded"):
            llm.verify(recipe)
        [plain] = other.generate(PROMPTS[0], ASKED)
        with pytest.raises(RequestError, match="must be of an adapter that is loaded"):
            llm.verify(other.recipe(plain, ASKED))
    llm.close()


def _replace(own: LowRankWeights, name: str, tensor: torch.Tensor) -> None:
    setattr(own, name, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def _nan(linear: AdaptedLinear) -> None:
    with torch.no_grad():
        linear.adapter.b[3, 4] = float("nan")


def _missing(linear: AdaptedLinear) -> None:
    linear.__class__ = torch.nn.Linear


NAME = r"layers\.0\.attention\.qkv_proj\.adapter\."


REFUSED: tuple[tuple[Callable[[AdaptedLinear], None], str], ...] = (
    (_missing, rf"weights must hold tensor {NAME}a, got none"),
    (
        lambda linear: _replace(linear.adapter, "b", linear.adapter.b.detach()[:, 1:]),
        rf"tensor {NAME}b must have shape \(16, \d+\), got \(16, \d+\)",
    ),
    (
        lambda linear: _replace(linear.adapter, "a", linear.adapter.a.detach().int()),
        rf"tensor {NAME}a must be floating point, got torch.int32",
    ),
    (_nan, rf"tensor {NAME}b must be finite, got NaN or infinity"),
)


@pytest.mark.parametrize("own", [None, torch.float32], ids=["shared", "copied"])
def test_a_wrong_adapter_is_refused_before_anything_is_written(own: torch.dtype | None) -> None:
    model, learnt, llm = live("bfloat16", own)
    linear = model.layers[0].attention.qkv_proj
    kept, kind = [p.detach().clone() for p in learnt], type(linear)
    before, old = answers(llm), dict(linear.adapter.named_parameters())
    slot = llm._live_adapter.weights["layers.1.mlp.down_proj"]
    held, version = slot.a.clone(), llm.engine.version
    for change, message in REFUSED:
        if own is not None:
            step(learnt, 2)
        change(linear)
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights()
        assert llm.engine.version == version
        assert torch.equal(held, slot.a)
        with pytest.raises(RuntimeError, match="must follow a change"):
            answers(llm)
        linear.__class__ = kind
        for name, parameter in old.items():
            setattr(linear.adapter, name, parameter)
        with torch.no_grad():
            for parameter, tensor in zip(learnt, kept, strict=True):
                parameter.copy_(tensor)
    llm.update_weights()
    assert answers(llm) == before
    llm.close()


def test_an_adapter_of_a_layer_that_had_none_is_refused() -> None:
    model = load_model(packaged_model(), dtype="float32")
    train_adapter(model)
    last = model.layers[-1].mlp.down_proj
    kind, last.__class__ = type(last), torch.nn.Linear
    own = last._modules.pop("adapter")
    with LLM(model, tokenizer=packaged_model(), **SETTINGS) as llm:
        answers(llm)
        last.__class__ = kind
        last.adapter = own
        with pytest.raises(CheckpointError, match=r"that the engine was made with, got 'layers\."):
            llm.update_weights()


def test_named_adapters_beside_one_that_is_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_lora must be False beside an adapter that is tr"):
        live(enable_lora=True)
    _, _, llm = live()
    with pytest.raises(RequestError, match="must be enabled by enable_lora=True, got 'other'"):
        answers(llm, lora_request="other")
    llm.close()


@pytest.mark.parametrize(
    ("level", "own"), [(1, torch.float32), (2, None), (2, torch.float32)], ids=str
)
def test_an_engine_that_has_slept_has_the_adapter_again(
    level: int, own: torch.dtype | None
) -> None:
    model, learnt, llm = live("bfloat16", own)
    before = answers(llm)
    llm.sleep(level)
    llm.wake()
    assert answers(llm) == before
    llm.sleep(level)
    step(learnt, 2)
    llm.wake()
    if level == 1:
        with pytest.raises(RuntimeError, match="must follow a change"):
            answers(llm)
        llm.update_weights()
    assert gap(model, llm) == 0.0
    assert answers(llm) != before
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_the_difference_is_zero_and_memory_is_shared(dtype: str) -> None:
    model, learnt, llm = live(
        dtype, device="cuda", block_size=16, graphs="lazy", batch_invariant=True
    )
    assert llm._live_adapter.is_shared
    for seed in range(3):
        assert gap(model, llm) == 0.0
        step(learnt, seed)
        llm.update_weights()
    llm.close()
