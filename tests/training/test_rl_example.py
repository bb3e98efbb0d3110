"""examples/rl: training and generating as one process, with a difference of zero."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "rl"
SMALL = ["--steps", "2", "--prompts", "3", "--samples", "4", "--tokens", "12"]


@pytest.fixture(scope="module")
def grpo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in ("task", "policy", "grpo"):
            sys.modules.pop(name, None)
        yield import_module("grpo")
        for name in ("task", "policy", "grpo", "plot"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--dtype", "bfloat16", "--rank", "16", "--sequence-level"],
    ],
    ids=["float32, all weights", "bfloat16, adapters, sequence level"],
)
def test_the_difference_is_zero_while_weights_change_and_requests_are_preempted(
    grpo: ModuleType, more: list[str]
) -> None:
    log = grpo.main([*SMALL, "--blocks", "9", "--lr", "1e-3", *more])
    assert [step["difference"] for step in log] == [0.0, 0.0]
    assert [step["ratio"] for step in log] == [0.0, 0.0]
    assert log[0]["gradient"] > 0
    assert log[-1]["preemptions"] > 0


def test_a_policy_that_is_not_the_engines_ends_the_run(
    grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = grpo.log_probabilities

    def wrong(*arguments):
        return right(*arguments) * (1 + 1e-6)

    monkeypatch.setattr(grpo, "log_probabilities", wrong)
    with pytest.raises(AssertionError, match=r"must be 0\.0, got"):
        grpo.main(SMALL)


def test_the_mismatch_that_others_have_can_be_put_back(grpo: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    log = grpo.main([*SMALL, "--dtype", "bfloat16", "--mismatch", "--log", str(out)])
    assert max(step["difference"] for step in log) > 0
    pytest.importorskip("matplotlib")
    import_module("plot").main([str(out), "--out", str(tmp_path / "run.png")])
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_the_reward_is_the_share_of_words_in_short_sentences(grpo: ModuleType) -> None:
    task = sys.modules["task"]
    assert task.reward("Tom ran home. He was glad.") == 1.0
    assert task.reward("Tom ran to the very big park again. He was glad.") == 3 / 11
    assert task.reward("one two three four five six seven eight") == 0.0
    assert task.reward("") == 0.0
    assert task.reward("He was glad. Then he") == 1.0
    found = task.prompts(32, random.Random(0))
    assert len(set(found)) == 32
    assert all(text.endswith(".") for text in found)


def test_the_objective_is_the_clipped_one(grpo: ModuleType) -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -2.5, -0.5, -2.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    value, ratio = grpo.objective(logp, old, advantages, [2, 3], is_sequence_level=False)
    change = (logp - old).exp().detach()
    terms = [
        min(r * a, max(0.8, min(1.2, r)) * a)
        for r, a in zip(change.tolist(), [1.0, 1.0, -2.0, -2.0, -2.0], strict=True)
    ]
    assert value.item() == pytest.approx(sum(terms) / 5)
    assert torch.equal(ratio, change)
    (gradient,) = torch.autograd.grad(value, logp)
    # Clipped: a good token that became more likely, a bad one that became less likely.
    assert gradient.tolist() == pytest.approx([0.2, 0.0, -0.4, 0.0, -0.4])
    value, ratio = grpo.objective(logp, old, advantages, [2, 3], is_sequence_level=True)
    means = torch.tensor([0.25, -1 / 3], dtype=torch.float64)
    assert torch.allclose(ratio, means.exp())
    assert value.item() == pytest.approx((1.03 * 1.0 + 0.97 * -2.0) / 2)
