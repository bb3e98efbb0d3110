"""Models of transformers over the paged cache: the same numbers as by their own attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.errors import CheckpointError, UnsupportedError
from tilewise.models import load_model
from tilewise.models.transformers_decoder import TransformersDecoder

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# What each has that others do not; all but two are computed in the slow set.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft caps of logits and attention, windows": ("Gemma2", _WINDOWS),
    "heads that differ by layer": (
        "Gemma4",
        {**_WINDOWS, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 300},
    ),
    "norms behind blocks": ("Olmo2", {}),
    "parallel blocks, scaled logits, windows": ("Cohere2", _WINDOWS),
    "parallel blocks, part of a head rotates": ("GPTNeoX", {}),
    "learned positions, a decoder within": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "experts": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "head_dim": 16}),
    "experts by sigmoid, unequal heads": (
        "DeepseekV3",
        {**_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "a router that is a projection": ("Phimoe", {"num_local_experts": 4}),
    "experts that count on the host": (
        "JetMoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "layers that attend twice": ("DiffLlama", {"head_dim": 16}),
    "four multipliers": (
        "Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                    "attention_multiplier": 0.2},
    ),
}  # fmt: skip
EVERY_DAY = ("soft caps of logits and attention, windows", "experts by sigmoid, unequal heads")
PROMPTS = ([*range(5, 45)], [9], [*range(5, 40), 4, 8], [11, 12, 13], [21, 22])


def make(family: str, fields: dict[str, Any]) -> Any:
    """Return a small random model of a family of transformers."""
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    known = kind.config_class().to_dict()
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in known or name in kind.config_class.attribute_map or value is None
    }
    torch.manual_seed(3)
    model = kind(kind.config_class(**sizes | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(4.0)
    return model


def log_probabilities(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return those (n, V) from which transformers would draw each token, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1)


def check_outputs(model: Any, prompts: Any, outputs: Any, *, is_greedy: bool = True) -> None:
    """Compare log-probabilities, and greedy tokens, with those of transformers."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for sample in output.outputs:
            expected = log_probabilities(model, prompt, sample.token_ids)
            own = torch.tensor(
                [step[t] for step, t in zip(sample.logprobs, sample.token_ids, strict=True)]
            )
            chosen = expected.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
            assert (own - chosen).abs().max() < 2e-4
            assert not is_greedy or (expected.amax(1) - chosen).max() < 1e-4


@pytest.mark.parametrize(
    "case", [c if c in EVERY_DAY else pytest.param(c, marks=pytest.mark.slow) for c in FAMILIES]
)
def test_a_family_says_what_it_says_in_transformers(case: str, tmp_path: Path) -> None:
    """In chunks, with preemption, over a prefix that is found, and with two samples."""
    model = make(*FAMILIES[case])
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "model_impl": "transformers",
    }
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(tmp_path, num_blocks=28, max_num_seqs=5, **options) as llm:
        assert isinstance(llm.model, TransformersDecoder)
        check_outputs(model, PROMPTS, llm.generate(given, params))
        assert llm.engine.scheduler.stats().num_preemptions > 0
        for _ in range(2):
            [again] = llm.generate(given[:1], replace(params, temperature=1.0, n=2))
        assert again.num_cached_tokens > 0
        check_outputs(model, PROMPTS[:1], [again], is_greedy=False)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("case", [c for c in FAMILIES if "host" not in c])
def test_a_family_runs_on_a_gpu_as_in_transformers(case: str, graphs: str, tmp_path: Path) -> None:
    """Captured as CUDA graphs, steps with prompts in pieces, and op by op."""
    model = make(*FAMILIES[case])
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 16, "graphs": graphs}
    with LLM(
        tmp_path, device="cuda", num_blocks=64, max_num_seqs=5, model_impl="transformers", **options
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [sample] = output.outputs
        expected = log_probabilities(model, prompt, sample.token_ids)
        own = [step[t] for step, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        chosen = expected.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        # Products of float32 are TF32 nowhere here; attention's are in Triton's kernels.
        assert (torch.tensor(own) - chosen).abs().max() < 2e-2
        assert (expected.amax(1) - chosen).max() < 2e-2


def test_a_dense_batch_can_be_differentiated(tmp_path: Path) -> None:
    model = make("Olmo2", {})
    model.save_pretrained(tmp_path)
    own = load_model(tmp_path, model_impl="transformers")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    logits = own.compute_logits(own(ids))
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    logits.sum().backward()
    assert all(p.grad is not None for name, p in own.named_parameters() if "q_proj" in name)


def test_weights_in_eight_bits_come_near(tmp_path: Path) -> None:
    model = make("Olmo2", {"hidden_size": 64, "intermediate_size": 64})
    model.save_pretrained(tmp_path)
    own = load_model(tmp_path, model_impl="transformers")
    own.pack_for_inference(is_int8=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids).logits
    error = (own.compute_logits(own(ids)) - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "it sees both ways": ("XLMRoberta", {}, "attention.self .* it is not causal"),
    "a recurrence": (
        "Qwen3Next",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, **_EXPERTS},
        r"layers.0\S* .* cannot run over a paged cache: it reads cache_params",
    ),
    "a convolution": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        r"layers.0.conv .* it reads (past_key|cache)|keeps more of a text than the keys and values",
    ),
    "scales by the length of its cache": (
        "Llama4",
        {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2},
        r"self_attn .* it reads \w+\.get_seq_length",
    ),
    "a cache of compressed keys beside the window": (
        "DeepseekV4",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        r"it reads (past_key_values|cache)\.layers",
    ),
    "it attends by itself": ("GPTNeoXJapanese", {}, "attend by themselves"),
    "positions are counted inside": ("Bloom", {}, "takes no position_ids"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_keeps_more_than_keys_and_values_is_refused_by_its_layer(
    case: str, tmp_path: Path
) -> None:
    family, fields, message = REFUSED[case]
    make(family, fields).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        load_model(tmp_path, model_impl="transformers")


def test_chunks_are_refused_by_their_size(tmp_path: Path) -> None:
    fields = {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2}
    model = make("Llama4", {**fields, "attn_temperature_tuning": False})
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="get_seq_length|chunks of 8192"):
        load_model(tmp_path, model_impl="transformers")


def test_a_model_whose_calls_are_not_all_it_keeps_is_found_by_a_short_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.models import transformers_decoder as module

    make("Olmo2", {}).save_pretrained(tmp_path)
    survey = module.survey

    def wrong(make: Any) -> Any:
        calls, can_pack = survey(make)
        return tuple(
            replace(call, softmax_scale=2 * call.softmax_scale) for call in calls
        ), can_pack

    monkeypatch.setattr(module, "survey", wrong)
    with pytest.raises(UnsupportedError, match="differ from its own by .*%"):
        load_model(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("case", "captured", "in_pieces"),
    [
        ("norms behind blocks", True, True),
        ("layers that attend twice", True, False),
        ("experts", True, True),
        ("a router that is a projection", False, True),  # its angles lie on the host
    ],
)
def test_what_a_gpu_captures_of_a_family(
    case: str, captured: bool, in_pieces: bool, tmp_path: Path
) -> None:
    make(*FAMILIES[case]).save_pretrained(tmp_path)
    own = load_model(tmp_path, model_impl="transformers")
    assert own.config.can_be_captured == captured
    assert own.hands_attention_over == in_pieces


def test_a_lacking_tensor_is_not_drawn_at_random(tmp_path: Path) -> None:
    make("Olmo2", {}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"must hold tensor model.layers.1.mlp.up_proj"):
        load_model(tmp_path, model_impl="transformers")


def test_a_way_is_obeyed_or_refused(tmp_path: Path) -> None:
    make("Jais2", {}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"architecture must be one of .*Jais2ForCausalLM'$"):
        load_model(tmp_path, model_impl="tilewise")
    with pytest.raises(ValueError, match="model_impl must be one of auto, tilewise, transformers"):
        load_model(tmp_path, model_impl="vllm")
    options: dict[str, Any] = {"random_weights": True, "dtype": "bfloat16", "num_blocks": 16}
    options["model_impl"] = "transformers"
    with pytest.raises(
        ValueError, match="batch_invariant must be False for a model that runs thro"
    ):
        LLM(tmp_path, batch_invariant=True, **options)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 for a model that runs"):
        LLM(tmp_path, tensor_parallel_size=2, **options)
    with LLM(tmp_path, **options) as llm:
        assert llm.model.dtype == torch.bfloat16
        assert isinstance(llm.model, TransformersDecoder)


def test_a_native_family_runs_either_way(tmp_path: Path) -> None:
    model = make("Llama", {})
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    native, other = (load_model(tmp_path, model_impl=way) for way in ("tilewise", "transformers"))
    assert isinstance(other, TransformersDecoder)
    assert not isinstance(native, TransformersDecoder)
    torch.testing.assert_close(
        native.compute_logits(native(ids)), other.compute_logits(other(ids)), rtol=1e-4, atol=1e-4
    )


def test_a_setting_that_no_decoder_here_has_goes_to_transformers(tmp_path: Path) -> None:
    make("Cohere", {"use_qk_norm": True}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="runs through transformers, .* use_qk_norm must be false"):
        assert isinstance(load_model(tmp_path), TransformersDecoder)
