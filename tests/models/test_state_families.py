"""Families whose layers remember by a state equal transformers: logits, tokens, gradients."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from tests.models.tiny import VOCAB, assert_saved_as_the_same_model, greedy_hf, save_hf
from tilewise import LLM, SamplingParams
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, load_model, save_model
from tilewise.models.native import NativeDecoder
from tilewise.nn import Mamba2Config, states
from tilewise.nn.layers import Parts

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OF_ATTENTION = {"intermediate_size", "num_attention_heads", "num_key_value_heads"}
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "layer_types": _TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "head_dim": 32,
    "linear_conv_kernel_dim": 3, "attention_bias": True,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
}  # fmt: skip
# Before 5.24 the gated norm of these averages over all channels, not over those of a group as the
# checkpoints were trained.
_HAS_GROUPS = "group_size" in inspect.signature(MambaRMSNormGated.__init__).parameters
_GROUPS = 2 if _HAS_GROUPS else 1
_MAMBA_GROUPS = _MAMBA | {"mamba_n_groups": _GROUPS}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}  # fmt: skip
_FALCON = {
    "lm_head_multiplier": 0.7, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9], "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.2,
}  # fmt: skip
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
    "conv_kernel": 3, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | _EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", _DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", {n: x for n, x in _DELTA.items() if n != "head_dim"}),
    "kimi_linear": (
        "KimiLinear",
        {
            "layer_types": _TYPES,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "num_key_value_heads": 6,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": _GROUPS,
            "conv_kernel": 3,
            "use_bias": True,
            "time_step_limit": (0.3, 2.0),
        },
    ),
    "bamba": (
        "Bamba",
        _MAMBA_GROUPS
        | _BIASES
        | {"attn_layer_indices": [1], "mamba_proj_bias": True, "mamba_d_conv": 3},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _MAMBA_GROUPS
        | _SCALES
        | {
            "layer_types": _TYPES,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "time_step_limit": (0.4, 1.5),
        },
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        _MAMBA_GROUPS
        | _SCALES
        | {
            "layer_types": _TYPES,
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("FalconH1", _MAMBA | _BIASES | _FALCON | {"mamba_d_ssm": 96}),
    "falcon_h1_norm": (
        "FalconH1",
        _MAMBA
        | _FALCON
        | {
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        _NEMOTRON | {"n_routed_experts": 8, "moe_latent_size": 24, "mlp_bias": True},
    ),
    "nemotron_h_no_latents": (
        "NemotronH",
        _NEMOTRON | {"n_group": 4, "topk_group": 2, "use_bias": True, "time_step_min": 0.3},
    ),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            "num_key_value_heads": 6,
            "n_mamba_heads": 6,
            "mamba_d_state": 24,
            "mamba_d_conv": 3,
            "mamba_ngroups": 2,
            "num_mem_blocks": 2,
            "adapter_rank": 5,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "add_bias_linear": True,
        },
    ),
    "zamba2_one_block": (
        "Zamba2",
        {
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "n_mamba_heads": 6,
            "mamba_d_state": 24,
            "adapter_rank": 7,
            "num_key_value_heads": 3,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.5,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 8,
            "conv_L_cache": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
}


def make(case: str, seed: int = 7) -> Any:
    """Build transformers' model with every parameter random, large enough to matter."""
    name, own = CASES[case]
    kind = getattr(transformers, f"{name}ForCausalLM")
    config_class = kind.config_class
    if name == "NemotronH":
        own = {"num_hidden_layers": len(own["layers_block_type"])} | own
    shape = {n: x for n, x in _SHAPE.items() if name != "Mamba2" or n not in _OF_ATTENTION}
    config = config_class(**shape | own)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = kind(config).eval()
    draw = torch.Generator().manual_seed(seed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for place, tensor in held.items():
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() >= 2 and "A_log" not in place and "mup" not in place:
                tensor.copy_(noise / tensor[0].numel() ** 0.5)
            elif "A_log" in place:
                tensor.copy_(0.5 * noise)
            elif "inv_freq" not in place and "mup" not in place:
                tensor.add_(0.2 * noise)
    return model


@pytest.fixture(params=CASES, scope="module")
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """transformers' model and ours, from the same files."""
    hf = make(request.param)
    return hf, load_model(save_hf(hf, tmp_path_factory.mktemp(request.param)))


def test_log_probabilities_and_gradients_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    assert isinstance(ours, NativeDecoder)
    ids = torch.randint(0, VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))
    logits = hf(ids, use_cache=False).logits, ours.compute_logits(ours(ids))
    want, got = (x.log_softmax(-1) for x in logits)
    assert (got - want).abs().max() < 2e-4
    for x in (want, got):
        x.gather(-1, ids.roll(-1, 1)[..., None]).sum().backward()
    theirs = hf.get_input_embeddings().weight.grad
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours.embed_tokens.weight.grad, theirs, rtol=1e-3, atol=1e-4 * scale)
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)


# The layers whose blocks with a state leave parts: a norm is right behind, and can add them.
LEAVING = {
    "kimi_linear": [True, False, True], "lfm2": [True, False, True], "bamba": [True, False, True],
    "qwen3_5": [True, False, True], "qwen3_5_moe": [True, False, True],
    "falcon_h1": [False] * 3, "nemotron_h": [False] * 5, "granitemoehybrid": [False] * 3,
}  # fmt: skip


@pytest.mark.parametrize("case", LEAVING)
def test_a_norm_right_behind_a_block_with_a_state_adds_up_its_parts(
    case: str, tmp_path: Path, monkeypatch: Any
) -> None:
    ours = load_model(save_hf(make(case), tmp_path))
    mixers = [layer.mixer for layer in ours.layers]
    assert [getattr(mixer, "leaves_parts", False) for mixer in mixers] == LEAVING[case]
    projected = []

    def in_parts(linear: Any, x: torch.Tensor, adapters: Any) -> Parts:
        assert adapters is None
        projected.append(linear)
        halves = zip(x.chunk(2, -1), linear.weight.chunk(2, -1), strict=True)
        parts = [part @ weight.T for part, weight in halves]
        return Parts(torch.stack([parts[0] if linear.bias is None else parts[0] + linear.bias,
                                  parts[1]]))  # fmt: skip

    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    want = ours(ids)
    monkeypatch.setattr(states, "project_in_parts", in_parts)
    torch.testing.assert_close(ours(ids), want, rtol=1e-4, atol=1e-4)
    assert projected == [mixer.o_proj for mixer in mixers if mixer and mixer.leaves_parts]


@pytest.mark.parametrize(
    "case", ["qwen3_5", "kimi_linear", "falcon_h1", "nemotron_h", "lfm2_moe", "zamba2"]
)
def test_an_engine_serves_texts_in_chunks_and_finds_their_prefixes(
    case: str, tmp_path: Path
) -> None:
    hf = make(case)
    save_hf(hf, tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (70, 5)]
    told = [greedy_hf(hf, prompt, 6) for prompt in prompts]
    options: dict[str, Any] = {"block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(tmp_path, max_model_len=128, **options) as llm:
        assert [list(out.outputs[0].token_ids) for out in llm.generate(asked, params)] == told
        (again,) = llm.generate(asked[:1], params)
    assert list(again.outputs[0].token_ids) == told[0]
    assert again.num_cached_tokens == 64  # where a state was kept


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zamba2")])
def test_what_is_saved_is_read_here_and_by_transformers_as_the_same_model(
    case: str, tmp_path: Path
) -> None:
    assert_saved_as_the_same_model(make(case), tmp_path)


def test_a_block_that_layers_share_is_not_written(tmp_path: Path) -> None:
    ours = load_model(save_hf(make("zamba2"), tmp_path / "theirs"))
    with pytest.raises(CheckpointError, match=r"config.json is written.* got Zamba2ForCausalLM"):
        save_model(ours, tmp_path / "ours")


def _rewritten(path: Path, change: Any) -> Path:
    """Change the tensors of a checkpoint, by their names."""
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of experts as one for all of them, as Qwen3.5 is published."""
    kept = {n: x for n, x in tensors.items() if ".experts." not in n}
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{start}.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        )
        kept[f"{start}.gate_up_proj"] = torch.cat((gate, up), 1)
        kept[f"{start}.down_proj"] = down
    return kept


def _other_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("backbone.", "model."): x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("case", "change"), [("qwen3_5_moe", _fused), ("nemotron_h", _other_names)]
)
def test_files_may_store_the_same_in_other_ways(case: str, change: Any, tmp_path: Path) -> None:
    save_hf(make(case), tmp_path)
    before = load_model(tmp_path).state_dict()
    after = load_model(_rewritten(tmp_path, change)).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_lists_of_layers_and_patterns_mean_the_kinds_of_layers() -> None:
    shape = {n: x for n, x in _SHAPE.items() if n != "num_hidden_layers"}
    config = {**shape, **_NEMOTRON, "architectures": ["NemotronHForCausalLM"]}
    pattern = config | {"layers_block_type": None, "hybrid_override_pattern": "ME*-M"}
    assert ModelConfig.from_hf(pattern).layers == ModelConfig.from_hf(config).layers
    kimi = {**_SHAPE, **CASES["kimi_linear"][1], "architectures": ["KimiLinearForCausalLM"]}
    listed = kimi | {
        "layer_types": None,
        "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4,
                               "head_dim": 16, "short_conv_kernel_size": 3},
    }  # fmt: skip
    assert ModelConfig.from_hf(listed).layers == ModelConfig.from_hf(kimi).layers


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks that are not shared": ("zamba2", {"tie_word_embeddings": False},
                                   "tie_word_embeddings must be true, got false"),
    "layers without a kind": ("zamba2", {"layers_block_type": ["hybrid"]},
                              r"layers_block_type must have one of .* per layer \(6\)"),
    "no rank": ("zamba2", {"adapter_rank": 0}, "adapter_rank must be a positive integer, got 0"),
    "an unknown kind": ("qwen3_5", {"layer_types": ["linear_attention", "full_attention", "x"]},
                        "layer_types must be among linear_attention, full_attention, got 'x'"),
    "heads": ("qwen3_5", {"linear_num_value_heads": 5},
              "num_value_heads must be a multiple of num_key_heads 2, got 5"),
    "quantised states": ("qwen3_5", {"mamba_ssm_dtype": "float16"},
                         "mamba_ssm_dtype must be .*float32.*, got .*float16"),
    "no gate": ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate must be true, got false"),
    "a width": ("bamba", {"mamba_d_head": 8}, "mamba_n_heads times mamba_d_head must be 96"),
    "limits": ("bamba", {"time_step_limit": [2.0, 1.0]}, "dt_limits must be two numbers"),
    "places": ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices must be a list of layers"),
    "factors": ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
    "a pattern": ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"},
                  "hybrid_override_pattern must be a text of M, E, . and -, got 'MX'"),
    "a taps": ("lfm2", {"conv_L_cache": 0}, "conv_L_cache must be a positive integer, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    family, change, match = REFUSED[case]
    name, own = CASES[family]
    config = {**_SHAPE, **own, "architectures": [f"{name}ForCausalLM"]}
    ModelConfig.from_hf(config)
    with pytest.raises(CheckpointError, match=match):
        ModelConfig.from_hf(config | change)


def test_a_convolution_of_another_width_is_refused(tmp_path: Path) -> None:
    save_hf(make("qwen3_5"), tmp_path)
    place = tmp_path / "config.json"
    told = json.loads(place.read_text()) | {"linear_conv_kernel_dim": 4}
    place.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"conv1d.weight of .* must have shape .*, 1, 4\), "):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Mamba2", {"num_heads": 8, "head_dim": 12, "n_groups": 4}),
        ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 4}),
        (
            "GraniteMoeHybrid",
            {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 4,
             "layer_types": ["linear_attention"] * 3},
        ),
    ],
)  # fmt: skip
def test_a_gated_norm_averages_over_the_channels_of_a_group(name: str, fields: Any) -> None:
    """As the checkpoints were trained; transformers does so from 5.24 on."""
    kind = getattr(transformers, f"{name}Config")
    shape = {n: x for n, x in _SHAPE.items() if name != "Mamba2" or n not in _OF_ATTENTION}
    told = kind(**shape | fields).to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    mixer = ModelConfig.from_hf(told).layers[0].mixer
    assert isinstance(mixer, Mamba2Config)
    assert mixer.norm_groups == mixer.num_groups == 4
