"""The signature of paged attention: its arguments, and how they become the registered op's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.spec import FOUR_BITS, row_width
from tilewise.ops import checks, dispatch
from tilewise.ops.call import Adapter, Tensors
from tilewise.ops.paged.op import PagedOptions
from tilewise.ops.paged.shared_prefixes import SharedPrefixes

QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
_SCALED_DTYPES = (*QUANTISED_DTYPES, FOUR_BITS)


class PagedSignature(NamedTuple):
    """The arguments of `paged_attention`, except out and return_lse.

    A plan is present as the two things that a call reads of it: `records`, the tensor of work
    items, and `plan_for`, the text of `describe_plan`.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    tree_mask: Tensor | None = None
    records: Tensor | None = None
    plan_for: str | None = None
    softmax_scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    batch_invariant: bool = False
    backend: str | None = None
    shared: SharedPrefixes | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        required: Any = self[:_LONGEST]
        optional: Any = self[_LONGEST + 1 : _NUMBERS]
        if self.shared is None:
            return (*required, *optional)
        return (*required, *optional, *self.shared.tensors)

    def numbers(self) -> tuple[object, ...]:
        """Return the arguments, no tensors, that decide how the call is checked or computed.

        Whether attention kernels begin early counts among them.
        """
        given = (self.max_seqlen_q, early.mode("attention"), *self[_NUMBERS:_SHARED])
        if self.shared is None:
            return given
        return (*given, self.shared.block_size, tuple(self.shared.max_rows))

    def bind(self) -> PagedOptions:
        """Check the arguments and return those of the registered op.

        Raises ValueError or TypeError where one breaks a rule of `paged_attention`.
        """
        q, k_cache, shared = self.q, self.k_cache, self.shared
        checks.check_float("q", q)
        checks.check_dims("q", q, "(T, Hq, D)")
        check_cache_pair(k_cache, self.v_cache)
        check_scales(k_cache, self.k_scale, self.v_scale)
        for name in ("k_cache", "v_cache"):
            checks.check_device(name, getattr(self, name), q.device)
        num_q_heads, head_dim = q.shape[1:]
        if row_width(k_cache) != head_dim:
            raise ValueError(
                f"k_cache must have the head dim of q, {head_dim}, got {row_width(k_cache)}"
            )
        checks.check_heads(num_q_heads, k_cache.shape[2])
        checks.check_last_dim_contiguous("q", q)
        checks.check_dims("block_table", self.block_table, "(B, max_blocks)")
        num_seqs = self.block_table.shape[0]
        for name, shape in (
            ("block_table", tuple(self.block_table.shape)),
            ("seqlens_k", (num_seqs,)),
            ("cu_seqlens_q", (num_seqs + 1,)),
        ):
            checks.check_integers(name, getattr(self, name), shape, q.device)
        max_seqlen_q = checks.check_length("max_seqlen_q", self.max_seqlen_q)
        window_left = -1
        if self.window is not None:
            window = checks.host_int("window", self.window, "None or an integer")
            window_left, _ = checks.window_bounds(True, window)
        checks.check_softcap(self.softcap)
        checks.check_per_head("alibi_slopes", self.alibi_slopes, num_q_heads, q.device)
        checks.check_per_head("sinks", self.sinks, num_q_heads, q.device)
        if self.tree_mask is not None:
            _check_tree_mask(self.tree_mask, q, max_seqlen_q)
        if shared is not None:
            checks.check_type("shared", shared, SharedPrefixes)
            checks.check_int32("shared", shared.skipped, (num_seqs,), q.device)
            _check_made_for(shared, k_cache.shape[1], q.shape[0])
            for name in ("window", "alibi_slopes"):
                if getattr(self, name) is not None:  # a pass over a group knows no distances
                    raise ValueError(f"{name} must be None with shared prefixes, got one")
            if self.batch_invariant:  # a row's sum over the prefix would be cut as its group is
                raise ValueError("shared must be None with batch_invariant, got shared prefixes")
        dispatch.check_backend_name(self.backend)
        if self.records is not None:
            checks.check_device("plan", self.records, q.device)
        read: Any = _as_kernels_read(self.tensors())
        make: Callable[..., PagedOptions] = PagedOptions
        return make(
            *read[:_RECORDS],
            shared=[] if shared is None else shared.tensors,
            shared_rows=[] if shared is None else shared.max_rows,
            max_seqlen_q=max_seqlen_q,
            window_left=window_left,
            softmax_scale=checks.scale_of(self.softmax_scale, head_dim),
            softcap=self.softcap,
            batch_invariant=self.batch_invariant,
            backend=self.backend,
            plan=self.records,
            plan_for=self.plan_for,
        )

    def adapter(self) -> Adapter:
        """Return a function that makes the tensors of the registered op out of `tensors()`."""
        return _as_kernels_read


_LONGEST, _NUMBERS, _SHARED = map(
    PagedSignature._fields.index, ("max_seqlen_q", "plan_for", "shared")
)
# Among the tensors: tables and lengths, slopes and sinks, the plan's records.
_INTEGERS, _PER_HEAD, _RECORDS = slice(3, 6), slice(6, 8), 11


def _as_kernels_read(tensors: Tensors) -> Tensors:
    """Return int32 tables and lengths and float32 slopes and sinks, contiguous; others as given."""
    return (
        *tensors[: _INTEGERS.start],
        *[_as_int32(x) for x in tensors[_INTEGERS]],
        *[None if x is None else x.float().contiguous() for x in tensors[_PER_HEAD]],
        *tensors[_PER_HEAD.stop :],
    )


def _as_int32(x: Tensor | None) -> Tensor:
    assert x is not None
    return checks.with_packed_rows(checks.as_int32(x))


def _check_tree_mask(tree_mask: Tensor, q: Tensor, max_seqlen_q: int) -> None:
    checks.check_same_dtype("tree_mask", tree_mask, torch.bool)
    checks.check_device("tree_mask", tree_mask, q.device)
    checks.check_dims("tree_mask", tree_mask, "(T, max_seqlen_q)")
    checks.check_last_dim_contiguous("tree_mask", tree_mask)
    if tree_mask.shape[0] != q.shape[0] or tree_mask.shape[1] < max_seqlen_q:
        raise ValueError(
            f"tree_mask must have {q.shape[0]} rows and at least {max_seqlen_q} columns, "
            f"got shape {tuple(tree_mask.shape)}"
        )


def _check_made_for(shared: SharedPrefixes, block_size: int, num_tokens: int) -> None:
    if shared.block_size != block_size:
        raise ValueError(
            f"shared must be for blocks of {block_size} tokens, got some of {shared.block_size}"
        )
    most = max(level.rows.shape[0] for level in shared.levels)
    if most > num_tokens:
        raise ValueError(f"shared must be for at most {num_tokens} rows, got {most}")


def check_cache_pair(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless both caches are (num_blocks, block_size, Hk, D) with a dtype that caches have.

    Blocks, heads, dtype and device must be the same, and last dims contiguous. The error is
    TypeError for a dtype, otherwise ValueError.
    """
    layout = "(num_blocks, block_size, Hk, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache_dtype(name, cache)
        checks.check_dims(name, cache, layout)
        checks.check_last_dim_contiguous(name, cache)
    checks.check_same_dtype("v_cache", v_cache, k_cache.dtype)
    checks.check_device("v_cache", v_cache, k_cache.device)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache must have the blocks and heads of k_cache, {tuple(k_cache.shape[:3])}, "
            f"got {tuple(v_cache.shape[:3])}"
        )


def _check_cache_dtype(name: str, cache: Tensor) -> None:
    known = (*checks.FLOAT_DTYPES, *_SCALED_DTYPES)
    if cache.dtype not in known:
        wanted = ", ".join(map(checks.dtype_name, known))
        raise TypeError(f"{name} must be one of {wanted}, got {checks.dtype_name(cache.dtype)}")


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise unless the scales fit the dtype of a cache.

    A cache of 8 bits has both scales, float32, both of each token and head (num_blocks, block_size,
    Hk) or both of each head (Hk,); one of 4 bits has both of the first kind; any other has none.
    The error is TypeError for a dtype, otherwise ValueError.
    """
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    dtype = checks.dtype_name(k_cache.dtype)
    shapes: list[tuple[int, ...]] = [(num_blocks, block_size, num_kv_heads)]
    if k_cache.dtype != FOUR_BITS:
        shapes.append((num_kv_heads,))
    kinds = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype not in _SCALED_DTYPES:
            if scale is not None:
                raise ValueError(f"{name} must be None for a {dtype} cache, got a tensor")
            continue
        if scale is None:
            raise ValueError(f"{name} must be given for a {dtype} cache, got None")
        checks.check_same_dtype(name, scale, torch.float32)
        checks.check_device(name, scale, k_cache.device)
        kinds.append(scale.dim())
        if tuple(scale.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(scale.shape)}")
    if len(set(kinds)) > 1:
        raise ValueError(
            "v_scale must be of the kind of k_scale, each token's or each head's, got "
            f"{kinds[1]} and {kinds[0]} dimensions"
        )
