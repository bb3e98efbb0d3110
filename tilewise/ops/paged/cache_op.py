"""The registered boundary of the ops that fill a paged cache; cache.py has validated."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import dispatch
from tilewise.ops.library import refuse_vmap, register


def _module(op: str, cache: Tensor, backend: str | None) -> ModuleType:
    name = dispatch.choose(op, ElementSpec(cache.device.type, cache.dtype), backend)
    return dispatch.kernel_module(op, name)


def _write_kernel(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    backend: str | None,
) -> None:
    write = _module("cache_ops", k_cache, backend).write_kv_cache
    write(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _rope_write_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    interleaved: bool,
    backend: str | None,
) -> Tensor:
    rotated: Tensor = _module("rope_write", k_cache, backend).launch(
        q,
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return rotated


def _rotated_like(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _copy_kernel(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_pairs: Tensor,
    backend: str | None,
) -> None:
    copy = _module("cache_ops", k_cache, backend).copy_blocks
    copy(k_cache, v_cache, block_pairs, k_scale=k_scale, v_scale=v_scale)


def _no_output(*_: Any) -> None:
    return None


write_kv_cache = register(
    "write_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, str? backend) -> ()",
    _write_kernel,
    _no_output,
)
rope_write_kv_cache = register(
    "rope_write_kv_cache(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, Tensor cos, Tensor sin, "
    "Tensor? q_norm, Tensor? k_norm, float norm_eps, bool interleaved, str? backend) -> Tensor",
    _rope_write_kernel,
    _rotated_like,
)
copy_blocks = register(
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor block_pairs, str? backend) -> ()",
    _copy_kernel,
    _no_output,
)
for _name in ("write_kv_cache", "rope_write_kv_cache", "copy_blocks"):
    refuse_vmap(_name)
