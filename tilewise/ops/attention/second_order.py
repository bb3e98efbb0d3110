"""Derivatives of attention beyond its gradient: along one direction, two, and of the gradient.

With s = softmax_scale q.k, t = phi(s) + bias - alibi, p = exp(t - lse) and Z what dropout
multiplies p by, o = sum_j Z p v and dp = p (dt - dlse). A direction (q', k', v', bias', sinks')
moves them by

    s' = softmax_scale (q'.k + q.k')    t' = phi'(s) s' + bias'
    lse' = mu = sum_j p t' + p_0 sink'
    o' = sum_j Z p (t' v + v') - mu o                                                   (`tangent`)

where p_0 is what the sink takes. A second direction, its numbers marked ", moves those by

    T = phi''(s) s' s" + phi'(s) softmax_scale (q'.k" + q".k')
    lse* = sum_j p ((t' - mu)(t" - mu") + T) + p_0 (sink' - mu)(sink" - mu")
    o* = sum_j Z p (((t' - mu)(t" - mu") + T) v + (t' - mu) v" + (t" - mu") v') - lse* o  (`curve`)

The gradient (dq, dk, ...) of <do, o> + <dlse, lse> moves along the direction by the gradient of
F = <do, o'> + <dlse, lse'>, because second derivatives commute. With a = Z do.v, b = Z do.v',
delta = do.o - dlse and gamma = do.o'

    G = dF/dt = p ((t' - mu)(a - delta) + b - gamma)        e = p (a - delta)
    dF/ds = phi' G + phi'' s' e                             dF/ds' = phi' e
    dF/dq = softmax_scale (dF/ds k + dF/ds' k')             dF/dk = the same, transposed, of q, q'
    dF/dv = (Z p (t' - mu))^T do                            dF/dbias = G
    dF/dsink = -sum_i p_0 ((sink' - mu) delta + gamma)                                   (`second`)

As in the gradient itself, p is made again from lse, tile by tile, and every sum has one order. Rows
that saw nothing have p = 0, hence zeros. These passes are plain torch and serve every backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec
from tilewise.ops.attention.tiles import Call, Strip, Tangents, Tile


def tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    along: Tangents,
    spec: AttentionSpec,
    **tensors: Any,
) -> tuple[Tensor, Tensor]:
    """Return o' and lse', the derivatives of o and lse along a direction, shaped as o and lse.

    Args:
        q, k, v, o, lse: the inputs and results of the call.
        along: the direction, tangents of q, k, v, bias and sinks.
        spec: the description of the call.
        tensors: the optional tensors of the call by name, see `AttentionOptions.tensors`.
    """
    call = Call(q, k, v, lse, spec, tensors, [along])
    o_dot, lse_dot = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (o, lse))
    for strip in call.strips():
        acc = torch.zeros_like(strip.rows(o))
        mu = torch.zeros_like(strip.lse)
        for tile in strip.tiles():
            pt = tile.p * tile.dots[0].t
            mu += pt.sum(-1, keepdim=True)
            acc += tile.kept(pt) @ tile.v
            if tile.v_dots[0] is not None:
                acc += tile.kept(tile.p) @ tile.v_dots[0]
        if along.sinks is not None:
            mu += strip.sink_share(tensors["sinks"]) * strip.sink(along.sinks)
        strip.store(o_dot, acc - mu * strip.rows(o))
        strip.store_values(lse_dot, mu)
    return o_dot, lse_dot


def curve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lse_dots: tuple[Tensor, Tensor],
    along: tuple[Tangents, Tangents],
    spec: AttentionSpec,
    **tensors: Any,
) -> tuple[Tensor, Tensor]:
    """Return the second derivatives of o and lse along two directions, in their shapes and dtypes.

    Args:
        q, k, v, o, lse, spec, tensors: as in `tangent`.
        lse_dots: the first derivatives of lse along each direction, from `tangent`.
        along: the two directions.
    """
    call = Call(q, k, v, lse, spec, tensors, along)
    o_bend, lse_bend = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (o, lse))
    for strip in call.strips():
        acc = torch.zeros_like(strip.rows(o))
        total = torch.zeros_like(strip.lse)
        means = [strip.row_values(x) for x in lse_dots]
        for tile in strip.tiles():
            moved = [dot.t - mu for dot, mu in zip(tile.dots, means, strict=True)]
            both = tile.seen(tile.p * (moved[0] * moved[1] + _bend(strip, tile)))
            total += both.sum(-1, keepdim=True)
            acc += tile.kept(both) @ tile.v
            for t_dot, v_dot in zip(moved, reversed(tile.v_dots), strict=True):
                if v_dot is not None:
                    acc += tile.kept(tile.seen(tile.p * t_dot)) @ v_dot
        if tensors["sinks"] is not None:
            share = strip.sink_share(tensors["sinks"])
            total += (
                share
                * _sink_moved(strip, along[0], means[0])
                * _sink_moved(strip, along[1], means[1])
            )
        strip.store(o_bend, acc - total * strip.rows(o))
        strip.store_values(lse_bend, total)
    return o_bend, lse_bend


def second(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    o_dot: Tensor,
    lse_dot: Tensor,
    along: Tangents,
    spec: AttentionSpec,
    **tensors: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of <do, o'> + <dlse, lse'> by q, k, v, bias and sinks, in their dtypes.

    That of bias is None unless spec.needs_dbias, that of sinks without sinks.

    Args:
        do, dlse: the weights of o' and lse', gradients of o and lse; a dlse of None is 0.
        q, k, v, o, lse, along, spec, tensors: as in `tangent`.
        o_dot, lse_dot: o' and lse', from `tangent` along the same direction.
    """
    call = Call(q, k, v, lse, spec, tensors, [along], do)
    sinks: Any = tensors["sinks"]
    bias: Any = tensors["bias"] if spec.needs_dbias else None
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = call.zeros(k), call.zeros(v)
    dbias, dsinks = (None if x is None else call.zeros(x) for x in (bias, sinks))
    for strip in call.strips():
        assert strip.do is not None
        mu = strip.row_values(lse_dot)
        delta = (strip.do * strip.rows(o)).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= strip.row_values(dlse)
        gamma = (strip.do * strip.rows(o_dot)).sum(-1, keepdim=True)
        acc = torch.zeros_like(strip.q)
        for tile in strip.tiles():
            dot = tile.dots[0]
            moved = dot.t - mu
            tile.add_to_keys(dv, tile.kept(tile.seen(tile.p * moved)).mT @ strip.do)
            e = tile.seen(tile.p * (tile.kept(strip.do @ tile.v.mT) - delta))
            db = -gamma
            if tile.v_dots[0] is not None:
                db = tile.kept(strip.do @ tile.v_dots[0].mT) - gamma
            g = tile.seen(moved * e + tile.p * db)
            if dbias is not None:
                tile.add_to_pairs(dbias, g)
            by_s, by_s_dot = tile.through_cap(g, e, dot.s)
            acc += by_s @ tile.k
            tile.add_to_keys(dk, by_s.mT @ strip.q)
            if tile.k_dots[0] is not None:
                acc += by_s_dot @ tile.k_dots[0]
            if strip.q_dots[0] is not None:
                tile.add_to_keys(dk, by_s_dot.mT @ strip.q_dots[0])
        strip.store(dq, acc * spec.softmax_scale)
        if dsinks is not None:
            moved = _sink_moved(strip, along, mu)
            strip.sum_over_rows(-strip.sink_share(sinks) * (moved * delta + gamma), dsinks)
    dk *= spec.softmax_scale
    dbias = None if dbias is None else dbias.to(bias.dtype)
    dsinks = None if dsinks is None else dsinks.to(sinks.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias, dsinks


def _bend(strip: Strip, tile: Tile) -> Tensor | float:
    """Return T = phi'' s' s" + phi' softmax_scale (q'.k" + q".k'), see the module's formulas.

    It is the second derivative of a tile's logits along two directions, (b, Hk, G * m, n); the
    number 0.0 where it is zero everywhere.
    """
    bend: Tensor | float = 0.0
    q_dots, k_dots = strip.q_dots, tile.k_dots
    for q_dot, k_dot in ((q_dots[0], k_dots[1]), (q_dots[1], k_dots[0])):
        if q_dot is not None and k_dot is not None:
            bend = bend + q_dot @ k_dot.mT
    bend = tile.slope * bend * strip.part.spec.softmax_scale
    return bend + tile.curve * tile.dots[0].s * tile.dots[1].s


def _sink_moved(strip: Strip, along: Tangents, mu: Tensor) -> Tensor:
    return -mu if along.sinks is None else strip.sink(along.sinks) - mu
