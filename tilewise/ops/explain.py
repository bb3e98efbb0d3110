"""explain(): the backend, tiles and cost of a call, with reasons, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise import cost
from tilewise.errors import UnsupportedError
from tilewise.kernels.plan import Call, Plan, Refusal
from tilewise.kernels.spec import channel_bytes
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.ops import checks, dispatch, values
from tilewise.ops.attention import op as attention_op
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.op import AttentionOptions
from tilewise.ops.latent.arguments import LatentSignature
from tilewise.ops.paged.arguments import PagedSignature


@dataclass(frozen=True, slots=True)
class Explanation:
    """The description of one call; print it for a table.

    Attributes:
        op: the name of the op.
        backend: the backend that would run the call, None if all refuse.
        refusals: the reason why each of the other backends would not run it.
        tiles: the tile sizes by kernel part, if the backend has a table of them.
        cost: the FLOPs and bytes of the forward pass, from the papers' formulas; with a block mask,
            those of the tiles that are not empty.
        seconds: the time of `cost` at the measured peaks of this device, None if they are unknown.
        steps: the lines that describe the call's plan, for `attention` also that of its gradient.
    """

    op: str
    backend: str | None
    refusals: dict[str, str]
    tiles: dict[str, TileConfig] = field(default_factory=dict)
    cost: cost.Cost | None = None
    seconds: float | None = None
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'no backend can run this call'}"]
        for part, tile in self.tiles.items():
            lines.append(
                f"  tiles {part:<8} {tile.tile_m} queries x {tile.tile_n} keys, "
                f"{tile.num_warps} warps, {tile.num_stages} stages"
            )
        if self.cost is not None:
            lines.append(f"  FLOPs          {self.cost.flops:.4g}")
            lines.append(f"  bytes          {self.cost.bytes:.4g}")
            lines.append(f"  FLOPs a byte   {self.cost.intensity:.4g}")
        if self.seconds is not None:
            lines.append(f"  at best        {self.seconds * 1e6:.4g} us")
        lines += [f"  step           {step}" for step in self.steps]
        lines += [f"  not {name:<10} {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


def explain(op_name: str, *args: Any, **kwargs: Any) -> Explanation:
    """Return the backend and tiles of a call, the reasons against the other backends, and the cost.

    Args:
        op_name: the op, "attention", "attention_varlen", "paged_attention" or "mla_decode".
        args, kwargs: the arguments of that op; they are checked as the op checks them, except plan
            and out, which are ignored. Nothing is computed.

    Returns:
        An Explanation; a call that no backend can run has backend None.

    Raises:
        ValueError, TypeError: as the op itself.

    Example:
        >>> print(explain("attention", q, k, v, causal=True))
    """
    checks.check_type("op_name", op_name, str)
    if op_name not in _EXPLAINED:
        raise ValueError(f"op_name must be one of {', '.join(_EXPLAINED)}, got {op_name!r}")
    # none of these affects the choice
    for name in ("return_lse", "return_max_logits", "plan", "out"):
        kwargs.pop(name, None)
    return _EXPLAINED[op_name](op_name, *args, **kwargs)


def _chosen(
    op: str, call: Call, named: str | None
) -> tuple[str | None, Plan | None, dict[str, str]]:
    """Return the backend that would run a call, its plan, and the reasons against the others.

    Every backend is asked for a plan. Backend and plan are None if all refuse.

    Args:
        op, call: the op's name and the call, as `dispatch` takes them.
        named: the backend that the caller named; None if any may run the call.
    """
    plans = {name: dispatch.plan_by(op, call, name) for name in dispatch.BACKENDS}
    reasons = {
        name: plan.reason if isinstance(plan, Refusal) else None for name, plan in plans.items()
    }
    try:
        backend, plan = dispatch.choose_plan(op, call, named)
    except UnsupportedError:
        return None, None, _refusals(reasons, None, named)
    return backend, plan, _refusals(reasons, backend, named)


def _refusals(
    reasons: dict[str, str | None], chosen: str | None, named: str | None
) -> dict[str, str]:
    """Return for each backend but the chosen one the reason why it does not run the call.

    Args:
        reasons: the refusal of each backend; None if it could run the call.
        chosen: the backend that runs the call; None if none does.
        named: the backend that the caller named; None if none was.
    """
    otherwise = f"{named} was named" if named else "runs only when named"
    return {
        name: otherwise if reason is None else reason
        for name, reason in reasons.items()
        if name != chosen
    }


def _seconds(work: cost.Cost, tensor: Tensor) -> float | None:
    """Return the seconds of `work` at the measured peaks of an H200, if `tensor` is on one.

    It is None on any other device: its peaks were not measured.
    """
    if tensor.device.type == "cuda" and "H200" in torch.cuda.get_device_name(tensor.device):
        return work.time(cost.H200)
    return None


def _lengths(q: Tensor, k: Tensor, options: AttentionOptions) -> list[tuple[int, int]]:
    """Return the numbers of query and key tokens of each sequence, a pair each.

    Edges or lengths are read from tensors if given, which waits for their device. Raises ValueError
    for edges of a packed batch that do not ascend within its rows.
    """
    if options.cu_seqlens_q is not None and options.cu_seqlens_k is not None:
        values.check_edges("cu_seqlens_q", options.cu_seqlens_q, q.shape[0])
        values.check_edges("cu_seqlens_k", options.cu_seqlens_k, k.shape[0])
        lengths = (options.cu_seqlens_q.diff().tolist(), options.cu_seqlens_k.diff().tolist())
        return list(zip(*lengths, strict=True))
    if options.seqlens_k is not None:
        return [(q.shape[1], length) for length in options.seqlens_k.tolist()]
    return [(q.shape[1], k.shape[1])] * q.shape[0]


def _explain_attention(op_name: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Explanation:
    q, k, v, options = AttentionSignature(q, k, v, **kwargs).bind()
    spec = attention_op.make_spec(q, k, v, options)
    call = Call.of(spec, (q, k, v, *options.beside))
    backend, chosen, refusals = _chosen("attention", call, options.backend)
    tiles: dict[str, TileConfig] = {}
    steps: tuple[str, ...] = ()
    if chosen is not None:
        module = dispatch.kernel_module("attention", str(backend))
        gradient = module.plan_bwd(call.gradient(spec))
        tiles = chosen.tiles | gradient.tiles
        steps = (*chosen.steps, *(f"backward: {step}" for step in gradient.steps))
    rows = tiles["fwd"].tile_m if tiles else max(1, spec.max_seqlen_q)
    work = cost.Cost(0, 0, 0)
    for seqlen_q, seqlen_k in _lengths(q, k, options):
        work += cost.flash_attention_cost(
            seqlen_q,
            seqlen_k,
            spec.head_dim,
            tile_q=rows,
            num_q_heads=spec.num_q_heads,
            v_head_dim=spec.v_head_dim,
            window_left=spec.window_left,
            window_right=spec.window_right,
            itemsize=spec.dtype.itemsize,
            writes_lse=True,
        )
    share = _visited_share(options)
    work = cost.Cost(round(share * work.flops), round(share * work.bytes_read), work.bytes_written)
    return Explanation(op_name, backend, refusals, tiles, work, _seconds(work, q), steps)


def _visited_share(options: AttentionOptions) -> float:
    """Return the share of a block mask's tiles that are not empty, 1.0 without a mask.

    The mask is read, which waits for its device.
    """
    if options.mask_rows is None or options.mask_columns is None:
        return 1.0
    first, _, end = options.mask_rows.unbind(-1)
    num_tiles = first.numel() * options.mask_columns.shape[2]
    return int((end - first).sum()) / max(1, num_tiles)


def _explain_paged(
    op_name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, **kwargs: Any
) -> Explanation:
    options = PagedSignature(q, k_cache, v_cache, **kwargs).bind()
    spec = options.spec()
    call = Call.of(spec, options.tensors())
    backend, plan, refusals = _chosen("paged_attention", call, options.backend)
    runs = options.cu_seqlens_q.diff().tolist()
    work = cost.paged_attention_cost(
        options.seqlens_k.tolist(),
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        seqlens_q=runs,
        window_left=spec.window_left,
        itemsize=spec.dtype.itemsize,
        cache_itemsize=channel_bytes(spec.cache_dtype),
    )
    shared = kwargs.get("shared")
    if shared is not None:
        channels = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
        saved = int(shared.saved_tokens * channels * channel_bytes(spec.cache_dtype))
        work = cost.Cost(work.flops, work.bytes_read - saved, work.bytes_written)
    return Explanation(op_name, backend, refusals, *_told(plan, work, q))


def _told(
    plan: Plan | None, work: cost.Cost, tensor: Tensor
) -> tuple[dict[str, TileConfig], cost.Cost, float | None, tuple[str, ...]]:
    """Return the last four fields of an `Explanation`: tiles, cost, seconds and steps.

    Args:
        plan: the plan of the call, None if all backends refuse: no tiles and no steps then.
        work: the cost of the call.
        tensor: a tensor on the device of the call.
    """
    tiles, steps = ({}, ()) if plan is None else (plan.tiles, tuple(plan.steps))
    return tiles, work, _seconds(work, tensor), steps


def _explain_mla(
    op_name: str, q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, **kwargs: Any
) -> Explanation:
    options = LatentSignature(q_latent, q_rope, latent_cache, **kwargs).bind()
    spec = options.spec()
    call = Call.of(spec, options.tensors())
    backend, plan, refusals = _chosen("mla_decode", call, options.backend)
    cost_of = cost.mla_decode_cost(
        options.seqlens_k.tolist(),
        num_q_heads=spec.num_q_heads,
        latent_dim=spec.v_head_dim,
        rope_dim=spec.head_dim - spec.v_head_dim,
        seqlens_q=options.cu_seqlens_q.diff().tolist(),
        itemsize=spec.dtype.itemsize,
        cache_itemsize=spec.cache_dtype.itemsize,
    )
    return Explanation(op_name, backend, refusals, *_told(plan, cost_of, q_latent))


_EXPLAINED: dict[str, Callable[..., Explanation]] = {
    "attention": _explain_attention,
    "attention_varlen": _explain_attention,
    "paged_attention": _explain_paged,
    "mla_decode": _explain_mla,
}
