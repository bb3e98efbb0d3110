"""Plain calls of attention whose checks and backend are remembered: the same results and errors."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tilewise import ops
from tilewise.ops.attention import plain
from tilewise.testing import make_qkv


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(plain, "_remembered", {})


def attend(q, k, v, **options):
    return ops.attention(q, k, v, backend="reference", return_lse=True, **options)


def by_dispatcher(*tensors, **options):
    """Return results of a call that somebody watches."""
    with mock.patch.object(plain, "unwatched", return_value=False):
        return attend(*tensors, **options)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with its heads before its tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_later_call_is_not_checked_again():
    options = {"causal": True, "softcap": 3.0}
    attend(*make_qkv(2, 7, 9, 4, 2, 16), **options)
    tensors = make_qkv(2, 7, 9, 4, 2, 16)
    with mock.patch.object(plain, "prepare_dense", side_effect=AssertionError):
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
        ((q.double(), k.double(), v.double()), {}),
        ((q, k, v), {"causal": True}),
        ((q, k, v), {"window": 3}),
        ((q, k, v), {"window": (3, 0)}),
        ((q, k, v), {"window": (3, None)}),
        ((q, k, v), {"softmax_scale": 0.5}),
        ((q, k, v), {"softcap": 2.0}),
        ((q, k, v), {"deterministic": True}),
    ]
    for _ in range(2):
        for tensors, options in calls:
            found, expected = attend(*tensors, **options), by_dispatcher(*tensors, **options)
            assert all(map(torch.equal, found, expected)), options
    assert len(plain._remembered) == len(calls)
    torch.use_deterministic_algorithms(True)
    try:
        attend(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    ops.attention(q, k, v)  # of another backend
    assert len(plain._remembered) == len(calls) + 2
    assert {call.options.deterministic for call in plain._remembered.values()} == {False, True}


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
    assert len(plain._remembered) == 1


def test_numbers_of_others_are_not_remembered():
    """A tensor as a number is compared by what it holds, and a list has no hash."""
    q, k, v = make_qkv(1, 8, 8, 4, 2, 16)
    for _ in range(2):
        for options in (
            {"window": [3, 0]},
            {"softmax_scale": torch.tensor(0.5)},
            {"softcap": torch.tensor(2.0)},
        ):
            attend(q, k, v, **options)
    assert not plain._remembered


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
        with mock.patch.object(plain._Call, "forward", side_effect=AssertionError):
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
        with mock.patch.object(plain._Call, "forward", side_effect=AssertionError):
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
        weights = torch.randn(3, *o.shape)
        mapped = torch.autograd.grad(o, leaves, weights, is_grads_batched=True, retain_graph=True)
        for index, weight in enumerate(weights):
            one = torch.autograd.grad(o, leaves, weight, retain_graph=True)
            for ours, theirs in zip(mapped, one, strict=True):
                torch.testing.assert_close(ours[index], theirs)

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


def test_no_tensor_is_kept_alive():
    leaves = make_qkv(1, 5, 6, 2, 2, 8, requires_grad=True)
    o, lse = attend(*leaves)
    o.sum().backward()
    watched = [weakref.ref(x) for x in (*leaves, o, lse)]
    del leaves, o, lse
    gc.collect()
    assert [each() for each in watched] == [None] * 5
