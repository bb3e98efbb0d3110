"""Weights in files of every layout that checkpoints come in, and the files that are refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_hf, save_hf
from tilewise.errors import CheckpointError
from tilewise.models import load_model

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_hf(make_hf("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def checkpoint(saved, tmp_path):
    """The folder of a checkpoint of its own without weights, and the weights."""
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    return folder, tensors


def halves(tensors):
    names = sorted(tensors)
    middle = len(names) // 2
    return [{n: tensors[n] for n in part} for part in (names[:middle], names[middle:])]


def assert_same(folder, saved):
    found, wanted = load_model(folder).state_dict(), load_model(saved).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("is_zip", [True, False], ids=["mapped", "before torch 1.6"])
def test_a_pickle_of_tensors_is_loaded(checkpoint, saved, is_zip):
    folder, tensors = checkpoint
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_same(folder, saved)


@pytest.mark.parametrize("has_index", [True, False])
def test_pickles_in_shards_are_loaded(checkpoint, saved, has_index):
    folder, tensors = checkpoint
    places = {}
    for i, part in enumerate(halves(tensors)):
        name = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save(part, folder / name)
        places |= dict.fromkeys(part, name)
    if has_index:
        told = str({"weight_map": places}).replace("'", '"')
        (folder / "pytorch_model.bin.index.json").write_text(told)
    (folder / "training_args.bin").write_bytes(b"no pickle")
    assert_same(folder, saved)


@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("gptq_model-4bit-128g.safetensors", "more.safetensors"),
    ],
)
def test_shards_without_an_index_are_loaded(checkpoint, saved, names):
    folder, tensors = checkpoint
    for name, part in zip(names, halves(tensors), strict=True):
        save_file(part, folder / name)
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")  # safetensors come first
    assert_same(folder, saved)


def test_a_shard_that_the_names_of_others_tell_of_is_missed(checkpoint):
    folder, tensors = checkpoint
    save_file(tensors, folder / "model-00001-of-00003.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"all 3 shards, got no model-00002-of-00003.safetensors, model-00003-of-00003",
    ):
        load_model(folder)


def test_a_tensor_in_two_files_is_refused(checkpoint):
    folder, tensors = checkpoint
    save_file(tensors, folder / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "b.safetensors")
    message = r"tensor model.norm.weight must be in one file, got a.safetensors and b.safet"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


class Evil:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_asks_for_code_is_refused_and_runs_nothing(
    checkpoint, is_zip, tmp_path, monkeypatch
):
    folder, tensors = checkpoint
    monkeypatch.chdir(tmp_path)
    held = tensors | {"model.norm.weight": Evil()}
    torch.save(held, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin must be a whole pickle of tens"):
        load_model(folder)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("held", [{"state_dict": {}}, [torch.zeros(1)], {3: torch.zeros(1)}])
def test_a_pickle_of_other_things_is_refused(checkpoint, held):
    folder, _ = checkpoint
    torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"must hold tensors by name, got (state_d|list|3)"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 1000, -300])
def test_a_torn_pickle_is_refused(checkpoint, keep):
    folder, tensors = checkpoint
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin must be a whole pickle"):
        load_model(folder)


def test_what_git_left_of_a_pickle_is_recognised(checkpoint):
    folder, _ = checkpoint
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="a Git LFS pointer: run `git lfs pull`"):
        load_model(folder)
