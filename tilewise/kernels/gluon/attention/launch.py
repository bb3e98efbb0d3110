"""Attention on Hopper: which calls its own kernels take, and where they are launched.

The contract is that of `kernels.triton.attention.launch`. What these kernels cannot do is refused
here for both directions at once, since a call's gradient belongs to the backend that computed the
call. A call like one before is repeated as it was recorded (see `host.record`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention import split_kv as attention_few
from tilewise.kernels.gluon.backward import launch as attention_bwd_launch
from tilewise.kernels.gluon.backward.launch import variant_of, why_not_bwd
from tilewise.kernels.gluon.backward.plan import has_separate_dq
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tilewise.kernels.gluon.forward.launch import tile_config_fwd, why_not_fwd
from tilewise.kernels.gluon.host.record import Call, Key, Memory, Results
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles.paged import TileConfig

_SMS = 132  # of an H200, where no GPU is at hand
_forward, _backward = Memory(), Memory()

__all__ = ["Again", "launch_bwd", "launch_fwd", "tile_configs", "why_not"]


def why_not(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    arch = device.arch_of(torch.device("cuda"))
    if arch // 10 != 9:
        return f"needs a Hopper GPU (compute capability 9.x), got {arch // 10}.{arch % 10}"
    return why_not_fwd(spec) or why_not_bwd(spec)


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **tensors: Any
) -> tuple[Tensor, Tensor]:
    """Run the forward pass, where queries are few on the paged kernels.

    See `forward.launch.launch_fwd` for the other tensors.
    """
    inputs = [q, k, v]
    key = _key_of(q, k, v, spec) + _and_others(inputs, tensors)
    o, lse = _forward.run(key, inputs, lambda: _compute_fwd(q, k, v, spec, **tensors))
    return o, lse


class Again:
    """The forward pass of calls with this spec, of three tensors like these and no other.

    The caller sees to it that their dtypes, strides and devices are the same.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        self._key = _key_of(q, k, v, spec)
        self._call: Call | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Results | None:
        """Return o and lse; None where `launch_fwd` must find out how."""
        call = self._call or _forward.known(self._key)
        results = None if call is None else call.run((q, k, v))
        self._call = None if results is None else call  # whose memory may have forgotten it
        return results


def _key_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Key:
    key: Key = (spec, q.device, k.dtype, v.dtype, q.stride(), k.stride(), v.stride())
    return (*key, q.shape[0], k.shape[0]) if spec.is_varlen else key


def _compute_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    **tensors: Any,
) -> tuple[Tensor, Tensor]:
    if attention_few.is_faster(spec, device.sm_count_of(q.device)):
        blocks = attention_few.blocks_of(k, v)
        if blocks is not None:
            return attention_few.launch_split_kv(
                q, k, v, spec, blocks, seqlens_k=seqlens_k, sinks=sinks
            )
    return attention_fwd_launch.launch_fwd(
        q, k, v, spec, seqlens_k=seqlens_k, sinks=sinks, **tensors
    )


def launch_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    **tensors: Any,
) -> tuple[Tensor | None, ...]:
    """Run the backward pass; see `backward.launch.launch_bwd`."""

    def compute() -> tuple[Tensor | None, ...]:
        return attention_bwd_launch.launch_bwd(do, dlse, q, k, v, o, lse, spec, **tensors)

    if spec.needs_dbias:  # by Triton's launcher, which no recording sees
        return compute()
    inputs = [do, q, k, v, o, lse]
    key = _key_of(q, k, v, spec)
    key += (do.dtype, o.dtype, do.stride(), o.stride(), lse.stride())
    if dlse is not None:
        inputs.append(dlse)
        key += ("dlse", dlse.dtype, dlse.stride())
    key += _and_others(inputs, tensors)
    return _backward.run(key, inputs, compute)


def _and_others(inputs: list[Tensor], tensors: dict[str, Any]) -> Key:
    """Append what a call has beside q, k and v, and return all of it but where it lies."""
    key: Key = ()
    for name, given in tensors.items():
        if given is None:
            continue
        for x in given if isinstance(given, tuple) else (given,):
            inputs.append(x)
            key += (name, x.dtype, x.shape, x.stride())
    return key


def tile_configs(spec: AttentionSpec, arch: int = 90) -> dict[str, TileConfig]:
    """Return the tiles of each kernel that `spec` runs; warps are those that load and send, too."""
    tile, variant = tile_config_fwd(spec), variant_of(spec)
    found = {"fwd": TileConfig(tile.rows, tile.keys, 4 * tile.warpgroups + 1, tile.stages)}
    num_sms = device.sm_count_of(torch.device("cuda")) if torch.cuda.is_available() else _SMS
    if attention_few.is_faster(spec, num_sms):
        found = {"fwd": attention_few.tile_config_split_kv(spec, arch, num_sms)}
    if not has_separate_dq(spec):
        return found | {"bwd": TileConfig(variant.tile_m, variant.tile_n, 10, variant.stages)}
    dkdv = TileConfig(variant.tile_m, variant.tile_n, 9, variant.stages)
    return found | {"dkdv": dkdv, "dq": TileConfig(128, variant.tile_n, 9, variant.stages)}
