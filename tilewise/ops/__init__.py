"""The functional API: what each operation means, its checks, its gradient, its backend."""

from tilewise.ops.attention import attention, attention_varlen
from tilewise.ops.dropout import dropout_keep_mask
from tilewise.ops.explain import Explanation, explain
from tilewise.ops.merge import merge_states
from tilewise.ops.paged import copy_blocks, paged_attention, write_kv_cache
from tilewise.ops.precompile import Precompiled, precompile
from tilewise.ops.rope import apply_rope

__all__ = [
    "Explanation",
    "Precompiled",
    "apply_rope",
    "attention",
    "attention_varlen",
    "copy_blocks",
    "dropout_keep_mask",
    "explain",
    "merge_states",
    "paged_attention",
    "precompile",
    "write_kv_cache",
]
