"""The signature of attention: its arguments, and how they become the registered op's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.masks import BlockMask
from tilewise.ops import checks, dispatch
from tilewise.ops.attention.dropout import Seed, philox_of
from tilewise.ops.attention.op import AttentionArguments, AttentionOptions
from tilewise.ops.call import Adapter, Tensors

# The package, by which its own frames are known.
_ROOT = __name__.removesuffix(".ops.attention.arguments")
Window = int | tuple[int | None, int | None] | None
_NO_MASK: tuple[Tensor | None, ...] = (None,) * 5


class AttentionSignature(NamedTuple):
    """The arguments of `attention` and `attention_varlen`, except those that choose the results.

    A dense call has no cu_seqlens and no max_seqlen, a packed call has no seqlens_k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    window: Window = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    mask: BlockMask | None = None
    seqlens_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = -1
    max_seqlen_k: int = -1
    dropout_p: float = 0.0
    seed: Seed = None
    deterministic: bool = False
    backend: str | None = None

    def drawn(self) -> AttentionSignature:
        """Return the same arguments with the seed as a tensor int64 (2,) on q's device.

        A seed of None is drawn from torch's generator here, once a call.
        """
        if not isinstance(self.q, Tensor):
            return self
        return self._replace(seed=philox_of(self.seed, self.q.device))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        philox: Any = self.seed if self.dropout_p else None  # checked by `bind`
        return (
            self.q,
            self.k,
            self.v,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqlens_k,
            self.bias,
            self.alibi_slopes,
            self.sinks,
            philox,
            *(_NO_MASK if self.mask is None else self.mask.tensors()),
        )

    def numbers(self) -> tuple[object, ...]:
        """Return the arguments, no tensors, that decide how the call is checked or computed.

        The shape of a mask and torch's switch for deterministic algorithms are among them.
        """
        window, mask, slopes = self.window, self.mask, self.alibi_slopes
        bounds = window if isinstance(window, tuple) else (window,)
        return (
            self.causal,
            self.softmax_scale,
            self.softcap,
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.dropout_p,
            self.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            self.backend,
            slopes is not None and slopes.requires_grad,
            None if mask is None else (mask.shape, mask.device),
            isinstance(window, tuple),
            *bounds,
        )

    def bind(self) -> AttentionArguments:
        """Check the arguments and return those of the registered op, cast as torch.autocast asks.

        Raises ValueError or TypeError where one breaks a rule of `attention`.
        """
        self.check_types()
        q, k, v = autocast(*self[:3])
        given = self._replace(q=q, k=k, v=v)
        return AttentionArguments(q, k, v, given.options(checks.check_float))

    def adapter(self) -> Adapter:
        """Return a function that makes the tensors of the registered op out of `tensors()`."""
        return _as_kernels_read

    def check_types(self) -> None:
        """Raise TypeError for an argument of another type than a tensor, or a mask that is none.

        Optional tensors may be None. If any argument of a packed call is given, both cu_seqlens
        must be tensors.
        """
        for name in _REQUIRED:
            checks.check_type(name, getattr(self, name), Tensor)
        for name in _OPTIONAL:
            given = getattr(self, name)
            if given is not None:
                checks.check_type(name, given, Tensor)
        # Field by field: torch 2.11's torch.compile compares no traced tensor with None.
        packs = self.cu_seqlens_q is not None or self.cu_seqlens_k is not None
        if packs or (self.max_seqlen_q, self.max_seqlen_k) != (-1, -1):
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                checks.check_type(name, getattr(self, name), Tensor)
        check_mask_type(self.mask)

    def options(self, check_dtype: Callable[[str, Tensor], None]) -> AttentionOptions:
        """Check the arguments' shapes and numbers; return all but q, k and v as kernels read them.

        The arguments' types were checked before. Defaults are filled in: the softmax scale, the
        bounds of the window, the longest sequences. Raises ValueError or TypeError where an
        argument breaks a rule; tensors' values are not read.

        Args:
            check_dtype: a function that is called with "q" and q, and raises an error if this
                operation does not take its dtype.
        """
        q, k, v = self[:3]
        is_packed = self.cu_seqlens_q is not None
        for name in _REQUIRED:
            checks.check_dims(
                name, getattr(self, name), "(T, H, D)" if is_packed else "(B, S, H, D)"
            )
        batch, longest = self._check_packed() if is_packed else self._check_dense()
        check_dtype("q", q)
        check_alike(q, k, v)
        if not (is_packed or torch.compiler.is_compiling()):
            _tell_of_layout(q, k)
        if self.mask is not None:
            self._check_mask(self.mask, batch, longest)
        num_q_heads = q.shape[-2]
        checks.check_bias("bias", self.bias, q, (batch, num_q_heads, *longest))
        checks.check_alibi(self.alibi_slopes, batch, num_q_heads, q.device)
        checks.check_per_head("sinks", self.sinks, num_q_heads, q.device)
        checks.check_softcap(self.softcap)
        dispatch.check_backend_name(self.backend)
        left, right = checks.window_bounds(self.causal, self.window)
        checks.check_dropout(self.dropout_p)
        given = self.drawn() if self.dropout_p > 0 else self
        read: Any = _as_kernels_read(given.tensors())
        make: Callable[..., AttentionOptions] = AttentionOptions
        return make(
            *read[3:],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            window_left=left,
            window_right=right,
            softmax_scale=checks.scale_of(self.softmax_scale, q.shape[-1]),
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled(),
            backend=self.backend,
        )

    def _check_dense(self) -> tuple[int, tuple[int, int]]:
        """Return the number of sequences, and (Sq, Sk), the tokens of each in q and in k.

        Raises ValueError if the batches of q and k differ; seqlens_k is checked if given.
        """
        batch = self.q.shape[0]
        if self.k.shape[0] != batch:
            raise ValueError(f"k must have the batch of q, {batch}, got {self.k.shape[0]}")
        if self.seqlens_k is not None:
            checks.check_integers("seqlens_k", self.seqlens_k, (batch,), self.q.device)
        return batch, (self.q.shape[1], self.k.shape[1])

    def _check_packed(self) -> tuple[int, tuple[int, int]]:
        """Check cu_seqlens and max_seqlen; return B and (max_seqlen_q, max_seqlen_k).

        B is the number of sequences. The values in cu_seqlens_q and cu_seqlens_k are not read.

        Raises:
            TypeError: cu_seqlens_q or cu_seqlens_k is no tensor of int32 or int64, or a max_seqlen
                is no integer.
            ValueError: cu_seqlens_q or cu_seqlens_k has not the shape (B + 1,) or is not on q's
                device, or a max_seqlen is negative.
        """
        edges = self.cu_seqlens_q
        assert edges is not None
        checks.check_dims("cu_seqlens_q", edges, "(B + 1)")
        count = edges.shape[0]
        if count < 1:
            raise ValueError("cu_seqlens_q must hold at least the leading 0, got an empty tensor")
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            checks.check_integers(name, getattr(self, name), (count,), self.q.device)
        longest_q = checks.check_length("max_seqlen_q", self.max_seqlen_q)
        return count - 1, (longest_q, checks.check_length("max_seqlen_k", self.max_seqlen_k))

    def _check_mask(self, mask: BlockMask, batch: int, wanted: tuple[int, int]) -> None:
        covered, num_q_heads = mask.shape[2:], self.q.shape[-2]
        if self.cu_seqlens_q is None:
            if covered != wanted:
                raise ValueError(f"mask must cover {wanted} queries and keys, got {covered}")
        elif covered[0] < wanted[0] or covered[1] < wanted[1]:
            raise ValueError(f"mask must cover at least {wanted} queries and keys, got {covered}")
        if mask.device != self.q.device:
            raise ValueError(
                f"mask must be on {self.q.device}, got {mask.device}; see mask.to(device)"
            )
        if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, num_q_heads):
            raise ValueError(
                f"mask must be for 1 or {batch} sequences and 1 or {num_q_heads} query heads, "
                f"got {mask.shape[0]} and {mask.shape[1]}"
            )


_REQUIRED = ("q", "k", "v")
_OPTIONAL = ("bias", "alibi_slopes", "sinks", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k")
_LENGTHS, _PER_HEAD = slice(3, 6), slice(7, 9)  # edges and lengths, slopes and sinks


def _as_kernels_read(tensors: Tensors) -> Tensors:
    """Return the tensors of a call with the dtypes that kernels read, in the same order.

    Edges and lengths become int32, slopes and sinks float32 (float64 beside float64 queries);
    others are passed on.
    """
    q = tensors[0]
    assert q is not None
    return (
        *tensors[: _LENGTHS.start],
        *[None if x is None else checks.as_int32(x) for x in tensors[_LENGTHS]],
        *tensors[_LENGTHS.stop : _PER_HEAD.start],
        *[wide(x, q) for x in tensors[_PER_HEAD]],
        *tensors[_PER_HEAD.stop :],
    )


def _tell_of_layout(q: Tensor, k: Tensor) -> None:
    """Warn if q and k have more heads than tokens: they may be in torch's layout (B, H, S, D).

    Read as (B, S, H, D) such tensors give wrong values of the right shape. Calls from modules of
    this package do not warn.
    """
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    if not (heads_q == heads_k > max(seqlen_q, seqlen_k) and min(seqlen_q, seqlen_k) > 1):
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{_ROOT}.ops."):
        level, frame = level + 1, frame.f_back
    if frame.f_globals["__name__"].startswith(f"{_ROOT}."):
        return
    warnings.warn(
        # Without numbers, so that Python shows the text once for each line of a caller.
        "q and k, read as (B, S, H, D), have more heads than tokens. If they are torch's "
        "(B, H, S, D), give q.transpose(1, 2), k and v likewise, and take o.transpose(1, 2); "
        "tilewise.integrations.torch_sdpa does.",
        UserWarning,
        stacklevel=level,
    )


def check_mask_type(mask: BlockMask | None) -> None:
    """Raise TypeError unless mask is a BlockMask or None."""
    if mask is not None and not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask must be a BlockMask, as masks.dense(visible) makes it, got {type(mask).__name__}"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v cast to the dtype of torch.autocast, as its matrix products do.

    Float64 and integer tensors stay as they are, and so do all where autocast is off.
    """
    device_type = q.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    casts = [x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)]
    q, k, v = (x.to(dtype) if cast else x for x, cast in zip((q, k, v), casts, strict=True))
    return q, k, v


def wide(per_head: Tensor | None, q: Tensor) -> Tensor | None:
    """Return numbers of each head, contiguous, as float32, or float64 if q is float64.

    It returns None for None.
    """
    if per_head is None:
        return None
    # Not promote_types, which refuses 8-bit queries.
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return per_head.to(dtype).contiguous()


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless k and v have q's dtype, device and head dim, and q's heads a multiple of theirs.

    k and v must have the same shape but for v's head dim, and all last dims must be contiguous. The
    dtype itself is not checked. The error is TypeError for a dtype, otherwise ValueError.
    """
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(
            f"head dims must be at least 1, got {q.shape[-1]} for q and {v.shape[-1]} for v"
        )
    for name, tensor in (("k", k), ("v", v)):
        checks.check_same_dtype(name, tensor, q.dtype)
        checks.check_device(name, tensor, q.device)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for its head dim, {tuple(k.shape[:-1])}, "
            f"got {tuple(v.shape[:-1])}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_last_dim_contiguous(name, tensor)
    checks.check_heads(q.shape[-2], k.shape[-2])
