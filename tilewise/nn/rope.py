"""Rotary position embedding: frequencies of each scaling rule, and tables of cos and sin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["ROPE_TYPES", "RopeConfig", "RotaryEmbedding", "inverse_frequencies", "temperature"]

_FIRST_TABLE_ROWS = 2048  # doubled as positions grow; 1 MiB of float32 for 128 rotary channels


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of a rotary position embedding: which channels rotate, and by what angle per
    position.

    Attributes:
        rotary_dim: R, the channels that rotate (even, at most the head dim); the rest are
            unchanged.
        theta: the base of the geometric series of wavelengths.
        rope_type: the rule of the frequencies, a key of ROPE_TYPES; fields below name the rules
            that read them.
        max_positions: the longest sequence the model was made for, in tokens.
        original_max_positions: the longest sequence before the context was extended (llama3, yarn,
            longrope); None is max_positions.
        factor: the ratio by which the context was extended (linear, llama3, yarn, longrope,
            proportional).
        low_freq_factor, high_freq_factor: llama3; original_max_positions over these are the
            wavelengths beyond which a channel is scaled fully, and below which it is not scaled.
        beta_fast, beta_slow: yarn; rotations over the original context above which a channel is not
            scaled, and below which it is scaled fully.
        attention_factor: yarn and longrope; the factor of cos and sin. None is the paper's: 0.1
            ln(factor) + 1 for yarn, sqrt(1 + ln(factor) / ln(original_max_positions)) for longrope.
        mscale, mscale_all_dim: yarn; two numbers that replace its default attention_factor by a
            ratio, see `temperature`, when both are non-zero.
        truncate: yarn; True to round the bounds between scaled and unscaled to whole channels.
        interleaved: True to rotate channels in pairs (2i, 2i + 1), False for (i, i + R / 2).
        num_turning: proportional; the channel pairs that rotate, the first ones of all.
        short_factor: longrope; the divisor of each pair's frequency within the original context.
    """

    rotary_dim: int
    theta: float = 10_000.0
    rope_type: str = "default"
    max_positions: int = 2048
    original_max_positions: int | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    interleaved: bool = False
    num_turning: int = 0
    short_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ValueError(f"rope_type must be one of {known}, got {self.rope_type!r}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and at least 2, got {self.rotary_dim}")
        for name in (
            "theta",
            "factor",
            "max_positions",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor {self.low_freq_factor:g}, "
                f"got {self.high_freq_factor:g}"
            )
        if self.rope_type == "longrope" and len(self.short_factor) != self.rotary_dim // 2:
            raise ValueError(
                f"short_factor must have {self.rotary_dim // 2} numbers, "
                f"got {len(self.short_factor)}"
            )
        if self.rope_type == "yarn" and self.theta <= 1:
            raise ValueError(f"theta must be above 1 with rope_type 'yarn', got {self.theta:g}")


def _wavelength_series(config: RopeConfig) -> Tensor:
    """Return theta ** (2i / R) for i in 0 ... R/2 - 1, float32."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu")
    series: Tensor = config.theta ** (exponents / config.rotary_dim)
    return series


def _default(config: RopeConfig) -> tuple[Tensor, float]:
    return 1.0 / _wavelength_series(config), 1.0


def _linear(config: RopeConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies and 1.0 by position interpolation (Chen et al., 2023).

    Every angle is divided by the factor. The result is that of `inverse_frequencies`.
    """
    return 1.0 / _wavelength_series(config) / config.factor, 1.0


def _llama3(config: RopeConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies and 1.0 by Llama 3.1's rule.

    Frequencies of long wavelengths are divided by the factor, those of short ones are kept, and
    those in between are a linear blend of both.
    """
    inv_freq = 1.0 / _wavelength_series(config)
    original = config.original_max_positions or config.max_positions
    turns = original * inv_freq / (2 * math.pi)  # rotations over the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / config.factor + blend * inv_freq, 1.0


def _yarn(config: RopeConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies and the factor of cos and sin by YaRN (Peng et al., 2023, 3.2 and
    3.4).

    Over the channel pairs a linear ramp leads from unscaled frequencies to those divided by the
    factor.
    """
    series, dim = _wavelength_series(config), config.rotary_dim
    original = config.original_max_positions or config.max_positions

    def channel_of(turns: float) -> float:
        """Return the fractional index of the channel pair that rotates `turns` times over the
        original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = channel_of(config.beta_fast), channel_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high  # the width of HF's ramp when it has none
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    stretched = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    inv_freq = stretched / (config.factor * series) + (1.0 - stretched) / series
    return inv_freq, _yarn_attention_factor(config)


def _longrope(config: RopeConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies and the factor of cos and sin by LongRoPE (Ding et al., 2024).

    Each channel pair has its own divisor, `short_factor`. Texts beyond the original context would
    need other divisors for all tokens, and keys in a cache would be wrong; so `max_positions` must
    be the original context.
    """
    inv_freq = 1.0 / _wavelength_series(config)
    divisors = torch.tensor(config.short_factor, dtype=torch.float32, device="cpu")
    scale = config.attention_factor
    if scale is None:
        original = config.original_max_positions or config.max_positions
        grown = math.log(config.factor) / math.log(original) if config.factor > 1 else 0.0
        scale = math.sqrt(1 + grown)
    return inv_freq / divisors, scale


def _proportional(config: RopeConfig) -> tuple[Tensor, float]:
    """Return inverse frequencies and 1.0 by Gemma 4's rule.

    The first `num_turning` channel pairs rotate as with "linear"; the inverse frequencies of the
    others are 0.
    """
    inv_freq = 1.0 / _wavelength_series(config) / config.factor
    inv_freq[config.num_turning :] = 0.0
    return inv_freq, 1.0


def temperature(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's 0.1 mscale ln(factor) + 1, or 1 if the context is not extended."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return temperature(config.factor, config.mscale) / temperature(
            config.factor, config.mscale_all_dim
        )
    return temperature(config.factor)


ROPE_TYPES: dict[str, Callable[[RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    # Dynamic scaling changes the angles of texts beyond `max_positions` alone.
    "dynamic": _default,
    "longrope": _longrope,
    "proportional": _proportional,
}


def inverse_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Return the angle per position of each channel pair, and the factor of cos and sin.

    Returns:
        (R/2,) float32 on the CPU, in radians per token; a factor for cos and sin.

    Source: Su et al., 2021 (RoFormer); the scalings name their own in this file.
    """
    return ROPE_TYPES[config.rope_type](config)


class RotaryEmbedding(nn.Module):
    """Look up cos and sin of positions: angle = position * inverse frequency, all float32.

    Checkpoints are trained with float32 angles, whatever the dtype of the model, so the tables are
    no buffers: `module.to(dtype)` must not round them. They are computed once per device and grow
    when a CPU caller asks for a position beyond them. On a GPU and in compiled code, where no
    position can be read on the host, they cover `config.max_positions`, and positions must lie
    below it.
    """

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None
        # cos and sin in one tensor, for devices on which each look-up is a launch
        self._both: Tensor | None = None

    def reserve(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make the tables cover positions 0 ... num_positions - 1 on `device`; return cos and sin.

        Each is (rows, R/2) float32; rows is a power of two, at least 2048, and may exceed
        num_positions. Tables of another device are replaced.
        """
        cos, sin = self._cos, self._sin
        if cos is None or sin is None or cos.device != device or cos.shape[0] < num_positions:
            rows = max(num_positions, _FIRST_TABLE_ROWS)
            # An inference-mode tensor could not be saved for a later backward pass.
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = self._compute(1 << (rows - 1).bit_length(), device)
            self._cos, self._sin, self._both = cos, sin, None
        return cos, sin

    def prefix(self, seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions 0 ... seqlen - 1, each (seqlen, R/2) float32."""
        cos, sin = self.reserve(seqlen, device)
        return cos[:seqlen], sin[:seqlen]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (*positions.shape, R/2) float32, of int64 positions >= 0.

        On a CPU, outside of compiled code, the tables grow if needed; elsewhere positions must be
        below config.max_positions.
        """
        needed = self.config.max_positions
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            needed = int(positions.max()) + 1 if positions.numel() else 0
        if not positions.is_cuda or torch.compiler.is_compiling():
            cos, sin = self.reserve(needed, positions.device)
            return cos[positions], sin[positions]
        return self.halves(self.table(positions.device)[positions])

    def table(self, device: torch.device) -> Tensor:
        """Return cos and sin of all positions side by side, (rows, R) float32, on `device`.

        There are at least config.max_positions rows; the tensor is kept.
        """
        cos, sin = self.reserve(self.config.max_positions, device)
        if self._both is None:
            with torch.inference_mode(False):
                self._both = torch.cat((cos, sin), dim=1)
        return self._both

    @staticmethod
    def halves(found: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows (..., R) of `table` into cos and sin, each (..., R/2)."""
        half = found.shape[-1] // 2
        return found[..., :half], found[..., half:]

    def _compute(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        inv_freq, scale = inverse_frequencies(self.config)
        positions = torch.arange(rows, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq.to(device)
        return angles.cos() * scale, angles.sin() * scale
