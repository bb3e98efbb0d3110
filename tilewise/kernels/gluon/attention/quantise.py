"""Plan the quantising kernels: q, k and v of one call together, or one tensor alone.

The rule is that of `reference.fp8`. Values come out as the e4m3 product wants them: transposed,
their keys permuted within every 32 (see forward/fp8/quantise.py), padded to a multiple of 32 with
zeros.
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
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call, LaunchPlan, Refusal
from tilewise.kernels.spec import QuantizeSpec

__all__ = [
    "Packed",
    "Quantized",
    "add_qkv",
    "add_value_columns",
    "plan_fwd",
    "plan_quantize",
    "quantize_qkv",
]

_NUMBERS = 8192  # of a program: 64 float32 a thread
_ROTATED_ROWS = 128  # of a program that reads the matrix of a rotation, too
_ALL, _KEYS_ALONE, _VALUES_ALONE = -1, 1, 2  # which tensors a launch is for
_KEYS = 32  # keys among which the product's order is a permutation
_WARPS = 4
_ALIGNMENT = 16  # bytes of the widest load
_ROTATED_WARPS = 8
_DTYPES = (torch.float16, torch.bfloat16)
_E4M3 = torch.float8_e4m3fn
_HOPPER = 90
_WIDEST, _NARROWEST_ROTATED = 256, 16  # a matrix product takes 16 channels at least


class Packed(NamedTuple):
    """The edges of sequences that are packed end to end.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), the first row of each sequence and the end.
        max_seqlen_q, max_seqlen_k: the lengths of the longest sequences.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.cu_seqlens_k.shape[0] - 1

    def columns(self, keys: int) -> int:
        """Return how many columns the transposed values of all `keys` keys take, each sequence
        padded to a multiple of ROOM, see `first_column`."""
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


class _Tasks:
    """How the quantising kernels cut q, k and v of a call (dense, or packed as one batch entry):
    each task is TILE rows of one head.

    Attributes `q` and `k` are the numbers of tasks of q, and of k (or v); `chunks_q`, `chunks_k`
    those of a head.
    """

    def __init__(
        self,
        maker: Maker,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotated: bool,
        packed: Packed | None = None,
    ) -> None:
        (self.batch, self.seqlen_q, self.heads_q, self.head_dim) = q.shape
        self.seqlen_k, self.heads_k = k.shape[1:3]
        self.rotated = rotated
        are_aligned = all(_is_aligned(maker, x) for x in (q, k, v))
        self.aligned = self.head_dim % _ALIGNMENT == 0 and are_aligned
        self.width = triton.next_power_of_2(self.head_dim)
        self.rows = _ROTATED_ROWS if rotated else _NUMBERS // self.width
        self.unit = max(ROOM.value, self.rows)
        self.cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
        seqlens = self.seqlen_q, self.seqlen_k
        if packed is None:
            self.columns = triton.cdiv(self.seqlen_k, _KEYS) * _KEYS
            chunks = [triton.cdiv(n, self.rows) for n in seqlens]
            most, heads = chunks, self.batch
        else:  # chunks are of all sequences, see `_sequence` of the kernels
            self.batch, self.cu_seqlens = packed.batch, packed[:2]
            self.columns = packed.columns(self.seqlen_k)
            chunks = [(n // self.unit + self.batch) * (self.unit // self.rows) for n in seqlens]
            most, heads = [max(1, triton.cdiv(n, self.rows)) for n in packed[2:]], 1
        self.chunks_q, self.chunks_k = chunks
        self.most_q, self.most_k = map(triton.next_power_of_2, most)
        self.q = heads * self.heads_q * self.chunks_q
        self.k = heads * self.heads_k * self.chunks_k

    def new_values(self, maker: Maker) -> Tensor:
        """Return uninitialised memory for the transposed values, e4m3 (B, Hk, D, columns).

        B is 1 for a packed batch. Columns are the keys, padded.

        Args:
            maker: the maker of the plan, which allocates the memory.
        """
        batch = 1 if self.cu_seqlens[1] is not None else self.batch
        return maker.empty((batch, self.heads_k, self.head_dim, self.columns), _E4M3)

    def numbers(self) -> tuple[int, ...]:
        """Return the integers that both kernels take, in the order of their arguments."""
        return (
            self.q,
            self.k,
            self.heads_q,
            self.heads_k,
            self.seqlen_q,
            self.seqlen_k,
            self.chunks_q,
            self.chunks_k,
            self.batch,
            self.head_dim,
        )

    def constants(self, single: int) -> dict[str, int | bool]:
        """Return the compile-time arguments of both kernels by name, for a launch over the tensors
        that `single` names: _ALL, _KEYS_ALONE or _VALUES_ALONE."""
        warps = _ROTATED_WARPS if self.rotated else _WARPS
        rotated = self.rotated and single != _VALUES_ALONE
        return {
            "SINGLE": single,
            "D": self.width,
            "TILE": self.rows,
            "UNIT": self.unit,
            "ROTATED": rotated,
            "ALIGNED": self.aligned,
            "num_warps": warps,
        }


def _is_aligned(maker: Maker, x: Tensor) -> bool:
    steps = (step * x.itemsize for step in x.stride()[:3])
    return maker.is_aligned(x) and all(step % _ALIGNMENT == 0 for step in steps)


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
    rotation: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    packed: Packed | None = None,
    per_token: bool = False,
) -> Quantized:
    """Quantise the inputs of one attention call now, not in a plan; arguments are those of
    `add_qkv`."""
    edges = (None, None) if packed is None else packed[:2]
    given = (q, k, v, rotation, seqlens_k, *edges)
    maker = Maker(Call.of(None, given))
    q, k, v, rotation, seqlens_k, *inner = maker.inputs  # type: ignore[assignment]
    if packed is not None:
        packed = Packed(*inner, *packed[2:])  # type: ignore[arg-type]
    found = add_qkv(
        maker, q, k, v, rotation=rotation, seqlens_k=seqlens_k, packed=packed, per_token=per_token
    )
    return Quantized(*maker.run_at_once(found, given))


def add_qkv(
    maker: Maker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Tensor | None,
    seqlens_k: Tensor | None,
    packed: Packed | None = None,
    per_token: bool = False,
) -> Quantized:
    """Add to the plan the launches that quantise the inputs of one attention call, and return the
    e4m3 tensors and scales.

    Args:
        q, k, v: (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, D), 16 bits, last dim contiguous; of a
            packed batch (Tq, Hq, D), (Tk, Hk, D), (Tk, Hk, D), and rows of no sequence stay unset.
        rotation: +-1, (D, D) in q's dtype, for q and k; None leaves them.
        seqlens_k: int32 (B,), rows of k and v that count.
        packed: the first rows of the sequences of a packed batch.
        per_token: True for a scale for each query and key, and each head of v.
    """
    if per_token:
        q8, q_scale = _add_tokens(maker, q, rotation, None)
        k8, k_scale = _add_tokens(maker, k, rotation, seqlens_k)
        v8, v_scale = _add_values(maker, v, seqlens_k, packed)
        return Quantized(q8, k8, v8, q_scale, k_scale, v_scale)
    q8, k8 = (maker.empty(tuple(x.shape), _E4M3) for x in (q, k))
    q, k, v = map(_batched, (q, k, v))
    tasks = _Tasks(maker, q, k, v, rotated=rotation is not None, packed=packed)
    v8 = tasks.new_values(maker)
    grid = tasks.q + 2 * tasks.k
    heads = (tasks.batch * tasks.heads_q, tasks.batch * tasks.heads_k)
    maxima = maker.empty((grid,), torch.float32)
    scales = maker.empty((heads[0] + 2 * heads[1],), torch.float32)
    strides = _strides(q, k, v)
    maker.launch(
        head_maxima_kernel,
        grid,
        q,
        k,
        v,
        rotation,
        seqlens_k,
        maxima,
        *strides,
        *tasks.numbers(),
        *tasks.cu_seqlens,
        **tasks.constants(_ALL),
    )
    most = max(tasks.most_q, tasks.most_k)
    bytes8 = [x.view(torch.uint8) for x in (q8, k8, v8)]
    values = tasks.q + tasks.k
    q_scale, k_scale, v_scale = scales.split((heads[0], heads[1], heads[1]))
    parts = (
        (_ALL, values, maxima, scales),
        (_VALUES_ALONE, tasks.k, maxima[values:], v_scale),
    )
    for single, count, own_maxima, own_scales in parts:
        maker.launch(
            quantize_heads_kernel,
            count,
            q,
            k,
            v,
            rotation,
            seqlens_k,
            own_maxima,
            *bytes8,
            own_scales,
            *strides,
            *tasks.numbers(),
            tasks.columns,
            *tasks.cu_seqlens,
            MAX_CHUNKS=most,
            SCALED=True,
            **tasks.constants(single),
        )
    shape_k = (tasks.batch, tasks.heads_k)
    q_scale = q_scale.view(tasks.batch, tasks.heads_q)
    return Quantized(q8, k8, v8, q_scale, k_scale.view(shape_k), v_scale.view(shape_k))


def _why_not(call: Call) -> str | None:
    """Say why the kernels cannot quantise the call's tensor x (..., S, H, D), or return None when
    they can: 16 bits, on Hopper, D of at most 256 (at least 16 with a rotation), and not empty."""
    x, *_, rotation = call.layouts
    assert x is not None
    head_dim = x.shape[-1]
    if call.device.type != "cuda":
        return f"device must be cuda, got {call.device.type}"
    if device.arch_of(call.device) != _HOPPER:
        return "these kernels are compiled for sm_90 only"
    if x.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {x.dtype}"
    if not 1 <= head_dim <= _WIDEST or (rotation is not None and head_dim < _NARROWEST_ROTATED):
        return f"head dim must be from {_NARROWEST_ROTATED} to {_WIDEST}, got {head_dim}"
    if 0 in x.shape:
        return "there is nothing to read"
    return None


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan that quantises one tensor to e4m3, see `plan_quantize`, or why these kernels
    cannot."""
    reason = _why_not(call)
    return plan_quantize(call) if reason is None else Refusal(reason)


def plan_quantize(call: Call) -> LaunchPlan:
    """Return the plan that quantises one tensor; its results are e4m3 of the tensor's shape, and
    float32 scales.

    Its call has a `QuantizeSpec` and these tensors:
        x: (B, S, H, D) of 16 bits, last dim contiguous; (T, H, D) of a packed batch, whose rows of
            no sequence are 0 in the result.
        seqlens: int32 (B,), rows that count.
        cu_seqlens: int32 (B + 1,) of a packed batch.
        rotation: +-1, (D, D) in x's dtype, or None.

    Scales are (B, H), or of tokens (B, H, S); of a packed tensor whose tokens are quantised each
    row counts, and scales are (1, H, T).
    """
    spec: QuantizeSpec = call.spec
    maker = Maker(call)
    x, seqlens, edges, rotation = maker.inputs
    assert x is not None
    seqlens, edges = maker.dense(seqlens), maker.dense(edges)
    if spec.per_token:
        return maker.finish(_add_tokens(maker, x, rotation, seqlens))
    packed = None
    if edges is not None:
        packed = Packed(edges, edges, spec.max_seqlen, spec.max_seqlen)
    return maker.finish(_add_rows(maker, x, rotation, seqlens, packed))


def _add_rows(
    maker: Maker,
    x: Tensor,
    rotation: Tensor | None,
    seqlens: Tensor | None,
    packed: Packed | None,
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launches that quantise one tensor with a scale for each head of a
    sequence; return the e4m3 tensor of its shape and the scales (B, H)."""
    shape = tuple(x.shape)
    x8 = maker.empty(shape, _E4M3) if packed is None else maker.full(shape, 0.0, _E4M3)
    if packed is not None and packed.batch == 0:  # no row belongs to a sequence
        return x8, maker.empty((0, shape[1]), torch.float32)
    x = _batched(x)
    tasks = _Tasks(maker, x, x, x, rotated=rotation is not None, packed=packed)
    scale = maker.empty((tasks.batch, tasks.heads_k), torch.float32)
    _add_one(maker, tasks, x, (rotation, seqlens), x8, scale, tasks.seqlen_k, _KEYS_ALONE)
    return x8, scale


def _add_tokens(
    maker: Maker, x: Tensor, rotation: Tensor | None, seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launch that quantises one tensor with a scale for each token; return the
    e4m3 tensor of its shape and the scales (B, H, S), B of 1 for a packed tensor."""
    x8 = maker.empty(tuple(x.shape), _E4M3)
    x = _batched(x)
    tasks = _Tasks(maker, x, x, x, rotated=rotation is not None)
    heads, length = tasks.heads_k, tasks.seqlen_k
    scale = maker.empty((tasks.batch, heads, length), torch.float32)
    constants = tasks.constants(_KEYS_ALONE)
    del constants["SINGLE"], constants["UNIT"]
    maker.launch(
        quantize_tokens_kernel,
        tasks.k,
        x,
        rotation,
        seqlens,
        x8.view(torch.uint8),
        scale,
        *_strides(x),
        heads,
        length,
        tasks.chunks_k,
        tasks.head_dim,
        **constants,
    )
    return x8, scale


def _add_values(
    maker: Maker, v: Tensor, seqlens_k: Tensor | None, packed: Packed | None
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launches that quantise values alone, with a scale for each head of a
    sequence; return e4m3 (B, Hk, D, columns) and the scales (B, Hk)."""
    v = _batched(v)
    tasks = _Tasks(maker, v, v, v, rotated=False, packed=packed)
    v8 = tasks.new_values(maker)
    v_scale = maker.empty((tasks.batch, tasks.heads_k), torch.float32)
    _add_one(maker, tasks, v, (None, seqlens_k), v8, v_scale, tasks.columns, _VALUES_ALONE)
    return v8, v_scale


def _add_one(
    maker: Maker,
    tasks: _Tasks,
    x: Tensor,
    more: tuple[Tensor | None, Tensor | None],
    x8: Tensor,
    scale: Tensor,
    columns: int,
    single: int,
) -> None:
    """Add to the plan both launches that quantise one tensor with a scale a head: the largest
    values, and then the codes.

    Args:
        more: the rotation and the lengths, or None.
        x8, scale: the codes and scales to write.
        columns: the columns of values with their padding.
        single: the constant SINGLE of the kernels, which names the tensor.
    """
    maxima, constants = maker.empty((tasks.k,), torch.float32), tasks.constants(single)
    inputs, out = (x, x, x, *more, maxima), x8.view(torch.uint8)
    numbers = (*_strides(x, x, x), *tasks.numbers())
    maker.launch(head_maxima_kernel, tasks.k, *inputs, *numbers, *tasks.cu_seqlens, **constants)
    maker.launch(
        quantize_heads_kernel,
        tasks.k,
        *inputs,
        out,
        out,
        out,
        scale,
        *numbers,
        columns,
        *tasks.cu_seqlens,
        MAX_CHUNKS=tasks.most_k,
        SCALED=True,
        **constants,
    )


def add_value_columns(
    maker: Maker, v8: Tensor, seqlens_k: Tensor | None, packed: Packed | None = None
) -> Tensor:
    """Add to the plan the launch that transposes e4m3 values (B, Sk, Hk, D), and return the result
    (B, Hk, D, Sk rounded up), with keys in the order of the e4m3 product and zeros past each
    length.

    Those of a packed batch, (Tk, Hk, D), become (1, Hk, D, columns).
    """
    v8 = _batched(v8)
    tasks = _Tasks(maker, v8, v8, v8, rotated=False, packed=packed)
    out = tasks.new_values(maker)
    bytes_in, bytes_out = v8.view(torch.uint8), out.view(torch.uint8)
    maker.launch(
        quantize_heads_kernel,
        tasks.k,
        bytes_in,
        bytes_in,
        bytes_in,
        None,
        seqlens_k,
        None,
        bytes_out,
        bytes_out,
        bytes_out,
        None,
        *_strides(bytes_in, bytes_in, bytes_in),
        *tasks.numbers(),
        tasks.columns,
        *tasks.cu_seqlens,
        MAX_CHUNKS=1,
        SCALED=False,
        **tasks.constants(_VALUES_ALONE),
    )
    return out
