"""Adapters that are trained beside a decoder: gradients, numbers, and what PEFT's files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.test_state_families import make as make_state_model
from tests.models.tiny import save_hf
from tilewise.engine.settings import packaged_model
from tilewise.models import adapter_tensors, load_model, train_adapter
from tilewise.models.adapters import adapter_sites, read_adapter
from tilewise.nn.adapted_linear import AdaptedLinear, LowRankWeights

IDS = torch.arange(3, 40)[None]


def make(dtype: str = "float32", **options: Any) -> tuple[Any, list[torch.nn.Parameter]]:
    model = load_model(packaged_model(), dtype=dtype)
    learnt = train_adapter(model, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learnt:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model, learnt


def test_gradients_are_those_of_the_sum_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(24, 40, dtype=torch.float64)
    linear.__class__ = AdaptedLinear
    linear.adapter = own = LowRankWeights(
        24, (0, 24, 40), rank=16, scale=0.7, dtype=torch.float64, device=torch.device("cpu")
    )
    x = torch.randn(2, 9, 24, dtype=torch.float64, generator=generator, requires_grad=True)
    dy = torch.randn(2, 9, 40, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        own.b.copy_(torch.randn(own.b.shape, dtype=torch.float64, generator=generator))
    parts = [(x @ own.a[i].T) @ own.b[:, f:e] for i, (f, e) in enumerate([(0, 24), (24, 40)])]
    wanted = x @ linear.weight.T + linear.bias + 0.7 * torch.cat(parts, -1)
    given = [x, own.a, own.b, linear.weight, linear.bias]
    truth = torch.autograd.grad(wanted, given, dy)
    found = linear(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, given, dy), truth)


def test_an_adapter_that_is_new_changes_nothing_and_alone_learns() -> None:
    plain = load_model(packaged_model(), dtype="float32")
    model = load_model(packaged_model(), dtype="float32")
    learnt = train_adapter(model)
    assert torch.equal(model(IDS), plain(IDS))
    assert [p for p in model.parameters() if p.requires_grad] == learnt
    model(IDS).square().sum().backward()
    grads = [p.grad for p in learnt]
    assert all(g is not None for g in grads)
    assert all(g.abs().max() > 0 for g in grads[1::2])  # of B; those of A are 0 while B is


def test_what_files_hold_is_what_was_learnt(tmp_path: Path) -> None:
    model, _ = make(alpha=8.0)
    plain = load_model(packaged_model(), dtype="float32")
    sites = adapter_sites(plain)
    given = adapter_tensors(model)
    assert len(given.tensors) == 2 * len(sites)
    save_file(dict(given.tensors), tmp_path / "x.safetensors")  # contiguous, of memory of their own
    for module, parts in read_adapter(given, sites).parts.items():
        weight = plain.get_submodule(module).weight.data
        for part in parts:
            weight[part.first : part.first + len(part.b)] += part.delta().float()
    with torch.no_grad():
        assert torch.allclose(plain(IDS), model(IDS), atol=1e-4)


def test_rows_that_a_model_has_in_another_order_are_saved_in_the_checkpoints(
    tmp_path: Path,
) -> None:
    save_hf(make_state_model("qwen3_5"), tmp_path)  # whose queries and gates alternate in the file
    native = load_model(tmp_path, dtype="float32")
    with torch.no_grad():
        for parameter in train_adapter(native):
            parameter.normal_()
    sites = adapter_sites(native)
    assert any(len(site.spans) > 1 for site in sites.values())
    for module, parts in read_adapter(adapter_tensors(native), sites).parts.items():
        own = native.get_submodule(module).adapter
        for i, part in enumerate(sorted(parts, key=lambda part: part.first)):
            assert torch.equal(part.b, own.b[:, own.edges[i] : own.edges[i + 1]].T)
            assert torch.equal(part.a, own.a[i])


@pytest.mark.parametrize("rank", [0, 8, 528, 16.0, True])
def test_a_rank_that_no_slot_has_is_refused(rank: Any) -> None:
    model = load_model(packaged_model(), dtype="float32")
    with pytest.raises(ValueError, match=r"rank must be a multiple of 16 in 16 \.\.\. 512"):
        train_adapter(model, rank=rank)
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_is_no_plain_one_is_refused() -> None:
    model, _ = make()
    with pytest.raises(ValueError, match="must have plain linear layers, .*, got AdaptedLinear as"):
        train_adapter(model)
    exact = load_model(packaged_model(), dtype="float32")
    exact.use_inference_bits()
    with pytest.raises(ValueError, match="without an adapter or inference bits, got _Linear as"):
        train_adapter(exact)
    with pytest.raises(ValueError, match="dtype must be floating point, got torch.int8"):
        train_adapter(load_model(packaged_model(), dtype="float32"), dtype=torch.int8)
    with pytest.raises(ValueError, match="must have an adapter, see train_adapter, got none"):
        adapter_tensors(exact)
