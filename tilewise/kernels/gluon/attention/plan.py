"""Attention in Gluon: which calls its kernels take on Hopper and where mma.sync is the product.

The contract is that of `kernels.triton.attention.plan`. What these kernels cannot do is refused
here for both directions at once, since a call's gradient belongs to the backend that computed the
call.
"""

from __future__ import annotations

import functools

import torch

from tilewise.kernels import device
from tilewise.kernels.gluon.attention import split_kv
from tilewise.kernels.gluon.backward.launch import add_bwd, variant_of, why_not_bwd
from tilewise.kernels.gluon.backward.plan import has_separate_dq
from tilewise.kernels.gluon.forward.launch import add_fwd, tile_config_fwd, why_not_fwd
from tilewise.kernels.gluon.mma import plan as mma
from tilewise.kernels.gluon.wide import plan as wide
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import GRADIENT_TENSORS, Call, LaunchPlan, Refusal
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.kernels.triton.attention import plan as portable

__all__ = ["plan_bwd", "plan_fwd"]

_SEPARATE_ROWS = 128  # of a tile of dq where it has a kernel of its own


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan of the forward pass, or why Hopper's kernels cannot run it.

    Calls of few queries run on the paged kernels where those are faster. The results are o, lse
    and, where wanted, row maxima.
    """
    reason = _why_not(call.spec)
    return Refusal(reason) if reason is not None else made_fwd(call)


def plan_bwd(call: Call) -> LaunchPlan:
    """Return the plan of the backward pass of a call whose forward pass `plan_fwd` took.

    Its results are dq, dk, dv, dbias and dsinks, the last two None where they are not wanted. Of
    heads of more than 256 channels the kernel by mma.sync makes them on Hopper, too.
    """
    is_mma = _is_mma(call.spec) or wide.is_wide(call.spec)
    arch = device.arch_of(call.device)
    if is_mma and mma.why_not_bwd(call.spec) is not None:
        return portable.plan_bwd(call)
    spec, maker = call.spec, Maker(call, GRADIENT_TENSORS)
    do, dlse, o, lse = maker.inputs[:4]
    assert do is not None
    assert o is not None
    assert lse is not None
    if is_mma:
        gradients = mma.add_bwd(maker, spec, do, dlse, o, lse, maker.tensors)
        return maker.finish(gradients, functools.partial(_tiles_mma_bwd, spec, arch))
    results = add_bwd(maker, spec, do, dlse, o, lse, maker.tensors)
    return maker.finish(results, functools.partial(_tiles_bwd, spec))


def _is_mma(spec: AttentionSpec) -> bool:
    """Whether a call is for CUDA and the GPU at hand is one whose kernels multiply by mma.sync."""
    where = spec.device_type == "cuda" and torch.cuda.is_available()
    return where and mma.is_served(device.arch_of(torch.device("cuda")))


def _why_not(spec: AttentionSpec) -> str | None:
    if _is_mma(spec):
        return mma.why_not_fwd(spec)
    generations = tuple(sorted((9, *mma.GENERATIONS)))
    reason = device.why_not_gpu(spec.device_type, generations, needs_gpu=True)
    if reason is None and wide.is_wide(spec):
        return wide.why_not(spec)
    return reason or why_not_fwd(spec) or why_not_bwd(spec)


def made_fwd(call: Call) -> LaunchPlan:
    """Return the plan of the forward pass of a call that `plan_fwd` would not refuse; that is not
    checked again."""
    spec, maker = call.spec, Maker(call)
    tensors, num_sms = maker.tensors, device.sm_count_of(call.device)
    if _is_mma(spec):
        arch = device.arch_of(call.device)
        results = mma.add_fwd(maker, spec, tensors)
        return maker.finish(results, functools.partial(_tiles_mma, spec, arch))
    if wide.is_wide(spec):
        return maker.finish(wide.add_fwd(maker, spec, tensors), _tiles_wide)
    blocks = None
    if split_kv.is_faster(spec, num_sms):
        blocks = split_kv.blocks_of(tensors.k, tensors.v)
    if blocks is None:
        return maker.finish(add_fwd(maker, spec, tensors), functools.partial(_tiles_fwd, spec))

    def tiles() -> dict[str, TileConfig]:
        arch = device.arch_of(call.device)
        return {"fwd": split_kv.tile_config_split_kv(spec, arch, num_sms)}

    return maker.finish(split_kv.add_split_kv(maker, spec, tensors, blocks), tiles)


def _tiles_wide() -> dict[str, TileConfig]:
    tile = wide.TILE
    return {"fwd": TileConfig(tile.rows, tile.keys, 12, tile.stages)}


def _tiles_mma(spec: AttentionSpec, arch: int) -> dict[str, TileConfig]:
    tile = mma.tile_config_fwd(spec, arch)
    return {"fwd": TileConfig(tile.rows, tile.keys, tile.warps, tile.stages)}


def _tiles_mma_bwd(spec: AttentionSpec, arch: int) -> dict[str, TileConfig]:
    tile = mma.tile_config_bwd(spec, arch)
    return {"bwd": TileConfig(tile.queries, tile.keys, tile.warps, tile.stages)}


def _tiles_fwd(spec: AttentionSpec) -> dict[str, TileConfig]:
    tile = tile_config_fwd(spec)
    return {"fwd": TileConfig(tile.rows, tile.keys, 4 * tile.warpgroups + 1, tile.stages)}


def _tiles_bwd(spec: AttentionSpec) -> dict[str, TileConfig]:
    """Return the tiles of each kernel of the backward pass by its name; the numbers of warps
    include those that load and send."""
    variant = variant_of(spec)
    if not has_separate_dq(spec):
        return {"bwd": TileConfig(variant.tile_m, variant.tile_n, 10, variant.stages)}
    dkdv = TileConfig(variant.tile_m, variant.tile_n, 9, variant.stages)
    return {"dkdv": dkdv, "dq": TileConfig(_SEPARATE_ROWS, variant.tile_n, 9, variant.stages)}
