"""Calls over caches that come again: straight to their plans, and to no plan of another call."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tilewise import ops
from tilewise.kernels import early
from tilewise.ops import call, derivatives, dispatch
from tilewise.ops.latent.arguments import LatentSignature
from tilewise.ops.paged.arguments import PagedSignature
from tilewise.testing import make_paged_cache


def make(heads: int = 4, dtype: torch.dtype = torch.float32):
    k_cache, v_cache, table, lengths = make_paged_cache([20, 7], 16, 2, 32, dtype=dtype)
    q = torch.randn(2, heads, 32).to(dtype)
    given = {
        "block_table": table, "seqlens_k": lengths,
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32), "max_seqlen_q": 1,
    }  # fmt: skip
    return (q, k_cache, v_cache), given


def test_a_call_like_one_before_is_not_checked_again():
    tensors, given = make()
    first = ops.paged_attention(*tensors, **given)
    with mock.patch.object(PagedSignature, "bind", side_effect=AssertionError):
        assert torch.equal(ops.paged_attention(*tensors, **given), first)
        others, more = make()
        again = ops.paged_attention(*others, **more)
    call.forget()
    assert torch.equal(again, ops.paged_attention(*others, **more))


@pytest.mark.parametrize(
    "change",
    [
        {"window": 3}, {"softcap": 2.0}, {"softmax_scale": 0.5}, {"max_seqlen_q": 2},
        {"batch_invariant": True}, {"sinks": torch.ones(4)}, {"alibi_slopes": torch.ones(4)},
        {"backend": "reference"}, {"tree_mask": torch.ones(2, 1, dtype=torch.bool)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_differs_has_a_plan_of_its_own(change):
    tensors, given = make()
    ops.paged_attention(*tensors, **given)
    o = ops.paged_attention(*tensors, **given | change)
    call.forget()
    assert torch.equal(o, ops.paged_attention(*tensors, **given | change))


def test_what_is_wrong_is_refused_after_a_right_call_too():
    tensors, given = make()
    ops.paged_attention(*tensors, **given)
    with pytest.raises(ValueError, match="window must be"):
        ops.paged_attention(*tensors, **given, window=0)
    with pytest.raises(TypeError, match="seqlens_k must"):
        ops.paged_attention(*tensors, **given | {"seqlens_k": given["seqlens_k"].float()})
    with pytest.raises((TypeError, RuntimeError)):
        ops.paged_attention(*tensors, **given | {"max_seqlen_q": 1.0})
    with pytest.raises(TypeError, match="plan must be"):
        ops.paged_attention(*tensors, **given, plan=3)


def test_numbers_of_heads_are_widened_each_time():
    tensors, given = make()
    for value in (1.0, -2.0):
        sinks = torch.full((4,), value, dtype=torch.bfloat16)
        o = ops.paged_attention(*tensors, **given, sinks=sinks)
        assert torch.equal(o, ops.paged_attention(*tensors, **given, sinks=sinks.float()))


def test_a_plan_for_another_call_is_refused_where_a_right_one_came_before():
    tensors, given = make()
    right = ops.plan_paged_attention(*tensors, **given)
    wrong = ops.plan_paged_attention(*tensors, **given, window=3)
    for _ in range(2):
        ops.paged_attention(*tensors, **given, plan=right)
        with pytest.raises(ValueError, match="plan must be for window_left -1, got one for 2"):
            ops.paged_attention(*tensors, **given, plan=wrong)


def test_kernels_that_begin_early_have_plans_of_their_own():
    tensors, given = make()
    ops.paged_attention(*tensors, **given)
    before = len(call._memory.calls)
    with early.launching({"attention": early.FIRST}):
        ops.paged_attention(*tensors, **given)
    assert len(call._memory.calls) == before + 2  # by what was given here, and to the backend


def test_few_plans_are_kept(monkeypatch):
    monkeypatch.setattr(call, "_MAX_CALLS", 3)
    tensors, given = make()
    for window in range(1, 9):
        ops.paged_attention(*tensors, **given, window=window)
    assert len(call._memory.calls) <= 3


def test_latent_calls_that_come_again_are_not_checked_again():
    cache, _, table, lengths = make_paged_cache([20, 7], 16, 1, 48)
    q, q_rope = torch.randn(2, 4, 32), torch.randn(2, 4, 16)
    given = {
        "block_table": table, "seqlens_k": lengths,
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32), "max_seqlen_q": 1,
        "softmax_scale": 0.2,
    }  # fmt: skip
    first = ops.mla_decode(q, q_rope, cache.squeeze(2), **given)
    with mock.patch.object(LatentSignature, "bind", side_effect=AssertionError):
        again = ops.mla_decode(q, q_rope, cache.squeeze(2), **given)
    assert torch.equal(first, again)
    wide = ops.mla_decode(q, q_rope, cache.squeeze(2), **given | {"softmax_scale": 0.9})
    assert not torch.equal(first, wide)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("backend", ["cpu"], "backend must be one of .* got \\['cpu'\\]"),
        ("softmax_scale", np.array(0.2), None),
        ("window", [3], r"window must be None or an integer, got \[3\]"),
    ],
)
def test_numbers_that_python_does_not_hash_go_the_usual_way(name, value, message):
    tensors, given = make()
    if message is None:
        wanted = ops.paged_attention(*tensors, **given, **{name: float(value)})
        assert torch.equal(ops.paged_attention(*tensors, **given, **{name: value}), wanted)
        return
    with pytest.raises((TypeError, ValueError), match=message):
        ops.paged_attention(*tensors, **given, **{name: value})


def test_zeros_without_memory_are_read_as_zeros():
    (q, *caches), given = make()
    wanted = ops.paged_attention(torch.zeros_like(q), *caches, **given)
    for _ in range(2):  # planned, then known
        zeros = torch._efficientzerotensor(q.shape)
        assert torch.equal(ops.paged_attention(zeros, *caches, **given), wanted)
    x = torch.randn(1, 8, 2, 32)
    zeros = torch._efficientzerotensor(x.shape)
    assert torch.equal(ops.attention(zeros, x, x), ops.attention(torch.zeros_like(x), x, x))


def entered(function) -> list[str]:
    """Return the functions of the package that a call enters, in order."""
    found, folder = [], str(Path(ops.__file__).parent.parent)

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            found.append(f"{Path(code.co_filename).stem}.{code.co_qualname}")

    gc.disable()  # what a collection ends may enter functions of the package, too
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def attention_of_short_tensors(*, learns: bool = False):
    q, k, v = (torch.randn(1, 16, 4, 64, requires_grad=learns) for _ in range(3))
    return lambda: ops.attention(q, k, v, causal=True)


@pytest.mark.parametrize("learns", [False, True], ids=["alone", "recorded"])
def test_a_call_of_attention_like_the_last_one_enters_few_functions(learns):
    if derivatives.TensorGuards is None:
        pytest.skip("this torch has no guard that finds the last call")
    call_again = attention_of_short_tensors(learns=learns)
    for _ in range(8):
        call_again()
    seen = entered(call_again)
    assert len(seen) <= 4 + learns, seen
    assert not any("are_plain" in name or "places_of" in name for name in seen)


def test_a_call_like_the_last_one_on_hopper_enters_few_functions():
    pytest.importorskip("triton")
    from tests.kernels.gluon.driver import AnyKernel, pretended_gpu
    from tilewise.kernels.host import plan
    from tilewise.kernels.host.descriptors import descriptor
    from tilewise.kernels.host.plan import Maker

    if derivatives.TensorGuards is None:
        pytest.skip("this torch has no guard that finds the last call")
    with pretended_gpu() as driver:
        kernel = AnyKernel(driver)

        def plan_of(op, given, backend):
            maker = Maker(given)
            q, k, v = maker.inputs[:3]
            o, lse = torch.empty_like(q), maker.empty((1, 4, 16), torch.float32)
            tiles = [descriptor(x, 64, 64) for x in (q, k, v, o)]
            maker.launch(kernel, 4, *tiles, lse, 0.5)
            return "gluon", maker.finish((o, lse))

        held: dict[tuple, torch.Tensor] = {}

        def same(*layout):  # at a new address of o a descriptor is encoded, as of a new q
            return held.setdefault(layout, torch.empty_strided(*layout[:2], dtype=layout[2]))

        with (
            mock.patch.object(dispatch, "choose_plan", plan_of),
            mock.patch.object(plan, "_fresh", same),
        ):
            call.forget()
            q, k, v = (torch.randn(1, 16, 4, 64).bfloat16() for _ in range(3))
            for _ in range(8):
                ops.attention(q, k, v, causal=True)
            driver.seen.clear()
            seen = entered(lambda: ops.attention(q, k, v, causal=True))
    assert [launch.values[0][0] for launch in driver.seen] == [q.data_ptr()]
    assert kernel.launches == 1
    assert len(seen) <= 8, seen


@pytest.mark.parametrize("name", ["attention", "paged_attention"])
def test_a_first_call_looks_at_its_arguments_once(name):
    if name == "attention":
        call_it = attention_of_short_tensors()
    else:
        tensors, given = make()
        call_it = lambda: ops.paged_attention(*tensors, **given)  # noqa: E731
    call_it()  # what is imported and read for the first time
    call.forget()
    seen = Counter(entered(call_it))
    for once in ("unwatched", "autocasts", "places_of", "are_plain", "records", "prepare", "bind"):
        times = {full: count for full, count in seen.items() if full.endswith(f".{once}")}
        assert all(count == 1 for count in times.values()), times
    assert seen["call.key_of"] <= 2  # by what was given, and to the backend
    assert any(full.endswith(("prepare", "bind")) for full in seen)
