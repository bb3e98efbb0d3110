"""The memory and tensor shapes of a token's keys and values, and of states. Nothing is allocated
here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "QUANTISED_DTYPES",
    "STATE_CHUNK",
    "CacheLayer",
    "CacheSpec",
    "KVLayer",
    "KVSpec",
    "LatentLayer",
    "LatentSpec",
    "LayerGroup",
    "StateSlots",
    "StateSpec",
    "StateTensor",
    "kv_layer",
]

# Caches of these dtypes have a float32 scale for each token's channels of a head.
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
FOUR_BITS = torch.uint8  # and so have those of this one, two channels a byte; keys and values alone

# One layer's cache: k_cache, v_cache and, of 8 and 4 bits, k_scale and v_scale.
KVLayer = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
# One layer's latents: latent_cache and, of an 8-bit one, latent_scale.
LatentLayer = Tensor | tuple[Tensor, Tensor]
CacheLayer = KVLayer | LatentLayer

STATE_CHUNK = 64  # tokens of a chunk of a recurrence, see kernels.spec
# Sizes of a slot's part of a tensor, and its dtype.
StateTensor = tuple[tuple[int, ...], torch.dtype]


def kv_layer(tensors: Sequence[Tensor]) -> KVLayer:
    """Return the tuple (k_cache, v_cache), or with scales (k_cache, v_cache, k_scale, v_scale), of
    two or four tensors in this order."""
    if len(tensors) == 2:
        return (tensors[0], tensors[1])
    k_cache, v_cache, k_scale, v_scale = tensors
    return (k_cache, v_cache, k_scale, v_scale)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_dtype(dtype: torch.dtype) -> None:
    is_float = dtype.is_floating_point and dtype.itemsize > 1
    if not (is_float or dtype in QUANTISED_DTYPES):
        raise TypeError(
            "dtype must be a floating-point type of 16 bits or more, int8 or float8_e4m3fn, "
            f"got {dtype}"
        )


class _Row:
    """The base of `KVSpec` and `LatentSpec`: what one token stores in one layer."""

    __slots__ = ()
    dtype: torch.dtype

    @property
    def is_quantised(self) -> bool:
        """Whether a cache of this dtype has float32 scales: with int8, float8_e4m3fn or 4 bits."""
        return self.dtype in (*QUANTISED_DTYPES, FOUR_BITS)

    @property
    def scale_bytes(self) -> int:
        """The bytes of a token's two scales, for the key and value of one head or for a latent and
        its rotated key; 0 without scales."""
        return 2 * torch.float32.itemsize if self.is_quantised else 0


@dataclass(frozen=True, slots=True)
class KVSpec(_Row):
    """The keys and values of one token in one layer.

    Attributes:
        num_kv_heads: Hk, the number of key/value heads.
        head_dim: D, the channels of a key.
        v_head_dim: Dv, the channels of a value.
        dtype: a floating-point type of 16 bits or more, int8 or float8_e4m3fn; uint8 for 4 bits.

    Raises:
        ValueError: a size is below 1, or a head dim is odd in 4 bits.
        TypeError: dtype is none of these.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _require_positive("num_kv_heads", self.num_kv_heads)
        _require_positive("head_dim", self.head_dim)
        _require_positive("v_head_dim", self.v_head_dim)
        if self.dtype != FOUR_BITS:
            _check_dtype(self.dtype)
        elif self.head_dim % 2 or self.v_head_dim % 2:
            raise ValueError(
                "head_dim and v_head_dim must be even in a cache of 4 bits, "
                f"got {self.head_dim} and {self.v_head_dim}"
            )

    @property
    def channels_per_element(self) -> int:
        """The number of channels that one element of the cache tensors holds: 2 with 4 bits, else
        1."""
        return 2 if self.dtype == FOUR_BITS else 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer: Hk times (the bytes of D + Dv channels, and of its
        scales)."""
        elements = (self.head_dim + self.v_head_dim) // self.channels_per_element
        channels = elements * self.dtype.itemsize
        return self.num_kv_heads * (channels + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class LatentSpec(_Row):
    """The latent and the rotated key of one token in one layer of latent attention.

    Attributes:
        kv_rank: R, the channels of the latent.
        rope_dim: Dr, the channels of the rotated key.
        dtype: a floating-point type of 16 bits or more, int8 or float8_e4m3fn.

    Raises:
        ValueError: a size is below 1.
        TypeError: dtype is none of these.
    """

    kv_rank: int
    rope_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _require_positive("kv_rank", self.kv_rank)
        _require_positive("rope_dim", self.rope_dim)
        _check_dtype(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer: R + Dr times the element size, and the scales."""
        return (self.kv_rank + self.rope_dim) * self.dtype.itemsize + self.scale_bytes


class StateSlots(NamedTuple):
    """The slots of one layer with a state.

    Attributes:
        recurrence: the tensors of `RecurrentStates` in their order; None without a recurrence.
        convolution: (slots, R, C), see `causal_conv1d_step`; None without a convolution.
    """

    recurrence: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None
    convolution: Tensor | None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The sizes of the state that one layer keeps of a sequence: of a recurrence, a convolution, or
    both.

    Attributes:
        conv_channels, conv_width: C and W of the convolution; a width of 1 is no convolution.
        num_heads, key_dim, value_dim: H, K and V of the state, as `recurrent_states` has them; 0
            heads are no recurrence.
        num_key_heads: Hk, the heads of queries and keys.
        by_channel: True where each channel of the keys has a decay.
        dtype: the dtype of tokens, float32, float16, bfloat16 or float64. The state is float32, or
            float64.
        is_delta: True where the delta rule corrects what the state holds, False for Mamba-2.

    Raises:
        ValueError: the layer has neither a recurrence nor a convolution, or a size of the one it
            has is below 1.
        TypeError: dtype is none of these.
    """

    conv_channels: int = 0
    conv_width: int = 1
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    by_channel: bool = False
    dtype: torch.dtype = torch.float32
    is_delta: bool = True

    def __post_init__(self) -> None:
        if not (self.num_heads or self.conv_width > 1):
            raise ValueError(
                "num_heads must be at least 1 or conv_width at least 2, "
                f"got {self.num_heads} and {self.conv_width}"
            )
        needed = ["key_dim", "value_dim", "num_key_heads"] if self.num_heads else []
        needed += ["conv_channels"] if self.conv_width > 1 else []
        for name in needed:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise TypeError(
                "dtype of a state's tokens must be float32, float16, bfloat16 or float64, "
                f"got {self.dtype}"
            )

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the recurrent state: float32, or float64 for float64 tokens."""
        return torch.promote_types(self.dtype, torch.float32)

    def recurrence(self, *, keeps_tokens: bool) -> list[StateTensor]:
        """Return the shape and dtype of each tensor of `RecurrentStates`, for one slot, in their
        order.

        Without a recurrence the list is empty.

        Args:
            keeps_tokens: True if a slot keeps the values of the tokens of its open chunk, as on a
                GPU; False if it keeps what each of them adds to the state, as on a CPU.
        """
        if not self.num_heads:
            return []
        wide, gate = self.state_dtype, (self.key_dim,) if self.by_channel else ()
        kinds: list[StateTensor] = [
            ((self.num_heads, self.key_dim, self.value_dim), wide),
            ((STATE_CHUNK, self.num_key_heads, self.key_dim), self.dtype),
            ((STATE_CHUNK, self.num_heads, *gate), wide),
            (
                (STATE_CHUNK, self.num_heads, self.value_dim),
                self.dtype if keeps_tokens else wide,
            ),
        ]
        if keeps_tokens:
            kinds.append(((STATE_CHUNK, self.num_heads), wide))
        if keeps_tokens and self.is_delta:
            inverse = self.dtype if self.dtype == torch.bfloat16 else wide
            kinds.append(((STATE_CHUNK, self.num_heads, STATE_CHUNK), inverse))
        return kinds

    @property
    def convolution(self) -> list[StateTensor]:
        """The shape and dtype of a slot's tensor for the convolution, as a list of one; empty
        without one.

        The tensor holds the convolution's inputs of the last STATE_CHUNK + W - 1 tokens.
        """
        if self.conv_width == 1:
            return []
        return [((STATE_CHUNK + self.conv_width - 1, self.conv_channels), self.dtype)]

    @property
    def checkpoint(self) -> list[StateTensor]:
        """The shapes and dtypes of a checkpoint's tensors: the state, and a convolution's inputs.

        A checkpoint is a copy of a sequence's state in one layer, from which another sequence may
        go on. The recurrent state has shape (H, K, V); it is left out without a recurrence. The
        inputs of the last W - 1 tokens have shape (W - 1, C), for a convolution of width W; they
        are left out without a convolution.
        """
        found = self.recurrence(keeps_tokens=True)[:1]
        if self.conv_width > 1:
            found.append(((self.conv_width - 1, self.conv_channels), self.dtype))
        return found

    def slot_bytes(self, *, keeps_tokens: bool) -> int:
        """Return the bytes of the slot of a running sequence in one layer; `keeps_tokens` as in
        `recurrence`."""
        tensors = [*self.recurrence(keeps_tokens=keeps_tokens), *self.convolution]
        return sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache the same tokens in the same format: one pool of blocks, one table a
    sequence.

    Attributes:
        kind: the specification of one token in one of the layers.
        layers: the numbers of the layers in the model, ascending; empty in a model that has states
            alone, where blocks only count tokens.
        window: the number of keys that a query sees, its own included; None for all. Tokens that no
            later query sees are not kept.

    Raises:
        ValueError: the window is below 1.
    """

    kind: KVSpec | LatentSpec
    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _require_positive("window", self.window)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        return len(self.layers) * self.kind.bytes_per_token


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The paged cache of a whole model.

    Attributes:
        num_layers: the number of layers with keys and values; 0 only if others have states.
        block_size: P, the tokens of a cache block.
        kv: the specification of one token in one layer; of the first group if there are several.
        groups: the groups of layers. If not given, all layers are one group without a window.
        sources: the layer whose keys and values each layer reads, itself or one before it; empty if
            each has its own. Groups contain only the layers with keys and values of their own.
        states: the layers of the model that keep a state of each sequence, and what they keep.

    Raises:
        ValueError: a size is below 1, a layer is in no group or in two, or sources name a layer
            without keys of its own.
    """

    num_layers: int
    block_size: int
    kv: KVSpec | LatentSpec
    groups: tuple[LayerGroup, ...] = ()
    sources: tuple[int, ...] = ()
    states: tuple[tuple[int, StateSpec], ...] = ()

    def __post_init__(self) -> None:
        if not self.states:
            _require_positive("num_layers", self.num_layers)
        _require_positive("block_size", self.block_size)
        sources = self.sources or tuple(range(self.num_layers))
        own = [layer for layer, source in enumerate(sources) if layer == source]
        if len(sources) != self.num_layers or not {*sources} <= {*own}:
            raise ValueError(
                f"sources must be, for each of {self.num_layers} layers, one with keys and values "
                f"of its own, got {self.sources}"
            )
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(self.kv, tuple(own)),))
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != own:
            raise ValueError(f"groups must hold each of the {len(own)} layers once, got {layers}")
        if self.groups[0].kind != self.kv:
            raise ValueError(f"kv must be that of the first group, got {self.kv}")

    @classmethod
    def of_windows(
        cls, block_size: int, kind: KVSpec | LatentSpec, windows: Sequence[int | None]
    ) -> CacheSpec:
        """Return the spec of a model whose layers are grouped by their windows, those without a
        window first.

        Args:
            block_size: the tokens of a cache block.
            kind: the specification of one token in every layer.
            windows: the window of each layer, None for all keys.
        """
        return cls.of_layers(block_size, [kind] * len(windows), windows)

    @classmethod
    def of_layers(
        cls,
        block_size: int,
        kinds: Sequence[KVSpec | LatentSpec],
        windows: Sequence[int | None],
        sources: tuple[int, ...] = (),
        states: tuple[tuple[int, StateSpec], ...] = (),
    ) -> CacheSpec:
        """Return the spec of a model whose layers are grouped by window and kind: without a window
        first, then the largest windows.

        Layers that read another layer's keys are in no group. A model of states alone gets one
        group without layers.

        Args:
            block_size: tokens per cache block.
            kinds: the keys and values of one token in each layer.
            windows: the window of each layer, None for all keys.
            sources, states: see `CacheSpec`.
        """
        layers = list(zip(windows, kinds, strict=True))
        own = [i for i, source in enumerate(sources or range(len(layers))) if i == source]
        distinct = sorted(
            dict.fromkeys(layers[i] for i in own), key=lambda x: (x[0] is not None, -(x[0] or 0))
        )
        groups = tuple(
            LayerGroup(kind, tuple(i for i in own if layers[i] == (window, kind)), window)
            for window, kind in distinct
        )
        groups = groups or (LayerGroup(KVSpec(1, 1, 1, torch.float32), ()),)
        return cls(len(layers), block_size, groups[0].kind, groups, sources, states)

    @property
    def is_plain(self) -> bool:
        """Whether all layers are one group without a window, and no layer has a state."""
        return self.windows == (None,) and not self.states

    @property
    def group_of(self) -> tuple[int, ...]:
        """The number of the group of each layer, or of the layer whose keys it reads; empty if
        there is one group."""
        if len(self.groups) == 1:
            return ()
        numbers = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return tuple(numbers[source] for source in self.sources or range(self.num_layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token in the layers of all groups, as long as the token is in every
        window."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block of every group together, each in all layers of its group."""
        return self.block_size * self.bytes_per_token

    def group_block_bytes(self, group: int) -> int:
        """Bytes of a block of group `group`, in all layers of the group."""
        return self.block_size * self.groups[group].bytes_per_token

    @property
    def group_shares(self) -> tuple[float, ...]:
        """The share of each group in `bytes_per_block`, by its number."""
        return tuple(
            self.group_block_bytes(i) / self.bytes_per_block for i in range(len(self.groups))
        )

    def part(self, group: int) -> CacheSpec:
        """Return the spec of a cache with only the layers of one group, numbered from 0, without
        states."""
        own = self.groups[group]
        whole = replace(own, layers=tuple(range(len(own.layers))))
        return CacheSpec(len(own.layers), self.block_size, own.kind, (whole,))

    def k_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's k_cache: (num_blocks, P, Hk, D), in 4 bits (..., D / 2)."""
        kv = self._keys_and_values()
        width = kv.head_dim // kv.channels_per_element
        return (num_blocks, self.block_size, kv.num_kv_heads, width)

    def v_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Shape of one layer's v_cache: (num_blocks, P, Hk, Dv), in 4 bits (..., Dv / 2)."""
        kv = self._keys_and_values()
        width = kv.v_head_dim // kv.channels_per_element
        return (num_blocks, self.block_size, kv.num_kv_heads, width)

    def scale_shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Shape of one layer's k_scale and v_scale: (num_blocks, P, Hk)."""
        return (num_blocks, self.block_size, self._keys_and_values().num_kv_heads)

    def _keys_and_values(self) -> KVSpec:
        assert isinstance(self.kv, KVSpec), "latents have one cache, not two"
        return self.kv

    def tensors(self, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the tensors of one layer of the first group.

        They are k_cache and v_cache, and in a cache of 8 or 4 bits k_scale and v_scale; for latents
        latent_cache (num_blocks, P, R + Dr), with latent_scale (num_blocks, P, 2) in an 8-bit
        cache.
        """
        kind = self.kv
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        if isinstance(kind, LatentSpec):
            rows = (num_blocks, self.block_size)
            shapes = [((*rows, kind.kv_rank + kind.rope_dim), kind.dtype)]
            return [*shapes, ((*rows, 2), torch.float32)] if kind.is_quantised else shapes
        shapes = [(self.k_shape(num_blocks), kind.dtype), (self.v_shape(num_blocks), kind.dtype)]
        if kind.is_quantised:
            shapes += [(self.scale_shape(num_blocks), torch.float32)] * 2
        return shapes
