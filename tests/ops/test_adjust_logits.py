"""adjust_logits: biases, masks and penalties as the oracle has them, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.guarded import Banded
from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.ops.adjust_logits import words_of
from tilewise.reference.adjust import adjust_logits as oracle
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(
    ("backend", "place"), [*BACKENDS, pytest.param("reference", "cpu", id="reference")]
)
ALL = ("mask", "bias", "counts")


def arguments(vocab: int, rows: list[int], parts: tuple[str, ...], place: str) -> dict[str, Any]:
    """Random arguments for `rows`; every third row has no mask, every other one no counts."""
    draw = torch.Generator().manual_seed(vocab)
    number, found = len(rows), {"rows": torch.tensor(rows, dtype=torch.int64)}
    index = torch.arange(number, dtype=torch.int32)
    if "mask" in parts:
        words = torch.randint(-(1 << 31), 1 << 31, (number, words_of(vocab)), generator=draw)
        found["mask"] = words.to(torch.int32)
        found["mask"][:, 0] = -1
        found["mask_of"] = torch.where(index % 3 == 2, -1, number - 1 - index)
    if "bias" in parts:
        pairs = [(row, t) for row in rows for t in {0, vocab - 1, vocab // 2}]
        found["bias_rows"], found["bias_ids"] = (
            torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()
        )
        found["bias"] = torch.randn(len(pairs), generator=draw) * 50
    if "counts" in parts:
        counts = torch.randint(0, 9, (number + 2, vocab), generator=draw, dtype=torch.int32)
        found["counts"] = counts * torch.randint(0, 2, counts.shape, generator=draw).int()
        found["counts_of"] = torch.where(index % 2 == 1, -1, number + 1 - index)
        found["penalties"] = torch.rand((number, 3), generator=draw) * 2 + 0.1
    return {name: x.to(place) for name, x in found.items()}


def eager(logits, given):
    """The same in torch's float32, as its users write it."""
    after = logits.clone()
    if "bias" in given:
        after[given["bias_rows"], given["bias_ids"]] += given["bias"]
    for i, row in enumerate(given["rows"].tolist()):
        if "mask" in given and given["mask_of"][i] >= 0:
            words = given["mask"][given["mask_of"][i]]
            bits = (words[:, None] >> torch.arange(32, device=words.device)) & 1
            after[row].masked_fill_(bits.reshape(-1)[: logits.shape[1]] == 0, -math.inf)
        if "counts" in given and given["counts_of"][i] >= 0:
            seen = given["counts"][given["counts_of"][i]]
            repetition, frequency, presence = given["penalties"][i]
            x = after[row]
            x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * (seen >> 1).float()
            after[row] = x - presence * (seen > 1).float()
    return after


@on_each_backend
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1024, 3001])
@pytest.mark.parametrize("parts", [ALL, ("mask",), ("bias",), ("counts",), ("mask", "counts"), ()])
def test_chosen_rows_are_the_oracles_and_others_keep_their_bits(parts, vocab, backend, place):
    logits = (torch.randn(7, vocab, generator=torch.Generator().manual_seed(1)) * 5).to(place)
    logits[4, 0] = -math.inf
    before = logits.clone()
    rows = [5, 0, 4, 2, 6]
    given = arguments(vocab, rows, parts, place)
    ops.adjust_logits(logits, **given, backend=backend)
    wanted = oracle(before, **given)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])
    assert torch.equal(logits == -math.inf, wanted == -math.inf)
    finite = wanted > -math.inf
    zero = torch.zeros((), device=place)
    assert_within_budget(
        torch.where(finite, logits, zero),
        torch.where(finite, wanted, 0.0),
        torch.where(finite, eager(before, given), zero),
    )


@on_each_backend
def test_rows_of_a_wider_buffer_are_changed_where_they_lie(backend, place):
    wide = torch.full((4, 96), math.nan, device=place)
    logits = wide[:, :70]
    logits.copy_(torch.randn(4, 70))
    before, given = logits.clone(), arguments(70, [3, 1], ALL, place)
    wide_counts = torch.zeros((len(given["counts"]), 80), dtype=torch.int32, device=place)
    wide_counts[:, :70] = given["counts"]
    given["counts"] = wide_counts[:, :70]
    ops.adjust_logits(logits, **given, backend=backend)
    torch.testing.assert_close(logits.double(), oracle(before, **given), rtol=1e-5, atol=1e-5)
    assert bool(wide[:, 70:].isnan().all())


@on_each_backend
def test_no_rows_change_nothing_and_nan_stays(backend, place):
    logits = torch.randn(2, 40, device=place)
    logits[1, 3] = math.nan
    before = logits.clone()
    ops.adjust_logits(logits, **arguments(40, [], ALL, place), backend=backend)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    given = arguments(40, [1], ("counts",), place)
    given["counts"].fill_(3)
    ops.adjust_logits(logits, **given, backend=backend)
    assert bool(logits[1].isnan()[3])
    assert int(logits.isnan().sum()) == 1


@on_each_backend
def test_penalties_are_those_of_openai_and_hugging_face(backend, place):
    logits = torch.tensor([[2.0, -2.0, 4.0, 0.5, -1.0]], device=place)
    counts = torch.tensor([[1, 1, 4, 7, 0]], dtype=torch.int32, device=place)
    ops.adjust_logits(
        logits,
        torch.zeros(1, dtype=torch.int64, device=place),
        counts=counts,
        counts_of=torch.zeros(1, dtype=torch.int32, device=place),
        penalties=torch.tensor([[2.0, 0.25, 0.5]], device=place),
        backend=backend,
    )
    # in the prompt; in the prompt; twice generated; in the prompt and three times; new
    wanted = [1.0, -4.0, 4.0 / 2 - 2 * 0.25 - 0.5, 0.25 - 0.75 - 0.5, -1.0]
    assert logits[0].tolist() == wanted


def test_it_is_a_clean_node_of_a_graph():
    given = arguments(70, [1, 0], ALL, "cpu")
    names = (
        "rows", "mask", "mask_of", "bias_rows", "bias_ids", "bias", "counts", "counts_of",
        "penalties",
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilewise.adjust_logits.default,
        (torch.randn(3, 70), *(given[name] for name in names), None),
    )


@pytest.mark.gpu
def test_the_bits_of_a_card_are_those_of_a_cpu():
    logits = torch.randn(9, 151_936) * 4
    given = arguments(151_936, [3, 8, 0, 5], ALL, "cpu")
    on_card = logits.cuda()
    ops.adjust_logits(logits, **given)
    ops.adjust_logits(on_card, **{name: x.cuda() for name, x in given.items()})
    assert torch.equal(on_card.cpu(), logits)


ONE = torch.zeros(1, dtype=torch.int32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "half": ({"logits": torch.zeros(2, 9).half()}, "logits must have dtype float32"),
    "flat": ({"logits": torch.zeros(9)}, r"logits must be \(R, V\)"),
    "columns": ({"logits": torch.zeros(9, 2).T}, "logits must have stride 1"),
    "short rows": ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows must have dtype int64"),
    "a mask alone": ({"mask": torch.zeros(1, 1, dtype=torch.int32)}, "mask_of must be given with"),
    "no mask": ({"mask_of": ONE}, "mask must be given with mask_of, got None"),
    "a wide mask": (
        {"mask": torch.zeros(1, 2, dtype=torch.int32), "mask_of": ONE},
        r"mask must have shape \(1, 1\)",
    ),
    "a bias alone": ({"bias": torch.zeros(1)}, "bias_rows must be given with bias, got None"),
    "no penalties": (
        {"counts": torch.zeros(1, 9, dtype=torch.int32), "counts_of": ONE},
        "penalties must be given with counts, got None",
    ),
    "narrow counts": (
        {
            "counts": torch.zeros(1, 8, dtype=torch.int32),
            "counts_of": ONE,
            "penalties": torch.ones(1, 3),
        },
        r"counts must have shape \(1, 9\)",
    ),
    "penalties in columns": (
        {
            "rows": torch.tensor([0, 1]),
            "counts": torch.zeros(1, 9, dtype=torch.int32),
            "counts_of": torch.zeros(2, dtype=torch.int32),
            "penalties": torch.ones(2, 6)[:, :3],
        },
        "penalties must be contiguous",
    ),
    "a backend": ({"backend": "cuda"}, "backend must be one of"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    changes, message = REFUSALS[name]
    given = {"logits": torch.zeros(2, 9), "rows": torch.tensor([0])} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        ops.adjust_logits(given.pop("logits"), given.pop("rows"), **given)


@on_each_backend
def test_rows_tokens_masks_and_counts_that_do_not_exist_are_skipped(backend, place):
    if backend == "reference":
        pytest.skip("torch's own indexing refuses them")
    banded, far = Banded(), 2**31 - 1
    given = arguments(70, [0, 1], ALL, place)
    given["rows"] = torch.tensor([0, far * 9, -2])
    given["mask_of"] = torch.tensor([far, 0, 0], dtype=torch.int32)
    given["counts_of"] = torch.tensor([4, 0, 0], dtype=torch.int32)
    given["penalties"] = torch.ones(3, 3)
    given["bias_rows"] = torch.tensor([1, 2, -1, 1, 1])
    given["bias_ids"] = torch.tensor([3, 0, 0, 70, -1])
    given["bias"] = torch.ones(5)
    logits = banded(torch.zeros(2, 70, device=place))
    ops.adjust_logits(
        logits, **{name: banded(x.to(place)) for name, x in given.items()}, backend=backend
    )
    wanted = torch.zeros(2, 70)
    wanted[1, 3] = 1.0
    assert torch.equal(logits.cpu(), wanted)
    banded.check()
