"""The kernel of the hub: its layout, a copy that stands alone, and loading it as its users do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import tilewise
from tools.hub_kernel import build as hub
from tools.hub_kernel.__main__ import main
from tools.hub_kernel.rewrite import copy

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    return hub.build(tmp_path_factory.mktemp("hub") / "kernel")


def test_the_layout_is_that_of_the_hub(kernel):
    told = tomllib.loads((kernel / "build.toml").read_text())
    assert told["general"]["name"] == hub.NAME
    assert told["general"]["backends"] == ["cpu", "cuda"]
    assert "torch-noarch" in told
    assert {path.name for path in (kernel / "build").iterdir()} == {"torch-cpu", "torch-cuda"}
    assert (kernel / "torch-ext" / hub.PYTHON_NAME / "__init__.py").exists()
    assert (kernel / "README.md").read_text().startswith("---\nlicense: apache-2.0\n")
    ids = set()
    for backend in ("cpu", "cuda"):
        metadata = json.loads((kernel / f"build/torch-{backend}/metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert (metadata["name"], metadata["version"]) == (hub.NAME, told["general"]["version"])
        assert metadata["id"].isidentifier()
        ids.add(metadata["id"])
    assert len(ids) == 2


def test_no_module_imports_the_package_and_every_import_leads_to_a_file(kernel):
    variant = kernel / "build" / "torch-cuda"
    files = sorted(variant.rglob("*.py"))
    assert len(files) > 200
    assert {"attention/plan.py", "attention/forward.py"} <= {
        path.relative_to(variant / "kernels/triton").as_posix()
        for path in (variant / "kernels/triton").rglob("*.py")
    }
    assert (variant / "kernels/gluon/forward/kernel.py").exists()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.startswith("tilewise")], path
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                place = folder.joinpath(*(node.module or "").split("."))
                assert place.with_suffix(".py").exists() or (place / "__init__.py").exists(), path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "tilewise", path


# What a program does that has no tilewise, beside one of the same kernel under another name.
LOAD = """
import importlib.util, json, pathlib, sys
sys.modules["tilewise"] = None
import torch
variant = pathlib.Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
torch.manual_seed(0)
q = torch.randn(1, 40, 4, 16)
k = torch.randn(1, 40, 2, 16)
o = module.attention(q, k, k, causal=True, backend=sys.argv[2])
torch.save(o, sys.argv[3])
namespace = name.replace("_cpu", "").lstrip("_")
assert hasattr(torch.ops, namespace) and hasattr(getattr(torch.ops, namespace), "attention_fwd")
assert not hasattr(torch.ops.tilewise, "attention_fwd")
"""


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def test_it_attends_where_tilewise_is_not_installed(kernel, tmp_path, backend):
    out = tmp_path / "o.pt"
    variant = kernel / "build" / "torch-cpu"
    command = [sys.executable, "-c", LOAD, str(variant), backend, str(out)]
    subprocess.run(command, check=True, cwd=tmp_path)  # of its own: nothing has been imported
    torch.manual_seed(0)
    q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
    assert torch.equal(torch.load(out), tilewise.attention(q, k, k, causal=True, backend=backend))


def test_a_folder_of_something_else_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["hub_kernel", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "out must be a new folder or an earlier kernel" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()


def test_it_is_written_again_to_the_same_bytes(kernel, tmp_path):
    again = hub.build(hub.build(tmp_path / "kernel"))
    files = [path.relative_to(kernel) for path in sorted(kernel.rglob("*")) if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    assert all((again / path).read_bytes() == (kernel / path).read_bytes() for path in files)


def test_a_namespace_that_is_no_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="namespace must be an identifier, got 'a-b'"):
        copy(tmp_path, "a-b")


TRANSFORMERS = """
import sys
import torch
from kernels import get_local_kernel
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig
assert get_local_kernel(Path(sys.argv[1])).flash_attn_func
config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(0, 100, (2, 17))
wanted = model(ids).logits
model.set_attn_implementation("org/tilewise-attention", allow_all_kernels=True)
assert (model(ids).logits - wanted).abs().max() < 1e-5
assert model.config._attn_implementation == "org/tilewise-attention"
"""


@pytest.mark.slow
def test_transformers_takes_it_by_its_name_on_the_hub(kernel, tmp_path, monkeypatch):
    """Beside the `kernels` library, in a version that the installed transformers takes."""
    pytest.importorskip("kernels")
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hub_kernels.is_kernels_available():
        pytest.skip("transformers takes another version of kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/{hub.NAME}={kernel}")
    command = [sys.executable, "-W", "ignore", "-c", TRANSFORMERS, str(kernel)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
