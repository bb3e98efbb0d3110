"""LLM with weights of 8 bits: tokens, tied heads, errors reported, memory, and refusals."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.engine.test_cpu_step import (
    assert_own_bits,
    build,
    inputs_of,
    run_all,
    storage_of,
    texts_of,
)
from tilewise.cli import main
from tilewise.engine.config import EngineConfig
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import check_weights
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.kernels.cpu.step.int8 import dequantise, quantise
from tilewise.nn.packed import PackedLinear, quantisation_error
from tilewise.ops.panels import why_not_pack

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 17, 99, 4]}


def dequantised(model):
    """The model with float32 weights that its int8 ones stand for."""
    model = copy.deepcopy(model).float()
    table = model.embed_tokens.weight if model.lm_head is None else None
    with torch.no_grad():
        weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        for weight in weights if table is None else [*weights, table]:
            weight.copy_(dequantise(*quantise(weight)))
    return model


@pytest.mark.parametrize("name", ["llama", "llama, tied, biases", "mistral, window", "qwen3"])
def test_a_model_computes_with_what_its_weights_stand_for(name):
    model, texts = build(name), texts_of()
    truth = dequantised(model)
    truth.pack_for_inference()
    expected = run_all(CompiledRunner(truth, storage_of(truth)), texts)
    model.pack_for_inference(is_int8=True)
    listed = run_all(CompiledRunner(model, storage_of(model)), texts)
    modules = run_all(ModelRunner(model, storage_of(model)), texts)
    torch.testing.assert_close(listed, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(modules, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_lists_and_modules_agree(name):
    model, texts = build(name, torch.bfloat16), texts_of()
    model.pack_for_inference(is_int8=True)
    listed = run_all(CompiledRunner(model, storage_of(model)), texts)
    modules = run_all(ModelRunner(model, storage_of(model)), texts)
    torch.testing.assert_close(listed, modules, atol=0.06, rtol=0.0)


def test_a_sequences_bits_depend_on_neither_neighbours_nor_threads(monkeypatch):
    model = build("qwen3", torch.bfloat16)
    model.pack_for_inference(is_int8=True)
    assert_own_bits(model, monkeypatch)


def test_a_prompts_bits_depend_neither_on_other_prompts_nor_on_how_many_rows_there_are():
    # 69 rows multiply a group that is widened as a whole, 30 one that is widened part by part.
    texts = texts_of((39, 30), more=0)
    model = build("llama", torch.bfloat16)
    model.pack_for_inference(is_int8=True)
    runner = CompiledRunner(model, storage_of(model))
    alone = [runner.forward(inputs_of({i: (0, n)}, texts)).clone() for i, n in ((0, 39), (1, 30))]
    together = runner.forward(inputs_of({0: (0, 39), 1: (0, 30)}, texts))
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_llm_holds_half_and_reports_the_error(architecture, tied, tmp_path):
    config = {
        "architectures": [architecture], "vocab_size": 320, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    texts, sizes = {}, {}
    for weight_dtype in ("auto", "int8"):
        llm = LLM(tmp_path, device="cpu", random_weights=True, weight_dtype=weight_dtype)
        linears = [m for m in llm.model.modules() if isinstance(m, PackedLinear)]
        sizes[weight_dtype] = sum(linear.panels.num_bytes for linear in linears)
        [output] = llm.generate(PROMPT, GREEDY)
        texts[weight_dtype] = output.outputs[0].token_ids
        errors = quantisation_error(llm.model)
        if weight_dtype == "auto":
            assert errors == {}
        else:
            assert len(errors) == len(linears) == 4 * 2 + 1
            assert all(0.004 < error < 0.007 for error in errors.values())
            again = llm.generate([PROMPT] * 5, GREEDY)  # other neighbours, the same tokens
            assert all(o.outputs[0].token_ids == texts["int8"] for o in again)
    assert len(texts["int8"]) == 12
    assert sizes["int8"] == pytest.approx(sizes["auto"] * 17 / 32)


def test_the_story_model_tells_a_story_and_the_command_line_tells_the_error(capsys):
    main(["generate", "--greedy", "--max-tokens", "12", "--weight-dtype", "int8",
          "--device", "cpu", "--prompt", "Once upon a time"])  # fmt: skip
    shown = capsys.readouterr()
    assert shown.out.startswith("Once upon a time, there was a little")
    assert "weights as int8: relative RMS error 0." in shown.err


@pytest.mark.parametrize(
    ("name", "error", "rule"),
    [
        ("int4", ValueError, "auto or int8"), ("bfloat16", ValueError, "auto or int8"),
        (8, TypeError, "a str"), (None, TypeError, "a str"),
    ],
)  # fmt: skip
def test_another_weight_dtype_is_refused(name, error, rule):
    with pytest.raises(error, match=rf"weight_dtype must be {rule}, got"):
        LLM("story", weight_dtype=name)


def test_a_gpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="weight_dtype must be auto on a GPU: .* built for a CPU"):
        check_weights(EngineConfig("story", weight_dtype="int8"), torch.device("cuda"))
    check_weights(EngineConfig("story"), torch.device("cuda"))
    check_weights(EngineConfig("story", weight_dtype="int8"), torch.device("cpu"))


def test_a_dtype_without_panels_is_refused():
    with pytest.raises(ValueError, match=r"int8 can hold them; .*weight: dtype must be float32"):
        LLM("story", device="cpu", dtype="float64", weight_dtype="int8")


def test_a_weight_that_is_not_finite_is_refused_and_nothing_changes():
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"lm_head.weight: it must be finite"):
        model.pack_for_inference(is_int8=True)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_a_model_that_runs_by_modules_takes_int8(tmp_path):
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 101, "n_embd": 32, "n_layer": 1,
              "n_head": 2, "n_positions": 64, "model_type": "gpt2"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, device="cpu", random_weights=True, weight_dtype="int8")
    assert len(quantisation_error(llm.model)) == 5
    [output] = llm.generate(PROMPT, GREEDY)
    assert len(output.outputs[0].token_ids) == 12
