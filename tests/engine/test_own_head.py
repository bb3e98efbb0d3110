"""Guesses of a checkpoint's own head: often right where the head is, and never a wrong token."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import test_mixtures as mixtures
from tests.models import test_state_families as states
from tests.models.tiny import PagedLoop
from tilewise.engine.config import OwnHead
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.head_guesser import HeadGuesser
from tilewise.errors import CheckpointError
from tilewise.models import load_model
from tilewise.models.multi_token_head import load_multi_token_head

KINDS = ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
SETTINGS = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 40, "max_num_seqs": 8,
    "max_num_batched_tokens": 24, "max_model_len": 128, "swap_space_gib": 0.001,
}  # fmt: skip
FILE = "model.safetensors"


def write(path, kind, reads, noise):
    """Save a model whose next token follows from the last one, nearly, and a head that knows it.

    The embeddings are orthonormal, and the output head is the embedding of the token before. Other
    blocks add little. The head reads the token, or the state of the token before, and goes on.
    """
    has_states = kind.startswith("qwen")
    hf = (states if has_states else mixtures).make(kind)
    hf.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    vocab, width = 40, config["hidden_size"]
    tensors = load_file(path / FILE)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")):
            tensors[name] *= noise
        if name.endswith("norm.weight"):  # of which those of Qwen hold their excess over 1
            tensors[name].fill_(float(not has_states or "linear_attn" in name))
    draw = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(width, width, generator=draw))[0][:vocab]
    following = torch.randperm(vocab, generator=draw)
    head = torch.empty(vocab, width)
    head[following] = basis
    tensors["model.embed_tokens.weight"] = basis.contiguous()
    tensors["lm_head.weight"] = 6 * head
    layers = config["num_hidden_layers"]
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    if has_states:
        last, own = (
            f"model.layers.{config['layer_types'].index('full_attention')}.",
            "mtp.layers.0.",
        )
    for name in [n for n in tensors if n.startswith(last)]:
        tensors[own + name.removeprefix(last)] = tensors[name].clone()
    goes_on = basis.T @ basis if reads == "tokens" else basis[following].T @ basis
    nothing = torch.zeros(width, width)
    halves = (goes_on, nothing) if reads == "tokens" else (nothing, goes_on)
    if has_states:
        tensors["mtp.fc.weight"] = torch.cat(halves, dim=1)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.zeros(width)
    tensors |= (
        {}
        if has_states
        else {
            f"{own}eh_proj.weight": torch.cat(halves, dim=1),
            f"{own}enorm.weight": torch.ones(width),
            f"{own}hnorm.weight": torch.ones(width),
            f"{own}shared_head.norm.weight": torch.ones(width),
            f"{own}shared_head.head.weight": tensors["lm_head.weight"].clone(),
            f"{own}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        }
    )
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    config |= {"vocab_size": vocab, "tie_word_embeddings": False}
    config |= {"mtp_num_hidden_layers" if has_states else "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _run(path, speculative=None, lengths=(20, 61, 24, 30), **options):
    """Return tokens and log-probabilities, and the share of right guesses."""
    prompts = [{"prompt_token_ids": [(7 * i + n) % 40 for i in range(n)]} for n in lengths]
    prompts += [{"prompt_token_ids": [*prompts[1]["prompt_token_ids"], 5]}]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=1
        )
        for i in range(len(prompts))
    ]
    with LLM(path, speculative=speculative, **SETTINGS | options) as llm:
        outputs = llm.generate(prompts, params)
        stats, speculation = llm.engine.stats().scheduler, llm.engine.scheduler.speculation
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    scores = [[e[t] for e, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
              for o in outputs]  # fmt: skip
    share = speculation and speculation.num_accepted / max(speculation.num_drafts, 1)
    return tokens, scores, share, stats


@pytest.mark.parametrize("reads", ["tokens", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_good_head_is_right_and_a_late_one_is_wrong_but_harmless(
    kind, reads, tmp_path, monkeypatch
):
    path = write(tmp_path, kind, reads, 0.02)
    want, scores, _, stats = _run(path)
    assert stats.num_preemptions > 0
    params = OwnHead(num_tokens=3, is_adaptive=False)
    got, close, share, _ = _run(path, params)
    assert got == want
    for mine, theirs in zip(close, scores, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert share > 0.6
    note = HeadGuesser.note

    def late(self, batch, samples, states_of):
        note(self, batch, samples, lambda rows: states_of((rows - 1).clamp(min=0)))

    monkeypatch.setattr(HeadGuesser, "note", late)
    got, _, worse, _ = _run(path, params)
    assert got == want
    if reads == "states":
        assert worse < share - 0.2


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next"])
def test_the_head_of_qwen_is_one_more_layer_with_attention_over_both(kind, tmp_path):
    """The modules of transformers, put together as the head's source says."""
    case = {"Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe", "Qwen3Next": "qwen3_next"}[kind]
    hf = states.make(case)
    hf.save_pretrained(tmp_path)
    modules = importlib.import_module(f"transformers.models.{case}.modeling_{case}")
    config = hf.config
    draw = torch.Generator().manual_seed(9)
    layer = getattr(modules, f"{kind}DecoderLayer")(
        config, config.layer_types.index("full_attention")
    ).eval()
    width = config.hidden_size
    norm, of_token, of_state = (getattr(modules, f"{kind}RMSNorm")(width) for _ in range(3))
    both = torch.nn.Linear(2 * width, width, bias=False)
    names = {
        "layers.0": layer, "norm": norm, "fc": both,
        "pre_fc_norm_embedding": of_token, "pre_fc_norm_hidden": of_state,
    }  # fmt: skip
    tensors = {}
    for name, module in names.items():
        for own, parameter in module.named_parameters():
            parameter.data = (
                torch.randn(parameter.shape, generator=draw) / parameter.shape[-1] ** 0.5
            )
            tensors[f"mtp.{name}.{own}"] = parameter.data.clone()
    tensors |= {name: x.clone() for name, x in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})

    ids = torch.randint(0, states.VOCAB, (1, 31), generator=draw)
    with torch.no_grad():
        hidden = hf.model(ids, use_cache=False).last_hidden_state[:, :-1]
        embedded = hf.model.embed_tokens(ids[:, 1:])
        x = both(torch.cat((of_token(embedded), of_state(hidden)), dim=-1))
        positions = torch.arange(30)[None]
        if kind != "Qwen3Next":  # which has no sections for pictures
            positions = positions.expand(3, 1, 30)
        mask = torch.full((30, 30), float("-inf")).triu(1)[None, None]
        x = layer(x, hf.model.rotary_emb(x, positions), attention_mask=mask)
        want = hf.lm_head(norm(x if isinstance(x, torch.Tensor) else x[0]))[0].log_softmax(-1)

    model = load_model(tmp_path)
    head = load_multi_token_head(tmp_path, model, model.config)
    loop, got = PagedLoop(head, 30, 1), []
    for first, end in ((0, 13), (13, 14), (14, 30)):
        head.previous = hidden[0, first:end]
        got.append(loop.step({0: ids[0, first + 1 : end + 1].tolist()}).log_softmax(-1))
    assert (torch.cat(got) - want).abs().max() < 2e-4

    tensors["mtp.embed_tokens.weight"] = torch.zeros(states.VOCAB, width)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mtp\.embed_tokens\.weight"):
        load_multi_token_head(tmp_path, model, model.config)


def test_without_the_option_the_head_is_left_out_and_without_a_head_it_is_refused(tmp_path):
    path = write(tmp_path, "glm4_moe", "tokens", 0.02)
    with LLM(path, **SETTINGS) as llm:
        assert len(llm.model.layers) == llm.config.num_layers
    tensors = {n: t for n, t in load_file(path / FILE).items() if "layers.2." not in n}
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"must hold tensor model\.layers\.2\.enorm\.weight"):
        LLM(path, speculative=OwnHead(), **SETTINGS)
