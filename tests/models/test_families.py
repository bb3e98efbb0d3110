"""Each family's small random model, all of its options on, gives the logits of transformers."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny import VOCAB, PagedLoop, assert_saved_as_the_same_model
from tilewise import LLM, SamplingParams
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.prompt_steps import PromptSteps
from tilewise.engine.settings import cache_spec
from tilewise.errors import CheckpointError, UnsupportedError
from tilewise.models import ModelConfig, load_model
from tilewise.models.families import FAMILIES
from tilewise.models.native import NativeDecoder
from tilewise.models.registry import empty_model

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE: dict[str, Any] = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 9.0],
    "factor": 4.0,
    "partial_rotary_factor": 0.75,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 500_000.0}

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_LEFT_OUT = {
    "GPTNeo": {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"},
    "OPT": {"num_key_value_heads", "intermediate_size"},
    "Falcon": {"num_key_value_heads", "intermediate_size"},
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        _KINDS
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4_experts": (
        "Gemma4",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {name: x for name, x in _GEMMA4.items() if "per_layer" not in name}
        | {"attention_k_eq_v": True, "num_kv_shared_layers": 2, "attention_bias": True},
    ),
    "seed_oss": (
        "SeedOss",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "granite": (
        "Granite",
        _BIASES
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        _BIASES
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "hyperclovax_pre_norm": ("HyperCLOVAX", {"use_post_norm": False}),
    "smollm3": (
        "SmolLM3",
        _BIASES | {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "helium": ("Helium", _BIASES | {"head_dim": 8, "num_key_value_heads": 4}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "arcee": ("Arcee", _BIASES | {"rope_parameters": _YARN | {"rope_theta": 10_000.0}}),
    "ministral": ("Ministral", _KINDS | {"head_dim": 16}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 8,
            "floor_scale": 8,
            "moe_layers": [1, 3],
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 1, 0, 1],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4_plain": (
        "Llama4",
        {
            "head_dim": 8,
            "attention_chunk_size": 12,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "attention_bias": True,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "phi3_longrope": (
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 96},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        _KINDS | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT}},
    ),
    "exaone4": ("Exaone4", _KINDS),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "cohere": ("Cohere", {"attention_bias": True, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", _KINDS | {"logit_scale": 0.3}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "gpt_neox": ("GPTNeoX", {"use_parallel_residual": True}),
    "gpt_neox_in_turn": ("GPTNeoX", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm_parallel": ("StableLm", {"use_parallel_residual": True}),
    "nemotron": ("Nemotron", _BIASES),
    "olmo": ("Olmo", {"attention_bias": True}),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 4}),
    "codegen": ("CodeGen", _GPT | {"rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", _GPT),
    "gpt_bigcode_heads": ("GPTBigCode", _GPT | {"multi_query": False}),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "window_size": 5, "intermediate_size": 40}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 48}),
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 128}),
    "falcon": ("Falcon", {}),
    "falcon_groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_in_turn": ("Falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
}


def make(case: str) -> transformers.PreTrainedModel:
    """A model whose every parameter is random, large enough to matter."""
    name, fields = CASES[case]
    own_names = any(key.startswith(("n_", "d_model", "num_heads")) for key in fields)
    shape = _TOKENS if own_names else _SHAPE
    if name in _LEFT_OUT:
        shape = {key: value for key, value in _SHAPE.items() if key not in _LEFT_OUT[name]}
    # Other functions leave out attention's soft cap.
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(**shape | fields, attn_implementation="eager")
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        model = kind(config).eval()
        with torch.no_grad():
            scalars = [x for name, x in model.named_buffers() if name.endswith("layer_scalar")]
            for parameter in (*model.parameters(), *scalars):
                noise = torch.randn_like(parameter)
                if parameter.dim() == 1:
                    parameter.add_(0.2 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*original_max_position_embeddings.*")
def test_a_family_gives_the_logits_of_transformers(case, tmp_path):
    """Of a whole text, and of the same text in chunks over a cache."""
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert type(ours) is NativeDecoder
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits[0]
        whole = ours.compute_logits(ours(ids))[0]
    torch.testing.assert_close(whole, want, rtol=2e-4, atol=2e-4)
    loop, text = PagedLoop(ours, max_tokens=40, num_seqs=1), ids[0].tolist()
    parts = [loop.step({0: text[a:b]}) for a, b in ((0, 17), (17, 18), (18, 40))]
    torch.testing.assert_close(torch.cat(parts), want, rtol=2e-4, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("case", ["gemma4", "gemma4_experts", "llama4", "ministral3"])
def test_a_family_of_more_fields_runs_on_a_gpu_as_in_transformers(case, graphs, tmp_path):
    """Keys of other layers, attention in chunks, growing queries; captured, and op by op."""
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    prompts = [[*range(5, 45)], [9], [*range(5, 40), 4, 8]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    options = {"num_blocks": 64, "max_model_len": 128, "max_num_batched_tokens": 16}
    with LLM(tmp_path, device="cuda", block_size=4, graphs=graphs, **options) as llm:
        assert type(llm.model) is NativeDecoder
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        [sample] = output.outputs
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + list(sample.token_ids)])).logits[0]
        expected = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
        own = [step[t] for step, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        chosen = expected.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        assert (torch.tensor(own) - chosen).abs().max() < 2e-2
        assert (expected.amax(1) - chosen).max() < 2e-2


@pytest.mark.parametrize("case", ["llama4", "ministral3"])
def test_queries_grow_in_a_step_that_is_captured(case, tmp_path):
    """Its context has no sequence, whose block table would say how long texts may be."""
    make(case).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    storage = KVStorage(cache_spec(model.config, 4, model.dtype), 8, torch.device("cpu"))
    steps = PromptSteps(model, storage, 16)
    found = []

    def attend(_ctx, _function, q, v_dim):
        found.append(q.clone())
        return q.new_zeros(*q.shape[:-1], v_dim)

    with torch.no_grad():
        for first in (0, 40):
            steps._ids.fill_(5)
            steps._positions.copy_(first + torch.arange(16))
            steps._compute(16, steps._context(), attend, False)
    assert model.growths
    layer = next(i for i, x in enumerate(model.config.layers) if x.attention.query_growth)
    lengths = [q[0].norm(dim=-1) for q in found]  # which a rotation does not change
    before, after = lengths[layer], lengths[layer + len(model.layers)]
    assert (after > 1.01 * before).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*original_max_position_embeddings.*")
def test_what_is_saved_is_read_here_and_by_transformers_as_the_same_model(case, tmp_path):
    assert_saved_as_the_same_model(make(case), tmp_path)


def test_longrope_is_served_within_its_first_context_and_dynamic_scaling_within_its_positions():
    """Of longer texts all angles are others, which keys in a cache cannot follow."""
    config = ModelConfig.from_hf(make("phi3_longrope").config.to_dict())
    assert (config.max_position_embeddings, config.context_length) == (128, 96)
    assert ModelConfig.from_hf(config.to_hf()) == config
    changed = dataclasses.replace(config, residual_scale=0.5)  # of which the file does not know
    with pytest.raises(CheckpointError, match="architecture must be one whose config.json is writ"):
        changed.to_hf()
    llama = transformers.LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ).to_dict()
    config = ModelConfig.from_hf(llama | {"architectures": ["LlamaForCausalLM"]})
    assert config.context_length == 128
    assert ModelConfig.from_hf(config.to_hf()) == config
    with pytest.raises(CheckpointError, match="rope_type must be one that is written"):
        dataclasses.replace(config, source=None).to_hf()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("granite", {"logits_scaling": 0}, "logits_scaling must be positive, got 0"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gptj", {"rotary_dim": 65}, "rotary_dim must be even and at most the 256 channels"),
        ("codegen", {"rotary_dim": 512}, "rotary_dim must be even and at most the 256 channels"),
        (
            "phi3",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e308}},
            r"partial_rotary_factor must lie in \[0, 1\], got 1e\+308",
        ),
        ("gemma4_text", {"hidden_size_per_layer_input": 10**30}, "must be at most 2147483647"),
        ("olmoe", {"hidden_act": []}, r"must be one of .*, got \[\]"),
    ],
)
def test_values_that_no_arithmetic_has_are_refused(model_type, changes, message):
    config = published(model_type)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(config | changes)


_VALUES = [
    None, True, False, 0, 1, -1, 2**40, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "1", "full", [], [None], [1], ["full_attention"], [0.5] * 3, {}, {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 0}, {"type": []}, {"rope_theta": -1}, {"full_attention": {}},
]  # fmt: skip


def _changed(config, draw):
    """Return a config of which fields, or fields of its objects, are others or absent."""
    config = copy.deepcopy(config)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, name = config, draw.choice(sorted(config))
        if isinstance(config[name], dict) and config[name] and draw.random() < 0.6:
            holder, name = config[name], draw.choice(sorted(config[name], key=str))
        if draw.random() < 0.1:
            del holder[name]
        else:
            holder[name] = draw.choice(_VALUES)
    return config


@pytest.mark.filterwarnings("ignore")  # models.unread_fields names what nothing reads
@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 1000), *(pytest.param(n, 20_000, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_changed_configs_are_built_or_refused_in_a_sentence(seed, count):
    draw, built = random.Random(seed), 0
    kinds = {"zamba2": {"layers_block_type": ["mamba", "hybrid"]}}  # its class wants them to be two
    configs = [
        published(family.model_type, num_hidden_layers=2, **kinds.get(family.model_type, {}))
        for family in FAMILIES.values()
        if family.model_type != "gpt_neo"  # whose class refuses another number of layers
    ]
    for _ in range(count):
        config = _changed(draw.choice(configs), draw)
        try:
            read = ModelConfig.from_hf(config)
            if read.num_layers <= 4:
                empty_model(read, "float32", "meta")
                built += 1
        except (CheckpointError, UnsupportedError):
            pass
        except Exception as error:
            error.add_note(f"config.json: {config}")
            raise
    assert built > count / 10


@pytest.mark.parametrize(
    ("model_type", "name"), [("gptj", "rotary_dim"), ("mistral", "num_key_value_heads")]
)
def test_an_absent_field_means_what_the_configuration_class_says(model_type, name):
    config = published(model_type)
    whole = ModelConfig.from_hf(config)
    del config[name]
    assert ModelConfig.from_hf(config) == whole


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9}),
        ("smollm3", {"use_sliding_window": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
        ("dots1", {"n_routed_experts": 16, "max_window_layers": 2}),
        ("dots1", {"n_routed_experts": 16, "max_window_layers": 2, "sliding_window": None}),
    ],
)
def test_windows_without_a_list_of_kinds_are_those_of_the_configuration_class(model_type, fields):
    fields = fields | {"num_hidden_layers": 5}
    whole = published(model_type, **fields)
    written = {name: value for name, value in whole.items() if name != "layer_types"} | fields
    assert ModelConfig.from_hf(written).windows == ModelConfig.from_hf(whole).windows


def published(model_type, **fields):
    """The contents of config.json of a configuration class that is told some fields alone."""
    [name] = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    config = transformers.AutoConfig.for_model(model_type, **fields).to_dict()
    return config | {"architectures": [name]}
