"""Tables of tiles: every call has rows, and every row is one that Triton can compile."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.planned import serving_spec
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles import latent, paged, quantised_rows
from tilewise.kernels.tiles.attention import Part, candidates
from tilewise.kernels.tiles.paged import padded_head_dim

PARTS: tuple[Part, ...] = ("fwd", "dkdv", "dq")
ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 120)
SPEC = AttentionSpec("cuda", torch.bfloat16, 2, 4096, 4096, 8, 8, 128, 128)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_head_dim_has_rows_of_powers_of_two(dtype: torch.dtype, arch: int) -> None:
    for width in range(8, 577, 8):
        for part in PARTS:
            rows = candidates(
                SPEC._replace(dtype=dtype, head_dim=width, v_head_dim=width), part, arch
            )
            assert len(set(rows)) == len(rows) > 0
            for row in rows:
                assert all(n >= 16 and n & (n - 1) == 0 for n in (row.tile_m, row.tile_n))
                assert row.num_warps in (4, 8)
                assert 1 <= row.num_stages <= 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask_tile", [None, (64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_rows_divide_mask_tiles(
    dropout_p: float, mask_tile: tuple[int, int] | None, dtype: torch.dtype, arch: int
) -> None:
    for width in (16, 64, 128, 256, 512):
        spec = SPEC._replace(
            dtype=dtype, head_dim=width, v_head_dim=width, mask_tile=mask_tile,
            dropout_p=dropout_p, has_bias=True,
        )  # fmt: skip
        for part in PARTS:
            rows = candidates(spec, part, arch)
            assert len(set(rows)) == len(rows) > 0
            for row in rows:
                if mask_tile is not None:
                    assert mask_tile[0] % row.tile_m == mask_tile[1] % row.tile_n == 0


def test_the_wider_head_dim_decides() -> None:
    wide = SPEC._replace(head_dim=256, v_head_dim=256)
    assert candidates(SPEC._replace(head_dim=192), "fwd") == candidates(wide, "fwd")
    assert candidates(SPEC._replace(v_head_dim=192), "fwd") == candidates(wide, "fwd")


def test_a_row_does_not_depend_on_what_the_kernel_compiles_away() -> None:
    for part in PARTS:
        rows = candidates(SPEC, part)
        assert rows == candidates(SPEC._replace(max_seqlen_q=7, batch=1, softcap=3.0), part)


@pytest.mark.parametrize(
    ("width", "padded"), [(8, 16), (16, 16), (24, 32), (64, 64), (72, 128), (256, 256)]
)
def test_head_dims_are_padded_to_powers_of_two(width: int, padded: int) -> None:
    assert padded_head_dim(width) == padded


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("run", [1, 4, 64])
def test_consumer_blackwell_has_the_tiles_of_ada(run: int, cache_dtype: torch.dtype) -> None:
    """It has mma.sync and 99 KiB of shared memory too, whatever its number."""
    assert [a for a in ARCHITECTURES if paged.has_only_mma_sync(a)] == [80, 86, 87, 89, 120]
    tokens = {"max_seqlen_q": run, "num_tokens": 16 * run, "cache_dtype": cache_dtype}
    heads = {"num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
    spec, latents = serving_spec(**tokens), serving_spec(**tokens, **heads)
    assert paged.paged_work(spec, 120, 170) == paged.paged_work(spec, 89, 170)
    assert latent.mla_work(latents, 120, 170) == latent.mla_work(latents, 89, 170)


@pytest.mark.parametrize("channels", [64, 128])  # of a block of 8 and of 4 bits
@pytest.mark.parametrize("rows", [1, 16])
def test_streams_fit_their_share_of_shared_memory(rows: int, channels: int) -> None:
    """The outputs are the fewest, and the most that stream."""
    padded, most = 8 if rows <= 8 else 16, 16 << 20
    for blocks in range(1, 65):
        for outputs in (1, most // (64 * blocks)):
            tile = quantised_rows.stream_tile_of(outputs, blocks, rows)
            assert tile is not None
            for each in {1, tile.blocks}:  # what a warp has in a pass
                passes = -(-blocks // (tile.warps * each))
                tiles = -(-outputs // 16)
                of_cta = -(-tiles // min(tiles, quantised_rows.SMS * tile.ctas))
                stages = quantised_rows.stream_stages(
                    tile, each, padded, each * channels, of_cta, passes
                )
                sums = 64 * padded
                held = tile.warps * (1024 * each * stages + 2 * padded * each * channels + sums)
                held += sums * of_cta * (passes > 1)
                assert tile.ctas * (held + 2048) <= 228 << 10
    assert quantised_rows.stream_tile_of(16, 65, rows) is None
    assert quantised_rows.stream_tile_of(most // 64 + 1, 1, rows) is None
