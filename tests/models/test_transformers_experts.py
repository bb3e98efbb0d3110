"""Mixtures of transformers by `ops.expert_mlp`: what it takes, and that it gives their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tilewise import ops
from tilewise.models import transformers_experts as module

SIZES = {
    "hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 16,
    "num_local_experts": 5, "num_experts": 5,
}  # fmt: skip


def make(kind: Any, config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    given = config(**SIZES, **options)
    given._experts_implementation = "eager"
    mixture = kind(given)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0, 0.3)
    return mixture


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(
    "kinds", [(MixtralExperts, MixtralConfig), (Qwen3MoeExperts, Qwen3MoeConfig)]
)
def test_values_are_those_of_transformers(
    kinds: Any, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by the oracle of the op."""
    mixture = make(*kinds, hidden_act=act)
    x = torch.randn(7, 24)
    weights, chosen = torch.rand(7, 5).topk(2, -1)
    original, calls = ops.expert_mlp, []

    def on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return original(*args, **options, backend="reference")

    monkeypatch.setattr(ops, "expert_mlp", on_cpu)
    with torch.no_grad():
        expected = mixture(x, chosen, weights)
        monkeypatch.setattr(module, "_is_on_gpu", lambda x: True)
        got = module._multiply(mixture, x, chosen, weights)
    assert len(calls) == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not module.may_count_on_host(nn.ModuleList([mixture]))


def test_other_experts_and_rows_that_learn_go_to_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "expert_mlp", None)
    x = torch.randn(7, 24)
    weights, chosen = torch.rand(7, 5).topk(2, -1)
    mixture = make(MixtralExperts, MixtralConfig)
    given = x.clone().requires_grad_()
    module._multiply(mixture, given, chosen, weights).sum().backward()
    assert given.grad is not None
    other = make(GptOssExperts, GptOssConfig)
    assert module.may_count_on_host(nn.ModuleList([mixture, other]))
    assert module._activation(other) is None
