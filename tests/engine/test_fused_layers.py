"""The layers of a decode step in one kernel: float64 on the same weights and the same cache."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.fused_layers import FusedLayers, why_not
from tilewise.engine.settings import cache_spec
from tilewise.kernels.triton.layers import launch
from tilewise.models.config import ModelConfig
from tilewise.models.llama import Llama
from tilewise.nn.context import AttentionContext
from tilewise.nn.rope import RopeConfig
from tilewise.testing import assert_within_budget

PLACES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", id="compiled", marks=pytest.mark.gpu),
]
# name: (changes of the configuration, block size, lengths of the rows with the new token)
CASES = {
    "one_row": ({}, 16, [70]),
    "first_token": ({}, 16, [1]),
    "two_rows_one_idle": ({}, 16, [0, 33]),
    "two_long_rows": ({}, 8, [5, 130]),
    "qk_norm": ({"qk_norm": True}, 16, [49, 16]),
    "bias": ({"attention_bias": True}, 4, [40]),
    "one_key_head": ({"num_kv_heads": 1}, 16, [90]),
    "every_head_its_own_keys": ({"num_kv_heads": 4}, 1, [7, 20]),
    "odd_sizes": ({"hidden_size": 40, "intermediate_size": 1048}, 16, [23]),
    "wide_heads": ({"head_dim": 64, "num_layers": 1}, 32, [100]),
}
# In the interpreter one program computes all, and counts nobody: these show that a second run finds
# its buffers as the first did.
TWICE = ("one_row", "two_long_rows", "odd_sizes")
BASE = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=50, hidden_size=64, intermediate_size=104,
    num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=256,
    norm_eps=1e-5, hidden_act="silu", windows=(None, None), softmax_scales=(0.2, 0.2),
    rope=RopeConfig(rotary_dim=32, max_positions=256),
)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["merged_apart", "merged_in_the_product"], autouse=True)
def merges(request, monkeypatch):
    monkeypatch.setattr(launch, "MERGES_IN_PRODUCT", request.param)


def make_model(changes, dtype, place, **more):
    fields = {**changes, **more}
    heads, layers = fields.get("head_dim", 32), fields.get("num_layers", 2)
    fields |= {"rope": RopeConfig(rotary_dim=heads, max_positions=256)}
    fields = {"windows": (None,) * layers, "softmax_scales": (0.2,) * layers, **fields}
    model = Llama(replace(BASE, **fields)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 0.2)
        if "norm" in name:
            parameter += 1.0
    return model.to(place, dtype)


def make_step(model, block_size, lengths, place):
    """Return ids, positions, a storage that holds the keys before them, and the context."""
    dtype, blocks = model.dtype, [-(-length // block_size) for length in lengths]
    spec = cache_spec(model.config, block_size, dtype)
    storage = KVStorage(spec, sum(blocks) + 3, place)
    order = torch.randperm(sum(blocks) + 3).tolist()
    table = torch.zeros(len(lengths), max(*blocks, 1) + 2, dtype=torch.int32)
    slots = []
    for tensor in storage.whole:
        tensor.fill_(float("nan"))  # what no key has written
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for layer in storage.layers:
            for cache in layer:
                for position in range(length - 1):
                    cache[mine[position // block_size], position % block_size] = torch.randn(
                        cache.shape[2:]
                    ).to(dtype)
        last = length - 1
        slots.append(mine[last // block_size] * block_size + last % block_size if length else -1)
    ctx = AttentionContext(
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=place),
        max_seqlen_q=1,
        seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=place),
        block_table=table.to(place),
        slot_mapping=torch.tensor(slots, device=place),
    )
    ids = torch.randint(50, (len(lengths),), device=place)
    positions = torch.tensor([max(length - 1, 0) for length in lengths], device=place)
    return ids, positions, storage, ctx


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def norm(module, x):
    return F.rms_norm(x, x.shape[-1:], None, module.eps) * module.weight.to(x.dtype)


def plain_run(model, ids, positions, storage, ctx, dtype):
    """Compute the step by torch's operations in `dtype`, with a copy of the cache."""
    model = copy.deepcopy(model).cpu().to(dtype)
    config, heads = model.config, (-1, model.config.head_dim)
    angles = [t[:, None].to(dtype) for t in model.rotary(positions.cpu())]
    lengths, table = ctx.seqlens_k.tolist(), ctx.block_table.long().cpu()
    layers = [[t.cpu().to(dtype, copy=True) for t in layer] for layer in storage.layers]
    x = model.embed_tokens(ids.cpu())
    for layer, (k_cache, v_cache) in zip(model.layers, layers, strict=True):
        attention, mlp = layer.attention, layer.mlp
        qkv = attention.qkv_proj(norm(layer.attention_norm, x)).unflatten(-1, heads)
        hq, hk = config.num_q_heads, config.num_kv_heads
        q, k, v = qkv.split((hq, hk, hk), 1)
        if attention.q_norm is not None:
            q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
        q, k = turned(q, *angles), turned(k, *angles)
        rows = []
        for row, length in enumerate(lengths):
            if length == 0:
                rows.append(torch.zeros_like(q[row]))
                continue
            block, place = divmod(length - 1, k_cache.shape[1])
            k_cache[table[row, block], place] = k[row]
            v_cache[table[row, block], place] = v[row]
            keys, values = (c[table[row]].flatten(0, 1)[:length] for c in (k_cache, v_cache))
            s = torch.einsum("kgd,tkd->kgt", q[row].unflatten(0, (hk, -1)), keys)
            p = (s * config.softmax_scales[0]).softmax(-1)
            rows.append(torch.einsum("kgt,tkd->kgd", p, values).flatten(0, 1))
        x = x + attention.o_proj(torch.stack(rows).flatten(1))
        gate, up = mlp.gate_up_proj(norm(layer.mlp_norm, x)).chunk(2, -1)
        x = x + mlp.down_proj(F.silu(gate) * up)
    return norm(model.norm, x), layers


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_cache_keep_the_budget(name, dtype, place):
    changes, block_size, lengths = CASES[name]
    model = make_model(changes, dtype, place)
    ids, positions, storage, ctx = make_step(model, block_size, lengths, place)
    truth, wide_cache = plain_run(model, ids, positions, storage, ctx, torch.float64)
    eager, eager_cache = plain_run(model, ids, positions, storage, ctx, dtype)
    assert why_not(model, storage) is None
    fused = FusedLayers(model, storage, len(lengths))
    active = torch.tensor(lengths) > 0
    # The second run finds its counters as the first did.
    for _ in range(2 if name in TWICE or place == "cuda" else 1):
        hidden = fused(ids, positions, ctx=ctx).cpu()
        assert_within_budget(hidden[active], truth[active], eager[active])
    assert hidden.isfinite().all()
    written = ctx.slot_mapping[ctx.slot_mapping >= 0].cpu()
    for got, wide, plain in zip(storage.layers, wide_cache, eager_cache, strict=True):
        for ours, exact, rounded in zip(got, wide, plain, strict=True):
            rows = [t.cpu().flatten(0, 1) for t in (ours, exact, rounded)]
            assert_within_budget(*(t[written] for t in rows))
            others = torch.ones(len(rows[0]), dtype=torch.bool)
            others[written] = False
            assert torch.equal(rows[0][others].nan_to_num(), rows[2][others].nan_to_num())


def test_what_it_cannot_run_is_said():
    def reason(changes, dtype=torch.bfloat16, cache_dtype=torch.bfloat16):
        model = make_model({}, dtype, "cpu", **changes)
        return why_not(model, KVStorage(cache_spec(model.config, 16, cache_dtype), 4, "cpu"))

    assert reason({}) is None
    assert "float16 or bfloat16" in reason({}, torch.float32, torch.float32)
    assert "cache must have the model's dtype" in reason({}, cache_dtype=torch.int8)
    assert "hidden_act must be silu" in reason({"hidden_act": "gelu"})
    assert "no bias" in reason({"o_bias": True})
    assert "multiples of 8" in reason({"intermediate_size": 100})
    assert "at most 4096" in reason({"intermediate_size": 4104})
    assert "at most 16" in reason({"num_q_heads": 17, "num_kv_heads": 1})
    assert "no layer may have a window" in reason({"windows": (None, 8)})
    assert "one softmax_scale" in reason({"softmax_scales": (0.2, 0.3)})
