"""Compile cases of attention over a paged cache of latents."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from tests.kernels.compile_cases import ARCHITECTURES, Case, meta
from tests.kernels.planned import latent, serving_spec
from tilewise.kernels.spec import PagedSpec

_RUN_2 = {"max_seqlen_q": 2, "num_tokens": 32}
_PROMPTS = {"max_seqlen_q": 2048, "num_tokens": 16 * 2048}
_F32 = {"dtype": torch.float32, "cache_dtype": torch.float32}

# name -> (changes of the spec, whether its loops must stay in registers, compiled only if slow)
_MLA: dict[str, tuple[dict[str, object], bool, bool]] = {
    "16-heads": ({"num_q_heads": 16}, True, True),
    "32-heads": ({"num_q_heads": 32}, True, True),
    "64-heads": ({"num_q_heads": 64}, True, True),
    "128-heads": ({}, True, False),
    "20-heads": ({"num_q_heads": 20}, True, True),
    "16-heads-run-2": (_RUN_2 | {"num_q_heads": 16}, True, True),
    "128-heads-run-2": (_RUN_2, True, True),
    "prompts": (_PROMPTS, True, True),
    "mixed-invariant": (
        _PROMPTS | {"num_tokens": 5000, "num_q_heads": 16, "batch_invariant": True},
        True,
        True,
    ),
    "block-1": ({"block_size": 1, "num_q_heads": 16}, True, True),
    # Rows addressed one by one cost Hopper two registers too many: 9 of 894 instructions spill.
    "block-16": ({"block_size": 16}, False, True),
    "block-256": ({"block_size": 256}, True, True),
    "short": ({"max_blocks": 2}, True, True),
    "rank-256": ({"head_dim": 256 + 64, "v_head_dim": 256}, True, True),
    "rank-96": ({"head_dim": 96 + 32, "v_head_dim": 96, "num_q_heads": 16}, True, True),
    "fp16": ({"dtype": torch.float16, "cache_dtype": torch.float16}, True, True),
    "fp32": (_F32, False, True),
    # Their sums are made by mma.sync everywhere, 32 rows at a time.
    "fp8-16-heads": ({"cache_dtype": torch.float8_e4m3fn, "num_q_heads": 16}, True, False),
    "int8-8bit": ({"cache_dtype": torch.int8}, True, True),
    "fp8-8bit-prompts": (_PROMPTS | {"cache_dtype": torch.float8_e4m3fn}, True, True),
    "fp8-8bit-fp16": (
        {"cache_dtype": torch.float8_e4m3fn, "dtype": torch.float16, "num_q_heads": 16},
        False,
        True,
    ),
    "mixed-dtypes": ({"cache_dtype": torch.float16, "num_q_heads": 16}, False, True),
}

# Parts of sm_90's hot loops that touch local memory, by version of Triton: sums of 64 rows fill the
# registers. 3.7 spills 0.8 % of the instructions at most, 3.6 1.3 (14 of 1,099, int8),
# 3.8 2.3 (26 of 1,119, float16) and 3.9 2.7 (23 of 858, two tokens of 16 heads): they compute more
# descriptors of WGMMA in registers. 3.9 holds more of a widened tile of 8 bits: 308 of 1,555.
_SPILLS = {"3.6": 0.013, "3.8": 0.024, "3.9": 0.027}
_SPILLS_OF_8_BITS = {"3.6": 0.013, "3.9": 0.2}


def mla_spec(changes: dict[str, object]) -> PagedSpec:
    """Return 16 sequences of up to 32,768 tokens, 128 heads on latents of 512 + 64 channels."""
    latents = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    return serving_spec(**{"block_size": 64, **latents, **changes})


def launch_mla(kernels: ModuleType, spec: PagedSpec) -> None:
    """Call the launcher of a backend's attention over latents."""
    rows = (spec.num_tokens, spec.num_q_heads)
    scale = None
    if spec.cache_dtype.itemsize == 1:
        scale = meta(4096, spec.block_size, 2, dtype=torch.float32)
    latent(
        kernels,
        meta(*rows, spec.v_head_dim, dtype=spec.dtype),
        meta(*rows, spec.head_dim - spec.v_head_dim, dtype=spec.dtype),
        meta(4096, spec.block_size, spec.head_dim, dtype=spec.cache_dtype),
        spec,
        block_table=meta(spec.num_seqs, spec.max_blocks, dtype=torch.int32),
        seqlens_k=meta(spec.num_seqs, dtype=torch.int32),
        cu_seqlens_q=meta(spec.num_seqs + 1, dtype=torch.int32),
        latent_scale=scale,
    )


def mla_cases() -> Iterator[Case]:
    """Yield every number of heads, block size and feature on the tiles that its table gives."""
    from tilewise.kernels.triton.latent import plan as portable

    for arch in ARCHITECTURES:
        for name, (changes, hot, slow) in _MLA.items():
            spec = mla_spec(changes)
            yield Case(
                f"sm_{arch}-mla-{name}",
                arch,
                lambda spec=spec: launch_mla(portable, spec),  # type: ignore[misc]
                # Fewer than 64 rows are too few for WGMMA and tcgen05: mma.sync everywhere.
                products=(hot or name == "block-16") and (arch == 80 or "16-heads" not in name),
                hot=hot,
                slow=slow or arch != 90,
                mma="mma.sync"
                if any(x in name for x in ("20-heads", "32-heads", "8bit"))
                else None,
                spills={} if arch != 90 else (_SPILLS_OF_8_BITS if "8bit" in name else _SPILLS),
            )
