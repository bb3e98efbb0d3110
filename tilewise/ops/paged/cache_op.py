"""The registered boundary of the ops that fill a paged cache; cache.py has validated."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import dispatch
from tilewise.ops.library import refuse_vmap
from tilewise.ops.step import register_step

WRITE, ROPE_WRITE, COPY = "write_kv_cache", "rope_write_kv_cache", "copy_blocks"


def _module(op: str, cache: Tensor, backend: str | None) -> ModuleType:
    name = dispatch.choose(op, ElementSpec(cache.device.type, cache.dtype), backend)
    return dispatch.kernel_module(op, name)


def _chosen_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    backend: str | None,
) -> partial[None]:
    write = _module("cache_ops", k_cache, backend).write_kv_cache
    return partial(write, k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _chosen_rope_write(
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
) -> partial[Tensor]:
    return partial(
        _module("rope_write", k_cache, backend).launch,
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


def _rotated_like(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _chosen_copy(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_pairs: Tensor,
    backend: str | None,
) -> partial[None]:
    copy = _module("cache_ops", k_cache, backend).copy_blocks
    return partial(copy, k_cache, v_cache, block_pairs, k_scale=k_scale, v_scale=v_scale)


def _no_output(*_: Any) -> None:
    return None


register_step(
    "write_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, str? backend) -> ()",
    _chosen_write,
    _no_output,
)
register_step(
    "rope_write_kv_cache(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, Tensor cos, Tensor sin, "
    "Tensor? q_norm, Tensor? k_norm, float norm_eps, bool interleaved, str? backend) -> Tensor",
    _chosen_rope_write,
    _rotated_like,
)
register_step(
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor block_pairs, str? backend) -> ()",
    _chosen_copy,
    _no_output,
)
for _name in (WRITE, ROPE_WRITE, COPY):
    refuse_vmap(_name)
