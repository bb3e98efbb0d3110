"""Functions that hand keywords on show them, and take no others."""

import inspect

import pytest
import torch

from tilewise import plan_paged_attention
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
