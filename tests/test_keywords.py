"""Functions that hand keywords on show them, and take no others."""

import inspect

import pytest
import torch

import tilewise
from tilewise import keywords, plan_paged_attention
from tilewise.distributed import (
    context_parallel_attention,
    gather_attention,
    ring_attention,
    ulysses_attention,
)
from tilewise.keywords import keywords_of
from tilewise.reference import fp8, standard

SHARED = "group causal window softmax_scale cu_seqlens layout deterministic check backend"
LOGITS = "causal window softmax_scale softcap bias alibi_slopes sinks mask seqlens_k keep_mask"
SHOWN = {
    ring_attention: f"q k v return_lse {SHARED}",
    gather_attention: f"q k v return_lse {SHARED}",
    ulysses_attention: f"q k v return_lse {SHARED}",
    context_parallel_attention: (
        "q k v group method causal window cu_seqlens layout rates return_lse softmax_scale "
        "deterministic check backend"
    ),
    plan_paged_attention: (
        "q k_cache v_cache return_lse block_table seqlens_k cu_seqlens_q max_seqlen_q "
        "softmax_scale window softcap alibi_slopes sinks k_scale v_scale tree_mask shared "
        "batch_invariant backend"
    ),
    standard.attention: f"q k v return_lse return_max {LOGITS} dropout_p",
    standard.attention_backward: f"do q k v dlse {LOGITS} dropout_p",
    standard.attention_varlen: (
        f"q k v cu_seqlens_q cu_seqlens_k return_lse return_max {LOGITS} dropout_p"
    ),
    fp8.attention: f"q k v q_scale k_scale v_scale {LOGITS} dropout_p",
}


@pytest.mark.parametrize("function", SHOWN, ids=lambda function: function.__qualname__)
def test_a_signature_shows_every_keyword_with_its_default(function):
    parameters = inspect.signature(function).parameters
    assert list(parameters) == SHOWN[function].split()
    wanted = {"causal": False, "window": None, "softcap": 0.0, "layout": "zigzag", "check": True}
    for name in wanted.keys() & parameters.keys():
        assert parameters[name].default == wanted[name]
        assert parameters[name].annotation is not inspect.Parameter.empty


@pytest.mark.parametrize(
    "function",
    [
        function for function in SHOWN if function is not context_parallel_attention
    ],  # asks ranks first
    ids=lambda function: function.__qualname__,
)
def test_a_keyword_that_is_not_shown_is_refused(function):
    kinds = inspect.signature(function).parameters.values()
    given = [torch.ones(1, 1, 1, 1) for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]
    cu = torch.tensor([0, 1])
    needed = {p.name: cu for p in kinds if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    with pytest.raises(TypeError, match="unexpected keyword argument 'soft_cap'"):
        function(*given, **needed, soft_cap=1.0)


def test_keywords_that_nothing_takes_cannot_be_shown():
    def few(q, *, causal=False): ...

    with pytest.raises(ValueError, match=r"must take \*\*options, got \(q, \*, causal=False\)"):
        keywords_of(few)(few)


OPS = [
    function
    for function in (getattr(tilewise, name) for name in tilewise.__all__)
    if inspect.isfunction(function) and function.__name__ not in ("explain", "mla_attention")
]


def _given(function):
    """Return what a call needs to reach its body: nothing of it is looked at there."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    by_name = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
    return [None for p in needed if p.name not in by_name], by_name


@pytest.mark.parametrize("function", OPS, ids=lambda function: function.__name__)
def test_every_op_refuses_what_it_does_not_know_by_its_own_name(function):
    parameters = inspect.signature(function).parameters
    assert "unknown" not in parameters
    positional, by_name = _given(function)
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .* 'zzz'$"):
        function(*positional, **by_name, zzz=1)
    last = list(parameters)[-1]
    with pytest.raises(TypeError, match=rf"^{name}\(\) got .*; did you mean '{last}'\?$"):
        function(*positional, **by_name, **{f"{last}_": 1})


@pytest.mark.parametrize(
    ("function", "theirs", "ours"),
    [
        (tilewise.attention, "is_causal", "it is called causal here"),
        (tilewise.attention, "scale", "it is called softmax_scale here"),
        (tilewise.attention, "attn_mask", "it is called bias here .*BlockMask"),
        (tilewise.attention_fp8, "attn_mask", "it is called mask here"),
        (tilewise.attention, "attention_mask", "it is called seqlens_k here"),
        (tilewise.attention, "window_size", r"it is called window here \(\(left, right\)"),
        (tilewise.attention, "sliding_window", "it is called window here"),
        (tilewise.attention, "dropout", "it is called dropout_p here"),
        (tilewise.attention, "enable_gqa", "there is nothing to say here: heads are grouped"),
        (tilewise.attention, "return_attn_probs", "it is called return_lse here"),
        (tilewise.attention_varlen, "logits_soft_cap", "it is called softcap here"),
        (tilewise.attention_varlen, "s_aux", "it is called sinks here"),
        (tilewise.paged_attention, "sm_scale", "it is called softmax_scale here"),
        (tilewise.paged_attention, "block_tables", "it is called block_table here"),
        (tilewise.plan_paged_attention, "cache_seqlens", "it is called seqlens_k here"),
        (tilewise.mla_decode, "page_table", "it is called block_table here"),
        (tilewise.write_kv_cache, "key_cache", "it is called k_cache here"),
        (tilewise.apply_rope, "is_neox", r"it is called interleaved here \(the opposite\)"),
        (tilewise.rms_norm, "epsilon", "it is called eps here"),
        (tilewise.sample_tokens, "temperatures", "it is called temperature here"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value[:18],
)
def test_the_word_of_another_library_is_told_with_ours(function, theirs, ours):
    positional, by_name = _given(function)
    with pytest.raises(
        TypeError, match=rf"{function.__name__}\(\) has no argument '{theirs}': {ours}"
    ):
        function(*positional, **by_name, **{theirs: 1})


def test_only_words_that_an_op_has_are_offered():
    ours = {name for function in OPS for name in inspect.signature(function).parameters}
    for theirs, called in keywords._CALLED.items():
        assert theirs not in ours or theirs in NOT_EVERYWHERE
        for word in called:
            own = word.partition(": ")[0]
            assert own in ours or own.startswith("nothing")


# Arguments of quantize_heads, and of recurrent layers.
NOT_EVERYWHERE = {"cu_seqlens", "seqlens", "max_seqlen", "slots"}
