"""A step learns, counts its FLOPs, accumulates exactly and is one graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.utils import counters

from tests.training.small import WORDS, make_bert, make_decoder, make_packer
from tests.waits import waits_are_errors
from tilewise.training.packing import mask_batch
from tilewise.training.trainer import Settings, Trainer, learning_rate, model_flops

PLAIN = {"dtype": "float32", "compile": "", "warm_up": 0, "lr": 3e-3}


# torch itself makes one when it traces an autograd.Function.
traces_a_function = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)


def masked(batch):
    return mask_batch(
        batch, share=0.2, mask=3, words=WORDS, special=frozenset((0, 1, 2, 3)), seed=0
    )


def make_trainer(kind: str, **settings) -> Trainer:
    model = make_bert() if kind == "bert" else make_decoder(kind)
    return Trainer(model, Settings(**(PLAIN | settings)), words=WORDS)


def batches_of(kind: str, count: int, **options):
    packer = make_packer(**options)
    return [masked(packer.batch()) if kind == "bert" else packer.batch() for _ in range(count)]


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "bert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_learns_a_batch_by_heart(kind, dtype):
    trainer = make_trainer(kind, dtype=dtype, steps=12, lr=1e-2)
    (batch,) = batches_of(kind, 1, tokens=96)
    losses = [float(trainer.step([batch])) for _ in range(12)]
    assert losses[0] == pytest.approx(torch.tensor(float(WORDS)).log().item(), abs=0.3)
    assert losses[-1] < losses[0] - 0.7


def test_two_batches_count_as_one_of_both():
    whole, halves = make_trainer("GPT2LMHeadModel"), make_trainer("GPT2LMHeadModel")
    first, second = batches_of("GPT2LMHeadModel", 2, is_rows=True)
    from dataclasses import replace

    both = replace(
        first,
        ids=torch.cat([first.ids, second.ids]),
        targets=torch.cat([first.targets, second.targets]),
    )
    a, b = whole.step([both]), halves.step([first, second])
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        # Adam's first step is lr * sign(gradient) nearly: elements whose gradient is rounding
        # differ by up to two of them.
        assert ((one - other).abs() > 1e-4).float().mean() < 0.01


# Tracing takes the time: every day each model once, and each layout.
@traces_a_function
@pytest.mark.parametrize(
    ("kind", "is_rows"),
    [
        ("GPT2LMHeadModel", False),
        ("LlamaForCausalLM", True),
        ("bert", False),
        pytest.param("GPT2LMHeadModel", True, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_is_one_graph_with_the_same_losses(kind, is_rows):
    plain, compiled = make_trainer(kind), make_trainer(kind)
    torch._dynamo.reset()
    counters.clear()
    compiled._compiled = torch.compile(
        compiled._forward, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    for batch in batches_of(kind, 3, is_rows=is_rows):
        torch.testing.assert_close(
            compiled.step([batch]), plain.step([batch]), rtol=1e-5, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_gradients_are_clipped():
    trainer = make_trainer("GPT2LMHeadModel", clip=1e-12, decay=0.0, eps=1.0)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.step(batches_of("GPT2LMHeadModel", 1))
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert (old - new).abs().max() < 1e-9


def test_the_learning_rate_warms_up_and_falls():
    settings = Settings(lr=1.0, warm_up=4, steps=12, final_lr=0.1)
    rates = [learning_rate(settings, step) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    assert rates[8] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)


def test_flops_are_those_of_products_and_visible_attention():
    config = make_decoder().config
    with torch.device("meta"):
        from tilewise.models.native import NativeDecoder

        model = NativeDecoder(config)
    layer = 12 * 64 * 64 + 13 * 64  # products and biases of a block
    products = 2 * layer + 2 * 64 + 128 * 64  # and the last norm and the head
    assert model_flops(model, 10, 0) == 6 * 10 * products
    # Two products forward, four backward, of 2 FLOPs each, over half of the pairs.
    assert model_flops(model, 0, 100) == 6 * 2 * 2 * 64 * 100 / 2


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32, got 'int8'"):
        Settings(dtype="int8")
    with pytest.raises(ValueError, match="steps must be positive, got 0"):
        Settings(steps=0)
    for wrong in ({"lr": -1.0}, {"lr": math.nan}, {"warm_up": -1}, {"decay": math.inf}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be finite and at least 0"):
            Settings(**wrong)


@traces_a_function
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "bert"])
@pytest.mark.parametrize("is_rows", [False, True])
def test_a_step_on_a_gpu_waits_for_nothing_and_gives_the_cpus_losses(kind, is_rows):
    if kind == "bert" and is_rows:
        pytest.skip("a BERT's texts are packed always")
    options = PLAIN | {"dtype": "bfloat16", "compile": "default", "steps": 8}
    plain = make_trainer(kind, dtype="bfloat16", steps=8)
    model = make_bert() if kind == "bert" else make_decoder(kind)
    trainer = Trainer(model.cuda(), Settings(**options), words=WORDS)
    batches = batches_of(kind, 8, is_rows=is_rows)
    there = [batch.to(torch.device("cuda")) for batch in batches]
    losses = [trainer.step([there[0]]), trainer.step([there[1]])]
    with waits_are_errors():
        losses += [trainer.step([batch]) for batch in there[2:]]
    expected = torch.stack([plain.step([batch]) for batch in batches])
    torch.testing.assert_close(torch.stack(losses).cpu(), expected, rtol=2e-2, atol=2e-2)


@traces_a_function
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "bert"])
def test_deterministic_steps_on_a_gpu_give_the_same_bits(kind):
    def losses():
        model = make_bert() if kind == "bert" else make_decoder(kind)
        options = PLAIN | {"dtype": "bfloat16", "compile": "default", "deterministic": True}
        trainer = Trainer(model.cuda(), Settings(**options), words=WORDS)
        batches = [batch.to(torch.device("cuda")) for batch in batches_of(kind, 6)]
        return [float(trainer.step([batch])) for batch in batches]

    try:
        assert losses() == losses()
    finally:
        torch.use_deterministic_algorithms(False)
