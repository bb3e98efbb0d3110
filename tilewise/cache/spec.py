"""How much memory a token's keys and values take, and in what shape. Nothing is allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["QUANTISED_DTYPES", "CacheSpec", "KVLayer", "KVSpec", "LatentLayer", "kv_layer"]

# Caches of these dtypes hold a float32 scale beside each token's channels of a head.
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)

# One layer's cache: k_cache, v_cache and, of an 8-bit one, k_scale and v_scale.
KVLayer = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
# One layer's latents: latent_cache and, of an 8-bit one, latent_scale.
LatentLayer = Tensor | tuple[Tensor, Tensor]


def kv_layer(tensors: Sequence[Tensor]) -> KVLayer:
    """Return two tensors or four as a KVLayer."""
    if len(tensors) == 2:
        return (tensors[0], tensors[1])
    k_cache, v_cache, k_scale, v_scale = tensors
    return (k_cache, v_cache, k_scale, v_scale)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values of one token in one layer.

    Attributes:
        num_kv_heads: key/value heads, Hk.
        head_dim: channels of a key, D.
        v_head_dim: channels of a value, Dv.
        dtype: a floating-point type of 16 bits or more, int8 or float8_e4m3fn.

    Raises:
        ValueError: a size is below 1.
        TypeError: dtype is another one.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _require_positive("num_kv_heads", self.num_kv_heads)
        _require_positive("head_dim", self.head_dim)
        _require_positive("v_head_dim", self.v_head_dim)
        is_float = self.dtype.is_floating_point and self.dtype.itemsize > 1
        if not (is_float or self.is_quantised):
            raise TypeError(
                "dtype must be a floating-point type of 16 bits or more, int8 or float8_e4m3fn, "
                f"got {self.dtype}"
            )

    @property
    def is_quantised(self) -> bool:
        """Whether rows have scales."""
        return self.dtype in QUANTISED_DTYPES

    @property
    def scale_bytes(self) -> int:
        """Bytes of the two scales of one head of one token: 8, or 0 without."""
        return 2 * torch.float32.itemsize if self.is_quantised else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer: Hk ((D + Dv) times the element size + the scales)."""
        channels = (self.head_dim + self.v_head_dim) * self.dtype.itemsize
        return self.num_kv_heads * (channels + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The paged cache of a whole model.

    Attributes:
        num_layers: layers that keep keys and values.
        block_size: tokens per cache block, P.
        kv: what one layer keeps of one token.

    Raises:
        ValueError: a size is below 1.
    """

    num_layers: int
    block_size: int
    kv: KVSpec

    def __post_init__(self) -> None:
        _require_positive("num_layers", self.num_layers)
        _require_positive("block_size", self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.kv.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.block_size * self.bytes_per_token

    def k_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's k_cache: (num_blocks, P, Hk, D)."""
        return (num_blocks, self.block_size, self.kv.num_kv_heads, self.kv.head_dim)

    def v_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's v_cache: (num_blocks, P, Hk, Dv)."""
        return (num_blocks, self.block_size, self.kv.num_kv_heads, self.kv.v_head_dim)

    def scale_shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Shape of one layer's k_scale and v_scale: (num_blocks, P, Hk)."""
        return (num_blocks, self.block_size, self.kv.num_kv_heads)
