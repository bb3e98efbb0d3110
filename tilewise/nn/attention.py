"""Self-attention with its projections: MHA, GQA and MQA are head counts of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.spec import KVLayer
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.context import Attend, AttentionContext
from tilewise.nn.dense_cache import BLOCK_SIZE, dense_context, packed_rope
from tilewise.nn.layers import Gate, Parts, RankPart, RMSNorm, project, project_in_parts
from tilewise.nn.valued import valued

__all__ = ["Attention", "attend_as_steps", "attention_over"]


OnMaxLogits = Callable[[Tensor], None]
KeysAndValues = dict[int, tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Project to heads, rotate, attend causally, project back.

    q, k and v come from one matrix product: rows of qkv_proj.weight are the Hq query heads, then
    the Hk key heads, then the Hk value heads, D rows each; with has_gate the Hq gates come first.

    Args:
        hidden_size: the width E of x.
        num_q_heads, num_kv_heads: Hq and Hk; Hq is a multiple of Hk.
        head_dim: D; Hq * D need not be E.
        qkv_bias, o_bias: whether the projections add a bias.
        qk_norm_eps: the epsilon of an RMS norm of each head of q and k (Qwen3); None is no norm.
        window: keys that a query sees, its own included; None is no bound.
        softmax_scale: the factor of q . k; None is D ** -0.5.
        has_sinks: True for one learned logit a head in the denominator only (gpt-oss).
        softcap: c of the softcap c tanh(logits / c); 0 is off (Gemma 2).
        rope_interleaved: True to rotate channels in pairs (2i, 2i + 1), False in pairs (i, i + R /
            2) of the R rotated ones.
        alibi_slopes: the slope of each query head; slope times distance is subtracted from a logit
            (Press et al., 2021). Empty is off.
        kv_parts: the number of projections for keys and values: 2, 1 if keys are the values too, or
            0 if another layer's keys and values are read.
        has_gate: True to multiply the output of each head by the sigmoid of a further projection of
            x (Qwen3-Next).

    Attributes:
        q_norm, k_norm: the norms of q and k, of each head's D channels or, where norms_all_heads is
            True, of the channels of all heads at once (OLMo 2); None for none.
        norms_after_rope: True if the norms follow the rotation.
        v_norm: the norm of the values of a head; None for none.
        leaves_parts: True if `forward` may return partial sums for the next norm's `add`, see
            `project_in_parts`.
        layer: the number of this layer in the model, from 0.
        kv_layer: the number of the layer whose keys and values are read instead of own ones, or
            None.
        is_read: True if another layer reads this one's keys and values.
        is_chunked: True if the window begins anew at each multiple of its size.
        attends_as_cached: True if a dense batch must give the bits of a batch-invariant engine with
            a cache, see `nn.dense_cache`; gradients stay those of dense attention.
    """

    kv_layer: int | None

    def __init__(
        self,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        softmax_scale: float | None = None,
        has_sinks: bool = False,
        softcap: float = 0.0,
        rope_interleaved: bool = False,
        alibi_slopes: tuple[float, ...] = (),
        kv_parts: int = 2,
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads {num_kv_heads}, got {num_q_heads}"
            )
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.softmax_scale = softmax_scale
        self.softcap = softcap
        self.rope_interleaved = rope_interleaved
        self.alibi_slopes = alibi_slopes
        self._slopes: Tensor | None = None  # on the device; no buffer, as it is never rounded
        self.norms_after_rope = self.norms_all_heads = False
        self.attends_as_cached = False
        self.sinks = nn.Parameter(torch.zeros(num_q_heads)) if has_sinks else None
        self.leaves_parts = False
        self.kv_parts, self.has_gate = kv_parts, has_gate
        self.gate = Gate(torch.sigmoid, fuses_on_cpu=True) if has_gate else None
        self.v_norm: nn.Module | None = None
        self.layer, self.kv_layer, self.is_read, self.is_chunked = 0, None, False, False
        num_heads = (1 + has_gate) * num_q_heads + kv_parts * num_kv_heads
        self.qkv_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_q_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: KVLayer | None = None,
        on_max_logits: OnMaxLogits | None = None,
        growth: Tensor | None = None,
        read: KeysAndValues | None = None,
        added: Tensor | None = None,
    ) -> Tensor | Parts | RankPart:
        """Attend within each sequence of a dense batch, or over a paged cache when given one.

        Args:
            x: (B, S, E) dense and differentiable; (T, E) packed when ctx and kv are given.
            rope: cos and sin, float32, as apply_rope takes them; None does not rotate.
            ctx: the sequences and slots of the rows of x, whose new keys and values are written
                first.
            kv: this layer's k_cache and v_cache, each (num_blocks, block_size, Hk, D), and of an
                8-bit cache k_scale and v_scale (num_blocks, block_size, Hk).
            on_max_logits: a function that is called with the largest logit of each query head of a
                dense batch, float32 (Hq,), as QK-clip needs it, see docs/guide/training.md.
            growth: the factors of the rows' queries, float32 (..., 1, 1); None for none.
            read: k and v of a dense batch by layer number. A layer with `is_read` writes its own
                into the dict, a layer with `kv_layer` reads them; None if every layer uses its own.
            added: (..., (Hq + 2 Hk) D), a term that is added to the projections q, k and v before
                norms and rotation; None for none.

        Returns:
            Same shape as x; with `leaves_parts` perhaps `Parts` or a `RankPart`, partial sums that
            the next norm adds.

        Raises:
            ValueError: only one of ctx and kv is given, or on_max_logits with a cache.
        """
        if on_max_logits is not None and kv is not None:
            raise ValueError("on_max_logits must be None with a cache, got a function")
        if (ctx is None) != (kv is None):
            raise ValueError(f"ctx and kv must come together, got only {'kv' if kv else 'ctx'}")
        adapters = None if ctx is None else ctx.adapters
        heads, gate = self._heads(x, adapters)
        if added is not None:
            heads = heads + added.unflatten(-1, heads.shape[-2:])
        if ctx is not None and kv is not None:
            o = self._attend_cache(heads, rope, ctx, kv, growth)
        elif self.attends_as_cached and heads.numel():
            o = self._attend_as_cached(heads, rope, on_max_logits)
        else:
            o = self._attend_dense(heads, rope, on_max_logits, growth, read)
        o = o.flatten(-2)
        if self.gate is not None:
            o = self.gate(gate, o)
        out = project_in_parts if self.leaves_parts else project
        return out(self.o_proj, o, adapters)

    def attend(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, ctx: AttentionContext, kv: KVLayer
    ) -> Tensor:
        """Attend over a paged cache from projections qkv (T, (Hq + 2 Hk) D); return o (T, Hq D).

        The new keys and values are written to the cache first; o is not yet projected by o_proj.
        """
        num_heads = self.num_q_heads + self.kv_parts * self.num_kv_heads
        heads = qkv.unflatten(-1, (num_heads, self.head_dim))
        return self._attend_cache(heads, rope, ctx, kv).flatten(-2)

    def _attend_dense(
        self,
        heads: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        on_max_logits: OnMaxLogits | None,
        growth: Tensor | None = None,
        read: KeysAndValues | None = None,
    ) -> Tensor:
        """Attend within each sequence of a dense batch; return o (B, S, Hq, D).

        Args:
            heads: (B, S, Hq + 2 Hk, D), the projections to queries, keys and values.
            rope: cosines and sines, None for no rotation.
            on_max_logits: a function that is called with the largest logit of each query head,
                (Hq,) float32; None for none.
            growth: factors of the queries, broadcastable to them; None for 1.
            read: keys and values by layer, from which a layer without own ones reads, and to which
                a layer that others read writes.
        """
        if self.kv_layer is None:
            q, k, v = self._rotated(heads, rope)
        else:
            assert read is not None
            q, (k, v) = self._rotated_queries(heads, rope), read[self.kv_layer]
        if self.is_read and read is not None:
            read[self.layer] = k, v
        q = q if growth is None else (q * growth).to(q.dtype)
        length = q.shape[1]
        if self.is_chunked and self.window is not None and length > self.window:
            q, k, v = (_in_chunks(x, self.window) for x in (q, k, v))
        options: dict[str, Any] = {"window": self.window, "softmax_scale": self.softmax_scale}
        options |= {"causal": True, "sinks": self.sinks, "softcap": self.softcap}
        options["alibi_slopes"] = self._slopes_on(q.device)
        if on_max_logits is None:
            o: Tensor = ops.attention(q, k, v, **options)
        else:
            o, most = ops.attention(q, k, v, return_max_logits=True, **options)
            on_max_logits(most)
        return o if len(o) == len(heads) else _from_chunks(o, len(heads), length)

    def _attend_as_cached(
        self, heads: Tensor, rope: tuple[Tensor, Tensor] | None, on_max_logits: OnMaxLogits | None
    ) -> Tensor:
        """Return o (B, S, Hq, D) of a dense batch with the bits that an engine computes over a
        paged cache.

        A temporary cache holds k and v. Gradients, if needed, and `on_max_logits` come from a
        second pass by `_attend_dense`.
        """
        batch, length = heads.shape[:2]
        ctx = dense_context(batch, length, heads.device)
        rows, blocks = heads.detach().flatten(0, 1), ctx.block_table.numel()
        shape = (blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        kv = (heads.new_zeros(shape), heads.new_zeros(shape))
        with torch.no_grad():
            o = self._attend_cache(rows, packed_rope(rope, batch), ctx, kv)
        value: Tensor = o.unflatten(0, (batch, length))
        learns = torch.is_grad_enabled() and (heads.requires_grad or self._learns_within())
        if not learns and on_max_logits is None:
            return value
        dense = self._attend_dense(heads, rope, on_max_logits)
        return valued(dense, value) if learns else value

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        """Return the slopes of ALiBi on a device, (Hq,) float32, kept for later calls; None for a
        layer without ALiBi."""
        if self.alibi_slopes and (self._slopes is None or self._slopes.device != device):
            with torch.inference_mode(False):
                self._slopes = torch.tensor(self.alibi_slopes, device=device)
        return self._slopes

    def _learns_within(self) -> bool:
        """Return whether sinks, or a norm of q or k, have parameters that require a gradient."""
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        within = [self.sinks, *(weight for norm in norms for weight in norm.parameters())]
        return any(weight is not None and weight.requires_grad for weight in within)

    @property
    def norms_fuse(self) -> bool:
        """Whether one kernel can normalise and rotate q and k and write the cache.

        True without norms; else the norms must be `RMSNorm`s of single heads before the rotation,
        in a layer with keys of its own.
        """
        if self.q_norm is None:
            return True
        if self.kv_layer is not None:
            return False
        is_usual = isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return is_usual and not (self.norms_after_rope or self.norms_all_heads)

    def _attend_cache(
        self,
        heads: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext,
        kv: KVLayer,
        growth: Tensor | None = None,
    ) -> Tensor:
        """Write the rows' keys and values to the paged cache, and attend over the cache; return o
        (T, Hq, D).

        A layer with `kv_layer` writes nothing: `heads` are queries only, and `kv` is the other
        layer's cache.

        Args:
            heads: (T, Hq + 2 Hk, D), the projections to queries, keys and values.
            rope: cosines and sines, None for no rotation.
            ctx: the sequences and slots of the rows.
            kv: the layer's cache tensors, and its scales if it is an 8-bit one.
            growth: factors of the queries, broadcastable to them; None for 1.
        """
        k_cache, v_cache, *rest = kv
        k_scale, v_scale = rest or (None, None)
        if self.kv_layer is not None:
            q = self._rotated_queries(heads, rope)
        elif (
            rope is None or not self.norms_fuse or (torch.is_grad_enabled() and heads.requires_grad)
        ):
            q, k, v = self._rotated(heads, rope)
            ops.write_kv_cache(
                k, v, k_cache, v_cache, ctx.slot_mapping, k_scale=k_scale, v_scale=v_scale
            )
        else:
            q, k, v = self._split(heads)
            q_norm, k_norm = self.q_norm, self.k_norm
            assert q_norm is None or isinstance(q_norm, RMSNorm)
            assert k_norm is None or isinstance(k_norm, RMSNorm)
            q = ops.rope_write_kv_cache(
                q,
                k,
                v,
                k_cache,
                v_cache,
                ctx.slot_mapping,
                cos=rope[0],
                sin=rope[1],
                interleaved=self.rope_interleaved,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                norm_eps=0.0 if q_norm is None else q_norm.eps,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        if growth is not None:
            q = (q * growth).to(q.dtype)
        return ctx.attended(self._over(kv), q, self.head_dim)

    def _over(self, kv: KVLayer) -> Attend:
        """Return `attention_over` of the cache `kv`, a function of rotated queries and their
        context, with this layer's window (or chunks), scale, softcap, sinks and slopes."""
        return attention_over(
            kv,
            window=self.window,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self._slopes_on(kv[0].device),
            is_chunked=self.is_chunked,
        )

    def _heads(self, x: Tensor, adapters: StepAdapters | None) -> tuple[Tensor, Tensor | None]:
        """Project x; return the query, key and value heads (..., Hq + kv_parts * Hk, D), and the
        gate (..., Hq D), None without `has_gate`.

        Norms, rotation and the gate's sigmoid are not applied yet.
        """
        num_heads = self.num_q_heads + self.kv_parts * self.num_kv_heads
        qkv, gate = project(self.qkv_proj, x, adapters), None
        if self.has_gate:
            width = self.num_q_heads * self.head_dim
            gate, qkv = qkv.split_with_sizes((width, qkv.shape[-1] - width), -1)
        heads: Tensor = qkv.unflatten(-1, (num_heads, self.head_dim))
        return heads, gate

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # split_with_sizes, since Tensor.split is Python around it and takes twice as long.
        hq, hk = self.num_q_heads, self.num_kv_heads
        if self.kv_parts == 2:
            q, k, v = heads.split_with_sizes((hq, hk, hk), dim=-2)
        else:
            q, k = heads.split_with_sizes((hq, hk), dim=-2)
            v = k
        v = v if self.v_norm is None else self.v_norm(v)
        return q, k, v

    def _rotated_queries(self, heads: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the queries (..., Hq, D) of a layer without keys of its own, normalised and
        rotated."""
        q = heads
        if self.q_norm is not None and not self.norms_after_rope:
            q = self._normalised(q, self.q_norm)
        if rope is not None:
            q = ops.apply_rope(q, *rope, interleaved=self.rope_interleaved)
        if self.q_norm is not None and self.norms_after_rope:
            q = self._normalised(q, self.q_norm)
        return q

    def _rotated(
        self, heads: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `heads` into q (..., Hq, D), k and v (..., Hk, D); normalise and rotate q and k,
        return all.

        The values get `v_norm`, if there is one, but no rotation; with kv_parts 1 they are k before
        norm and rotation.
        """
        hq, hk = self.num_q_heads, self.num_kv_heads
        if self.q_norm is None and self.kv_parts == 2:
            qk, v = heads.split_with_sizes((hq + hk, hk), dim=-2)
            if rope is not None:  # q and k turn by the same angles: one call
                qk = ops.apply_rope(qk, *rope, interleaved=self.rope_interleaved)
            q, k = qk.split_with_sizes((hq, hk), dim=-2)
            return q, k, v
        q, k, v = self._split(heads)
        has_norms = self.q_norm is not None
        if has_norms and not self.norms_after_rope:
            q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        if rope is not None:
            q, k = (ops.apply_rope(x, *rope, interleaved=self.rope_interleaved) for x in (q, k))
        if has_norms and self.norms_after_rope:
            q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        return q, k, v

    def _normalised(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Return x, q or k (..., H, D), normalised by `norm`: by head, or all heads at once with
        norms_all_heads."""
        assert norm is not None
        if self.norms_all_heads:
            y: Tensor = norm(x.flatten(-2)).unflatten(-1, x.shape[-2:])
        else:
            y = norm(x)
        return y


def attention_over(
    kv: KVLayer,
    *,
    window: int | None,
    softmax_scale: float | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    is_chunked: bool = False,
) -> Attend:
    """Return a function `attend(q, ctx, out=None)` that computes a layer's attention over its paged
    cache.

    The function maps rotated queries q (T, Hq, D) to o (T, Hq, Dv) by `ops.paged_attention`, with
    the plan of `ctx.plans` if there is one. It writes nothing to the cache.

    Args:
        kv: the cache tensors of the layer, and its scales if they are 8-bit, see
            `Attention.forward`.
        window, softmax_scale, softcap, sinks, alibi_slopes: options of the layer, as
            `ops.paged_attention` takes them.
        is_chunked: True if the window begins anew at each multiple of its size.
    """
    k_cache, v_cache, *rest = kv
    k_scale, v_scale = rest or (None, None)
    layer: dict[str, Any] = {
        "window": window,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }

    def attend(q: Tensor, ctx: AttentionContext, out: Tensor | None = None, /) -> Tensor:
        if is_chunked and window is not None:
            ctx = ctx.in_chunks(window, k_cache.shape[1])
        options = layer | {
            "block_table": ctx.block_table,
            "seqlens_k": ctx.seqlens_k,
            "cu_seqlens_q": ctx.cu_seqlens_q,
            "max_seqlen_q": ctx.max_seqlen_q,
            "shared": ctx.shared if window is None and alibi_slopes is None else None,
            "tree_mask": ctx.tree_mask,
            "batch_invariant": ctx.batch_invariant,
        }
        plan = None
        if ctx.plans is not None and ctx.tree_mask is None:
            plan = ctx.plans.plan(q, k_cache, v_cache, **options)
        o: Tensor = ops.paged_attention(q, k_cache, v_cache, plan=plan, out=out, **options)
        return o

    return attend


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut x (B, S, H, D) into chunks of `size` tokens, zeros at the end: (B ceil(S / size), size,
    H, D)."""
    padded: Tensor = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return padded.view(-1, size, *x.shape[2:])


def _from_chunks(x: Tensor, batch: int, length: int) -> Tensor:
    """Undo `_in_chunks`: join chunks x to (batch, length, H, D), and drop the padding at the
    end."""
    whole: Tensor = x.reshape(batch, -1, *x.shape[2:])
    return whole[:, :length]


def attend_as_steps(module: nn.Module) -> None:
    """Set `attends_as_cached` below `module` where a dense batch would lack the bits of a step on a
    CPU.

    Only layers with norms of q and k need it: a step rotates normalised heads before they are
    rounded to 16 bits, `ops.apply_rope` after. Layers with `is_read`, a `v_norm` or other than two
    `kv_parts` are left.
    """
    for child in module.modules():
        if not isinstance(child, Attention) or child.q_norm is None or not child.norms_fuse:
            continue
        if child.kv_parts == 2 and child.v_norm is None and not child.is_read:
            child.attends_as_cached = True
