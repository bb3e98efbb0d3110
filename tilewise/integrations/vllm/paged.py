"""vLLM's attention over paged keys and values, on `paged_attention` and `write_kv_cache`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from tilewise.errors import UnsupportedError
from tilewise.nn.context import StepPlans
from tilewise.ops import SharedPrefixes, paged_attention, shared_prefixes, write_kv_cache

__all__ = ["PagedBackend", "PagedBuilder", "PagedImpl", "PagedMetadata"]

# Kernels take heads of up to 512 channels for keys and values alike, on rows of 16 bytes.
_MOST_CHANNELS, _CHANNELS = 512, 8
_FP8 = ("fp8", "fp8_e4m3")
# A pass of its own over shared keys costs more than it saves below some hundred tokens, or where
# few sequences share them.
_FEWEST_SHARED, _FEWEST_SEQUENCES = 256, 8


@dataclass
class PagedMetadata:
    """The data of one step of vLLM that all of its attention layers share.

    Attributes:
        num_actual_tokens: the number of rows of the step, without those that pad a CUDA graph.
        max_query_len: the longest run of new tokens.
        query_start_loc: int32 (B + 1,), the first row of each sequence, and the end of the last.
        seq_lens: int32 (B,), tokens of each sequence with the new ones.
        block_table: int32 (B, max_blocks).
        slot_mapping: int64 (T,), where the new tokens are written; -1 is nowhere.
        shared: the prefix that all sequences share, if it is to be read once for all; else None.
        plans: the plans of the layers' attention, which the first layer makes; None on a CPU. In a
            captured graph, kernels make the plans again in each replay, from the lengths of that
            step.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    shared: SharedPrefixes | None = None
    plans: StepPlans | None = field(default=None, repr=False)


class PagedBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """The builder of a step's `PagedMetadata`; vLLM makes one for each group of layers.

    It copies nothing and waits for no device, but for a shared prefix.

    A graph of a step replays over the same tensors with other lengths, which the kernels read on
    the device: any batch whose sequences have equally many new tokens may be captured.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the metadata of a step whose sequences share their first common_prefix_len keys.

        Raises UnsupportedError for a step that is not causal. `fast_build` is not read.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("a step must be causal over paged keys")
        return PagedMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            self._shared(common_prefix_len, common),
            StepPlans.on(self.device),
        )

    def _shared(self, length: int, common: Any) -> SharedPrefixes | None:
        """Return the prefix blocks that a batch's sequences share; None if `length` is 0.

        The block tables and lengths are copied to the host. vLLM gives a `length` above 0 only
        where `use_cascade_attention` returned True, and never while a graph is captured or
        replayed.
        """
        if length == 0:
            return None
        return shared_prefixes(
            common.block_table_tensor.cpu(),
            common.seq_lens.cpu(),
            common.query_start_loc_cpu,
            block_size=self.block_size,
            min_blocks=max(1, length // self.block_size),
            max_levels=1,
            device=self.device,
        )

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Return whether a step shall read the keys that all of its sequences share only once.

        True from 256 shared keys and 8 sequences on, without ALiBi, windows or context parallelism.
        """
        rules = use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1
        is_long = common_prefix_len >= _FEWEST_SHARED
        return is_long and len(query_lens) >= _FEWEST_SEQUENCES and not rules


class PagedBackend(AttentionBackend):  # type: ignore[misc]
    """The backend class that vLLM asks for the dtypes, shapes and features of the paged kernels,
    and for their builder and layer class."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_FP8]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        return "NHD"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= _MOST_CHANNELS and head_size % _CHANNELS == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


class PagedImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention, made by vLLM: writes the new keys and values to the cache, then
    attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type must be decoder, got {attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.writes = kv_sharing_target_layer_name is None
        self.batch_invariant = _is_batch_invariant()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the keys and values of new tokens to the cache, and attend from their queries to
        the cache.

        Args:
            layer: the layer of vLLM, with the scales of an 8-bit cache.
            query: (T, Hq, D); key, value: (T, Hk, D), written unless another layer's cache is read.
            kv_cache: (num_blocks, 2, block_size, Hk, D); since vLLM 0.33 (num_blocks, Hk,
                block_size, 2 D), the keys of a head beside its values.
            attn_metadata: the step's metadata; None in a run that measures memory, which gives
                zeros.
            output: (T, Hq, D) or (T, Hq * D), written and returned.
            output_scale, output_block_scale: must be None; outputs are not quantised here.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale must be None: outputs are not quantised here")
        if attn_metadata is None:
            return output.zero_()
        step, count = attn_metadata, attn_metadata.num_actual_tokens
        k_cache, v_cache = _parts(kv_cache)
        k_scale = v_scale = None
        if self.kv_cache_dtype in _FP8:
            k_cache, v_cache = (x.view(torch.float8_e4m3fn) for x in (k_cache, v_cache))
            k_scale = layer._k_scale.expand(self.num_kv_heads).contiguous()
            v_scale = layer._v_scale.expand(self.num_kv_heads).contiguous()
        if self.writes and key is not None:
            write_kv_cache(
                key[:count],
                value[:count],
                k_cache,
                v_cache,
                step.slot_mapping[:count],
                k_scale=k_scale,
                v_scale=v_scale,
            )
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        q = query[:count]
        options: dict[str, Any] = {
            "block_table": step.block_table,
            "seqlens_k": step.seq_lens,
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "softmax_scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "shared": None if self.batch_invariant else step.shared,
            "batch_invariant": self.batch_invariant,
        }
        plan = None
        if step.plans is not None:
            plan = step.plans.plan(q, k_cache, v_cache, **options)
        out = output[:count].view(count, self.num_heads, self.head_size)
        paged_attention(q, k_cache, v_cache, plan=plan, out=out, **options)
        return output


def _parts(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the keys and the values of a cache, each (num_blocks, block_size, Hk, D)."""
    if kv_cache.dim() == 5:
        k_cache, v_cache = kv_cache.unbind(1)
    else:
        k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k_cache, v_cache


def _is_batch_invariant() -> bool:
    """Return whether vLLM was started with VLLM_BATCH_INVARIANT."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)
