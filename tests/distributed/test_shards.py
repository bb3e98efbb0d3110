"""A model in shards is the model: logits, the parts that are read, the rules of what divides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.distributed.thread_group import DealtGroup, on_ranks
from tests.models import test_mixtures as mixtures
from tests.models import test_state_families as states
from tests.models.test_families import make
from tests.models.test_gpt_oss import save_mxfp4
from tests.models.tiny import make_hf, save_hf
from tilewise.distributed import shards
from tilewise.distributed.shard_group import ShardGroup
from tilewise.distributed.shards import (
    check_shards,
    head_of,
    load_shard,
    shard_config,
    vocabulary_rows,
)
from tilewise.errors import CheckpointError
from tilewise.models import load_model
from tilewise.models.config import read_config

IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60, 22, 71, 13, 2, 100, 0]])


@torch.inference_mode()
def _logits(model):
    return model.compute_logits(model(IDS)[0])


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("llama", 2),  # a key head for each rank
        ("llama_mha_tied", 2),  # an embedding that is the head
        ("llama_mqa_biases", 2),  # one key head for both, biases of all projections
        ("qwen2_bias_tied", 2),
        ("qwen3_norm_wide_heads", 2),  # norms of heads, which all ranks have
        ("gpt2", 2),  # q, k and v in one transposed tensor
        ("gpt2_untied", 4),
        ("qwen2_layer_types", 2),  # layers with windows and without
        ("deepseek", 2),  # heads are cut, latents are whole
        ("deepseek_q_rank_biases", 2),  # queries of a latent, too, and biases that are summed
        ("deepseek_yarn", 2),
    ],
)
def test_shards_give_the_logits_of_the_whole(case, size, tmp_path):
    path = save_hf(make_hf(case), tmp_path)
    want = _logits(load_model(path, dtype="float64"))
    for got in on_ranks(size, lambda group: _logits(load_shard(path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_packed_shards_give_the_logits_of_the_whole(tmp_path):
    path = save_hf(make_hf("llama_mqa_biases"), tmp_path)
    want = _logits(load_model(path, dtype="float32"))
    for got in on_ranks(2, lambda group: _logits(load_shard(path, group))):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_one_shard_is_the_whole(tmp_path):
    path = save_hf(make_hf("llama"), tmp_path)
    group = ShardGroup(0, 1, torch.device("cpu"))
    got = _logits(load_shard(path, group, dtype="float64"))
    torch.testing.assert_close(got, _logits(load_model(path, dtype="float64")))


def test_more_ranks_than_rows_of_the_vocabulary(tmp_path):
    # 101 tokens in steps of 64: the third and fourth rank have none.
    path = save_hf(make_hf("gpt2"), tmp_path)
    assert [vocabulary_rows(101, rank, 4) for rank in range(4)] == [
        (0, 64), (64, 101), (101, 101), (101, 101),
    ]  # fmt: skip
    want = _logits(load_model(path, dtype="float64"))
    for got in on_ranks(4, lambda group: _logits(load_shard(path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_most_likely_token_needs_two_numbers_of_each_rank(tmp_path):
    path = save_hf(make_hf("llama"), tmp_path)
    rows = torch.zeros(5, 101)
    rows[0, 99] = 3.0  # of the second rank
    rows[1, 7] = rows[1, 80] = 2.0  # equal: the first
    rows[2, 70] = float("nan")
    rows[3, 3] = float("inf")
    rows[4] = -1.0

    def work(group):
        head = head_of(load_shard(path, group))
        return head.most_likely(rows[:, head.first : head.end])

    for values, tokens in on_ranks(2, work):
        assert tokens[[0, 1, 4]].tolist() == [99, 7, 0]
        assert values.isfinite().tolist() == [True, True, False, False, True]


def test_a_shard_reads_and_holds_its_part_only(tmp_path):
    path = save_hf(make_hf("llama"), tmp_path)
    whole = load_model(path)
    shards = on_ranks(2, lambda group: load_shard(path, group, dtype="float64"))
    for name in ("attention.qkv_proj", "mlp.gate_up_proj"):
        weight = whole.get_submodule(f"layers.0.{name}").weight
        for shard in shards:
            part = shard.get_submodule(f"layers.0.{name}").weight
            assert part.shape == (weight.shape[0] // 2, weight.shape[1])
    config = shard_config(whole.config, 2)
    assert (config.num_q_heads, config.num_kv_heads, config.intermediate_size) == (3, 1, 40)


def test_a_tensor_of_another_shape_is_refused_though_a_part_would_fit(tmp_path):
    path = save_hf(make_hf("llama"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] = 64
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"must have shape \(64, 48\), got \(80, 48\)"):
        load_shard(path, ShardGroup(1, 2, torch.device("cpu")))


def test_latents_are_whole_and_their_heads_are_cut(tmp_path):
    path = save_hf(make_hf("deepseek_q_rank_biases"), tmp_path)
    whole = load_model(path, dtype="float64").get_submodule("layers.1.attention")
    shards = [
        model.get_submodule("layers.1.attention")
        for model in on_ranks(2, lambda group: load_shard(path, group, dtype="float64"))
    ]
    for name in ("q_a_proj", "kv_a_proj", "kv_a_norm", "q_a_norm"):
        want = whole.get_parameter(f"{name}.weight")
        assert all(torch.equal(shard.get_parameter(f"{name}.weight"), want) for shard in shards)
    for name in ("q_b_proj", "kv_b_proj"):
        parts = [shard.get_parameter(f"{name}.weight") for shard in shards]
        assert torch.equal(torch.cat(parts), whole.get_parameter(f"{name}.weight"))
    parts = [shard.get_parameter("o_proj.linear.weight") for shard in shards]
    assert torch.equal(torch.cat(parts, dim=1), whole.get_parameter("o_proj.weight"))


@pytest.mark.parametrize("case", ["deepseek_q_rank_biases", "gpt2"])
def test_random_weights_that_are_not_cut_are_one_ranks(case, tmp_path):
    path = save_hf(make_hf(case), tmp_path)

    def load(group):
        return load_shard(path, group, dtype="float64", random_weights=True)

    one, other = (dict(model.named_parameters()) for model in on_ranks(2, load))
    whole = {"deepseek_q_rank_biases": "layers.0.attention.kv_a_proj.weight",
             "gpt2": "embed_positions.weight"}[case]  # fmt: skip
    cut = {"deepseek_q_rank_biases": "layers.0.attention.kv_b_proj.weight",
           "gpt2": "layers.0.attention.qkv_proj.weight"}[case]  # fmt: skip
    assert torch.equal(one[whole], other[whole])
    assert not torch.equal(one[cut], other[cut])


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("llama", 4, "num_q_heads 6, got 4"),
        ("llama", 3, "intermediate_size 80, got 3"),
        ("gpt2", 3, "num_q_heads 4, got 3"),
        ("deepseek", 4, "num_q_heads 6, got 4"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(case, size, message, tmp_path):
    config = read_config(save_hf(make_hf(case), tmp_path))
    with pytest.raises(ValueError, match=message):
        shard_config(config, size)


def test_key_heads_that_neither_divide_nor_are_divided_are_refused(tmp_path):
    config = read_config(save_hf(make_hf("llama_mha_tied"), tmp_path))
    layer = config.layers[0]
    odd = replace(layer, attention=replace(layer.attention, num_q_heads=12))
    with pytest.raises(ValueError, match="num_kv_heads 6, or be a multiple of it, got 4"):
        shard_config(replace(config, layers=(odd,)), 4)


@pytest.mark.parametrize("refusals", [[None, None], ["no access", None], ["a", "b"]])
def test_small_sums_are_symmetric_memorys_on_all_ranks_or_on_none(refusals):
    def work(group):
        group._buffer = object() if refusals[group.rank] is None else None
        return group._agreed_on_buffer(refusals[group.rank]), group._buffer is not None

    found = on_ranks(2, work)
    is_agreed = refusals == [None, None]
    assert [has_buffer for _, has_buffer in found] == [is_agreed] * 2
    assert all((why is None) == is_agreed for why, _ in found)
    if refusals[1] is None and not is_agreed:
        assert found[1][0] == "rank 0 cannot"


@pytest.mark.parametrize(
    "case", ["gpt_neox", "falcon_groups", "phi3", "cohere2", "llama4", "ministral3"]
)
def test_fused_tensors_and_parallel_blocks_are_cut_at_their_heads(case, tmp_path):
    make(case).save_pretrained(tmp_path)
    whole = load_model(tmp_path, dtype="float64")
    want = _logits(whole)
    for got in on_ranks(2, lambda group: _logits(load_shard(tmp_path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", mixtures.CASES)
def test_mixtures_are_cut_within_their_experts(case, tmp_path):
    mixtures.make(case).save_pretrained(tmp_path)
    want = _logits(load_model(tmp_path, dtype="float64"))
    for got in on_ranks(2, lambda group: _logits(load_shard(tmp_path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_shard_of_a_mixture_holds_its_part_of_every_expert(tmp_path):
    mixtures.make("deepseek_v3").save_pretrained(tmp_path)
    whole = load_model(tmp_path, dtype="float64").get_submodule("layers.1.mlp")
    shards = on_ranks(2, lambda group: load_shard(tmp_path, group, dtype="float64"))
    parts = [shard.get_submodule("layers.1.mlp").experts for shard in shards]
    gates, ups = zip(*(part.up.chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=1), whole.up)
    assert torch.equal(torch.cat([part.down for part in parts], dim=2), whole.down)
    assert all(torch.equal(part.router.weight, whole.router.weight) for part in parts)
    assert parts[0].shared.down_proj.weight.shape == (48, 24)


@pytest.mark.parametrize(
    ("case", "size"),
    [("bloom", 2), ("mpt", 3), ("olmo2", 2), ("olmo2", 4), ("phi", 2), ("codegen", 2)],
)
def test_slopes_norms_over_all_heads_and_biases_of_the_head_are_cut(case, size, tmp_path):
    make(case).save_pretrained(tmp_path)
    want = _logits(load_model(tmp_path, dtype="float64"))
    for got in on_ranks(size, lambda group: _logits(load_shard(tmp_path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stays_packed", [False, True])
@pytest.mark.parametrize(("inner", "size", "width"), [(64, 2, 32), (96, 2, 64), (96, 4, 32)])
def test_mxfp4_is_cut_between_groups_and_filled_up(
    inner, size, width, stays_packed, tmp_path, monkeypatch
):
    """96 are three groups: the second of two ranks has one, and the last of four ranks none."""
    hf = make_hf("gpt_oss", intermediate_size=inner, num_key_value_heads=4, num_attention_heads=8)
    path = save_mxfp4(hf, tmp_path)
    want = _logits(load_model(path, dtype="float64"))
    if stays_packed:  # as on a GPU
        monkeypatch.setattr(shards, "for_device", lambda config, device: config)
    made = on_ranks(size, lambda group: (shard := load_shard(path, group, dtype="float64"),
                                         _logits(shard)))  # fmt: skip
    for shard, got in made:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        down = shard.get_submodule("layers.0.mlp").experts.down
        assert down.shape[2] * (32 if stays_packed else 1) == width
        assert down.dtype == (torch.uint8 if stays_packed else torch.float64)


def test_plain_experts_of_gpt_oss_are_cut_anywhere_or_refused(tmp_path):
    hf = make_hf("gpt_oss", intermediate_size=40, num_key_value_heads=2, num_attention_heads=6)
    path = save_hf(hf, tmp_path)
    want = _logits(load_model(path, dtype="float64"))
    for got in on_ranks(2, lambda group: _logits(load_shard(path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="intermediate_size of experts 40, got 3"):
        shard_config(read_config(path), 3)


# Of experts that read latents, and of blocks that layers share.
NOT_CUT = ("nemotron_h", "zamba2", "zamba2_one_block")


@pytest.mark.parametrize("case", [case for case in states.CASES if case not in NOT_CUT])
def test_layers_with_a_state_are_cut_at_their_heads(case, tmp_path):
    save_hf(states.make(case), tmp_path)
    want = _logits(load_model(tmp_path, dtype="float64"))
    for got in on_ranks(2, lambda group: _logits(load_shard(tmp_path, group, dtype="float64"))):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("case", "leaves"), [("qwen3_5", False), ("lfm2", True)])
def test_ranks_leave_their_sums_to_norms_that_add_over_ranks(case, leaves, tmp_path):
    save_hf(states.make(case), tmp_path)
    alone = load_model(tmp_path)
    assert alone.layers[0].mixer.leaves_parts
    assert alone.layers[1].attention.leaves_parts
    for shard in on_ranks(2, lambda group: load_shard(tmp_path, group)):
        assert shard.layers[0].mixer.leaves_parts == leaves
        assert shard.layers[1].attention.leaves_parts == leaves


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_ranks_that_add_up_a_share_of_the_rows_give_the_logits_of_the_whole(activation, tmp_path):
    path = save_hf(make_hf("llama", hidden_act=activation), tmp_path)
    model = load_model(path, dtype="float64")
    want = _logits(model)

    def work(group):
        shard = load_shard(path, group, dtype="float64")
        before = group.num_calls
        logits = _logits(shard)
        assert group.inbox is not None
        return logits, group.num_calls - before

    for got, calls in on_ranks(2, work, DealtGroup):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert calls == 2 * len(model.layers) + 2  # and of the embedding and the head


@pytest.mark.parametrize(
    ("case", "changes", "size", "message"),
    [
        ("qwen3_5", {"intermediate_size": 48}, 6, "num_kv_heads 2|num_key_heads 2, got 6"),
        ("mamba2", {}, 4, "heads of the recurrence 6, got 4"),
        ("mamba2", {"n_groups": 2}, 3, "groups of the norm 2, got 3"),
        ("nemotron_h", {}, 2, "must be 1 for experts that read latents, got 2"),
    ],
)
def test_a_state_that_a_size_does_not_divide_is_refused(case, changes, size, message, tmp_path):
    save_hf(states.make(case), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        check_shards(read_config(tmp_path), size)


def test_a_shard_of_a_gated_delta_net_has_its_heads_of_each_part(tmp_path):
    save_hf(states.make("qwen3_next"), tmp_path)  # whose rows lie by key heads
    whole = load_model(tmp_path, dtype="float64").get_submodule("layers.0.mixer")
    made = on_ranks(2, lambda group: load_shard(tmp_path, group, dtype="float64"))
    mixers = [shard.get_submodule("layers.0.mixer") for shard in made]
    assert mixers[0].config.num_value_heads == 2
    parts = [mixer.qkvz_proj.weight.split(mixer.config.parts) for mixer in mixers]
    joined = torch.cat([part for pair in zip(*parts, strict=True) for part in pair])
    assert torch.equal(joined, whole.qkvz_proj.weight)


@pytest.mark.parametrize("case", ["gemma4", "gemma4_experts", "zamba2"])
def test_layers_with_more_than_two_blocks_are_refused(case, tmp_path):
    maker = states.make if case == "zamba2" else make
    maker(case).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="must be 1 for layers that share keys or blocks, or have a scale"
    ):
        check_shards(read_config(tmp_path), 2)
