"""attn_implementation="tilewise" beside "eager": logits, gradients and greedy tokens."""

from __future__ import annotations

import functools
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomModel,
    DynamicCache,
    StaticCache,
    masking_utils,
)
from transformers.utils import logging

from tests.integrations.small_models import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    LENGTH,
    VOCAB,
    build,
    checkpoint,
    padding,
    results,
    tokens,
    truth,
    with_cache,
)
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations.transformers import forward, register
from tilewise.integrations.transformers.forward import attend
from tilewise.masks import of_transformers as patterns
from tilewise.testing import assert_within_budget

logging.set_verbosity_error()
register()


@pytest.fixture
def calls(monkeypatch):
    """Count what reaches tilewise's attention: a model that goes elsewhere proves nothing."""
    seen = []
    for name in ("attention", "attention_varlen"):
        original = getattr(ops, name)

        def counted(*args, _original=original, _name=name, **kwargs):
            seen.append((_name, kwargs))
            return _original(*args, **kwargs)

        monkeypatch.setattr(forward, name, counted)
    return seen


def _inputs(name: str, side: str | None) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return a model's arguments and which rows of its logits are compared."""
    inputs = {"input_ids": tokens()}
    rows = None
    if side is not None:
        inputs["attention_mask"] = rows = padding(side)
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = tokens(length=7).flip(1)
        rows = None
        if side is not None:
            inputs["decoder_attention_mask"] = rows = padding(side)[:, -7:]
    return inputs, rows


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *ENCODER_DECODERS])
def test_logits_and_every_gradient_keep_the_budget(name, side, calls):
    inputs, rows = _inputs(name, side)
    do = torch.randn(3, LENGTH, VOCAB)
    want = truth(name, inputs, rows, do)
    eager = results(build(name, "eager"), inputs, rows, do)
    assert not calls
    got = results(build(name, "tilewise"), inputs, rows, do)
    assert len(calls) >= 2
    # The gradient of a key's bias is 0 but for rounding what the softmax takes away again.
    largest = max(float(t.abs().max()) for t in want.values())
    for key, result in got.items():
        # Each of two sums of many roundings, taken in orders of their own: the largest of a few
        # dozen such errors may well be three times that of the other, so the factor is wide.
        assert_within_budget(result, want[key], eager[key], name=key, scale=largest, factor=4.0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_float64_agrees_to_its_last_digits(name, side):
    inputs, rows = _inputs(name, side)
    do = torch.randn(3, LENGTH, VOCAB)
    want = truth(name, inputs, rows, do)
    got = results(build(name, "tilewise").double(), inputs, rows, do)
    for key, result in got.items():
        torch.testing.assert_close(result, want[key], rtol=1e-10, atol=1e-10)


def test_bfloat16_models_run_with_padding(calls):
    inputs, rows = _inputs("gemma2", "left")
    do = torch.randn(3, LENGTH, VOCAB)
    got = results(build("gemma2", "tilewise").bfloat16(), inputs, rows, do)
    want = truth("gemma2", inputs, rows, do)
    eager = results(build("gemma2", "eager").bfloat16(), inputs, rows, do)
    assert_within_budget(got["logits"], want["logits"], eager["logits"], name="logits", scale=1.0)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *ENCODER_DECODERS])
def test_on_a_gpu(name, side, calls):
    inputs, rows = _inputs(name, side)
    inputs = {key: t.cuda() for key, t in inputs.items()}
    rows = None if rows is None else rows.cuda()
    do = torch.randn(3, LENGTH, VOCAB, device="cuda")
    want = results(build(name, "eager").cuda(), inputs, rows, do)
    got = results(build(name, "tilewise").cuda(), inputs, rows, do)
    assert len(calls) >= 2
    for key, result in got.items():
        scale = float(want[key].abs().max())
        torch.testing.assert_close(result, want[key], rtol=1e-2, atol=1e-2 * max(scale, 1.0))


@pytest.mark.gpu
# What torch's compiler says of itself and of TF32 when it compiles for a GPU.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_on_a_gpu_compiles_the_steps_of_a_static_cache(name):
    ids, mask = tokens().cuda(), padding("left").cuda()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = build(name, "eager").cuda().generate(ids, attention_mask=mask, **options)
    model = build(name, "tilewise").cuda()
    for cache in ("dynamic", "static"):
        got = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
        assert (got == want).float().mean() > 0.9  # a tie may break the other way in float32


class TestGenerate:
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("name", DECODERS)
    def test_greedy_tokens_equal_eagers(self, name, cache, calls):
        options = {
            "attention_mask": padding("left"),
            "max_new_tokens": 6,
            "do_sample": False,
            "cache_implementation": cache,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        want = build(name, "eager").generate(tokens(), **options)
        got = build(name, "tilewise").generate(tokens(), **options)
        assert torch.equal(got, want)
        assert len(calls) == 2 * 6

    def test_one_sequence_needs_no_mask(self, calls):
        ids = tokens(1)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        want = build("mistral", "eager").generate(ids, **options)
        assert torch.equal(build("mistral", "tilewise").generate(ids, **options), want)
        assert all(kwargs["bias"] is None for _, kwargs in calls)

    def test_beams_through_cross_attention(self, calls):
        options = {"attention_mask": padding("right"), "max_new_tokens": 6, "num_beams": 3}
        want = build("bart", "eager").generate(tokens(), **options)
        assert torch.equal(build("bart", "tilewise").generate(tokens(), **options), want)
        assert calls

    @pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
    @pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
    @torch.no_grad()
    def test_prompts_in_chunks(self, name, cache_class):
        """Several queries meet a cache that already holds keys, or that has room for more."""
        ids, mask = tokens(), padding("left")
        whole = build(name, "eager")(ids, attention_mask=mask).logits[mask.bool()]
        model = build(name, "tilewise")
        size = {"max_cache_len": 16} if cache_class is StaticCache else {}
        cache, parts, start = cache_class(config=model.config, **size), [], 0
        for end in (5, 6, 9, LENGTH):
            kept = with_cache(model.forward, cache)
            parts.append(model(ids[:, start:end], attention_mask=mask[:, :end], **kept).logits)
            start = end
        torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole, rtol=1e-4, atol=1e-4)


class TestPacked:
    POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4], [*range(11)], [0, 0, *range(9)]])

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_position_ids_keep_sequences_apart(self, name, calls):
        inputs = {"input_ids": tokens(), "position_ids": self.POSITIONS, "use_cache": False}
        do = torch.randn(3, LENGTH, VOCAB)
        want = results(build(name, "eager"), inputs, None, do)
        got = results(build(name, "tilewise"), inputs, None, do)
        assert [kind for kind, _ in calls] == ["attention_varlen"] * 2
        for key, result in got.items():
            torch.testing.assert_close(result, want[key], rtol=1e-3, atol=1e-4)

    def test_lengths_may_be_given_as_flash_attention_takes_them(self, calls):
        lengths = [4, 2, 5]
        cu = torch.tensor([0, *lengths]).cumsum(0)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        ids = tokens(1)
        want = build("mistral", "eager")(ids, position_ids=positions, use_cache=False).logits
        given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
        got = build("mistral", "tilewise")(ids, position_ids=positions, **given).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert [kind for kind, _ in calls] == ["attention_varlen"] * 2

    @pytest.mark.parametrize("name", DECODERS)
    def test_a_batch_as_the_collator_flattens_it(self, name, calls):
        """Trained as its sequences alone are, whatever else reaches the model for its loss."""
        ids = tokens(1)
        batch, edges = _flattened(ids, [4, 2, 5])
        model = build(name, "tilewise").train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        got = model(**batch, labels=ids, shift_labels=ids, ignore_index=7, use_cache=False)
        assert [kind for kind, _ in calls] == ["attention_varlen"] * 2
        alone = build(name, "eager")
        pieces = [alone(ids[:, a:b], use_cache=False).logits for a, b in edges]
        want = torch.cat(pieces, 1)
        torch.testing.assert_close(got.logits, want, rtol=1e-4, atol=1e-4)
        loss = nn.functional.cross_entropy(want[0].float(), ids[0], ignore_index=7)
        torch.testing.assert_close(got.loss, loss, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", DECODERS)
    def test_shift_labels_of_context_parallelism_reach_the_loss_alone(self, name, calls):
        """The Trainer shifts labels before it cuts a text into the shards of its ranks."""
        ids = tokens(2)
        shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        shifted[0, 3:5] = -100
        losses, gradients = [], []
        for implementation in ("eager", "tilewise"):
            model = build(name, implementation)
            loss = model(ids, labels=ids, shift_labels=shifted, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append([x.grad for x in model.parameters() if x.grad is not None])
        assert [kind for kind, _ in calls] == ["attention"] * 2
        logits = model(ids, use_cache=False).logits.detach().float()
        alone = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
        torch.testing.assert_close(losses[1], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
        for got, want in zip(*reversed(gradients), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)

    def test_positions_make_no_matrix(self, calls):
        """4,096 tokens: one of them would have 16 million numbers a layer."""
        batch, _ = _flattened(tokens(1, 4096), [1000, 96, 3000])
        model = build("llama", "tilewise", max_position_embeddings=4096)
        with torch.no_grad():
            model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        assert [kind for kind, _ in calls] == ["attention_varlen"] * 2
        assert [kwargs["max_seqlen_k"] for _, kwargs in calls] == [3000] * 2

    def test_a_mask_of_unknown_functions_keeps_given_sequences_apart(self, monkeypatch):
        """As in a compiled graph, where no function can be looked into."""
        monkeypatch.setattr(patterns.Pattern, "of", lambda function: None)
        batch, edges = _flattened(tokens(1), [4, 2, 5])
        alone = build("mistral", "eager")
        pieces = [alone(batch["input_ids"][:, a:b]).logits for a, b in edges]
        model = build("mistral", "tilewise")
        causal = {"attention_mask": torch.ones_like(batch["input_ids"])}  # the lengths say the rest
        for mask in ({}, causal):
            got = model(**batch, **mask, use_cache=False).logits
            torch.testing.assert_close(got, torch.cat(pieces, 1), rtol=1e-4, atol=1e-4)


def _flattened(ids: Tensor, lengths: list[int]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return what DataCollatorWithFlattening makes of sequences, and where they begin and end."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return batch, list(pairwise(cu.tolist()))


class TestOtherMasks:
    @pytest.mark.parametrize("side", [None, "right"])
    def test_a_decoder_may_see_both_ways(self, side, calls):
        inputs, rows = _inputs("llama", side)
        want = build("llama", "eager")(**inputs, is_causal=False).logits
        got = build("llama", "tilewise")(**inputs, is_causal=False).logits
        keep = ... if rows is None else rows.bool()
        torch.testing.assert_close(got[keep], want[keep], rtol=1e-4, atol=1e-4)
        causal = build("llama", "tilewise")(**inputs).logits
        assert not torch.allclose(got[keep], causal[keep], rtol=1e-2, atol=1e-2)
        assert (calls[0][1]["seqlens_k"] is None) == (side is None)  # lengths, not a bias

    @pytest.mark.parametrize("as_float", [False, True])
    def test_four_dims_are_taken_as_they_are(self, as_float):
        visible = torch.rand(3, 1, LENGTH, LENGTH) > 0.4
        visible[..., 0] = True
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        ids = tokens()
        want = build("llama", "eager")(ids, attention_mask=mask).logits
        got = build("llama", "tilewise")(ids, attention_mask=mask if as_float else visible).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_functions_that_nobody_knows_become_matrices(self, monkeypatch):
        """A prefix that all see, laid over causality by a function of the user's."""

        def prefix(batch, head, query, key):
            return key < 4

        ids, mask = tokens(), padding("left")
        make = functools.partial(masking_utils.create_causal_mask, or_mask_function=prefix)
        logits = {}
        for attention in ("eager", "tilewise"):
            model = build("llama", attention)
            monkeypatch.setattr(sys.modules[type(model).__module__], "create_causal_mask", make)
            logits[attention] = model(ids, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(logits["tilewise"], logits["eager"], rtol=1e-4, atol=1e-4)


class TestTraining:
    def test_dropout_is_seeded_and_differs_between_layers(self):
        model = build("llama", "tilewise").train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(model(tokens()).logits)
        assert torch.equal(runs[0], runs[1])
        assert not torch.allclose(runs[0], runs[2], atol=1e-3)
        model.eval()
        assert torch.equal(model(tokens()).logits, model(tokens()).logits)

    def test_dropout_drops_what_attention_drops(self):
        q, k, v = (torch.randn(2, h, 20, 16) for h in (4, 2, 2))
        module = SimpleNamespace(is_causal=True, training=True)
        torch.manual_seed(9)
        got, _ = attend(module, q, k, v, None, dropout=0.25)
        torch.manual_seed(9)
        seed = torch.randint(0, 2**62, (2,), dtype=torch.int64)
        want = ops.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=True, dropout_p=0.25, seed=seed
        )
        assert torch.equal(got, want)
        module.training = False
        whole, _ = attend(module, q, k, v, None, dropout=0.25)
        assert not torch.equal(whole, got)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_changes_no_gradient(self, reentrant):
        inputs, rows = _inputs("mistral", "left")
        do = torch.randn(3, LENGTH, VOCAB)
        model = build("mistral", "tilewise").train()
        want = results(model, inputs, rows, do)
        checkpoint(model, reentrant)
        model.enable_input_require_grads()
        got = results(model, {**inputs, "use_cache": False}, rows, do)
        assert all(torch.equal(got[key], want[key]) for key in want)


class TestCompiled:
    def test_one_graph_without_a_matrix_of_the_mask(self):
        """Gemma 2 has layers that see all that is before them and layers that see a window."""
        from torch._dynamo.backends.common import aot_autograd

        graphs = []

        def keep(graph, _):
            graphs.append(graph)
            return graph

        inputs, rows = _inputs("gemma2", "left")
        model = build("gemma2", "tilewise")
        with torch.no_grad():
            want = model(**inputs).logits[rows.bool()]
            torch._dynamo.reset()
            compiled = torch.compile(
                model.forward, fullgraph=True, backend=aot_autograd(fw_compiler=keep)
            )
            got = compiled(**inputs, use_cache=False).logits[rows.bool()]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        (graph,) = graphs
        values = [node.meta.get("val") for node in graph.graph.nodes]
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        assert len(shapes) > 30
        assert not any(shape[-2:] == (LENGTH, LENGTH) for shape in shapes)

    def test_packed_sequences_whose_lengths_are_given(self, calls):
        batch, edges = _flattened(tokens(1), [4, 2, 5])
        model, alone = build("llama", "tilewise"), build("llama", "eager")
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        got = compiled(**batch, use_cache=False).logits
        want = torch.cat([alone(batch["input_ids"][:, a:b]).logits for a, b in edges], 1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_a_step_of_a_static_cache(self):
        """As generate compiles it: the mask, of one length for all steps, is made outside."""
        ids, mask = tokens(), padding("left")
        outs = {}
        for attention in ("eager", "tilewise"):
            model = build("llama", attention, num_hidden_layers=1)
            cache = StaticCache(config=model.config, max_cache_len=16)
            step = model.forward
            kept = with_cache(step, cache)
            model(ids[:, :8], attention_mask=mask[:, :8], **kept)
            if attention == "tilewise":
                torch._dynamo.reset()
                step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
            outs[attention] = []
            for i in range(8, LENGTH):
                made = masking_utils.create_causal_mask(
                    config=model.config,
                    inputs_embeds=torch.empty(3, 1, 32),
                    attention_mask=mask[:, : i + 1],
                    **with_cache(masking_utils.create_causal_mask, cache),
                )
                out = step(ids[:, i : i + 1], attention_mask=made, **kept)
                outs[attention].append(out.logits)
        torch.testing.assert_close(outs["tilewise"], outs["eager"], rtol=1e-4, atol=1e-4)


class TestRegister:
    def test_under_a_name_with_a_backend(self):
        register("tilewise_reference", backend="reference")
        want = build("llama", "tilewise")(tokens()).logits
        got = build("llama", "tilewise_reference")(tokens()).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        register("tilewise_nowhere", backend="nowhere")
        with pytest.raises(ValueError, match="backend must be"):
            build("llama", "tilewise_nowhere")(tokens())

    def test_arguments_may_be_declared_harmless(self):
        model = build("llama", "tilewise")
        with pytest.raises(UnsupportedError, match="flavour must be None, got str"):
            model(tokens(), flavour="plain")
        register("tilewise_flavoured", ignored=("flavour",))
        model.set_attn_implementation("tilewise_flavoured")
        assert model(tokens(), flavour="plain").logits.shape == (3, LENGTH, VOCAB)

    def test_without_transformers_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"pip install 'tilewise\[transformers\]'"):
            register()

    def test_models_that_attend_by_themselves_are_refused(self):
        config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
        config._attn_implementation = "tilewise"
        with pytest.raises(UnsupportedError, match="AttentionInterface, got tilewise's for Bloom"):
            BloomModel(config)(tokens())


Q, K = torch.zeros(2, 4, 6, 16), torch.zeros(2, 2, 9, 16)
CU = torch.tensor([0, 6, 12])
PACKING = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 6, "max_length_k": 6}
REFUSALS = {
    "unknown": (
        (Q, K, None),
        {"indices": CU},
        UnsupportedError,
        "indices must be None, got Tensor",
    ),
    "probabilities": (
        (Q, K, None),
        {"output_attentions": True},
        UnsupportedError,
        "output_attentions must be False, got True",
    ),
    "no_mask_for_a_cache": (
        (Q, K, None),
        {"is_causal": True},
        ValueError,
        "attention_mask must say which of 9 keys the first of 6 causal queries sees",
    ),
    "no_mask_for_a_window": (
        (Q, K, None),
        {"sliding_window": 3},
        ValueError,
        "attention_mask must say what sliding_window=3 hides",
    ),
    "two_dims": (
        (Q, K, torch.ones(2, 9)),
        {},
        ValueError,
        r"attention_mask must have 4 dims, got shape \(2, 9\)",
    ),
    "integers": (
        (Q, K, torch.ones(2, 1, 6, 9, dtype=torch.int64)),
        {},
        TypeError,
        "attention_mask must be bool or float, got torch.int64",
    ),
    "too_few_keys": ((Q, K, torch.ones(2, 1, 6, 8) > 0), {}, ValueError, "bias must broadcast to"),
    "packing_in_part": (
        (Q, Q, None),
        {"cu_seq_lens_q": CU},
        ValueError,
        "max_length_k must be given together, got some of them",
    ),
    "packing_and_a_mask": (
        (Q, Q, torch.ones(2, 1, 6, 6) > 0),
        PACKING,
        ValueError,
        "attention_mask and position_bias must be None with cu_seq_lens_q",
    ),
    "packing_and_a_bias": (
        (Q, Q, None),
        {**PACKING, "position_bias": torch.zeros(1, 4, 6, 6)},
        ValueError,
        "attention_mask and position_bias must be None with cu_seq_lens_q",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    (query, key, mask), options, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        attend(nn.Module(), query, key, key, mask, **options)


def test_a_causal_window_needs_no_mask_of_its_own():
    q, k, v = (torch.randn(1, h, 9, 16) for h in (4, 2, 2))
    module = SimpleNamespace(is_causal=True, training=False)
    got, _ = attend(module, q, k, v, None, sliding_window=3)
    want = ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), window=3)
    assert torch.equal(got, want)
    one, _ = attend(module, q[:, :, -1:], k, v, None)  # a query of its own is the last one
    want = ops.attention(q[:, :, -1:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    assert torch.equal(one, want)
