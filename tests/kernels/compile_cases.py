"""What test_compile.py compiles: calls of real launchers on meta tensors, so nothing is computed.

A case is a function that calls a launcher; whatever kernels it would have run on a GPU are compiled
for an architecture instead, with the very arguments, specialisations and options of that call. To
add cases, append to CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.tiles.attention import Part, candidates
from tilewise.kernels.tiles.paged import TileConfig

ARCHITECTURES = (80, 90, 100)
_PARTS: tuple[Part, ...] = ("fwd", "dkdv", "dq")


@dataclass(frozen=True)
class Case:
    """One call to compile.

    Attributes:
        name: unique; the test's id.
        arch: compute capability it is compiled for.
        launch: calls a launcher with meta tensors.
        products: the kernels multiply matrices, so an MMA instruction must appear.
        hot: loops that multiply must stay in registers (but for a few percent) and in step.
        slow: compiled only with `-m slow`.
        mma: the MMA instruction to find; None is the architecture's own.
        spills: by version of Triton, the part of a hot loop that may touch local memory there,
            where that is more than elsewhere; measured.
        target: the name of an AMD GPU, such as gfx942, which is what it is compiled for instead.
    """

    name: str
    arch: int
    launch: Callable[[], object]
    products: bool = True
    hot: bool = True
    slow: bool = False
    mma: str | None = None
    spills: Mapping[str, float] = field(default_factory=dict)
    target: str = ""


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor with a shape and strides but no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_spec(
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    **changes: object,
) -> AttentionSpec:
    """Return 2 sequences of 4,096 tokens, 16 query heads on 4 key heads."""
    fields: dict[str, object] = {
        "device_type": "cuda",
        "dtype": dtype,
        "batch": 2,
        "max_seqlen_q": 4096,
        "max_seqlen_k": 4096,
        "num_q_heads": 16,
        "num_kv_heads": 4,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim or head_dim,
        "window_right": 0 if causal else -1,
        "softmax_scale": head_dim**-0.5,
    }
    return AttentionSpec(**(fields | changes))  # type: ignore[arg-type]


def tensor_of_bias(spec: AttentionSpec) -> Tensor | None:
    """Return a full bias in the dtype of q."""
    shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
    return meta(*shape, dtype=spec.dtype) if spec.has_bias else None


def tensors_of_mask(spec: AttentionSpec) -> MaskTensors | None:
    """Return a mask for each head, a quarter of whose tiles are partial."""
    if spec.mask_tile is None:
        return None
    tile_q, tile_k = spec.mask_tile
    rows, columns = -(-spec.max_seqlen_q // tile_q), -(-spec.max_seqlen_k // tile_k)
    heads, count = spec.num_q_heads, spec.num_q_heads * rows * columns // 4
    shapes = (
        (count, tile_q, tile_k // 32),
        (1, heads, rows, 3),
        (2 * count, 2),
        (1, heads, columns, 3),
        (2 * count, 2),
    )
    return MaskTensors(*(meta(*shape, dtype=torch.int32) for shape in shapes))


def launch_attention(
    spec: AttentionSpec,
    part: Part | Literal["dbias"],
    tile: TileConfig | None = None,
    *,
    is_aligned: bool = True,
) -> None:
    """Call the launcher of one part of an attention call; "rows" are part of "dkdv".

    Args:
        is_aligned: whether q, k and v start at multiples of 16 bytes, or at an odd element.
    """
    from tests.kernels.planned import tensors_of
    from tilewise.kernels.plan import Call
    from tilewise.kernels.triton.attention import plan as attention

    def tensor(heads: int, width: int, seqlen: int) -> Tensor:
        rows = (spec.batch * seqlen,) if spec.is_varlen else (spec.batch, seqlen)
        x = meta(*rows, heads, width, dtype=spec.dtype)
        return x if is_aligned else meta(1 + x.numel(), dtype=spec.dtype)[1:].view(x.shape)

    def numbers(present: bool, size: int, dtype: torch.dtype) -> Tensor | None:
        return meta(size, dtype=dtype) if present else None

    q = tensor(spec.num_q_heads, spec.head_dim, spec.max_seqlen_q)
    k = tensor(spec.num_kv_heads, spec.head_dim, spec.max_seqlen_k)
    v = tensor(spec.num_kv_heads, spec.v_head_dim, spec.max_seqlen_k)
    o = tensor(spec.num_q_heads, spec.v_head_dim, spec.max_seqlen_q)
    cu_seqlens = numbers(spec.is_varlen, spec.batch + 1, torch.int32)
    tensors = tensors_of(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        seqlens_k=numbers(spec.has_seqlens_k, spec.batch, torch.int32),
        alibi_slopes=numbers(spec.has_alibi, spec.num_q_heads, torch.float32),
        bias=tensor_of_bias(spec), mask=tensors_of_mask(spec),
        philox=numbers(spec.dropout_p > 0, 2, torch.int64),
        sinks=numbers(spec.has_sinks, spec.num_q_heads, torch.float32),
    )  # fmt: skip
    if part == "fwd":
        plan = attention.plan_fwd(Call.of(spec, tensors), {} if tile is None else {"fwd": tile})
        plan.run(*tensors)
        return
    shape = (spec.num_q_heads, q.shape[0]) if spec.is_varlen else (
        spec.batch, spec.num_q_heads, spec.max_seqlen_q
    )  # fmt: skip
    lse = meta(*shape, dtype=torch.float32)
    given = (o, lse, o, lse, lse, lse, *tensors)
    call = Call.of(spec, given)
    if part == "dkdv":
        attention.plan_part("rows", call).run(*given)
    attention.plan_part(part, call, tile).run(*given)


def _attention_case(
    name: str, arch: int, spec: AttentionSpec, part: Part, tile: TileConfig, slow: bool, hot: bool
) -> Case:
    shape = "x".join(map(str, (tile.tile_m, tile.tile_n, tile.num_warps, tile.num_stages)))
    # The 512 columns of Blackwell's tensor memory do not hold dk and dv of 256 channels.
    width = max(spec.head_dim, spec.v_head_dim)
    registers_only = arch == 100 and part == "dkdv" and width > 128
    # Tiles of fewer than 64 rows are below what warp-group instructions multiply.
    too_small = (tile.tile_n if part == "dkdv" else tile.tile_m) < 64
    return Case(
        f"sm_{arch}-{part}-{name}-{shape}",
        arch,
        lambda: launch_attention(spec, part, tile),
        products=spec.dtype != torch.float32,  # IEEE float32 products run on the FMA units
        hot=hot,
        slow=slow,
        mma="mma.sync" if registers_only or too_small else None,
    )


# Rows that leave the registers and win all the same: 258 against 186 TFLOP/s of the best row that
# does not spill (H200, bf16, N 16,384, full; 2026-11-20). Each query row is read half as often.
SPILLS_KNOWINGLY = {(90, "dkdv", 256, TileConfig(64, 64, 8, 2))}
_LEFT_OUT = {(80, "dq"), (90, "dkdv"), (90, "dq"), (100, "dq")}


def attention_cases() -> Iterator[Case]:
    """Yield every row of the tables, and every feature on its default row."""
    for arch in ARCHITECTURES:
        for head_dim in (64, 128, 256):
            spec = attention_spec(head_dim)
            for part in _PARTS:
                for index, tile in enumerate(candidates(spec, part, arch)):
                    name = f"d{head_dim}-causal"
                    hot = (arch, part, head_dim, tile) not in SPILLS_KNOWINGLY
                    # Every day one width on each architecture; others are among the features, and
                    # what goes backward on Hopper is there with all of them.
                    slow = index > 0 or head_dim != 128 or (arch, part) in _LEFT_OUT
                    yield _attention_case(name, arch, spec, part, tile, slow, hot)
        for part in _PARTS:  # two sums of 512 channels leave few registers: judged by speed alone
            spec = attention_spec(512)
            for tile in candidates(spec, part, arch):
                yield _attention_case("d512-causal", arch, spec, part, tile, True, False)
        everything = attention_spec(
            128,
            window_left=1000,
            softcap=30.0,
            is_varlen=True,
            has_alibi=True,
            has_sinks=True,
            has_bias=True,
            mask_tile=(128, 128),
            dropout_p=0.1,
        )
        features = {
            "full-d128": attention_spec(128, causal=False),
            "window-d128": attention_spec(128, window_left=1000),
            "varlen-d64": attention_spec(64, is_varlen=True),
            "seqlens-d64": attention_spec(64, has_seqlens_k=True, causal=False),
            "everything-d128": everything,
            "fp16-d128": attention_spec(128, dtype=torch.float16),
            "fp32-d64": attention_spec(64, dtype=torch.float32),
            "fp32-d128": attention_spec(128, dtype=torch.float32),
            "fp32-d256": attention_spec(256, dtype=torch.float32),
            "d8": attention_spec(8),
            "one-head-d8": attention_spec(8, num_q_heads=1, num_kv_heads=1),
            "d16": attention_spec(16),
            "d32": attention_spec(32),
            "padded-d80": attention_spec(80),
            "mla-d192-128": attention_spec(192, 128),
            "mla-d64-512": attention_spec(64, 512),
            # Rows on no boundary of 4 bytes, and values narrower than keys; see tiles/paged.py.
            "odd-d20-10": attention_spec(20, 10, causal=False, is_varlen=True),
            "odd-d150-9": attention_spec(150, 9, causal=False),
            "mla-d576-512": attention_spec(576, 512),
            "fp32-d576-512": attention_spec(576, 512, dtype=torch.float32),
            "d512-bias": attention_spec(512, has_bias=True),
            "d512-mask": attention_spec(512, causal=False, mask_tile=(128, 64)),
            "d512-dropout": attention_spec(512, dropout_p=0.1),
            "bias-d128": attention_spec(128, has_bias=True),
            "bias-d64": attention_spec(64, has_bias=True, causal=False),
            "bias-d32": attention_spec(32, has_bias=True, causal=False),
            "bias-d256": attention_spec(256, has_bias=True),
        }
        if arch == 90:
            features["everything-d64"] = everything._replace(head_dim=64, v_head_dim=64)
        # Every day every feature at once in all parts, going forward on heads of half the width,
        # which compile in half the time; float32, whose products are of another kind, where there
        # are most of them; and rows on no boundary going forward.
        quick = {
            ("everything-d64", "fwd"), ("everything-d128", "dkdv"), ("everything-d128", "dq"),
            ("fp32-d64", "dq"), ("odd-d20-10", "fwd"),
        }  # fmt: skip
        for name, spec in features.items():
            for part in _PARTS:
                tile = candidates(spec, part, arch)[0]
                slow = arch != 90 or (name, part) not in quick
                yield _attention_case(name, arch, spec, part, tile, slow, False)
            if name == "odd-d20-10":
                yield Case(
                    f"sm_{arch}-fwd-odd-address-d64-16",
                    arch,
                    lambda: launch_attention(attention_spec(64, 16), "fwd", is_aligned=False),
                    hot=False,
                    slow=arch != 90,
                )
            if spec.has_bias:
                yield Case(
                    f"sm_{arch}-dbias-{name}",
                    arch,
                    lambda spec=spec: launch_attention(spec, "dbias"),
                    hot=False,
                    slow=arch != 90 or name not in ("everything-d128", "bias-d32"),
                )


CASES: list[Case] = list(attention_cases())
