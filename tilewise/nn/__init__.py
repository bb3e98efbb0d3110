"""Modules: parameters and wiring around the ops."""

from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.convert import to_gqa
from tilewise.nn.layers import MLP, GatedMLP, RMSNorm
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.rope import RopeConfig, RotaryEmbedding

__all__ = [
    "MLP",
    "Attention",
    "AttentionContext",
    "GatedMLP",
    "MultiheadLatentAttention",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "to_gqa",
]
