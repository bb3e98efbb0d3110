"""Quantised checkpoints: values bit for bit those of the layout, models, engines, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.quantised_files import FORMATS, quantise, torchao_int4, torchao_tiles
from tilewise import LLM, SamplingParams
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, build_model, load_model, weights
from tilewise.models.quantised import Stored
from tilewise.models.quantised.choose import format_of
from tilewise.models.quantised.torchao import torchao
from tilewise.models.registry import allocated, empty_model, read_checkpoint
from tilewise.nn.packed import PackedLinear
from tilewise.nn.quantised import QuantisedLinear
from tilewise.ops.panels import why_not_pack

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}  # with biases
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 256,
}  # fmt: skip


def _hqq(**weights):
    return {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1} | weights}


def _quark(**weight):
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that gives the folder of a float checkpoint."""
    made = {}

    def folder(name="llama"):
        if name not in made:
            more = {"llama": {}, "qwen2": _QWEN, "mixtral": _MIXTRAL}[name]
            config = ModelConfig.from_hf(_CONFIG | more)
            model = build_model(config, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                for key, tensor in model.named_parameters():
                    if key.endswith("bias"):
                        tensor.normal_(generator=torch.Generator().manual_seed(1))
            made[name] = tmp_path_factory.mktemp(name)
            tensors = {
                source: part.detach().contiguous().clone()
                for weight in model.weight_table()
                for source, part in weight.parts(model.get_parameter(weight.name))
            }
            save_file(tensors, made[name] / "model.safetensors")
            (made[name] / "config.json").write_text(json.dumps(_CONFIG | more))
        return made[name]

    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_layout_bit_for_bit(name, plain, tmp_path):
    quantise(plain(), tmp_path, name)
    model = load_model(tmp_path / "narrow", dtype="float32")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    for i, layer in enumerate(model.layers):
        begin = f"model.layers.{i}"
        for module, sources in (
            (layer.attention.qkv_proj, [f"self_attn.{c}_proj" for c in "qkv"]),
            (layer.attention.o_proj, ["self_attn.o_proj"]),
            (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.mlp.down_proj, ["mlp.down_proj"]),
        ):
            assert isinstance(module, QuantisedLinear)
            wanted = torch.cat([wide[f"{begin}.{source}.weight"] for source in sources])
            assert torch.equal(module.dequantised(), wanted), (i, sources)
            is_narrow = "4" in name or name in ("awq", "gptq", "auto-round", "hqq")
            most = 5.1 if is_narrow and name != "torchao-intx4" else 8.6
            assert module.nbytes * 8 <= most * wanted.numel() * (1 + 0.35)
    assert isinstance(model.lm_head, torch.nn.Linear)


@pytest.mark.parametrize("name", ["w4a16", "fp8-blocks"])
def test_experts_are_held_as_they_are_stored_where_a_kernel_reads_them(name, plain, tmp_path):
    """Two quantised experts' weights become one; values stay those of the layout."""
    quantise(plain("mixtral"), tmp_path, name)
    config = read_checkpoint(tmp_path / "narrow")
    models = []
    for holds in (True, False):
        model = empty_model(config, "bfloat16", "meta")
        weights.narrow(model, tmp_path / "narrow", holds_experts=holds)
        model = allocated(model, "cpu")
        weights.load_weights(model, tmp_path / "narrow")
        models.append(model.eval())
    held, wide = (model.layers[0].mlp for model in models)
    assert isinstance(held.up, QuantisedLinear)
    x = torch.randn(5, 128).bfloat16()
    for kind in ("up", "down"):
        for e in range(4):
            assert torch.equal(held._plain(kind, e), getattr(wide, kind)[e])
    with torch.no_grad():
        assert torch.equal(held(x), wide(x))


def test_tiles_of_torchao_are_taken_apart():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    tensors, values = torchao_tiles(weight)
    stored = Stored("m", frozenset(tensors), lambda suffix: tensors[suffix])
    found = torchao(FORMATS["torchao-int4"][1]).read(stored)
    found.check()
    assert torch.equal(found.dequantise(), values)
    tensors["_weight_act_pre_scale"] = torch.ones(1)
    stored = Stored("m", frozenset(tensors), lambda suffix: tensors[suffix])
    with pytest.raises(CheckpointError, match="m._weight_act_pre_scale must be absent"):
        torchao(FORMATS["torchao-int4"][1]).read(stored)


@pytest.mark.parametrize(
    ("scheme", "size", "rounds"),
    [("dynamic", 128, True), ("static", 128, False), ("dynamic", 64, False)],
)
def test_rows_are_rounded_where_the_format_has_dynamic_inputs_in_blocks(scheme, size, rounds):
    codes = torch.randn(256, 256).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": torch.rand(256 // size, 256 // size)}
    told = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": [size, size]}
    found = format_of(told).read(Stored("m", frozenset(tensors), lambda name: tensors[name]))
    assert found.rounds_rows == rounds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tiles_of_torchao_are_those_of_pytorchs_kernel():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain = torchao_int4(weight)[0]["_weight_qdata"]
    codes = (torch.stack((plain & 15, (plain >> 4) & 15), -1).flatten(1) + 8) & 15
    pairs = (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    words = torch.ops.aten._convert_weight_to_int4pack(pairs.cuda(), 8)
    assert torch.equal(words.cpu(), torchao_tiles(weight)[0]["_weight_qdata"])


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize(
    "name", ["awq", "gptq-order", "fp8-blocks", "nf4", "w8a8", "hqq", "torchao-int4"]
)
def test_a_model_computes_what_its_values_give(name, family, plain, tmp_path):
    quantise(plain(family), tmp_path, name, keep=("lm_head", "embed", "norm", ".gate."))
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    found, wanted = (
        model.compute_logits(model(ids))
        for model in (load_model(tmp_path / kind, dtype="float32") for kind in ("narrow", "wide"))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["w4a16", "fp8-dynamic", "nf4-nested"])
def test_an_engine_serves_it(name, plain, tmp_path):
    quantise(plain(), tmp_path, name)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    texts = []
    for kind in ("narrow", "wide"):
        with LLM(tmp_path / kind, device="cpu", dtype="float32", num_blocks=32) as llm:
            prompts = [{"prompt_token_ids": [5, 9, 2]}, {"prompt_token_ids": [7] * 20}]
            texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["awq", "gptq-order", "fp8-blocks", "nf4", "w8a8", "hqq"])
def test_packed_weights_stay_narrow_and_compute_what_their_values_give(
    name, dtype, plain, tmp_path
):
    quantise(plain(), tmp_path, name, keep=("lm_head", "embed", "norm"))
    if why_not_pack(torch.empty(2, 2)) is not None:
        pytest.skip("needs an x86 CPU")
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    logits, taken = [], []
    for kind in ("narrow", "wide"):
        model = load_model(tmp_path / kind, dtype=dtype)
        model.pack_for_inference()
        linears = [m for m in model.layers.modules() if isinstance(m, PackedLinear)]
        assert all(linear.panels.is_narrow == (kind == "narrow") for linear in linears)
        taken.append(sum(linear.panels.num_bytes for linear in linears))
        logits.append(model.compute_logits(model(ids)))
    assert taken[0] < taken[1] * (0.6 if dtype == "bfloat16" else 0.3)
    # Wide weights of formats that compute in 16 bits are rounded to these first.
    close = 0.05 if dtype == "bfloat16" else 1e-5 if name in ("fp8-blocks", "nf4") else 1e-2
    torch.testing.assert_close(*logits, rtol=close, atol=close)


def test_layers_that_a_checkpoint_leaves_wide_stay_wide(plain, tmp_path):
    quantise(plain(), tmp_path, "awq", keep=("lm_head", "embed", "norm", "layers.1."))
    model = load_model(tmp_path / "narrow", dtype="float32")
    assert isinstance(model.layers[0].mlp.down_proj, QuantisedLinear)
    assert isinstance(model.layers[1].mlp.down_proj, torch.nn.Linear)


def test_a_projection_of_wide_and_narrow_sources_is_dequantised(plain, tmp_path):
    quantise(plain(), tmp_path, "awq", keep=("lm_head", "embed", "norm", "v_proj"))
    model = load_model(tmp_path / "narrow", dtype="float32")
    wide = load_model(tmp_path / "wide", dtype="float32")
    found, wanted = (m.layers[0].attention.qkv_proj.weight for m in (model, wide))
    assert torch.equal(found, wanted)


def test_what_only_files_of_tools_say_is_read(plain, tmp_path):
    quantise(plain(), tmp_path, "gptq")
    path = tmp_path / "narrow" / "config.json"
    config = json.loads(path.read_text())
    told = config.pop("quantization_config")
    told.pop("quant_method")
    path.write_text(json.dumps(config))
    (tmp_path / "narrow" / "quantize_config.json").write_text(json.dumps(told))
    model = load_model(tmp_path / "narrow", dtype="float32")
    assert isinstance(model.layers[0].mlp.down_proj, QuantisedLinear)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quant_method": "quip"}, "quant_method must be one of fp8, .*, got 'quip'"),
        (
            {"quant_method": "gptq", "bits": 3},
            "bits of the quantisation must be one of 4, 8, got 3",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version of the quantisation must"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo of ModelOpt must"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format of the quantis"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gguf"}, "packing_format of"),
        ({"quant_method": "hqq", "quant_config": _hqq(axis=0)}, "axis of HQQ must be 1, got 0"),
        ({"quant_method": "hqq", "quant_config": _hqq(nbits=2)}, "nbits of HQQ must be 4 or 8, g"),
        (
            {"quant_method": "hqq", "quant_config": _hqq() | {"scale_quant_params": {"nbits": 8}}},
            "scale_quant_params of HQQ must be absent",
        ),
        ({"quant_method": "hqq", "quant_config": {"a": 3}}, "quant_config of HQQ must hold objec"),
        ({"quant_method": "torchao"}, "quant_type of torchao must name a configuration, got None"),
        ({"quant_method": "quark"}, "global_quant_config of Quark must hold the weight's scheme"),
        (_quark(dtype="int4"), "dtype of the quantisation must be one of fp4, fp8_e4m3, got int4"),
        (_quark(dtype="fp4", group_size=16), "group_size of the quantisation must be one of 32"),
        (
            _quark(dtype="fp4") | {"layer_quant_config": {"*lm_head": {}}},
            "layer_quant_config of Quark must be empty",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"},
            "format of the quantisation must be one of .*, got mxfp6-pack-quantized",
        ),
        *(
            ({"quant_method": name}, f"quant_method must be one of .*, got '{name}'")
            for name in (
                "aqlm",
                "bitnet",
                "eetq",
                "fouroversix",
                "fp_quant",
                "higgs",
                "metal",
                "quanto",
                "sinq",
                "spqr",
                "vptq",
            )
        ),
    ],
)
def test_a_format_that_is_not_served_is_named(told, message, plain, tmp_path):
    quantise(plain(), tmp_path, "awq")
    path = tmp_path / "narrow" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": told}))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "narrow")


def _changed(folder, name, change):
    """Change one tensor of a checkpoint; None drops it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensor = change(tensors.pop(name))
    save_file(tensors if tensor is None else tensors | {name: tensor.contiguous()}, file)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "message"),
    [
        ("awq", "scales", lambda t: t[:, :-8], r"scales must be \(K / group, 192\)"),
        ("awq", "scales", lambda t: torch.full_like(t, torch.nan), "scales of .* must be finite"),
        ("awq", "qzeros", lambda t: t[:-1], "weight of awq, got .*zeros must have shape"),
        ("gptq", "g_idx", lambda t: t * 0, "g_idx must give each group 32 columns"),
        ("gptq", "qzeros", lambda t: None, "up_proj.qzeros, got none"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:-1], "must have 6 x 4 scales"),
        ("w4a16", "weight_scale", lambda t: t[:, :-1], r"weight_scale must have shape \(192, 4\)"),
        ("w4a16", "weight_shape", lambda t: t + 1, r"weight_shape must be \(192, 128\)"),
        ("hqq", "W_q", lambda t: t[:-1], "W_q must hold 192 x 128 codes"),
        ("hqq", "scale", lambda t: t[:-1], "scale must have 384 numbers, got 383"),
        ("hqq", "zero", lambda t: None, "up_proj.zero, got none"),
        ("hqq", "axis", lambda t: t * 0, "axis must be 1, got 0"),
        ("hqq", "nbits", lambda t: t * 0 + 2, "nbits must be 4 or 8, got 2"),
        ("mxfp4", "weight_scale", lambda t: t[:-1], r"weight_scale must have shape \(192, 4\)"),
        ("mxfp4", "weight_scale", lambda t: t * 0 + 255, "scales of .* must be finite"),
        ("mxfp8", "weight", lambda t: t.float(), r"or \(N, K\) of float8, got torch.float32"),
        (
            "quark-mxfp4",
            "weight_scale",
            lambda t: t.float(),
            "weight_scale must be uint8 or float8",
        ),
        (
            "torchao-int4",
            "_weight_scale",
            lambda t: t[:-1],
            r"_weight_scale must be \(K / group, 1",
        ),
        ("torchao-int8", "_weight_scale", lambda t: t[:-1], r"_weight_scale must divide \(192, 12"),
        (
            "torchao-int8",
            "_weight_qdata",
            lambda t: t.int(),
            "_weight_qdata must be int8 or float8",
        ),
        ("torchao-fp8", "_weight_scale", lambda t: t * torch.nan, "scales of .* must be finite"),
        ("torchao-fp8", "_weight_scale", lambda t: t.byte(), "_weight_scale must be of floats"),
        ("nf4", "weight.absmax", lambda t: t[:-1], "weight.absmax must have 384 numbers, got 383"),
    ],
)
def test_a_tensor_that_breaks_the_format_is_named(name, suffix, change, message, plain, tmp_path):
    quantise(plain(), tmp_path, name)
    _changed(tmp_path / "narrow", f"model.layers.1.mlp.up_proj.{suffix}", change)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "narrow")


def test_a_tensor_of_no_module_is_refused(plain, tmp_path):
    quantise(plain(), tmp_path, "awq")
    file = tmp_path / "narrow" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.7.mlp.up_proj.qweight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="must hold only tensors of LlamaForCausalLM"):
        load_model(tmp_path / "narrow")
