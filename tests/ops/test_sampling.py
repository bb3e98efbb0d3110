"""sample_tokens and token_logprobs: the tokens of a float64 sampler, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.guarded import Banded
from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.engine.steps.philox import uniforms
from tilewise.kernels.device import interpreting
from tilewise.reference import sampling as oracle

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# name: (vocabulary, scale of the logits, rule)
RULES: dict[str, tuple[int, float, dict[str, float]]] = {
    "plain": (5000, 2.0, {}),
    "plain_of_one_chunk": (101, 2.0, {}),
    "hot": (3001, 1.0, {"temperature": 3.0}),
    "cold": (300, 3.0, {"temperature": 1e-6}),
    "top_1": (300, 3.0, {"top_k": 1}),
    "top_7": (5000, 2.0, {"top_k": 7}),
    "top_k_of_all": (90, 2.0, {"top_k": 90}),
    "top_k_of_many": (9000, 2.0, {"top_k": 4500}),
    "nucleus": (101, 2.0, {"top_p": 0.6}),
    "nucleus_of_few": (5000, 4.0, {"top_p": 0.9, "temperature": 0.7}),
    "nucleus_of_hundreds": (9000, 2.0, {"top_p": 0.6}),
    "nucleus_of_thousands": (9000, 0.3, {"top_p": 0.9}),
    "a_tiny_nucleus": (500, 2.0, {"top_p": 1e-9}),
    "min_p": (5000, 2.0, {"min_p": 0.05}),
    "min_p_of_many": (9000, 0.3, {"min_p": 0.3}),
    "min_p_of_the_best": (500, 2.0, {"min_p": 1.0}),
    "everything": (5000, 2.0, {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7}),
    "much_of_everything": (9000, 1.0, {"top_k": 3000, "top_p": 0.9, "min_p": 0.01}),
}
_DTYPES = {"top_k": torch.int32}


def _rows_of(rule: dict[str, float], rows: int, place: str) -> dict[str, Any]:
    """The arguments of `rows` rows of one rule, each with a stream of its own."""
    options: dict[str, Any] = {
        name: torch.full((rows,), value, dtype=_DTYPES.get(name, torch.float32), device=place)
        for name, value in ({"temperature": 1.0} | rule).items()
    }
    index = torch.arange(rows, device=place)
    return options | {"seeds": index * 7919 + (1 << 40) - 5000, "counters": index * index + 3}


def _oracle(logits: Tensor, options: dict[str, Any]) -> Tensor:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    tokens, _ = oracle.sample_tokens(logits, *(options.get(name) for name in names))
    return tokens


@on_each_backend
@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", RULES)
def test_tokens_are_those_of_a_float64_sampler(name, has_ties, backend, place):
    vocab, scale, rule = RULES[name]
    rows = 5 if backend == "triton" and interpreting() else 100
    logits = (torch.randn(rows, vocab) * scale).to(place)
    if has_ties:
        logits = (logits * 2).round() / 2
        logits[:, ::3] *= -1  # some of the zeros are negative
    options = _rows_of(rule, rows, place)
    tokens, is_finite = ops.sample_tokens(logits, **options, backend=backend)
    assert tokens.dtype == torch.int64
    assert bool(is_finite.all())
    assert torch.equal(tokens, _oracle(logits, options))


@on_each_backend
def test_greedy_rows_take_the_first_of_the_largest(backend, place):
    logits = torch.zeros(3, 4100, device=place)
    logits[0, [5, 4099]] = 2.0
    logits[1, [2048, 2049]] = 7.0
    logits[2] = -1.0
    for options in ({}, _rows_of({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, 3, place)):
        tokens, _ = ops.sample_tokens(logits, **options, backend=backend)
        assert tokens.tolist() == [5, 2048, 0]


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_draw_as_if_widened(dtype, backend, place):
    """Ties, a NaN, an infinity and forbidden tokens among them, under every kind of rule."""
    rules: list[dict[str, float]] = [
        {}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1},
        {"top_k": 3000, "top_p": 0.9}, {"temperature": 1e-3}, {}, {},
    ]  # fmt: skip
    options = _rows_of({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, 9, place)
    for row, rule in enumerate(rules):
        for name, value in rule.items():
            options[name][row] = value
    logits = (2 * torch.randn(9, 4501)).to(place, dtype)
    logits[:, ::7] = float("-inf")
    logits[7, 4000], logits[8, 3] = float("nan"), float("inf")
    tokens, is_finite = ops.sample_tokens(logits, **options, backend=backend)
    wanted, _ = ops.sample_tokens(logits.float(), **options, backend=backend)
    assert torch.equal(tokens, wanted)
    assert is_finite.tolist() == [True] * 7 + [False] * 2


@on_each_backend
def test_a_row_does_not_depend_on_its_batch(backend, place):
    rules: list[dict[str, float]] = [
        {}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.3, "top_p": 0.99},
    ]  # fmt: skip
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = _rows_of(every, len(rules), place)
    for row, rule in enumerate(rules):
        for name, value in rule.items():
            options[name][row] = value
    wide = (torch.randn(len(rules), 2, 4500) * 2).to(place)
    logits = wide[:, 1]  # rows with others between them
    together, _ = ops.sample_tokens(logits, **options, backend=backend)
    for row, rule in enumerate(rules):
        one = {name: numbers[row : row + 1] for name, numbers in options.items()}
        alone, _ = ops.sample_tokens(logits[row : row + 1], **one, backend=backend)
        assert alone[0] == together[row]
        # Rules that keep all may be left out.
        asked = {n: v for n, v in one.items() if n in rule or n not in every or n == "temperature"}
        alone, _ = ops.sample_tokens(logits[row : row + 1], **asked, backend=backend)
        assert alone[0] == together[row]
    order = torch.arange(len(rules) - 1, -1, -1, device=place)
    turned, _ = ops.sample_tokens(
        logits[order], **{n: x[order] for n, x in options.items()}, backend=backend
    )
    assert torch.equal(turned, together[order])


@on_each_backend
def test_rows_that_are_not_finite_are_told_and_spoil_no_other(backend, place):
    logits = torch.randn(6, 3000, device=place)
    for truncation in ({}, {"top_k": 5}, {"top_p": 0.5}):
        options = _rows_of(truncation, 6, place)
        wanted, _ = ops.sample_tokens(logits, **options, backend=backend)
        broken = logits.clone()
        broken[1, 2999], broken[2, 0], broken[4] = math.nan, math.inf, -math.inf
        tokens, is_finite = ops.sample_tokens(broken, **options, backend=backend)
        assert is_finite.tolist() == [True, False, False, True, False, True]
        assert torch.equal(tokens[is_finite], wanted[is_finite])
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < 3000


@on_each_backend
@pytest.mark.parametrize("rule", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01}], ids=str)
def test_forbidden_tokens_are_never_drawn(rule, backend, place):
    logits = torch.full((8, 20_000), -math.inf, device=place)
    allowed = torch.arange(0, 20_000, 1999)
    logits[:, allowed] = torch.randn(8, len(allowed), device=place) - 80.0
    options = _rows_of(rule, 8, place)
    tokens, is_finite = ops.sample_tokens(logits, **options, backend=backend)
    assert bool(is_finite.all())
    assert set(tokens.tolist()) <= set(allowed.tolist())
    assert torch.equal(tokens, _oracle(logits, options))


@on_each_backend
def test_extreme_logits_and_temperatures(backend, place):
    logits = torch.tensor([[1.0, 3.0, 2.999, -1e4, 3e38 * 0]], device=place).repeat(3, 1)
    for temperature in (1e-30, 1e-6):
        options = _rows_of({"temperature": temperature}, 3, place)
        assert ops.sample_tokens(logits, **options, backend=backend)[0].tolist() == [1] * 3
    huge = torch.tensor([[3e38, -3e38, 2e38]], device=place)
    options = _rows_of({"temperature": 5.0, "top_p": 0.9}, 1, place)
    assert ops.sample_tokens(huge, **options, backend=backend)[0].tolist() == [0]
    level = torch.zeros(5, 1, device=place)
    assert (
        ops.sample_tokens(level, **_rows_of({}, 5, place), backend=backend)[0].tolist() == [0] * 5
    )


@on_each_backend
def test_numbers_are_those_of_philox(backend, place):
    """Among V equal tokens the drawn one is floor(u V)."""
    vocab = 4096
    rows = 40
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,))
    counters = torch.randint(0, 1 << 62, (rows,))
    tokens, _ = ops.sample_tokens(
        torch.zeros(rows, vocab, device=place), temperature=torch.ones(rows, device=place),
        seeds=seeds.to(place), counters=counters.to(place), backend=backend,
    )  # fmt: skip
    u = uniforms(seeds.tolist(), counters.tolist())
    assert tokens.tolist() == [int(x * vocab) for x in u]
    assert [
        oracle.uniform(s, c) for s, c in zip(seeds.tolist(), counters.tolist(), strict=True)
    ] == list(u)


@on_each_backend
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_of_the_untouched_distribution(count, backend, place):
    logits = (torch.randn(5, 3000) * 4).to(place)
    logits[0, [3, 2999]] = 30.0  # of equal ones the first comes first
    logits[1] = logits[1].round()
    logits[2, :2990] = -math.inf
    tokens = torch.tensor([2999, 0, 2995, 17, 2], device=place)
    own, ids, values = ops.token_logprobs(logits, tokens, count, backend=backend)
    wanted = oracle.token_logprobs(logits, tokens, count)
    torch.testing.assert_close(own, wanted[0], rtol=1e-6, atol=1e-6)
    assert ids.shape == values.shape == (5, count)
    torch.testing.assert_close(values, wanted[2], rtol=1e-6, atol=1e-6)
    finite = values > -math.inf
    assert torch.equal(ids[finite], wanted[1][finite])


@on_each_backend
def test_logprobs_of_small_vocabularies_and_broken_rows(backend, place):
    logits = torch.randn(2, 4, device=place)
    logits[1, 2] = math.nan
    own, ids, values = ops.token_logprobs(
        logits, torch.zeros(2, dtype=torch.int64, device=place), 4, backend=backend
    )
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]
    assert bool(values[0].isfinite().all())
    assert bool(own[1].isnan())
    assert bool(values[1].isnan().all())


@on_each_backend
def test_nothing_to_draw(backend, place):
    logits = torch.randn(0, 50, device=place)
    tokens, is_finite = ops.sample_tokens(
        logits, **_rows_of({"top_k": 3}, 0, place), backend=backend
    )
    assert tokens.shape == is_finite.shape == (0,)
    none = torch.zeros(0, dtype=torch.int64, device=place)
    assert [x.shape for x in ops.token_logprobs(logits, none, 3, backend=backend)] == [
        (0,), (0, 3), (0, 3),
    ]  # fmt: skip


@pytest.mark.gpu
def test_a_captured_draw_follows_what_changes_on_the_card():
    logits = torch.randn(9, 151_936, device="cuda") * 3
    options = _rows_of({"top_k": 50, "top_p": 0.9, "min_p": 0.01}, 9, "cuda")
    ops.sample_tokens(logits, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = ops.sample_tokens(logits, **options)
    options["counters"].add_(11)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    assert torch.equal(tokens, ops.sample_tokens(logits, **options)[0])


@pytest.mark.gpu
def test_of_a_million_draws_fewer_than_ten_differ():
    draws, rows = 2000, 512
    logits = torch.randn(rows, 32_000, device="cuda") * 5
    options = _rows_of({}, rows, "cuda")
    seeds = options["seeds"].tolist()
    p = logits.double().softmax(-1)
    cumulative = (p * 2.0**48).long().cumsum(-1)
    u = torch.from_numpy(
        uniforms([s for s in seeds for _ in range(draws)], list(range(draws)) * rows)
    ).reshape(rows, draws)
    total = cumulative[:, -1:]
    at = torch.minimum((u.cuda() * total).long(), total - 1)
    wanted = torch.searchsorted(cumulative, at, right=True)
    different = 0
    for draw in range(draws):
        options["counters"].fill_(draw)
        different += int((ops.sample_tokens(logits, **options)[0] != wanted[:, draw]).sum())
    assert different < 10


def test_they_are_clean_nodes_of_a_graph():
    logits = torch.randn(3, 40)
    options = _rows_of({"top_k": 3, "top_p": 0.9, "min_p": 0.1}, 3, "cpu")
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
    arguments = [options[name] for name in names]
    torch.library.opcheck(torch.ops.tilewise.sample_tokens.default, (logits, *arguments, None))
    torch.library.opcheck(
        torch.ops.tilewise.token_logprobs.default, (logits, torch.tensor([1, 2, 3]), 4, None)
    )


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "double logits": ({"logits": torch.randn(2, 9).double()}, "float16 or bfloat16, got float64"),
    "one row": ({"logits": torch.randn(9)}, r"logits must be \(R, V\)"),
    "no columns": ({"logits": torch.randn(2, 0)}, "logits must have 1 ... 1048576 columns"),
    "columns": ({"logits": torch.randn(9, 2).T}, "logits must have stride 1"),
    "a double": ({"temperature": torch.ones(2).double()}, "temperature must have dtype float32"),
    "a short rule": ({"top_k": torch.ones(1).int()}, r"top_k must have shape \(2,\)"),
    "wide counts": ({"top_k": torch.ones(2).long()}, "top_k must have dtype int32"),
    "no stream": ({"seeds": None}, "seeds must be given with a temperature"),
    "no counter": ({"counters": None}, "counters must be given with a temperature"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    changes, message = REFUSALS[name]
    given = {"logits": torch.randn(2, 9)} | _rows_of({}, 2, "cpu") | changes
    with pytest.raises((ValueError, TypeError), match=message):
        ops.sample_tokens(given.pop("logits"), **given)


@pytest.mark.parametrize("count", [-1, 21, 10])
def test_refuses_more_logprobs_than_there_may_be(count):
    with pytest.raises(ValueError, match="count must be in 0 ... 9"):
        ops.token_logprobs(torch.randn(2, 9), torch.tensor([0, 1]), count)


@on_each_backend
def test_ids_that_no_token_has_read_nothing(backend, place):
    banded = Banded()
    logits = banded(torch.randn(4, 100).to(place))
    tokens = banded(torch.tensor([7, -1, 2**40, 100], device=place))
    own, _, _ = ops.token_logprobs(logits, tokens, 2, backend=backend)
    assert own.isnan().tolist() == [False, True, True, True]
    banded.check()
