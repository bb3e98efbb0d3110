"""A layer of each kind beside transformers' own, with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BambaConfig,
    FalconH1Config,
    KimiLinearConfig,
    Lfm2Config,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tilewise.nn import (
    GatedDeltaConfig,
    GatedDeltaNet,
    KimiDeltaAttention,
    KimiDeltaConfig,
    Mamba2,
    Mamba2Config,
    ShortConv,
    ShortConvConfig,
    StateLayer,
)

WIDTH = 48
Pair = tuple[Any, StateLayer, dict[str, Callable[[Any], Tensor]]]
"""transformers' layer, ours, and of each of our parameters what it is made of there."""

_DELTA = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "layer_types": ["linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_OURS_OF_DELTA = {
    "conv": lambda m: m.conv1d.weight[:, 0], "a_log": lambda m: m.A_log,
    "dt_bias": lambda m: m.dt_bias,
}  # fmt: skip


def _rows(*linears: nn.Linear) -> Tensor:
    return torch.cat([linear.weight for linear in linears])


def qwen3_5() -> Pair:
    theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**_DELTA), 0)
    return theirs, GatedDeltaNet(WIDTH, GatedDeltaConfig(2, 4, 16, 24)), _OURS_OF_DELTA | {
        "qkvz_proj.weight": lambda m: _rows(m.in_proj_qkv, m.in_proj_z),
        "ba_proj.weight": lambda m: _rows(m.in_proj_b, m.in_proj_a),
        "norm.weight": lambda m: m.norm.weight, "o_proj.weight": lambda m: m.out_proj.weight,
    }  # fmt: skip


def qwen3_next() -> Pair:
    """Its rows are by key head: q, k, and v and z of the two heads of values that read it."""
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**_DELTA), 0)

    def qkvz(m: Any) -> Tensor:
        parts = m.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([16, 16, 48, 48], 1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def ba(m: Any) -> Tensor:
        parts = m.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return theirs, GatedDeltaNet(WIDTH, GatedDeltaConfig(2, 4, 16, 24)), _OURS_OF_DELTA | {
        "qkvz_proj.weight": qkvz, "ba_proj.weight": ba,
        "norm.weight": lambda m: m.norm.weight, "o_proj.weight": lambda m: m.out_proj.weight,
    }  # fmt: skip


def olmo_hybrid() -> Pair:
    theirs = OlmoHybridGatedDeltaNet(
        OlmoHybridConfig(**_DELTA | {"linear_allow_neg_eigval": True, "layer_types":
                                     ["linear_attention", "full_attention"],
                                     "num_hidden_layers": 2}), 0
    )  # fmt: skip
    own = GatedDeltaConfig(2, 4, 16, 24, norm_eps=1e-5, beta_scale=2.0)
    return theirs, GatedDeltaNet(WIDTH, own), _OURS_OF_DELTA | {
        "qkvz_proj.weight": lambda m: _rows(m.q_proj, m.k_proj, m.v_proj, m.g_proj),
        "ba_proj.weight": lambda m: _rows(m.b_proj, m.a_proj),
        "norm.weight": lambda m: m.o_norm.weight, "o_proj.weight": lambda m: m.o_proj.weight,
    }  # fmt: skip


def kimi() -> Pair:
    config = KimiLinearConfig(
        hidden_size=WIDTH, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_heads=3, linear_head_dim=16,
    )  # fmt: skip
    return KimiLinearDeltaAttention(config, 0), KimiDeltaAttention(WIDTH, KimiDeltaConfig(3, 16)), {
        "qkv_proj.weight": lambda m: _rows(m.q_proj, m.k_proj, m.v_proj),
        "a_proj.weight": lambda m: _rows(m.b_proj, m.forget_gate.f_a_proj, m.g_a_proj),
        "f_proj.weight": lambda m: m.forget_gate.f_b_proj.weight,
        "z_proj.weight": lambda m: m.g_b_proj.weight, "conv": lambda m: m.conv1d.weight[:, 0],
        "a_log": lambda m: m.forget_gate.A_log.flatten(),
        "dt_bias": lambda m: m.forget_gate.dt_bias,
        "norm.weight": lambda m: m.o_norm.weight, "o_proj.weight": lambda m: m.o_proj.weight,
    }  # fmt: skip


_OURS_OF_MAMBA = {
    "in_proj.weight": lambda m: m.in_proj.weight, "conv": lambda m: m.conv1d.weight[:, 0],
    "conv_bias": lambda m: m.conv1d.bias, "a_log": lambda m: m.A_log, "d": lambda m: m.D,
    "dt_bias": lambda m: m.dt_bias, "norm.weight": lambda m: m.norm.weight,
    "o_proj.weight": lambda m: m.out_proj.weight,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
    "mamba_d_conv": 3,
}  # fmt: skip


def bamba() -> Pair:
    config = BambaConfig(
        hidden_size=WIDTH, num_hidden_layers=1, mamba_proj_bias=True, time_step_limit=(0.4, 1.5),
        **_MAMBA,
    )  # fmt: skip
    theirs = BambaMixer(config, 0)
    own = Mamba2Config(6, 16, 2, 24, 3, config.rms_norm_eps, has_in_bias=True, has_out_bias=True,
                       norm_groups=96 // getattr(theirs.norm, "group_size", 96),  # from 5.24 on
                       dt_limits=(0.4, 1.5))  # fmt: skip
    return theirs, Mamba2(WIDTH, own), _OURS_OF_MAMBA | {
        "in_proj.bias": lambda m: m.in_proj.bias, "o_proj.bias": lambda m: m.out_proj.bias,
    }  # fmt: skip


def nemotron_h() -> Pair:
    config = NemotronHConfig(
        hidden_size=WIDTH, layers_block_type=["linear_attention"], mamba_num_heads=6,
        mamba_head_dim=16, n_groups=2, ssm_state_size=24, time_step_min=0.3,
    )  # fmt: skip
    own = Mamba2Config(6, 16, 2, 24, norm_eps=config.layer_norm_epsilon, norm_groups=2,
                       dt_limits=(0.3, math.inf))  # fmt: skip
    return NemotronHMamba2Mixer(config, 0), Mamba2(WIDTH, own), _OURS_OF_MAMBA


def falcon_h1(has_norm: bool = False, norm_before_gate: bool = True) -> Pair:
    config = FalconH1Config(
        hidden_size=WIDTH, num_hidden_layers=1, mamba_d_ssm=96, projectors_bias=True,
        ssm_in_multiplier=0.7, ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.9],
        mamba_rms_norm=has_norm, mamba_norm_before_gate=norm_before_gate, **_MAMBA,
    )  # fmt: skip
    theirs = FalconH1Mixer(config, 0)
    theirs.register_buffer("mup_vector", compute_mup_vector(config))
    own = Mamba2Config(6, 16, 2, 24, 3, config.rms_norm_eps, norm_groups=2 * has_norm,
                       gate_first=not norm_before_gate, rounds_first=False, has_out_bias=True,
                       input_scale=0.7, part_scales=(0.5, 1.5, 0.8, 1.2, 0.9))  # fmt: skip
    names = _OURS_OF_MAMBA | {"o_proj.bias": lambda m: m.out_proj.bias}
    if not has_norm:
        del names["norm.weight"]
    return theirs, Mamba2(WIDTH, own), names


def lfm2() -> Pair:
    config = Lfm2Config(hidden_size=WIDTH, conv_dim=WIDTH, conv_bias=True, conv_L_cache=3)
    return Lfm2ShortConv(config, 0), ShortConv(WIDTH, ShortConvConfig(WIDTH, 3, True)), {
        "in_proj.weight": lambda m: m.in_proj.weight, "in_proj.bias": lambda m: m.in_proj.bias,
        "conv": lambda m: m.conv.weight[:, 0], "conv_bias": lambda m: m.conv.bias,
        "o_proj.weight": lambda m: m.out_proj.weight, "o_proj.bias": lambda m: m.out_proj.bias,
    }  # fmt: skip


MAKERS: dict[str, Callable[[], Pair]] = {
    "qwen3_5": qwen3_5, "qwen3_next": qwen3_next, "olmo_hybrid": olmo_hybrid, "kimi": kimi,
    "bamba": bamba, "nemotron_h": nemotron_h, "falcon_h1": falcon_h1,
    "falcon_h1_norm": lambda: falcon_h1(True),
    "falcon_h1_gate_first": lambda: falcon_h1(True, False), "lfm2": lfm2,
}  # fmt: skip


def make(case: str, seed: int = 3) -> Pair:
    """Return both layers with random weights, the same ones."""
    theirs, ours, sources = MAKERS[case]()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() >= 2 and not name.endswith("A_log"):
                parameter.copy_(noise / math.prod(parameter.shape[1:]) ** 0.5)
            else:
                parameter.copy_(0.3 * noise + (0.5 if "bias" not in name else 0.0))
        assert sources.keys() == dict(ours.named_parameters()).keys()
        for name, parameter in ours.named_parameters():
            parameter.copy_(sources[name](theirs))
    return theirs.eval(), ours, sources
