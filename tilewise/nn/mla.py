"""Multi-head latent attention with its projections, for DeepSeek-V2 and V3: training and
serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.spec import LatentLayer
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.context import AttentionContext
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.layers import RMSNorm, project
from tilewise.nn.packed import PackedLinear, can_pack

__all__ = ["LatentConfig", "MultiheadLatentAttention"]


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of latent attention, as `MultiheadLatentAttention` takes them.

    Attributes:
        kv_rank: R, the channels of the latent from which keys and values are computed.
        nope_dim, rope_dim: Dn and Dr, the channels of a head without and with rotation.
        v_head_dim: Dv, the channels of a value.
        q_rank: the channels of the latent of queries; None projects them from x directly.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    q_rank: int | None = None


class MultiheadLatentAttention(nn.Module):
    """Project to latents, rotate the rotary channels, attend causally, project back.

    Queries: c_q = norm(x W_qa), then (Dn + Dr) channels a head from c_q, the last Dr rotated.
    Keys and values: [c, k_r] = x W_kva; z = norm(c) and k_rope = rotated k_r are all that a cache
    holds. Head h has the key [z W_uk,h  k_rope] and the value z W_uv,h. Expanded, attention runs on
    those; absorbed, on z itself, with W_uk folded into the query and W_uv into the output.

    Rows of q_b_proj are Dn + Dr for each head in turn, rows of kv_b_proj Dn (W_uk) + Dv (W_uv) for
    each, rows of kv_a_proj R + Dr: DeepSeek's q_a_proj, q_a_layernorm, q_b_proj (q_proj),
    kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj can be loaded unchanged.

    Args:
        hidden_size: E, the width of the residual stream.
        num_heads: Hq; every head has keys and values of its own.
        kv_rank: R, the channels of z.
        nope_dim, rope_dim: Dn and Dr, the channels of a head without and with rotation.
        v_head_dim: Dv, the channels of a value.
        q_rank: the channels of c_q; None projects queries from x directly (DeepSeek-V2-Lite).
        norm_eps: the epsilon of the RMSNorm of both latents.
        rope_interleaved: True if the Dr channels are paired as (2i, 2i + 1), DeepSeek's order;
            False for (i, i + Dr / 2).
        softmax_scale: the factor of q . k; (Dn + Dr) ** -0.5 when None.
        qkv_bias: True if the two down-projections (and q_proj) have a bias.
        q_bias: True if q_proj has a bias, when queries have no latent; as qkv_bias when None.
        o_bias: True if the output projection has a bias.
    """

    e: Tensor | None
    f: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_head_dim: int,
        q_rank: int | None = None,
        norm_eps: float = 1e-6,
        rope_interleaved: bool = True,
        softmax_scale: float | None = None,
        qkv_bias: bool = False,
        q_bias: bool | None = None,
        o_bias: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "kv_rank": kv_rank, "nope_dim": nope_dim}
        for name, value in (sizes | {"v_head_dim": v_head_dim}).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if rope_dim < 2 or rope_dim % 2:
            raise ValueError(f"rope_dim must be even and at least 2, got {rope_dim}")
        self.num_heads, self.kv_rank, self.q_rank = num_heads, kv_rank, q_rank
        self.nope_dim, self.rope_dim, self.v_head_dim = nope_dim, rope_dim, v_head_dim
        self.rope_interleaved = rope_interleaved
        head_dim = nope_dim + rope_dim
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.q_a_proj = None if q_rank is None else nn.Linear(hidden_size, q_rank, bias=qkv_bias)
        self.q_a_norm = None if q_rank is None else RMSNorm(q_rank, norm_eps)
        has_q_bias = (qkv_bias if q_bias is None else q_bias) and q_rank is None
        self.q_b_proj = nn.Linear(q_rank or hidden_size, num_heads * head_dim, bias=has_q_bias)
        self.kv_a_proj = nn.Linear(hidden_size, kv_rank + rope_dim, bias=qkv_bias)
        self.kv_a_norm = RMSNorm(kv_rank, norm_eps)
        self.kv_b_proj: nn.Linear | InvariantLinear | None = nn.Linear(
            kv_rank, num_heads * (nope_dim + v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=o_bias)
        self.packed_uk: nn.ModuleList | None = None  # one per head, see pack_up_projections
        self.packed_uv: nn.ModuleList | None = None
        self.register_buffer("e", None, persistent=False)
        self.register_buffer("f", None, persistent=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: LatentLayer | None = None,
    ) -> Tensor:
        """Attend within each sequence of a dense batch, or over a paged cache of latents.

        With a cache, sequences of few new tokens attend absorbed and those of many expanded, see
        `expanding_run`. The numbers of new tokens are read on a CPU. On a GPU, where reading them
        would wait, the whole step is absorbed unless all of its runs are equally long.

        Args:
            x: (B, S, E) dense and differentiable; (T, E) packed when ctx and kv are given.
            rope: cos and sin, float32, as apply_rope takes them for Dr channels; None does not
                rotate.
            ctx: the AttentionContext of the rows of x; the new latents are written first.
            kv: this layer's latent cache, (num_blocks, block_size, R + Dr); an 8-bit one with its
                scales, (num_blocks, block_size, 2) float32, as a pair.

        Returns:
            Same shape as x.

        Raises:
            ValueError: only one of ctx and kv is given, ctx has a tree_mask, or ctx has `attend` or
                adapters after `absorb` has made E or F.
        """
        if (ctx is None) != (kv is None):
            raise ValueError(
                f"ctx and kv must come together, got only {'ctx' if kv is None else 'kv'}"
            )
        if ctx is not None and ctx.tree_mask is not None:
            raise ValueError("ctx.tree_mask must be None over latents, got a mask")
        adapters = None if ctx is None else ctx.adapters
        c_q = x
        if self.q_a_proj is not None and self.q_a_norm is not None:
            c_q = self.q_a_norm(project(self.q_a_proj, x, adapters))
        both = project(self.kv_a_proj, x, adapters)
        latent, k_rope = both.split_with_sizes((self.kv_rank, self.rope_dim), dim=-1)
        latent = self.kv_a_norm(latent)
        k_rope = self._turned(k_rope.unsqueeze(-2), rope).squeeze(-2)
        if ctx is None or kv is None:
            w_uk, w_uv = self._up_projections()
            q = torch.cat(self._queries(c_q, rope), dim=-1)
            o = ops.mla_attention(
                q, latent, k_rope, w_uk, w_uv, causal=True, softmax_scale=self.softmax_scale
            )
            y: Tensor = self.o_proj(o.flatten(-2))
            return y
        cache, scale = _with_scale(kv)
        ops.write_latent_cache(latent, k_rope, cache, ctx.slot_mapping, latent_scale=scale)
        if ctx.attend is not None or adapters is not None:
            if self.e is not None or self.f is not None:
                given = "adapters" if ctx.attend is None else "attend"
                raise ValueError(f"ctx.{given} must be None after absorb(), got one")
            q = torch.cat(self._queries(c_q, rope, adapters), dim=-1)
            o = ctx.attended(partial(self._attend, kv), q, self.v_head_dim)
            return project(self.o_proj, o.flatten(-2), adapters)
        expanded = self._expanded_sequences(ctx)
        if not expanded:
            return self._absorbed(c_q, rope, ctx, kv)
        if len(expanded) == ctx.block_table.shape[0]:
            return self._expanded(c_q, rope, ctx, kv)
        y = torch.empty_like(x)
        for rows, part, is_expanded in _both_kinds(ctx, expanded):
            attend = self._expanded if is_expanded else self._absorbed
            turned = None if rope is None else (rope[0][rows], rope[1][rows])
            y[rows] = attend(c_q[rows], turned, part, kv)
        return y

    @property
    def expanding_run(self) -> int:
        """The number of new tokens of a sequence from which expanding its cached latents costs no
        more FLOPs than attending absorbed.

        A cached token costs R (Dn + Dv) multiply-adds a head to expand and then Dn + Dr + Dv for
        each new token, or 2 R + Dr for each absorbed: equal at R (Dn + Dv) / (2 R - Dn - Dv).
        """
        saved = 2 * self.kv_rank - self.nope_dim - self.v_head_dim
        if saved <= 0:
            return 1 << 62  # absorbed attention is never more expensive
        return -(-self.kv_rank * (self.nope_dim + self.v_head_dim) // saved)

    @torch.no_grad()
    def absorb(self, *, folds_q: bool | None = None, folds_o: bool | None = None) -> None:
        """Multiply pairs of up-projections once, so that cached steps need not.

        E_h = W_uq,h^T W_uk,h maps c_q straight to the latent query, F_h = W_uv,h^T W_o,h^T maps the
        latent output straight to the residual stream. Both parameters and FLOPs change from m Dn +
        Dn R to m R a head for E (m = q_rank, or E without one), from R Dv + Dv E to R E for F. By
        default each is made where that is less: Dn > m R / (m + R), Dv > R E / (R + E). Neither is
        so for DeepSeek-V3 (Dn 128 against 384, Dv 128 against 478): there W_uk and W_uv stay two
        small products of their own. Call it again when parameters have changed.

        Args:
            folds_q, folds_o: True to make E and F; None decides as above.

        Raises:
            ValueError: E or F is asked for, but the query or the output projection has a bias.

        Source: Stratos, "Efficient Attention", section 3.2.
        """
        w_uk, w_uv = self._up_projections()
        w_uq = self.q_b_proj.weight.unflatten(0, (self.num_heads, -1))[:, : self.nope_dim]
        w_o = self.o_proj.weight.unflatten(1, (self.num_heads, -1))  # (E, Hq, Dv)
        m, hidden_size = w_uq.shape[2], w_o.shape[0]
        if folds_q is None:
            folds_q = self.nope_dim * (m + self.kv_rank) > m * self.kv_rank
        if folds_o is None:
            folds_o = self.v_head_dim * (hidden_size + self.kv_rank) > hidden_size * self.kv_rank
        if folds_o and self.o_proj.bias is not None:
            raise ValueError("folds_o must be False with a bias on the output, got True")
        if folds_q and self.q_b_proj.bias is not None:
            raise ValueError("folds_q must be False with a bias on the queries, got True")
        wide = torch.promote_types(w_uq.dtype, torch.float32)
        e = torch.einsum("hdm,hdr->hmr", w_uq.to(wide), w_uk.to(wide)) if folds_q else None
        f = torch.einsum("hdr,ehd->hre", w_uv.to(wide), w_o.to(wide)) if folds_o else None
        self.e = None if e is None else e.to(w_uq.dtype)
        self.f = None if f is None else f.to(w_o.dtype)

    def pack_up_projections(self) -> None:
        """Pack W_uk and W_uv, head by head, in the layout that this CPU multiplies fastest:
        inference only.

        Their products then depend on no other rows, as those of `PackedLinear`, and cached steps
        are always absorbed. Attention over a dense batch raises ValueError from then on. If the
        weights cannot be packed, nothing changes.
        """
        assert self.kv_b_proj is not None
        w_uk, w_uv = self._up_projections()
        if not (can_pack(w_uk[0]) and can_pack(w_uv[0])):
            return
        self.packed_uk = nn.ModuleList(PackedLinear(w.detach().T.contiguous()) for w in w_uk)
        self.packed_uv = nn.ModuleList(PackedLinear(w.detach().contiguous()) for w in w_uv)
        self.kv_b_proj = None

    def refill_up_projections(self, weight: Tensor) -> None:
        """Overwrite the packed W_uk and W_uv with those of another weight of kv_b_proj, (Hq (Dn +
        Dv), R)."""
        assert self.packed_uk is not None
        assert self.packed_uv is not None
        heads = weight.detach().unflatten(0, (self.num_heads, -1))
        w_uk, w_uv = heads.split_with_sizes((self.nope_dim, self.v_head_dim), dim=1)
        for key, value, uk, uv in zip(self.packed_uk, self.packed_uv, w_uk, w_uv, strict=True):
            assert isinstance(key, PackedLinear)
            assert isinstance(value, PackedLinear)
            key.refill(uk.T.contiguous())
            value.refill(uv.contiguous())

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return w_uk (Hq, Dn, R) and w_uv (Hq, Dv, R), views of kv_b_proj.weight.

        Raises ValueError after `pack_up_projections`, which drops that weight.
        """
        if self.kv_b_proj is None:
            raise ValueError("dense attention must come before pack_up_projections, got it after")
        weight = self.kv_b_proj.weight
        assert isinstance(weight, Tensor)
        weight = weight.unflatten(0, (self.num_heads, -1))
        w_uk, w_uv = weight.split_with_sizes((self.nope_dim, self.v_head_dim), dim=1)
        return w_uk, w_uv

    def _queries(
        self,
        c_q: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        adapters: StepAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Project c_q to the queries' parts (..., Hq, Dn), not rotated, and (..., Hq, Dr), rotated.

        Args:
            c_q: the latent of the queries, normalised; the hidden states where the model has none.
            rope: cosines and sines that rotate the second part; None leaves it as it is.
            adapters: the adapters of low rank that this step uses; None for none.
        """
        q = project(self.q_b_proj, c_q, adapters).unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split_with_sizes((self.nope_dim, self.rope_dim), dim=-1)
        return q_nope, self._turned(q_rope, rope)

    def _turned(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return x (..., H, Dr), the rotary channels, rotated by cos and sin of `rope`; None
        returns x itself."""
        if rope is None:
            return x
        return ops.apply_rope(x, *rope, interleaved=self.rope_interleaved)

    def _attend(
        self, kv: LatentLayer, q: Tensor, ctx: AttentionContext, out: Tensor | None = None
    ) -> Tensor:
        """Attend from rotated queries (T, Hq, Dn + Dr) to cached latents; return o (T, Hq, Dv).

        The method allocates o itself and ignores `out`.
        """
        del out
        expanded = self._expanded_sequences(ctx)
        if not expanded:
            return self._attend_absorbed(q, ctx, kv)
        if len(expanded) == ctx.block_table.shape[0]:
            return self._attend_expanded(q, ctx, kv)
        o = q.new_empty((*q.shape[:2], self.v_head_dim))
        for rows, part, is_expanded in _both_kinds(ctx, expanded):
            attend = self._attend_expanded if is_expanded else self._attend_absorbed
            o[rows] = attend(q[rows], part, kv)
        return o

    def _absorbed(
        self,
        c_q: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext,
        kv: LatentLayer,
    ) -> Tensor:
        """Attend from latent queries c_q (T, m) to the cached latents themselves; return the
        layer's output (T, hidden_size).

        m is q_rank; without one it is hidden_size, and c_q is x. The matrices `self.e` and
        `self.f`, each if `absorb` has made it, take the place of two products in a row.
        """
        is_invariant = ctx.batch_invariant
        if self.e is None:
            q_nope, q_rope = self._queries(c_q, rope)
            q_latent = self._times_up(q_nope, is_invariant, is_key=True)
        else:
            weight = self.q_b_proj.weight.unflatten(0, (self.num_heads, -1))[:, self.nope_dim :]
            q_rope = torch.einsum("tm,hdm->thd", c_q, weight)
            q_rope = self._turned(q_rope, rope)
            q_latent = torch.einsum("tm,hmr->thr", c_q, self.e)
        o = self.attend_latents(q_latent, q_rope, ctx, kv)
        if self.f is not None:
            return torch.einsum("thr,hre->te", o, self.f)
        return project(self.o_proj, self._times_up(o, is_invariant, is_key=False).flatten(-2))

    def _attend_absorbed(self, q: Tensor, ctx: AttentionContext, kv: LatentLayer) -> Tensor:
        """Attend from queries (T, Hq, Dn + Dr) to the latents themselves; return o (T, Hq, Dv)."""
        q_nope, q_rope = q.split_with_sizes((self.nope_dim, self.rope_dim), dim=-1)
        q_latent = self._times_up(q_nope, ctx.batch_invariant, is_key=True)
        o = self.attend_latents(q_latent, q_rope, ctx, kv)
        return self._times_up(o, ctx.batch_invariant, is_key=False)

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, ctx: AttentionContext, kv: LatentLayer
    ) -> Tensor:
        """Attend from both parts of absorbed queries, (T, Hq, R) and (T, Hq, Dr), to the cached
        latents.

        Returns o (T, Hq, R), weighted sums of latents, to which W_uv is not yet applied.
        """
        cache, scale = _with_scale(kv)
        o: Tensor = ops.mla_decode(
            q_latent.contiguous(),
            q_rope,
            cache,
            block_table=ctx.block_table,
            seqlens_k=ctx.seqlens_k,
            cu_seqlens_q=ctx.cu_seqlens_q,
            max_seqlen_q=ctx.max_seqlen_q,
            softmax_scale=self.softmax_scale,
            latent_scale=scale,
            batch_invariant=ctx.batch_invariant,
        )
        return o

    def _times_up(self, x: Tensor, is_invariant: bool, *, is_key: bool) -> Tensor:
        """Return x_h W_uk,h (T, Hq, R) of x (T, Hq, Dn), or x_h W_uv,h^T (T, Hq, Dv) of (T, Hq, R).

        The product is made head by head if a row's bits must not depend on others, at once
        otherwise.
        """
        packed = self.packed_uk if is_key else self.packed_uv
        if isinstance(packed, nn.ModuleList):
            return torch.stack([head(x[:, h]) for h, head in enumerate(packed)], dim=1)
        weight = self._up_projections()[not is_key]
        if is_invariant and x.is_cuda:
            rows = (weight.transpose(1, 2) if is_key else weight).contiguous()
            ops.settle(x.device)  # a product may ask for its weight before what is before it ends
            products = [ops.invariant_linear(x[:, h].contiguous(), w) for h, w in enumerate(rows)]
            return torch.stack(products, dim=1)
        return torch.einsum("thd,hdr->thr" if is_key else "thr,hdr->thd", x, weight)

    def _expanded(
        self,
        c_q: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext,
        kv: LatentLayer,
    ) -> Tensor:
        """Attend from latent queries c_q (T, m) to keys and values of all heads, computed from the
        cached latents; return the output (T, E)."""
        q = torch.cat(self._queries(c_q, rope), dim=-1)
        y: Tensor = self.o_proj(self._attend_expanded(q, ctx, kv).flatten(-2))
        return y

    def _attend_expanded(self, q: Tensor, ctx: AttentionContext, kv: LatentLayer) -> Tensor:
        """Attend from queries (T, Hq, Dn + Dr) to keys and values computed from the cached latents;
        return o (T, Hq, Dv)."""
        w_uk, w_uv = self._up_projections()
        cache, scale = _with_scale(kv)
        o = ops.mla_prefill(
            q,
            cache,
            w_uk,
            w_uv,
            block_table=ctx.block_table,
            seqlens_k=ctx.seqlens_k,
            cu_seqlens_q=ctx.cu_seqlens_q,
            max_seqlen_q=ctx.max_seqlen_q,
            softmax_scale=self.softmax_scale,
            latent_scale=scale,
        )
        assert isinstance(o, Tensor)
        return o

    def _expanded_sequences(self, ctx: AttentionContext) -> list[int] | None:
        """Return the indices of the step's sequences that attend expanded; None or an empty list if
        none does.

        These are the sequences of at least `expanding_run` new tokens; with batch_invariant or
        packed up-projections none. Off the CPU the answer is all sequences, if their runs are
        equally long, or none.
        """
        num_seqs, longest = ctx.block_table.shape[0], ctx.max_seqlen_q
        num_tokens = ctx.slot_mapping.shape[0]
        if ctx.batch_invariant or self.packed_uk is not None or longest < self.expanding_run:
            return None
        if ctx.block_table.device.type == "cpu" and not torch.compiler.is_compiling():
            runs = ctx.cu_seqlens_q.diff().tolist()
            return [b for b, run in enumerate(runs) if run >= self.expanding_run]
        return list(range(num_seqs)) if num_tokens == num_seqs * longest else None


def _with_scale(kv: LatentLayer) -> tuple[Tensor, Tensor | None]:
    """Return the latent cache of a layer and its scales; the scales are None if the cache is not
    8-bit."""
    return kv if isinstance(kv, tuple) else (kv, None)


def _both_kinds(
    ctx: AttentionContext, expanded: list[int]
) -> Iterator[tuple[Tensor, AttentionContext, bool]]:
    """Yield (indices of rows, context, is_expanded) of two groups of sequences.

    The first group attends to keys and values expanded from the cache; the second attends to the
    cached latents themselves.
    """
    chosen = torch.zeros(ctx.block_table.shape[0], dtype=torch.bool)
    chosen[expanded] = True
    for is_expanded in (True, False):
        yield *_subset(ctx, chosen if is_expanded else ~chosen), is_expanded


def _subset(ctx: AttentionContext, chosen: Tensor) -> tuple[Tensor, AttentionContext]:
    """Return the indices of the rows of the sequences for which `chosen` (B,) is True, and a
    context of those sequences alone; `chosen` is bool, on a CPU."""
    runs = ctx.cu_seqlens_q.diff()
    owner = torch.repeat_interleave(torch.arange(len(runs)), runs.long())
    rows = chosen[owner].nonzero().squeeze(1)
    own = runs[chosen]
    return rows, AttentionContext(
        cu_seqlens_q=torch.nn.functional.pad(own.cumsum(0), (1, 0)).int(),
        max_seqlen_q=int(own.max()),
        seqlens_k=ctx.seqlens_k[chosen],
        block_table=ctx.block_table[chosen],
        slot_mapping=ctx.slot_mapping[rows],
        batch_invariant=ctx.batch_invariant,
    )
