"""Modules: parameters and wiring around the ops."""

from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.convert import to_gqa
from tilewise.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from tilewise.nn.kimi_delta import KimiDeltaAttention, KimiDeltaConfig
from tilewise.nn.layers import MLP, GatedMLP, RMSNorm
from tilewise.nn.mamba2 import Mamba2, Mamba2Config
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.rope import RopeConfig, RotaryEmbedding
from tilewise.nn.short_conv import ShortConv, ShortConvConfig
from tilewise.nn.states import LayerStates, StateLayer

__all__ = [
    "MLP",
    "Attention",
    "AttentionContext",
    "GatedDeltaConfig",
    "GatedDeltaNet",
    "GatedMLP",
    "KimiDeltaAttention",
    "KimiDeltaConfig",
    "LayerStates",
    "Mamba2",
    "Mamba2Config",
    "MultiheadLatentAttention",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "ShortConv",
    "ShortConvConfig",
    "StateLayer",
    "to_gqa",
]
