"""Efficient attention, from the kernel to the server.

Every public name is here; each is imported when it is first used, so that `import tilewise` costs
nothing and a program that only parses arguments never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewise.errors import (
    CacheFullError,
    CheckpointError,
    DeviceLostError,
    EngineClosedError,
    RequestError,
    TilewiseError,
    UnsupportedError,
)
from tilewise.version import __version__ as __version__

if TYPE_CHECKING:
    from tilewise.engine.async_llm import AsyncLLM
    from tilewise.engine.config import DraftModel, OwnHead, PromptLookup
    from tilewise.engine.llm import LLM
    from tilewise.engine.outputs import RequestOutput
    from tilewise.engine.request import SamplingParams
    from tilewise.engine.sampling_options import StructuredOutputs
    from tilewise.engine.scheduling.beams import BeamSearchParams
    from tilewise.masks import BlockMask
    from tilewise.ops.activation import silu_mul
    from tilewise.ops.adjust_logits import adjust_logits
    from tilewise.ops.attention.api import attention, attention_varlen
    from tilewise.ops.attention.dropout import dropout_keep_mask
    from tilewise.ops.attention.fp8 import attention_fp8, quantize_heads, quantize_tokens
    from tilewise.ops.explain import Explanation, explain
    from tilewise.ops.latent.api import mla_decode, write_latent_cache
    from tilewise.ops.latent.expanded import mla_attention, mla_prefill
    from tilewise.ops.merge import merge_states
    from tilewise.ops.norm import add_rms_norm, rms_norm
    from tilewise.ops.paged.api import paged_attention, plan_paged_attention
    from tilewise.ops.paged.cache import copy_blocks, rope_write_kv_cache, write_kv_cache
    from tilewise.ops.paged.plan import PagedPlan
    from tilewise.ops.paged.shared_prefixes import SharedPrefixes, shared_prefixes
    from tilewise.ops.paged.swap import BlockTransfer, swap_blocks
    from tilewise.ops.paged.tree import tree_mask_from_parents
    from tilewise.ops.precompile import Precompiled, precompile
    from tilewise.ops.recurrent.arguments import recurrent_states
    from tilewise.ops.recurrent.causal_conv1d import causal_conv1d, causal_conv1d_step
    from tilewise.ops.recurrent.gated_delta import gated_delta, gated_delta_step
    from tilewise.ops.recurrent.ssd import ssd, ssd_step
    from tilewise.ops.rope import apply_rope
    from tilewise.ops.sampling import sample_tokens, token_logprobs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "BlockMask",
    "BlockTransfer",
    "CacheFullError",
    "CheckpointError",
    "DeviceLostError",
    "DraftModel",
    "EngineClosedError",
    "Explanation",
    "OwnHead",
    "PagedPlan",
    "Precompiled",
    "PromptLookup",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SharedPrefixes",
    "StructuredOutputs",
    "TilewiseError",
    "UnsupportedError",
    "add_rms_norm",
    "adjust_logits",
    "apply_rope",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "causal_conv1d",
    "causal_conv1d_step",
    "copy_blocks",
    "dropout_keep_mask",
    "explain",
    "gated_delta",
    "gated_delta_step",
    "merge_states",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "paged_attention",
    "plan_paged_attention",
    "precompile",
    "quantize_heads",
    "quantize_tokens",
    "recurrent_states",
    "rms_norm",
    "rope_write_kv_cache",
    "sample_tokens",
    "shared_prefixes",
    "silu_mul",
    "ssd",
    "ssd_step",
    "swap_blocks",
    "token_logprobs",
    "tree_mask_from_parents",
    "write_kv_cache",
    "write_latent_cache",
]

# name -> the module that defines it (PEP 562)
_LAZY = {
    "LLM": "tilewise.engine.llm",
    "AsyncLLM": "tilewise.engine.async_llm",
    "BeamSearchParams": "tilewise.engine.scheduling.beams",
    "BlockMask": "tilewise.masks",
    "BlockTransfer": "tilewise.ops",
    "DraftModel": "tilewise.engine.config",
    "OwnHead": "tilewise.engine.config",
    "Explanation": "tilewise.ops",
    "PagedPlan": "tilewise.ops",
    "Precompiled": "tilewise.ops",
    "PromptLookup": "tilewise.engine.config",
    "RequestOutput": "tilewise.engine.outputs",
    "SamplingParams": "tilewise.engine.request",
    "SharedPrefixes": "tilewise.ops",
    "StructuredOutputs": "tilewise.engine.sampling_options",
    "add_rms_norm": "tilewise.ops",
    "adjust_logits": "tilewise.ops",
    "apply_rope": "tilewise.ops",
    "attention": "tilewise.ops",
    "attention_fp8": "tilewise.ops",
    "attention_varlen": "tilewise.ops",
    "causal_conv1d": "tilewise.ops",
    "causal_conv1d_step": "tilewise.ops",
    "copy_blocks": "tilewise.ops",
    "dropout_keep_mask": "tilewise.ops",
    "explain": "tilewise.ops",
    "gated_delta": "tilewise.ops",
    "gated_delta_step": "tilewise.ops",
    "merge_states": "tilewise.ops",
    "mla_attention": "tilewise.ops",
    "mla_decode": "tilewise.ops",
    "mla_prefill": "tilewise.ops",
    "paged_attention": "tilewise.ops",
    "plan_paged_attention": "tilewise.ops",
    "precompile": "tilewise.ops",
    "quantize_heads": "tilewise.ops",
    "quantize_tokens": "tilewise.ops",
    "recurrent_states": "tilewise.ops",
    "rms_norm": "tilewise.ops",
    "rope_write_kv_cache": "tilewise.ops",
    "sample_tokens": "tilewise.ops",
    "shared_prefixes": "tilewise.ops",
    "silu_mul": "tilewise.ops",
    "ssd": "tilewise.ops",
    "ssd_step": "tilewise.ops",
    "swap_blocks": "tilewise.ops",
    "token_logprobs": "tilewise.ops",
    "tree_mask_from_parents": "tilewise.ops",
    "write_kv_cache": "tilewise.ops",
    "write_latent_cache": "tilewise.ops",
}


# Packages and modules of the library; the same after `import tilewise` alone.
_MODULES = frozenset(
    [
        "bench",
        "cache",
        "children",
        "cli",
        "cluster",
        "cost",
        "distributed",
        "doctor",
        "engine",
        "errors",
        "flags",
        "huge_pages",
        "integrations",
        "kernels",
        "masks",
        "models",
        "nn",
        "ops",
        "progress",
        "reference",
        "server",
        "testing",
        "training",
        "version",
    ]
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tilewise.{name}")  # the import sets the attribute
    if name not in _LAZY:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
