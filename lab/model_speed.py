"""How fast whole models decode on a GPU, and their share of the roof of what a step reads.

    python lab/model_speed.py --json F [SHAPE ...]
    python lab/model_speed.py --trace --layers 6 gpt-oss-20b     # a step's time by kernel
    python lab/model_speed.py --device cpu --tiny --rows 1 2 --tokens 8   # tries without a GPU

Weights are random, of the published sizes; those in GPTQ's format are written to a file first. A
step of B rows reads all weights but the table of embeddings, of experts those that are hit (of E
experts with k a token E (1 - (1 - k / E)^B) on average), and the keys and values of its rows, of a
layer with a window no more than that, of a layer with a state the state. The roof is the time in
which a read of a large tensor, measured in the same run, gives these bytes; in the floor a weight
counts for the time of its products, at their measured peak, where that is longer. Times are of
decode steps alone, of requests that begin together, the median of the turns. With --prefill N the
step of a prompt of N tokens is timed, too, beside the peak of products: its FLOPs are those of the
weights and of attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.adapters import decode_rate
from lab.on_shape import machine
from lab.profile_decode import Slice, slices, traced
from tilewise import LLM, SamplingParams
from tilewise.bench.engines import shapes
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model
from tilewise.nn.quantised import QuantisedLinear

_NEW: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16"}
# Of Qwen3.5's layers, three of four keep a state.
_DELTA: dict[str, Any] = {
    name: value
    for name, value in shapes.SHAPES["qwen3.5-0.8b"].items()
    if name.startswith("linear_")
    or name
    in ("vocab_size", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
} | {"linear_num_value_heads": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _NEW
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "deepseek-v2-lite": _NEW
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    # Gemma 3 12B's widths with Gemma 4's layers: a sixth with heads of 512 whose keys are values.
    "gemma-4-12b": {
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "model_type": "gemma4_unified_text",
        "dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262_144,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4b": _NEW
    | _DELTA
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "tie_word_embeddings": True,
    },
    "qwen3.5-35b-a3b": _NEW
    | _DELTA
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "tie_word_embeddings": False,
    },
}
_FOUR_BITS = {
    "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
    }
}  # fmt: skip
for _name in ("llama-3-8b", "qwen3-0.6b"):
    SHAPES[_name] = shapes.SHAPES[_name]
    SHAPES[f"{_name}-4-bits"] = SHAPES[_name] | _FOUR_BITS
WANTED = {  # shares of the roof at 1, 32 and 256 rows
    "qwen3-30b-a3b": (0.35, 0.5, 0.6),
    "gemma-4-12b": (0.6, 0.7, 0.8),
    "gpt-oss-20b": (0.35, 0.5, 0.6),
    "qwen3.5-4b": (0.5, 0.6, 0.75),
    "qwen3.5-35b-a3b": (0.5, 0.6, 0.75),
}
_TINY = {
    "vocab_size": 503, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def write(
    name: str, folder: Path, tiny: bool, layers: int | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write config.json of a shape, or of its last layers; return its folder and the config."""
    config = dict(SHAPES[name])
    if tiny:
        config |= {key: value for key, value in _TINY.items() if key in config}
        if "linear_num_key_heads" in config:
            config["layer_types"] = ["linear_attention", "full_attention"] * 3
        if name == "deepseek-v2-lite":
            config["num_key_value_heads"] = config["num_attention_heads"]
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][-layers:]
    if tiny and is_gptq(config):
        config["quantization_config"] = config["quantization_config"] | {"group_size": 32}
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path, config


def is_gptq(config: dict[str, Any]) -> bool:
    """Return whether the weights are in GPTQ's format; the engine draws all others itself."""
    return config.get("quantization_config", {}).get("quant_method") == "gptq"


def write_four_bits(path: Path, config: dict[str, Any], device: str) -> None:
    """Write random weights of Llama's kind in GPTQ's format beside a config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group = config["quantization_config"]["group_size"]
    sizes = {  # outputs, channels
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (key_heads * width, hidden),
        "self_attn.v_proj": (key_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def words(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randint(-(2**31), 2**31, (rows, columns), device=device)
        return drawn.to(torch.int32).cpu()

    def table() -> torch.Tensor:
        shape = (config["vocab_size"], hidden)
        return (0.02 * torch.randn(shape, device=device)).bfloat16().cpu()

    tensors = {"model.embed_tokens.weight": table()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = table()
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm") if config["model_type"] == "qwen3" else ():
            tensors[f"{at}.self_attn.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        for name, (outputs, channels) in sizes.items():
            scales = torch.full((channels // group, outputs), 0.2 * channels**-0.5)
            tensors[f"{at}.{name}.qweight"] = words(channels // 8, outputs)
            tensors[f"{at}.{name}.qzeros"] = words(channels // group, outputs // 8)
            tensors[f"{at}.{name}.scales"] = scales.half()
    save_file(tensors, path / "model.safetensors")


class Read(NamedTuple):
    """What a step reads of one weight, and the FLOPs of its products."""

    nbytes: float
    flops: float


def reads_of_weights(model: torch.nn.Module, config: dict[str, Any], rows: int) -> list[Read]:
    """Return what a step of so many rows reads of each weight, on average."""
    experts = next(
        (
            config[n]
            for n in ("num_experts", "num_local_experts", "n_routed_experts")
            if n in config
        ),
        0,
    )
    hit = share = 1.0
    if experts:
        share = config["num_experts_per_tok"] / experts
        hit = 1 - (1 - share) ** rows
    found = []
    for name, tensor in model.state_dict().items():
        if "embed" in name and not config["tie_word_embeddings"]:
            continue
        is_routed = experts > 0 and tensor.shape[0] == experts and "router" not in name
        numbers = tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1)  # of 4 bits
        is_factor = tensor.dim() > 1 and not name.endswith(("_scale", "_bias"))
        flops = 2.0 * rows * numbers if is_factor else 0.0
        if is_routed:
            found.append(Read(tensor.nbytes * hit, flops * share))
        else:
            found.append(Read(tensor.nbytes, flops))
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            nbytes = sum(part.nbytes for part in module.parts)
            found.append(Read(nbytes, 2.0 * rows * module.in_features * module.out_features))
    return found


def bytes_of_cache(config: dict[str, Any], rows: int, context: int) -> float:
    """Return what a step of rows with so many tokens each reads of a cache in 16 bits."""
    layers = config["num_hidden_layers"]
    if "kv_lora_rank" in config:
        return 2.0 * layers * rows * context * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    window = config.get("sliding_window") or context
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if "global_head_dim" in config:
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        kinds = kinds * (layers // 6)
    total = 0.0
    for kind in kinds:
        if kind == "linear_attention":  # a state of float32
            state = config["linear_key_head_dim"] * config["linear_value_head_dim"]
            total += 4.0 * rows * config["linear_num_value_heads"] * state
            continue
        heads, width, tensors = config["num_key_value_heads"], config["head_dim"], 2
        tokens = min(context, window) if kind == "sliding_attention" else context
        if kind == "full_attention" and "global_head_dim" in config:
            heads, width, tensors = (
                config["num_global_key_value_heads"],
                config["global_head_dim"],
                1,
            )
        total += 2.0 * tensors * rows * tokens * heads * width
    return total


def flops_of_prompt(model: torch.nn.Module, config: dict[str, Any], tokens: int) -> float:
    """Return FLOPs of the products and of attention of a prompt, of whose tokens one has logits."""
    total = 0.0
    for name, tensor in model.state_dict().items():
        if "embed" in name or "head" in name or tensor.dim() < 2:
            continue
        is_routed = tensor.dim() > 2
        share = config["num_experts_per_tok"] / tensor.shape[0] if is_routed else 1.0
        total += 2.0 * tokens * share * tensor.numel()
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    width = config["num_attention_heads"] * config["head_dim"]
    return total + 2.0 * width * tokens**2 * kinds.count("full_attention")


def time_by_kernel(timeline: Sequence[Slice]) -> dict[str, Any]:
    """Return the time of each kernel of the step that a run repeats most often, by name.

    A step ends with the kernel that draws its tokens.
    """
    steps: list[list[Slice]] = [[]]
    for each in timeline:
        steps[-1].append(each)
        if "_draw_kernel" in each.name:
            steps.append([])
    orders = Counter(tuple(each.name for each in step) for step in steps)
    order, count = max(orders.items(), key=lambda item: (item[1], len(item[0])))
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in steps:
        if tuple(each.name for each in step) == order:
            for each in step:
                row = found[each.name]
                row[0] += 1 / count
                row[1] += each.own / count
                row[2] += each.gap / count
    return {
        "steps": count,
        "kernels": [
            {"name": name[:100], "count": round(n), "us": round(us, 1), "gap_us": round(gap, 1)}
            for name, (n, us, gap) in sorted(found.items(), key=lambda item: -item[1][1])
        ],
    }


def traced_run(run: Callable[[], object]) -> list[Slice]:
    """Return the kernels of a run on a GPU, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        return slices(traced(lambda: (run(), None)[1], Path(folder)))


def prefill_rate(llm: LLM, tokens: int, turns: int) -> list[float]:
    """Return the tokens/s of steps with one prompt, which is computed anew in each turn."""
    draw = torch.Generator().manual_seed(1)
    prompt = {"prompt_token_ids": torch.randint(3, 500, (tokens,), generator=draw).tolist()}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rates = []
    for _ in range(turns + 1):
        llm.reset_prefix_cache()
        before = llm.engine.stats()
        llm.generate([prompt], params)
        after = llm.engine.stats()
        seconds = after.prefill_seconds - before.prefill_seconds
        rates.append((after.prefill_tokens - before.prefill_tokens) / seconds)
    return rates[1:]


def measure(name: str, options: argparse.Namespace, peak: Ceilings) -> dict[str, Any]:
    """Return tokens/s and the share of the roof for each number of rows."""
    found: dict[str, Any] = {}
    read = peak.read_bytes
    with tempfile.TemporaryDirectory() as folder:
        path, config = write(name, Path(folder), options.tiny, options.layers)
        model = empty_model(read_config(path), "bfloat16", "meta")
        length = options.prompt + options.tokens
        blocks = max(max(options.rows) * (length // 16 + 2), options.prefill // 16 + 2)
        settings: dict[str, Any] = {"graphs": "lazy"} if options.device == "cuda" else {}
        is_written = is_gptq(config)
        if is_written:
            write_four_bits(path, config, options.device)
        began = time.perf_counter()
        with LLM(
            path,
            device=options.device,
            dtype="bfloat16",
            random_weights=not is_written,
            num_blocks=blocks,
            max_num_seqs=max(options.rows),
            max_model_len=max(length, options.prefill + 16, 256),
            max_num_batched_tokens=max(options.prefill, 8192),
            enable_prefix_caching=False,  # each turn would be a hit of the one before
            **settings,
        ) as llm:
            print(f"{name}: starts in {time.perf_counter() - began:.1f} s", flush=True)
            for rows in options.rows:
                given = argparse.Namespace(**(vars(options) | {"rows": rows}))
                decode_rate(
                    llm, given, []
                )  # graphs of as few rows as remain at the end are captured, too
                rates = [decode_rate(llm, given, []) for _ in range(options.turns)]
                rate = statistics.median(rates)
                weights = reads_of_weights(llm.model if is_written else model, config, rows)
                cache = bytes_of_cache(config, rows, options.prompt + options.tokens // 2)
                roof = (sum(each.nbytes for each in weights) + cache) / read
                floor = cache / read + sum(
                    max(each.nbytes / read, each.flops / peak.matmul_flops) for each in weights
                )
                found[str(rows)] = {
                    "tokens_per_s": round(rate, 1),
                    "spread": round((max(rates) - min(rates)) / rate, 3),
                    "ms": round(1e3 * rows / rate, 3),
                    "roof_ms": round(1e3 * roof, 3),
                    "share": round(roof * rate / rows, 3),
                    "floor_ms": round(1e3 * floor, 3),
                    "share_of_floor": round(floor * rate / rows, 3),
                }
                print(name, rows, found[str(rows)], flush=True)
                if options.trace:
                    timeline = traced_run(lambda given=given: decode_rate(llm, given, []))
                    found[str(rows)] |= time_by_kernel(timeline)
            if options.prefill:
                rates = prefill_rate(llm, options.prefill, options.turns)
                rate = statistics.median(rates)
                flops = flops_of_prompt(model, config, options.prefill)
                found["prefill"] = {
                    "tokens": options.prefill,
                    "tokens_per_s": round(rate, 1),
                    "spread": round((max(rates) - min(rates)) / rate, 3),
                    "ms": round(1e3 * options.prefill / rate, 3),
                    "share": round(flops / peak.matmul_flops * rate / options.prefill, 3),
                }
                print(name, "prefill", found["prefill"], flush=True)
                if options.trace:
                    timeline = traced_run(lambda: prefill_rate(llm, options.prefill, 0))
                    found["prefill"] |= time_by_kernel(timeline)
    return found


def main() -> None:
    """Measure the shapes that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="every shape with few and small layers")
    parser.add_argument("--layers", type=int, help="the last layers alone")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt that is timed")
    parser.add_argument("--trace", action="store_true", help="times of each kernel of a step")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    unknown = sorted({*options.shapes} - {*SHAPES})
    if unknown:
        parser.error(f"SHAPE must be one of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    peak = measure_ceilings("cpu" if options.tiny else options.device)
    results = {"machine": machine(options.device), "read_bytes": peak.read_bytes}
    results |= {"matmul_flops": peak.matmul_flops, "options": vars(options)}
    results |= {"wanted": WANTED, "models": {}}
    for name in options.shapes:
        try:
            results["models"][name] = measure(name, options, peak)
        except Exception as error:  # the others are measured yet
            results["models"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(name, results["models"][name], flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.json:
            Path(options.json).write_text(json.dumps(results) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
