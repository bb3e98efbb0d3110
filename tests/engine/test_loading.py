"""Loading gives the same model as load_model, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint import write_checkpoint
from tilewise.engine.loading import load
from tilewise.models import load_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", ["llama", "gpt2_untied", "qwen2_bias_tied"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_every_parameter_and_buffer_is_that_of_load_model(tmp_path, case, dtype):
    write_checkpoint(tmp_path, case, has_tokenizer=False)
    got = load(tmp_path, dtype=dtype, device=torch.device("cpu"))
    want = load_model(tmp_path, dtype=dtype)
    assert not got.training
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    assert [n for n, _ in got.named_buffers()] == [n for n, _ in want.named_buffers()]
    assert all(p.requires_grad for p in got.parameters())


def test_a_generation_imports_neither_compiler_nor_transformers(tmp_path):
    write_checkpoint(tmp_path, "llama")
    code = (
        "import sys; from tilewise import LLM\n"
        f"LLM({str(tmp_path)!r}, device='cpu', num_blocks=9).generate('the')\n"
        "print(*{'torch._dynamo', 'sympy', 'triton', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""
