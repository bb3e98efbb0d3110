"""tilewise.masks: every builder against its formula, the algebra's laws, and what masks cost."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import tilewise
from tilewise import masks, ops
from tilewise.masks import BlockMask, build
from tilewise.testing import make_qkv

matplotlib.use("Agg")
from matplotlib import pyplot

TILES = [64, 128, (64, 128), (128, 64)]
SIZES = [(1, 1), (0, 0), (0, 5), (5, 0), (130, 201), (201, 130), (128, 128), (257, 64)]
# name -> builder of (Sq, Sk), and whether i sees j at distance d = i + Sk - Sq - j
DISTANCES = {
    "causal": (masks.causal, lambda d: d >= 0),
    "window_int": (
        lambda q, k, **o: masks.window(q, k, window=30, **o),
        lambda d: (d >= 0) & (d < 30),
    ),
    "window_pair": (
        lambda q, k, **o: masks.window(q, k, window=(70, 5), **o),
        lambda d: (d >= -5) & (d <= 70),
    ),
    "window_open": (lambda q, k, **o: masks.window(q, k, window=(None, 3), **o), lambda d: d >= -3),
    "window_minus_one": (
        lambda q, k, **o: masks.window(q, k, window=(3, -1), **o),
        lambda d: d <= 3,
    ),
    "dilated": (
        lambda q, k, **o: masks.from_distance(lambda d: (d.abs() < 99) & (d % 3 == 0), q, k, **o),
        lambda d: (d.abs() < 99) & (d % 3 == 0),
    ),
}
TOKENS = torch.tensor([[3, 70], [0, 199]])
# name -> builder of S and whether i sees j, in sequence b
SQUARES = {
    "strided": (
        lambda s, **o: masks.strided(s, stride=17, **o),
        lambda b, i, j: (j <= i) & ((i - j < 17) | ((i - j) % 17 == 0)),
    ),
    "strided_window": (
        lambda s, **o: masks.strided(s, stride=70, window=5, **o),
        lambda b, i, j: (j <= i) & ((i - j < 5) | ((i - j) % 70 == 0)),
    ),
    "prefix": (lambda s, **o: masks.prefix_lm(s, s // 3, **o), lambda b, i, j: None),
    "prefix_each": (
        lambda s, **o: masks.prefix_lm(s, [s, s // 2, 0], **o),
        lambda b, i, j: None,
    ),
    "global_first": (
        lambda s, **o: masks.global_local(s, window=(9, 9), global_tokens=min(s, 2), **o),
        lambda b, i, j: ((i - j).abs() <= 9) | (i < 2) | (j < 2),
    ),
    "global_positions": (
        lambda s, **o: masks.global_local(s, window=9, global_tokens=[s - 1, s // 2], **o),
        lambda b, i, j: None,
    ),
}


def _grid(seqlen_q, seqlen_k):
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]


def _decode(lists, bits, across):
    """Read tile lists (rows or columns) in Python: {(b, h, tile, other tile): bits or "full"}."""
    seen = {}
    spans = lists.spans.tolist()
    for b, heads in enumerate(spans):
        for h, rows in enumerate(heads):
            for r, (first, full_end, end) in enumerate(rows):
                others = lists.entries[first:end, 0].tolist()
                assert others[: full_end - first] == sorted(others[: full_end - first])
                assert others[full_end - first :] == sorted(others[full_end - first :])
                for at in range(first, end):
                    other, number = lists.entries[at].tolist()
                    assert (number == -1) == (at < full_end)
                    key = (b, h, other, r) if across else (b, h, r, other)
                    assert key not in seen
                    seen[key] = number
    return seen


def _check(mask: BlockMask, visible: torch.Tensor) -> None:
    """Compare with bool (Bm, Hm, Sq, Sk), reading the tensors as a kernel does."""
    assert mask.shape == tuple(visible.shape)
    tile_q, tile_k = mask.tile
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in mask.tensors())
    shifts = torch.arange(32, dtype=torch.int32)
    bits = (mask.bits.unsqueeze(-1) >> shifts & 1).bool().flatten(2)
    assert len({tile.numpy().tobytes() for tile in bits}) == len(bits)
    assert not len(bits) or (bits.flatten(1).any(1).all() and not bits.flatten(1).all(1).any())
    by_row, by_column = _decode(mask.rows, bits, False), _decode(mask.columns, bits, True)
    assert by_row == by_column
    assert {n for n in by_row.values() if n >= 0} == set(range(len(bits)))
    rows, columns = -(-visible.shape[2] // tile_q), -(-visible.shape[3] // tile_k)
    assert mask.rows.spans.shape == (*mask.shape[:2], rows, 3)
    assert mask.columns.spans.shape == (*mask.shape[:2], columns, 3)
    padded = torch.zeros(*mask.shape[:2], rows * tile_q, columns * tile_k, dtype=torch.bool)
    for (b, h, r, c), number in by_row.items():
        part = torch.ones(tile_q, tile_k, dtype=torch.bool) if number < 0 else bits[number]
        padded[b, h, r * tile_q : (r + 1) * tile_q, c * tile_k : (c + 1) * tile_k] = part
    assert padded.sum() == visible.sum(), "nothing outside (Sq, Sk) is visible"
    assert torch.equal(padded[..., : mask.shape[2], : mask.shape[3]], visible)
    assert torch.equal(mask.to_dense(), visible)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", DISTANCES)
def test_rules_of_distance(name, tile):
    builder, rule = DISTANCES[name]
    for seqlen_q, seqlen_k in SIZES:
        i, j = _grid(seqlen_q, seqlen_k)
        _check(
            builder(seqlen_q, seqlen_k, tile=tile), rule(i + seqlen_k - seqlen_q - j)[None, None]
        )


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", SQUARES)
def test_rules_of_one_sequence(name, tile):
    builder, rule = SQUARES[name]
    for seqlen in (1, 201, 256):
        i, j = _grid(seqlen, seqlen)
        visible = rule(0, i, j)
        if name.startswith("prefix"):
            prefixes = [seqlen // 3] if name == "prefix" else [seqlen, seqlen // 2, 0]
            visible = torch.stack([(j <= i) | (j < p) for p in prefixes])[:, None]
        elif name == "global_positions":
            tokens = torch.tensor([seqlen - 1, seqlen // 2])
            visible = (i - j >= 0) & (i - j < 9) | torch.isin(i, tokens) | torch.isin(j, tokens)
        _check(builder(seqlen, tile=tile), visible.reshape(-1, 1, seqlen, seqlen))


def test_without_tokens_every_square_rule_is_an_empty_mask():
    for mask in (
        masks.strided(0, stride=3),
        masks.prefix_lm(0, 0),
        masks.global_local(0, window=3, global_tokens=0),
        masks.document([]),
        masks.document(ids=torch.empty(2, 0, dtype=torch.long)),
    ):
        _check(mask, torch.zeros(*mask.shape, dtype=torch.bool))
        assert (mask.sparsity, mask.visible_fraction) == (0.0, 0.0)


def test_global_tokens_as_flags_of_each_sequence():
    flags = torch.zeros(2, 200, dtype=torch.bool)
    flags[0, 150:], flags[1, 7] = True, True
    i, j = _grid(200, 200)
    visible = torch.stack([((i - j).abs() <= 3) | f[i] | f[j] for f in flags])[:, None]
    _check(masks.global_local(200, window=(3, 3), global_tokens=flags, tile=64), visible)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_documents_in_every_form(tile):
    lengths = [100, 0, 28, 3, 70]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    same = (ids[:, None] == ids[None])[None, None]
    for mask in (
        masks.document(lengths, tile=tile),
        masks.document(torch.tensor(lengths), tile=tile),
        masks.document(cu_seqlens=[0, 100, 100, 128, 131, 201], tile=tile),
        masks.document(ids=ids, tile=tile),
        masks.document(ids=(ids * 7) % 5, tile=tile),  # names in no order mean the same
    ):
        _check(mask, same)
    shuffled = ids[torch.randperm(201)]
    scattered = masks.document(ids=shuffled, tile=tile)
    _check(scattered, (shuffled[:, None] == shuffled[None])[None, None])


def test_documents_of_each_row_and_padding():
    visible = torch.zeros(2, 1, 150, 150, dtype=torch.bool)
    for b, start, stop in ((0, 0, 100), (0, 100, 140), (1, 0, 30), (1, 30, 31)):
        visible[b, 0, start:stop, start:stop] = True
    _check(masks.document([[100, 40], [30, 1]], seqlen=150), visible)
    ids = torch.full((2, 150), -5)
    ids[0, :100], ids[0, 100:140], ids[1, :30], ids[1, 30] = 4, 2, 0, 9
    _check(masks.document(ids=ids), visible)
    assert masks.document([[100, 40], [30, 1]]).shape == (2, 1, 140, 140)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("block", [16, 48, 64, 100, 128, 192, (32, 80), (256, 20)], ids=str)
def test_block_layouts(block, tile):
    block_q, block_k = (block, block) if isinstance(block, int) else block
    seqlen_q, seqlen_k = 3 * block_q - 5, 4 * block_k - 7
    layout = torch.rand(2, 3, 3, 4) < 0.5
    i, j = _grid(seqlen_q, seqlen_k)
    mask = masks.block_sparse(
        layout, block_size=block, seqlen_q=seqlen_q, seqlen_k=seqlen_k, tile=tile
    )
    _check(mask, layout[:, :, i // block_q, j // block_k])


def test_a_layout_chooses_tiles_that_its_blocks_fill():
    layout = torch.rand(4, 6) < 0.5
    for block, tile in ((64, 64), (128, 128), (192, 64), (256, 128), (96, 128)):
        mask = masks.block_sparse(layout, block_size=block)
        assert mask.tile == (tile, tile)
        assert mask.shape == (1, 1, 4 * block, 6 * block)
        assert (mask.tiles.partial == 0) == (block != 96)
    empty = masks.block_sparse(torch.zeros(0, 3, dtype=torch.bool), block_size=64)
    _check(empty, torch.zeros(1, 1, 0, 192, dtype=torch.bool))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_dense_tensors_of_each_rank(tile):
    visible = torch.rand(2, 3, 131, 70) < 0.7
    visible[:, :, :, :64] = True
    for part in (visible, visible[0], visible[0, 0], visible[:, :1]):
        whole = part.reshape((1,) * (4 - part.dim()) + part.shape)
        _check(masks.dense(part, tile=tile), whole)


@pytest.mark.parametrize("strip", [1, 3 * 64 * 64, 1 << 22])
def test_predicates_see_every_pair_once_whatever_the_strips(strip, monkeypatch):
    monkeypatch.setattr(build, "_STRIP", strip)
    table, asked = torch.randint(0, 3, (2, 150)), torch.zeros(2, 3, 150, 211)

    def rule(b, h, i, j):
        assert b.shape == h.shape == ()
        assert {t.dtype for t in (b, h, i, j)} == {torch.int64}
        asked[b, h, i, j] += 1
        return (table[b, i] + h != j % 3) & (j < 200)

    mask = masks.from_predicate(rule, 150, 211, batch=2, heads=3, tile=64)
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(3, 1, 1)
    i, j = _grid(150, 211)
    _check(mask, (table[b, i] + h != j % 3) & (j < 200))
    assert (asked == 1).all()
    keys_only = masks.from_predicate(lambda b, h, i, j: j > 5, 70)
    _check(keys_only, (j[:, :70] > 5).expand(1, 1, 70, 70))


def _random_mask(seed: int, shape: tuple[int, int, int, int], tile) -> BlockMask:
    """Patches of 64 x 64 that are empty, full or mixed, so that every kind of tile meets each."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.rand(*shape[:2], 4, 4, generator=generator)
    patches = patches.repeat_interleave(64, 2).repeat_interleave(64, 3)
    density = torch.where(patches < 0.4, 0.0, torch.where(patches < 0.7, 1.0, 0.5))
    noise = torch.rand(density.shape, generator=generator)
    return masks.dense((noise < density)[:, :, : shape[2], : shape[3]], tile=tile)


_TILE = st.sampled_from(TILES)
_MASKS = st.builds(
    lambda seeds, batches, heads, sizes, tiles: [
        _random_mask(seed, (b, h, *sizes), tile)
        for seed, b, h, tile in zip(seeds, batches, heads, tiles, strict=True)
    ],
    st.tuples(*[st.integers(0, 999)] * 3),
    st.tuples(*[st.sampled_from([1, 2])] * 3),
    st.tuples(*[st.sampled_from([1, 3])] * 3),
    st.tuples(*[st.sampled_from([0, 1, 64, 100, 128, 200])] * 2),
    st.tuples(_TILE, _TILE, _TILE),
)


@settings(max_examples=25, deadline=None)
@given(_MASKS)
def test_laws_of_the_algebra(three):
    a, b, c = three
    dense_a, dense_b = a.to_dense(), b.to_dense()
    _check(a & b, dense_a & dense_b)
    _check(a | b, dense_a | dense_b)
    _check(~a, ~dense_a)
    assert (~~a).same_as(a)
    assert (~(a & b)).same_as(~a | ~b)
    assert (~(a | b)).same_as(~a & ~b)
    assert (a & (b | c)).same_as((a & b) | (a & c))
    assert (a & a).same_as(a)
    assert (a & ~a).tiles[1:] == (0, 0)
    i, j = _grid(*a.shape[2:])
    causal = masks.causal(*a.shape[2:])
    _check(a & causal, dense_a & (j <= i + a.shape[3] - a.shape[2]))


@settings(max_examples=25, deadline=None)
@given(_MASKS, st.data())
def test_crops_are_slices(three, data):
    mask = three[0]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, mask.shape[2])] * 2)))
    seqlen_k = data.draw(st.integers(0, mask.shape[3]))
    _check(mask.crop(start, stop, seqlen_k), mask.to_dense()[:, :, start:stop, :seqlen_k])
    _check(mask.crop(start, stop), mask.to_dense()[:, :, start:stop])


def test_masks_join_as_heads_and_sequences():
    parts = [_random_mask(n, (2, n, 200, 100), tile) for n, tile in ((1, 64), (3, 128))]
    shared = masks.causal(200, 100)
    heads = masks.cat([*parts, shared], dim=1)
    wide = shared.to_dense().expand(2, 1, -1, -1)
    _check(heads, torch.cat([*(p.to_dense() for p in parts), wide], 1))
    assert heads.tile == (64, 64)
    _check(masks.cat([shared, shared], dim=0), shared.to_dense().repeat(2, 1, 1, 1))


def test_equal_tiles_are_stored_once_in_the_whole_mask():
    assert len(masks.causal(4096).bits) == 1
    assert len(masks.causal(4096, tile=64).bits) == 1
    assert len(masks.window(4096, window=1024).bits) == 2
    document = masks.document([1024] * 4)
    assert len((masks.causal(4096) & document).bits) == 1
    assert len(masks.cat([masks.causal(4096), ~masks.causal(4096)], dim=1).bits) == 2
    pattern = torch.rand(128, 128) < 0.5
    assert len(masks.dense(pattern.repeat(2, 3, 4, 5)).bits) == 1


def test_numbers_that_a_mask_tells():
    mask = masks.causal(300)  # tiles of 128, 128 and 44
    assert mask.tiles == (3, 5, 1)
    computed = 128 * 128 * 3 + 44 * 300
    assert mask.sparsity == pytest.approx(1 - computed / 300**2, abs=1e-12)
    assert mask.visible_fraction == pytest.approx(300 * 301 / 2 / 300**2, abs=1e-12)
    # 3 bit tiles of 2 KiB; 2 lists of 3 spans and 6 entries
    assert mask.memory() == 3 * 2048 + 2 * (3 * 12 + 6 * 8)
    assert repr(mask) == (
        "BlockMask((1, 1, 300, 300), tiles 128 x 128: 3 empty, 5 partial (3 distinct), 1 full; "
        "6.2 KiB on cpu)"
    )
    assert "on meta" in repr(mask.to("meta"))
    for other in (mask, ~mask, masks.prefix_lm(300, [7, 200], tile=64)):
        visible = other.to_dense()
        assert other.visible_fraction == pytest.approx(visible.float().mean().item(), abs=1e-6)


def test_same_as_compares_meaning_and_equality_is_identity():
    a, b = masks.causal(200), masks.causal(200, tile=64)
    assert a.same_as(b)
    assert a != b
    assert len({a, b}) == 2
    assert not a.same_as(masks.causal(201))
    assert not a.same_as(masks.window(200, window=199))
    assert not a.same_as(masks.cat([a, a], dim=0))


def test_pickle_copy_and_checkpoints_keep_a_mask():
    mask = masks.causal(200) & masks.document([70, 130])
    buffer = io.BytesIO()
    torch.save({"mask": mask}, buffer)
    buffer.seek(0)
    for twin in (
        pickle.loads(pickle.dumps(mask)),
        copy.copy(mask),
        copy.deepcopy(mask),
        torch.load(buffer)["mask"],
    ):
        assert twin.same_as(mask)
        assert twin.tile == mask.tile
    assert mask.to("cpu") is mask
    there = mask.to("meta")
    assert there.device.type == "meta"
    assert [t.shape for t in there.tensors()] == [t.shape for t in mask.tensors()]


_LISTS = masks.causal(300) & masks.document([170, 130])  # tiles of 128, 128 and 44
# name: how the attributes of that mask are changed, and what is said
CRAFTED = {
    "a column behind the last": (
        {"row_entries": ((0, 0), 3)}, r"rows.entries of a mask must name tiles in \[0, 2\], got 3",
    ),
    "a column before the first": ({"row_entries": ((0, 0), -7)}, "got -7"),
    "a query tile behind the last": ({"column_entries": ((0, 0), 2**30)}, "columns.entries"),
    "a bit tile behind the last": (
        {"row_entries": ((0, 1), 99)}, r"must number partial tiles in \[0, 4\], got 99",
    ),
    "a bit tile for a full one": ({"row_entries": ((0, 1), -1)}, "partial tiles"),
    "a span that begins before the list": ({"row_spans": ((0, 0, 0, 0), -1)}, "rows.spans"),
    "a span that ends behind the list": ({"column_spans": ((0, 0, 2, 2), 10**6)}, "columns.spans"),
    "a span that falls": ({"row_spans": ((0, 0, 1, 1), 5)}, "rows.spans"),
    "a span without its tiles": ({"row_spans": ((0, 0, 2, 2), 3)}, "hold each of"),
    "a tile twice": (
        {"row_entries": ((2, 0), 0), "column_entries": ((1, 0), 1)}, "ascend",
    ),
    "lists that fall": (
        {"row_entries": ((slice(1, 3),), torch.tensor([[1, 3], [0, 0]]))}, "ascend",
    ),
    "a full tile with a bit tile": (
        {"row_spans": ((0, 0, 0, 1), 1)}, r"number full tiles in \[-1, -1\], got 2",
    ),
    "lists that disagree": ({"row_entries": ((0, 1), 0)}, "same tiles in rows and in columns"),
    "bits outside of the mask": ({"bits": ((slice(None), slice(None), 3), -1)}, "show nothing"),
    "a shape of fewer tiles": ({"shape": (1, 1, 100, 300)}, "row_spans of a mask must have shape"),
    "a shape of no lengths": ({"shape": (1, 1, -5, 300)}, "four lengths"),
    "a tile of another size": ({"tile": (128, 32)}, "a pair of 64 or 128"),
    "lists of 64 bits": ({"row_entries": torch.zeros(5, 2, dtype=torch.int64)}, "must be int32"),
    "no tensor": ({"bits": None}, "must be a tensor"),
    "a subclass": ({"bits": torch.nn.Parameter(_LISTS.bits, False)}, "must be a tensor"),
}  # fmt: skip
_OF_LISTS = ("bits", "row_spans", "row_entries", "column_spans", "column_entries")


def _crafted(changes):
    """The state of a mask of which some numbers are others."""
    tensors = dict(zip(_OF_LISTS, (t.clone() for t in _LISTS.tensors()), strict=True))
    others = {"shape": _LISTS.shape, "tile": _LISTS.tile}
    for name, change in changes.items():
        if name in others or not isinstance(change, tuple):
            (others if name in others else tensors)[name] = change
        else:
            tensors[name][change[0]] = change[1]
    rows, columns = (
        masks.block_mask.TileLists(tensors[f"{name}_spans"], tensors[f"{name}_entries"])
        for name in ("row", "column")
    )
    return {**others, "bits": tensors["bits"], "rows": rows, "columns": columns}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_lists_are_refused_when_made_and_when_loaded(name):
    changes, message = CRAFTED[name]
    state = _crafted(changes)
    if name != "a subclass":  # of tensors may be given, and is not expected in a file
        with pytest.raises((ValueError, TypeError), match=message):
            BlockMask(**state)
    mask = object.__new__(BlockMask)
    mask.__dict__.update(state)
    buffer = io.BytesIO()
    torch.save(mask, buffer)
    buffer.seek(0)
    with pytest.raises((ValueError, TypeError), match=message):
        torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", ["rows", "columns"])
@pytest.mark.parametrize(("part", "number"), [(0, 10**6), (0, -5), (1, 10**6), (1, -3)])
def test_a_cpu_looks_at_lists_that_have_changed(name, part, number):
    mask = BlockMask(**_crafted({}))
    getattr(mask, name).entries[0, part] = number
    q = torch.zeros(1, 300, 1, 8)
    with pytest.raises(ValueError, match=f"{name} of a mask must lead to tiles from 0 to 2"):
        ops.attention(q, q, q, mask=mask)


def test_a_loaded_mask_shares_no_tensor_with_its_file():
    assert BlockMask(**_crafted({})).same_as(_LISTS)
    buffer = io.BytesIO()
    torch.save([_LISTS, _LISTS.rows.entries], buffer)
    buffer.seek(0)
    mask, entries = torch.load(buffer, weights_only=True)
    entries.fill_(10**6)
    assert mask.same_as(_LISTS)


def test_a_pickled_mask_without_its_attributes_is_refused():
    with pytest.raises(ValueError, match="must hold shape, tile, bits, rows, columns"):
        object.__new__(BlockMask).__setstate__({"shape": (1, 1, 1, 1)})


def test_builders_put_the_mask_where_it_was_asked_for():
    assert masks.causal(9, device="meta").device.type == "meta"
    assert masks.dense(torch.ones(9, 9, dtype=torch.bool), device="meta").device.type == "meta"
    with torch.device("meta"):
        assert masks.causal(9).device.type == "meta"
        assert masks.from_predicate(lambda b, h, i, j: i >= j, 9).device.type == "meta"
    lengths = torch.tensor([3, 6])
    assert masks.document(lengths).device == lengths.device


def _peak(make) -> int:
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_mask_of_131072_tokens_needs_little_memory():
    """N x N bits alone would be 2 GiB; the map of tiles is 4 MiB."""
    generator = np.random.default_rng(0)
    lengths = generator.multinomial(131_072, np.ones(100) / 100).tolist()
    made = []
    peak = _peak(lambda: made.append(masks.causal(131_072) & masks.document(lengths)))
    assert peak < 100e6
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert made[0].visible_fraction == pytest.approx(pairs / 131_072**2, rel=1e-12)


def test_a_predicate_is_asked_in_strips():
    sizes = []

    def rule(b, h, i, j):
        sizes.append(len(i) * j.shape[1])
        return i * 256 >= j

    peak = _peak(lambda: masks.from_predicate(rule, 512, 131_072))
    assert sum(sizes) == 512 * 131_072
    assert max(sizes) <= 1 << 22
    assert peak < 40e6


def test_attention_by_a_mask_is_attention_by_its_rule():
    q, k, v = make_qkv(1, 90, 90, 2, 2, 16)
    mask = masks.causal(90) & masks.document([50, 40])
    o = ops.attention(q, k, v, mask=mask, backend="reference")
    parts = [
        ops.attention(q[:, s], k[:, s], v[:, s], causal=True, backend="reference")
        for s in (slice(0, 50), slice(50, 90))
    ]
    torch.testing.assert_close(o, torch.cat(parts, 1))


class _Attend(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return ops.attention(q, k, v, mask=self.mask, backend="reference")


class _AttendBy(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return ops.attention(q, k, v, mask=mask, backend="reference")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
class TestTracing:
    def test_one_graph_takes_masks_as_arguments_and_from_closures(self):
        q, k, v = make_qkv(1, 90, 90, 2, 2, 16, requires_grad=True)
        first, second = masks.causal(90) & masks.document([50, 40]), masks.window(90, window=7)
        torch._dynamo.reset()
        by_argument = torch.compile(_AttendBy(), fullgraph=True, backend="aot_eager")
        closed_over = torch.compile(_Attend(first), fullgraph=True, backend="aot_eager")
        for mask in (first, second):
            want = torch.autograd.grad(_Attend(mask)(q, k, v).square().sum(), (q, k, v))
            got = torch.autograd.grad(by_argument(q, k, v, mask).square().sum(), (q, k, v))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
        assert torch.equal(closed_over(q, k, v), _Attend(first)(q, k, v))

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_with_the_mask_as_attribute_closure_and_argument(self, strict):
        q, k, v = make_qkv(1, 90, 90, 2, 2, 16)
        mask = masks.causal(90) & masks.document([50, 40])

        class Closed(torch.nn.Module):
            def forward(self, q, k, v):
                return ops.attention(q, k, v, mask=mask, backend="reference")

        want = Closed()(q, k, v)
        for module, inputs in (
            (Closed(), (q, k, v)),
            (_Attend(mask), (q, k, v)),
            (_AttendBy(), (q, k, v, mask)),
        ):
            program = torch.export.export(module, inputs, strict=strict)
            targets = [str(node.target) for node in program.graph.nodes]
            assert targets.count("tilewise.attention_fwd.default") == 1
            assert torch.equal(program.module()(*inputs), want)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        assert torch.equal(torch.export.load(buffer).module()(q, k, v, mask), want)

    def test_building_inside_compiled_code_breaks_the_graph_and_stays_right(self):
        def build_and_attend(q, length):
            mask = masks.causal(length) & masks.document([50, length - 50])
            return ops.attention(q, q, q, mask=~~mask.crop(0, length), backend="reference")

        q, _, _ = make_qkv(1, 90, 90, 2, 2, 16)
        torch._dynamo.reset()
        compiled = torch.compile(build_and_attend, backend="aot_eager")
        assert torch.equal(compiled(q, 90), build_and_attend(q, 90))
        torch._dynamo.reset()
        refusing = torch.compile(build_and_attend, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="build masks outside of graphs"):
            refusing(q, 90)

    def test_a_mask_is_a_tree_of_its_tensors(self):
        from torch.utils import _pytree

        mask = masks.causal(200)
        leaves, spec = _pytree.tree_flatten({"mask": mask})
        assert all(a is b for a, b in zip(leaves, mask.tensors(), strict=True))
        assert _pytree.tree_unflatten(leaves, spec)["mask"].same_as(mask)


class TestPicture:
    def test_small_masks_show_each_tile(self):
        axes = masks.causal(500).plot()
        image = axes.images[0].get_array()
        assert image.tolist() == [[2, 0, 0, 0], [1, 2, 0, 0], [1, 1, 2, 0], [2, 2, 2, 2]]
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert texts == ["empty", "full", "partial"]
        colours = {patch.get_facecolor() for patch in axes.get_legend().get_patches()}
        assert len(colours) == 3
        assert (axes.get_xlim(), axes.get_ylim()) == ((0, 500), (500, 0))
        pyplot.close(axes.figure)

    def test_a_thin_line_survives_a_thousand_tiles(self):
        figure, axes = pyplot.subplots()
        flags = torch.zeros(65_536, dtype=torch.bool)
        flags[40_000] = True
        mask = masks.global_local(65_536, window=1, global_tokens=flags, tile=64)
        assert mask.plot(axes) is axes
        image = axes.images[0].get_array()
        box = axes.get_window_extent()
        assert image.shape[0] <= box.height
        assert image.shape[1] <= box.width
        assert (image == 2).any(0).all()
        assert (image == 2).any(1).all()
        row = 40_000 * image.shape[0] // 65_536
        assert (image[row] == 2).sum() > image.shape[1] // 2
        pyplot.close(figure)

    def test_a_sequence_and_head_are_chosen(self):
        mask = masks.cat([masks.causal(256), masks.dense(torch.ones(256, 256).bool())], dim=1)
        for head, want in ((0, [[2, 0], [1, 2]]), (1, [[1, 1], [1, 1]])):
            axes = mask.plot(batch=3, head=head)
            assert axes.images[0].get_array().tolist() == want
            pyplot.close(axes.figure)
        with pytest.raises(ValueError, match="head must lie from 0 to 1, got 2"):
            mask.plot(head=2)

    def test_a_mask_without_tokens_has_an_empty_picture(self):
        axes = masks.causal(0).plot()
        assert not axes.images
        pyplot.close(axes.figure)

    def test_without_matplotlib_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r"pip install 'tilewise\[plot\]'"):
            masks.causal(9).plot()


def test_the_recipes_of_the_document_are_what_they_are_called(monkeypatch):
    # The masks are judged here, not the kernels.
    monkeypatch.setattr(tilewise, "attention", partial(ops.attention, backend="reference"))
    text = (Path(__file__).parent.parent / "docs" / "guide" / "masks.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    i, j = _grid(1024, 1024)

    def same(name, *visible):
        dense = names[name].to_dense()
        want = torch.stack([v.expand(dense.shape[2:]) for v in visible])
        assert torch.equal(dense.flatten(0, 1), want), name

    rows = [torch.full((1024,), -1) for _ in range(2)]
    for row, lengths in zip(rows, ([300, 700], [512, 256, 256]), strict=True):
        row[: sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    same("packed", *((j <= i) & (row[i] == row[j]) & (row[i] >= 0) for row in rows))
    same("block_causal", j // 128 <= i // 128)
    same("prefix", *((j <= i) | (j < prefix) for prefix in (100, 513)))
    same("streaming", (j <= i) & ((i - j < 256) | (j < 4)))
    first, d = (i == 0) | (j == 0), (i - j).abs()
    near, dilated = (d <= 128) | first, (d <= 256) & (d % 2 == 0) | first
    same("longformer", near, near, dilated, dilated)
    chosen = torch.zeros(16, 16, dtype=torch.bool).scatter(1, names["chosen"], True)
    r, c = i // 64, j // 64
    same("bigbird", ((r - c).abs() <= 1) | (r < 2) | (c < 2) | chosen[r, c])
    assert names["bigbird"].tiles.partial == 0
    seen_drafts = ["0", "01", "02", "013", "014", "025"]
    tree = torch.tensor([[str(c) in seen for c in range(6)] for seen in seen_drafts])
    same("tree", torch.cat([torch.ones(6, 500, dtype=torch.bool), tree], 1))
    same("chunk", ((j <= i) | (j < 300))[800:])
    same("flex", (j <= i) & (i // 100 == j // 100))


TRUE = torch.ones(4, 4, dtype=torch.bool)
REFUSED = {
    "tile": (lambda: masks.causal(9, tile=32), ValueError, "tile must be 64 or 128"),
    "tile_pair": (lambda: masks.causal(9, tile=(64, 96)), ValueError, "tile must be 64 or 128"),
    "tile_triple": (lambda: masks.causal(9, tile=(64, 64, 64)), ValueError, "an int or a pair"),
    "negative": (lambda: masks.causal(-1), ValueError, "seqlen_q must be at least 0, got -1"),
    "float": (lambda: masks.causal(9, 2.5), TypeError, "seqlen_k must be an int, got float"),
    "window_zero": (lambda: masks.window(9, window=0), ValueError, "window must be at least 1"),
    "window_none": (lambda: masks.window(9, window=None), TypeError, "window must be an int"),
    "window_left": (lambda: masks.window(9, window=(-2, 0)), ValueError, "window left must be"),
    "stride": (lambda: masks.strided(9, stride=0), ValueError, "stride must be at least 1"),
    "distance_dtype": (
        lambda: masks.from_distance(lambda d: d, 9),
        TypeError,
        "fn must return a bool tensor, got torch.int64",
    ),
    "distance_shape": (
        lambda: masks.from_distance(lambda d: TRUE, 9),
        ValueError,
        r"fn must return shape \(255,\), got \(4, 4\)",
    ),
    "prefix": (lambda: masks.prefix_lm(9, 10), ValueError, r"prefix must lie from 0 to 9"),
    "prefix_dtype": (lambda: masks.prefix_lm(9, [1.5]), TypeError, "prefix must be integers"),
    "prefix_rank": (
        lambda: masks.prefix_lm(9, torch.ones(2, 2).long()),
        ValueError,
        "prefix must have at most 1 dimension",
    ),
    "global_count": (
        lambda: masks.global_local(9, window=1, global_tokens=10),
        ValueError,
        "global_tokens must be at most 9 tokens, got 10",
    ),
    "global_position": (
        lambda: masks.global_local(9, window=1, global_tokens=[9]),
        ValueError,
        "global_tokens must be positions from 0 to 8",
    ),
    "global_flags": (
        lambda: masks.global_local(9, window=1, global_tokens=TRUE),
        ValueError,
        "global_tokens must flag 9 tokens, got 4",
    ),
    "document_none": (lambda: masks.document(), ValueError, "exactly one of lengths, ids"),
    "document_two": (lambda: masks.document([1], ids=[0]), ValueError, "exactly one of lengths"),
    "document_length": (lambda: masks.document([3, -1]), ValueError, "lengths must be at least 0"),
    "document_float": (lambda: masks.document([3.0]), TypeError, "lengths must be integers"),
    "document_seqlen": (
        lambda: masks.document([3, 4], seqlen=6),
        ValueError,
        "seqlen must be at least the documents' 7 tokens, got 6",
    ),
    "ids_seqlen": (
        lambda: masks.document(ids=[0, 1], seqlen=3),
        ValueError,
        "seqlen must be None or the length of ids, got 3",
    ),
    "cu_seqlens": (
        lambda: masks.document(cu_seqlens=[1, 4]),
        ValueError,
        "cu_seqlens must start at 0 and never decrease",
    ),
    "dense_dtype": (lambda: masks.dense(torch.ones(4, 4)), TypeError, "must be a bool tensor"),
    "dense_list": (lambda: masks.dense([[True]]), TypeError, "must be a bool tensor, got list"),
    "dense_rank": (lambda: masks.dense(TRUE[0]), ValueError, "visible must have 2 to 4 dim"),
    "predicate_dtype": (
        lambda: masks.from_predicate(lambda b, h, i, j: i - j, 9),
        TypeError,
        "fn must return a bool tensor, got torch.int64",
    ),
    "predicate_shape": (
        lambda: masks.from_predicate(lambda b, h, i, j: TRUE, 9),
        ValueError,
        r"fn must return what broadcasts to \(9, 9\), got shape \(4, 4\)",
    ),
    "predicate_heads": (
        lambda: masks.from_predicate(lambda b, h, i, j: i > j, 9, heads=0),
        ValueError,
        "heads must be at least 1",
    ),
    "layout_size": (
        lambda: masks.block_sparse(TRUE, block_size=64, seqlen_q=300),
        ValueError,
        "seqlen_q must be covered by just 4 blocks of 64, got 300",
    ),
    "layout_block": (
        lambda: masks.block_sparse(TRUE, block_size=0),
        ValueError,
        "block_size must be at least 1",
    ),
    "cat_dim": (lambda: masks.cat([masks.causal(9)], dim=2), ValueError, "dim must be 0"),
    "cat_none": (lambda: masks.cat([], dim=0), ValueError, "masks must be at least one"),
    "cat_device": (
        lambda: masks.cat([masks.causal(9), masks.causal(9, device="meta")], dim=0),
        ValueError,
        "masks must be on one device, got cpu and meta",
    ),
    "and_device": (
        lambda: masks.causal(9) & masks.causal(9, device="meta"),
        ValueError,
        "masks must be on one device, got cpu and meta",
    ),
    "and_shape": (
        lambda: masks.causal(9) & masks.causal(9, 8),
        ValueError,
        r"same queries and keys, got \(9, 9\) and \(9, 8\)",
    ),
    "or_heads": (
        lambda: masks.dense(TRUE.expand(2, 4, 4)) | masks.dense(TRUE.expand(3, 4, 4)),
        ValueError,
        "1 or the same number of heads, got 2 and 3",
    ),
    "and_other": (lambda: masks.causal(9) & 1, TypeError, "unsupported operand"),
    "or_other": (lambda: masks.causal(9) | True, TypeError, "unsupported operand"),
    "crop_order": (lambda: masks.causal(9).crop(5, 3), ValueError, "start and stop must lie"),
    "crop_keys": (lambda: masks.causal(9).crop(0, 3, 10), ValueError, "seqlen_k must be at most 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        make()
