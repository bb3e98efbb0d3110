"""Derivatives of attention beyond the gradient: against finite differences and the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import masks, ops
from tilewise.errors import UnsupportedError
from tilewise.ops.attention import op as attention_op
from tilewise.ops.attention import parts as attention_parts
from tilewise.reference import standard
from tilewise.reference.dropout import dropout_rate
from tilewise.testing import assert_within_budget, make_qkv

DOUBLE = torch.float64
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True)
class Case:
    """A call small enough for finite differences; lse is in the outputs."""

    name: str
    seqlen_q: int = 3
    seqlen_k: int = 4
    batch: int = 2
    heads: tuple[int, int] = (2, 1)
    options: dict = field(default_factory=dict)
    shapes: dict = field(default_factory=dict)  # of bias, sinks and alibi_slopes
    seqlens_k: tuple[int, ...] | None = None
    visible: float | None = None
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        return self.name


DROPOUT = {"dropout_p": 0.4, "seed": (5, 1)}
CASES = [
    Case("plain"),
    Case("causal_more_queries_than_keys", seqlen_q=5, seqlen_k=3, options={"causal": True}),
    Case("gqa", heads=(4, 2), options={"causal": True}),
    Case("window", seqlen_q=6, seqlen_k=6, options={"window": (2, 1)}),
    Case("softcap", options={"softcap": 1.5}),
    Case("alibi", shapes={"alibi_slopes": (2,)}),
    Case("alibi_per_sequence", shapes={"alibi_slopes": (2, 2)}),
    Case("bias", shapes={"bias": (2, 2, 3, 4)}),
    Case("bias_broadcast", shapes={"bias": (2, 1, 4)}, options={"softcap": 2.0}),
    Case("sinks", shapes={"sinks": (2,)}, options={"causal": True}),
    Case("key_lengths", seqlens_k=(2, 0), options={"causal": True}),
    Case("mask", visible=0.6),
    Case("dropout", options=DROPOUT),
    Case("packed", packed=((2, 0, 3), (3, 2, 1)), heads=(2, 2), options={"causal": True}),
    Case(
        "packed_with_everything",
        packed=((1, 3), (4, 2)),
        shapes={"bias": (2, 1, 3, 4), "sinks": (2,), "alibi_slopes": (2, 2)},
        options=DROPOUT | {"window": (2, 1), "softcap": 2.0},
        visible=0.7,
    ),
    Case(
        "dense_with_everything",
        shapes={"bias": (1, 2, 1, 4), "sinks": (2,), "alibi_slopes": (2,)},
        options=DROPOUT | {"window": (2, 1), "softcap": 2.0},
        visible=0.7,
        seqlens_k=(4, 3),
    ),
]


def _function(case: Case) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """Return the call as a function of its differentiable tensors, and those tensors."""
    generator = torch.Generator().manual_seed(sum(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    (hq, hk), options = case.heads, dict(case.options)
    run: Callable = ops.attention
    rows_q, rows_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    longest = (case.seqlen_q, case.seqlen_k)
    if case.packed is not None:
        run, longest = ops.attention_varlen, tuple(map(max, case.packed))
        rows_q, rows_k = ((sum(lengths),) for lengths in case.packed)
        for name, lengths, most in zip("qk", case.packed, longest, strict=True):
            options[f"cu_seqlens_{name}"] = torch.tensor([0, *lengths]).cumsum(0).int()
            options[f"max_seqlen_{name}"] = most
    tensors = {
        "q": normal(*rows_q, hq, 2),
        "k": normal(*rows_k, hk, 2),
        "v": normal(*rows_k, hk, 3),
    }
    tensors |= {name: normal(*shape) for name, shape in case.shapes.items()}
    if case.seqlens_k is not None:
        options["seqlens_k"] = torch.tensor(case.seqlens_k, dtype=torch.int32)
    if case.visible is not None:
        visible = torch.rand(longest, generator=generator) < case.visible
        options["mask"] = masks.dense(visible, tile=(64, 64))
    if "alibi_slopes" in tensors:
        options["alibi_slopes"] = tensors.pop("alibi_slopes").abs()
    names = [name for name in DIFFERENTIABLE if name in tensors]

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = run(**dict(zip(names, leaves, strict=True)), **options, return_lse=True)
        return o, torch.where(lse.isneginf(), 0.0, lse)

    return function, [tensors[name].requires_grad_() for name in names]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_derivatives_agree_with_differences_backward_and_forward(case):
    function, leaves = _function(case)
    assert gradcheck(
        function,
        leaves,
        fast_mode=True,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives_agree_with_differences_in_both_modes(case):
    function, leaves = _function(case)
    assert gradgradcheck(
        function, leaves, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True
    )


@pytest.mark.parametrize("name", ["packed_with_everything", "dense_with_everything"])
def test_the_oracle_as_a_backend_is_differentiable_twice(name):
    case = next(c for c in CASES if c.name == name)
    function, leaves = _function(replace(case, options={**case.options, "backend": "reference"}))
    assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)


def _forward_then_any(function: Callable, leaves: list[Tensor]) -> Callable:
    """The derivative of `function` along its second half of arguments, by forward mode."""

    def along(*both: Tensor) -> tuple[Tensor, ...]:
        count = len(leaves)
        result: tuple[Tensor, ...] = func.jvp(function, both[:count], both[count:])[1]
        return result

    return along


@pytest.mark.parametrize(
    "name", ["packed_with_everything", "dense_with_everything", "causal_more_queries_than_keys"]
)
def test_forward_mode_is_itself_differentiable_in_both_modes(name):
    function, leaves = _function(next(c for c in CASES if c.name == name))
    along = _forward_then_any(function, leaves)
    directions = [torch.randn_like(leaf).requires_grad_() for leaf in leaves]
    assert gradcheck(along, (*leaves, *directions), fast_mode=True)
    faster = [torch.randn_like(x) for x in (*leaves, *directions)]
    points = [x.detach() for x in (*leaves, *directions)]
    _, twice = func.jvp(along, tuple(points), tuple(faster))
    step = 1e-5
    ahead, behind = (
        along(*(x + sign * step * d for x, d in zip(points, faster, strict=True)))
        for sign in (1, -1)
    )
    for got, high, low in zip(twice, ahead, behind, strict=True):
        torch.testing.assert_close(got, (high - low) / (2 * step), atol=1e-7, rtol=1e-6)


LARGE = {
    "causal_across_tiles": (200, 330, {"causal": True}, ()),
    "everything_across_tiles": (
        330,
        200,
        {"window": (70, 90), "softcap": 3.0, "dropout_p": 0.2, "seed": 3},
        ("bias", "sinks", "alibi_slopes", "mask"),
    ),
    "key_lengths_across_tiles": (140, 270, {"causal": True}, ("sinks", "seqlens_k")),
}


def _double_backward(run: Callable, leaves: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    """First gradients, then the gradients of their product with the directions."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    do, dlse = (g.to(leaves[0].dtype) for g in given[:2])
    directions = [g.to(x.dtype) for g, x in zip(given[2:], leaves, strict=True)]
    do.requires_grad_()
    o, lse = run(*leaves)
    loss = (o * do).sum() + torch.where(lse.isneginf(), 0.0, lse * dlse).sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    return [*grads, *torch.autograd.grad(grads, [do, *leaves], directions)]


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        ("cpu", DOUBLE),
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_double_backward_keeps_the_budget_over_many_tiles(name, place, dtype, monkeypatch):
    monkeypatch.setattr(attention_parts, "TILE", 128)
    monkeypatch.setitem(attention_parts._ELEMENTS, "cpu", 128 * 128 * 2)
    seqlen_q, seqlen_k, options, extras = LARGE[name]
    q, k, v = make_qkv(2, seqlen_q, seqlen_k, 4, 2, 16, dtype=dtype, v_head_dim=8, device=place)
    leaves, names = [q, k, v], ["q", "k", "v"]
    mine, oracle = dict(options), {x: options[x] for x in ("window", "softcap") if x in options}
    oracle["causal"] = options.get("causal", False)
    if "bias" in extras:
        leaves.append(torch.randn(2, 1, seqlen_q, seqlen_k).to(q))
        names.append("bias")
    if "sinks" in extras:
        leaves.append(torch.randn(4).to(place, torch.promote_types(dtype, torch.float32)))
        names.append("sinks")
    if "alibi_slopes" in extras:
        mine["alibi_slopes"] = oracle["alibi_slopes"] = torch.rand(2, 4).to(q)
    if "mask" in extras:
        visible = torch.rand(1, 4, seqlen_q, seqlen_k) < 0.7
        visible[..., :128, 128:] = False
        oracle["mask"] = visible.to(place)
        mine["mask"] = masks.dense(visible, tile=(64, 128)).to(place)
    if "seqlens_k" in extras:
        lengths = torch.tensor([270, 129], dtype=torch.int32, device=place)
        mine["seqlens_k"] = oracle["seqlens_k"] = lengths
    if "dropout_p" in options:
        shape = (2, 4, seqlen_q, seqlen_k)
        oracle["keep_mask"] = ops.dropout_keep_mask(shape, dropout_p=0.2, seed=3, device=place)
        oracle["dropout_p"] = dropout_rate(0.2)

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention(**dict(zip(names, tensors, strict=True)), **mine, return_lse=True)

    def eager(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        both = standard.attention(
            **dict(zip(names, tensors, strict=True)), **oracle, return_lse=True
        )
        return both[0], both[1]

    given = [torch.randn(*q.shape[:3], 8), torch.randn(2, 4, seqlen_q)]
    given += [torch.randn(leaf.shape) for leaf in leaves]
    given = [x.to(q) for x in given]
    doubles = [x.double() for x in leaves]
    truth = _double_backward(eager, doubles, given)
    plain = _double_backward(eager, leaves, given)
    found = _double_backward(ours, leaves, given)
    labels = [*(f"d{x}" for x in names), "second do", *(f"second d{x}" for x in names)]
    for label, got, want, rough in zip(labels, found, truth, plain, strict=True):
        # What adds up to a second derivative is several times larger, and cancels.
        scale = 16 * float(want.detach().abs().max())
        assert_within_budget(got, want, rough, name=label, scale=scale)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor made, by the registered op that made it."""

    kernels: ClassVar = {
        "tilewise::attention_fwd": attention_op._forward,
        "tilewise::attention_bwd": attention_op._backward,
        "tilewise::attention_tangent": attention_op._tangent,
        "tilewise::attention_second": attention_op._second,
        "tilewise::attention_curve": attention_op._curve,
    }

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.inside = "torch"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in self.kernels:
            self.inside = name
            with self:
                result = self.kernels[name](*args)
            self.inside = "torch"
            return result
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.elements[self.inside] = max(self.elements.get(self.inside, 0), x.numel())
        return result


def test_double_backward_of_8192_tokens_makes_no_square_matrix():
    q, k, v = make_qkv(1, 8192, 8192, 1, 1, 16, requires_grad=True)
    with _Largest() as largest:
        o = ops.attention(q, k, v, window=300)
        grads = torch.autograd.grad(o.sum(), (q, k, v), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    most = max(attention_parts.TILE**2, q.numel())
    for name in ("tilewise::attention_tangent", "tilewise::attention_second"):
        assert 0 < largest.elements[name] <= most
    assert max(largest.elements.values()) <= 16 * q.numel()  # the CPU's backward: 16 parts of dq


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "causal": True}], ids=["", "softcap"])
def test_directions_that_are_zero_in_most_inputs_add_up(options):
    """Zero directions take shorter paths; derivatives are linear in them all the same."""
    shapes = ((2, 3, 2, 4), (2, 4, 1, 4), (2, 4, 1, 4), (1, 2, 3, 4), (2,))
    point = tuple(torch.randn(shape, dtype=DOUBLE) for shape in shapes)
    along = tuple(torch.randn(shape, dtype=DOUBLE) for shape in shapes)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention(q, k, v, bias=bias, sinks=sinks, **options, return_lse=True)

    def loss(*x: Tensor) -> Tensor:
        return sum(y.square().sum() for y in call(*x))

    def derive(function: Callable, *numbers: int) -> tuple[Tensor, ...]:
        def of_some(*x: Tensor) -> tuple[Tensor, ...]:
            every = list(point)
            for number, value in zip(numbers, x, strict=True):
                every[number] = value
            result: tuple[Tensor, ...] = function(*every)
            return result

        some = tuple(point[n] for n in numbers), tuple(along[n] for n in numbers)
        tangents: tuple[Tensor, ...] = func.jvp(of_some, *some)[1]
        return tangents

    gradient = func.grad(loss, (0, 1, 2, 3, 4))
    for function in (call, gradient, lambda *x: func.jvp(call, x, along)[1]):
        parts = zip(*(derive(function, n) for n in range(5)), strict=True)
        for together, apart in zip(derive(function, 0, 1, 2, 3, 4), parts, strict=True):
            torch.testing.assert_close(together, sum(apart))


def _three_times(function: Callable[[Tensor], Tensor], q: Tensor) -> None:
    q.requires_grad_()
    (first,) = torch.autograd.grad(function(q).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    torch.autograd.grad(second.sum(), q)


def _forward_three_times(function: Callable[[Tensor], Tensor], q: Tensor) -> None:
    def along(f: Callable) -> Callable:
        return lambda x: func.jvp(f, (x,), (torch.ones_like(x),))[1]

    along(along(along(function)))(q)


def _forward_over_both(function: Callable[[Tensor], Tensor], q: Tensor) -> None:
    func.jacfwd(func.hessian(lambda x: function(x).sum()))(q)


@pytest.mark.parametrize("derive", [_three_times, _forward_three_times, _forward_over_both])
def test_a_third_derivative_is_refused(derive):
    q, k, v = make_qkv(1, 3, 3, 1, 1, 4, dtype=DOUBLE)
    with pytest.raises(UnsupportedError, match="differentiated at most twice, got a third time"):
        derive(lambda x: ops.attention(x, k, v, causal=True), q)


def test_a_tangent_of_the_slopes_is_refused():
    q, k, v = make_qkv(1, 3, 3, 1, 1, 4)
    slopes = torch.ones(1)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="alibi_slopes must not carry"):
        ops.attention(q, k, v, alibi_slopes=forward_ad.make_dual(slopes, slopes))


def _second_order(q: Tensor, k: Tensor, v: Tensor, **options) -> list[Tensor]:
    """The tangent of (o, lse) and a Hessian-vector product, along fixed directions."""

    def loss(*leaves: Tensor) -> Tensor:
        o, lse = ops.attention(*leaves, **options, return_lse=True)
        return (o * o.detach()).sum() + torch.where(lse.isneginf(), 0.0, lse).sum()

    point = (q, k, v)
    along = tuple(torch.full_like(x, 0.5) for x in point)
    tangents = func.jvp(lambda *x: ops.attention(*x, **options, return_lse=True), point, along)[1]
    second = func.jvp(func.grad(loss, (0, 1, 2)), point, along)[1]
    return [*tangents, *second]


def test_rows_that_see_nothing_have_derivatives_of_exactly_zero():
    q, k, v = make_qkv(1, 6, 2, 2, 2, 8)
    o_dot, lse_dot, dq, dk, dv = _second_order(q, k, v, causal=True)
    assert torch.equal(o_dot[:, :4], torch.zeros_like(o_dot[:, :4]))
    assert torch.equal(lse_dot[..., :4], torch.zeros_like(lse_dot[..., :4]))
    assert torch.equal(dq[:, :4], torch.zeros_like(dq[:, :4]))
    assert all(bool(x.isfinite().all()) for x in (o_dot, lse_dot, dq, dk, dv))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_those_that_see_it(bad):
    q, k, v = make_qkv(1, 40, 40, 2, 2, 8)
    lengths = torch.tensor([30], dtype=torch.int32)
    clean = _second_order(q, k, v, seqlens_k=lengths, causal=True)
    k_bad, v_bad, q_bad = k.clone(), v.clone(), q.clone()
    k_bad[:, 30:], v_bad[:, 30:] = bad, bad
    q_bad[:, :10] = bad  # Sq - Sk rows at the top see nothing
    for got, want in zip(
        _second_order(q_bad, k_bad, v_bad, seqlens_k=lengths, causal=True), clean, strict=True
    ):
        assert torch.equal(got, want)
    v_bad = v.clone()
    v_bad[:, 20] = bad  # rows 30 and up see key 20 (the diagonal is shifted by ten), others do not
    o_dot, _, dq, _, _ = _second_order(q, k, v_bad, seqlens_k=lengths, causal=True)
    for got, want in ((o_dot, clean[0]), (dq, clean[2])):
        torch.testing.assert_close(got[:, :30], want[:, :30])
        assert not bool(got[:, 30:].isfinite().any())


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (3, 0)])
def test_no_queries_or_no_keys_at_all(seqlen_q, seqlen_k):
    q, k, v = make_qkv(2, seqlen_q, seqlen_k, 2, 1, 8)
    for result in _second_order(q, k, v):
        assert torch.equal(result, torch.zeros_like(result))
