"""A GGUF file named as a model: served with its tokenizer and template, as the same values are."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.models.gguf import vocabularies
from tests.models.gguf.test_architectures import converted, metadata_of
from tests.models.gguf.test_file import mutated
from tests.models.gguf.writer import Raw, llama_pairs, random_blocks, write
from tilewise import LLM, SamplingParams
from tilewise.errors import CheckpointError
from tilewise.models import load_model
from tilewise.models.gguf.folder import gguf_choices, gguf_folder
from tilewise.models.gguf.types import TYPES, repack
from tilewise.models.hub import checkpoint_folder
from tilewise.nn.quantised import QuantisedLinear
from tilewise.server.chat import read_template
from tilewise.server.templates import Templates

_VOCAB = 440
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
_KINDS = {"F32": 0, "Q8_0": 8, "Q4_0": 2, "Q4_K": 12}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pair(folder: Path, arch: str, kind: int) -> tuple[Path, Path]:
    """Write a model as a GGUF file of a type and, with the same values, as safetensors."""
    made: tuple[Any, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[arch]
    metadata = vocabularies.byte_pairs_metadata("qwen2", size=_VOCAB)
    end = metadata["tokenizer.ggml.eos_token_id"]
    torch.manual_seed(1)
    theirs = made[1](made[0](**_SHAPE, eos_token_id=end, tie_word_embeddings=False))
    theirs.save_pretrained(folder / "hf")
    state = load_file(folder / "hf" / "model.safetensors")
    tensors = converted(arch, state, theirs.config)
    if kind:
        rng = np.random.default_rng(kind)
        for name, (_, shape, _) in tensors.items():
            if len(shape) == 2:
                tensors[name] = random_blocks(shape, kind, rng)
        for name in [name for name in state if state[name].dim() == 2]:
            state[name] = _values(name, tensors, arch)
        save_file(state, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    vocabularies.byte_pairs("qwen2").save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": vocabularies.TEMPLATE})
    )
    file = write(folder / "m.gguf", metadata_of(arch, theirs.config) | metadata, tensors)
    return file, folder / "hf"


def _values(name: str, tensors: dict[str, Raw], arch: str) -> torch.Tensor:
    """Return the numbers of a file's tensor, for the checkpoint of safetensors."""
    inner = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    if name == "lm_head.weight":
        found = "output"
    elif "embed_tokens" in name:
        found = "token_embd"
    else:
        part = name.split(".")[-2].removesuffix("_proj")
        found = f"blk.{name.split('.')[2]}.{inner.get(part, f'ffn_{part}')}"
    kind, shape, raw = tensors[f"{found}.weight"]
    data = torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(shape[0], -1)
    values = repack(data, TYPES[kind]).dequantise()
    heads = {"attn_q": 4, "attn_k": 2}.get(found.split(".")[-1])
    if arch == "llama" and heads:  # the file has them in pairs
        order = torch.argsort(llama_pairs(torch.arange(shape[0]), heads))
        values = values[order]
    return values


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_file_gives_the_logits_of_the_same_values(arch, kind, tmp_path):
    file, folder = pair(tmp_path, arch, _KINDS[kind])
    ids = torch.randint(0, _VOCAB, (1, 20), generator=torch.Generator().manual_seed(2))
    logits = []
    for model in (load_model(file, dtype="float32"), load_model(folder, dtype="float32")):
        with torch.no_grad():
            logits.append(model.compute_logits(model(ids)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_file_is_generated_from_with_its_own_tokenizer_and_template(arch, tmp_path):
    file, folder = pair(tmp_path, arch, _KINDS["Q4_0"])
    drawing = SamplingParams(temperature=0.0, max_tokens=8)
    messages = [{"role": "user", "content": "The quick brown fox"}]
    renderer = Templates()
    answers = []
    for model in (file, folder):
        source, tokens = read_template(checkpoint_folder(model), None)
        assert source is not None
        told = {**tokens, "messages": messages, "add_generation_prompt": True}
        prompts = ["She sells sea shells", renderer.render(source, told)]
        with LLM(str(model), dtype="float32", num_blocks=32) as llm:
            found = llm.generate(prompts, drawing)
        answers.append([(x.prompt_token_ids, x.outputs[0].text) for x in found])
    renderer.close()
    assert answers[0] == answers[1]
    begin = vocabularies.byte_pairs("qwen2").token_to_id("<|im_start|>")
    assert answers[0][1][0][0] == begin


def test_projections_stay_as_narrow_as_the_file_has_them(tmp_path):
    path, wide = pair(tmp_path, "llama", _KINDS["Q4_0"])
    narrow, other = load_model(path, dtype="float32"), load_model(wide, dtype="float32")
    for mine, its in zip(narrow.layers, other.layers, strict=True):
        for found, wanted in (
            (mine.attention.qkv_proj, its.attention.qkv_proj),
            (mine.mlp.down_proj, its.mlp.down_proj),
        ):
            assert isinstance(found, QuantisedLinear)
            assert torch.equal(found.dequantised(), wanted.weight)
            assert found.nbytes * 8 <= 4.5 * wanted.weight.numel()


def test_all_ends_of_a_file_end_an_answer(tmp_path):
    folder = gguf_folder(pair(tmp_path, "qwen3", 0)[0])
    library = vocabularies.byte_pairs("qwen2")
    told = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert told == [library.token_to_id(x) for x in ("<|im_end|>", "<|endoftext|>")]


def test_the_folder_of_a_file_is_made_once_and_again_when_the_file_changes(tmp_path):
    file = pair(tmp_path, "qwen3", 0)[0]
    first = gguf_folder(file)
    (first / "mark").touch()
    assert (gguf_folder(file) / "mark").exists()
    raw = file.read_bytes()
    file.write_bytes(raw + bytes(32))
    assert gguf_folder(file) != first


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    file = pair(tmp_path, "qwen3", 0)[0]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = gguf_folder(file)
    assert (found / "config.json").is_file()
    shutil.rmtree(found.parent)


def test_a_folder_of_one_file_is_that_file_and_of_several_names_them(tmp_path):
    file = pair(tmp_path, "qwen3", 0)[0]
    home = tmp_path / "files"
    home.mkdir()
    shutil.copy(file, home / "m-Q8_0.gguf")
    (home / "mmproj-m.gguf").touch()
    assert (checkpoint_folder(home) / "config.json").is_file()
    shutil.copy(file, home / "m-Q4_0.gguf")
    with pytest.raises(
        CheckpointError, match=r"has several GGUF files: give one of .*m-Q4_0.gguf, .*m-Q8_0.gguf"
    ):
        checkpoint_folder(home)


def test_of_split_files_the_first_part_is_chosen():
    names = [f"x-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert gguf_choices([*names, "y.gguf", "README.md"]) == [names[0], "y.gguf"]


def test_what_is_no_model_or_of_no_known_kind_is_refused_by_name(tmp_path):
    def refused(metadata, message):
        with pytest.raises(CheckpointError, match=message):
            gguf_folder(write(tmp_path / "x.gguf", metadata, {}))

    refused({"general.architecture": "mamba"}, "must be one of llama, .*, got 'mamba'")
    refused({"general.type": "adapter"}, "must hold a model, got general.type 'adapter'")
    refused({}, "general.architecture of x.gguf must be a text, got None")
    refused({"general.architecture": "llama"}, "must hold tensor token_embd.weight")
    with pytest.raises(CheckpointError, match=r"got no '.*none.gguf'"):
        gguf_folder(tmp_path / "none.gguf")


def fuzz(folder, seed, count):
    """Load mutations of a small model, whole or refused; return how many were refused."""
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    metadata = metadata_of("llama", theirs.config) | vocabularies.pieces_metadata()
    raw = write(
        folder / "m.gguf", metadata, converted("llama", theirs.state_dict(), theirs.config)
    ).read_bytes()
    fields = raw[:700]  # nearly all of it is the vocabulary
    rng, refused = random.Random(seed), 0
    tracemalloc.start()
    try:
        for i in range(count):
            path = folder / f"{i}.gguf"
            path.write_bytes(mutated(rng, fields) + raw[len(fields) :])
            try:
                load_model(path)
            except CheckpointError:
                refused += 1
            path.unlink()
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    return refused


@pytest.mark.filterwarnings("ignore")
def test_mutations_of_a_model_are_loaded_or_refused(tmp_path):
    assert fuzz(tmp_path, 1, 40) > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_mutations_of_a_model_are_loaded_or_refused(tmp_path):
    assert fuzz(tmp_path, 2, 1000) > 200
