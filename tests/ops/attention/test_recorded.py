"""Calls of attention that go straight to their plans, and their gradients: the same results."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tilewise import ops
from tilewise.kernels.cpu.attention import plan as cpu
from tilewise.masks import causal as causal_mask
from tilewise.ops import call as memory
from tilewise.ops import derivatives
from tilewise.ops.attention import op, recorded
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.derivatives import never
from tilewise.testing import make_qkv


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(memory, "_memory", memory._Memory())


original_bind = AttentionSignature.bind


def counted_checks():
    """A context that counts the calls whose arguments are checked."""
    return mock.patch.object(AttentionSignature, "bind", autospec=True, side_effect=original_bind)


def attend(q, k, v, **options):
    return ops.attention(q, k, v, backend="reference", return_lse=True, **options)


def by_dispatcher(*tensors, **options):
    """Return results of a call that somebody watches."""
    with mock.patch.object(memory, "unwatched", return_value=False):
        return attend(*tensors, **options)


def check_mapped_over(o, leaves):
    """Compare the gradients of three weights at once with those of each."""
    weights = torch.randn(3, *o.shape)
    mapped = torch.autograd.grad(o, leaves, weights, is_grads_batched=True, retain_graph=True)
    for index, weight in enumerate(weights):
        one = torch.autograd.grad(o, leaves, weight, retain_graph=True)
        for ours, theirs in zip(mapped, one, strict=True):
            torch.testing.assert_close(ours[index], theirs)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with its heads before its tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_later_call_is_not_checked_again():
    options = {"causal": True, "softcap": 3.0}
    attend(*make_qkv(2, 7, 9, 4, 2, 16), **options)
    tensors = make_qkv(2, 7, 9, 4, 2, 16)
    with mock.patch.object(AttentionSignature, "bind", side_effect=AssertionError):
        found = attend(*tensors, **options)
    for result, expected in zip(found, by_dispatcher(*tensors, **options), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("wrong", range(3))
def test_a_remembered_call_hides_no_wrong_dtype(wrong):
    tensors = list(make_qkv(2, 8, 8, 4, 2, 16))
    attend(*tensors)
    tensors[wrong] = tensors[wrong].double()
    with pytest.raises(TypeError, match="must have dtype"):
        attend(*tensors)


def test_what_differs_is_checked_again():
    q, k, v = make_qkv(2, 8, 8, 4, 2, 16)
    calls = [
        ((q, k, v), {}),
        ((q[:1], k[:1], v[:1]), {}),
        ((q[:, :7], k, v), {}),
        ((q, k[:, :7], v[:, :7]), {}),
        ((q, k, v[..., :8]), {}),
        ((q, k, v[..., :8].contiguous()), {}),
        ((heads_first(q), k, v), {}),
        ((q, heads_first(k), v), {}),
        ((q, k, heads_first(v)), {}),
        # The strides of one alone differ from those above, and none of the calls is contiguous.
        ((heads_first(q), heads_first(k), v), {}),
        ((heads_first(q), k, heads_first(v)), {}),
        ((q.double(), k.double(), v.double()), {}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"window": 3}),
        ((q, k, v), {"window": (3, 0)}),
        ((q, k, v), {"window": (3, None)}),
        ((q, k, v), {"softmax_scale": 0.5}),
        ((q, k, v), {"softcap": 2.0}),
        ((q, k, v), {"deterministic": True}),
    ]
    for number in (len(calls), 0):
        with counted_checks() as checks:
            found = [attend(*tensors, **options) for tensors, options in calls]
        assert checks.call_count == number
        for (tensors, options), results in zip(calls, found, strict=True):
            assert all(map(torch.equal, results, by_dispatcher(*tensors, **options))), options
    before = len(memory._memory.calls)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    ops.attention(q, k, v)  # of another backend
    assert len(memory._memory.calls) == before + 2
    assert {call.spec.deterministic for call in memory._memory.calls.values()} == {False, True}


def extras(name: str) -> dict[str, object]:
    """Arguments of calls with 2 sequences of 7 queries and 9 keys and 4 heads."""
    return {
        "sinks": {"sinks": torch.randn(4, requires_grad=True)},
        "slopes": {"alibi_slopes": torch.rand(4)},
        "slopes_of_sequences": {"alibi_slopes": torch.rand(2, 4)},
        "lengths": {"seqlens_k": torch.tensor([3, 9], dtype=torch.int32)},
        "bias": {"bias": torch.randn(2, 4, 7, 9, requires_grad=True)},
        "shared_bias": {"bias": torch.randn(7, 9, requires_grad=True)},
        "dropout": {"dropout_p": 0.5, "seed": 3},
        "mask": {"mask": causal_mask(7, 9)},
    }[name]


EXTRAS = ("sinks", "slopes", "slopes_of_sequences", "lengths", "bias", "shared_bias", "dropout",
          "mask")  # fmt: skip


@pytest.mark.parametrize("name", EXTRAS)
def test_calls_with_more_tensors_are_planned_once_too(name):
    leaves = make_qkv(2, 7, 9, 4, 2, 16, requires_grad=True)
    for again in (False, True):
        given = extras(name)  # other values
        wanted = [*leaves, *(x for x in given.values() if getattr(x, "requires_grad", False))]
        with counted_checks() as checks:
            found = attend(*leaves, **given)
        assert checks.call_count == (0 if again else 1)
        expected = by_dispatcher(*leaves, **given)
        assert all(map(torch.equal, found, expected))
        weights = [torch.randn_like(x) for x in found]
        with mock.patch.object(op.BoundAttention, "backward", autospec=True) as planned:
            planned.side_effect = original_backward
            ours = torch.autograd.grad(found, wanted, weights)
        assert planned.called
        for mine, theirs in zip(ours, torch.autograd.grad(expected, wanted, weights), strict=True):
            assert torch.equal(mine, theirs)


original_backward = op.BoundAttention.backward


@pytest.mark.parametrize("name", EXTRAS)
def test_a_tensor_more_is_another_call(name):
    q, k, v = make_qkv(2, 7, 9, 4, 2, 16)
    plain = attend(q, k, v)
    given = extras(name)
    assert not torch.equal(attend(q, k, v, **given)[0], plain[0])
    assert all(map(torch.equal, attend(q, k, v), plain))


def test_wrong_tensors_beside_are_refused_every_time():
    q, k, v = make_qkv(2, 7, 9, 4, 2, 16)
    wrong = {
        "sinks must have shape": {"sinks": torch.randn(3)},
        "sinks must be one of": {"sinks": torch.ones(4, dtype=torch.int64)},
        "alibi_slopes must have shape": {"alibi_slopes": torch.rand(4, 2)},
        "bias must broadcast": {"bias": torch.randn(2, 4, 7, 8)},
        "seqlens_k must have dtype": {"seqlens_k": torch.tensor([3.0, 9.0])},
        "mask must cover": {"mask": causal_mask(7, 8)},
        "dropout_p must lie": {"dropout_p": 1.5, "seed": 1},
    }
    for name in EXTRAS:
        attend(q, k, v, **extras(name))
    for _ in range(2):
        for message, options in wrong.items():
            with pytest.raises((ValueError, TypeError), match=message):
                attend(q, k, v, **options)
    with pytest.raises(ValueError, match="must not require a gradient"):
        attend(q, k, v, alibi_slopes=torch.rand(4, requires_grad=True))


def test_a_mask_of_as_many_tiles_may_cover_another_length():
    q, k, v = make_qkv(1, 7, 9, 4, 2, 16)
    attend(q, k, v, mask=causal_mask(7, 9))
    for _ in range(2):
        with pytest.raises(ValueError, match="mask must cover"):
            attend(q, k, v, mask=causal_mask(7, 10))


def test_packed_calls_are_planned_once():
    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": 5, "max_seqlen_k": 5}
    results = []
    for number in (1, 0):
        q, k, v = (torch.ones(8, 2, 16) for _ in range(3))
        with counted_checks() as checks:
            results.append(ops.attention_varlen(q, k, v, backend="reference", **lengths))
        assert checks.call_count == number
    assert torch.equal(*results)
    for _ in range(2):
        with pytest.raises(ValueError, match="max_seqlen_q must be at least 0"):
            ops.attention_varlen(q, k, v, **lengths | {"max_seqlen_q": -1})


def test_errors_are_raised_every_time():
    q, k, v = make_qkv(1, 8, 8, 4, 2, 16)
    attend(q, k, v)
    for _ in range(2):
        with pytest.raises(ValueError, match="k must have the head dim of q"):
            attend(q, k[..., :8], v)
        with pytest.raises(TypeError, match="v must have dtype"):
            attend(q, k, v.double())
        with pytest.raises(ValueError, match="softcap must be at least 0"):
            attend(q, k, v, softcap=-1.0)
        with pytest.raises(ValueError, match="window must be at least 1"):
            attend(q, k, v, window=0)
    assert len(memory._memory.calls) == 1


def test_numbers_of_others_are_not_remembered():
    """A tensor as a number is compared by what it holds, and a list has no hash."""
    q, k, v = make_qkv(1, 8, 8, 4, 2, 16)
    for _ in range(2):
        for options in (
            {"window": [3, 0]},
            {"softmax_scale": torch.tensor(0.5)},
            {"softcap": torch.tensor(2.0)},
        ):
            with mock.patch.object(memory, "remember", side_effect=AssertionError):
                attend(q, k, v, **options)


def seen_by(call) -> list[str]:
    """Return the ops that the dispatcher shows while `call` runs."""

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Watch():
        call()
    return seen


class TestWatched:
    """Who watches ops sees that of the call, which is then not remembered."""

    def test_by_a_mode(self):
        tensors = make_qkv(1, 8, 8, 4, 2, 16)
        attend(*tensors)
        assert "tilewise.attention_fwd.default" in seen_by(lambda: attend(*tensors))
        with FlopCounterMode(display=False):
            attend(*tensors)

    def test_by_a_mode_in_the_backward_pass(self):
        q, k, v = make_qkv(1, 8, 8, 4, 2, 16, requires_grad=True)
        o, _ = attend(q, k, v)
        assert "tilewise.attention_bwd.default" in seen_by(o.sum().backward)

    def test_by_a_transform(self):
        q, k, v = make_qkv(3, 8, 8, 4, 2, 16)
        attend(q, k, v)
        with mock.patch.object(memory, "key_of", side_effect=AssertionError):
            o = torch.vmap(lambda q, k, v: ops.attention(q[None], k[None], v[None])[0])(q, k, v)
        torch.testing.assert_close(o, ops.attention(q, k, v))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
    def test_by_a_tangent(self):
        q, k, v = make_qkv(1, 8, 8, 4, 2, 16)
        attend(q, k, v)
        with forward_ad.dual_level():
            o, _ = attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
            assert forward_ad.unpack_dual(o).tangent is not None

    def test_by_autocast(self):
        tensors = make_qkv(1, 8, 8, 4, 2, 16)
        attend(*tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(*tensors)[0].dtype == torch.bfloat16

    def test_by_a_subclass(self):
        class Mine(torch.Tensor):
            pass

        q, k, v = make_qkv(1, 8, 8, 4, 2, 16)
        attend(q, k, v)
        with mock.patch.object(memory, "key_of", side_effect=AssertionError):
            for tensors in ((q.as_subclass(Mine), k, v), (q, k, v.as_subclass(Mine))):
                attend(*tensors)


class TestGradient:
    @pytest.mark.parametrize("wanted", ["o", "lse", "both"])
    def test_is_that_of_the_op(self, wanted):
        leaves = make_qkv(2, 7, 9, 4, 2, 16, requires_grad=True)
        pick = {"o": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[wanted]
        found, expected = attend(*leaves)[pick], by_dispatcher(*leaves)[pick]
        weights = [torch.randn_like(x) for x in found]
        for ours, theirs in zip(
            torch.autograd.grad(found, leaves, weights),
            torch.autograd.grad(expected, leaves, weights),
            strict=True,
        ):
            assert torch.equal(ours, theirs)

    def test_may_be_differentiated(self):
        leaves = make_qkv(1, 5, 6, 2, 2, 8, requires_grad=True)
        second = []
        for run in (attend, by_dispatcher):
            o, lse = run(*leaves)
            grads = torch.autograd.grad(o.sin().sum() + lse.sum(), leaves, create_graph=True)
            second.append(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))
        for ours, theirs in zip(*second, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_of_some_inputs_only(self):
        q, k, v = make_qkv(1, 5, 6, 2, 2, 8)
        k.requires_grad_()
        attend(q, k, v)[0].sum().backward()
        assert k.grad is not None
        assert q.grad is None

    def test_may_be_mapped_over(self):
        leaves = make_qkv(1, 5, 6, 2, 2, 8, requires_grad=True)
        o, _ = attend(*leaves)
        check_mapped_over(o, leaves)

    def test_reads_what_hooks_give_back(self):
        leaves = make_qkv(1, 5, 6, 2, 2, 8, requires_grad=True)
        expected = torch.autograd.grad(attend(*leaves)[0].sum(), leaves)
        packed = []

        def pack(x):
            packed.append(x.detach().clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            o, _ = attend(*leaves)
        assert len(packed) == 5
        for ours, theirs in zip(torch.autograd.grad(o.sum(), leaves), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_gradients_that_lie_otherwise_are_planned_anew():
    leaves = make_qkv(2, 7, 9, 4, 2, 16, requires_grad=True)
    o = ops.attention(*leaves, backend="cpu")
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for other in (heads_first(do), do.flatten()[:, None].repeat(1, 2)[:, 0].view(do.shape)):
        grads = torch.autograd.grad(o, leaves, other, retain_graph=True)
        assert all(map(torch.equal, grads, expected))


def test_no_tensor_is_kept_alive():
    leaves = make_qkv(1, 5, 6, 2, 2, 8, requires_grad=True)
    o, lse = attend(*leaves)
    o.sum().backward()
    watched = [weakref.ref(x) for x in (*leaves, o, lse)]
    del leaves, o, lse
    gc.collect()
    assert [each() for each in watched] == [None] * 5


def test_what_is_only_marked_as_negated_is_negated() -> None:
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    for place in range(3):
        given, plain = [q, k, v], [q, k, v]
        given[place], plain[place] = torch._neg_view(given[place]), -plain[place]
        assert torch.equal(ops.attention(*given), ops.attention(*plain))


def test_zeros_without_memory_are_zeros() -> None:
    q, k = (torch.randn(1, 5, 2, 16) for _ in range(2))
    zeros = torch._efficientzerotensor(q.shape)
    assert (ops.attention(q, k, zeros) == 0).all()
    assert torch.equal(ops.attention(zeros, k, k), ops.attention(torch.zeros_like(q), k, k))


SHORT = ((1, 1, 16, 4, 4, 64), (2, 16, 16, 4, 2, 64), (1, 5, 6, 2, 2, 16))


def watched(*tensors, **options):
    """Return o of a call that somebody watches, without more than `options`."""
    with (
        mock.patch.object(memory, "unwatched", return_value=False),
        mock.patch.object(memory._memory, "latest", memory._NO_CALL),
    ):
        return ops.attention(*tensors, **options)


class TestShort:
    """Calls without more than q, k and v, whose plans have all at hand."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sizes", SHORT)
    def test_gives_the_bits_of_any_call(self, sizes, dtype):
        for again in (False, True):
            leaves = [x.to(dtype).requires_grad_() for x in make_qkv(*sizes)]
            with counted_checks() as checks:
                o = ops.attention(*leaves, causal=True)
            assert checks.call_count == (0 if again else 1)
            expected = watched(*leaves, causal=True)
            with torch.no_grad():
                assert torch.equal(ops.attention(*leaves, causal=True), expected)
            assert torch.equal(o, expected)
            do = torch.randn_like(o)
            for given in (do, heads_first(do)):
                grads = torch.autograd.grad(o, leaves, given, retain_graph=True)
                others = torch.autograd.grad(expected, leaves, given, retain_graph=True)
                assert all(map(torch.equal, grads, others))
        with mock.patch.object(cpu, "plan_bwd", side_effect=AssertionError):  # known by now
            torch.autograd.grad(o, leaves, do)

    @pytest.mark.parametrize(
        "options", [{"causal": True}, {"deterministic": True}, {"window": 2}, {"softcap": 0.5},
                    {"softmax_scale": 0.3}, {"softcap": 0}], ids=str,
    )  # fmt: skip
    def test_is_not_taken_for_a_call_of_other_numbers(self, options):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        plain = ops.attention(*tensors)
        expected = watched(*tensors, **options)
        for _ in range(2):
            assert torch.equal(ops.attention(*tensors, **options), expected)
            assert torch.equal(ops.attention(*tensors), plain)
        torch.use_deterministic_algorithms(True)
        try:
            ops.attention(*tensors)
        finally:
            torch.use_deterministic_algorithms(False)
        number = 2 + (options != {"softcap": 0})
        assert len({id(call) for call in memory._memory.calls.values()}) >= number

    def test_may_be_differentiated_again(self):
        leaves = make_qkv(*SHORT[2], requires_grad=True)
        second = []
        for run in (ops.attention, ops.attention, watched):
            grads = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
            second.append(torch.autograd.grad(sum(x.square().sum() for x in grads), leaves))
        for found in second[:2]:
            for ours, theirs in zip(found, second[2], strict=True):
                torch.testing.assert_close(ours, theirs)

    def test_reads_what_hooks_give_back(self):
        """Whatever lies otherwise, or is another number."""
        leaves = make_qkv(*SHORT[1], requires_grad=True)
        ops.attention(*leaves)

        def wide(x):
            return x.detach().repeat(1, 1, 1, 2)[..., : x.shape[-1]]

        expected = torch.autograd.grad(watched(*leaves).sum(), leaves)
        for unpack in (lambda x: x, wide, heads_first, lambda x: x.clone().requires_grad_()):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
                o = ops.attention(*leaves)
                grads = torch.autograd.grad(o.sum(), leaves)
            assert all(map(torch.equal, grads, expected))

    def test_is_seen_by_who_watches_its_gradient(self):
        leaves = make_qkv(*SHORT[2], requires_grad=True)
        ops.attention(*leaves)
        o = ops.attention(*leaves)
        assert "tilewise.attention_bwd.default" in seen_by(o.sum().backward)

    def test_may_be_mapped_over(self):
        leaves = make_qkv(*SHORT[2], requires_grad=True)
        ops.attention(*leaves)
        o = ops.attention(*leaves)
        check_mapped_over(o, leaves)

    def test_refuses_a_gradient_of_what_was_let_go_of_or_changed(self):
        leaves = make_qkv(*SHORT[0], requires_grad=True)
        ops.attention(*leaves)
        o = ops.attention(*leaves)
        o.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            o.sum().backward()
        o = ops.attention(*leaves)
        with torch.no_grad():
            leaves[1].mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            o.sum().backward()

    def test_keeps_no_tensor_alive(self):
        leaves = make_qkv(*SHORT[0], requires_grad=True)
        for _ in range(5):  # until the call and its gradient are found by a check of tensors
            o = ops.attention(*leaves)
            grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert memory._memory.latest.bound.last_gradient[0] is not never
        seen = [weakref.ref(x) for x in (*leaves, o, *grads)]
        del leaves, o, grads
        gc.collect()
        assert [each() for each in seen] == [None] * 7

    def test_leaves_undefined_gradients_undefined(self):
        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return None

        leaves = make_qkv(*SHORT[0], requires_grad=True)
        ops.attention(*leaves)
        Nothing.apply(ops.attention(*leaves)).sum().backward()
        assert all(x.grad is None for x in leaves)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("sizes", [SHORT[0], (2, 70, 80, 4, 2, 16)], ids=str)
def test_hooks_that_give_back_other_shapes_are_refused(sizes, place):
    """A plan would read what lies behind a tensor that became shorter."""
    leaves = make_qkv(*sizes, requires_grad=True)
    for _ in range(3):  # until the gradient is known
        o = ops.attention(*leaves)
        do = torch.randn_like(o)
        torch.autograd.grad(o, leaves, do)
    count = iter(range(10))

    def unpack(x):
        return x[..., :8].contiguous() if next(count) == place else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        o = ops.attention(*leaves)
    with pytest.raises(ValueError, match="must give back q, k, v and o of shapes"):
        torch.autograd.grad(o, leaves, do)


class Slow(Exception):
    """A call, or its gradient, was not found by the check of its tensors alone."""


def at_once():
    """A context in which only that check finds a call or a gradient."""
    slow = mock.Mock(side_effect=Slow)
    context = ExitStack()
    for module, name in ((memory, "unwatched"), (recorded, "unwatched"), (recorded, "places_of")):
        context.enter_context(mock.patch.object(module, name, slow))
    return context


class SeeOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A class of its own."""


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TestAgain:
    """A plain call like the last one is found by one check of its tensors."""

    @pytest.fixture(params=[SHORT[0], SHORT[2], (2, 70, 80, 4, 2, 16)], ids=str)
    def sizes(self, request):
        return request.param

    @pytest.mark.parametrize("wants_gradient", [False, True])
    @pytest.mark.parametrize("causal", [False, True])
    def test_is_found_and_the_same(self, sizes, causal, wants_gradient):
        for _ in range(3):
            ops.attention(*make_qkv(*sizes, requires_grad=wants_gradient), causal=causal)
        tensors = make_qkv(*sizes, requires_grad=wants_gradient)
        with at_once():
            o = ops.attention(*tensors, causal=causal)
            with torch.no_grad():
                unrecorded = ops.attention(*tensors, causal=causal)
        assert torch.equal(o, watched(*tensors, causal=causal))
        assert torch.equal(o, unrecorded)
        assert (o.requires_grad, unrecorded.requires_grad) == (wants_gradient, False)

    @pytest.mark.parametrize(
        "change",
        {
            "shorter": lambda q, k, v: (q[:, :-1].contiguous(), k, v),
            "fewer keys": lambda q, k, v: (q, k[:, :-1].contiguous(), v[:, :-1].contiguous()),
            "narrower values": lambda q, k, v: (q, k, v[..., :8].contiguous()),
            "a part": lambda q, k, v: (q, k, v.repeat(1, 1, 1, 2)[..., : v.shape[-1]]),
            "heads first": lambda q, k, v: (q, heads_first(k), v),
            "dtype": lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
            "gradient": lambda q, k, v: (q, k, v.requires_grad_()),
            "negated": lambda q, k, v: (torch._neg_view(q), k, v),
            "zeros": lambda q, k, v: (q, torch._efficientzerotensor(k.shape), v),
            "class": lambda q, k, v: (q.as_subclass(Named), k, v),
            "twice": lambda q, k, v: (q, k, k),
        }.values(),
    )  # fmt: skip
    def test_what_differs_is_not_taken_for_it(self, change):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        for _ in range(3):
            ops.attention(*tensors)
        changed = change(*tensors)
        with at_once(), pytest.raises(Slow):
            ops.attention(*changed)
        assert torch.equal(ops.attention(*changed), watched(*changed))

    @pytest.mark.parametrize("options", [{"causal": True}, {"deterministic": True}, {"causal": 0}])
    def test_nor_are_other_numbers(self, options):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        for _ in range(3):
            ops.attention(*tensors)
        with at_once(), pytest.raises(Slow):
            ops.attention(*tensors, **options)

    @pytest.mark.parametrize(
        "context",
        [
            SeeOps, FunctionMode, deterministic, torch.inference_mode, forward_ad.dual_level,
            lambda: torch.autocast("cpu"), torch.autograd.profiler.profile,
        ],
    )  # fmt: skip
    def test_nor_is_a_call_that_somebody_watches(self, context):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        for _ in range(3):
            ops.attention(*tensors)
        with context(), at_once(), pytest.raises(Slow):
            ops.attention(*tensors)

    def test_nor_is_one_under_a_transform(self):
        q, k, v = make_qkv(2, 5, 6, 4, 2, 16)
        for _ in range(3):
            ops.attention(q, k, v)
        for transform in (torch.func.grad, torch.func.vmap):
            with at_once(), pytest.raises(Slow):
                transform(lambda x: ops.attention(x, k, v).sum())(q)
            with at_once(), pytest.raises(Slow):  # of tensors that it does not wrap
                transform(lambda x: x.sum() + ops.attention(q, k, v).sum())(q)

    def test_a_check_of_torch_that_takes_something_else_is_none(self):
        leaves = make_qkv(*SHORT[1], requires_grad=True)
        expected = torch.autograd.grad(watched(*leaves).sum(), leaves)
        with mock.patch.object(derivatives, "TensorGuards", side_effect=TypeError) as asked:
            for _ in range(4):
                grads = torch.autograd.grad(ops.attention(*leaves).sum(), leaves)
                assert all(map(torch.equal, grads, expected))
        assert asked.called

    def test_calls_that_take_turns_make_few_checks(self):
        first, second = make_qkv(2, 5, 6, 4, 2, 16), make_qkv(2, 7, 6, 4, 2, 16)
        for number in (1, 2, 5):
            with (
                mock.patch.object(memory, "check_of", side_effect=derivatives.check_of) as made,
                mock.patch.dict(memory._memory.calls, clear=True),
            ):
                for _ in range(100):
                    for tensors in (first, second):
                        for _ in range(number):
                            ops.attention(*tensors)
            assert made.call_count <= 200 * number // memory._MAX_MISSES + 2 * memory._MAX_MISSES

    def test_a_call_whose_gradient_is_wanted_now_and_then_makes_few_checks(self):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        wanting = [x.clone().requires_grad_() for x in tensors]
        with mock.patch.object(memory, "check_of", side_effect=derivatives.check_of) as made:
            for _ in range(100):
                ops.attention(*tensors)
                ops.attention(*wanting)
        assert made.call_count <= 200 // memory._MAX_MISSES + 8

    def test_calls_that_come_many_times_are_found_however_often_others_came(self):
        first, second = make_qkv(2, 5, 6, 4, 2, 16), make_qkv(2, 7, 6, 4, 2, 16)
        for _ in range(20):
            for tensors in (first, second):
                for _ in range(memory._MAX_MISSES + 2):
                    ops.attention(*tensors)
                with at_once():
                    ops.attention(*tensors)

    def test_calls_of_a_growing_length_make_none(self):
        with mock.patch.object(memory, "check_of", side_effect=AssertionError):
            for count in range(5, 20):
                ops.attention(*make_qkv(2, 1, count, 4, 2, 16))

    def test_a_gradient_is_found_and_the_same(self):
        leaves = make_qkv(*SHORT[1], requires_grad=True)
        o = ops.attention(*leaves, causal=True)
        do = torch.randn_like(o)
        for _ in range(3):
            torch.autograd.grad(o, leaves, do, retain_graph=True)
        others = make_qkv(*SHORT[1], requires_grad=True)
        o, expected = ops.attention(*others, causal=True), watched(*others, causal=True)
        with at_once():
            grads = torch.autograd.grad(o, others, do, retain_graph=True)
        assert all(map(torch.equal, grads, torch.autograd.grad(expected, others, do)))

    @pytest.mark.parametrize(
        ("weight", "options", "context"),
        [
            (lambda o: torch.ones(()).expand(o.shape), {}, nullcontext),
            (torch.randn_like, {"create_graph": True}, nullcontext),
            (torch.randn_like, {}, SeeOps),
        ],
    )
    def test_but_no_other_gradient_is(self, weight, options, context):
        leaves = make_qkv(*SHORT[1], requires_grad=True)
        o = ops.attention(*leaves)
        do = torch.randn_like(o)
        for _ in range(3):
            torch.autograd.grad(o, leaves, do, retain_graph=True)
        with context(), at_once(), pytest.raises(Slow):
            torch.autograd.grad(o, leaves, weight(o), retain_graph=True, **options)

    def test_addresses_that_a_gpu_needs_are_looked_at(self):
        tensors = make_qkv(2, 5, 6, 4, 2, 16)
        for _ in range(3):
            ops.attention(*tensors)
        q, k, v = tensors
        odd = torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k)
        expected = ops.attention(q, k, v)
        with (
            mock.patch.object(memory._memory, "latest", memory._memory.latest._replace(odd=15)),
            at_once(),
        ):
            assert torch.equal(ops.attention(q, k, v), expected)
            with pytest.raises(Slow):
                ops.attention(q, odd, v)

    @pytest.mark.gpu
    def test_on_a_gpu_it_is_found_and_right_where_it_lies_well(self):
        def draw(offset=0):
            numbers = torch.randn(3, 2 * 70 * 2 * 64 + offset, device="cuda").half()
            return [x[offset:].view(2, 70, 2, 64) for x in numbers]

        def check(o, q, k, v):
            heads = (x.transpose(1, 2).double() for x in (q, k, v))
            right = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            torch.testing.assert_close(o.double(), right.transpose(1, 2), rtol=0, atol=4e-3)

        for _ in range(3):
            tensors = draw()
            check(ops.attention(*tensors, causal=True), *tensors)
        tensors, odd = draw(), draw(4)
        assert odd[0].data_ptr() % 16 == 8
        with at_once():
            o = ops.attention(*tensors, causal=True)
            with pytest.raises(Slow):
                ops.attention(*odd, causal=True)
        check(o, *tensors)
        check(ops.attention(*odd, causal=True), *odd)


# What a later torch may lack: names that are private to it.
LATER_TORCH = """
import os
import torch
import torch._C._dynamo.guards as guards

child = os.fork()  # it lacks the names of calls, its parent those of derivatives
if child == 0:
    del guards.TensorGuards, guards._empty_strided_cpu
else:
    del torch._C._autograd._profiler_enabled

from tilewise import ops
from tilewise.ops import derivatives

assert derivatives.FORWARD_MODE == (child == 0)

for sizes in ((1, 1, 16, 64), (1, 16, 16, 64)):
    batch, rows, keys, dim = sizes
    q, k, v = (torch.randn(batch, n, 4, dim, requires_grad=True) for n in (rows, keys, keys))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    wanted = (right, *torch.autograd.grad(right.sum(), (q, k, v)))
    for _ in range(4):
        o = ops.attention(q, k, v)
        for ours, theirs in zip((o, *torch.autograd.grad(o.sum(), (q, k, v))), wanted):
            torch.testing.assert_close(ours, theirs)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_calls_are_right_without_names_that_are_private_to_torch():
    done = subprocess.run([sys.executable, "-c", LATER_TORCH], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
