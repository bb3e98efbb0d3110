"""Mean-pooling of key and value heads: what is averaged, what is kept, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from tilewise.models.config import ModelConfig
from tilewise.models.native import NativeDecoder
from tilewise.nn import Attention, RopeConfig, RotaryEmbedding, to_gqa

E, D = 24, 8


def make(num_kv_heads: int = 4, **options) -> Attention:
    attention = Attention(E, 4, num_kv_heads, D, **options)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention


def test_each_new_head_is_the_mean_of_its_group():
    attention = make(qkv_bias=True, qk_norm_eps=1e-6)
    small = to_gqa(attention, 2)
    assert (small.num_q_heads, small.num_kv_heads) == (4, 2)
    for name in ("weight", "bias"):
        old, new = (getattr(module.qkv_proj, name) for module in (attention, small))
        q, k, v = old.unflatten(0, (12, D)).split([4, 4, 4])
        pooled = [q, (k[::2] + k[1::2]) / 2, (v[::2] + v[1::2]) / 2]
        torch.testing.assert_close(new.unflatten(0, (8, D)), torch.cat(pooled))
    assert torch.equal(small.o_proj.weight, attention.o_proj.weight)
    assert torch.equal(small.k_norm.weight, attention.k_norm.weight)


def test_heads_that_are_equal_compute_the_same_as_before():
    attention, x = make(), torch.randn(2, 9, E)
    with torch.no_grad():
        heads = attention.qkv_proj.weight.unflatten(0, (12, D))
        heads[5], heads[7], heads[9], heads[11] = heads[4], heads[6], heads[8], heads[10]
    rope = RotaryEmbedding(RopeConfig(rotary_dim=D)).prefix(9, x.device)
    torch.testing.assert_close(to_gqa(attention, 2)(x, rope), attention(x, rope))


def test_the_result_trains_and_the_original_is_left_alone():
    attention, x = make(), torch.randn(1, 5, E)
    before = copy.deepcopy(attention.state_dict())
    small = to_gqa(attention, 1)
    assert small.qkv_proj.out_features == 6 * D
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-4)
    loss = small(x).square().mean()
    loss.backward()
    optimizer.step()
    assert small(x).square().mean() < loss
    for name, tensor in attention.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_whole_model_is_converted_with_its_config():
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 19, "hidden_size": 32}
    config |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = NativeDecoder(ModelConfig.from_hf(config | {"max_position_embeddings": 64}))
    model.init_weights(std=0.3)
    small = to_gqa(model, 2)
    assert (small.config.num_kv_heads, model.config.num_kv_heads) == (2, 4)
    ids = torch.randint(0, model.config.vocab_size, (1, 7))
    fresh = NativeDecoder(small.config)
    fresh.load_state_dict(small.state_dict())
    torch.testing.assert_close(fresh(ids), small(ids))
    states = model.state_dict()
    dims = {"num_q_heads": 4, "head_dim": model.config.head_dim}
    for name, tensor in to_gqa(states, 2, **dims).items():
        assert torch.equal(tensor, small.state_dict()[name]), name


def test_states_with_separate_projections_need_no_query_heads():
    k = torch.randn(4 * D, E).bfloat16()
    state = {"self_attn.k_proj.weight": k, "self_attn.q_proj.weight": k}
    small = to_gqa(state, 2, head_dim=D)
    heads = k.float().unflatten(0, (2, 2, D)).mean(1).flatten(0, 1)
    assert torch.equal(small["self_attn.k_proj.weight"], heads.bfloat16())
    assert small["self_attn.q_proj.weight"] is k


def test_refusals_name_the_argument():
    with pytest.raises(ValueError, match="num_kv_heads must divide the 4 there are, got 3"):
        to_gqa(make(), 3)
    with pytest.raises(ValueError, match="num_kv_heads must divide the 2 there are, got 4"):
        to_gqa(make(2), 4)
    state = make().state_dict()
    with pytest.raises(ValueError, match="head_dim must be given for a state dict, got None"):
        to_gqa(state, 2)
    with pytest.raises(ValueError, match="num_q_heads must be given to part the rows of"):
        to_gqa(state, 2, head_dim=D)
    with pytest.raises(TypeError, match=r"module must hold nn.Attention, got Linear"):
        to_gqa(torch.nn.Linear(2, 2), 1)
