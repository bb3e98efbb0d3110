"""Layers that repeat the call of the first start what they would by calls of their own."""

from __future__ import annotations

import copy
import ctypes
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tests.kernels.gluon.driver import AnyKernel, pretended_gpu
from tests.kernels.gluon.test_plan import named
from tilewise import ops
from tilewise.engine.captured.prompt_steps import _Attention, _Pieces
from tilewise.kernels import device, early
from tilewise.kernels.host import plan as host
from tilewise.kernels.host import requests
from tilewise.kernels.triton.paged import decode, plan, rows, rows_merge
from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext, StepPlans
from tilewise.ops import call, dispatch
from tilewise.ops.call import Last
from tilewise.ops.paged.arguments import PagedSignature
from tilewise.ops.paged.plan import PagedPlan

HEADS, KV_HEADS, WIDTH, BLOCK, BRAIN = 8, 4, 64, 16, torch.bfloat16
RUNS, LENGTHS = (1, 1, 90, 300), (50, 700, 90, 400)


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A GPU that is pretended, whose portable kernels take calls on a CPU."""
    monkeypatch.setattr(device, "sm_count_of", lambda _: 132)
    monkeypatch.setattr(device, "interpreting", lambda: True)
    monkeypatch.setitem(dispatch._AUTOMATIC, "cpu", ("triton",))
    monkeypatch.setattr(ops, "settle", lambda _: None)
    with pretended_gpu() as it, torch.inference_mode():
        for module in (decode, plan, rows, rows_merge):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, AnyKernel(it))
        yield it


def context(**options) -> AttentionContext:
    width = -(-max(LENGTHS) // BLOCK)
    return AttentionContext(
        torch.tensor([0, *RUNS]).cumsum(0).int(), max(RUNS), torch.tensor(LENGTHS).int(),
        torch.arange(len(RUNS) * width, dtype=torch.int32).view(-1, width),
        torch.zeros(sum(RUNS), dtype=torch.int64), plans=StepPlans(), **options,
    )  # fmt: skip


def again(ctx: AttentionContext) -> AttentionContext:
    """Return the same step with plans of its own."""
    return replace(ctx, plans=StepPlans())


def plans_of(ctx: AttentionContext) -> list[PagedPlan]:
    assert ctx.plans is not None
    return list(ctx.plans._plans.values())


class Layer:
    """A layer with its cache, queries and the place of its outputs."""

    def __init__(self, *, scales=None, sinks=None, dtype=BRAIN, odd=None, wide=0, **options):
        self.module = Attention(32, HEADS, KV_HEADS, WIDTH, **options)
        self.module.sinks = sinks
        blocks = len(RUNS) * -(-max(LENGTHS) // BLOCK)
        shape = (blocks, BLOCK, KV_HEADS, WIDTH + wide)

        def cache(is_odd: bool) -> torch.Tensor:
            x = torch.zeros(blocks * BLOCK * KV_HEADS * (WIDTH + wide) + 1, dtype=dtype)
            return x[int(is_odd) :][: x.numel() - 1].view(shape)[..., :WIDTH]

        self.kv = (cache(odd == "k"), cache(odd == "v"))
        if scales is not None:
            self.kv += (torch.ones(scales), torch.ones(scales))
        self.q = torch.zeros(sum(RUNS), HEADS, WIDTH, dtype=BRAIN)
        self.out = torch.empty_like(self.q)

    def run(self, ctx: AttentionContext) -> None:
        assert self.module._over(self.kv)(self.q, ctx, self.out) is self.out

    def tensors(self, ctx: AttentionContext) -> dict[str, torch.Tensor]:
        found = {f"kv {i}": x for i, x in enumerate(self.kv)} | {"q": self.q, "out": self.out}
        found |= {"table": ctx.block_table, "lengths": ctx.seqlens_k, "cu": ctx.cu_seqlens_q}
        if self.module.sinks is not None:
            found["sinks"] = self.module.sinks
        found |= {f"plan {i}": each.records for i, each in enumerate(plans_of(ctx))}
        return found


def launched(driver, layers, ctx) -> list[object]:
    """Return what each layer launches."""
    found = []
    for layer in layers:
        driver.seen.clear()
        layer.run(ctx)
        found.append(named(driver.seen, layer.tensors(ctx)))
    return found


class Repeats:
    """Notes of each call after a first one whether it repeated that, and counts the others."""

    def __init__(self, monkeypatch) -> None:
        self.ran, self.calls = [], 0
        repeat, find = Last.run, call._find

        def noting(last, *args):
            is_first = last._bound is None
            has_run = repeat(last, *args)
            if not is_first:
                self.ran.append(has_run)
            return has_run

        def finding(*args):
            self.calls += 1
            return find(*args)

        monkeypatch.setattr(Last, "run", noting)
        monkeypatch.setattr(call, "_find", finding)


def never_repeats():
    return mock.patch.object(Last, "run", return_value=False)


def sinks(value=0.0, dtype=torch.float32):
    return torch.full((HEADS,), value, dtype=dtype)


SLOTS = (len(RUNS) * -(-max(LENGTHS) // BLOCK), BLOCK, KV_HEADS)
ALIKE = {
    "plain": lambda _: Layer(),
    "windows": lambda _: Layer(window=40),
    "a_scale": lambda _: Layer(softmax_scale=0.3),
    "sinks": lambda i: Layer(sinks=sinks(i)),
    "scales_of_slots": lambda _: Layer(scales=SLOTS, dtype=torch.int8),
    "scales_of_heads": lambda _: Layer(scales=(KV_HEADS,), dtype=torch.int8),
    "wide_strides": lambda _: Layer(wide=8),
}


@pytest.mark.parametrize("name", ALIKE)
def test_layers_that_lie_alike_are_looked_up_once(driver, monkeypatch, name):
    layers = [ALIKE[name](i) for i in range(5)]
    for _ in range(2):  # kernels are known to the driver afterwards
        launched(driver, layers, context())
    ctx = context()
    with never_repeats():
        expected = launched(driver, layers, ctx)
    ctx, repeats = again(ctx), Repeats(monkeypatch)
    found = launched(driver, layers, ctx)
    assert repeats.ran == [True] * 4
    assert repeats.calls == 1
    assert found[1:] == expected[1:]
    assert all(found)


def test_shared_prefixes_are_repeated(driver, monkeypatch):
    table = torch.arange(len(RUNS) * 44, dtype=torch.int32).view(-1, 44)
    table[1, :30] = table[3, :30] = torch.arange(5, 35, dtype=torch.int32)
    given = context()
    shared = ops.shared_prefixes(
        table, torch.tensor([50, 700, 90, 900]), given.cu_seqlens_q, block_size=BLOCK
    )
    assert shared is not None
    layers = [Layer() for _ in range(4)]
    launched(driver, layers, context(shared=shared))
    repeats = Repeats(monkeypatch)
    found = launched(driver, layers, context(shared=shared))
    assert repeats.ran == [True] * 3
    with never_repeats():
        assert launched(driver, layers, context(shared=shared))[1:] == found[1:]


DIFFERENT = {
    "another_window": lambda: Layer(window=40),
    "no_window": lambda: Layer(),
    "another_scale": lambda: Layer(softmax_scale=0.7),
    "a_whole_number_as_scale": lambda: Layer(softmax_scale=1),
    "sinks": lambda: Layer(sinks=sinks(1)),
    "other_sinks": lambda: Layer(sinks=sinks(2)),
    "strides": lambda: Layer(wide=16),
    "an_odd_key_cache": lambda: Layer(odd="k"),
    "an_odd_value_cache": lambda: Layer(odd="v"),
    "bytes": lambda: Layer(scales=SLOTS, dtype=torch.int8),
    "bytes_by_head": lambda: Layer(scales=(KV_HEADS,), dtype=torch.int8),
    "other_bytes": lambda: Layer(scales=SLOTS, dtype=torch.float8_e4m3fn),
    "a_cache_in_half": lambda: Layer(dtype=torch.float16),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_run_calls_of_their_own(driver, name):
    """One beside layers that are alike, before and after them."""
    usual, other = [Layer() for _ in range(4)], [DIFFERENT[name]() for _ in range(3)]
    layers = [usual[0], usual[1], other[0], usual[2], other[1], other[2], usual[3]]
    for _ in range(2):
        launched(driver, layers, context())
    with never_repeats():
        expected = launched(driver, layers, context())
    found = launched(driver, layers, context())
    # The first of each kind starts what makes its plan, too, in memory of another name.
    for layer in (1, 3, 5, 6):
        assert found[layer] == expected[layer]
    assert [len(each) for each in found] == [len(each) for each in expected]
    assert found[2][-1] == expected[2][-1]


@pytest.mark.parametrize("dtype", [BRAIN, torch.float32])
def test_each_layer_has_its_own_sinks_whatever_their_dtype(driver, monkeypatch, dtype):
    layers = [Layer(sinks=sinks(i + 1, dtype)) for i in range(4)]
    launched(driver, layers, context())
    read, submit = [], driver.take
    found = launched(driver, [Layer(sinks=sinks(9))] * 2, context())[1]
    kernel, *_, named_values = next(each for each in found if "sinks" in each[-1])
    place = named_values.index("sinks")

    def reading(config, function, pointers, extra):
        values = driver.read(function.value, pointers)
        if function.value == kernel:
            read.append(ctypes.c_float.from_address(values[place]).value)
        return submit(config, function, pointers, extra)

    repeats = Repeats(monkeypatch)
    monkeypatch.setattr(driver, "take", reading)
    ctx = context()
    for layer in layers:
        read.clear()
        layer.run(ctx)
        assert layer.module.sinks[0].item() in read
    assert repeats.ran == [True] * 3


def options_of(ctx: AttentionContext, **options) -> dict:
    return {
        "block_table": ctx.block_table, "seqlens_k": ctx.seqlens_k,
        "cu_seqlens_q": ctx.cu_seqlens_q, "max_seqlen_q": ctx.max_seqlen_q, **options,
    }  # fmt: skip


def planned(layer: Layer, options: dict) -> PagedPlan:
    """Return a plan whose last call was the layer's."""
    its = ops.plan_paged_attention(layer.q, *layer.kv, **options)
    for _ in range(2):
        ops.paged_attention(**arguments(layer), **options, plan=its)
    return its


def repeats(its: PagedPlan, layer: Layer, options: dict) -> bool:
    """Say whether a call for a layer repeats the last one of the plan, and make it in any case."""
    with mock.patch.object(call, "_find", wraps=call._find) as found:
        ops.paged_attention(**arguments(layer), **options, plan=its)
    return not found.called


@pytest.mark.parametrize("which", ["block_table", "alibi_slopes"])
def test_what_kernels_read_as_a_copy_is_copied_each_time(driver, which):
    """It may have been written in place since the call before."""
    layers, ctx = [Layer() for _ in range(2)], context()
    if which == "block_table":  # its rows are no rows of memory
        value = torch.empty(*reversed(ctx.block_table.shape), dtype=torch.int32).t()
        value.copy_(ctx.block_table)
    else:
        value = torch.full((HEADS,), 0.5, dtype=BRAIN)
    options = options_of(ctx, **{which: value})
    its = planned(layers[0], options)
    wanted, read, submit = value.clone() + 1, [], driver.take
    value.copy_(wanted)

    def reading(config, function, pointers, extra):
        kind = ctypes.c_float if which == "alibi_slopes" else ctypes.c_int32
        for address in driver.read(function.value, pointers):
            if address > 1 << 32:
                read.append(kind.from_address(address).value)
        return submit(config, function, pointers, extra)

    with mock.patch.object(driver, "take", reading):
        assert repeats(its, layers[1], options)
    assert wanted.flatten()[0].item() in read


def test_a_call_with_another_table_repeats_the_last_one_for_it(driver):
    layers, ctx = [Layer() for _ in range(2)], context()
    other = replace(ctx, block_table=ctx.block_table + 1)
    its = planned(layers[0], options_of(ctx))
    assert repeats(its, layers[1], options_of(ctx))
    driver.seen.clear()
    assert repeats(its, layers[1], options_of(other))
    read = {value for each in driver.seen for value in each.values}
    assert other.block_table.data_ptr() in read
    assert ctx.block_table.data_ptr() not in read


def test_a_call_that_fails_is_not_repeated(driver):
    layers, ctx = [Layer() for _ in range(2)], context()
    options = options_of(ctx)
    its = planned(layers[0], options)
    with pytest.raises((TypeError, ValueError), match="softmax_scale"):
        repeats(its, layers[0], options | {"softmax_scale": "wide"})
    with pytest.raises(ValueError, match="plan must be for window_left"):
        repeats(its, layers[0], options | {"window": 3})
    assert repeats(its, layers[1], options)


def test_a_call_that_returns_lse_is_no_repetition(driver):
    layers, ctx = [Layer() for _ in range(2)], context()
    options = options_of(ctx)
    its = planned(layers[0], options)
    assert not repeats(its, layers[1], options | {"return_lse": True})
    assert repeats(its, layers[1], options)


def test_a_plan_that_has_run_can_be_copied(driver):
    layers, options = [Layer() for _ in range(2)], options_of(context())
    its = planned(layers[0], options)
    for other in (copy.deepcopy(its), pickle.loads(pickle.dumps(its))):
        assert other.made_for == its.made_for
        assert not repeats(other, layers[1], options)
    assert repeats(its, layers[1], options)


def test_an_output_that_is_wrong_is_refused_after_right_ones(driver):
    layers, ctx = [Layer() for _ in range(3)], context()
    launched(driver, layers[:2], ctx)
    layers[2].out = torch.empty(layers[2].out.numel() + 1, dtype=BRAIN)[1:].view(layers[2].q.shape)
    with pytest.raises(ValueError, match="out must begin at a multiple of 16 bytes"):
        layers[2].run(ctx)
    layers[2].out = torch.empty_like(layers[2].q, dtype=torch.float32)
    with pytest.raises(TypeError, match="out must"):
        layers[2].run(ctx)


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _captures():
    return mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)


def _observes():
    return mock.patch.object(host, "observed", return_value=True)


def _another_stream():
    return mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=6)


def _another_device():
    return mock.patch.object(host, "_current_device", return_value=1)


def _begins_early():
    return early.launching({"attention": early.FIRST})


WATCHERS = {
    "a_mode": Watch,
    "a_capture": _captures,
    "who_observes_launches": _observes,
    "another_stream": _another_stream,
    "another_device": _another_device,
    "early": _begins_early,
    "a_profiler": torch.profiler.profile,
    "a_trace": lambda: mock.patch.object(torch.compiler, "is_compiling", return_value=True),
}


def arguments(layer: Layer) -> dict:
    k_cache, v_cache = layer.kv
    return {"q": layer.q, "k_cache": k_cache, "v_cache": v_cache, "out": layer.out}


@pytest.mark.parametrize(
    ("name", "has_run"),
    # Buffers are made on the stream of the second call.
    [(name, has_run) for name in WATCHERS for has_run in (False, True)
     if has_run or name != "another_stream"],
)  # fmt: skip
def test_nothing_is_repeated_past_who_watches(driver, name, has_run):
    layers, ctx = [Layer() for _ in range(3)], context()
    layers[0].run(ctx)
    [its] = plans_of(ctx)
    if has_run:
        layers[1].run(ctx)
        assert its.last._again is not None
    driver.seen.clear()
    given = signature(layers[2], ctx, its)
    with WATCHERS[name]():
        assert not its.last.run(given, layers[2].out)
    assert driver.seen == []


def signature(layer: Layer, ctx: AttentionContext, its: PagedPlan) -> PagedSignature:
    """Return the arguments of a layer's call with a plan."""
    return PagedSignature(
        layer.q, *layer.kv, **options_of(ctx), records=its.records, plan_for=its.made_for
    )


def test_gradients_are_never_lost(driver):
    """What ran without a gradient is not repeated where one is wanted."""
    with torch.inference_mode(False):
        layers, ctx = [Layer() for _ in range(2)], context()
        layers[0].q.requires_grad_()
        with torch.no_grad():
            layers[0].run(ctx)
            [its] = plans_of(ctx)
            assert its.last.run(signature(layers[0], ctx, its), layers[0].out)
            assert not its.last.run(signature(layers[1], ctx, its), layers[1].out)
        assert not its.last.run(signature(layers[0], ctx, its), layers[0].out)
        layers[1].run(ctx)
        assert its.last.run(signature(layers[1], ctx, its), layers[1].out)
        layers[1].q.requires_grad_()
        assert not its.last.run(signature(layers[1], ctx, its), layers[1].out)


def test_each_group_of_layers_repeats_calls_over_its_own_table(driver, monkeypatch):
    layers = [Layer() for _ in range(6)]
    other = replace(context(), block_table=context().block_table + 1)
    ctx = replace(context(), group_of=(0, 1) * 3, others=(other,))
    launched(driver, layers, ctx)
    ctx, repeats = replace(again(ctx), others=(again(other),)), Repeats(monkeypatch)
    for number, layer in enumerate(layers):
        driver.seen.clear()
        own = ctx.of_layer(number)
        layer.run(own)
        tables = {x.data_ptr(): i for i, x in enumerate((ctx.block_table, other.block_table))}
        read = {tables[v] for each in driver.seen for v in each.values if v in tables}
        assert read == {number % 2}
    assert repeats.ran == [True] * 4


def test_pieces_of_a_step_repeat_the_attention_of_their_first_layer(driver, monkeypatch):
    layers = [Layer() for _ in range(5)]
    for layer in layers[1:]:
        layer.out = layers[0].out  # as all layers of a step have it
    layers[3].q = layers[2].q
    pieces, replays = _Pieces(None, lambda q, v_dim: (q, q)), []
    for number in range(len(layers) + 1):
        pieces.graphs.append(SimpleNamespace(replay=partial(replays.append, number)))
    for layer in layers:
        function, q, out = (
            layer.module._over(layer.kv), pieces.known(layer.q),
            pieces.known(layer.out.view(layer.out.shape)),
        )  # fmt: skip
        pieces.attention.append(_Attention(function, q, out))
    assert len({id(at.o) for at in pieces.attention}) == 1
    count = sum(RUNS) - 3
    short = replace(context(), cu_seqlens_q=context().cu_seqlens_q.clamp(max=count))
    for _ in range(2):
        pieces.run(again(short), count)
    ctx, repeats = again(short), Repeats(monkeypatch)
    driver.seen.clear()
    pieces.run(ctx, count)
    assert repeats.ran == [True] * 4
    assert replays[-6:] == [0, 1, 2, 3, 4, 5]
    [its] = plans_of(ctx)
    assert f"num_tokens {count};" in its.made_for
    queries, out = [layer.q.data_ptr() for layer in layers], layers[0].out.data_ptr()
    read = [[q for q in queries if q in each.values] for each in driver.seen if out in each.values]
    of_layers = [found[0] for found in read if found]  # a merge reads none
    assert [*dict.fromkeys(of_layers)] == [*dict.fromkeys(queries)]
    assert len(of_layers) % len(layers) == 0


def test_calls_for_more_than_launches_are_found_as_ever(driver, monkeypatch):
    """A plan that lets torch compute something has no buffers that could stay."""
    layers, ctx, repeats = [Layer() for _ in range(4)], context(), Repeats(monkeypatch)
    monkeypatch.setattr(host.LaunchPlan, "again", lambda *_: None)
    launched(driver, layers, ctx)
    assert repeats.ran == [False] * 3
    assert repeats.calls == 4


def test_buffers_live_as_long_as_their_plan_and_layers_no_longer(driver):
    ctx, layers = context(), [Layer() for _ in range(3)]
    launched(driver, layers, ctx)
    [its] = plans_of(ctx)
    kept = its.last._again._buffers.tensors
    caches = {x.data_ptr() for layer in layers for x in (*layer.kv, layer.q, layer.out)}
    assert not caches & {x.data_ptr() for x in kept if x is not None}
    assert requests.observed() is False
