"""The gated delta rule and Mamba-2's recurrence on Hopper: which calls, and their launch."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.recurrent.kernel import WARPS, hopper_scan_kernel
from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.spec import RecurrentSpec, RecurrentStates
from tilewise.kernels.triton.recurrent import scan as portable
from tilewise.kernels.triton.recurrent.scan import Pairs

__all__ = ["launch", "step", "why_not"]

_KEY_DIMS = (64, 128)
_TILE_V, _STAGES = 64, 2


def why_not(spec: RecurrentSpec) -> str | None:
    """Return why this kernel cannot run `spec`, or None if it can."""
    if (reason := device.why_not_hopper(spec.device_type)) is not None:
        return reason
    if spec.dtype != torch.bfloat16:
        return f"dtype must be bfloat16, got {spec.dtype}"
    if spec.key_dim not in _KEY_DIMS or spec.value_dim % _TILE_V:
        return (
            f"K must be 64 or 128 and V a multiple of {_TILE_V}, "
            f"got {spec.key_dim} and {spec.value_dim}"
        )
    return portable.why_not(spec)


def _addressable(x: Tensor) -> Tensor:
    """Return x, copied where a row of a head does not begin at a multiple of 16 bytes."""
    is_whole = all(stride % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if is_whole else x.clone(memory_format=torch.contiguous_format)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    before: Tensor | None,
    after: Tensor,
    slots: RecurrentStates | None,
    places: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    states: Tensor | None,
    pairs: Pairs,
    q_scale: float,
) -> None:
    """Go through all chunks, see `portable.scan`."""
    (num_heads, value_dim), num_sequences = v.shape[1:], len(places[0]) - 1
    keys, values = (k, v) if slots is None else (slots.keys, slots.values)
    q, k, v = (_addressable(x) for x in (q, k, v))
    constants = {n: c for n, c in pairs.constants.items() if n not in ("TILE_K", "PRECISION")}
    launch_now(
        hopper_scan_kernel,
        (num_sequences * num_heads, triton.cdiv(value_dim, _TILE_V)),
        q,
        k,
        v,
        beta,
        pairs.t,
        pairs.r,
        pairs.running,
        *pairs.faded,
        o,
        o if states is None else states,
        after if before is None else before,
        after,
        keys,
        values,
        *places,
        len(v),
        num_sequences,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_scale,
        VALUE_DIM=value_dim,
        TILE_V=_TILE_V,
        STAGES=_STAGES,
        HAS_BEFORE=before is not None and slots is None,
        KEEPS_STATES=states is not None,
        **constants,
        num_warps=WARPS.value,
        enable_fp_fusion=portable.FUSION,
    )


launch = functools.partial(portable.launch, run=run)
step = functools.partial(portable.step, run=run)
