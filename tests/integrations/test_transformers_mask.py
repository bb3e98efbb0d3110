"""The masks that transformers gets: what they say is the matrix that "sdpa" would have got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, LlamaConfig, masking_utils

from tilewise.errors import UnsupportedError
from tilewise.integrations.transformers import mask as module
from tilewise.integrations.transformers.mask import AttentionMask, attention_mask, visible_of
from tilewise.masks import of_transformers as patterns
from tilewise.masks.of_transformers import Visible

CAUSAL = masking_utils.causal_mask_function
BOTH_WAYS = masking_utils.bidirectional_mask_function
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9]) > 0
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 1], [0] * 8 + [1]]) > 0
# Two rows of packed sequences; the second begins in the middle of a longer one.
IDS = [[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]]
POSITIONS = [[0, 1, 2, 0, 1, 0, 1, 2, 3], [7, 8, 0, 1, 2, 3, 4, 5, 6]]
NOTHING_HIDDEN = torch.ones(2, 9, dtype=torch.bool)


def window(size: int) -> Callable:
    return masking_utils.sliding_window_causal_mask_function(size)


def window_both_ways(size: int) -> Callable:
    return masking_utils.sliding_window_bidirectional_mask_function(size)


def packed(inner: Callable, *rows: list[int]) -> Callable:
    ids = torch.tensor(rows)
    return masking_utils.and_masks(inner, masking_utils.packed_sequence_mask_function(ids))


def moved(inner: Callable, rows: list[list[int]]) -> Callable:
    """Ask `inner` for positions in the place of indices, as transformers does from 5.24 on."""
    return masking_utils.remap_positions_for_packed_sequence(inner, torch.tensor(rows))


def chunks(size: int, *padding: int) -> Callable:
    return masking_utils.chunked_causal_mask_function(size, torch.tensor(padding))


def _remap_positions_for_packed_sequence(mask_function: Callable, position_ids: Tensor) -> Callable:
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return mask_function(
            batch_idx, head_idx, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx]
        )

    return inner_mask


@pytest.fixture(autouse=True)
def newest(monkeypatch):
    """Give every transformers the factories of the newest."""
    name = "remap_positions_for_packed_sequence"
    if not hasattr(masking_utils, name):
        monkeypatch.setattr(masking_utils, name, globals()[f"_{name}"], raising=False)
        patterns._closures.cache_clear()
    yield
    patterns._closures.cache_clear()


def expand(visible: Visible, batch: int, q_length: int, kv_length: int) -> Tensor:
    """Return what a description lets each query see, by the rules of `tilewise.attention`."""
    seen = torch.zeros(batch, 1, q_length, kv_length, dtype=torch.bool)
    for row in range(batch):
        lengths = visible.seqlens_k
        keys = visible.num_keys if lengths is None else int(lengths[row])
        for i in range(q_length):
            for j in range(min(keys, visible.num_keys)):
                place = j - (i + keys - q_length)
                inside = visible.left is None or place >= -visible.left
                seen[row, 0, i, j] = inside and (visible.right is None or place <= visible.right)
    if visible.key_bias is not None:
        seen[..., : visible.num_keys] &= visible.key_bias == 0
    if visible.cu_seqlens is not None:
        places = torch.arange(batch * q_length)
        owner = (places[:, None] >= visible.cu_seqlens).sum(1).view(batch, 1, q_length)
        seen &= owner[..., :, None] == owner[..., None, :]
        assert visible.max_seqlen == int(owner.flatten().bincount().max())
    return seen


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable = CAUSAL
    q_length: int = 9
    kv_length: int = 9
    q_offset: int | Tensor = 0
    kv_offset: int = 0
    padding: Tensor | None = None
    uses: tuple[str, ...] = ()  # the parts of the description beside the window
    make: Callable[[], Callable] | None = None  # of a function that only new releases have

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("causal"),
    Case("causal_all_ones", padding=NOTHING_HIDDEN),
    Case("causal_left_padding", padding=LEFT, uses=("key_bias",)),
    Case("causal_right_padding", padding=RIGHT, uses=("key_bias",)),
    Case("causal_holes", padding=HOLES, uses=("key_bias",)),
    Case("chunk_after_a_cache", q_length=3, q_offset=6),
    Case("chunk_with_padding", q_length=3, q_offset=6, padding=LEFT, uses=("key_bias",)),
    Case("last_query", q_length=1, q_offset=8, padding=LEFT, uses=("key_bias",)),
    Case(
        "room_in_a_static_cache",
        q_length=4,
        kv_length=12,
        padding=LEFT[:, :4],
        uses=("key_bias",),
    ),
    Case("room_nobody_pads", q_length=4, kv_length=12),
    Case("offset_on_the_device", q_length=3, kv_length=12, q_offset=torch.tensor(4)),
    Case(
        "offset_on_the_device_in_a_window",
        window(3),
        q_length=3,
        kv_length=12,
        q_offset=torch.tensor(4),
        padding=LEFT[:, :7],
        uses=("key_bias",),
    ),
    Case("window", window(4)),
    Case("window_of_one", window(1)),
    Case("window_wider_than_the_keys", window(20)),
    Case("window_left_padding", window(4), padding=LEFT, uses=("key_bias",)),
    Case("window_cache_that_forgot", window(4), 2, 5, q_offset=7, kv_offset=4, padding=LEFT),
    Case("window_static_cache_not_full", window(6), 2, 6, q_offset=1),
    Case("both_ways", BOTH_WAYS),
    Case("both_ways_right_padding", BOTH_WAYS, padding=RIGHT, uses=("seqlens_k",)),
    Case("both_ways_left_padding", BOTH_WAYS, padding=LEFT, uses=("key_bias",)),
    Case("both_ways_other_keys", BOTH_WAYS, 4, 9, padding=RIGHT, uses=("seqlens_k",)),
    Case("window_both_ways", window_both_ways(2)),
    Case("window_both_ways_padding", window_both_ways(2), padding=RIGHT, uses=("key_bias",)),
    Case(
        "packed",
        packed(CAUSAL, [0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9),
        uses=("cu_seqlens",),
    ),
    Case("packed_window", packed(window(2), [0, 0, 0, 0, 1, 1, 1, 1, 1]), uses=("cu_seqlens",)),
    *(
        Case(
            f"packed_by_positions_{name}",
            make=lambda inner=inner: packed(moved(inner, POSITIONS), *IDS),
            uses=("cu_seqlens",),
        )
        for name, inner in (
            ("causal", CAUSAL),
            ("window", window(2)),
            ("both_ways", BOTH_WAYS),
            ("chunks", chunks(3, 0, 0)),
        )
    ),
    Case("chunks", chunks(4, 0, 0), uses=("cu_seqlens",)),
    Case("chunks_after_padding_that_is_gone", chunks(4, 3, 1), uses=("cu_seqlens",)),
    Case("chunks_all_ones", chunks(4, 0, 0), padding=NOTHING_HIDDEN, uses=("cu_seqlens",)),
    Case("one_chunk", chunks(9, 3, 0), padding=LEFT, uses=("key_bias",)),
    Case(
        "one_chunk_after_a_cache", chunks(9, 3, 0), 3, q_offset=6, padding=LEFT, uses=("key_bias",)
    ),
]


def _make(case: Case, **changes):
    batch = 1 if case.name == "packed_window" else 2
    arguments = {
        "batch_size": batch,
        "q_length": case.q_length,
        "kv_length": case.kv_length,
        "q_offset": case.q_offset,
        "kv_offset": case.kv_offset,
        "mask_function": case.make() if case.make else case.function,
        "attention_mask": case.padding,
    }
    return attention_mask(**arguments | changes), arguments | changes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_description_says_what_the_matrix_says(case):
    mask, arguments = _make(case)
    want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, AttentionMask)
    assert mask.shape == want.shape
    assert torch.equal(mask.dense(), want)
    visible = visible_of(mask)
    assert visible is not None
    assert torch.equal(expand(visible, *(want.shape[i] for i in (0, 2, 3))), want)
    parts = ("seqlens_k", "key_bias", "cu_seqlens")
    used = {part for part in parts if getattr(visible, part) is not None}
    assert used == set(case.uses) | ({"seqlens_k"} if isinstance(case.q_offset, Tensor) else set())


def test_early_releases_give_positions():
    case = CASES[7]
    mask, _ = _make(case)
    early = attention_mask(
        batch_size=2,
        cache_position=torch.tensor([8]),
        kv_length=9,
        mask_function=CAUSAL,
        attention_mask=case.padding,
    )
    assert visible_of(early).num_keys == visible_of(mask).num_keys
    assert torch.equal(visible_of(early).key_bias, visible_of(mask).key_bias)


OTHERS = {
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([3, 0])),
    "or": masking_utils.or_masks(CAUSAL, lambda b, h, q, k: k < 2),
    "lambda": lambda b, h, q, k: (q + k) % 2 == 0,
    "packed_twice": packed(packed(CAUSAL, *[[0] * 4 + [1] * 5] * 2), *[[0] * 6 + [1] * 3] * 2),
}


NOT_INDICES = {  # what only looks like packed sequences whose positions count from their start
    "a_position_is_left_out": lambda: packed(
        moved(window(2), [[0, 1, 3, 0, 1, 0, 1, 2, 3]] * 2), *IDS[:1] * 2
    ),
    "positions_without_sequences": lambda: moved(CAUSAL, POSITIONS),
    "sequences_by_position": lambda: moved(packed(CAUSAL, *IDS), POSITIONS),
    "one_number_for_two_sequences": lambda: packed(CAUSAL, *[[0, 0, 1, 1, 1, 0, 0, 0, 0]] * 2),
}


@pytest.mark.parametrize("name", NOT_INDICES)
def test_positions_that_are_no_indices_are_only_a_matrix(name):
    mask, arguments = _make(Case(name, make=NOT_INDICES[name]))
    want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert visible_of(mask) is None
    assert torch.equal(mask.dense(), want)


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_nobody_knows_are_only_a_matrix(name):
    mask, arguments = _make(Case(name, OTHERS[name], padding=LEFT))
    want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert visible_of(mask) is None
    assert torch.equal(mask.dense(), want)
    assert torch.equal(mask.bias(torch.float64) == 0, want)
    assert mask.bias(torch.float64) is mask.bias(torch.float64)


def test_packed_rows_of_a_cache_are_only_a_matrix():
    function = packed(CAUSAL, [0, 0, 1])
    mask, _ = _make(Case("cached", function, 3, 9, q_offset=6), batch_size=1)
    assert visible_of(mask) is None


class TestLikeATensor:
    def test_what_is_computed_from_it_is_the_matrix(self):
        mask, _ = _make(CASES[2])
        dense = mask.dense()
        assert (mask.dtype, mask.dim(), mask.device) == (torch.bool, 4, torch.device("cpu"))
        for got, want in (
            (mask[:, 0, :, :4], dense[:, 0, :, :4]),
            (mask & ~mask[..., :1], dense & ~dense[..., :1]),
            (torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0)),
            (mask.clone(), dense),
            (mask.float(), dense.float()),
            (torch.cat([mask, mask], -1), torch.cat([dense, dense], -1)),
        ):
            assert type(got) is Tensor
            assert torch.equal(got, want)

    def test_a_copy_on_a_device_keeps_the_description(self):
        for case in (CASES[2], Case("lambda", OTHERS["lambda"])):
            mask, _ = _make(case)
            for copy in (mask.detach(), mask.to("cpu", copy=True)):
                assert isinstance(copy, AttentionMask)
                assert copy is not mask
                assert torch.equal(copy.dense(), mask.dense())
                assert (visible_of(copy) is None) == (visible_of(mask) is None)
            assert visible_of(mask.to("meta")) is None or (
                visible_of(mask.to("meta")).key_bias.device.type == "meta"
            )

    def test_it_is_made_once_and_only_when_looked_at(self, monkeypatch):
        made = []
        original = masking_utils.sdpa_mask
        monkeypatch.setattr(
            masking_utils, "sdpa_mask", lambda **kwargs: made.append(1) or original(**kwargs)
        )
        mask, _ = _make(CASES[2])
        assert "AttentionMask((2, 1, 9, 9)" in repr(mask)
        assert not made
        assert mask[0, 0, 0, 0].item() is False
        assert mask.sum().item() == 45 + 21
        assert made == [1]

    @pytest.mark.parametrize("inference", [False, True])
    def test_what_is_written_to_it_counts(self, inference):
        with torch.inference_mode(inference):
            mask, _ = _make(CASES[2])
            before = mask.dense().clone()
            assert visible_of(mask) is not None
            mask[:, :, 5, 7:] = True
            assert visible_of(mask) is None
            assert mask.dense()[0, 0, 5].tolist() == [False] * 3 + [True] * 3 + [False, True, True]
            assert torch.equal(mask.bias(torch.float32)[:, :, 5] == 0, mask.dense()[:, :, 5])
            mask &= before
            assert torch.equal(torch.as_tensor(mask.bias(torch.float32) == 0), before)

    def test_adding_it_to_logits_is_refused(self):
        mask, _ = _make(CASES[0])
        with pytest.raises(UnsupportedError, match='attn_implementation must be "eager"'):
            torch.zeros(2, 4, 9, 9) + mask


def test_one_query_of_a_static_cache_is_a_plain_matrix():
    case = Case("step", q_length=1, kv_length=12, q_offset=torch.tensor(4), padding=LEFT[:, :5])
    mask, arguments = _make(case, allow_is_causal_skip=False)
    assert type(mask) is Tensor
    assert torch.equal(mask, masking_utils.sdpa_mask(**arguments))
    across = Case("across", BOTH_WAYS, q_length=1, padding=RIGHT)  # to the keys of an encoder
    mask, _ = _make(across, allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
    assert visible_of(mask).seqlens_k.tolist() == [6, 9]


def test_while_tracing_the_matrix_has_a_note_on_it(monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_tracing", lambda tensor=None: True)
    config = LlamaConfig()
    config.sliding_window = 4
    for case, noted in (
        (CASES[0], True),
        (CASES[2], True),
        (Case("window", window(4), padding=LEFT), True),
        (Case("both_ways", BOTH_WAYS, padding=RIGHT), True),
        (Case("chunks", OTHERS["chunks"]), False),
        (Case("cached", q_length=3, q_offset=6), False),
    ):
        size = 4 if case.name == "window" else 3 if case.name == "chunks" else None
        mask, arguments = _make(case, local_size=size, config=config)
        want = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert torch.equal(mask, want)
        assert (visible_of(mask) is not None) == noted
        assert visible_of(mask[:]) is None
        if noted:
            assert torch.equal(expand(visible_of(mask), 2, 9, 9), want)
    config.attention_chunk_size = 4
    chunks = Case("chunks", masking_utils.chunked_causal_mask_function(4, torch.zeros(2).long()))
    assert visible_of(_make(chunks, local_size=4, config=config)[0]) is None


class TestMatricesAreSaid:
    """A mask of many queries that is no description is told once, with what to do."""

    @pytest.fixture(autouse=True)
    def untold(self, monkeypatch):
        monkeypatch.setattr(module, "_told", set())

    @pytest.mark.parametrize(
        ("case", "advice"),
        [
            (Case("unknown", OTHERS["lambda"], 300, 300), "leave out or_mask_function"),
            (Case("in_a_cache", chunks(64, 0, 0), 300, 600, q_offset=300), "give use_cache=False"),
        ],
        ids=str,
    )
    def test_once(self, case, advice):
        mask, _ = _make(case)
        assert visible_of(mask) is None
        with pytest.warns(UserWarning, match=f"computed as a matrix.*{advice}"):
            module.tell_of_a_matrix(mask)
        module.tell_of_a_matrix(mask)  # a second warning would be an error

    def test_one_that_was_given_or_traced(self):
        given = torch.ones(1, 1, 300, 300, dtype=torch.bool)
        with pytest.warns(UserWarning, match="given with four dims"):
            module.tell_of_a_matrix(given)
        given.visible = None
        with pytest.warns(UserWarning, match="give attention_mask, all ones"):
            module.tell_of_a_matrix(given)

    def test_not_where_it_costs_nothing(self):
        for shape in ((1, 1, 1, 100_000), (1, 1, 60, 60)):
            module.tell_of_a_matrix(torch.empty(shape, dtype=torch.bool))
        assert not module._told


def test_models_that_attend_by_themselves_are_refused():
    with pytest.raises(UnsupportedError, match="AttentionInterface, got tilewise's for BloomModel"):
        _make(CASES[0], config=BloomConfig())
    assert _make(CASES[0], config=object())[0].shape == (2, 1, 9, 9)
