"""Repeating a recorded call: it does what computing anew would do, or it is not repeated."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    assert_right,
    make_problem,
)
from tests.kernels.gluon.driver import STREAM, AnyKernel, pretended_gpu
from tests.kernels.gluon.problem import assert_forward_right
from tilewise import ops
from tilewise.kernels.gluon.attention import launch as attention
from tilewise.kernels.gluon.attention import split_kv as attention_few
from tilewise.kernels.gluon.backward import steps as attention_bwd_steps
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tilewise.kernels.gluon.host import descriptors
from tilewise.kernels.gluon.host import launch as _launch
from tilewise.kernels.gluon.host import record as _record
from tilewise.kernels.triton.paged import decode as paged_decode
from tilewise.kernels.triton.paged import rows as paged_rows
from tilewise.kernels.triton.paged import rows_merge as paged_rows_merge


@pytest.fixture
def driver():
    with pretended_gpu() as it:
        yield it


class Example:
    """A call of two launches: x to a workspace, then with a descriptor of it to the result."""

    def __init__(self, driver):
        self.driver = driver
        self.first, self.second = AnyKernel(driver), AnyKernel(driver)
        self.memory = _record.Memory()
        self.computed = 0
        self.between = lambda x: None  # its launches

    def compute(self, x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor | None]:
        self.computed += 1
        parts = torch.empty(2, 1, 64, 1, 64, dtype=torch.bfloat16)
        o = torch.empty_like(x)
        _launch.launch(self.first, 3, x, parts[1], number)
        self.between(x)
        _launch.launch(
            self.second, (2, 4), descriptors.descriptor(y, 64, 64),
            descriptors.descriptor(parts[1], 64, 64), parts[0], o, 0.5,
        )  # fmt: skip
        return o, None

    def run(self, x: Tensor, y: Tensor, number: int = 3, inputs=None):
        inputs = [x, y] if inputs is None else inputs
        key = (number, x.stride(), y.stride())
        return self.memory.run(key, inputs, lambda: self.compute(x, y, number))

    def launched(self) -> list[list[object]]:
        """Return the parameters of the launches since the last look."""
        seen = [launch.values for launch in self.driver.seen]
        self.driver.seen.clear()
        return seen


@pytest.fixture
def example(driver):
    return Example(driver)


def make() -> Tensor:
    return torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)


def recorded(example: Example) -> None:
    for _ in range(3):
        example.run(make(), make())
    assert example.computed == 2
    example.launched()


class TestRepeating:
    def test_launches_the_same_with_other_addresses(self, example):
        recorded(example)
        x, y = make(), make()
        o, nothing = example.run(x, y)
        first, second = example.launched()
        part, whole = first[1], second[-3]
        assert first == [x.data_ptr(), part, 3]
        assert (second[0][0], second[9][0]) == (y.data_ptr(), part)
        assert part - whole == 64 * 64 * 2
        assert second[-3:] == [whole, o.data_ptr(), 0.5]
        assert (o.shape, o.stride(), o.dtype, nothing) == (x.shape, x.stride(), x.dtype, None)
        assert example.computed == 2

    def test_encodes_descriptors_as_their_first_launch_did(self, example):
        x, y = make(), make()
        example.run(x, y)
        encoded = []
        for _ in range(3):
            example.run(x, y)
            encoded.append([value[1] for value in example.launched()[-1] if type(value) is tuple])
        assert encoded[0] == encoded[1] == encoded[2] != []
        assert example.computed == 2

    def test_runs_on_the_stream_of_the_moment(self, example):
        recorded(example)
        with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=99):
            example.run(make(), make())
        assert [launch.stream for launch in example.driver.seen] == [99, 99]

    def test_is_another_call_under_another_key(self, example):
        recorded(example)
        example.run(make(), make(), number=4)
        assert example.computed == 3
        assert example.launched()[0][-1] == 4

    def test_of_an_input_given_twice_is_no_recording_for_two(self, example):
        x = make()
        for _ in range(3):
            example.run(x, x)
        assert example.computed == 2
        example.launched()
        x, y = make(), make()
        example.run(x, y)
        assert example.computed == 3
        first, second = example.launched()
        assert (first[0], second[0][0]) == (x.data_ptr(), y.data_ptr())
        example.run(y, x)
        example.run(x, x)  # what is recorded of two serves one
        assert example.computed == 3
        *_, first, second = example.launched()
        assert (first[0], second[0][0]) == (x.data_ptr(), x.data_ptr())

    def test_asks_and_keeps(self, example):
        lasting, asked = torch.zeros(4), []
        kernel, original = AnyKernel(example.driver), example.compute

        def ask(stream: int = STREAM) -> Tensor:
            assert stream == STREAM
            with _disable_current_modes():  # as if it had been there
                asked.append(torch.zeros(4))
            return asked[-1]

        def compute(x, y, number):
            now = ask()
            _record.keep(lasting)
            _record.ask(now, ask)
            _launch.launch(kernel, 1, now, lasting)
            return original(x, y, number)

        example.compute = compute
        recorded(example)
        example.run(make(), make())
        assert example.launched()[0] == [asked[-1].data_ptr(), lasting.data_ptr()]
        assert (len(asked), example.computed) == (4, 2)

    def test_in_threads_mixes_nothing(self, example):
        recorded(example)
        mine, wrong = threading.local(), []

        def look(config, function, pointers, extra):
            time.sleep(0.001)  # the others run
            (first, *_) = example.driver.read(function.value, pointers)
            address = first[0] if isinstance(first, tuple) else first
            if address not in mine.addresses:
                wrong.append(address)
            return 0

        def work() -> None:
            for _ in range(5):
                x, y = make(), make()
                mine.addresses = x.data_ptr(), y.data_ptr()
                example.run(x, y)

        with mock.patch.object(example.driver, "cuLaunchKernelEx", look):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong

    def test_may_be_no_more_than_its_launches(self, example):
        recorded(example)
        x, y = make(), make()
        launch = example.memory.known((3, x.stride(), y.stride())).launcher([x, y])
        launch()
        first = example.launched()
        launch()
        assert example.launched() == first
        assert (first[0][0], first[1][0][0]) == (x.data_ptr(), y.data_ptr())
        assert example.memory.known("another key") is None

    def test_keeps_no_tensor_alive(self, example):
        x, y = make(), make()
        watched = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
        for _ in range(3):
            o, _ = example.run(x, y)
            watched.append(weakref.ref(o.untyped_storage()))
        assert example.computed == 2
        del x, y, o
        gc.collect()
        assert [each() for each in watched] == [None] * 5


class TestNothingIsRepeated:
    """Where something is not as it was, or not known, the call is computed anew."""

    @staticmethod
    def assert_anew(example, *tensors) -> None:
        before = example.computed
        example.run(*(tensors or (make(), make())))
        assert example.computed == before + 1

    def test_of_tensors_that_lie_otherwise(self, example):
        recorded(example)
        odd = torch.zeros(64 * 64 + 8, dtype=torch.bfloat16)[4 : 4 + 64 * 64].view(1, 64, 1, 64)
        self.assert_anew(example, odd, make())

    def test_for_a_profiler(self, example):
        recorded(example)
        with mock.patch.object(_launch.knobs.runtime, "launch_enter_hook", print):
            self.assert_anew(example)

    def test_with_another_device_current(self, example):
        recorded(example)
        with mock.patch.object(_record, "_current_device", return_value=1):
            self.assert_anew(example)

    @pytest.mark.parametrize(
        "between",
        [
            lambda x: x.clone(),
            lambda x: x.add_(1),
            lambda x: torch.zeros(4),
            lambda x: x.sum(),
        ],
        ids=["copy", "update", "zeros", "sum"],
    )
    def test_where_torch_computes_something(self, example, between):
        example.between = between
        for _ in range(8):
            self.assert_anew(example)

    def test_where_an_address_is_not_known(self, example):
        foreign, kernel = torch.zeros(4), AnyKernel(example.driver)
        example.between = lambda x: _launch.launch(kernel, 1, foreign)
        for _ in range(8):
            self.assert_anew(example)

    def test_where_the_middle_of_an_input_is_read(self, example):
        kernel = AnyKernel(example.driver)
        example.between = lambda x: _launch.launch(kernel, 1, x[:, 1:])
        for _ in range(8):
            self.assert_anew(example)

    def test_where_triton_launches(self, example):
        example.first.__class__ = type("TritonsOnly", (AnyKernel,), {"__getitem__": _unknown})
        for _ in range(8):
            self.assert_anew(example)

    def test_where_a_result_is_no_whole_allocation(self, example):
        original = example.compute
        example.compute = lambda *given: (original(*given)[0][:, :32], None)
        for _ in range(8):
            self.assert_anew(example)

    def test_where_a_graph_is_captured_but_what_is_recorded_is(self, example):
        with mock.patch.object(_record, "_capturing", return_value=True):
            for _ in range(8):
                self.assert_anew(example)
        recorded_before = example.computed
        for _ in range(3):
            example.run(make(), make())
        assert example.computed == recorded_before + 2
        with mock.patch.object(_record, "_capturing", return_value=True):
            example.run(make(), make())
        assert example.computed == recorded_before + 2

    def test_where_each_call_is_another(self, example):
        """A recording takes time, so it waits until a call comes again."""
        with mock.patch.object(_record.Memory, "_record") as record:
            for number in range(2000):
                example.run(make(), make(), number=number)
        record.assert_not_called()


def _unknown(kernel, grid):
    def start(*arguments, **constants):
        kernel.launches += 1

    return start


CASES = {
    "plain": Call(70, 80, (4, 4), (64, 64), 2, BRAIN),
    "causal_groups": Call(70, 80, (4, 2), (128, 128), 2, HALF, CAUSAL),
    "wide": Call(70, 80, (4, 2), (256, 256), 2, BRAIN, CAUSAL),
    "d_192": Call(70, 80, (4, 2), (192, 128), 1, BRAIN, CAUSAL),
    "key_lengths": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, seqlens_k=(3, 80)),
    "alibi": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="heads"),
    "alibi_sequences": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="sequences"),
    "softcap": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, softcap=30.0),
    "dropout": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, dropout_p=0.1),
    "bias": Call(70, 80, (4, 2), (64, 64), 2, BRAIN, bias=(1, 4, 70, 80)),
    "mask": Call(200, 200, (4, 2), (64, 64), 2, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "packed": Call(heads=(4, 2), dtype=BRAIN, window=CAUSAL, lengths=((70, 80), (5, 9))),
}  # fmt: skip


@pytest.fixture
def kernels(driver, monkeypatch):
    """Pretend that Triton compiled the kernels of attention; nothing else is pretended."""
    found = {}
    for module in (
        attention_fwd_launch, attention_bwd_steps, attention_few, paged_decode, paged_rows,
        paged_rows_merge,
    ):  # fmt: skip
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            found[name] = AnyKernel(driver)
            monkeypatch.setattr(module, name, found[name])
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(attention_fwd_launch, "_counter", lambda device: counter)
    monkeypatch.setattr(attention_fwd_launch, "_counter_of", lambda device, stream: counter)
    monkeypatch.setattr(attention, "_forward", _record.Memory())
    monkeypatch.setattr(attention, "_backward", _record.Memory())
    monkeypatch.setattr(attention_few, "_remembered", {})
    return found


def draw(call: Call, device: str) -> Problem:
    """Return tensors of a call; of all of them a random mask has as many tiles."""
    if call.mask is not None:
        torch.manual_seed(0)
    return make_problem(call, device)


def forward(problem: Problem):
    return attention.launch_fwd(problem.q, problem.k, problem.v, problem.spec, **problem.tensors)


def backward(problem: Problem, o: Tensor, lse: Tensor):
    p = problem
    return attention.launch_bwd(p.do, None, p.q, p.k, p.v, o, lse, p.spec, **p.tensors)


def few(problem: Problem):
    with mock.patch.object(attention.attention_few, "is_faster", return_value=True):
        return forward(problem)


def named(launches, tensors) -> list[object]:
    """Return what launches were, with names for addresses; those of no tensor are numbered."""
    names = {x.data_ptr(): name for name, x in tensors.items()}

    def name_of(value):
        if isinstance(value, tuple):
            return name_of(value[0]), value[1]
        if not isinstance(value, int) or value < 2**32:
            return value
        return names.setdefault(value, f"memory {len(names)}")

    return [
        (each.function, each.grid, each.block, [name_of(value) for value in each.values])
        for each in launches
    ]


def launches_of(driver, run, tensors) -> tuple[list[object], tuple[Tensor | None, ...]]:
    """Return what `run` launches, and its results, whose names are their numbers."""
    driver.seen.clear()
    results = run()
    known = {f"result {i}": x for i, x in enumerate(results) if x is not None}
    return named(driver.seen, tensors | known), results


def tensors_of(problem: Problem, **more: Tensor) -> dict[str, Tensor]:
    found = {"q": problem.q, "k": problem.k, "v": problem.v, "do": problem.do} | more
    for name, given in problem.tensors.items():
        for index, x in enumerate(given if isinstance(given, tuple) else (given,)):
            if x is not None:
                found[f"{name} {index}"] = x
    return found


def assert_repeated_like_anew(driver, kernels, run, problem, other, memory, **more) -> None:
    """Compare the launches of a repeated call with those of the same call computed anew."""
    for _ in range(3):
        run(problem)
    compiled = {name: kernel.launches for name, kernel in kernels.items()}
    assert sum(compiled.values()) > 0
    tensors = tensors_of(other, **more)
    with (
        mock.patch.object(attention, "_compute_fwd"),
        mock.patch.object(attention.attention_bwd_launch, "launch_bwd"),
    ):
        again, results = launches_of(driver, lambda: run(other), tensors)
    memory.clear()
    anew, expected = launches_of(driver, lambda: run(other), tensors)
    assert {name: kernel.launches for name, kernel in kernels.items()} == compiled
    assert again == anew != []
    for result, want in zip(results, expected, strict=True):
        if want is not None:
            assert (result.shape, result.stride(), result.dtype) == (
                want.shape, want.stride(), want.dtype
            )  # fmt: skip


FEW = {
    "one": Call(1, 1500, (4, 2), (64, 64), 2, BRAIN),
    "one_alone": Call(1, 1500, (4, 2), (64, 64), 1, BRAIN, CAUSAL),
    "causal": Call(40, 256, (6, 2), (64, 64), 2, HALF, CAUSAL),
    "full": Call(70, 1900, (2, 2), (64, 64), 1, BRAIN),
    "lengths_sinks": Call(
        3, 160, (4, 2), (64, 64), 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 160), sinks=True
    ),
}  # fmt: skip


class TestAttention:
    """Every kind of call that is repeated starts what it would start anew."""

    @pytest.mark.parametrize("name", CASES)
    def test_forward(self, driver, kernels, name):
        problem, other = (draw(CASES[name], "cpu") for _ in range(2))
        assert_repeated_like_anew(driver, kernels, forward, problem, other, attention._forward)

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_backward(self, driver, kernels, name, deterministic):
        problem, other = (draw(CASES[name], "cpu") for _ in range(2))
        for each in (problem, other):
            each.spec = replace(each.spec, deterministic=deterministic, needs_dbias=False)
        o, lse = forward(other)
        assert_repeated_like_anew(
            driver, kernels, lambda p: backward(p, o, lse), problem, other, attention._backward,
            o=o, lse=lse,
        )  # fmt: skip

    def test_three_tensors_like_others(self, driver, kernels):
        problem, other = (draw(CASES["causal_groups"], "cpu") for _ in range(2))
        q, k, v = problem.q, problem.k, problem.v
        again = attention.Again(q, k, v, problem.spec)
        assert again.forward(q, k, v) is None  # nobody knows how yet
        for _ in range(3):
            forward(problem)
        tensors = tensors_of(other)
        found, _ = launches_of(driver, lambda: again.forward(other.q, other.k, other.v), tensors)
        expected, _ = launches_of(driver, lambda: forward(other), tensors)
        assert found == expected != []
        odd = torch.empty(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape)
        assert again.forward(odd, k, v) is None
        assert again.forward(q, k, v) is not None

    @pytest.mark.parametrize("name", FEW)
    def test_few_queries(self, driver, kernels, name):
        problem, other = (draw(FEW[name], "cpu") for _ in range(2))
        assert_repeated_like_anew(driver, kernels, few, problem, other, attention._forward)

    @pytest.mark.parametrize(
        "change",
        [
            {"window_right": 0},
            {"window_left": 7},
            {"softmax_scale": 0.5},
            {"softcap": 3.0},
            {"deterministic": True},
        ],
    )
    def test_another_spec_is_another_call(self, driver, kernels, change):
        problem = draw(CASES["plain"], "cpu")
        for _ in range(3):
            o, lse = forward(problem)
            backward(problem, o, lse)
        problem.spec = replace(problem.spec, **change)
        self.assert_anew(problem)

    @staticmethod
    def assert_anew(problem, run_forward=forward):
        with mock.patch.object(
            attention, "_compute_fwd", side_effect=attention._compute_fwd
        ) as compute:
            o, lse = run_forward(problem)
        assert compute.called
        target = attention.attention_bwd_launch
        with mock.patch.object(target, "launch_bwd", side_effect=target.launch_bwd) as compute:
            backward(problem, o, lse)
        assert compute.called

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_other_strides_are_another_call(self, driver, kernels, name):
        problem = draw(CASES["plain"], "cpu")
        for _ in range(3):
            o, lse = forward(problem)
            backward(problem, o, lse)
        x = getattr(problem, name)
        setattr(problem, name, x.transpose(1, 2).contiguous().transpose(1, 2))
        self.assert_anew(problem)

    def test_other_slopes_are_another_call(self, driver, kernels):
        problem = draw(CASES["alibi"], "cpu")
        for _ in range(3):
            o, lse = forward(problem)
            backward(problem, o, lse)
        slopes = problem.alibi_slopes
        for other in (
            slopes.expand(2, 4).contiguous(),  # of sequences
            slopes.repeat_interleave(2)[::2],  # not contiguous
            torch.cat([slopes, slopes])[1:5],  # not aligned
            slopes.double(),
        ):
            problem.alibi_slopes = other
            self.assert_anew(problem)


@pytest.fixture
def fresh(monkeypatch):
    """Forget recorded calls, and let memory of repeated ones hold NaN."""

    def poisoned(*made):
        x = _record_fresh(*made)
        return x.fill_(255) if x.dtype == torch.uint8 else x.fill_(float("nan"))

    _record_fresh = _record._fresh
    monkeypatch.setattr(_record, "_fresh", poisoned)
    monkeypatch.setattr(attention, "_forward", _record.Memory())
    monkeypatch.setattr(attention, "_backward", _record.Memory())


def both(problem: Problem) -> dict[str, Tensor]:
    """Return the results of both passes, of the first where the second is not repeated."""
    p = problem
    o, lse = forward(p)
    if p.bias is not None or p.sinks is not None:
        return {"o": o, "lse": lse}
    grads = attention.launch_bwd(p.do, p.dlse, p.q, p.k, p.v, o, lse, p.spec, **p.tensors)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads[:3]), strict=True))


def judge(problem: Problem, results: dict[str, Tensor]) -> None:
    (assert_right if "dq" in results else assert_forward_right)(problem, results)


def few_only(problem: Problem) -> dict[str, Tensor]:
    return dict(zip(("o", "lse"), few(problem), strict=True))


def repeated_only():
    """Return a context in which nothing is computed anew."""
    computing = mock.patch.object(attention, "_compute_fwd", side_effect=AssertionError)
    launching = mock.patch.object(
        attention.attention_bwd_launch, "launch_bwd", side_effect=AssertionError
    )
    return _both(computing, launching)


@contextlib.contextmanager
def _both(first, second):
    with first, second:
        yield


CALLS = [
    *(pytest.param(call, both, id=name) for name, call in CASES.items()),
    *(pytest.param(call, few_only, id=f"few_{name}") for name, call in FEW.items()),
]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(("call", "run"), CALLS)
    def test_later_calls_are_right(self, fresh, call, run):
        for _ in range(3):
            run(draw(call, "cuda"))
        with repeated_only():
            for _ in range(2):
                problem = draw(call, "cuda")
                judge(problem, run(problem))

    @pytest.mark.parametrize(("call", "run"), CALLS)
    def test_in_a_graph_and_after_it(self, fresh, call, run):
        problem = draw(call, "cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # what a first launch does may not be captured
            for _ in range(3):
                run(problem)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with repeated_only(), torch.cuda.graph(graph):
            results = run(problem)
        for _ in range(2):
            graph.replay()
            judge(problem, results)
            refill(problem, draw(call, "cuda"))
        with repeated_only():
            eager = run(problem)
            graph.replay()
        judge(problem, eager)
        judge(problem, results)

    @pytest.mark.parametrize(("call", "run"), CALLS)
    def test_on_a_side_stream(self, fresh, call, run):
        problem = draw(call, "cuda")
        for _ in range(3):
            run(problem)
        other, side = draw(call, "cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with repeated_only(), torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # what runs elsewhere reads the tensors as they were
            refill(problem, other)
            results = run(problem)
        side.synchronize()
        judge(problem, results)

    def test_tensors_that_lie_otherwise_are_right(self, fresh):
        call = CASES["causal_groups"]
        for _ in range(3):
            both(draw(call, "cuda"))
        problem = draw(call, "cuda")
        for name in ("q", "v", "do"):
            x = getattr(problem, name)
            odd = torch.empty(x.numel() + 4, dtype=x.dtype, device="cuda")[4:].view(x.shape)
            setattr(problem, name, odd.copy_(x))
        judge(problem, both(problem))

    def test_the_public_call_and_its_gradient_are_right(self, fresh):
        call = CASES["causal_groups"]
        for _ in range(5):
            p = draw(call, "cuda")
            leaves = [x.requires_grad_() for x in (p.q, p.k, p.v)]
            o, lse = ops.attention(*leaves, causal=True, return_lse=True, backend="gluon")
            grads = torch.autograd.grad((o, lse), leaves, (p.do, p.dlse))
            results = zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True)
            p.q, p.k, p.v = (x.detach() for x in leaves)
            judge(p, {name: x.detach() for name, x in results})


def refill(problem: Problem, other: Problem) -> None:
    """Give the tensors of a problem the contents of another's."""
    theirs = tensors_of(other, dlse=other.dlse)
    for name, x in tensors_of(problem, dlse=problem.dlse).items():
        x.copy_(theirs[name])
    problem.visible = other.visible
