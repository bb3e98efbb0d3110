"""causal_conv1d and its step: the reference within the budget, and one set of bits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.ops.recurrent.problem import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.reference.recurrent import causal_conv1d as oracle
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# lengths, channels, width, activation, bias, state
CASES = {
    "two_taps": ((7, 9), 16, 2, None, True, True),
    "three_taps": ((20,), 40, 3, "silu", False, True),
    "four_taps": ((70, 1, 0, 3), 33, 4, "silu", True, True),
    "from_zero": ((5, 2), 64, 4, None, False, False),
    "one_tap": ((6,), 8, 1, "silu", True, True),
    "wide": ((4, 3), 1100, 4, "silu", True, False),
    "no_sequence": ((), 8, 4, None, True, True),
    "only_states": ((0, 0), 8, 4, None, True, True),
    "seven_taps": ((12,), 24, 7, "silu", False, True),
}


def _draw(name, dtype, place):
    lengths, channels, width, activation, has_bias, has_state = CASES[name]
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(place, dtype)

    x, weight = normal(sum(lengths), channels), normal(channels, width)
    bias = normal(channels) if has_bias else None
    state = normal(len(lengths), width - 1, channels) if has_state else None
    edges = torch.tensor([0, *lengths]).cumsum(0).to(place, torch.int32)
    return (x, weight, bias), {
        "cu_seqlens": edges, "initial_state": state, "activation": activation,
        "return_state": True,
    }  # fmt: skip


def _solve(tensors, options, dtype):
    x, weight, bias = (t if t is None else t.cpu().to(dtype) for t in tensors)
    state, ends = options["initial_state"], options["cu_seqlens"].tolist()
    silu = options["activation"] == "silu"
    y, states = [x[:0]], []
    for index, (first, end) in enumerate(itertools.pairwise(ends)):
        before = None if state is None else state[index].cpu().to(dtype)
        rows, after = oracle(x[first:end], weight, bias, before, silu=silu)
        y.append(rows)
        states.append(after)
    empty = x.new_zeros(0, weight.shape[1] - 1, x.shape[1])
    return torch.cat(y), torch.stack(states) if states else empty


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_keep_the_budget(name, dtype, backend, place):
    tensors, options = _draw(name, dtype, place)
    y, state = ops.causal_conv1d(*tensors, backend=backend, **options)
    truth, true_state = _solve(tensors, options, torch.float64)
    eager, _ = _solve(tensors, options, torch.float32)
    assert y.dtype == dtype
    assert_within_budget(y, truth, eager.to(dtype), scale=10.0)
    assert torch.equal(state.cpu(), true_state.to(dtype))


def test_the_reference_is_torchs_convolution():
    (x, weight, bias), _ = _draw("four_taps", torch.float64, "cpu")
    y, _ = oracle(x, weight, bias, None)
    padded = F.pad(x.t().unsqueeze(0), (3, 0))
    want = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
    torch.testing.assert_close(y, want[0].t())


@on_each_backend
@pytest.mark.parametrize("name", ["two_taps", "four_taps", "one_tap", "wide", "seven_taps"])
def test_sequences_in_parts_have_the_bits_of_the_whole(name, backend, place):
    (x, weight, bias), options = _draw(name, torch.bfloat16, place)
    edges, activation = options["cu_seqlens"], options["activation"]
    whole, after = ops.causal_conv1d(
        x, weight, bias, cu_seqlens=edges, activation=activation, return_state=True,
        backend=backend,
    )  # fmt: skip
    ends = edges.tolist()
    for cut in ([1] * 80, [2] * 40, [3, 1, 80], [80]):
        states = torch.full((len(ends) + 1, *after.shape[1:]), float("nan")).to(x)
        slots, start, found = list(range(len(ends) - 1, 0, -1)), 0, [[] for _ in ends[1:]]
        for size in cut:
            taken = [
                (max(min(start, b - a), 0), min(start + size, b - a))
                for a, b in itertools.pairwise(ends)
            ]
            rows = [torch.arange(a + s, a + e) for a, (s, e) in zip(ends, taken, strict=False)]
            parts = torch.tensor([0, *map(len, rows)]).cumsum(0).to(place, torch.int32)
            y = ops.causal_conv1d_step(
                x[torch.cat(rows).to(place)], weight, bias, states,
                slots=torch.tensor(slots, device=place),
                starts=torch.tensor([s for s, _ in taken], device=place),
                activation=activation, cu_seqlens=parts, backend=backend,
            )  # fmt: skip
            for each, part in zip(found, y.split([len(r) for r in rows]), strict=True):
                each.append(part)
            start += size
        assert torch.equal(torch.cat([part for each in found for part in each]), whole)
        for n, slot in enumerate(slots):
            length = ends[n + 1] - ends[n]
            if length > 0 and states.shape[1]:
                last = torch.arange(max(length - states.shape[1], 0), length)
                rows = states[slot][last % states.shape[1]]
                assert torch.equal(rows, after[n][-len(last) :])
        assert bool(states[0].isnan().all()) or states.shape[1] == 0


@on_each_backend
@pytest.mark.parametrize("width", [1, 2, 4])
def test_tokens_are_taken_back_as_far_as_a_slot_has_rows(width, backend, place):
    """A guess of six tokens that is wrong, at any place of the slot's ring."""
    x, weight = torch.randn(40, 24, device=place), torch.randn(24, width, device=place)
    states = torch.full((2, width - 1 + 6, 24), float("nan"), device=place)
    start, found = 0, []
    for right in (9, 0, 3, 6, 1, 5, 2, 6, 8):
        taken = x[start : start + right]
        guessed = torch.cat([taken, torch.full_like(x[:6], 7.0)[: 6 - right]])
        y = ops.causal_conv1d_step(
            guessed, weight, None, states, slots=torch.tensor([1], device=place),
            starts=torch.tensor([start], device=place), backend=backend,
            cu_seqlens=torch.tensor([0, len(guessed)]).to(place, torch.int32),
        )  # fmt: skip
        found.append(y[:right])
        start += right
    assert start == 40
    truth = ops.causal_conv1d(
        x, weight, cu_seqlens=torch.tensor([0, 40]).to(place, torch.int32), backend=backend
    )
    assert torch.equal(torch.cat(found), truth)
    assert bool(states[0].isnan().all())


@on_each_backend
def test_dense_rows_are_packed_rows_and_may_be_apart(backend, place):
    x = torch.randn(2, 9, 24, device=place)
    weight, wide = torch.randn(24, 4, device=place), torch.randn(18, 60, device=place)
    dense = ops.causal_conv1d(x, weight, backend=backend)
    edges = torch.tensor([0, 9, 18], dtype=torch.int32, device=place)
    packed = ops.causal_conv1d(x.flatten(0, 1), weight, cu_seqlens=edges, backend=backend)
    assert torch.equal(dense.flatten(0, 1), packed)
    wide[:, 7:31] = x.flatten(0, 1)
    strided = ops.causal_conv1d(wide[:, 7:31], weight, cu_seqlens=edges, backend=backend)
    assert torch.equal(strided, packed)


@on_each_backend
def test_a_sequence_without_a_slot_is_skipped(backend, place):
    x, weight = torch.randn(4, 8, device=place), torch.randn(8, 4, device=place)
    states = torch.zeros(1, 3, 8, device=place)
    y = ops.causal_conv1d_step(
        x, weight, None, states, slots=torch.tensor([-1, -1, 0, -1], device=place),
        starts=torch.tensor([0, 5, 0, 3], device=place), backend=backend,
    )  # fmt: skip
    assert not y[[0, 1, 3]].any()
    assert torch.equal(states[0, 0], x[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference(name, dtype):
    tensors, options = _draw(name, dtype, "cpu")

    def grads(of, function):
        leaves = [t if t is None else t.to(of).clone().requires_grad_() for t in tensors]
        state = options["initial_state"]
        state = state if state is None else state.to(of).clone().requires_grad_()
        y, after = function(leaves, options | {"initial_state": state})
        loss = y.square().sum() + after.pow(3).sum() + sum(0 * x.sum() for x in leaves[:2])
        wanted = [x for x in (*leaves, state) if x is not None]
        return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    ours = grads(dtype, lambda leaves, options: ops.causal_conv1d(*leaves, **options))
    truth = grads(torch.float64, lambda *given: _solve(*given, torch.float64))
    eager = grads(torch.float32, lambda *given: _solve(*given, torch.float32))
    for got, want, plain in zip(ours, truth, eager, strict=True):
        assert_within_budget(got, want, plain, scale=200.0)


def _kernels_gradient(tensors, options, dy, dafter):
    """A GPU's kernels, which the op calls on a GPU only."""
    kernels = pytest.importorskip("tilewise.kernels.triton.recurrent.convolution")
    dx, *grads, dstate = kernels.gradient(
        dy, dafter, *tensors, options["initial_state"], options["cu_seqlens"],
        has_silu=options["activation"] == "silu",
    )  # fmt: skip
    has = (True, tensors[2] is not None, options["initial_state"] is not None)
    return (dx, *(x for x, wanted in zip((*grads, dstate), has, strict=True) if wanted))


@pytest.mark.parametrize(
    "place", [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("has_dstate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_gpus_kernels_keep_the_budget(name, dtype, has_dstate, place):
    tensors, options = _draw(name, dtype, place)
    # Rows may be apart, and some may be no sequence's.
    x = torch.cat([tensors[0], tensors[0].new_ones(2, tensors[0].shape[1])])
    wide = torch.stack([x, x], 1)[:, 1]
    dy = torch.randn_like(x)
    state = options["initial_state"]
    shape = (len(options["cu_seqlens"]) - 1, tensors[1].shape[1] - 1, x.shape[1])
    dafter = torch.randn(shape, device=place).to(dtype) if has_dstate else None
    ours = _kernels_gradient((wide, *tensors[1:]), options, dy, dafter)

    def grads(of):
        leaves = [t if t is None else t.cpu().to(of).requires_grad_() for t in tensors]
        before = state if state is None else state.cpu().to(of).requires_grad_()
        y, after = _solve(leaves, options | {"initial_state": before}, of)
        loss = (y * dy[: len(y)].cpu().to(of)).sum() + sum(0 * t.sum() for t in leaves[:2])
        if has_dstate:
            loss = loss + (after * dafter.cpu().to(of)).sum()
        wanted = [t for t in (*leaves, before) if t is not None]
        return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    assert not ours[0][len(tensors[0]) :].any()
    ours = (ours[0][: len(tensors[0])], *ours[1:])
    for got, want, plain in zip(ours, grads(torch.float64), grads(torch.float32), strict=True):
        assert got.dtype == dtype
        # dz is rounded to the tokens' dtype before it is added up.
        assert_within_budget(got, want, plain.to(dtype), scale=200.0)


def test_rows_that_no_sequence_has_give_and_get_nothing():
    x = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    edges = torch.tensor([0, 5], dtype=torch.int32)
    y = ops.causal_conv1d(x, weight, cu_seqlens=edges, activation="silu")
    dx, dweight = torch.autograd.grad((y + 1).square().sum(), (x, weight))
    assert not dx[5:].any()
    first = ops.causal_conv1d(x[:5], weight, cu_seqlens=edges, activation="silu")
    torch.testing.assert_close(torch.autograd.grad((first + 1).square().sum(), weight)[0], dweight)


# What torch 2.14 itself warns of where it checks an op that has a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("packed", [False, True])
def test_the_ops_are_opcheck_clean(packed):
    x, weight, bias, state = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((8, 6) if packed else (2, 4, 6), (6, 3), (6,), (2, 2, 6))
    )
    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    arguments = (x, weight, bias, state, edges if packed else None, True)
    torch.library.opcheck(torch.ops.tilewise.causal_conv1d.default, (*arguments, None))
    fixed = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    grads = (torch.randn_like(fixed[0]), torch.randn_like(fixed[3]))
    torch.library.opcheck(torch.ops.tilewise.causal_conv1d_bwd.default, (*grads, *fixed, None))
    rows = torch.randn(8, 6, dtype=torch.float64)
    torch.library.opcheck(
        torch.ops.tilewise.causal_conv1d_step.default,
        (rows, *fixed[1:3], torch.zeros(3, 2, 6, dtype=torch.float64), torch.tensor([2, 0]),
         torch.tensor([1, 0]), edges, True, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_vmap_is_a_loop():
    x, weight = torch.randn(3, 2, 5, 6), torch.randn(3, 6, 3)

    def grad_of(x, weight):
        return torch.func.grad(lambda w: ops.causal_conv1d(x, w).square().sum())(weight)

    for function in (ops.causal_conv1d, grad_of):
        want = torch.stack([function(*each) for each in zip(x, weight, strict=True)])
        torch.testing.assert_close(torch.func.vmap(function)(x, weight), want)


def test_what_has_no_gradient_is_refused():
    x, weight = torch.randn(2, 6, requires_grad=True), torch.randn(6, 3)
    places = {"slots": torch.tensor([0, 1]), "starts": torch.tensor([0, 0])}
    y = ops.causal_conv1d_step(x, weight, None, torch.zeros(2, 2, 6), **places)
    with pytest.raises(UnsupportedError, match="causal_conv1d_step must be called"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.ones(2, 3, 5, 6)}, ValueError, r"x must be \(B, S, C\)"),
        ({"x": torch.ones(2, 5, 6).int()}, TypeError, "x must be one of float16"),
        ({"weight": torch.ones(5, 3)}, ValueError, r"weight must be \(C, W\) = \(6, 1 to 8\)"),
        ({"weight": torch.ones(6, 9)}, ValueError, r"weight must be \(C, W\)"),
        ({"weight": torch.ones(6, 3).half()}, TypeError, "weight must have dtype float32"),
        ({"bias": torch.ones(5)}, ValueError, r"bias must have shape \(6,\)"),
        ({"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
        ({"initial_state": torch.ones(2, 3, 6)}, ValueError, "initial_state must have shape"),
        ({"initial_state": torch.ones(2, 2, 6).int()}, TypeError, "initial_state must have dtype"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
        ({"kernel_size": 3}, TypeError, "kernel_size"),
    ],
    ids=str,
)
def test_bad_input_is_named(changes, error, message):
    given = {"x": torch.ones(2, 5, 6), "weight": torch.ones(6, 3)} | changes
    with pytest.raises(error, match=message):
        ops.causal_conv1d(**given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"states": torch.zeros(2, 1, 6)}, ValueError, r"states must have shape \(2, 2, 6\)"),
        ({"states": torch.zeros(2, 3, 5)}, ValueError, r"states must have shape \(2, 3, 6\)"),
        ({"states": torch.zeros(2, 2, 6).half()}, TypeError, "states must have dtype float32"),
        ({"states": torch.zeros(2, 6, 2).mT}, ValueError, "states must be contiguous"),
        ({"slots": torch.tensor([0, 2])}, ValueError, r"slots must lie in \[-1, 1\], got 2"),
        ({"slots": torch.tensor([1, 1])}, ValueError, "slots must differ"),
        ({"slots": torch.tensor([0.0, 1.0])}, TypeError, "slots must have dtype int32 or int64"),
        ({"starts": torch.tensor([0])}, ValueError, r"starts must have shape \(2,\)"),
        ({"starts": torch.tensor([0, -3])}, ValueError, "starts must lie in"),
        ({"cu_seqlens": torch.tensor([0, 1, 9]).int()}, ValueError, "cu_seqlens must rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 1, 2])}, TypeError, "cu_seqlens must have dtype int32"),
    ],
    ids=str,
)
def test_bad_places_are_named(changes, error, message):
    given = {
        "x": torch.ones(2, 6), "weight": torch.ones(6, 3), "bias": None,
        "states": torch.zeros(2, 2, 6), "slots": torch.tensor([0, 1]),
        "starts": torch.tensor([0, 0]),
    } | changes  # fmt: skip
    with pytest.raises(error, match=message):
        ops.causal_conv1d_step(**given)
