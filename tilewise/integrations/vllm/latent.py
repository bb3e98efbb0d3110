"""vLLM's attention over latents (MLA): its own prompts, and decode steps on `mla_decode`.

vLLM computes prompts from expanded keys by kernels of its choice; what is computed here is a step
of one new token a sequence, over latents as its cache holds them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from tilewise.errors import UnsupportedError
from tilewise.ops import mla_decode

__all__ = ["LatentBackend", "LatentBuilder", "LatentImpl"]


class LatentBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's own builder of metadata for MLA, which allows CUDA graphs of steps of one token a
    sequence."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class LatentBackend(MLACommonBackend):  # type: ignore[misc]
    """The backend class that vLLM asks for the dtypes, the builder and the layer class of the
    latent kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


class LatentImpl(MLACommonImpl):  # type: ignore[misc]
    """One layer's attention over latents, made by vLLM; only decode steps are computed here.

    Raises UnsupportedError for slopes, windows, softcap or a layer that is no decoder's.
    """

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if alibi_slopes or sliding_window or logits_soft_cap:
            raise UnsupportedError("slopes, windows and softcap must be None over latents")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type must be decoder, got {attn_type}")

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from absorbed queries to latents, one new token a sequence.

        Args:
            q: (B, Hq, R + Dr), or its parts (B, Hq, R) and (B, Hq, Dr).
            kv_c_and_k_pe_cache: (num_blocks, block_size, R + Dr).
            attn_metadata: vLLM's, whose `decode` has block tables and lengths.
            layer: the layer of vLLM, which is not read.

        Returns:
            o (B, Hq, R) and lse (B, Hq), natural log.
        """
        decode = attn_metadata.decode
        if not isinstance(q, tuple):
            rank = self.kv_lora_rank
            q = q[..., :rank].contiguous(), q[..., rank:].contiguous()
        q_latent, q_rope = q
        count = q_latent.shape[0]
        edges = torch.arange(count + 1, dtype=torch.int32, device=q_latent.device)
        o, lse = mla_decode(
            q_latent,
            q_rope,
            kv_c_and_k_pe_cache,
            block_table=decode.block_table,
            seqlens_k=decode.seq_lens,
            cu_seqlens_q=edges,
            max_seqlen_q=1,
            softmax_scale=float(self.scale),
            return_lse=True,
        )
        return o, lse.transpose(0, 1)
