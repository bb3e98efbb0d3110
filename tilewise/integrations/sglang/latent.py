"""SGLang's attention over latents (MLA), on `mla_decode`; prompts on `attention_varlen`.

SGLang expands the latents of a batch of whole prompts into keys and values of each head, and gives
absorbed queries for everything else: decode rows, and prompts whose beginning is in the cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.integrations.sglang.step import Step, StepBackend
from tilewise.ops import attention_varlen, mla_decode

__all__ = ["LatentBackend"]


class LatentBackend(StepBackend):
    """SGLang's attention backend for models with latents (MLA); one for each model runner.

    Raises UnsupportedError if the cache has 8 bits.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        if runner.kv_cache_dtype.itemsize == 1:
            raise UnsupportedError(
                f"kv_cache_dtype must have 16 or 32 bits, got {runner.kv_cache_dtype}"
            )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attend from one new token of each sequence; arguments and result are those of
        `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attend from new tokens to latents, or to expanded keys and values.

        Args:
            q: (T, Hq * (R + Dr)), absorbed, or (T, Hq * (Dn + Dr)) with expanded keys.
            k: (T, 1, R + Dr), latents, written first, or expanded keys (T, Hq, Dn + Dr).
            v: the latents again, not read, or expanded values (T, Hq, Dv).
            layer: SGLang's RadixAttention; one key head says that its keys are latents.
            forward_batch: SGLang's batch, for which `init_forward_metadata` has run.
            save_kv_cache: False writes nothing.

        Returns:
            o (T, Hq * R) or (T, Hq * Dv), a new tensor; rows that pad the step are 0.
        """
        step = self.step_of(layer)
        if layer.logit_cap or layer.sliding_window_size > -1:
            raise UnsupportedError("windows and softcap must be off over latents")
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, self.place(forward_batch, step), k, v)
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        count = step.num_tokens
        if layer.tp_k_head_num > 1 or layer.qk_head_dim != self.pool.kv_cache_dim:
            assert k is not None
            assert v is not None
            o = self._expanded(rows[:count], k[:count], v[:count], layer, step)
        else:
            o = self._absorbed(rows[:count], layer, step)
        if count == rows.shape[0]:
            return o.reshape(count, -1)
        whole = o.new_zeros(rows.shape[0], *o.shape[1:])
        whole[:count] = o
        return whole.view(rows.shape[0], -1)

    def _expanded(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, step: Step) -> Tensor:
        """Return o (T, Hq, Dv) of packed whole prompts with expanded keys and values, each causal
        in itself."""
        return attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=step.edges,
            cu_seqlens_k=step.edges,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_query_len,
            causal=True,
            softmax_scale=float(layer.scaling),
        )

    def _absorbed(self, q: Tensor, layer: Any, step: Step) -> Tensor:
        """Return o (T, Hq, R) of absorbed queries q (T, Hq, R + Dr) over the latents in SGLang's
        pool."""
        rank = layer.v_head_dim
        return mla_decode(
            q[..., :rank].contiguous(),
            q[..., rank:].contiguous(),
            self.paged(self.pool.get_key_buffer(layer.layer_id).squeeze(1)),
            block_table=step.block_table,
            seqlens_k=step.seq_lens,
            cu_seqlens_q=step.edges,
            max_seqlen_q=step.max_query_len,
            softmax_scale=float(layer.scaling),
            batch_invariant=self.batch_invariant,
        )
