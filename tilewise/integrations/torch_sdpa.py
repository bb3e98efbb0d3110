"""torch's scaled_dot_product_attention on tilewise's kernels, and in the place of torch's own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from tilewise.errors import UnsupportedError
from tilewise.ops import attention, checks
from tilewise.ops.attention.arguments import autocast
from tilewise.ops.derivatives import transforms_active

__all__ = ["replace_sdpa", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch.nn.functional.scaled_dot_product_attention does, in O(N) memory.

    Everything means what it means in torch: is_causal is aligned to the top left corner, so query i
    sees keys 0 ... i whatever the lengths are; dropout is applied whenever dropout_p > 0, with a
    seed from torch's generator of the device. A row that sees no key gives 0 and zero gradients,
    as torch's fused kernels do; formulas written with softmax give NaN there. Every dimension may
    be 0; with E = 0 every product query . key is 0.

    Args:
        query: (..., Hq, L, E), two dims or more; any number of batch dims.
        key, value: (..., H, S, E) and (..., H, S, Ev). Leading dims broadcast.
        attn_mask: broadcastable to (..., Hq, L, S). bool, True where a key takes part; or float, in
            query's dtype or float32, added to the logits, with a gradient; or a CausalBias of
            torch.nn.attention.bias. The gradient of an expanded mask has the expanded size: where
            memory counts, give the mask before it is expanded.
        dropout_p: probability of dropping a probability, in [0, 1].
        is_causal: True to hide the keys behind the query; excludes attn_mask.
        scale: the factor of query . key; E ** -0.5 when None.
        enable_gqa: True if the heads of key and of value may divide those of query.

    Returns:
        (..., Hq, L, Ev), in query's dtype, contiguous; where it has query's shape and four dims,
        these lie in memory in the order of query's, as torch's fused kernels have it.

    Raises:
        RuntimeError: an argument breaks a rule above, as in torch; the message names it. A
            CausalBias with is_causal is a ValueError there and here.
        UnsupportedError: a nested tensor, or a call that no backend can run.

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention.

    Example:
        >>> q = k = v = torch.randn(2, 8, 128, 64)
        >>> o = scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    _check(query, key, value)
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p must lie in [0, 1], got {dropout_p}")
    if is_causal and attn_mask is not None:
        error = ValueError if _is_causal_bias(attn_mask) else RuntimeError
        raise error("attn_mask must be None when is_causal is set, got both")
    dims = max(query.dim(), key.dim(), value.dim())
    q, k, v = _broadcast(*autocast(query, key, value), enable_gqa)
    batch, num_q_heads, seqlen_q = q.shape[:-3], q.shape[-3], q.shape[-2]
    seqlen_k, v_head_dim = k.shape[-2], v.shape[-1]
    full = (*batch, num_q_heads, seqlen_q, seqlen_k)
    rule = _rule(attn_mask, is_causal, full[-dims:], q)
    shape = (*batch, num_q_heads, seqlen_q, v_head_dim)
    if 0 in shape:
        return _empty(shape[-dims:], q, k, v, rule.bias)
    if q.shape[-1] == 0:
        q, k = (functional.pad(x, (0, _CHANNELS)) for x in (q, k))
        scale = 1.0  # all products are 0
    if rule.num_keys < seqlen_k:
        k, v = k[..., : rule.num_keys, :], v[..., : rule.num_keys, :]
    o = attention(
        *(_dense(x) for x in (q, k, v)),
        causal=rule.causal,
        window=(None, rule.right),
        softmax_scale=scale,
        bias=rule.bias,
        dropout_p=dropout_p,
    ).transpose(1, 2)
    return _laid_out_as(query, o.reshape(shape[-dims:]))


_HALF = (torch.float16, torch.bfloat16)
_CHANNELS = 8  # channels of zeros that replace a head dim of 0; every kernel supports 8


def _empty(shape: tuple[int, ...], *inputs: Tensor | None) -> Tensor:
    """Return zeros of `shape`, which has no elements, in the first input's dtype; all inputs get
    zero gradients."""
    given = [x for x in inputs if x is not None]
    zero = given[0].new_zeros(shape)
    return sum((0 * x.sum().to(zero.dtype) for x in given), start=zero)


# Numbers of dims for which torch lays out its result as the query: from 2.14 on also 3.
_LAYOUT_KEPT = (3, 4) if TorchVersion(torch.__version__) >= "2.14" else (4,)


def _laid_out_as(query: Tensor, o: Tensor) -> Tensor:
    """Return o with query's order of dimensions in memory, if the shapes are equal, else
    contiguous.

    The order is kept for four dims (from torch 2.14 on also three), as torch does.
    """
    strides = query.stride()
    dims = list(range(o.dim()))
    is_kept = o.dim() in _LAYOUT_KEPT and o.shape == query.shape
    if is_kept and strides[-1] == 1 and 0 not in strides:
        dims[:-1] = sorted(dims[:-1], key=lambda dim: -strides[dim])
    places = [dims.index(dim) for dim in range(o.dim())]
    return o.permute(dims).contiguous().permute(places)


class _Rule(NamedTuple):
    """The mask of a call in the terms of `attention`: `num_keys` leading keys, `causal` aligned to
    the bottom right, `right` keys beyond the diagonal (None is all), and an additive `bias`."""

    num_keys: int
    causal: bool = False
    right: int | None = None
    bias: Tensor | None = None


def _is_causal_bias(attn_mask: Any) -> bool:
    if attn_mask is None or type(attn_mask) in (Tensor, torch.nn.Parameter):
        return False
    # Not at the top: the module imports torch's compiler.
    from torch.nn.attention.bias import CausalBias

    return isinstance(attn_mask, CausalBias)


def _rule(attn_mask: Any, is_causal: bool, full: tuple[int, ...], like: Tensor) -> _Rule:
    seqlen_q, seqlen_k = full[-2:]
    if _is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalVariant

        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (seqlen_q, seqlen_k):
            raise RuntimeError(
                f"attn_mask must be a CausalBias of lengths {(seqlen_q, seqlen_k)}, "
                f"got {(attn_mask.seq_len_q, attn_mask.seq_len_kv)}"
            )
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            return _Rule(seqlen_k, causal=True)
        attn_mask, is_causal = None, True
    if attn_mask is not None:
        return _Rule(seqlen_k, bias=_bias(attn_mask, full, like))
    if not is_causal:
        return _Rule(seqlen_k)
    # attention() aligns to the bottom right: with as many keys as queries both corners are the
    # same, and with fewer the diagonal is moved to the right.
    if seqlen_q <= seqlen_k:
        return _Rule(seqlen_q, causal=True)
    return _Rule(seqlen_k, right=seqlen_q - seqlen_k)


def _bias(attn_mask: Tensor, full: tuple[int, ...], like: Tensor) -> Tensor:
    """Return attn_mask as a float bias that broadcasts to (B, Hq, L, S); False becomes -inf.

    `full` is the shape of the logits with all batch dims; `like` is the query. Raises RuntimeError
    if the mask does not fit.
    """
    if attn_mask.device != like.device:
        raise RuntimeError(f"attn_mask must be on {like.device}, got {attn_mask.device}")
    if torch.is_autocast_enabled(like.device.type) and attn_mask.dtype in _HALF:
        attn_mask = attn_mask.to(like.dtype)
    if attn_mask.dtype not in (torch.bool, torch.float32, like.dtype):
        raise RuntimeError(
            f"attn_mask must have dtype bool, float32 or that of query, got {attn_mask.dtype}"
        )
    fits = attn_mask.dim() <= len(full) and all(
        have in (1, want)
        for have, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise RuntimeError(f"attn_mask must broadcast to {full}, got {tuple(attn_mask.shape)}")
    # Each element of an expanded mask has a gradient of its own.
    if not (attn_mask.requires_grad or transforms_active()):
        for dim, (size, stride) in enumerate(zip(attn_mask.shape, attn_mask.stride(), strict=True)):
            if stride == 0 and size > 1:  # one copy of an expanded mask is enough
                attn_mask = attn_mask.narrow(dim, 0, 1)
    if len(full) > 4:  # several batch dims, which `attention` takes as one
        attn_mask = attn_mask[(None,) * (len(full) - attn_mask.dim())]
        if attn_mask.shape[:-3].numel() != 1:
            attn_mask = attn_mask.expand(*full[:-3], *attn_mask.shape[-3:])
        attn_mask = attn_mask.flatten(0, -4)
    if attn_mask.dtype != torch.bool:
        return attn_mask
    return attn_mask.new_zeros(attn_mask.shape, dtype=like.dtype).masked_fill(
        ~attn_mask, float("-inf")
    )


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = (("query", query), ("key", key), ("value", value))
    for name, tensor in tensors:
        if tensor.is_nested:
            raise UnsupportedError(
                f"{name} must not be a nested tensor; see tilewise.attention_varlen, got one"
            )
        if tensor.dim() < 2:
            raise RuntimeError(f"{name} must have at least 2 dims, got {tensor.dim()}")
        if not tensor.is_floating_point():
            raise RuntimeError(f"{name} must be a float tensor, got {tensor.dtype}")
        if tensor.device != query.device:
            raise RuntimeError(f"{name} must be on {query.device}, got {tensor.device}")
    same = autocast(query, key, value)
    for (name, _), tensor in zip(tensors, same, strict=True):
        if tensor.dtype != same[0].dtype:
            raise RuntimeError(f"{name} must have dtype {same[0].dtype}, got {tensor.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise RuntimeError(
            f"key must have the head dim of query, {query.shape[-1]}, got {key.shape[-1]}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(
            f"value must have as many keys as key, {key.shape[-2]}, got {value.shape[-2]}"
        )


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value expanded to the same batch dims, and query to all heads.

    key and value get one number of heads, which divides that of query. With enable_gqa they may
    have any such numbers, otherwise 1 or that of query.

    Raises:
        RuntimeError: heads or batch dims do not fit.
    """
    q, k, v = (x.unsqueeze(0) if x.dim() == 2 else x for x in (query, key, value))
    heads = (q.shape[-3], k.shape[-3], v.shape[-3])
    if enable_gqa:
        num_heads = heads[0]
        for name, have in (("key", heads[1]), ("value", heads[2])):
            if num_heads % have if have else num_heads:
                raise RuntimeError(f"{name} must have heads that divide {num_heads}, got {have}")
    else:
        num_heads = max(heads) if min(heads) else 0
        if any(have not in (1, num_heads) for have in heads):
            raise RuntimeError(
                "query, key and value must have the same number of heads, or enable_gqa, "
                f"got {heads[0]}, {heads[1]} and {heads[2]}"
            )
        q = q.expand(*q.shape[:-3], num_heads, *q.shape[-2:])
    if heads[1] != heads[2]:  # one number for both: all of query's
        k, v = (x.repeat_interleave(num_heads // x.shape[-3], -3) for x in (k, v))
    try:
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError as error:
        shapes = [tuple(x.shape[:-3]) for x in (q, k, v)]
        raise RuntimeError(
            f"query, key and value must have batch dims that broadcast, got {shapes}"
        ) from error
    return (
        q.expand(*batch, *q.shape[-3:]),
        k.expand(*batch, *k.shape[-3:]),
        v.expand(*batch, *v.shape[-3:]),
    )


def _dense(x: Tensor) -> Tensor:
    """Return x (..., H, S, D) as (B, S, H, D), all batch dims in one, with the last dim
    contiguous."""
    x = x.reshape(x.shape[:-3].numel(), *x.shape[-3:]).transpose(1, 2)
    return checks.with_packed_rows(x)


@functools.cache
def _let_scripts_call() -> torch.library.Library | None:
    """Register `scaled_dot_product_attention` of this module as an operator that TorchScript can
    call.

    Returns the library, which must stay alive; None in a torch without TorchScript's table of
    builtins. It runs once in a process.
    """
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if register is None:
        return None
    library = torch.library.Library("tilewise_torch", "DEF")
    library.define(
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
        "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
        "float? scale=None, bool enable_gqa=False) -> Tensor"
    )
    name = scaled_dot_product_attention.__name__
    library.impl(name, scaled_dot_product_attention, "CompositeImplicitAutograd")
    register(scaled_dot_product_attention, f"tilewise_torch::{name}")
    return library


_lock = threading.Lock()
_depth = 0
_saved: tuple[Any, bool] = (None, True)


@contextmanager
def replace_sdpa() -> Iterator[None]:
    """Replace torch.nn.functional.scaled_dot_product_attention by tilewise's inside the block.

    The replacement affects all callers that look the name up when they call:
    F.scaled_dot_product_attention(), torch.nn.MultiheadAttention (with need_weights=False) and the
    layers of torch.nn.Transformer, whose own fused inference path is disabled inside. Functions
    that torch.compile has compiled outside are compiled again; functions that torch.jit.script
    compiles inside call tilewise for ever. A module that did `from torch.nn.functional import
    scaled_dot_product_attention` before, and direct calls of torch.ops.aten, are not affected;
    `torch_flash.register_flash_attention` reaches those.

    The name belongs to the process, so every thread sees the replacement while any thread is inside
    a block. Blocks may be nested, and may overlap between threads: the last one to end restores
    torch's function, also after an exception.

    Example:
        >>> with replace_sdpa():
        ...     loss = model(batch).sum()
    """
    global _depth, _saved
    place: Any = functional
    with _lock:
        if _depth == 0:
            _saved = (
                place.scaled_dot_product_attention,
                torch.backends.mha.get_fastpath_enabled(),
            )
            _let_scripts_call()
            place.scaled_dot_product_attention = scaled_dot_product_attention
            torch.backends.mha.set_fastpath_enabled(False)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                place.scaled_dot_product_attention = _saved[0]
                torch.backends.mha.set_fastpath_enabled(_saved[1])
                _saved = (None, True)
