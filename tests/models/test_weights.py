"""Checkpoints load whole or say in one sentence what is wrong; what we save, transformers loads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.tiny import CASES, DEEPSEEK_CASES, GPT2_CASES, VOCAB, make_hf, save_hf
from tilewise.errors import CheckpointError
from tilewise.models import load_model, save_model
from tilewise.models.weight_table import Weight

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_hf(make_hf("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A llama checkpoint of its own for each test to damage."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def rewrite(checkpoint, change):
    tensors = load_file(checkpoint / FILE)
    change(tensors)
    save_file(tensors, checkpoint / FILE)


def test_sharded_checkpoint_equals_the_single_file(saved, tmp_path):
    save_hf(make_hf("llama"), tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    sharded, single = load_model(tmp_path).state_dict(), load_model(saved).state_dict()
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 30_000], ids=["single", "sharded"])
@pytest.mark.parametrize(
    "case",
    [
        "llama_mha_tied",
        "qwen2_second_layer_window",
        "gpt2_untied",
        "deepseek_q_rank_biases",
        "deepseek_yarn",
        "gemma3",
        "gemma3_biases_softcap",
    ],
)
def test_transformers_loads_what_we_save(tmp_path, case, max_shard_bytes):
    hf = make_hf(case)
    ours = load_model(save_hf(hf, tmp_path / "theirs"))
    save_model(ours, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "ours" / INDEX).is_file() == (max_shard_bytes == 30_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(hf)
    ids = torch.randint(0, VOCAB, (1, 30))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hf(ids).logits)


@pytest.mark.parametrize("case", [*CASES, *GPT2_CASES, *DEEPSEEK_CASES])
def test_saving_and_loading_changes_no_bit(tmp_path, case):
    first = load_model(save_hf(make_hf(case), tmp_path / "theirs"))
    save_model(first, tmp_path / "ours")
    second = load_model(tmp_path / "ours")
    assert second.config == first.config
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, second.state_dict()[name]), name


def test_saving_records_the_dtype_of_the_parameters(saved, tmp_path):
    save_model(load_model(saved, dtype="bfloat16"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(tmp_path).embed_tokens.weight.dtype == torch.bfloat16


def test_saving_replaces_the_other_layout_and_nothing_else(saved, tmp_path):
    model = load_model(saved)
    (tmp_path / "tokenizer.json").write_text("{}")

    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    save_model(model, tmp_path, max_shard_bytes=50_000)
    save_model(model, tmp_path)
    assert names() == ["config.json", FILE, "tokenizer.json"]
    with torch.no_grad():
        model.norm.weight += 1
    save_model(model, tmp_path, max_shard_bytes=50_000)
    assert FILE not in names()
    assert INDEX in names()
    assert "tokenizer.json" in names()
    assert torch.equal(load_model(tmp_path).norm.weight, model.norm.weight)


def test_each_parameter_is_in_the_table_once(saved):
    model = load_model(saved)
    assert sorted(weight.name for weight in model.weight_table()) == sorted(model.state_dict())


def test_parts_split_a_fused_parameter_by_rows():
    parameter = torch.arange(12.0).view(6, 2)
    q, k, v = Weight("qkv", ("q", "k", "v"), rows=(4, 1, 1)).parts(parameter)
    assert (q[0], k[0], v[0]) == ("q", "k", "v")
    assert torch.equal(k[1], parameter[4:5])
    ((_, conv),) = Weight("w", ("conv",), transposed=True).parts(parameter)
    assert torch.equal(conv, parameter.T)


def test_old_rotary_buffers_and_a_stored_tied_head_are_ignored(tmp_path):
    save_hf(make_hf("llama_mha_tied"), tmp_path)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, add)
    assert load_model(tmp_path).lm_head is None


HEADS = ("llama_mha_tied", "gpt2", "qwen2_bias_tied")


@pytest.mark.parametrize("case", HEADS)
def test_a_head_of_its_own_counts_for_more_than_a_config_that_ties_it(tmp_path, case):
    """As in transformers: fine-tunes that trained the head often leave tie_word_embeddings true."""
    peer = make_hf(case)
    save_hf(peer, tmp_path)

    def add(tensors):
        [table] = [
            t for n, t in tensors.items() if n.endswith(("wte.weight", "embed_tokens.weight"))
        ]
        tensors["lm_head.weight"] = table * 0.5 + 0.25

    rewrite(tmp_path, add)
    ids = torch.arange(1, 25)[None]
    peer = type(peer).from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = load_model(tmp_path)
    assert not ours.config.tie_word_embeddings
    save_model(ours, tmp_path / "again")
    again = load_model(tmp_path / "again")
    with torch.no_grad():
        wanted = peer(ids).logits
        for model in (ours, again):
            logits = model.compute_logits(model(ids))
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", HEADS)
def test_a_tied_table_may_be_stored_by_the_name_of_the_head_alone(tmp_path, case):
    peer = make_hf(case)
    save_hf(peer, tmp_path)

    def rename(tensors):
        [name] = [n for n in tensors if n.endswith(("wte.weight", "embed_tokens.weight"))]
        tensors["lm_head.weight"] = tensors.pop(name)

    rewrite(tmp_path, rename)
    ids = torch.arange(1, 25)[None]
    ours = load_model(tmp_path)
    assert ours.lm_head is None
    save_model(ours, tmp_path / "again")
    assert load_model(tmp_path / "again").lm_head is None
    with torch.no_grad():
        logits = ours.compute_logits(ours(ids))
        torch.testing.assert_close(logits, peer(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 2**31 - 1}, {"intermediate_size": 10**9}, {"num_attention_heads": 10**7}],
)
def test_sizes_that_are_not_the_files_are_refused_before_memory_is_taken(checkpoint, changes):
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "head_dim": 8, **changes}))
    with pytest.raises(CheckpointError, match=r"must have shape \(.*\), got \("):
        load_model(checkpoint)


def test_missing_weight_file_is_named(checkpoint):
    (checkpoint / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"must hold {FILE}, {INDEX} or .*, got none"):
        load_model(checkpoint)
    (checkpoint / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"got model\.pt"):
        load_model(checkpoint)


def test_missing_shard_is_named(tmp_path):
    save_hf(make_hf("llama"), tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        CheckpointError, match=f"every shard that {INDEX} names, got no {shard.name}"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/{}/model.safetensors", "a/../../x"])
def test_an_index_names_no_file_outside_of_its_folder(checkpoint, tmp_path, name):
    """Not even one that is there, and whole."""
    inside = checkpoint / "inside"
    inside.mkdir()
    for file in checkpoint.glob("*.json"):
        (inside / file.name).write_bytes(file.read_bytes())
    name = name.format(checkpoint)
    (inside / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="must name files of the checkpoint's folder, got"):
        load_model(inside)


def test_a_shard_may_be_a_link_as_in_a_cache_of_the_hubs(tmp_path):
    save_hf(make_hf("llama"), tmp_path / "model", max_shard_size="30KB")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, shard in enumerate(sorted((tmp_path / "model").glob("model-*.safetensors"))):
        shard.rename(blobs / str(number))
        shard.symlink_to(f"../blobs/{number}")
    load_model(tmp_path / "model")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index_is_named(checkpoint, text):
    (checkpoint / FILE).unlink()
    (checkpoint / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} must be JSON with a weight_map"):
        load_model(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "length", "header", "data"])
def test_truncated_file_is_named(checkpoint, keep):
    data = (checkpoint / FILE).read_bytes()
    (checkpoint / FILE).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=f"{FILE} must be a whole safetensors file, got "):
        load_model(checkpoint)


def test_what_git_left_of_a_large_file_is_recognised(checkpoint):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 15386928\n"
    (checkpoint / FILE).write_text(pointer)
    with pytest.raises(CheckpointError, match=f"{FILE} must be .* got a Git LFS pointer"):
        load_model(checkpoint)


def test_missing_tensor_is_named(checkpoint):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"checkpoint must hold tensor {name}, got none"):
        load_model(checkpoint)


def test_untied_head_must_be_there(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"must hold tensor lm_head\.weight, got none"):
        load_model(checkpoint)


def test_wrong_shape_is_named(checkpoint):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    rewrite(checkpoint, cut)
    message = rf"tensor model\.norm\.weight of {FILE} must have shape \(48,\), got \(47,\)"
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)


def test_integer_tensor_is_named(checkpoint):
    def quantise(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    rewrite(checkpoint, quantise)
    with pytest.raises(CheckpointError, match=r"must be floating point, got torch\.int8"):
        load_model(checkpoint)


def test_unexpected_tensors_are_listed(checkpoint):
    def add(tensors):
        tensors |= {f"model.layers.9.a{i}": torch.ones(1) for i in range(5)}

    rewrite(checkpoint, add)
    message = r"only tensors of LlamaForCausalLM, got model\.layers\.9\.a0, .* and 2 more"
    with pytest.raises(CheckpointError, match=message):
        load_model(checkpoint)
