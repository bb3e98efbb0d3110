"""Mixtures of experts beside transformers' modules: every router, both layouts, gradients."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from tilewise import ops
from tilewise.nn import experts
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.layers import fuse_on_cpu
from tilewise.nn.packed import pack_linears

E, INNER, COUNT = 24, 16, 8
# What transformers' configuration classes call the sizes.
SIZES = {
    "hidden_size": E, "intermediate_size": INNER, "moe_intermediate_size": INNER,
    "num_local_experts": COUNT, "num_experts": COUNT, "n_routed_experts": COUNT,
    "num_experts_per_tok": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 32,
}  # fmt: skip
V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
      "norm_topk_prob": True}  # fmt: skip
OURS_V3 = {
    "scores": "sigmoid", "norm_eps": 1e-20, "weight_scale": 2.5, "has_correction_bias": True,
    "num_groups": 4, "num_active_groups": 2, "best_in_group": 2, "routes_in_float32": True,
    "shared_size": 2 * INNER,
}  # fmt: skip
# family: (its block, options of its configuration, ours)
FAMILIES = {
    "mixtral": ("MixtralSparseMoeBlock", {}, {}),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        {"norm_topk_prob": False, "shared_expert_intermediate_size": 40},
        {"normalised": False, "shared_size": 40, "shared_is_gated": True},
    ),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"norm_topk_prob": True}, {}),
    "olmoe": ("OlmoeSparseMoeBlock", {"norm_topk_prob": False}, {"normalised": False}),
    "granitemoe": ("GraniteMoeMoE", {}, {}),
    "gpt_oss": (
        "GptOssMLP", {},
        {"router_bias": True, "activation": "clamped", "has_bias": True, "is_interleaved": True},
    ),
    "phimoe": (
        "PhimoeSparseMoeBlock",
        {"num_experts_per_tok": 2, "router_jitter_noise": 0.2},
        {"num_active": 2, "scores": "sparse_mixer", "jitter": 0.2},
    ),
    "deepseek_v2": (
        "DeepseekV2Moe",
        {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 4.0, "n_shared_experts": 2},
        {"normalised": False, "weight_scale": 4.0, "num_groups": 4, "num_active_groups": 2,
         "routes_in_float32": True, "shared_size": 2 * INNER},
    ),
    "deepseek_v3": ("DeepseekV3MoE", V3, OURS_V3),
    "glm4_moe": ("Glm4MoeMoE", V3, OURS_V3),
    "dots1": ("Dots1MoE", V3, OURS_V3),
    "minimax_m2": (
        "MiniMaxM2SparseMoeBlock", {}, {"scores": "sigmoid", "has_correction_bias": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeSparseMoeBlock", {"moe_num_shared_experts": 2, "moe_k": 3},
        {"has_correction_bias": True, "routes_in_float32": True, "shared_size": 2 * INNER},
    ),
    "llama4": (
        "Llama4TextMoe", {}, {"scores": "sigmoid", "normalised": False, "weighs_input": True,
                              "shared_size": INNER},
    ),
    "gemma4": (
        None, {"top_k_experts": 3, "enable_moe_block": True},
        {"router_norm_eps": 1e-6, "logit_scale": E**-0.5, "scales_experts": True,
         "activation": "gelu_pytorch_tanh"},
    ),
}  # fmt: skip
# Where transformers' blocks keep what ours do, by the ends of names.
PLACES = {
    "router.weight": ("gate.weight", "router.weight", "router.proj.weight"),
    "router.bias": ("router.bias",),
    "router_norm.weight": ("router.scale",),
    "expert_scale": ("router.per_expert_scale",),
    "correction_bias": ("e_score_correction_bias",),
    "up": ("experts.gate_up_proj",),
    "up_bias": ("experts.gate_up_proj_bias",),
    "down": ("experts.down_proj",),
    "down_bias": ("experts.down_proj_bias",),
    "shared.gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "shared.down_proj.weight": ("down_proj.weight",),
    "shared_gate.weight": ("shared_expert_gate.weight",),
}


class Gemma4Block(torch.nn.Module):
    """The router and the experts that transformers' Gemma 4 has in its layer."""

    def __init__(self, module, config):
        super().__init__()
        self.router = module.Gemma4TextRouter(config)
        self.experts = module.Gemma4TextExperts(config)

    def forward(self, x, router_input):
        _, weights, chosen = self.router(router_input.flatten(0, -2))
        return self.experts(x.flatten(0, -2), chosen, weights).view(x.shape)


def build(family, seed=0):
    """Return transformers' block and ours with the same random weights."""
    name, theirs, ours = FAMILIES[family]
    package = f"transformers.models.{family}"
    module = importlib.import_module(f"{package}.modeling_{family}")
    configs = importlib.import_module(f"{package}.configuration_{family}")
    kind = next(
        x for n, x in vars(configs).items()
        if n.endswith("TextConfig" if family in ("llama4", "gemma4") else "Config")
        and n != "PreTrainedConfig"
    )  # fmt: skip
    config = kind(**SIZES | theirs)
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    block = Gemma4Block(module, config) if name is None else getattr(module, name)(config)
    mine = Experts(E, ExpertsConfig(**{"num_experts": COUNT, "num_active": 3,
                                       "intermediate_size": INNER} | ours))  # fmt: skip
    held = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    with torch.no_grad():
        for x in held.values():
            x.normal_(0, 0.5)
        for name, x in mine.named_parameters():
            x.copy_(_found(name, held, family))
    return block.eval(), mine


def _found(name, held, family):
    ends = PLACES[name]
    is_shared = name.startswith("shared.")
    parts = [
        x for end in ends for n, x in held.items()
        if n.endswith(end) and ("shared" in n) == (is_shared or "shared" in name)
    ]  # fmt: skip
    x = torch.cat(parts) if is_shared else parts[0]
    if family in ("gpt_oss", "llama4") and name in ("up", "down"):
        return x.mT  # these keep (in, out)
    return x.flatten() if name == "correction_bias" else x


def run(block, x, router_input):
    y = block(x, router_input) if isinstance(block, (Experts, Gemma4Block)) else block(x)
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family):
    block, mine = build(family)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, E, generator=draw)
    other = torch.randn(2, 9, E, generator=draw) if family == "gemma4" else None
    dy = torch.randn(2, 9, E, generator=draw)
    results = []
    for model in (block, mine):
        given = x.clone().requires_grad_()
        y = run(model, given, other)
        y.backward(dy)
        results.append((y, given.grad, dict(model.named_parameters())))
    (y, dx, theirs), (mine_y, mine_dx, ours) = results
    torch.testing.assert_close(mine_y, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine_dx, dx, rtol=1e-4, atol=1e-4)
    for name, parameter in ours.items():
        if parameter.requires_grad:
            grads = {n: p.grad for n, p in theirs.items() if p.grad is not None}
            expected = _found(name, grads, family)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(run(mine, x, other), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4"])
def test_panels_give_what_weights_give(family):
    _, mine = build(family)
    x = torch.randn(2, 9, E, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = mine(x)
        mine.pack_for_inference()
        pack_linears(mine)
        fuse_on_cpu(mine)
        assert not hasattr(mine, "up") or not isinstance(mine.up, torch.nn.Parameter)
        torch.testing.assert_close(mine(x), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine(x[:1, :1]), mine(x)[:1, :1])  # whatever is beside it


def test_experts_of_8_bits_are_near():
    _, mine = build("qwen3_moe")
    x = torch.randn(9, E, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = mine(x)
        mine.pack_for_inference(is_int8=True)
        got = mine(x)
    assert 0 < (got - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("is_int8", [False, True], ids=["wide", "int8"])
def test_panels_that_are_refilled_are_those_of_the_new_weights(is_int8):
    (_, mine), (_, other) = build("qwen3_moe"), build("qwen3_moe", seed=1)
    given = {name: getattr(other, name).detach().clone() for name in ("up", "down")}
    for block in (mine, other):
        block.pack_for_inference(is_int8=is_int8)
    mine.refill(given)
    for all_panels, expected in (
        (mine.packed.up, other.packed.up),
        (mine.packed.down, other.packed.down),
    ):
        for panels, wanted in zip(all_panels, expected, strict=True):
            assert torch.equal(panels.words, wanted.words)


@pytest.mark.parametrize("seed", range(3))
def test_the_router_of_inference_chooses_as_the_one_that_learns(seed):
    """The op's oracle against the torch operations of the module, over all families."""
    for family in FAMILIES:
        _, mine = build(family, seed)
        config = mine.config
        logits = torch.randn(11, COUNT, generator=torch.Generator().manual_seed(seed))
        chosen, weights = mine._choose(logits)
        expected = ops.choose_experts(
            mine._scaled(logits), config.num_active, scores=config.scores,
            normalised=config.normalised, norm_eps=config.norm_eps, scale=config.weight_scale,
            correction_bias=mine.correction_bias, num_groups=config.num_groups,
            expert_scale=None if mine.expert_scale is None else mine.expert_scale.detach(),
            num_active_groups=config.num_active_groups, best_in_group=config.best_in_group,
            jitter=config.jitter, backend="reference",
        )  # fmt: skip
        assert torch.equal(chosen.int(), expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-6)


def test_what_is_float32_in_a_model_of_16_bits_stays_so():
    _, mine = build("deepseek_v3")
    before = mine.router.weight.clone(), mine.correction_bias.clone()
    mine.to(torch.bfloat16)
    assert mine.up.dtype == torch.bfloat16
    assert torch.equal(mine.router.weight, before[0])
    assert torch.equal(mine.correction_bias, before[1])
    with torch.no_grad():
        x = torch.randn(5, E, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert mine(x).dtype == torch.bfloat16
    assert mine.double().router.weight.dtype == torch.float64


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_the_ops_of_inference_add_the_block_of_all_tokens(family, place, monkeypatch):
    _, mine = build(family)
    mine = mine.to(place)
    x = torch.randn(9, E, generator=torch.Generator().manual_seed(1)).to(place)
    if place == "cpu":
        for name in ("choose_experts", "expert_mlp"):
            op = functools.partial(getattr(ops, name), backend="reference")
            monkeypatch.setattr(ops, name, op)
    with torch.no_grad():
        shared, logits = mine._shared(x), mine._logits(x)
        y = mine._in_one(x, logits, shared)
        expected = mine._added(mine._in_one(x, logits, None), shared)
        torch.testing.assert_close(y, expected, rtol=0 if place == "cuda" else 1e-6, atol=1e-6)
        torch.testing.assert_close(y, mine(x), rtol=1e-4, atol=1e-4)
    if place == "cuda":
        assert torch.equal(y, expected)
        # The block itself has its own bits in a pass with gradients: its module is left as it is.
        mine.has_inference_bits = True
        learning, shared, logits = mine(x), mine._shared(x), mine._logits(x)
        with torch.no_grad():
            assert torch.equal(learning, mine._in_one(x, logits, shared))
        learning.sum().backward()
        assert mine.shared.down_proj.weight.grad.any()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """The device; on a CPU the oracles of both ops stand for a GPU's kernels."""
    if request.param == "cpu":
        monkeypatch.setattr(experts, "FUSED_ON", ("cpu",))
        for name in ("choose_experts", "expert_mlp"):
            op = functools.partial(getattr(ops, name), backend="reference")
            monkeypatch.setattr(ops, name, op)
    return request.param


LIKE_AN_EXPERT = {
    "with a gate": {"shared_is_gated": True},
    "sigmoids and groups": {name: OURS_V3[name] for name in OURS_V3 if name != "shared_size"},
}
OTHER_BLOCKS = {
    "larger": {"shared_size": 2 * INNER},
    "weighed inputs": {"weighs_input": True},
    "interleaved": {"is_interleaved": True},
    "of another router's rows": {"shared_is_gated": True, "router_norm_eps": 1e-6},
    "with biases": {"shared_bias": True},
}


def drawn(options, place):
    """A mixture with random weights whose shared block has the size of an expert."""
    torch.manual_seed(0)
    given = {"shared_size": INNER, **options}
    mine = Experts(E, ExpertsConfig(COUNT, 3, INNER, **given)).to(place)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return mine


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("name", LIKE_AN_EXPERT)
def test_few_tokens_have_the_shared_block_as_one_more_expert(name, tokens, place):
    mine = drawn(LIKE_AN_EXPERT[name], place)
    x = torch.randn(17, E, generator=torch.Generator().manual_seed(1)).to(place)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    with torch.no_grad():
        assert mine._few(x[:tokens], x[:tokens]) is None
        expected = mine(x[:tokens])
        mine.place_on_gpu()
        assert {*before} == {*mine.state_dict()}
        assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
        rows = x[:tokens]
        y = mine._few(rows, rows)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(y, mine(rows))
        # New weights are written in place, as `update_weights` does.
        for parameter in mine.parameters():
            parameter.mul_(0.5)
        changed = mine(rows)
        assert not torch.allclose(changed, y, rtol=0.1)
        again = drawn(LIKE_AN_EXPERT[name], place)
        again.load_state_dict(mine.state_dict())
        torch.testing.assert_close(changed, again(rows), rtol=1e-4, atol=1e-4)
        assert mine._few(x, x) is None
    assert mine._few(rows.clone().requires_grad_(), rows) is None
    mine(rows).sum().backward()
    assert mine.shared.down_proj.weight.grad.any()


@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_a_block_that_is_not_like_an_expert_stays_where_it_is(name, place):
    mine = drawn(OTHER_BLOCKS[name], place)
    pointers = [parameter.data_ptr() for parameter in mine.parameters()]
    mine.place_on_gpu()
    assert pointers == [parameter.data_ptr() for parameter in mine.parameters()]
    x = torch.randn(3, E).to(place)
    with torch.no_grad():
        assert mine._few(x, x) is None


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"num_active must be in 1 \.\.\. 4, got 5"):
        ExpertsConfig(4, 5, 16)
    with pytest.raises(ValueError, match="activation must be one of silu.*clamped, got 'tanh'"):
        ExpertsConfig(4, 2, 16, activation="tanh")
    with pytest.raises(ValueError, match="shared_size must be 0 with clamped, got 8"):
        ExpertsConfig(4, 2, 16, activation="clamped", shared_size=8)
    with pytest.raises(ValueError, match="up must have a multiple of 32 columns, got 48"):
        Experts(48, ExpertsConfig(4, 2, 32, is_packed=True))
