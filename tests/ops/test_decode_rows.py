"""The rows of a decoding batch before and after a step: by hand, and the kernel as the oracle."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.ops.decode_rows import begin_decode, draw_decode, finish_decode, start_decode

RING = 4
PLACES = [
    pytest.param("triton", "cpu", id="interpreted"),
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("triton", "cuda", id="compiled", marks=pytest.mark.gpu),
]


def begun(backend, position, active, fresh, table, block_size, place=1):
    """Begin a step; returns everything that it may have written."""
    size = len(position)
    state = {
        "fresh": fresh.clone(),
        "table": table.clone(),
        "place": torch.tensor([place]),
        "positions": torch.full((size,), -7),
        "slot_mapping": torch.full((size,), -7),
        "seqlens_k": torch.full((size,), -7, dtype=torch.int32),
    }
    begin_decode(
        position, active, block_size=block_size, ring=RING, backend=backend, **state
    )  # fmt: skip
    return state


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_step_by_hand(backend):
    position = torch.tensor([5, 8, 3, 200])
    active = torch.tensor([1, 1, 0, 0])
    fresh = torch.tensor([-1, 9, -1, -1], dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).view(4, 3) + 20
    state = begun(backend, position, active, fresh, table, block_size=4, place=3)
    assert state["positions"].tolist() == [5, 8, 0, 0]  # 200 is past the table, and not read
    assert state["slot_mapping"].tolist() == [21 * 4 + 1, 9 * 4, -1, -1]
    assert state["seqlens_k"].tolist() == [6, 9, 0, 0]
    assert state["fresh"].tolist() == [-1] * 4
    assert state["table"][1].tolist() == [23, 24, 9]
    assert torch.equal(state["table"][[0, 2, 3]], table[[0, 2, 3]])
    assert state["place"].tolist() == [0]
    token, counter = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 11, 12, 13])
    results = torch.full((RING, 6, 2), -7)
    finish_decode(
        torch.tensor([50, 51, 52, 53]), torch.tensor([True, False, True, True]), token, position,
        counter, active, state["place"], results, backend=backend,
    )  # fmt: skip
    assert token.tolist() == [50, 51, 3, 4]
    assert position.tolist() == [6, 9, 3, 200]
    assert counter.tolist() == [11, 12, 12, 13]
    assert results[0, :4].tolist() == [[50, 1], [51, 0], [52, 1], [53, 1]]
    assert (results[1:] == -7).all()
    assert (results[0, 4:] == -7).all()


@pytest.mark.parametrize(("backend", "place"), PLACES)
@pytest.mark.parametrize(("width", "pairs"), [(64, 16), (40, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_starts_a_step_begins_it_and_looks_up(backend, place, width, pairs, dtype):
    size, block_size = 5, 4
    draw = torch.Generator().manual_seed(width)
    whole = torch.randint(0, 99, (size, 11), generator=draw, dtype=torch.int32)
    position = torch.tensor([5, 8, 900, 0, 39])
    active = torch.tensor([1, 1, 0, 1, 1])
    fresh = torch.tensor([-1, 9, -1, 7, -1], dtype=torch.int32)
    embedding = torch.randn(30, width, generator=draw).to(dtype)
    angles = torch.randn(40, 2 * pairs, generator=draw)
    token = torch.tensor([29, 0, 3, 3, 11])
    asked = begun("reference", position, active, fresh, whole[:, :10], block_size, place=3)
    state = {
        "fresh": fresh.clone(),
        "table": whole.clone()[:, :10],
        "place": torch.tensor([3]),
        "positions": torch.full((size,), -7),
        "slot_mapping": torch.full((size,), -7),
        "seqlens_k": torch.full((size,), -7, dtype=torch.int32),
    }
    given = {"position": position, "active": active, "token": token, "embedding": embedding,
             "angles": angles}  # fmt: skip
    state, there = ({k: v.to(place) for k, v in each.items()} for each in (state, given))
    x, found = start_decode(**there, block_size=block_size, ring=RING, backend=backend, **state)
    assert all(torch.equal(state[name].cpu(), asked[name]) for name in asked)
    assert torch.equal(x.cpu(), embedding[token])
    assert torch.equal(found.cpu(), angles[asked["positions"]])


@pytest.mark.parametrize(("backend", "place"), PLACES)
@pytest.mark.parametrize("draws", ["greedily", "by a temperature", "truncated"])
def test_what_draws_moves_rows_on_as_what_finishes_a_step(backend, place, draws):
    size, vocab = 6, 5000
    draw = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(size, vocab, generator=draw)
    logits[2, 77] = float("nan")
    logits[4] = float("-inf")
    sampling: dict[str, torch.Tensor] = {}
    if draws != "greedily":
        sampling["temperature"] = torch.tensor([0.7, 1.0, 1.0, 0.0, 1.0, 2.0])
        sampling["seeds"] = torch.arange(size)
    if draws == "truncated":
        sampling["top_k"] = torch.tensor([0, 3, 3, 3, 3, 40], dtype=torch.int32)
        sampling["top_p"] = torch.tensor([0.5, 1.0, 0.9, 1.0, 1.0, 0.9])
    logits, sampling = logits.to(place), {k: v.to(place) for k, v in sampling.items()}
    active = torch.tensor([1, 0, 1, 1, 1, 1], device=place)
    rows = [torch.randint(0, 2**40, (size,), generator=draw).to(place) for _ in range(3)]
    fixed = {"active": active, "place": torch.tensor([2], device=place)}
    given = sampling | ({"counters": rows[2]} if sampling else {})
    drawn, is_finite = ops.sample_tokens(logits, backend=backend, **given)
    assert is_finite.tolist() == [True, True, False, True, False, True]
    expected = [x.clone() for x in rows]
    results = torch.full((RING, size + 2, 2), -7, device=place)
    asked = results.clone()
    finish_decode(drawn, is_finite, *expected, **fixed, results=asked, backend="reference")
    names = ("token", "position", "counter")
    draw_decode(
        logits, **sampling, **dict(zip(names, rows, strict=True)), **fixed, results=results,
        backend=backend,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
    assert torch.equal(results, asked)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_kernel_does_what_the_oracle_does(size, block_size):
    draw = torch.Generator().manual_seed(size)
    whole = torch.randint(0, 99, (size + 5, 11), generator=draw, dtype=torch.int32)
    table = whole[:size, :10]  # rows lie apart
    position = torch.randint(0, 10 * block_size, (size,), generator=draw)
    active = torch.randint(0, 2, (size,), generator=draw)
    fresh = torch.randint(-3, 99, (size,), generator=draw, dtype=torch.int32).clamp(min=-1)
    fresh[active == 0] = -1
    states = [
        begun(backend, position, active, fresh, table, block_size)
        for backend in ("triton", "reference")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    finished = []
    drawn = torch.randint(0, 2**40, (size,), generator=draw)
    finite = torch.randint(0, 2, (size,), generator=draw, dtype=torch.int32)
    for backend in ("triton", "reference"):
        rows = [torch.arange(size), position.clone(), torch.arange(size) * 7]
        results = torch.zeros((RING, size + 2, 2), dtype=torch.int64)
        finish_decode(drawn, finite, *rows, active, torch.tensor([2]), results, backend=backend)
        finished.append([*rows, results])
    assert all(torch.equal(a, b) for a, b in zip(*finished, strict=True))


def test_an_unknown_backend_is_refused():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="backend must be triton, reference or None, got 'cpu'"):
        finish_decode(one, one, one, one, one, one, one, torch.zeros(1, 1, 2), backend="cpu")
