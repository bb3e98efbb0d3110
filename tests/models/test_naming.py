"""Whatever a user gives that is no checkpoint folder, the sentence says what to do."""

from __future__ import annotations

import pytest

from tilewise.engine.settings import model_directory
from tilewise.errors import CheckpointError
from tilewise.models.config import read_config
from tilewise.models.naming import not_a_checkpoint


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory, home folder and cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("https://hub.example/Qwen/Qwen3-0.6B", "of a model of the hub give its name, 'Qwen/Qwen3"),
        ("https://hub.example/a/b/tree/main", "give its name, 'a/b'"),
        ("hf://a/b", "give its name, 'a/b'"),
        ("model-Q4_K_M.gguf", "there is no GGUF file of that name"),
        ("TheBloke/x.GGUF", "there is no GGUF file of that name"),
        ("~/x", "there is no folder '.*/home/x'"),
        ("~nobody-of-that-name/x", "there is none of that name"),
        ("Story", "the packaged model is 'story', in lower case"),
        ("stories", "did you mean 'story'"),
        ("no/such/model", "there is none of that name$"),
        ("llama", "there is none of that name$"),
    ],
)
def test_a_name_that_is_no_folder(here, name, why):
    with pytest.raises(
        CheckpointError,
        match=rf"must be a folder, a GGUF file, a name on the hub or 'story', got .*: .*{why}",
    ):
        read_config(model_directory(name))


def test_the_folder_above_the_snapshots_of_a_cache_points_to_them(here):
    cache = here / "home" / ".cache" / "huggingface" / "hub"
    snapshot = checkpoint(cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc")
    assert f"give {str(snapshot)!r}" in not_a_checkpoint(snapshot.parent.parent)


def test_a_file_of_a_checkpoint_names_its_folder(here):
    weights = checkpoint(here / "m") / "model.safetensors"
    weights.touch()
    assert not_a_checkpoint(weights).endswith(
        f"that is a file; give its folder, {str(here / 'm')!r}"
    )
    (here / "notes.txt").touch()
    assert "that is a file; give a folder with config.json" in not_a_checkpoint("notes.txt")


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (None, "give a folder with config.json, safetensors and a tokenizer"),
        ("adapter_config.json", "adapters .* are not read; merge it"),
        ("params.json", "files of Mistral's and Meta's own are not read"),
        ("consolidated.00.pth", "files of Mistral's and Meta's own are not read"),
    ],
)
def test_a_folder_without_a_config(here, file, why):
    (here / "m").mkdir()
    if file is not None:
        (here / "m" / file).touch()
    with pytest.raises(CheckpointError, match=f"must hold config.json, got none in .*m': {why}"):
        read_config(here / "m")


def test_a_folder_of_checkpoints_and_one_beside_it_are_named(here):
    checkpoint(here / "models" / "gpt2-tales")
    assert "give 'models/gpt2-tales'" in not_a_checkpoint("models")
    assert "did you mean 'models/gpt2-tales'?" in not_a_checkpoint("./models/gtp2-tales/")


def test_a_home_folder_is_found_where_no_shell_has_read_its_sign(here):
    folder = checkpoint(here / "home" / "x")
    assert model_directory("~/x") == folder
    assert "~ is read by a shell, not here; give" in not_a_checkpoint("~/x")


def test_nothing_is_not_the_current_directory(here):
    with pytest.raises(
        ValueError, match="model must be a directory, a hub name or 'story', got ''"
    ):
        model_directory("")
