"""Compile cases of the kernels over a paged cache and of the small kernels beside them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from tests.kernels.compile_cases import ARCHITECTURES, Case, meta
from tests.kernels.compile_cases_mla import mla_cases
from tests.kernels.planned import paged, serving_spec
from tilewise.kernels.spec import PagedSpec

_DECODE = {"max_seqlen_q": 1, "num_tokens": 16}
_PREFILL = {"max_seqlen_q": 2048, "num_tokens": 16 * 2048}
_TREE = {"max_seqlen_q": 16, "num_tokens": 256, "has_tree": True}
_D512 = {"head_dim": 512, "v_head_dim": 512, "num_q_heads": 16, "num_kv_heads": 1}
_ALL = {"window_left": 1000, "softcap": 30.0, "has_alibi": True, "has_sinks": True}

# name -> (changes of the spec, whether its loops must stay in registers, compiled only if slow)
_PAGED: dict[str, tuple[dict[str, object], bool, bool]] = {
    "decode": (_DECODE, True, False),
    "decode-planned": (_DECODE, True, True),
    "decode-planned-everything": (_DECODE | _ALL, True, True),
    "decode-planned-d256": (_DECODE | {"head_dim": 256, "v_head_dim": 256}, True, True),
    "drafts-planned": ({"max_seqlen_q": 8, "num_tokens": 16 * 8}, True, True),
    "decode-group-8": (_DECODE | {"num_q_heads": 64}, True, True),
    "decode-mha": (_DECODE | {"num_kv_heads": 32}, True, True),
    "decode-block-1": (_DECODE | {"block_size": 1}, True, True),
    "decode-block-256": (_DECODE | {"block_size": 256}, True, True),
    "decode-d64": (_DECODE | {"head_dim": 64, "v_head_dim": 64}, True, True),
    "decode-d80": (_DECODE | {"head_dim": 80, "v_head_dim": 80}, True, True),
    "decode-d192-128": (_DECODE | {"head_dim": 192}, True, True),
    "decode-d256": (_DECODE | {"head_dim": 256, "v_head_dim": 256}, True, True),
    "decode-everything": (_DECODE | _ALL, True, False),
    "decode-d512": (_DECODE | _D512, True, False),
    "decode-planned-d512": (_DECODE | _D512, True, True),
    "decode-d512-everything": (_DECODE | _D512 | _ALL, True, True),
    "decode-d512-group-32": (_DECODE | _D512 | {"num_q_heads": 32}, True, True),
    "decode-d512-group-64": (_DECODE | _D512 | {"num_q_heads": 64}, True, True),
    "decode-d512-int8": (_DECODE | _D512 | {"cache_dtype": torch.int8}, True, True),
    "decode-d512-e4m3": (_DECODE | _D512 | {"cache_dtype": torch.float8_e4m3fn}, True, True),
    "decode-d512-fp16-e4m3": (
        _DECODE | _D512 | {"dtype": torch.float16, "cache_dtype": torch.float8_e4m3fn},
        True,
        True,
    ),
    "decode-d512-fp32": (
        _DECODE | _D512 | {"dtype": torch.float32, "cache_dtype": torch.float32},
        False,
        True,
    ),
    "decode-d576-512": (_DECODE | _D512 | {"head_dim": 576}, True, True),
    "drafts-d512": (_D512 | {"max_seqlen_q": 8, "num_tokens": 16 * 8}, True, True),
    "prefill-d512": (_PREFILL | _D512, True, True),
    "prefill-d512-everything": (_PREFILL | _D512 | _ALL, False, True),
    "prefill-d512-int8": (_PREFILL | _D512 | {"cache_dtype": torch.int8}, False, True),
    "prefill-d512-e4m3": (_PREFILL | _D512 | {"cache_dtype": torch.float8_e4m3fn}, False, True),
    "prefill-d512-fp32": (
        _PREFILL | _D512 | {"dtype": torch.float32, "cache_dtype": torch.float32},
        False,
        True,
    ),
    "prefill-d576-512": (_PREFILL | _D512 | {"head_dim": 576}, True, True),
    "prefill-d192-128": (_PREFILL | {"head_dim": 192}, True, True),
    "tree-d512": (_TREE | _D512, False, True),
    "decode-fp32": (_DECODE | {"dtype": torch.float32, "cache_dtype": torch.float32}, False, True),
    "decode-mixed-dtypes": (_DECODE | {"cache_dtype": torch.float16}, False, True),
    "decode-invariant": (_DECODE | {"batch_invariant": True}, True, True),
    "decode-short": (_DECODE | {"max_blocks": 4}, True, True),
    "decode-int8": (_DECODE | {"cache_dtype": torch.int8}, True, False),
    # Every day one dtype of 8 bits decodes and the other reads prompts.
    "decode-e4m3": (_DECODE | {"cache_dtype": torch.float8_e4m3fn}, True, True),
    "decode-fp16-int8": (
        _DECODE | {"dtype": torch.float16, "cache_dtype": torch.int8},
        True,
        True,
    ),
    "decode-int8-block-256": (_DECODE | {"cache_dtype": torch.int8, "block_size": 256}, True, True),
    "decode-e4m3-everything": (
        _DECODE | _ALL | {"cache_dtype": torch.float8_e4m3fn, "head_dim": 80},
        True,
        True,
    ),
    "prefill-int8": (_PREFILL | {"cache_dtype": torch.int8}, True, True),
    "prefill-e4m3": (_PREFILL | {"cache_dtype": torch.float8_e4m3fn}, True, False),
    "decode-int4": (_DECODE | {"cache_dtype": torch.uint8}, True, True),
    "decode-planned-int4": (_DECODE | {"cache_dtype": torch.uint8}, True, False),
    "decode-int4-everything": (
        _DECODE | _ALL | {"cache_dtype": torch.uint8, "head_dim": 80},
        True,
        True,
    ),
    "decode-int4-fp16-d256": (
        _DECODE
        | {"dtype": torch.float16, "cache_dtype": torch.uint8, "head_dim": 256, "v_head_dim": 256},
        True,
        True,
    ),
    "prefill-int4": (_PREFILL | {"cache_dtype": torch.uint8}, True, True),
    "drafts": ({"max_seqlen_q": 8, "num_tokens": 16 * 8}, True, True),
    "prefill": (_PREFILL, True, True),
    # Rows on no boundary of 4 bytes, and values narrower than keys; see tiles/paged.py.
    "prefill-odd-d20-10": (_PREFILL | {"head_dim": 20, "v_head_dim": 10}, False, True),
    "tree-odd-d20-10": (_TREE | {"head_dim": 20, "v_head_dim": 10}, False, True),
    "prefill-d64": (_PREFILL | {"head_dim": 64, "v_head_dim": 64}, True, True),
    "prefill-d256": (_PREFILL | {"head_dim": 256, "v_head_dim": 256}, True, True),
    "prefill-block-128": (_PREFILL | {"block_size": 128}, True, True),
    "prefill-fp32": (
        _PREFILL | {"dtype": torch.float32, "cache_dtype": torch.float32},
        False,
        True,
    ),
    "chunk-split": ({"num_seqs": 2, "max_seqlen_q": 128, "num_tokens": 256}, True, True),
    "tree": (_TREE, True, False),
    "tree-everything": (_TREE | _ALL | {"cache_dtype": torch.int8}, True, True),
    "tree-wide": (_TREE | {"max_seqlen_q": 64, "num_tokens": 1024}, True, True),
    "shared": (_DECODE | {"shared_rows": (16,)}, True, False),
    "shared-crowd": (
        _DECODE | {"num_seqs": 256, "num_tokens": 256, "shared_rows": (256,)},
        True,
        True,
    ),
    "shared-e4m3": (
        _DECODE | {"shared_rows": (16,), "cache_dtype": torch.float8_e4m3fn},
        True,
        True,
    ),
    "shared-prefill": (
        _PREFILL | {"shared_rows": (_PREFILL["num_tokens"],), "has_sinks": True},
        True,
        True,
    ),
    "mixed-everything": (_PREFILL | _ALL | {"num_tokens": 5000}, True, True),
}


def launch_paged(spec: PagedSpec, *, is_planned: bool = False) -> None:
    """Call the launcher of paged attention."""
    from tilewise.kernels.triton.paged import plan as paged_attention

    slots = (4096, spec.block_size, spec.num_kv_heads)
    widths, packed = (spec.head_dim, spec.v_head_dim), 2 if spec.cache_dtype == torch.uint8 else 1
    per_head = meta(spec.num_q_heads, dtype=torch.float32)
    scales = {}
    if spec.cache_dtype.itemsize == 1:
        scales = {name: meta(*slots, dtype=torch.float32) for name in ("k_scale", "v_scale")}
    features: dict[str, object] = {}
    if spec.has_tree:
        features["tree_mask"] = meta(spec.num_tokens, spec.max_seqlen_q, dtype=torch.bool)
    if spec.has_shared:
        features["shared"] = _one_group(spec)
    paged(
        paged_attention,
        meta(spec.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype),
        *(meta(*slots, width // packed, dtype=spec.cache_dtype) for width in widths),
        spec,
        block_table=meta(spec.num_seqs, spec.max_blocks, dtype=torch.int32),
        seqlens_k=meta(spec.num_seqs, dtype=torch.int32),
        cu_seqlens_q=meta(spec.num_seqs + 1, dtype=torch.int32),
        alibi_slopes=per_head if spec.has_alibi else None,
        sinks=per_head if spec.has_sinks else None,
        plan=meta(4096, 8, dtype=torch.int32) if is_planned else None,
        **scales,
        **features,
    )


def _one_group(spec: PagedSpec) -> tuple[Tensor, ...]:
    """All sequences share the first half of their blocks."""
    lengths = meta(1, dtype=torch.int32)
    rows = meta(spec.num_tokens, dtype=torch.int32)
    table = meta(1, spec.max_blocks // 2, dtype=torch.int32)
    skipped = meta(spec.num_seqs, dtype=torch.int32)
    return skipped, table, lengths, meta(2, dtype=torch.int32), rows


def launch_byte_decode(
    spec: PagedSpec, *, head_scales: bool = False, is_planned: bool = False
) -> None:
    """Call the launcher of Hopper's kernel over 8-bit caches."""
    from tilewise.kernels.gluon.paged import plan as paged_attention

    slots = (4096, spec.block_size, spec.num_kv_heads)
    scale = meta(*(slots[2:] if head_scales else slots), dtype=torch.float32)
    row = spec.head_dim // (2 if spec.cache_dtype == torch.uint8 else 1)
    cache = meta(*slots, row, dtype=spec.cache_dtype)
    paged(
        paged_attention,
        meta(spec.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype),
        cache,
        cache,
        spec,
        block_table=meta(spec.num_seqs, spec.max_blocks, dtype=torch.int32),
        seqlens_k=meta(spec.num_seqs, dtype=torch.int32),
        cu_seqlens_q=meta(spec.num_seqs + 1, dtype=torch.int32),
        sinks=meta(spec.num_q_heads, dtype=torch.float32) if spec.has_sinks else None,
        plan=meta(4096, 8, dtype=torch.int32) if is_planned else None,
        k_scale=scale,
        v_scale=scale,
    )


# name -> (changes of the spec, a scale for each head only, compiled only if slow)
_BYTES: dict[str, tuple[dict[str, object], bool, bool]] = {
    "e4m3": ({"cache_dtype": torch.float8_e4m3fn}, False, False),
    "int8": ({"cache_dtype": torch.int8}, False, True),
    "int4": ({"cache_dtype": torch.uint8}, False, False),
    "int4-d64-16-rows": (
        {"cache_dtype": torch.uint8, "head_dim": 64, "v_head_dim": 64, "num_q_heads": 128},
        False,
        True,
    ),
    "int4-d256": (
        {"cache_dtype": torch.uint8, "head_dim": 256, "v_head_dim": 256},
        False,
        True,
    ),
    "int8-heads": ({"cache_dtype": torch.int8}, True, True),
    "e4m3-d64-block-256": (
        {
            "cache_dtype": torch.float8_e4m3fn,
            "head_dim": 64,
            "v_head_dim": 64,
            "block_size": 256,
        },
        False,
        True,
    ),
    "int8-16-rows": ({"cache_dtype": torch.int8, "num_q_heads": 128}, False, True),
    "e4m3-everything": (
        {
            "cache_dtype": torch.float8_e4m3fn,
            "dtype": torch.float16,
            "block_size": 8,
            "window_left": 1000,
            "has_sinks": True,
        },
        False,
        True,
    ),
}


def byte_decode_cases() -> Iterator[Case]:
    """Yield Hopper's kernel over 8-bit caches, which multiplies by mma.sync there."""
    for name, (changes, head_scales, slow) in _BYTES.items():
        spec = serving_spec(**_DECODE | changes)
        yield Case(
            f"sm_90-gluon-decode-{name}",
            90,
            lambda spec=spec, heads=head_scales: launch_byte_decode(spec, head_scales=heads),  # type: ignore[misc]
            products=False,
            slow=slow,
        )


def launch_direct(spec: PagedSpec, *, head_scales: bool = False) -> None:
    """Call the launcher of the kernel over 8-bit caches where mma.sync is the product."""
    from tilewise.kernels.gluon.paged import plan as paged_attention

    with mock.patch.object(paged_attention, "_is_direct", return_value=True):
        launch_byte_decode(spec, head_scales=head_scales, is_planned=True)


def direct_decode_cases() -> Iterator[Case]:
    """Yield the kernel over 8-bit caches where mma.sync is the product."""
    for arch in (80, 89):
        for name, (changes, head_scales, slow) in _BYTES.items():
            spec = serving_spec(**_DECODE | changes)
            if spec.cache_dtype == torch.uint8 or spec.block_size % 16:
                continue
            yield Case(
                f"sm_{arch}-gluon-direct-{name}",
                arch,
                lambda spec=spec, heads=head_scales: launch_direct(spec, head_scales=heads),  # type: ignore[misc]
                products=False,
                slow=slow,
            )


def launch_elementwise(head_dim: int, dtype: torch.dtype) -> None:
    """Call every launcher that only moves or weighs elements."""
    from tilewise.kernels.triton import merge, rope
    from tilewise.kernels.triton.paged import cache as cache_ops
    from tilewise.kernels.triton.paged import rope_write
    from tilewise.kernels.triton.step import decode_rows

    new = meta(512, 8, head_dim, dtype=dtype)
    cache = meta(4096, 16, 8, head_dim, dtype=dtype)
    cache_ops.write_kv_cache(new, new, cache, cache, meta(512, dtype=torch.int64))
    cache_ops.copy_blocks(cache, cache, meta(7, 2, dtype=torch.int64))
    table = meta(512, head_dim // 2, dtype=torch.float32)
    norm, scale = meta(head_dim, dtype=dtype), meta(4096, 16, 8, dtype=torch.float32)
    slots = meta(512, dtype=torch.int64)
    q = meta(512, 32, head_dim, dtype=dtype)
    for interleaved in (False, True):
        rope.launch(new, table, table, interleaved)
        rope_write.launch(
            q, new, new, cache, cache, slots, cos=table, sin=table, interleaved=interleaved
        )
    for byte in (torch.int8, torch.float8_e4m3fn):
        narrow = meta(4096, 16, 8, head_dim, dtype=byte)
        scales = {"k_scale": scale, "v_scale": scale}
        cache_ops.write_kv_cache(new, new, narrow, narrow, slots, **scales)
        cache_ops.copy_blocks(narrow, narrow, meta(7, 2, dtype=torch.int64), **scales)
        rope_write.launch(
            q, new, new, narrow, narrow, slots, cos=table, sin=table, q_norm=norm, k_norm=norm,
            **scales,
        )  # fmt: skip
    lse = meta(8, 512, dtype=torch.float32)
    merge.launch(new, lse, new, lse)
    long, int32 = meta(256, dtype=torch.int64), meta(256, dtype=torch.int32)
    decode_rows.begin(
        long, long, int32, meta(256, 128, dtype=torch.int32), long, block_size=16, ring=4,
        positions=long, slot_mapping=long, seqlens_k=int32,
    )  # fmt: skip
    is_finite, results = meta(256, dtype=torch.bool), meta(4, 256, 2, dtype=torch.int64)
    decode_rows.finish(long, is_finite, long, long, long, long, long, results)


def paged_cases() -> Iterator[Case]:
    """Yield every width, block size and feature on the tiles that its table gives."""
    for arch in ARCHITECTURES:
        for name, (changes, hot, slow) in _PAGED.items():
            spec = serving_spec(**changes)
            yield Case(
                f"sm_{arch}-paged-{name}",
                arch,
                lambda spec=spec, plan="planned" in name: launch_paged(spec, is_planned=plan),  # type: ignore[misc]
                # 16 rows of a decode are too few for WGMMA and tcgen05: mma.sync everywhere.
                products=hot and (arch == 80 or "prefill" in name),
                hot=hot,
                # Every day others are compiled for one architecture, and the plain one for others:
                # for Hopper it begins early.
                slow=slow or (arch == 90) == (name == "decode"),
            )
        for head_dim, dtype in ((128, torch.bfloat16), (80, torch.float32)):
            yield Case(
                f"sm_{arch}-elementwise-d{head_dim}",
                arch,
                lambda head_dim=head_dim, dtype=dtype: launch_elementwise(head_dim, dtype),  # type: ignore[misc]
                products=False,
                slow=arch != 90 or head_dim != 128,
            )


CASES = [*paged_cases(), *byte_decode_cases(), *direct_decode_cases(), *mla_cases()]
