"""The compiled step beside float64 and the modules; its bits, its counts and its refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.cpu.test_step import resident
from tilewise import ops
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import BROKEN, Asked, Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.engine.steps import cpu_step
from tilewise.engine.steps.cpu_step import CompiledRunner, runner_for, why_not
from tilewise.engine.steps.decode_arrays import DecodeArrays
from tilewise.engine.steps.inputs import HostTables, build_inputs
from tilewise.engine.steps.runner import ModelRunner
from tilewise.kernels.cpu.step import program as program_module
from tilewise.kernels.cpu.step.codes import CODE, JOINS, NORM, PRODUCT
from tilewise.models import ModelConfig, build_model
from tilewise.models.layer_config import (
    PARALLEL,
    POST_NORM,
    PRE_NORM,
    SANDWICH,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.rope import RopeConfig
from tilewise.ops.panels import why_not_pack
from tilewise.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
CPU = torch.device("cpu")
SLOW = pytest.mark.slow  # each compiles a list of its own where none is cached
BLOCK = 4
BASE = {
    "vocab_size": 101,
    "hidden_size": 52,  # no multiple of a register or a step
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "global_head_dim": 16,
    "final_logit_softcapping": 3.0,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama, tied, biases": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral, window": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 12,
        "final_logit_softcapping": 3.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 52,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 72,
        "n_positions": 64,
    },
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 6,
        "q_lora_rank": 36,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "n_routed_experts": None,
        "first_k_dense_replace": 2,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "gemma4": {  # keys of other layers, embeddings of tokens for layers, factors of the stream
        **GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 101,
    },
    "gemma4, experts": {  # beside the blocks; keys that are values
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "llama4": {  # chunks, queries that grow, norms without weights, weights of what enters experts
        "architectures": ["Llama4ForCausalLM"],
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 72,
        "moe_layers": [1],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 4,
        },
    },
}
ROPE = RopeConfig(rotary_dim=6, interleaved=True)
HEADS = AttentionConfig(
    num_q_heads=6, num_kv_heads=2, head_dim=10, softmax_scale=0.3, rope=RopeConfig(rotary_dim=10)
)
GATED, PLAIN = FeedForwardConfig(72), FeedForwardConfig(72, "relu2", is_gated=False)
# What no family above has: layers, and the rest of the configuration.
LAYERS = {
    "sandwich": (
        (
            LayerConfig(
                replace(HEADS, softcap=4.0, window=5, qk_norm=NormConfig("layer", has_bias=True)),
                replace(GATED, activation="gelu"),
                SANDWICH,
            ),
            LayerConfig(
                replace(HEADS, has_sinks=True, qk_norm=NormConfig(), norms_after_rope=True),
                PLAIN,
                SANDWICH,
            ),
        ),
        {"norm": NormConfig("shifted_layer", 1e-5), "residual_scale": 0.5, "logit_scale": 0.25},
    ),
    "parallel": (
        (
            LayerConfig(replace(HEADS, rope=ROPE), GATED, PARALLEL, is_parallel=True),
            LayerConfig(
                replace(HEADS, rope=None, alibi_slopes=(0.5, 0.25, 0.1, 0.06, 0.03, 0.01)),
                PLAIN,
                PRE_NORM,
                is_parallel=True,
            ),
        ),
        {
            "norm": NormConfig("layer", has_weight=False),
            "embedding_scale": 3.3,
            "embedding_norm": True,
            "learned_positions": 40,
            "first_position": 2,
        },
    ),
    "norms behind blocks": (
        (
            LayerConfig(
                replace(HEADS, qk_norm=NormConfig(), qk_norm_over="heads"),
                replace(PLAIN, activation="gelu_new", bias=True),
                POST_NORM,
            ),
            LayerConfig(
                replace(HEADS, rope=None, qk_norm=NormConfig()),
                replace(GATED, activation="relu"),
                POST_NORM,
            ),
        ),
        {},
    ),
}
# Mixtures: the four ways to choose experts, what weighs them, and the block that all tokens use.
MIXTURE = ExpertsConfig(6, 3, 40)
LAYERS |= {
    name: (
        tuple(LayerConfig(HEADS, replace(MIXTURE, **fields), norms) for fields, norms in layers),
        {"norm": NormConfig("rms", 1e-5), "residual_scale": 0.7},
    )
    for name, layers in {
        "mixtures": (
            ({"shared_size": 56, "shared_is_gated": True, "activation": "gelu"}, PRE_NORM),
            (
                {
                    "scores": "sigmoid",
                    "has_correction_bias": True,
                    "num_groups": 3,
                    "num_active_groups": 2,
                    "best_in_group": 2,
                    "norm_eps": 1e-20,
                    "weight_scale": 2.5,
                    "routes_in_float32": True,
                    "shared_size": 24,
                },
                SANDWICH,
            ),
        ),
        "more mixtures": (
            (
                {"num_active": 2, "scores": "sparse_mixer", "jitter": 0.1, "router_bias": True},
                PRE_NORM,
            ),
            (
                {
                    "normalised": False,
                    "num_groups": 2,
                    "logit_scale": 0.5,
                    "scales_experts": True,
                    "weighs_input": True,
                    "has_bias": True,
                    "is_interleaved": True,
                    "router_norm_eps": 1e-5,
                },
                PRE_NORM,
            ),
        ),
    }.items()
}
ALL = [*MODELS, *LAYERS]
LENGTHS = (9, 3, 14, 1)


def build(name, dtype=torch.float32, **fields):
    """A random model, every parameter of which matters, and itself in float64."""
    torch.manual_seed(3)
    return with_noise(
        build_model(ModelConfig.from_hf(fields_of(name, **fields)), dtype=dtype), dtype
    )


def fields_of(name, **fields):
    given = {**BASE, **MODELS.get(name, MODELS["llama"]), **fields}
    if name == "gpt2":
        given = {k: v for k, v in given.items() if k not in BASE or k == "vocab_size"}
    return given


def with_noise(model, dtype):
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() == 1:
                parameter.add_((0.2 * noise).to(dtype))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def storage_of(model, dtype=None, num_blocks=40):
    # One group of layers: what windows hide is kept.
    own = model.config.attentions
    windows = tuple(each.window if each.is_chunked else None for each in own)
    config = model.config.with_windows(windows)
    storage = KVStorage(cache_spec(config, BLOCK, dtype or model.dtype), num_blocks, CPU)
    for tensor in storage.whole:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
    return storage


def texts_of(lengths=LENGTHS, more=4):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 101, (n + more,), generator=draw).tolist() for n in lengths]


def inputs_of(runs, texts, group_of=()):
    """A step that computes tokens first ... end - 1 of some sequences: {sequence: (first, end)}.

    All groups of layers have tables alike.
    """
    more = max(group_of, default=0)
    sequences = tuple(
        ScheduledSequence(
            seq_id=i,
            token_ids=tuple(texts[i][first:end]),
            start=first,
            block_ids=tuple(range(10 * i, 10 * i + -(-end // BLOCK))),
            num_samples=1,
            sampling=SamplingParams(),
            seeds=(i,),
            others=((range(10 * i, 10 * i + -(-end // BLOCK)), 0),) * more,
        )
        for i, (first, end) in runs.items()
    )
    batch = Batch(sequences, other_copies=((),) * more)
    tables = [HostTables() for _ in range(more)]
    return build_inputs(
        batch, BLOCK, CPU, group_of=group_of, other_tables=tables, batch_invariant=True
    )


def run_all(runner, texts, lengths=LENGTHS, more=4):
    """Prefill, half of the prompts in two chunks, then decode; logits of every step's samples."""
    found, groups = [], runner.storage.spec.group_of
    for runs in (
        {0: (0, lengths[0]), 1: (0, lengths[1])},
        {2: (0, lengths[2] // 2), 0: (lengths[0], lengths[0] + 1)},
        {2: (lengths[2] // 2, lengths[2]), 3: (0, lengths[3])},
    ):
        found.append(runner.forward(inputs_of(runs, texts, groups)).clone())
    for step in range(1, more):
        ends = [n + step + (i == 0) for i, n in enumerate(lengths)]  # the first is one ahead
        runs = {i: (end - 1, end) for i, end in enumerate(ends)}
        found.append(runner.forward(inputs_of(runs, texts, groups)).clone())
    return torch.cat(found)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_has_the_bits_of_its_modules(name, dtype):
    model, texts = build(name, dtype), texts_of()
    model.pack_for_inference()
    compiled, modules = (
        run_all(kind(model, storage_of(model), batch_invariant=True), texts)
        for kind in (CompiledRunner, ModelRunner)
    )
    assert torch.equal(compiled, modules)


def dense_all(model, texts, lengths=LENGTHS, more=4):
    """The same logits by the dense path."""
    with torch.inference_mode():
        whole = [model.compute_logits(model(torch.tensor([text])))[0] for text in texts]
    rows = [(0, lengths[0]), (1, lengths[1])]
    rows += [(2, lengths[2] // 2), (0, lengths[0] + 1), (2, lengths[2]), (3, lengths[3])]
    for step in range(1, more):
        rows += [(0, lengths[0] + step + 1)]
        rows += [(i, lengths[i] + step) for i in (1, 2, 3)]
    return torch.stack([whole[i][end - 1] for i, end in rows])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_within_the_budget_of_float64(name, dtype):
    model, texts = build(name, dtype), texts_of()
    truth = dense_all(copy.deepcopy(model).double(), texts)
    eager = dense_all(model, texts)
    model.pack_for_inference()
    logits = run_all(CompiledRunner(model, storage_of(model)), texts)
    modules = run_all(ModelRunner(model, storage_of(model)), texts)
    assert logits.dtype == torch.float32
    # Both are rounded to the model's dtype, and errors of two roundings of layers are not alike.
    largest = float(truth.abs().max())
    assert_within_budget(logits.to(dtype), truth, eager.to(dtype), scale=largest)
    assert_within_budget(modules.to(dtype), truth, eager.to(dtype), scale=largest)


# The list of the first is the one that engines over such a cache have in other tests.
@pytest.mark.parametrize(
    ("dtype", "cache", "is_invariant", "most"),
    [
        (torch.float32, torch.int8, True, 2e-5),
        pytest.param(torch.bfloat16, torch.int8, False, 0.06, marks=SLOW),
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, False, 0.06, marks=SLOW),
        pytest.param(torch.bfloat16, torch.float32, False, 0.06, marks=SLOW),
    ],
    ids=str,
)
def test_caches_of_other_dtypes_give_what_the_modules_give(dtype, cache, is_invariant, most):
    model, texts = build("qwen3", dtype), texts_of()
    model.pack_for_inference()
    settings = {"batch_invariant": is_invariant}
    logits = run_all(CompiledRunner(model, storage_of(model, cache), **settings), texts)
    modules = run_all(ModelRunner(model, storage_of(model, cache), **settings), texts)
    torch.testing.assert_close(logits, modules, atol=most, rtol=0.0)


def decode(runner, texts, chosen, length=8):
    """Logits of the token after `length` of the chosen sequences, computed together."""
    for i in chosen:
        runner.forward(inputs_of({i: (0, length)}, texts))
    return runner.forward(inputs_of(dict.fromkeys(chosen, (length, length + 1)), texts)).clone()


def assert_own_bits(model, monkeypatch):
    """Decode a sequence alone and beside others, on any number of threads: the same bits."""
    texts = texts_of((8,) * 40, more=1)
    runner = CompiledRunner(model, storage_of(model, num_blocks=400))
    alone = decode(runner, texts, [7])
    for threads in (1, 2, 3):
        monkeypatch.setattr(runner.teams, "choose", lambda kind, most, n=threads: n)
        for others in ([], [1], list(range(8, 40))):
            together = decode(runner, texts, [7, *others])
            assert torch.equal(together[0], alone[0]), (threads, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequences_bits_depend_on_neither_neighbours_nor_threads(dtype, monkeypatch):
    model = build("qwen3", dtype)
    model.pack_for_inference()
    assert_own_bits(model, monkeypatch)


def test_a_prompts_bits_depend_on_no_other_prompt():
    texts = texts_of()
    model = build("llama", torch.bfloat16)
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    alone = runner.forward(inputs_of({0: (0, 9)}, texts)).clone()
    together = runner.forward(inputs_of({2: (0, 14), 0: (0, 9)}, texts))
    assert torch.equal(together[1], alone[0])


# Each dtype compiles lists of its own: those that other tests have are everyday ones.
@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    [
        ("llama", torch.bfloat16, None),
        ("mistral, window", torch.bfloat16, None),
        ("qwen3", torch.float32, torch.int8),
        ("gemma3", torch.bfloat16, None),
        ("gpt2", torch.bfloat16, None),
        ("deepseek", torch.bfloat16, None),
        ("sandwich", torch.bfloat16, None),
        pytest.param("qwen3", torch.float32, None, marks=SLOW),
        pytest.param("llama, tied, biases", torch.float16, None, marks=SLOW),
        pytest.param("llama", torch.bfloat16, torch.int8, marks=SLOW),
        pytest.param("llama", torch.bfloat16, torch.float8_e4m3fn, marks=SLOW),
        pytest.param("sandwich", torch.bfloat16, torch.int8, marks=SLOW),
        pytest.param("deepseek", torch.float32, torch.int8, marks=SLOW),
        pytest.param("deepseek", torch.bfloat16, torch.float8_e4m3fn, marks=SLOW),
    ],
    ids=str,
)
def test_rows_of_a_prompt_that_attend_one_by_one_have_its_bits(name, dtype, cache, monkeypatch):
    model, texts = build(name, dtype), texts_of()
    model.pack_for_inference()
    found, calls = {}, []
    op = "mla_decode" if name == "deepseek" else "paged_attention"
    real = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    for most in (0, cpu_step.MOST_WORK_BY_ROWS):
        monkeypatch.setattr(cpu_step, "MOST_WORK_BY_ROWS", most)
        storage = storage_of(model, cache)
        runner = CompiledRunner(model, storage, batch_invariant=True)
        logits = run_all(runner, texts)
        # Slots that were never written hold what the storage was filled with.
        written = [torch.nan_to_num(x.float(), nan=7.0) for x in storage.whole]
        found[most] = logits, *written
        assert len(calls) == (3 * BASE["num_hidden_layers"] if most == 0 else 0)
        calls.clear()
    for rows, tiles in zip(*found.values(), strict=True):
        assert torch.equal(rows, tiles)


def test_a_long_prompt_attends_in_tiles(monkeypatch):
    """One that has more keys than the bound by itself, beside others: rows count with all keys."""
    model, texts = build("llama", torch.bfloat16), texts_of((30, 30, 30), more=0)
    model.pack_for_inference()
    storage = storage_of(model)
    runner = CompiledRunner(model, storage, batch_invariant=True)
    calls = []
    told = [each._replace(attend=lambda *_: calls.append(1)) for each in runner._attention]
    monkeypatch.setattr(runner, "_attention", told)
    width = BASE["num_attention_heads"] * BASE["head_dim"]
    for runs, work in (
        ({0: (0, 30)}, 900),
        ({1: (0, 29)}, 841),
        ({1: (29, 30)}, 0),  # a row alone is no prompt's, whatever it reads
        ({0: (28, 30), 2: (0, 5)}, 60 + 25),
    ):
        inputs = inputs_of(runs, texts)
        for most, is_tiled in ((work * width, False), (work * width - 1, work > 0)):
            monkeypatch.setattr(cpu_step, "MOST_WORK_BY_ROWS", most)
            calls.clear()
            runner.forward(inputs)
            assert bool(calls) == is_tiled, (runs, most)


class Ops(TorchDispatchMode):
    """Notes every op of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_decode_step_is_one_compiled_call_that_makes_no_tensor(monkeypatch):
    model, texts = build("llama", torch.bfloat16), texts_of()
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    calls = []
    real = program_module.run_list
    monkeypatch.setattr(
        program_module, "run_list", lambda *args: (calls.append(args[2:4]), real(*args))
    )
    prefill = inputs_of({0: (0, 9), 1: (0, 3)}, texts)
    runner.forward(prefill)
    assert len(calls) == BASE["num_hidden_layers"] + 1
    step = inputs_of({0: (9, 10), 1: (3, 4)}, texts)
    runner.forward(step)
    calls.clear()
    with Ops() as seen:
        logits = runner.forward(step)
    assert calls == [(0, len(runner.program))]
    # What reading inputs as arrays goes through, and a view of the runner's own memory.
    views = {"slice.Tensor", "detach", "resolve_neg", "resolve_conj", "to.dtype_layout"}
    assert set(seen.names) <= {f"aten::{name}" for name in views}
    assert logits.data_ptr() == runner.program.buffers["logits"].data_ptr()


def _write(module):
    module.weight.data.mul_(2)


def _load(module):
    module.load_state_dict({"weight": module.weight * 2})


def _replace(module):
    module.weight = torch.nn.Parameter(module.weight.detach() * 2)


# 64: of whole registers, so that weights are read where they lie; 52 is not.
@pytest.mark.parametrize("hidden_size", [52, 64])
@pytest.mark.parametrize("change", [_write, _load, _replace])
def test_a_weight_that_changes_counts_from_the_next_step(change, hidden_size):
    model = build("qwen3", hidden_size=hidden_size, tie_word_embeddings=False)
    texts, layer = texts_of(), model.layers[1]
    model.pack_for_inference()
    storage = storage_of(model)
    runner = CompiledRunner(model, storage)
    before = run_all(runner, texts)
    norms = (layer.attention_norm, layer.mlp_norm, model.norm)
    for module in (*norms, layer.attention.q_norm, layer.attention.k_norm, model.embed_tokens):
        change(module)
        after = run_all(runner, texts)
        assert not torch.equal(after, before)
        assert torch.equal(after, run_all(CompiledRunner(model, storage), texts))
        before = after


# 16 and 128: heads that lie whole in a group of panels, and in two; 10 do not.
@pytest.mark.parametrize("head_dim", [10, 16, 128])
def test_what_threads_do_without_a_meeting_changes_no_bit(head_dim, monkeypatch):
    texts, found = texts_of(), {}
    for joins in (True, False):
        model = build("qwen3", head_dim=head_dim)
        model.pack_for_inference()
        runner = CompiledRunner(model, storage_of(model))
        program = runner.program
        program.reserve(1, 1)
        joined = [program.ops[program.ops[:, CODE] == code, JOINS] for code in (NORM, PRODUCT)]
        assert (joined[0] == 1).all()
        assert joined[1].max() == {10: 0, 16: 1, 128: 2}[head_dim]
        assert (joined[1] > 0).sum() == (0 if head_dim == 10 else BASE["num_hidden_layers"])
        if not joins:
            for op in program._ops:
                op[JOINS] = 0
            program.ops[:, JOINS] = 0
        for threads in (1, 2, 3):
            monkeypatch.setattr(runner.teams, "choose", lambda kind, most, n=threads: n)
            found[joins, threads] = run_all(runner, texts)
    wanted = found[False, 1]
    assert all(torch.equal(logits, wanted) for logits in found.values())


def decoding(sequences, known, left=()):
    """A step that computes the last token of some texts: {sequence: blocks told before}."""
    return Batch(
        tuple(
            ScheduledSequence(
                seq_id=i,
                token_ids=(known[i][-1],),
                start=len(known[i]) - 1,
                block_ids=[10 * i + b for b in range(-(-len(known[i]) // BLOCK))],
                num_samples=1,
                sampling=SamplingParams(temperature=0.0 if i % 2 else 0.7),
                seeds=(i,),
                num_generated=len(known[i]),
                first_new_block=told,
            )
            for i, told in sequences.items()
        ),
        left=tuple(left),
    )


@pytest.mark.parametrize("only", [None, 1])
def test_a_decode_step_draws_the_same_without_tensors(only, monkeypatch):
    """Sequences come, go and grow; those of an even number are drawn, the others greedy."""
    texts, found = texts_of((9, 3, 14, 1, 6)), []
    for has_tensors in (True, False):
        model = build("llama, tied, biases")
        model.pack_for_inference()
        runner = CompiledRunner(model, storage_of(model, num_blocks=50))
        if has_tensors:
            monkeypatch.setattr(runner, "decode_inputs", lambda batch: None)
        known = {i: text[:-4] for i, text in enumerate(texts)}
        for i, text in known.items():
            runner.forward(inputs_of({i: (0, len(text))}, texts))
        told, drawn = dict.fromkeys(known, 0), []
        for live, left in (
            ((0, 1), ()),
            ((0, 1), ()),
            ((0, 1, 2, 3, 4), ()),
            ((1, 2, 4), (0, 3)),
            ((2, 4, 1), ()),
            ((0, 2), (1, 4)),
            ((0, 2), ()),
        ):
            live = live if only is None else (only,)
            left = left if only is None else ()
            for i in left:
                told[i] = 0
            batch = decoding({i: told[i] for i in live}, known, left)
            assert has_tensors or runner.decode_inputs(batch) is not None
            samples = runner.submit(batch).result()
            for run, [token] in zip(batch.sequences, samples, strict=True):
                told[run.seq_id] = len(run.block_ids)
                known[run.seq_id] = [*known[run.seq_id], token.token_id]
            drawn.append(samples)
        found.append(drawn)
    assert found[0] == found[1]


def test_tables_of_a_runner_that_was_reset_are_read_anew():
    arrays, known = DecodeArrays(BLOCK), {0: list(range(9)), 1: list(range(5))}
    first = decoding({0: 0, 1: 0}, known)
    for shift in (0, 20):  # the same versions and rows of other tables
        batch = Batch(
            tuple(
                run._replace(block_ids=[block + shift for block in run.block_ids])
                for run in first.sequences
            )
        )
        found = arrays.fill(batch, HostTables()).rows
        assert found.table[0, :3].tolist() == [shift, shift + 1, shift + 2]
        assert found.table[1, :2].tolist() == [shift + 10, shift + 11]
        assert found.slots.tolist() == [(shift + 2) * BLOCK, (shift + 11) * BLOCK]
        assert (found.lengths.tolist(), found.positions.tolist()) == ([9, 5], [8, 4])


def test_a_greedy_decode_step_calls_nothing_of_torch():
    model, texts = build("llama", torch.bfloat16), texts_of()
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    runner.forward(inputs_of({1: (0, 3)}, texts))
    known = {1: texts[1][:3]}
    for step in range(3):
        with Ops() as ops:
            [[token]] = runner.submit(decoding({1: 0}, known)).result()
        assert not ops.names or step == 0
        known[1] = [*known[1], token.token_id]


def test_a_step_that_asks_for_more_makes_tensors():
    model = build("llama")
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    batch = decoding({1: 0, 2: 0}, {1: [5, 6], 2: [7, 8, 9]})
    assert runner.decode_inputs(batch) is not None
    first, second = batch.sequences
    asked = Asked(True, [5, 6], 2)
    for changed in (
        first._replace(token_ids=(5, 6), start=0),
        first._replace(num_samples=0),
        first._replace(num_samples=2, seeds=(1, 2)),
        first._replace(asked=asked),
    ):
        assert runner.decode_inputs(Batch((changed, second))) is None
    assert runner.decode_inputs(Batch((first, second), block_copies=((1, 2),))) is None


def test_a_row_that_is_not_finite_breaks_nobody_else():
    model = build("llama")
    with torch.no_grad():
        model.embed_tokens.weight[1] = float("nan")
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    known = {1: [1], 3: [5]}  # greedy, both
    alone = runner.submit(decoding({3: 0}, known)).result()
    assert runner.submit(decoding({1: 0}, known)).result() == [[BROKEN]]
    assert runner.submit(decoding({1: 0, 3: 1}, known)).result() == [[BROKEN], *alone]


def test_nothing_is_sampled_and_nothing_returned():
    model, texts = build("llama"), texts_of()
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    inputs = inputs_of({0: (0, 9)}, texts)
    none = type(inputs)(
        **{name: getattr(inputs, name) for name in inputs.__slots__}
        | {"logits_rows": inputs.logits_rows[:0]}
    )
    assert runner.forward(none).shape == (0, 101)


def test_a_token_that_is_not_finite_leaves_no_trace():
    model, texts = build("llama"), texts_of()
    with torch.no_grad():
        model.embed_tokens.weight[1] = float("nan")
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model))
    clean = runner.forward(inputs_of({0: (0, 1)}, texts)).clone()
    bad = [[1] * 10, texts[1]]
    assert not runner.forward(inputs_of({0: (0, 1)}, bad)).isfinite().any()
    assert torch.equal(runner.forward(inputs_of({0: (0, 1)}, texts)), clean)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_does_not_grow_with_the_lengths_of_prompts():
    model = build("llama", torch.bfloat16, max_position_embeddings=1024, num_hidden_layers=1)
    model.pack_for_inference()
    runner = CompiledRunner(model, storage_of(model, num_blocks=600))
    text = torch.randint(3, 101, (1024,)).tolist()

    def prefill(end):
        first = max(0, end - 1 - end % 40)
        blocks = tuple(range(-(-end // BLOCK)))
        sequence = ScheduledSequence(
            0, tuple(text[first:end]), first, blocks, 1, SamplingParams(), (0,)
        )
        runner.forward(build_inputs(Batch((sequence,)), BLOCK, CPU))

    for end in (*range(1, 41), 1024):
        prefill(end)
    before = resident()
    for i in range(1024):
        prefill(1 + 37 * i % 1024)  # each length once
    assert resident() <= 1.02 * before


@pytest.mark.parametrize(
    ("fields", "dtype", "packs", "words"),
    [
        ({}, torch.float32, False, "weights must be packed"),
        ({}, torch.float64, True, "weights must be packed"),
    ],
    ids=["unpacked", "float64"],
)
def test_what_the_list_cannot_express_keeps_the_modules(fields, dtype, packs, words):
    model = build("llama", dtype, **fields)
    if packs:
        model.pack_for_inference()
    storage = storage_of(model)
    assert words in why_not(model, storage)
    assert type(runner_for(model, storage)) is ModelRunner
    with pytest.raises(ValueError, match=words):
        CompiledRunner(model, storage)
