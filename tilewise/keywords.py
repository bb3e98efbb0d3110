"""Signatures of functions that pass keywords on, and hints for other libraries' keyword names.

keywords_of() makes a function that takes `**options` show the keywords of the function to which it
passes them. names() lets a function that gets another library's keyword name the one to use here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_Config = TypeVar("_Config")
_Result = TypeVar("_Result")


def keywords_of(source: Callable[..., Any], *, but: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Return a decorator that adds the keywords of `source` to the signature of a function with
    `**options`.

    Names, types and defaults of the keywords are then declared by `source` alone, and
    `inspect.signature`, `help` and notebooks show them for every function that passes them on.
    Keywords that the function declares itself are kept. The function itself is returned, so a call
    costs nothing more.

    Args:
        source: a function with keyword-only parameters; the TypeError for an unknown keyword names
            this function.
        but: the keywords of `source` that the function does not offer.

    Raises:
        ValueError: the function takes no `**options`.

    Example:
        >>> @keywords_of(prepare)
        ... def ring(q, *, return_lse=False, **options): ...
        >>> inspect.signature(ring)
        (q, *, return_lse=False, causal=False, window=None)
    """
    shown = [
        parameter
        for parameter in inspect.signature(source).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in but
    ]

    def show(function: _F) -> _F:
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"function must take **options, got {own}")
        handed_on = [parameter for parameter in shown if parameter.name not in own.parameters]
        signature = own.replace(parameters=[*parameters[:-1], *handed_on])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return show


def taking_fields_of(
    config: Callable[_P, _Config],
) -> Callable[[Callable[[_Self, _Config], _Result]], Callable[Concatenate[_Self, _P], _Result]]:
    """Return a decorator for a method `method(self, config)`, which then takes the fields of the
    config instead.

    The call makes the config of its arguments. TypeError names an unknown keyword and suggests one.

    `inspect.signature`, help and type checkers see the fields.

    Args:
        config: the dataclass of the config.

    Example:
        >>> class LLM:
        ...     @taking_fields_of(EngineConfig)
        ...     def __init__(self, config): ...
        >>> LLM("story", block_size=32)
    """
    fields = inspect.signature(config)

    def take(
        method: Callable[[_Self, _Config], _Result],
    ) -> Callable[Concatenate[_Self, _P], _Result]:
        @functools.wraps(method)
        def with_fields(self: _Self, /, *args: _P.args, **options: _P.kwargs) -> _Result:
            unknown = options.keys() - fields.parameters.keys()
            if unknown:
                raise unknown_keyword(type(self), sorted(unknown))
            try:
                fields.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}(): {error}") from None
            return method(self, config(*args, **options))

        own = inspect.signature(method)
        [first, _] = own.parameters.values()
        shown = own.replace(parameters=[first, *fields.parameters.values()])
        with_fields.__signature__ = shown  # type: ignore[attr-defined]
        return with_fields

    return take


_MASKS = "added to the logits, or mask, a BlockMask: masks.dense of a bool tensor"
_GROUPED = "nothing to say here: heads are grouped by how many k and v have"
# Names of arguments in other libraries, and their names here: the first that the function has is
# suggested. Only whole words: names that merely look alike are found by their letters.
_CALLED: dict[str, tuple[str, ...]] = {
    "is_causal": ("causal",),
    "causal_mask": ("causal",),
    "attn_mask": (f"bias: {_MASKS}", "mask: a BlockMask"),
    "attention_mask": (f"seqlens_k: for padding; else bias, {_MASKS}",),
    "attn_bias": (f"bias: {_MASKS}", "mask: a BlockMask"),
    "position_bias": ("bias",),
    "custom_mask": ("mask: a BlockMask (masks.dense of a bool tensor)", "tree_mask"),
    "block_mask": ("mask: a BlockMask of tilewise.masks",),
    "score_mod": ("bias",),
    "key_padding_mask": ("seqlens_k: how many keys a sequence has",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "scaling": ("softmax_scale",),
    "qk_scale": ("softmax_scale",),
    "window_size": ("window: (left, right), or w, the last w keys with the query's own",),
    "sliding_window": ("window: w, the last w keys with the query's own",),
    "window_left": ("window: w = window_left + 1, the query's own key counts",),
    "local_window_size": ("window",),
    "logits_soft_cap": ("softcap",),
    "logit_softcapping": ("softcap",),
    "attn_logit_softcapping": ("softcap",),
    "dropout": ("dropout_p",),
    "dropout_rate": ("dropout_p",),
    "attention_dropout": ("dropout_p",),
    "p": ("dropout_p",),
    "alibi": ("alibi_slopes",),
    "slopes": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "sink": ("sinks",),
    "attn_sink": ("sinks",),
    "learnable_sink": ("sinks",),
    "philox_seed": ("seed",),
    "rng_state": ("seed",),
    "generator": ("seed", "seeds"),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "queries": ("q",),
    "keys": ("k",),
    "values": ("v",),
    "query_states": ("q",),
    "key_states": ("k",),
    "value_states": ("v",),
    "key_cache": ("k_cache",),
    "value_cache": ("v_cache",),
    "kv_cache": ("k_cache: and v_cache, two tensors", "latent_cache"),
    "paged_kv_cache": ("k_cache: and v_cache, two tensors", "latent_cache"),
    "block_tables": ("block_table",),
    "page_table": ("block_table",),
    "kv_indices": ("block_table",),
    "cache_seqlens": ("seqlens_k",),
    "context_lens": ("seqlens_k",),
    "seq_lens": ("seqlens_k",),
    "seqlens": ("seqlens_k",),
    "seqused_k": ("seqlens_k",),
    "kv_seq_lens": ("seqlens_k",),
    "kv_len": ("seqlens_k",),
    "cu_seqlens": ("cu_seqlens_q: and cu_seqlens_k", "cu_seqlens_q"),
    "cu_seq_lens_q": ("cu_seqlens_q",),
    "cu_seq_lens_k": ("cu_seqlens_k",),
    "cu_seqlens_kv": ("cu_seqlens_k",),
    "cum_seq_q": ("cu_seqlens_q",),
    "cum_seq_k": ("cu_seqlens_k",),
    "query_start_loc": ("cu_seqlens_q",),
    "qo_indptr": ("cu_seqlens_q",),
    "kv_indptr": ("cu_seqlens_k", "block_table: with seqlens_k"),
    "max_seqlen": ("max_seqlen_q: and max_seqlen_k", "max_seqlen_q"),
    "max_query_len": ("max_seqlen_q",),
    "max_q": ("max_seqlen_q",),
    "max_k": ("max_seqlen_k",),
    "max_length_q": ("max_seqlen_q",),
    "max_length_k": ("max_seqlen_k",),
    "max_seqlen_kv": ("max_seqlen_k",),
    "slots": ("slot_mapping",),
    "slot_mappings": ("slot_mapping",),
    "block_mapping": ("block_pairs",),
    "q_descale": ("q_scale",),
    "k_descale": ("k_scale",),
    "v_descale": ("v_scale",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse: the probabilities are never stored",),
    "return_aux": ("return_lse",),
    "output_attentions": ("return_lse: the probabilities are never stored",),
    "need_weights": ("return_lse: the probabilities are never stored",),
    "enable_gqa": (_GROUPED,),
    "num_splits": ("nothing to say here: kernels split keys as they see fit",),
    "qv": ("nothing like it here: latents are for mla_decode",),
    "implementation": ("backend",),
    "impl": ("backend",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "gamma": ("weight",),
    "rotary_cos": ("cos",),
    "rotary_sin": ("sin",),
    "rotary_interleaved": ("interleaved",),
    "is_neox": ("interleaved: the opposite",),
    "is_neox_style": ("interleaved: the opposite",),
    "v_a": ("o_a",),
    "s_a": ("lse_a",),
    "v_b": ("o_b",),
    "s_b": ("lse_b",),
    "topk": ("top_k", "count"),
    "topp": ("top_p",),
    "temperatures": ("temperature",),
    "probs": ("logits",),
    "num_logprobs": ("count",),
}


def names(function: _F) -> _F:
    """Hide the last parameter `**unknown` of a function from its signature, and return the
    function; a decorator.

    The function takes `**unknown` only to suggest the right keyword. Its body begins with `if
    unknown: raise unknown_keyword(function, unknown)`, so that no wrapper stands between a caller
    and an op.
    """
    signature = inspect.signature(function)
    *parameters, unknown = signature.parameters.values()
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD
    shown = signature.replace(parameters=parameters)
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function


def unknown_keyword(function: Callable[..., Any], unknown: Iterable[str]) -> TypeError:
    """Return a TypeError for the first of `unknown`, keywords that `function` does not have.

    The message gives the name that is used here for another library's keyword, or a similar
    keyword.
    """
    name, known = next(iter(unknown)), inspect.signature(function).parameters
    for called in _CALLED.get(name, ()):
        own, _, how = called.partition(": ")
        if own in known:
            said = f"it is called {own} here" + (f" ({how})" if how else "")
        elif own.startswith("nothing"):
            said = f"there is {called}"
        else:
            continue
        return TypeError(f"{function.__name__}() has no argument {name!r}: {said}")
    close = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{meant}")
