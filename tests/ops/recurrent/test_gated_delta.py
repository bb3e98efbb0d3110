"""gated_delta and its step: the reference within the budget, one set of bits however it is cut."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tests.ops.recurrent.problem import BACKENDS, CASES, KEEPS, Case, Problem
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
LONGEST = 140
CUTS = {
    "token_by_token": [1] * LONGEST,
    "tokens_across_a_chunk": [61, 1, 1, 1, 1, 1, LONGEST - 66],
    "at_chunks": [64, 64, LONGEST - 128],
    "off_chunks": [50, 30, LONGEST - 80],
    "tokens_then_a_prompt": [1, 1, 1, LONGEST - 3],
    "a_prompt_then_tokens": [LONGEST - 3, 1, 1, 1],
}
# Interpreted, each token takes a tenth of a second.
CUT_ON_BACKENDS = [
    pytest.param(
        *row.values, cut, id=f"{cut}-{row.id}",
        marks=[*row.marks, *([pytest.mark.slow] if row.id == "triton-interpreted"
                             and cut == "token_by_token" else [])],
    )
    for row in BACKENDS
    for cut in CUTS
]  # fmt: skip


def _scale(problem: Problem) -> float:
    """The magnitude of what is added up: states, values, and logs of decays over a chunk."""
    given = [problem.rows[2], *([] if problem.state is None else [problem.state])]
    biggest = max([1.0, *(float(x.abs().max()) for x in given if x.numel())])
    return 4 * biggest * max(1.0, problem.case.strength)


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_keep_the_budget(case, dtype, backend, place):
    problem = Problem.draw(case, dtype, place)
    o, states = problem.run(backend)
    truth, true_states = problem.solve(torch.float64)
    eager, eager_states = problem.solve(torch.float32)
    assert o.dtype == dtype
    assert states.dtype == torch.float32
    scale = _scale(problem)
    assert_within_budget(o, truth, eager.to(dtype), name="o", scale=scale)
    # Tokens of 16 bits are multiplied with float32 on tensor cores, which see 10 of its bits.
    is_coarse = backend == "triton" and dtype != torch.float32
    states, eager_states = (x.to(dtype) if is_coarse else x for x in (states, eager_states))
    assert_within_budget(states, true_states, eager_states, name="state", scale=scale)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize(("backend", "place", "cut"), CUT_ON_BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": (1, 2, 16, 16)},
        {"by_channel": True, "heads": (1, 1, 16, 16)},
        {"heads": (1, 1, 24, 40)},
        {"is_delta": False, "heads": (1, 1, 16, 16)},
    ],
    ids=str,
)
def test_a_sequence_in_parts_has_the_bits_of_the_whole(kind, cut, backend, place):
    case = Case("cut", lengths=(LONGEST,), has_state=False, **kind)
    problem = Problem.draw(case, torch.bfloat16, place)
    whole, _after = problem.run(backend)
    states = problem.slots(3, KEEPS[backend])
    parts, first = [], 0
    for size in CUTS[cut]:
        parts.append(problem.step([(0, first, first + size)], states, [1], backend))
        first += size
    assert torch.equal(torch.cat(parts), whole)
    longer = problem.slots(2, KEEPS[backend])
    problem.step([(0, 0, LONGEST)], longer, [0], backend)
    held = LONGEST % 64
    for ours, at_once in zip(states, longer, strict=True):
        if ours is None:
            continue
        rows = ... if ours is states.state else slice(held)
        assert torch.equal(ours[1][rows], at_once[0][rows])
        for other in (0, 2):
            assert bool(ours[other].isnan().all()), "a slot that nobody named was written"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": (1, 2, 128, 128)},
        {"heads": (1, 1, 128, 128), "by_channel": True},
        {"heads": (1, 2, 128, 64), "is_delta": False},
    ],
    ids=["delta", "kimi", "mamba"],
)
def test_heads_of_models_decode_with_the_bits_of_a_prompt(kind):
    problem = Problem.draw(Case("cut", (LONGEST,), has_state=False, **kind), torch.bfloat16, "cuda")
    whole, _ = problem.run("triton")
    states = problem.slots(1, "tokens")
    parts = [problem.step([(0, 0, 40)], states, [0], "triton")]
    for at in range(40, LONGEST):
        parts.append(problem.step([(0, at, at + 1)], states, [0], "triton"))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
@pytest.mark.parametrize("by_channel", [False, True])
def test_random_schedules_of_many_sequences_have_the_bits_of_each_alone(by_channel, backend, place):
    lengths = (70, 1, 129, 64, 9)
    heads = (1, 1, 16, 16)
    case = Case("many", lengths=lengths, heads=heads, has_state=False, by_channel=by_channel)
    problem = Problem.draw(case, torch.float32, place)
    whole, _ = problem.run(backend)
    dice = random.Random(3)
    states, slots = problem.slots(7, KEEPS[backend]), [6, 0, 3, 2, 5]
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = []
        for n in dice.sample(range(len(lengths)), dice.randint(1, len(lengths))):
            size = min(dice.choice([0, 1, 1, 1, 5, 40, 100]), lengths[n] - done[n])
            parts.append((n, done[n], done[n] + size))
        rows = problem.step(parts, states, slots, backend)
        for n, first, end in parts:
            found[n].append(rows[: end - first])
            rows = rows[end - first :]
            done[n] = end
    for n, (first, end) in enumerate(problem.runs):
        assert torch.equal(torch.cat(found[n]), whole[first:end])
        alone, _ = problem.run(
            backend,
            tuple(x[first:end] for x in problem.rows),
            cu_seqlens=torch.tensor([0, end - first], dtype=torch.int32, device=place),
        )
        assert torch.equal(alone, whole[first:end])


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
def test_a_state_at_a_chunk_is_continued_with_the_same_bits(backend, place):
    problem = Problem.draw(Case("long", lengths=(150,), has_state=False), torch.float32, place)
    whole, after = problem.run(backend)
    edges = torch.tensor([0, 64], dtype=torch.int32, device=place)
    first, state = problem.run(backend, tuple(x[:64] for x in problem.rows), cu_seqlens=edges)
    rest, last = problem.run(
        backend,
        tuple(x[64:] for x in problem.rows),
        cu_seqlens=torch.tensor([0, 86], dtype=torch.int32, device=place),
        initial_state=state,
    )
    assert torch.equal(torch.cat([first, rest]), whole)
    assert torch.equal(last, after)


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
def test_a_slot_is_used_again_from_the_start_of_a_sequence(backend, place):
    problem = Problem.draw(Case("two", lengths=(100, 70), has_state=False), torch.float32, place)
    whole, _ = problem.run(backend)
    states = problem.slots(1, KEEPS[backend])
    first = problem.step([(0, 0, 100)], states, [0, 0], backend)
    second = problem.step([(1, 0, 70)], states, [0, 0], backend)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
def test_a_sequence_without_a_slot_is_skipped(backend, place):
    problem = Problem.draw(Case("two", lengths=(10, 12), has_state=False), torch.float32, place)
    whole, _ = problem.run(backend)
    states = problem.slots(1, KEEPS[backend])
    rows = problem.step([(0, 0, 10), (1, 0, 12)], states, [-1, 0], backend)
    assert not rows[:10].any()
    assert torch.equal(rows[10:], whole[10:])


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
def test_dense_rows_are_packed_rows(backend, place):
    problem = Problem.draw(Case("dense", lengths=(70, 70)), torch.float32, place)
    packed, states = problem.run(backend)
    dense = tuple(x.unflatten(0, (2, 70)) for x in problem.rows)
    o, after = problem.run(backend, dense, cu_seqlens=None)
    assert torch.equal(o.flatten(0, 1), packed)
    assert torch.equal(after, states)
    # Heads and rows may be apart from one another.
    wider = [torch.stack([x, x], 2)[:, :, 0] if x.dim() == 3 else x for x in problem.rows[:3]]
    again, _ = problem.run(backend, (*wider, *problem.rows[3:]))
    assert torch.equal(again, packed)


def test_a_sequence_that_is_not_finite_spoils_no_other():
    problem = Problem.draw(Case("two", lengths=(20, 20), has_state=False), torch.float32)
    whole, _ = problem.run("cpu")
    problem.rows[2][25, 1, 3] = torch.nan
    spoiled, _ = problem.run("cpu")
    assert torch.equal(spoiled[:20], whole[:20])
    assert bool(spoiled[25:, 1, 3].isnan().all())


def _loss_of(problem: Problem, rows, state, weights, **options):
    """The public op, or the reference where no backend is named."""
    o, after = problem.run("cpu", rows, initial_state=state, **options)
    return (o * weights[0]).sum() + (after * weights[1]).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_reference(case, dtype):
    problem = Problem.draw(case, dtype)
    weights = [torch.randn_like(x) for x in problem.run("cpu")]

    def grads(of):
        rows = [x.detach().to(of).requires_grad_() for x in problem.rows]
        state = problem.state
        state = None if state is None else state.detach().to(of).requires_grad_()
        copy = dataclasses.replace(problem, rows=tuple(rows), state=state)
        o, after = copy.solve(of)
        loss = (o * weights[0].to(of)).sum() + (after * weights[1].to(of)).sum()
        leaves = [*rows, *([] if state is None else [state])]
        loss = loss + sum(0 * x.sum() for x in leaves)  # there may be no token
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    leaves = [x.clone().requires_grad_() for x in problem.rows]
    state = None if problem.state is None else problem.state.clone().requires_grad_()
    loss = _loss_of(problem, tuple(leaves), state, weights)
    ours = torch.autograd.grad(loss, [*leaves, *([] if state is None else [state])])
    names = ("q", "k", "v", "g", "beta", "state")
    scale = 20 * _scale(problem) ** 2
    for name, got, truth, eager in zip(
        names, ours, grads(torch.float64), grads(torch.float32), strict=False
    ):
        assert got.dtype == dict(zip(names, [*leaves, state], strict=True))[name].dtype
        assert_within_budget(got, truth, eager.to(got.dtype), name=f"d{name}", scale=scale)


def test_gradients_of_rows_that_no_sequence_has_are_zero():
    problem = Problem.draw(Case("some", lengths=(20, 9)), torch.float32)
    leaves = tuple(x.clone().requires_grad_() for x in problem.rows)
    edges = torch.tensor([0, 20], dtype=torch.int32)
    o, _ = problem.run("cpu", leaves, cu_seqlens=edges, initial_state=problem.state[:1])
    assert not o[20:].any()
    for grad in torch.autograd.grad(o.square().sum(), leaves):
        assert not grad[20:].any()
        assert bool(grad.isfinite().all())


def test_only_outputs_that_matter_need_gradients():
    problem = Problem.draw(Case("last", lengths=(70,)), torch.float64)
    v = problem.rows[2].clone().requires_grad_()
    rows = (*problem.rows[:2], v, *problem.rows[3:])
    o, state = problem.run("cpu", rows)
    (one,) = torch.autograd.grad(state.sum(), v, retain_graph=True)
    (other,) = torch.autograd.grad(o.sum(), v, retain_graph=True)
    (both,) = torch.autograd.grad(o.sum() + state.sum(), v)
    torch.testing.assert_close(one + other, both)


def test_derivatives_that_there_are_not_are_refused():
    problem = Problem.draw(Case("short", lengths=(5,)), torch.float64)
    v = problem.rows[2].clone().requires_grad_()
    rows = (*problem.rows[:2], v, *problem.rows[3:])
    o, _ = problem.run("cpu", rows)
    (grad,) = torch.autograd.grad(o.square().sum(), v, create_graph=True)
    with pytest.raises(UnsupportedError, match="recurrence_bwd must be called"):
        grad.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v.detach(), torch.ones_like(v))
        with pytest.raises(UnsupportedError, match="dual numbers"):
            problem.run("cpu", (*problem.rows[:2], dual, *problem.rows[3:]))
    states = problem.slots(1, None)
    o = ops.gated_delta_step(
        *rows, states, slots=torch.zeros(5, dtype=torch.int32) - 1, starts=torch.zeros(5).int()
    )
    with pytest.raises(UnsupportedError, match="recurrence_step must be called"):
        o.sum().backward()


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_is_a_loop(packed):
    problem = Problem.draw(Case("mapped", lengths=(9, 9)), torch.float64)
    rows = problem.rows if packed else tuple(x.unflatten(0, (2, 9)) for x in problem.rows)
    many = [torch.stack([x, 0.5 * x, 0.25 * x]) for x in rows]
    options = {"cu_seqlens": problem.edges if packed else None}

    def one(v, beta):
        return problem.run("cpu", (*rows[:2], v, rows[3], beta), **options)

    for got, want in zip(
        torch.func.vmap(one)(many[2], many[4]),
        zip(*(one(v, beta) for v, beta in zip(many[2], many[4], strict=True)), strict=True),
        strict=True,
    ):
        torch.testing.assert_close(got, torch.stack(want))

    def grad_of(v, beta):
        return torch.func.grad(lambda v: one(v, beta)[0].square().sum())(v)

    got = torch.func.vmap(grad_of)(many[2], many[4])
    want = torch.stack([grad_of(v, beta) for v, beta in zip(many[2], many[4], strict=True)])
    torch.testing.assert_close(got, want)


# What torch 2.14 itself warns of where it checks an op that has a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("packed", [False, True])
def test_the_ops_are_opcheck_clean(packed):
    problem = Problem.draw(Case("checked", lengths=(5, 5)), torch.float64)
    rows = problem.rows if packed else tuple(x.unflatten(0, (2, 5)) for x in problem.rows)
    leaves = [x.clone().requires_grad_() for x in (*rows, problem.state)]
    tail = (problem.edges if packed else None, 0.5, True)
    torch.library.opcheck(torch.ops.tilewise.recurrence.default, (*leaves, *tail, None))
    fixed = [x.detach() for x in leaves]
    grads = (torch.randn_like(fixed[2]), torch.randn_like(fixed[5]))
    torch.library.opcheck(torch.ops.tilewise.recurrence_bwd.default, (*grads, *fixed, *tail, None))
    states = problem.slots(3, None)
    places = (torch.tensor([2, 0]), torch.tensor([0, 0]), problem.edges)
    torch.library.opcheck(
        torch.ops.tilewise.recurrence_step.default,
        (*problem.rows, *states, *places, 0.5, True, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_compiled_model_gives_the_eager_bits_and_gradients():
    problem = Problem.draw(Case("compiled", lengths=(70,)), torch.float32)

    def loss(v):
        return problem.run(None, (*problem.rows[:2], v, *problem.rows[3:]))[0].square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        v = problem.rows[2].clone().requires_grad_()
        value = function(v)
        value.backward()
        results.append((value.detach(), v.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_autocast_computes_in_the_low_precision_dtype():
    problem = Problem.draw(Case("cast", lengths=(9,)), torch.float32)
    v = problem.rows[2].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = problem.run(None, (*problem.rows[:2], v, *problem.rows[3:]))
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    o.sum().backward()
    assert v.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", [{}, {"by_channel": True}, {"is_delta": False}], ids=str)
def test_the_reference_steps_through_states_of_either_kind(kind):
    case = Case("kinds", lengths=(140,), has_state=False, **kind)
    problem = Problem.draw(case, torch.float64)
    whole, _ = problem.solve(torch.float64)
    for keeps in ("updates", "tokens"):
        states = problem.slots(1, keeps)
        rows = [
            problem.step([(0, first, end)], states, [0], "reference")
            for first, end in ((0, 30), (30, 31), (31, 64), (64, 129), (129, 140))
        ]
        torch.testing.assert_close(torch.cat(rows), whole)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("kind", [{}, {"by_channel": True}, {"is_delta": False}], ids=str)
def test_the_reference_goes_on_with_what_a_kernel_leaves_in_a_slot(kind, backend):
    case = Case("kinds", lengths=(140,), has_state=False, heads=(1, 2, 16, 16), **kind)
    problem = Problem.draw(case, torch.float32)
    whole, _ = problem.solve(torch.float32)
    states = problem.slots(1, KEEPS[backend])
    problem.step([(0, 0, 100)], states, [0], backend)
    problem.step([(0, 100, 101)], states, [0], backend)
    rest = problem.step([(0, 101, 140)], states, [0], "reference")
    torch.testing.assert_close(rest, whole[101:], rtol=1e-4, atol=1e-5)


def test_threads_do_not_change_bits():
    problem = Problem.draw(Case("threads", lengths=(130, 70)), torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(problem.run("cpu"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, results[0], strict=True))
