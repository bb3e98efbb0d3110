"""Launch the quantising kernels: q, k and v of one call together, or one tensor alone.

The rule is that of `reference.fp8`. Values come out as the e4m3 product wants them: transposed,
their keys permuted within every 32 (see `quantize_rows`), padded to a multiple of 32 with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.forward.fp8.quantise import (
    ROOM,
    head_maxima_kernel,
    quantize_heads_kernel,
    quantize_tokens_kernel,
)
from tilewise.kernels.host.launch import launch

_NUMBERS = 8192  # of a program: 64 float32 a thread
_ROTATED_ROWS = 128  # of a program that reads the matrix of a rotation, too
_ALL, _KEYS_ALONE, _VALUES_ALONE = -1, 1, 2  # which tensors a launch is for
_KEYS = 32  # keys among which the product's order is a permutation
_WARPS = 4
_ALIGNMENT = 16  # bytes of the widest load
_ROTATED_WARPS = 8
_DTYPES = (torch.float16, torch.bfloat16)
_HOPPER = 90
_WIDEST, _NARROWEST_ROTATED = 256, 16  # a matrix product takes 16 channels at least


class Packed(NamedTuple):
    """Where the sequences of a packed batch lie, as in `AttentionTensors` and its spec."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cu_seqlens_k.shape[0] - 1

    def columns(self, keys: int) -> int:
        """Return how many columns the values of all `keys` keys take, see `first_column`."""
        return (keys // ROOM.value + self.batch) * ROOM.value


class Quantized(NamedTuple):
    """e4m3 tensors and float32 scales, (B, H), or of q and k (B, H, S), one a token.

    Those of a packed batch are (Tq, Hq, D), (Tk, Hk, D) and (1, Hk, D, columns); their scales are
    (B, H), or (1, H, T).
    """

    q: Tensor  # (B, Sq, Hq, D)
    k: Tensor  # (B, Sk, Hk, D)
    v: Tensor  # (B, Hk, D, Sk rounded up), in the product's order
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def why_not_quantize(x: Tensor, rotated: bool) -> str | None:
    """Say why the kernels cannot read `x` (..., S, H, D), or return None when they can."""
    head_dim = x.shape[-1]
    if x.device.type != "cuda":
        return f"device must be cuda, got {x.device.type}"
    if device.arch_of(x.device) != _HOPPER:
        return "these kernels are compiled for sm_90 only"
    if x.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {x.dtype}"
    if not 1 <= head_dim <= _WIDEST or (rotated and head_dim < _NARROWEST_ROTATED):
        return f"head dim must be from {_NARROWEST_ROTATED} to {_WIDEST}, got {head_dim}"
    if x.numel() == 0:
        return "there is nothing to read"
    return None


class _Tasks:
    """How a call is cut: tasks of some rows of a head."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotated: bool, packed: Packed | None = None
    ) -> None:
        (self.batch, self.seqlen_q, self.heads_q, self.head_dim) = q.shape
        self.seqlen_k, self.heads_k = k.shape[1:3]
        self.columns = triton.cdiv(self.seqlen_k, _KEYS) * _KEYS
        self.cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
        if packed is not None:
            self.batch, self.cu_seqlens = packed.batch, packed[:2]
            self.columns = packed.columns(self.seqlen_k)
            room = ROOM.value  # values fill one at least
            self.seqlen_q = max(1, packed.max_seqlen_q)
            self.seqlen_k = max(1, triton.cdiv(packed.max_seqlen_k, room)) * room
        self.rotated = rotated
        self.aligned = self.head_dim % _ALIGNMENT == 0 and all(map(_is_aligned, (q, k, v)))
        self.width = triton.next_power_of_2(self.head_dim)
        self.rows = _ROTATED_ROWS if rotated else _NUMBERS // self.width
        self.chunks_q = triton.cdiv(self.seqlen_q, self.rows)
        self.chunks_k = triton.cdiv(self.seqlen_k, self.rows)
        self.q = self.batch * self.heads_q * self.chunks_q
        self.k = self.batch * self.heads_k * self.chunks_k

    def new_values(self, v: Tensor) -> Tensor:
        """Return memory of the transposed values."""
        batch = 1 if self.cu_seqlens[1] is not None else self.batch
        shape = (batch, self.heads_k, self.head_dim, self.columns)
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=v.device)

    def numbers(self) -> tuple[int, ...]:
        """The integers that both kernels take."""
        return (self.q, self.k, self.heads_q, self.heads_k, self.seqlen_q, self.seqlen_k,
                self.chunks_q, self.chunks_k, self.head_dim)  # fmt: skip

    def constants(self, single: int) -> dict[str, int | bool]:
        """The compile-time numbers that both kernels take."""
        warps = _ROTATED_WARPS if self.rotated else _WARPS
        rotated = self.rotated and single != _VALUES_ALONE
        return {"SINGLE": single, "D": self.width, "TILE": self.rows, "ROTATED": rotated,
                "ALIGNED": self.aligned, "num_warps": warps}  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    steps = (x.data_ptr(), *(step * x.itemsize for step in x.stride()[:3]))
    return all(step % _ALIGNMENT == 0 for step in steps)


def _strides(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:3]]


def _batched(x: Tensor) -> Tensor:
    """View a packed tensor (T, H, D) as a batch whose sequences all begin where it does."""
    return x if x.dim() == 4 else x.unsqueeze(0).as_strided((1, *x.shape), (0, *x.stride()))


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Tensor | None,
    seqlens_k: Tensor | None,
    packed: Packed | None = None,
) -> Quantized:
    """Quantise the inputs of one attention call.

    Args:
        q, k, v: (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, D), 16 bits, last dim contiguous; of a
            packed batch (Tq, Hq, D), (Tk, Hk, D), (Tk, Hk, D), and rows of no sequence stay unset.
        rotation: +-1, (D, D) in q's dtype, for q and k; None leaves them.
        seqlens_k: int32 (B,), rows of k and v that count.
        packed: where the sequences of a packed batch lie.
    """
    e4m3 = torch.float8_e4m3fn
    q8, k8 = (torch.empty(x.shape, dtype=e4m3, device=x.device) for x in (q, k))
    q, k, v = map(_batched, (q, k, v))
    tasks = _Tasks(q, k, v, rotated=rotation is not None, packed=packed)
    v8 = tasks.new_values(v)
    grid = tasks.q + 2 * tasks.k
    heads = (tasks.batch * tasks.heads_q, tasks.batch * tasks.heads_k)
    memory = torch.empty(grid + heads[0] + 2 * heads[1], dtype=torch.float32, device=q.device)
    maxima, scales = memory[:grid], memory[grid:]
    strides = _strides(q, k, v)
    launch(
        head_maxima_kernel, grid, q, k, v, rotation, seqlens_k, maxima, *strides,
        *tasks.numbers(), *tasks.cu_seqlens, **tasks.constants(_ALL),
    )  # fmt: skip
    most = triton.next_power_of_2(max(tasks.chunks_q, tasks.chunks_k))
    bytes8 = [x.view(torch.uint8) for x in (q8, k8, v8)]
    values = tasks.q + tasks.k
    parts = (
        (_ALL, values, maxima, scales),
        (_VALUES_ALONE, tasks.k, maxima[values:], scales[heads[0] + heads[1] :]),
    )
    for single, count, own_maxima, own_scales in parts:
        launch(
            quantize_heads_kernel, count, q, k, v, rotation, seqlens_k, own_maxima, *bytes8,
            own_scales, *strides, *tasks.numbers(), tasks.columns, *tasks.cu_seqlens,
            MAX_CHUNKS=most, SCALED=True, **tasks.constants(single),
        )  # fmt: skip
    q_scale, k_scale, v_scale = scales.split((heads[0], heads[1], heads[1]))
    shape_k = (tasks.batch, tasks.heads_k)
    q_scale = q_scale.view(tasks.batch, tasks.heads_q)
    return Quantized(q8, k8, v8, q_scale, k_scale.view(shape_k), v_scale.view(shape_k))


def quantize_rows(
    x: Tensor, *, rotation: Tensor | None, seqlens: Tensor | None, packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise one tensor (B, S, H, D); return e4m3 of the same shape and float32 (B, H).

    Args:
        x: 16 bits, last dim contiguous; (T, H, D) of a packed batch, whose rows of no sequence are
            0 in the result.
        rotation: +-1, (D, D) in x's dtype, or None.
        seqlens: int32 (B,), rows that count.
        packed: where the sequences of a packed batch lie.
    """
    new = torch.empty if packed is None else torch.zeros
    x8 = new(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    x = _batched(x)
    tasks = _Tasks(x, x, x, rotated=rotation is not None, packed=packed)
    scale = torch.empty((tasks.batch, tasks.heads_k), dtype=torch.float32, device=x.device)
    maxima = torch.empty(tasks.k, dtype=torch.float32, device=x.device)
    constants = tasks.constants(_KEYS_ALONE)
    inputs = (x, x, x, rotation, seqlens, maxima)
    numbers = (*_strides(x, x, x), *tasks.numbers())
    launch(head_maxima_kernel, tasks.k, *inputs, *numbers, *tasks.cu_seqlens, **constants)
    out = x8.view(torch.uint8)
    launch(
        quantize_heads_kernel, tasks.k, *inputs, out, out, out, scale, *numbers,
        tasks.seqlen_k, *tasks.cu_seqlens, MAX_CHUNKS=triton.next_power_of_2(tasks.chunks_k),
        SCALED=True, **constants,
    )  # fmt: skip
    return x8, scale


def quantize_tokens(
    x: Tensor, *, rotation: Tensor | None, seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantise one tensor with a scale for each token; return e4m3 and float32 (B, H, S).

    Arguments are those of `quantize_rows`; of a packed tensor each row counts, and scales are
    (1, H, T).
    """
    x8 = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    x = _batched(x)
    tasks = _Tasks(x, x, x, rotated=rotation is not None)
    heads, length = tasks.heads_k, tasks.seqlen_k
    scale = torch.empty((tasks.batch, heads, length), dtype=torch.float32, device=x.device)
    constants = tasks.constants(_KEYS_ALONE)
    del constants["SINGLE"]
    launch(
        quantize_tokens_kernel, tasks.k, x, rotation, seqlens, x8.view(torch.uint8), scale,
        *_strides(x), heads, length, tasks.chunks_k, tasks.head_dim, **constants,
    )  # fmt: skip
    return x8, scale


def quantize_qkv_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Tensor | None,
    seqlens_k: Tensor | None,
    packed: Packed | None = None,
) -> Quantized:
    """Quantise the inputs of one call with a scale for each query and key, and each head of v.

    Arguments are those of `quantize_qkv`.
    """
    q8, q_scale = quantize_tokens(q, rotation=rotation, seqlens=None)
    k8, k_scale = quantize_tokens(k, rotation=rotation, seqlens=seqlens_k)
    v = _batched(v)
    tasks = _Tasks(v, v, v, rotated=False, packed=packed)
    v8 = tasks.new_values(v)
    maxima = torch.empty(tasks.k, dtype=torch.float32, device=v.device)
    v_scale = torch.empty((tasks.batch, tasks.heads_k), dtype=torch.float32, device=v.device)
    given, out = (v, v, v, None, seqlens_k, maxima), v8.view(torch.uint8)
    numbers, constants = (*_strides(v, v, v), *tasks.numbers()), tasks.constants(_VALUES_ALONE)
    launch(head_maxima_kernel, tasks.k, *given, *numbers, *tasks.cu_seqlens, **constants)
    launch(
        quantize_heads_kernel, tasks.k, *given, out, out, out, v_scale, *numbers, tasks.columns,
        *tasks.cu_seqlens, MAX_CHUNKS=triton.next_power_of_2(tasks.chunks_k), SCALED=True,
        **constants,
    )  # fmt: skip
    return Quantized(q8, k8, v8, q_scale, k_scale, v_scale)


def value_columns(v8: Tensor, seqlens_k: Tensor | None, packed: Packed | None = None) -> Tensor:
    """Transpose e4m3 values (B, Sk, Hk, D) to (B, Hk, D, Sk rounded up), keys in order.

    Those of a packed batch, (Tk, Hk, D), become (1, Hk, D, columns).
    """
    v8 = _batched(v8)
    tasks = _Tasks(v8, v8, v8, rotated=False, packed=packed)
    out = tasks.new_values(v8)
    bytes_in, bytes_out = v8.view(torch.uint8), out.view(torch.uint8)
    launch(
        quantize_heads_kernel, tasks.k, bytes_in, bytes_in, bytes_in, None, seqlens_k, None,
        bytes_out, bytes_out, bytes_out, None, *_strides(bytes_in, bytes_in, bytes_in),
        *tasks.numbers(), tasks.columns, *tasks.cu_seqlens, MAX_CHUNKS=1, SCALED=False,
        **tasks.constants(_VALUES_ALONE),
    )  # fmt: skip
    return out
