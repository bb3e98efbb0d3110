"""SGLang's attention over keys and values, on `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.integrations.sglang.step import StepBackend
from tilewise.ops import paged_attention

__all__ = ["PagedBackend"]


class PagedBackend(StepBackend):
    """SGLang's attention backend for models with keys and values; one for each model runner.

    SGLang's pool writes keys and values, and `paged_attention` reads them. Raises UnsupportedError
    for an 8-bit cache that is not e4m3.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        if runner.kv_cache_dtype.itemsize == 1 and runner.kv_cache_dtype != torch.float8_e4m3fn:
            raise UnsupportedError(
                f"kv_cache_dtype must have 16 or 32 bits or be e4m3, got {runner.kv_cache_dtype}"
            )
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from one new token of each sequence; arguments and result are those of
        `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from new tokens to the keys and values in SGLang's pool.

        Args:
            q: (T, Hq * D) or (T, Hq, D).
            k, v: (T, Hk, D) and (T, Hk, Dv), written first; None where another layer wrote them.
            layer: SGLang's RadixAttention, with heads, windows and scales.
            forward_batch: SGLang's batch, for which `init_forward_metadata` has run.
            save_kv_cache: False writes nothing.
            sinks: (Hq,), the sink logit of each head; None for none.

        Returns:
            o (T, Hq * Dv); rows that pad the step are 0.
        """
        step = self.step_of(layer)
        if save_kv_cache and k is not None and v is not None:
            self.pool.set_kv_buffer(
                layer, self.place(forward_batch, step), k, v, layer.k_scale, layer.v_scale
            )
        k_cache, v_cache = self.pool.get_kv_buffer(layer.layer_id)
        if k_cache.dim() != 3:
            raise UnsupportedError(f"a pool must be (slots, Hk, D), got {tuple(k_cache.shape)}")
        k_scale: Any = None
        v_scale: Any = None
        if k_cache.dtype.itemsize == 1:
            k_scale, v_scale = self._scales_of(layer)
        count = step.num_tokens
        o = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        o[count:].zero_()
        window = layer.sliding_window_size
        table: Any = step.block_table
        if self.has_window_pool and self.pool.layers_mapping[layer.layer_id][1]:
            table = step.window_table
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[:count]
        caches = self.paged(k_cache), self.paged(v_cache)
        options: dict[str, Any] = {
            "block_table": table,
            "seqlens_k": step.seq_lens,
            "cu_seqlens_q": step.edges,
            "max_seqlen_q": step.max_query_len,
            "softmax_scale": float(layer.scaling),
            "window": window + 1 if window is not None and window > -1 else None,
            "softcap": float(layer.logit_cap or 0.0),
            "sinks": None if sinks is None else sinks.float(),
            "k_scale": k_scale,
            "v_scale": v_scale,
            "batch_invariant": self.batch_invariant,
        }
        plan = None
        if step.plans is not None:
            plan = step.plans.plan(rows, *caches, **options)
        paged_attention(rows, *caches, plan=plan, out=o[:count], **options)
        return o.view(q.shape[0], -1)

    def _scales_of(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return k_scale and v_scale of a layer's 8-bit cache, float32 (Hk,) each; 1 where SGLang
        has none.

        They are made once for each layer and kept.
        """
        if layer.layer_id not in self._scales:
            given = (layer.k_scale_float, layer.v_scale_float)
            heads = (layer.tp_k_head_num,)
            k_scale, v_scale = (
                torch.full(heads, 1.0 if x is None else float(x), device=self.device) for x in given
            )
            self._scales[layer.layer_id] = k_scale, v_scale
        return self._scales[layer.layer_id]
