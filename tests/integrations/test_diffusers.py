"""The backend of diffusers: registered beside its own, it attends as its "native" one.

The registry's interface is recorded here, so that the everyday run needs no diffusers; where it is
installed the slow test runs a model of it.
"""

from __future__ import annotations

import inspect
import sys
import types
from enum import Enum

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise.errors import UnsupportedError
from tilewise.integrations import diffusers


class AttentionBackendName(str, Enum):  # noqa: UP042, as diffusers has it
    """The names of backends, as in diffusers 0.42."""

    NATIVE = "native"
    FLASH = "flash"


class Registry:
    """What diffusers 0.42 does when a backend is registered and asked."""

    def __init__(self):
        self._backends, self._constraints, self._supported_arg_names = {}, {}, {}

    def register(self, backend, constraints=None, supports_context_parallel=False):
        def decorate(function):
            self._backends[backend] = function
            self._constraints[backend] = constraints or []
            names = set(inspect.signature(function).parameters)
            self._supported_arg_names[backend] = names
            return function

        return decorate

    def dispatch(self, backend, **given):
        backend = AttentionBackendName(backend)
        known = {k: v for k, v in given.items() if k in self._supported_arg_names[backend]}
        return self._backends[backend](**known)


@pytest.fixture
def registry(monkeypatch):
    names = Enum("AttentionBackendName", {m.name: m.value for m in AttentionBackendName}, type=str)
    monkeypatch.setitem(globals(), "AttentionBackendName", names)
    found = Registry()
    found.register(names.NATIVE)(lambda query: query)
    module = types.ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName, module._AttentionBackendRegistry = names, found
    models = types.ModuleType("diffusers.models")
    models.attention_dispatch = module
    for name, one in (("diffusers", types.ModuleType("diffusers")), ("diffusers.models", models)):
        monkeypatch.setitem(sys.modules, name, one)
    return found


def test_the_name_is_one_of_the_backends_once(registry):
    for _ in range(2):
        diffusers.register()
    names = AttentionBackendName
    assert names("tilewise") in registry._backends
    assert [m.value for m in names.__members__.values()] == ["native", "flash", "tilewise"]
    assert [m.value for m in names] == ["native", "flash", "tilewise"]
    assert "tilewise" in registry._backends  # as `attention_backend("tilewise")` asks
    assert isinstance(names("tilewise"), names)


@pytest.mark.parametrize("name", ["native", "flash", "Upper", "a-b", ""])
def test_a_name_that_is_taken_or_none_is_refused(registry, name):
    with pytest.raises(ValueError, match="name must"):
        diffusers.register(name)


MASKS = {
    "none": None,
    "keys": torch.arange(12).repeat(2, 1) < torch.tensor([[12], [5]]),
    "four_dims": torch.randn(2, 1, 10, 12, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_attends_as_the_native_backend(registry, mask, scale):
    diffusers.register()
    q, k = torch.randn(2, 10, 4, 16), torch.randn(2, 12, 4, 16)
    given = {"query": q, "key": k, "value": k, "attn_mask": MASKS[mask], "scale": scale}
    more = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "_parallel_config": None}
    o = registry.dispatch("tilewise", **given, **more)
    visible = MASKS[mask]
    if mask == "keys":
        visible = visible[:, None, None]
    heads = (x.transpose(1, 2) for x in (q, k, k))
    truth = scaled_dot_product_attention(*heads, visible, scale=scale).transpose(1, 2)
    torch.testing.assert_close(o, truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("given", [{"return_lse": True}, {"_parallel_config": object()}])
def test_what_it_does_not_do_is_refused(registry, given):
    diffusers.register()
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedError, match="must be"):
        registry.dispatch("tilewise", query=q, key=q, value=q, **given)


def test_without_diffusers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "diffusers.models", raising=False)
    with pytest.raises(ImportError, match="pip install diffusers"):
        diffusers.register()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_diffusers_runs_on_it():
    pytest.importorskip("diffusers")
    from diffusers import FluxTransformer2DModel

    diffusers.register()
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    given = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 9, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(9, 3),
    }  # fmt: skip
    truth = model(**given).sample
    model.set_attention_backend("tilewise")
    torch.testing.assert_close(model(**given).sample, truth, atol=1e-4, rtol=1e-4)
