"""Calls of a backend's kernels of attention in one line: planned, then run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Plan, Refusal, Results
from tilewise.kernels.spec import (
    AttentionSpec,
    AttentionTensors,
    Fp8Spec,
    LatentTensors,
    MaskTensors,
    PagedSpec,
    PagedTensors,
)

_empty = torch.empty


def poisoned(size: int | tuple[int, ...], **options: Any) -> Tensor:
    """Return memory as torch.empty does, with NaN where numbers are floats."""
    x = _empty(size, **options)
    return x.fill_(float("nan")) if x.is_floating_point() else x


def serving_spec(**changes: object) -> PagedSpec:
    """Return a decode step of 16 sequences of up to 32,768 tokens, 32 heads on 8 of 128."""
    fields: dict[str, object] = {
        "device_type": "cuda", "dtype": torch.bfloat16, "cache_dtype": torch.bfloat16,
        "num_seqs": 16, "num_tokens": 16, "max_seqlen_q": 1, "num_q_heads": 32, "num_kv_heads": 8,
        "head_dim": 128, "v_head_dim": 128, "block_size": 16,
    }  # fmt: skip
    fields |= changes
    fields.setdefault("max_blocks", 32768 // int(str(fields["block_size"])))
    return PagedSpec(**fields)  # type: ignore[arg-type]


def tensors_of(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskTensors | None = None, **others: Tensor | None
) -> AttentionTensors:
    """Return the tensors of a call."""
    named = {} if mask is None else {f"mask_{name}": x for name, x in mask._asdict().items()}
    return AttentionTensors(q, k, v, **others, **named)


def refusal(kernels: ModuleType, spec: AttentionSpec) -> str | None:
    """Return why a backend would not plan a call of this spec, whose tensors lie as usual."""
    first = () if spec.is_varlen else (spec.batch,)
    shapes = (
        (*first, spec.max_seqlen_q, spec.num_q_heads, spec.head_dim),
        (*first, spec.max_seqlen_k, spec.num_kv_heads, spec.head_dim),
        (*first, spec.max_seqlen_k, spec.num_kv_heads, spec.v_head_dim),
    )
    tensors = tensors_of(*(torch.empty(s, dtype=spec.dtype, device="meta") for s in shapes))
    plan = kernels.plan_fwd(Call.of(spec, tensors))
    return plan.reason if isinstance(plan, Refusal) else None


def plan_fwd(
    kernels: ModuleType, spec: AttentionSpec, tensors: AttentionTensors, **more: Any
) -> Plan:
    """Return the plan of a forward pass that is not refused."""
    plan = kernels.plan_fwd(Call.of(spec, tensors), **more)
    assert not isinstance(plan, Refusal), plan.reason
    return plan


def forward(
    kernels: ModuleType, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *,
    tiles: Any = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse."""
    tensors = tensors_of(q, k, v, **others)
    more = {} if tiles is None else {"tiles": tiles}
    o, lse = plan_fwd(kernels, spec, tensors, **more).run(*tensors)
    assert o is not None
    assert lse is not None
    return o, lse


def backward(
    kernels: ModuleType, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    o: Tensor, lse: Tensor, spec: AttentionSpec, **others: Any,
) -> Results:  # fmt: skip
    """Return dq, dk, dv, dbias and dsinks."""
    given = (do, dlse, o, lse, *tensors_of(q, k, v, **others))
    return kernels.plan_bwd(Call.of(spec, given)).run(*given)


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **others: Any
) -> tuple[Tensor, Tensor]:
    """Return o and lse of Hopper's forward kernel, whatever the device."""
    o, lse = hopper_results(q, k, v, spec, **others)
    assert o is not None
    assert lse is not None
    return o, lse


def hopper_results(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **others: Any) -> Results:
    """Return all results of Hopper's forward kernel, row maxima too where the spec needs them."""
    from tilewise.kernels.gluon.forward.launch import add_fwd
    from tilewise.kernels.host.plan import Maker

    tensors = tensors_of(q, k, v, **others)
    maker = Maker(Call.of(spec, tensors))
    return maker.finish(add_fwd(maker, spec, maker.tensors)).run(*tensors)


def mma_results(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, tile: Any = None, **others: Any
) -> Results:
    """Return all results of the forward kernel by mma.sync, whatever the device.

    tile: how it is cut, or None for what is cut on this device.
    """
    from tilewise.kernels.gluon.mma.plan import add_fwd
    from tilewise.kernels.host.plan import Maker

    tensors = tensors_of(q, k, v, **others)
    maker = Maker(Call.of(spec, tensors))
    return maker.finish(add_fwd(maker, spec, maker.tensors, tile)).run(*tensors)


def hopper_backward(*given: Any, **others: Any) -> Results:
    """Return the gradients of Hopper's backward kernels; arguments are those of `backward`."""
    from tilewise.kernels.gluon.attention import plan

    return backward(plan, *given, **others)


def hopper_fp8(
    tensors: AttentionTensors, spec: AttentionSpec, *, scales: Any = None, rotation: Any = None,
    per_token: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse of Hopper's e4m3 kernel, which quantises first where there are no scales."""
    from tilewise.kernels.gluon.attention import fp8

    given = (*(scales or (None,) * 3), rotation, *tensors)
    o, lse = fp8.made_fwd(Call.of(Fp8Spec(spec, torch.bfloat16, per_token), given)).run(*given)
    assert o is not None
    assert lse is not None
    return o, lse


def hopper_quantized(
    ready: Any, tensors: AttentionTensors, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return o and lse of Hopper's e4m3 kernel of `Quantized` tensors, and of those beside them."""
    from tilewise.kernels.gluon.attention import fp8

    given = (*ready, *tensors._replace(q=None, k=None, v=None))
    o, lse = fp8.plan_quantized(Call.of(Fp8Spec(spec, torch.bfloat16), given)).run(*given)
    assert o is not None
    assert lse is not None
    return o, lse


def paged(
    kernels: ModuleType, q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: PagedSpec, *,
    shared: tuple[Tensor, ...] = (), plan: Tensor | None = None, tuned: Any = None,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse of a call over a paged cache, whatever the device; plan: its records."""
    given = (*PagedTensors(q, k_cache, v_cache, **others, records=plan), *shared)
    return _run_made(kernels, spec, given, *(() if tuned is None else (tuned,)))


def latent(
    kernels: ModuleType, q_latent: Tensor, q_rope: Tensor, cache: Tensor, spec: PagedSpec,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse of a call over latents, whatever the device."""
    return _run_made(kernels, spec, LatentTensors(q_latent, q_rope, cache, **others))


def _run_made(
    kernels: ModuleType, spec: PagedSpec, given: tuple[Tensor | None, ...], *more: Any
) -> tuple[Tensor, Tensor]:
    plan = getattr(kernels, "made_fwd", kernels.plan_fwd)(Call.of(spec, given), *more)
    o, lse = plan.run(*given)
    return o, lse
