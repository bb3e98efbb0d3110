"""examples/train_adapter.py: an adapter that is learnt, saved as PEFT saves it, and served."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

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
        ["--out", str(out), "--steps", "4", "--rows", "4", "--context", "64", "--rank", "16"]
    )
    said = capsys.readouterr().out
    losses = [float(line.split()[4]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert "the model: Once upon a time" in said
    assert "      new: Once upon a time" in said
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_a_text_that_is_too_short_is_refused(script, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("One story.\n\nAnother one.\n")
    with pytest.raises(SystemExit, match="--text must have more tokens than --context"):
        script.main(["--out", str(tmp_path / "x"), "--text", str(text)])
