"""The functional API: what each operation means, its checks, its gradient, its backend."""

from tilewise.kernels.low_rank import LowRank, RowTiles, most_tiles, tile_rows
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.spec import RecurrentStates
from tilewise.ops.activation import activate, gated_mul, silu_mul
from tilewise.ops.adjust_logits import adjust_logits
from tilewise.ops.attention.api import attention, attention_varlen
from tilewise.ops.attention.dropout import dropout_keep_mask
from tilewise.ops.attention.fp8 import attention_fp8, quantize_heads, quantize_tokens
from tilewise.ops.choose_experts import choose_experts
from tilewise.ops.delta_inputs import delta_inputs
from tilewise.ops.early import launching_early, settle
from tilewise.ops.expert_mlp import expert_mlp
from tilewise.ops.explain import Explanation, explain
from tilewise.ops.gated_norm import gated_rms_norm
from tilewise.ops.invariant_linear import invariant_linear, invariant_linear_leaves_parts
from tilewise.ops.key_bias_channels import key_bias_channels
from tilewise.ops.latent.api import mla_decode, write_latent_cache
from tilewise.ops.latent.expanded import mla_attention, mla_prefill
from tilewise.ops.linear import (
    MOST_LINEAR_ROWS,
    linear,
    linear_leaves_parts,
    linear_parts,
    linear_pays,
    most_linear_parts_rows,
)
from tilewise.ops.low_rank import add_low_rank
from tilewise.ops.merge import merge_states
from tilewise.ops.norm import (
    add_parts_rms_norm,
    add_parts_shifted_rms_norm,
    add_rms_norm,
    add_shifted_rms_norm,
    rms_norm,
    shifted_rms_norm,
)
from tilewise.ops.paged.api import paged_attention, plan_paged_attention
from tilewise.ops.paged.cache import copy_blocks, rope_write_kv_cache, write_kv_cache
from tilewise.ops.paged.plan import PagedPlan
from tilewise.ops.paged.shared_prefixes import SharedPrefixes, shared_prefixes
from tilewise.ops.paged.swap import BlockTransfer, swap_blocks
from tilewise.ops.paged.tree import tree_mask_from_parents
from tilewise.ops.precompile import Precompiled, precompile
from tilewise.ops.quantised_expert_mlp import placed_experts, quantised_expert_mlp
from tilewise.ops.quantised_linear import quantised_linear
from tilewise.ops.recurrent.arguments import recurrent_states
from tilewise.ops.recurrent.causal_conv1d import causal_conv1d, causal_conv1d_step
from tilewise.ops.recurrent.gated_delta import gated_delta, gated_delta_step
from tilewise.ops.recurrent.ssd import ssd, ssd_step
from tilewise.ops.rope import apply_rope
from tilewise.ops.row_linear import add_rms_norm_linear, row_linear_parts, row_linear_pays
from tilewise.ops.sampling import sample_tokens, token_logprobs

__all__ = [
    "E2M1",
    "MOST_LINEAR_ROWS",
    "BlockTransfer",
    "Explanation",
    "LowRank",
    "PagedPlan",
    "Precompiled",
    "QuantisedWeight",
    "RecurrentStates",
    "RowTiles",
    "SharedPrefixes",
    "activate",
    "add_low_rank",
    "add_parts_rms_norm",
    "add_parts_shifted_rms_norm",
    "add_rms_norm",
    "add_rms_norm_linear",
    "add_shifted_rms_norm",
    "adjust_logits",
    "apply_rope",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "causal_conv1d",
    "causal_conv1d_step",
    "choose_experts",
    "copy_blocks",
    "delta_inputs",
    "dropout_keep_mask",
    "expert_mlp",
    "explain",
    "gated_delta",
    "gated_delta_step",
    "gated_mul",
    "gated_rms_norm",
    "invariant_linear",
    "invariant_linear_leaves_parts",
    "key_bias_channels",
    "launching_early",
    "linear",
    "linear_leaves_parts",
    "linear_parts",
    "linear_pays",
    "merge_states",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "most_linear_parts_rows",
    "most_tiles",
    "paged_attention",
    "placed_experts",
    "plan_paged_attention",
    "precompile",
    "quantised_expert_mlp",
    "quantised_linear",
    "quantize_heads",
    "quantize_tokens",
    "recurrent_states",
    "rms_norm",
    "rope_write_kv_cache",
    "row_linear_parts",
    "row_linear_pays",
    "sample_tokens",
    "settle",
    "shared_prefixes",
    "shifted_rms_norm",
    "silu_mul",
    "ssd",
    "ssd_step",
    "swap_blocks",
    "tile_rows",
    "token_logprobs",
    "tree_mask_from_parents",
    "write_kv_cache",
    "write_latent_cache",
]
