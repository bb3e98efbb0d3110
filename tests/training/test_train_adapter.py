"""examples/train_adapter.py: an adapter that is learnt, saved as PEFT saves it, and served."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewise.models import load_model
from tilewise.models.adapters import adapter_sites, read_adapter

SCRIPT = Path(__file__).parents[2] / "examples" / "train_adapter.py"


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("train_adapter", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_learn_save_and_serve(script, tmp_path, capsys):
    out = tmp_path / "pirate"
    script.main(
        ["--out", str(out), "--steps", "4", "--rows", "4", "--context", "64", "--rank", "4"]
    )
    said = capsys.readouterr().out
    losses = [float(line.split()[4]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "the model: Once upon a time" in said
    assert "      new: Once upon a time" in said
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_what_is_saved_is_what_was_learnt(script, tmp_path):
    model, plain = (load_model(script.model_directory("story"), dtype="float32") for _ in range(2))
    sites = adapter_sites(plain)
    learnt = script.adapt(model, sites, 4, 8.0)
    assert sum(p.requires_grad for p in model.parameters()) == 2 * len(sites)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids), plain(ids), atol=1e-5)  # B is zero
        for _, b in learnt.values():
            b.normal_(std=0.05)
        changed = model(ids)
    script.save(tmp_path, learnt, sites, "story", 4, 8.0)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 2 * len(sites)
    for module, parts in read_adapter(tmp_path, sites).parts.items():
        weight = plain.get_submodule(module).weight.data
        for part in parts:
            weight[part.first : part.first + len(part.b)] += part.delta().float()
    with torch.no_grad():
        assert torch.allclose(plain(ids), changed, atol=1e-4)


def test_a_text_that_is_too_short_is_refused(script, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("One story.\n\nAnother one.\n")
    with pytest.raises(SystemExit, match="--text must have more tokens than --context"):
        script.main(["--out", str(tmp_path / "x"), "--text", str(text)])
