"""The named cases that every backend of attention must pass: each one is an edge, not a product."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tilewise import masks


@dataclass(frozen=True)
class AttentionCase:
    """One dense call; `options` are keywords of attention(), tensors are drawn by the test."""

    name: str
    batch: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    num_q_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    options: dict = field(default_factory=dict)
    seqlens_k: tuple[int, ...] | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    bias_shape: tuple[int, ...] | None = None
    alibi_per_sequence: bool = False
    visible: float | None = None  # density of a random mask, with whole tiles of nothing and of all
    mask_shape: tuple[int, int] = (1, 1)  # sequences and heads of the mask
    dropout_p: float = 0.0

    def __str__(self) -> str:
        return self.name


ATTENTION_CASES = [
    AttentionCase("plain"),
    AttentionCase("causal", options={"causal": True}),
    AttentionCase("one_query_one_key", seqlen_q=1, seqlen_k=1, options={"causal": True}),
    AttentionCase(
        "decode_row_against_many_keys", seqlen_q=1, seqlen_k=130, options={"causal": True}
    ),
    AttentionCase("more_keys_than_queries", seqlen_q=33, seqlen_k=97, options={"causal": True}),
    AttentionCase("more_queries_than_keys", seqlen_q=97, seqlen_k=33, options={"causal": True}),
    AttentionCase("exact_tiles", batch=1, seqlen_q=128, seqlen_k=128, options={"causal": True}),
    AttentionCase("gqa_4", batch=1, num_q_heads=8, num_kv_heads=2, options={"causal": True}),
    AttentionCase("mqa", num_q_heads=4, num_kv_heads=1),
    AttentionCase("gqa_3", num_q_heads=6, num_kv_heads=2, head_dim=32),
    AttentionCase("window_of_one", options={"window": 1}),
    AttentionCase("window_of_17", batch=1, seqlen_q=150, seqlen_k=150, options={"window": 17}),
    AttentionCase("window_both_sides", options={"window": (9, 5)}),
    AttentionCase("window_right_only", seqlen_q=40, seqlen_k=90, options={"window": (None, 3)}),
    AttentionCase("softcap", options={"causal": True, "softcap": 5.0}),
    AttentionCase("alibi", num_q_heads=4, num_kv_heads=2, has_alibi=True, options={"causal": True}),
    AttentionCase("sinks", num_q_heads=4, num_kv_heads=2, has_sinks=True, options={"causal": True}),
    AttentionCase("key_lengths", seqlens_k=(13, 70), options={"causal": True}),
    AttentionCase("key_length_zero_with_sink", seqlens_k=(0, 5), has_sinks=True),
    AttentionCase("head_dim_96", head_dim=96, options={"causal": True}),
    AttentionCase("head_dim_80_value_40", head_dim=80, v_head_dim=40),
    AttentionCase(
        "head_dim_192_value_128", batch=1, head_dim=192, v_head_dim=128, options={"causal": True}
    ),
    AttentionCase("head_dim_256", batch=1, head_dim=256, options={"causal": True}),
    AttentionCase("large_scale", options={"softmax_scale": 4.0, "causal": True}),
    AttentionCase(
        "all_at_once",
        num_q_heads=4,
        num_kv_heads=2,
        has_alibi=True,
        has_sinks=True,
        seqlens_k=(41, 70),
        options={"window": (20, 0), "softcap": 8.0, "softmax_scale": 0.3},
    ),
    AttentionCase("bias_full", bias_shape=(2, 2, 70, 70)),
    AttentionCase("bias_broadcast", bias_shape=(1, 2, 1, 70), options={"causal": True}),
    AttentionCase("bias_a_column", bias_shape=(70, 1), num_q_heads=4),
    AttentionCase(
        "bias_a_column_with_sinks",
        bias_shape=(2, 1, 70, 1),
        num_q_heads=16,  # so many sinks that the largest error of their gradients is not chance
        has_sinks=True,
        seqlens_k=(0, 41),
        dropout_p=0.2,
        options={"causal": True, "softcap": 8.0},
    ),
    AttentionCase(
        "bias_a_number", num_q_heads=16, bias_shape=(), has_sinks=True, options={"window": (3, 2)}
    ),
    AttentionCase(
        "bias_of_all_heads", bias_shape=(2, 1, 33, 70), seqlen_q=33, num_q_heads=4, has_alibi=True
    ),
    AttentionCase("alibi_per_sequence", has_alibi=True, alibi_per_sequence=True),
    AttentionCase("mask", batch=1, seqlen_q=200, seqlen_k=330, visible=0.5, head_dim=32),
    AttentionCase(
        "mask_per_head", seqlen_q=90, seqlen_k=140, num_q_heads=4, visible=0.3, mask_shape=(2, 4)
    ),
    AttentionCase(
        "mask_with_causal_and_lengths",
        seqlen_q=130,
        seqlen_k=130,
        visible=0.6,
        seqlens_k=(67, 130),
        options={"causal": True},
    ),
    AttentionCase("dropout", num_q_heads=4, dropout_p=0.3, options={"causal": True}),
    AttentionCase("dropout_nearly_all", seqlen_k=100, dropout_p=0.97),
    AttentionCase("dropout_of_everything", dropout_p=1.0),
    AttentionCase("head_dim_8", head_dim=8, options={"causal": True}),
    AttentionCase("head_dim_64_value_512", batch=1, num_q_heads=1, num_kv_heads=1, v_head_dim=512),
    AttentionCase(
        "head_dim_512",
        batch=1,
        seqlen_q=40,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=512,
        options={"causal": True},
    ),
    AttentionCase(
        "head_dim_576_value_512",
        batch=1,
        seqlen_q=40,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=512,
        options={"causal": True},
    ),
    AttentionCase(
        "everything",
        seqlen_q=100,
        seqlen_k=150,
        num_q_heads=4,
        num_kv_heads=2,
        has_alibi=True,
        has_sinks=True,
        seqlens_k=(101, 150),
        bias_shape=(2, 4, 100, 150),
        visible=0.7,
        mask_shape=(1, 4),
        dropout_p=0.2,
        options={"window": (90, 3), "softcap": 8.0, "softmax_scale": 0.3},
    ),
]


def draw(case: AttentionCase, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Draw the tensors of a case, by name, rounded to `dtype`; metadata included."""
    generator = torch.Generator().manual_seed(sum(case.name.encode()))

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    v_head_dim = case.head_dim if case.v_head_dim is None else case.v_head_dim
    tensors = {
        "q": normal(case.batch, case.seqlen_q, case.num_q_heads, case.head_dim),
        "k": normal(case.batch, case.seqlen_k, case.num_kv_heads, case.head_dim),
        "v": normal(case.batch, case.seqlen_k, case.num_kv_heads, v_head_dim),
    }
    if case.has_alibi:
        slopes = 2.0 ** -torch.arange(1, case.num_q_heads + 1, dtype=torch.float32)
        if case.alibi_per_sequence:
            slopes = torch.stack([slopes * (b + 1) for b in range(case.batch)])
        tensors["alibi_slopes"] = slopes.to(device)
    if case.has_sinks:
        tensors["sinks"] = normal(case.num_q_heads, dtype=torch.float32)
    if case.bias_shape is not None:
        tensors["bias"] = normal(*case.bias_shape)
    if case.seqlens_k is not None:
        tensors["seqlens_k"] = torch.tensor(case.seqlens_k, dtype=torch.int32, device=device)
    return tensors


def draw_visible(case: AttentionCase) -> torch.Tensor | None:
    """Draw which keys a mask lets each query see, bool (Bm, Hm, Sq, Sk); some tiles are whole."""
    if case.visible is None:
        return None
    generator = torch.Generator().manual_seed(3)
    shape = (*case.mask_shape, case.seqlen_q, case.seqlen_k)
    visible = torch.rand(shape, generator=generator) < case.visible
    visible[..., :64, :64] = True
    visible[..., :128, 64:128] = False
    visible[..., -3:, :] = False  # rows that see nothing
    return visible


def keyword_arguments(case: AttentionCase, device: str) -> dict:
    """Return what attention() takes beside the tensors of `draw`."""
    options = dict(case.options)
    visible = draw_visible(case)
    if visible is not None:
        options["mask"] = masks.dense(visible, tile=(64, 64)).to(device)
    if case.dropout_p > 0:
        options |= {"dropout_p": case.dropout_p, "seed": (11, 3)}
    return options
