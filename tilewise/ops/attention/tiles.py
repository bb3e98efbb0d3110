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
    """A direction of differentiation: a tangent of each differentiable input, None where zero."""

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
        """Return zeros in the shape of `like` to add to, float32, or float64 for float64 q."""
        return torch.zeros(like.shape, dtype=self.real, device=like.device)

    def strips(self) -> Iterator[Strip]:
        """Yield the strips of all parts, each with at most 512 queries of each sequence."""
        step = attention_parts.TILE
        for part in attention_parts.parts(self.spec, self.tensors):
            for first in range(0, part.length_q, step):
                yield Strip(self, part, first, min(first + step, part.length_q))


class Strip:
    """Queries first ... last - 1 of each sequence of a part: m = last - first rows of each head.

    Attributes:
        q, do: (b, Hk, G * m, D or Dv), queries and the gradient of o (None if the pass needs none).
        q_dots: the tangents of q along each direction, None where zero.
        lse: (b, Hk, G * m, 1), +inf for a row that sees nothing, which makes its p = 0; NaN for a
            row with an infinity or NaN.
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
        """Return the strip's rows of x (B, Sq, Hq, D) or (T, Hq, D), as a (b, Hk, G * m, D) copy.

        The dtype is that of the call's accumulators, float32 or float64.
        """
        return self.part.queries(x)[..., self.first : self.last, :].to(self.call.real).flatten(2, 3)

    def row_values(self, x: Tensor) -> Tensor:
        """Return the strip's rows of x (B, Hq, Sq) or (Hq, T), as (b, Hk, G * m, 1)."""
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
        """Return numbers of each head (Hq,) repeated over the strip's rows, (1, Hk, G * m, 1)."""
        values = self.part.per_head(sinks.to(self.call.real)).squeeze(-1)
        return values.expand(-1, -1, -1, self.last - self.first).flatten(2, 3).unsqueeze(-1)

    def sink_share(self, sinks: Tensor) -> Tensor:
        """Return the probability exp(sink - lse) that the sink takes of each row.

        The shape is (b, Hk, G * m, 1).

        Args:
            sinks: (Hq,), the sink of each head.
        """
        return torch.exp(self.sink(sinks) - self.lse)

    def sum_over_rows(self, values: Tensor, into: Tensor) -> None:
        """Add the sums of `values` (b, Hk, G * m, 1) over each head's rows to `into` (Hq,)."""
        group = self.part.spec.group_size
        into[self.part.query_heads] += values.unflatten(2, (group, -1)).sum((0, 3, 4)).flatten()

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles of at most 512 keys of which some query of the strip may see one.

        Keys outside of the window, and tiles that a block mask hides whole, are left out.
        """
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
    """Keys first ... last - 1 of a strip's sequences, with the strip's logits of them; made once.

    Attributes:
        k, v: the keys and values, (b, Hk, n, D or Dv) with n = last - first.
        k_dots, v_dots: the tangents of k and v along each direction, None where zero.
        p: the probabilities before dropout, (b, Hk, G * m, n), 0 where not visible.
        dots: the derivatives of the logits along each direction.
        slope: the derivative phi' of the softcap at each logit; 1.0 without one.
        visible: a bool tensor that broadcasts to (b, Hk, G, m, n), True where a query sees a key;
            None if every query sees every key.
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
        """Return the gradients by the scaled products of q and k, s, and by their tangents, s'.

        Without a softcap they are by_t and by_t_dot themselves.

        Args:
            by_t: the gradient by the capped logits, (b, Hk, G * m, n).
            by_t_dot: the gradient by the tangents of the capped logits.
            s_dot: the tangents s'.
        """
        if self._capped is None:
            return by_t, by_t_dot
        return self.slope * by_t + self.curve * s_dot * by_t_dot, self.slope * by_t_dot

    @property
    def curve(self) -> Tensor | float:
        """The second derivative phi'' of the softcap at each logit; 0.0 without one."""
        if self._capped is None:
            return 0.0
        return self._capped * self.slope * (-2.0 / self.strip.part.spec.softcap)

    def by_head(self, x: Tensor) -> Tensor:
        """View (b, Hk, G * m, n) as (b, Hk, G, m, n)."""
        heads: Tensor = x.unflatten(2, (self.strip.part.spec.group_size, -1))
        return heads

    def seen(self, x: Tensor) -> Tensor:
        """Return x (b, Hk, G * m, n), in which 0 is written where a query does not see a key."""
        if self.visible is not None:
            self.by_head(x).masked_fill_(~self.visible, 0.0)
        return x

    def kept(self, x: Tensor) -> Tensor:
        """Return x (b, Hk, G * m, n) times 0 where dropout drops and its scale elsewhere.

        Without dropout it is x itself.
        """
        return x if self._kept is None else x * self._kept

    def add_to_keys(self, into: Tensor, x: Tensor) -> None:
        """Add x (b, Hk, n, D) to the tile's keys in `into` (B, Sk, Hk, D) or (T, Hk, D)."""
        view = self.strip.part.keys(into)[..., self.first : self.last, :]
        view += x

    def add_to_pairs(self, into: Tensor, x: Tensor) -> None:
        """Add x (b, Hk, G * m, n) to the tile's elements in `into`, summed over shared dims.

        Args:
            into: a tensor that broadcasts to (B, Hq, Sq, Sk), the gradient of a bias.
        """
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
        """Return i + Sk - Sq - j for each query i and key j, int64 (m, n).

        It is the number of keys by which key j lies before the query's own, negative behind it.
        """
        strip, device = self.strip, self.strip.call.q.device
        offset = strip.part.length_k - strip.part.length_q
        i = torch.arange(strip.first + offset, strip.last + offset, device=device)
        return i.unsqueeze(-1) - torch.arange(self.first, self.last, device=device)

    def _visible(self, distance: Tensor, mask: MaskStrip | None) -> Tensor | None:
        """Return which keys each query sees by the window and the mask; None if all see all.

        Args:
            distance: (m, n), from `_distance`.
            mask: the strip of the call's block mask, or None.

        Returns:
            bool (m, n), or with a mask (b or 1, Hk or 1, G or 1, m, n), True where visible.
        """
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
    """Return (..., 1) with 0 for a row that is finite in all tensors, else NaN.

    Args:
        tensors: tensors whose last dims are the rows' channels; None counts as finite.
    """
    return sum((x * 0.0).sum(-1, keepdim=True) for x in tensors if x is not None)  # type: ignore[return-value]
