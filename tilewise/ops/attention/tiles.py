"""One call of attention cut into tiles, in torch: what its second derivatives walk over.

A call is parts (see parts.py), a part is strips of queries, a strip is tiles of keys;
nothing here grows with Sq * Sk. Tiles that nothing sees are not made.

Tensors of a tile are (b, Hk, G * m, n): the m rows of the G query heads that share a key head lie
under one another, so that every product is one matrix product a key head. Numbers are float32, or
float64 for float64 inputs, whatever autocast says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec
from tilewise.ops.attention import parts as attention_parts
from tilewise.ops.attention.parts import Part
from tilewise.ops.attention.visible import MaskStrip, MaskWalk
from tilewise.reference import dropout

_GRID = 128  # tiles of keys start at multiples of it; mask tiles divide it, as does dropout's 32


class Tangents(NamedTuple):
    """A direction in the space of the differentiable inputs, None where it is zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Dot(NamedTuple):
    """The derivatives of a tile's logits along one direction; 0.0 where they are zero."""

    s: Tensor | float  # softmax_scale * (q' k + q k')
    t: Tensor | float  # of the final logit: phi'(s) s' + bias'


class Call:
    """An attention call with the directions along which it is differentiated.

    Args:
        q, k, v, lse: tensors of the call; lse includes the sinks.
        spec, tensors: as launchers take them.
        directions: one or two.
        do: gradient of o, where a pass needs it.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        tensors: dict[str, Any],
        directions: Sequence[Tangents],
        do: Tensor | None = None,
    ) -> None:
        self.q, self.k, self.v, self.lse, self.do = q, k, v, lse, do
        self.spec, self.tensors, self.directions = spec, tensors, directions
        self.real = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.mask = None if tensors["mask"] is None else MaskWalk(tensors["mask"])

    def zeros(self, like: Tensor) -> Tensor:
        """Return an accumulator in the shape of `like`."""
        return torch.zeros(like.shape, dtype=self.real, device=like.device)

    def strips(self) -> Iterator[Strip]:
        """Walk over the queries of all parts."""
        step = attention_parts.TILE
        for part in attention_parts.parts(self.spec, self.tensors):
            for first in range(0, part.length_q, step):
                yield Strip(self, part, first, min(first + step, part.length_q))


class Strip:
    """Queries first ... last - 1 of a part.

    Attributes:
        q, do: (b, Hk, G * m, D or Dv); q_dots are q's tangents, None where zero.
        lse: (b, Hk, G * m, 1), +inf for a row that sees nothing, which makes its p = 0.
    """

    def __init__(self, call: Call, part: Part, first: int, last: int) -> None:
        self.call, self.part, self.first, self.last = call, part, first, last
        lse = self.row_values(call.lse)
        empty = lse.isneginf()
        # What is infinite or NaN in a row reaches all that it sees, through p, and nothing else.
        wanted = (call.q, call.do, *(d.q for d in call.directions))
        loaded = [None if x is None else self.rows(x) for x in wanted]
        poison = _poison(loaded)
        clean = [x if x is None else x.masked_fill(empty | poison.isnan(), 0.0) for x in loaded]
        self.lse = torch.where(empty, math.inf, lse + poison)
        q, self.do, *self.q_dots = clean
        assert q is not None
        self.q = q

    def rows(self, x: Tensor) -> Tensor:
        """Take the strip's rows of (B, Sq, Hq, D) or (T, Hq, D), as (b, Hk, G * m, D)."""
        return self.part.queries(x)[..., self.first : self.last, :].to(self.call.real).flatten(2, 3)

    def row_values(self, x: Tensor) -> Tensor:
        """Take the strip's rows of (B, Hq, Sq) or (Hq, T), as (b, Hk, G * m, 1)."""
        rows = self.part.rows(x)[..., self.first : self.last].to(self.call.real)
        return rows.flatten(2, 3).unsqueeze(-1)

    def store(self, into: Tensor, rows: Tensor) -> None:
        """Write rows of this strip to the tensor `into`; the inverse of `rows`."""
        view = self.part.queries(into)[..., self.first : self.last, :]
        view.copy_(rows.unflatten(2, view.shape[2:4]))

    def store_values(self, into: Tensor, values: Tensor) -> None:
        """Write one value for each row of this strip to `into`; the inverse of `row_values`."""
        view = self.part.rows(into)[..., self.first : self.last]
        view.copy_(values.squeeze(-1).unflatten(2, view.shape[2:4]))

    def sink(self, sinks: Tensor) -> Tensor:
        """Repeat one number a head over the rows, (1, Hk, G * m, 1)."""
        values = self.part.per_head(sinks.to(self.call.real)).squeeze(-1)
        return values.expand(-1, -1, -1, self.last - self.first).flatten(2, 3).unsqueeze(-1)

    def sink_share(self, sinks: Tensor) -> Tensor:
        """Probability that the sink takes of each row, (1 or b, Hk, G * m, 1)."""
        return torch.exp(self.sink(sinks) - self.lse)

    def sum_over_rows(self, values: Tensor, into: Tensor) -> None:
        """Add up (b, Hk, G * m, 1) by head, into (Hq,)."""
        group = self.part.spec.group_size
        into[self.part.query_heads] += values.unflatten(2, (group, -1)).sum((0, 3, 4)).flatten()

    def tiles(self) -> Iterator[Tile]:
        """Walk over the keys that some query of the strip sees."""
        spec, offset = self.part.spec, self.part.length_k - self.part.length_q
        low, high = 0, self.part.length_k
        if spec.window_left >= 0:
            low = max(low, self.first + offset - spec.window_left)
        if spec.window_right >= 0:
            high = min(high, self.last + offset + spec.window_right)
        strip = None
        if self.call.mask is not None:
            strip = self.call.mask.strip(self.part, self.first, self.last)
        step = attention_parts.TILE
        for first in range(low // _GRID * _GRID, high, step):
            last = min(first + step, high)
            if strip is None or strip.sees_any(first, last):
                yield Tile(self, first, last, strip)


class Tile:
    """Keys first ... last - 1 of a strip.

    Attributes:
        k, v: (b, Hk, n, D or Dv); k_dots, v_dots are their tangents, None where zero.
        p: probabilities before dropout, 0 where not visible.
        dots: the derivatives of the logits along each direction.
        slope: derivative of the softcap; 1.0 without one.
        visible: None when every query sees every key.
    """

    def __init__(self, strip: Strip, first: int, last: int, mask: MaskStrip | None) -> None:
        self.strip, self.first, self.last = strip, first, last
        call, spec = strip.call, strip.part.spec
        directions = call.directions
        keys = [call.k, call.v, *(d.k for d in directions), *(d.v for d in directions)]
        loaded = [self._load(x) for x in keys]
        poison = _poison(loaded)
        clean = [x if x is None else x.masked_fill(poison.isnan(), 0.0) for x in loaded]
        k, v, *dots = clean
        assert k is not None
        assert v is not None
        self.k, self.v = k, v
        self.k_dots, self.v_dots = dots[: len(directions)], dots[len(directions) :]

        distance = self._distance()
        self.visible = self._visible(distance, mask)
        t = self._times_scale(strip.q @ self.k.mT)
        self.slope: Tensor | float = 1.0
        self._capped: Tensor | None = None
        if spec.softcap > 0:
            self._capped = t.div_(spec.softcap).tanh_()
            self.slope = 1.0 - self._capped.square()
            t = self._capped * spec.softcap
        pairs = self.by_head(t)
        if call.tensors["bias"] is not None:
            pairs += self._pairs(call.tensors["bias"])
        if call.tensors["alibi_slopes"] is not None:
            slopes = strip.part.per_head(call.tensors["alibi_slopes"].to(call.real))
            pairs -= slopes * distance.abs()
        t += poison.mT
        self.p = self.seen(t.sub_(strip.lse).exp_())
        self.dots = [self._dot(number) for number in range(len(directions))]
        self._kept = self._keep_mask()

    def through_cap(
        self, by_t: Tensor, by_t_dot: Tensor, s_dot: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Return gradients by the products of q and k and by their tangents.

        Args:
            by_t: the gradient by the capped logits.
            by_t_dot: the gradient by the tangents of the capped logits.
            s_dot: the tangents of the products.
        """
        if self._capped is None:
            return by_t, by_t_dot
        return self.slope * by_t + self.curve * s_dot * by_t_dot, self.slope * by_t_dot

    @property
    def curve(self) -> Tensor | float:
        """Second derivative of the softcap, 0.0 without one."""
        if self._capped is None:
            return 0.0
        return self._capped * self.slope * (-2.0 / self.strip.part.spec.softcap)

    def by_head(self, x: Tensor) -> Tensor:
        """View (b, Hk, G * m, n) as (b, Hk, G, m, n)."""
        heads: Tensor = x.unflatten(2, (self.strip.part.spec.group_size, -1))
        return heads

    def seen(self, x: Tensor) -> Tensor:
        """Write 0 where a query does not see a key, whatever stood there."""
        if self.visible is not None:
            self.by_head(x).masked_fill_(~self.visible, 0.0)
        return x

    def kept(self, x: Tensor) -> Tensor:
        """Apply dropout."""
        return x if self._kept is None else x * self._kept

    def add_to_keys(self, into: Tensor, x: Tensor) -> None:
        """Add (b, Hk, n, D) to the tile's rows of (B, Sk, Hk, D) or (T, Hk, D)."""
        view = self.strip.part.keys(into)[..., self.first : self.last, :]
        view += x

    def add_to_pairs(self, into: Tensor, x: Tensor) -> None:
        """Add (b, Hk, G * m, n) to its part of what broadcasts to (B, Hq, Sq, Sk)."""
        view = self._pairs_of(into)
        view += self.by_head(x).sum_to_size(view.shape)

    def _load(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return self.strip.part.keys(x)[..., self.first : self.last, :].to(self.strip.call.real)

    def _pairs_of(self, x: Tensor) -> Tensor:
        x = self.strip.part.pairs(x)
        x = x if x.shape[3] == 1 else x[..., self.strip.first : self.strip.last, :]
        return x if x.shape[4] == 1 else x[..., self.first : self.last]

    def _pairs(self, x: Tensor) -> Tensor:
        return self._pairs_of(x).to(self.strip.call.real)

    def _times_scale(self, x: Tensor) -> Tensor:
        return x.mul_(self.strip.part.spec.softmax_scale)

    def _distance(self) -> Tensor:
        """Return i + Sk - Sq - j, int64 (m, n)."""
        strip, device = self.strip, self.strip.call.q.device
        offset = strip.part.length_k - strip.part.length_q
        i = torch.arange(strip.first + offset, strip.last + offset, device=device)
        return i.unsqueeze(-1) - torch.arange(self.first, self.last, device=device)

    def _visible(self, distance: Tensor, mask: MaskStrip | None) -> Tensor | None:
        """Return bool (m, n) or (b or 1, Hk or 1, G or 1, m, n), or None."""
        strip, spec = self.strip, self.strip.part.spec
        offset = strip.part.length_k - strip.part.length_q
        visible: Tensor | None = None
        if 0 <= spec.window_left < strip.last - 1 + offset - self.first:
            visible = distance <= spec.window_left
        if spec.window_right >= 0 and strip.first + offset - (self.last - 1) < -spec.window_right:
            right = distance >= -spec.window_right
            visible = right if visible is None else visible & right
        if mask is not None:
            by_mask = strip.part.grouped(mask.visible(self.first, self.last))
            visible = by_mask if visible is None else visible & by_mask
        return visible

    def _dot(self, number: int) -> Dot:
        strip, tangents = self.strip, self.strip.call.directions[number]
        q_dot, k_dot = strip.q_dots[number], self.k_dots[number]
        s: Tensor | float = 0.0
        if q_dot is not None:
            s = q_dot @ self.k.mT
        if k_dot is not None:
            s = s + strip.q @ k_dot.mT
        if isinstance(s, Tensor):
            s = self._times_scale(s)
        t = s if self._capped is None else self.slope * s
        if tangents.bias is not None:
            pairs = self.by_head(t if isinstance(t, Tensor) else torch.zeros_like(self.p))
            t = self.seen((pairs + self._pairs(tangents.bias)).flatten(2, 3))
        return Dot(s, t)

    def _keep_mask(self) -> Tensor | None:
        strip, spec = self.strip, self.strip.part.spec
        if spec.dropout_p == 0:
            return None
        heads, batch = strip.part.query_heads, strip.part.batch
        keep = dropout.keep_mask(
            strip.call.tensors["philox"],
            (
                batch.stop - batch.start,
                heads.stop - heads.start,
                strip.last - strip.first,
                self.last - self.first,
            ),
            spec.dropout_p,
            first_query=strip.first,
            first_key=self.first,
            first_head=batch.start * spec.num_q_heads + heads.start,
        )
        return keep.view(self.p.shape).to(self.p.dtype) * spec.dropout_scale


def _poison(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return 0 for a row that is finite in all tensors, else NaN; (..., 1)."""
    return sum((x * 0.0).sum(-1, keepdim=True) for x in tensors if x is not None)  # type: ignore[return-value]
