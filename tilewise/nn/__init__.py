"""Modules: parameters and wiring around the ops."""

from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import MLP, GatedMLP, RMSNorm
from tilewise.nn.rope import RopeConfig, RotaryEmbedding

__all__ = [
    "MLP",
    "Attention",
    "AttentionContext",
    "GatedMLP",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
]
