"""Plans of Hopper's kernels: a plan that ran for others does what a new one would do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Problem,
    assert_right,
    make_problem,
)
from tests.kernels.attention_problem import Call as AttentionCall
from tests.kernels.gluon.driver import SCRATCH, STREAM, AnyKernel, Kernel, pretended_gpu
from tests.kernels.gluon.problem import assert_forward_right
from tests.kernels.planned import tensors_of as tensors_of_call
from tilewise import ops
from tilewise.kernels.gluon.attention import plan as attention
from tilewise.kernels.gluon.attention import split_kv as attention_few
from tilewise.kernels.gluon.backward import steps as attention_bwd_steps
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tilewise.kernels.host import descriptors, memory, requests
from tilewise.kernels.host import launch as _launch
from tilewise.kernels.host import plan as host
from tilewise.kernels.host.memory import launches
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import Call, Layout
from tilewise.kernels.triton.attention import plan as portable
from tilewise.kernels.triton.paged import decode as paged_decode
from tilewise.kernels.triton.paged import rows as paged_rows
from tilewise.kernels.triton.paged import rows_merge as paged_rows_merge


@pytest.fixture
def driver():
    with pretended_gpu() as it:
        yield it


class Example:
    """A plan of two launches: x to a workspace, then with a descriptor of it to the result."""

    def __init__(self, driver):
        self.driver = driver
        self.first, self.second = AnyKernel(driver), AnyKernel(driver)
        self.between = lambda maker, x: None  # what else is planned

    def plan(self, number: int = 3, odd: bool = False):
        layout = Layout.of(make())
        call = Call(None, torch.device("cpu"), (layout._replace(is_aligned=not odd), layout))
        maker = Maker(call, ("x", "y"))
        x, y = maker.inputs
        parts = torch.empty(2, 1, 64, 1, 64, dtype=torch.bfloat16, device="meta")
        o = torch.empty_like(x)
        maker.launch(self.first, 3, x, parts[1], number)
        made = self.between(maker, x)
        maker.launch(
            self.second, (2, 4), descriptors.descriptor(y, 64, 64),
            descriptors.descriptor(parts[1], 64, 64), parts[0], o, 0.5,
        )  # fmt: skip
        return maker.finish((o, made))

    def ready(self, **options):
        """Return a plan that has run."""
        plan = self.plan(**options)
        for _ in range(2):
            plan.run(make(), make())
        self.launched()
        return plan

    def launched(self) -> list[list[object]]:
        """Return the parameters of the launches since the last look."""
        seen = [launch.values for launch in self.driver.seen]
        self.driver.seen.clear()
        return seen

    @property
    def by_triton(self) -> int:
        """Return how often Triton's launcher was used."""
        return self.first.launches + self.second.launches


@pytest.fixture
def example(driver):
    return Example(driver)


def make() -> Tensor:
    return torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)


def negated(maker: Maker, x: Tensor) -> Tensor:
    return maker.compute(torch.neg, x, like=torch.empty_like(x))


class TestRunning:
    def test_launches_the_same_with_other_addresses(self, example):
        plan = example.ready()
        x, y = make(), make()
        o, nothing = plan.run(x, y)
        first, second = example.launched()
        part, whole = first[1], second[-3]
        assert first == [x.data_ptr(), part, 3]
        assert (second[0][0], second[9][0]) == (y.data_ptr(), part)
        assert part - whole == 64 * 64 * 2
        assert second[-3:] == [whole, o.data_ptr(), 0.5]
        assert (o.shape, o.stride(), o.dtype, nothing) == (x.shape, x.stride(), x.dtype, None)
        assert example.by_triton == 2

    def test_encodes_descriptors_as_a_first_launch_does(self, example):
        x, y = make(), make()
        plan = example.ready()
        encoded = []
        for _ in range(3):
            plan.run(x, y)
            encoded.append([value[1] for value in example.launched()[-1] if type(value) is tuple])
        _launch.launch_now(
            example.second, (2, 4), descriptors.descriptor(y, 64, 64),
            descriptors.descriptor(x, 64, 64), x, y, 0.5,
        )  # fmt: skip
        encoded.append([value[1] for value in example.launched()[-1] if type(value) is tuple])
        assert encoded[0] == encoded[1] == encoded[2] == encoded[3] != []

    def test_keeps_descriptors_of_few_addresses(self, example, monkeypatch):
        monkeypatch.setattr(memory, "_MAX_MET", 3)
        plans, kept = [example.ready(), example.ready(number=4)], []
        for _ in range(5):
            for plan in plans:
                kept.append((make(), make()))  # at other addresses than all before
                plan.run(*kept[-1])
                assert example.launched()[-1][0][0] == kept[-1][1].data_ptr()
        launches = [launch for plan in plans for launch in plan.actions]
        assert 0 < sum(len(launch.addressed.met) for launch in launches) <= 3

    def test_runs_on_the_stream_of_the_moment(self, example):
        plan = example.ready()
        with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=99):
            plan.run(make(), make())
        assert [launch.stream for launch in example.driver.seen] == [99, 99]

    def test_goes_straight_to_what_starts_launches(self, example):
        plan = example.ready()
        with mock.patch.object(host.Launch, "run", side_effect=AssertionError):
            plan.run(make(), make())
        assert len(example.launched()) == 2

    def test_starts_launches_that_differ_in_their_grid(self, example):
        kernel = AnyKernel(example.driver)

        def between(maker, x):
            maker.launch(kernel, 5, x)
            maker.launch(kernel, (6, 7), x)

        example.between = between
        plan = example.plan()
        plan.run(make(), make())
        example.driver.seen.clear()
        plan.run(make(), make())
        grids = [launch.grid for launch in example.driver.seen]
        assert grids == [(3, 1, 1), (5, 1, 1), (6, 7, 1), (2, 4, 1)]

    def test_of_a_new_plan_uses_what_is_compiled(self, example):
        example.ready()
        example.plan(number=4).run(make(), make())
        assert example.by_triton == 2
        assert example.launched()[0][-1] == 4

    def test_of_plans_that_share_a_kernel_mixes_no_numbers(self, example):
        plans = {number: example.plan(number=number) for number in (3, 4, -5)}
        for _ in range(2):
            for number, plan in plans.items():
                x = make()
                plan.run(x, make())
                if example.driver.seen:  # the first launch of all is Triton's
                    first, _ = example.launched()
                    assert first == [x.data_ptr(), first[1], number]
        assert example.by_triton == 2

    def test_takes_one_tensor_for_two(self, example):
        plan, x = example.ready(), make()
        plan.run(x, x)
        first, second = example.launched()
        assert (first[0], second[0][0]) == (x.data_ptr(), x.data_ptr())

    def test_asks_each_time(self, example):
        asked = []
        kernel = AnyKernel(example.driver)

        def ask(stream: int) -> Tensor:
            assert stream == STREAM
            asked.append(torch.zeros(4))
            return asked[-1]

        def between(maker, x):
            maker.launch(kernel, 1, maker.ask(ask, torch.empty(4, device="meta")))

        example.between = between
        plan = example.ready()
        plan.run(make(), make())
        assert len(asked) == 3
        assert example.launched()[1] == [asked[-1].data_ptr()]

    def test_in_threads_mixes_nothing(self, example):
        plan = example.ready()
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
                plan.run(x, y)

        with mock.patch.object(example.driver, "take", look):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong

    def test_keeps_no_tensor_alive(self, example):
        x, y, plan = make(), make(), example.plan()
        watched = [weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())]
        for _ in range(3):
            o, _ = plan.run(x, y)
            watched.append(weakref.ref(o.untyped_storage()))
        del x, y, o
        gc.collect()
        assert [each() for each in watched] == [None] * 5

    def test_reads_the_middle_of_an_input(self, example):
        kernel = AnyKernel(example.driver)
        example.between = lambda maker, x: maker.launch(kernel, 1, x[:, 1:])
        plan, x = example.ready(), make()
        plan.run(x, make())
        assert example.launched()[1] == [x[:, 1:].data_ptr()]

    @pytest.mark.parametrize(
        "between",
        [
            lambda maker, x: maker.copy(x),
            lambda maker, x: maker.full(x.shape, 0.0, x.dtype),
            lambda maker, x: negated(maker, negated(maker, x)),
        ],
        ids=["copy", "zeros", "two steps"],
    )
    def test_lets_torch_compute(self, example, between):
        kernel = AnyKernel(example.driver)

        def launches_it(maker, x):
            made = between(maker, x)
            maker.launch(kernel, 1, made)
            return made

        example.between = launches_it
        plan, x = example.ready(), make()
        _, made = plan.run(x, make())
        assert torch.equal(made, x)
        assert made.data_ptr() != x.data_ptr()
        assert example.launched()[1] == [made.data_ptr()]
        assert example.by_triton == 2

    def test_fills_a_workspace(self, example):
        kernel, values = AnyKernel(example.driver), []

        def between(maker, x):
            parts = torch.empty(3, 5, device="meta")
            maker.launch(kernel, 1, parts)
            maker.compute(lambda x: x.fill_(2.0), parts[1], like=parts[1])
            maker.compute(lambda x: values.append(x.clone()) or x, parts, like=parts)

        example.between = between
        plan = example.ready()
        plan.run(make(), make())
        assert (values[-1][1] == 2.0).all()
        assert not (values[-1][0] == 2.0).any()

    def test_copies_what_lies_at_odd_addresses(self, example):
        example.between = lambda maker, x: maker.launch(kernel, 1, maker.addressable(x))
        kernel = AnyKernel(example.driver)
        plan = example.ready(odd=True)
        x = torch.zeros(64 * 64 + 8, dtype=torch.bfloat16)[4 : 4 + 64 * 64].view(1, 64, 1, 64)
        plan.run(x, make())
        (copy,) = example.launched()[1]
        assert copy != x.data_ptr()
        assert copy % 16 == 0

    def test_says_what_it_does(self, example):
        example.between = lambda maker, x: maker.copy(x)
        lines = example.plan().steps
        assert [line.split()[0] for line in lines] == ["launch", "torch:", "launch"]


class TestTriton:
    """Where something is unusual Triton's own launcher is used, with the same arguments."""

    def test_for_a_profiler(self, example):
        plan = example.ready()
        with mock.patch.object(requests.knobs.runtime, "launch_enter_hook", print):
            plan.run(make(), make())
        assert example.by_triton == 4
        plan.run(make(), make())
        assert example.by_triton == 4

    def test_where_only_it_can_launch(self, example):
        seen = []

        class TritonsOnly(AnyKernel):
            def __getitem__(self, grid):
                return lambda *arguments, **constants: seen.append((grid, arguments, constants))

        example.first = TritonsOnly(example.driver)
        plan = example.plan()
        for number in range(1, 4):
            x = make()
            plan.run(x, make())
            assert len(seen) == number
            grid, (given, part, three), _ = seen[-1]
            assert (grid, three) == ((3,), 3)
            assert given is x
            assert part.shape == (1, 64, 1, 64)

    def test_for_a_number_too_wide_for_its_parameter(self, example):
        example.ready()
        plan = example.plan(number=2**40)
        for count in (1, 2):
            plan.run(make(), make())
            assert example.by_triton == 2 + count
            assert len(example.launched()) == 1  # the launch beside it

    def test_for_numbers_inside_of_tuples(self, example):
        seen = []

        class Takes:
            def __getitem__(self, grid):
                return lambda *arguments, **constants: seen.append(arguments)

        example.between = lambda maker, x: maker.launch(Takes(), 1, (x, 3, None))
        plan, x = example.ready(), make()
        plan.run(x, make())
        ((given, three, nothing),) = seen[-1]
        assert given is x
        assert (three, nothing) == (3, None)

    def test_another_device_is_made_current(self, example):
        plan = example.ready()
        made = mock.MagicMock()
        with (
            mock.patch.object(host, "_current_device", side_effect=[1, None]),
            mock.patch.object(host, "device_of", return_value=made) as entered,
        ):
            plan.run(make(), make())
        entered.assert_called_once_with(torch.device("cpu"))
        made.__enter__.assert_called_once()


def test_a_result_is_all_of_an_allocation(driver):
    maker = Maker(Call(None, torch.device("cpu"), (Layout.of(make()),)), ("x",))
    with pytest.raises(AssertionError, match="all of an allocation"):
        maker.finish((torch.empty(4, device="meta")[:2],))


def test_a_tensor_that_kernels_index_without_strides_is_copied_once():
    q = torch.empty(1, 4, 2, 16).transpose(1, 2)
    given = tensors_of_call(q, q, q, sinks=torch.empty(8)[::2], seqlens_k=torch.empty(1).int())
    maker = Maker(Call.of(None, given))
    for tensors in (maker.tensors, maker.tensors):
        assert tensors.q.stride() == q.stride()
        assert tensors.sinks.is_contiguous()
    assert maker.finish([]).steps == ["torch: _contiguous_copy"]


class TestNested:
    """Launches with numbers inside of tuples."""

    @staticmethod
    def plan(driver, types, kinds):
        """Return a plan of one such launch, and its kernel."""
        kernel = Kernel([*types, *SCRATCH], kinds)
        driver.types[kernel.compiled.function] = types
        maker = Maker(Call(None, torch.device("cpu"), (Layout.of(make()),) * 2), ("x", "y"))
        x, y = maker.inputs
        o, parts = torch.empty_like(x), maker.empty((2, 4096), torch.bfloat16)
        maker.launch(kernel, (3, 2), x, (7, (None, parts[1], 1), 2**40, y), o, 0.5, WIDTH=3)
        return maker.finish((o,)), kernel

    TYPES = ("u64", "u32", "u64", "u64", "u64", "u64", "f32")
    KINDS = ("*bf16", ("i32", ("constexpr", "*bf16", "constexpr"), "i64", "*bf16"), "*bf16", "fp32")

    def test_take_addresses_from_the_second_on(self, driver):
        plan, kernel = self.plan(driver, list(self.TYPES), self.KINDS)
        for _ in range(4):
            x, y = make(), make()
            (o,) = plan.run(x, y)
        assert len(kernel.launches) == 1
        assert len(driver.seen) == 3
        last = driver.seen[-1]
        assert (last.grid, last.stream) == ((3, 2, 1), STREAM)
        first, seven, part, *rest = last.values
        assert (first, seven) == (x.data_ptr(), 7)
        assert rest == [2**40, y.data_ptr(), o.data_ptr(), 0.5]
        again = driver.seen[-2].values
        assert part != 0
        assert again[0] != first or again[4] != rest[1]

    @pytest.mark.parametrize(
        ("types", "kinds"),
        [
            (("u64", "u64", "u64", "u64", "u64", "u64", "f32"), KINDS),
            (TYPES, ("*bf16", ("i32", "constexpr", "i64", "*bf16"), "*bf16", "fp32")),
            (TYPES, ("*bf16", ("i1", *KINDS[1][1:]), "*bf16", "fp32")),
            (TYPES, ("*bf16", KINDS[1][:3], "*bf16", "fp32")),
            (
                ("u64", "u32", "u64", "u32", "u64", "u64", "f32"),
                ("*bf16", (*KINDS[1][:2], "i32", "*bf16"), "*bf16", "fp32"),
            ),
        ],
    )
    def test_stay_with_triton_where_parameters_do_not_match(self, driver, types, kinds):
        """Those of another type, of another number, of an unknown one, and too large ones."""
        plan, kernel = self.plan(driver, list(types), kinds)
        for _ in range(3):
            plan.run(make(), make())
        assert len(kernel.launches) == 3
        assert driver.seen == []

    def test_stay_with_triton_while_somebody_watches(self, driver):
        plan, kernel = self.plan(driver, list(self.TYPES), self.KINDS)
        for _ in range(2):
            plan.run(make(), make())
        assert (len(kernel.launches), len(driver.seen)) == (1, 1)
        with mock.patch.object(host, "observed", return_value=True):
            plan.run(make(), make())
        assert (len(kernel.launches), len(driver.seen)) == (2, 1)

    def test_a_gradient_of_a_bias_runs_by_addresses(self, driver, kernels, monkeypatch):
        kernels["attention_bwd_shared_bias_kernel"] = AnyKernel(driver)
        for name in ("attention_bwd_shared_bias_kernel", "attention_bwd_rows_kernel"):
            # The row terms are those of Hopper's own kernels.
            monkeypatch.setattr(portable, name, kernels.get(name))
        problem, other = (draw(CASES["bias"], "cpu") for _ in range(2))
        for each in (problem, other):
            each.spec = each.spec._replace(needs_dbias=True)
        o, lse = plan_forward(other).run(*tensors_of_forward(other))
        plan, fresh = plan_backward(problem, o, lse), plan_backward(other, o, lse)
        for _ in range(3):
            plan.run(*gradient_of(problem, o, lse))
        fresh.run(*gradient_of(other, o, lse))
        given, tensors = gradient_of(other, o, lse), tensors_of(other, o=o, lse=lse)
        with mock.patch.object(AnyKernel, "__getitem__", side_effect=AssertionError):
            again, results = launches_of(driver, lambda: plan.run(*given), tensors)
            anew, _ = launches_of(driver, lambda: fresh.run(*given), tensors)
        assert [each[1:] for each in again] == [each[1:] for each in anew]
        assert len(again) == len(plan.steps)
        *_, dbias, _ = results
        assert (dbias.shape, dbias.dtype) == (other.bias.shape, other.bias.dtype)


class Watch(TorchDispatchMode):
    """Notes what a planner lets torch do besides allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        harmless = ("empty", "view", "transpose", "permute", "select", "split", "unsqueeze",
                    "as_strided", "unbind", "slice", "expand", "detach", "alias")  # fmt: skip
        if not any(word in name for word in harmless):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


CASES = {
    "plain": AttentionCall(70, 80, (4, 4), (64, 64), 2, BRAIN),
    "causal_groups": AttentionCall(70, 80, (4, 2), (128, 128), 2, HALF, CAUSAL),
    "wide": AttentionCall(70, 80, (4, 2), (256, 256), 2, BRAIN, CAUSAL),
    "d_192": AttentionCall(70, 80, (4, 2), (192, 128), 1, BRAIN, CAUSAL),
    "key_lengths": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, seqlens_k=(3, 80)),
    "alibi": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="heads"),
    "alibi_sequences": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, alibi="sequences"),
    "softcap": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, softcap=30.0),
    "dropout": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, dropout_p=0.1),
    "bias": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, bias=(1, 4, 70, 80)),
    "mask": AttentionCall(200, 200, (4, 2), (64, 64), 2, BRAIN, mask=(1, 1), mask_tile=(128, 128)),
    "sinks": AttentionCall(70, 80, (4, 2), (64, 64), 2, BRAIN, CAUSAL, sinks=True),
    "packed": AttentionCall(heads=(4, 2), dtype=BRAIN, window=CAUSAL, lengths=((70, 80), (5, 9))),
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
    monkeypatch.setattr(attention_fwd_launch, "counter_of", lambda device, stream: counter)
    monkeypatch.setattr(launches, "tensors", {})
    return found


def draw(call: AttentionCall, device: str) -> Problem:
    """Return tensors of a call; of all of them a random mask has as many tiles."""
    if call.mask is not None:
        torch.manual_seed(0)
    return make_problem(call, device)


def tensors_of_forward(problem: Problem):
    return tensors_of_call(problem.q, problem.k, problem.v, **problem.tensors)


def plan_forward(problem: Problem, is_few: bool = False):
    with mock.patch.object(attention_few, "is_faster", return_value=is_few):
        return attention.made_fwd(Call.of(problem.spec, tensors_of_forward(problem)))


def gradient_of(problem: Problem, o: Tensor, lse: Tensor, dlse: Tensor | None = None):
    return (problem.do, dlse, o, lse, *tensors_of_forward(problem))


def plan_backward(problem: Problem, o: Tensor, lse: Tensor, dlse: Tensor | None = None):
    return attention.plan_bwd(Call.of(problem.spec, gradient_of(problem, o, lse, dlse)))


# Where a Python begins that is linked to a fixed place, as Debian's is; no number is as large.
_FIRST_ADDRESS = 1 << 22


def named(launches, tensors) -> list[object]:
    """Return what launches were, with names for addresses; those of no tensor are numbered."""
    names = {x.data_ptr(): name for name, x in tensors.items()}

    def name_of(value):
        if isinstance(value, tuple):
            return name_of(value[0]), value[1]
        if not isinstance(value, int) or value < _FIRST_ADDRESS:
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


def assert_runs_like_a_new_plan(driver, kernels, planner, given_of, problem, other, **more):
    """Compare the launches of a plan that has run for others with those of a new one."""
    plan = planner(problem)
    for _ in range(3):
        plan.run(*given_of(problem))
    compiled = {name: kernel.launches for name, kernel in kernels.items()}
    assert sum(compiled.values()) > 0
    tensors = tensors_of(other, **more)
    again, results = launches_of(driver, lambda: plan.run(*given_of(other)), tensors)
    fresh = planner(other)
    anew, expected = launches_of(driver, lambda: fresh.run(*given_of(other)), tensors)
    assert {name: kernel.launches for name, kernel in kernels.items()} == compiled
    assert again == anew != []
    for result, want in zip(results, expected, strict=True):
        assert (result is None) == (want is None)
        if want is not None:
            assert (result.shape, result.stride(), result.dtype) == (
                want.shape, want.stride(), want.dtype
            )  # fmt: skip


FEW = {
    "one": AttentionCall(1, 1500, (4, 2), (64, 64), 2, BRAIN),
    "one_alone": AttentionCall(1, 1500, (4, 2), (64, 64), 1, BRAIN, CAUSAL),
    "causal": AttentionCall(40, 256, (6, 2), (64, 64), 2, HALF, CAUSAL),
    "full": AttentionCall(70, 1900, (2, 2), (64, 64), 1, BRAIN),
    "lengths_sinks": AttentionCall(
        3, 160, (4, 2), (64, 64), 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 160), sinks=True
    ),
}  # fmt: skip


class TestAttention:
    """A plan starts for other tensors what a plan of theirs would start."""

    @pytest.mark.parametrize("name", CASES)
    def test_forward(self, driver, kernels, name):
        problem, other = (draw(CASES[name], "cpu") for _ in range(2))
        assert_runs_like_a_new_plan(
            driver, kernels, plan_forward, tensors_of_forward, problem, other
        )

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_backward(self, driver, kernels, name, deterministic):
        problem, other = (draw(CASES[name], "cpu") for _ in range(2))
        for each in (problem, other):
            each.spec = each.spec._replace(deterministic=deterministic, needs_dbias=False)
        o, lse = plan_forward(other).run(*tensors_of_forward(other))
        assert_runs_like_a_new_plan(
            driver, kernels, lambda p: plan_backward(p, o, lse), lambda p: gradient_of(p, o, lse),
            problem, other, o=o, lse=lse,
        )  # fmt: skip

    @pytest.mark.parametrize("name", FEW)
    def test_few_queries(self, driver, kernels, name):
        problem, other = (draw(FEW[name], "cpu") for _ in range(2))
        assert_runs_like_a_new_plan(
            driver, kernels, lambda p: plan_forward(p, is_few=True), tensors_of_forward, problem,
            other,
        )  # fmt: skip

    @pytest.mark.parametrize("name", [*CASES, *FEW])
    def test_planning_computes_nothing(self, driver, kernels, name):
        """What torch does while a plan is made is done once; `compute` says what is done again."""
        problem = draw((CASES | FEW)[name], "cpu")
        spec = problem.spec = problem.spec._replace(needs_dbias=False)
        plan_forward(problem, is_few=name in FEW)  # makes what lasts
        o, lse = plan_forward(problem).run(*tensors_of_forward(problem))
        given = Call.of(spec, gradient_of(problem, o, lse))
        with Watch() as watch:
            plan_forward(problem, is_few=name in FEW)
            attention.plan_bwd(given)
        assert watch.seen == []

    @pytest.mark.parametrize("name", ["sinks", "key_lengths", "alibi", "bias"])
    def test_runs_by_addresses_alone(self, driver, kernels, name):
        """Calls with sinks, lengths, slopes or a bias launch no kernel by Triton's launcher."""
        problem = draw(CASES[name], "cpu")
        problem.spec = problem.spec._replace(needs_dbias=False)
        forward = plan_forward(problem)
        o, lse = forward.run(*tensors_of_forward(problem))
        backward = plan_backward(problem, o, lse)
        backward.run(*gradient_of(problem, o, lse))
        with mock.patch.object(host, "launch_now", side_effect=AssertionError):
            forward.run(*tensors_of_forward(problem))
            backward.run(*gradient_of(problem, o, lse))

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_the_gradient_of_sinks_is_launched(self, driver, kernels, deterministic):
        """A kernel adds it up, so that torch has nothing to do in a run."""
        self.test_backward(driver, kernels, "sinks", deterministic)
        problem = draw(CASES["sinks"], "cpu")
        o, lse = plan_forward(problem).run(*tensors_of_forward(problem))
        given = gradient_of(problem, o, lse)
        plan = plan_backward(problem, o, lse)
        plan.run(*given)
        driver.seen.clear()
        *_, dsinks = plan.run(*given)
        assert all(step.startswith("launch") for step in plan.steps)
        last = driver.seen[-1]
        assert last.grid == (4, 1, 1)
        sinks, _, _, place, heads, count, rows = last.values
        assert (sinks, place) == (problem.sinks.data_ptr(), dsinks.data_ptr())
        assert (heads, count, rows) == (4, 2 * 128, 128)
        assert (dsinks.shape, dsinks.dtype) == ((4,), torch.float32)


@pytest.fixture
def fresh(monkeypatch):
    """Let memory of plans hold NaN."""

    def poisoned(*made):
        x = _plans_fresh(*made)
        return x.fill_(255) if x.dtype == torch.uint8 else x.fill_(float("nan"))

    _plans_fresh = host._fresh
    monkeypatch.setattr(host, "_fresh", poisoned)


class Both:
    """The plans of both passes of a problem, made at its first call and run for others."""

    def __init__(self) -> None:
        self._forward = self._backward = None

    def __call__(self, p: Problem) -> dict[str, Tensor]:
        """Return the results."""
        if self._forward is None:
            self._forward = plan_forward(p)
        o, lse = self._forward.run(*tensors_of_forward(p))
        if self._backward is None:
            self._backward = plan_backward(p, o, lse, p.dlse)
        grads = self._backward.run(*gradient_of(p, o, lse, p.dlse))
        names = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
        found = dict(zip(names, (o, lse, *grads), strict=True))
        return {name: x for name, x in found.items() if x is not None}


def judge(problem: Problem, results: dict[str, Tensor]) -> None:
    (assert_right if "dq" in results else assert_forward_right)(problem, results)


class FewOnly:
    """The same of the forward pass by the paged kernels."""

    def __init__(self) -> None:
        self._plan = None

    def __call__(self, p: Problem) -> dict[str, Tensor]:
        """Return the results."""
        if self._plan is None:
            self._plan = plan_forward(p, is_few=True)
        return dict(zip(("o", "lse"), self._plan.run(*tensors_of_forward(p)), strict=True))


CALLS = [
    *(pytest.param(call, Both, id=name) for name, call in CASES.items()),
    *(pytest.param(call, FewOnly, id=f"few_{name}") for name, call in FEW.items()),
]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(("call", "planned"), CALLS)
    def test_later_calls_are_right(self, fresh, call, planned):
        run = planned()
        for _ in range(5):
            problem = draw(call, "cuda")
            judge(problem, run(problem))

    @pytest.mark.parametrize(("call", "planned"), CALLS)
    def test_in_a_graph_and_after_it(self, fresh, call, planned):
        problem, run = draw(call, "cuda"), planned()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # what a first launch does may not be captured
            for _ in range(3):
                run(problem)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(problem)
        for _ in range(2):
            graph.replay()
            judge(problem, results)
            refill(problem, draw(call, "cuda"))
        eager = run(problem)
        graph.replay()
        judge(problem, eager)
        judge(problem, results)

    @pytest.mark.parametrize(("call", "planned"), CALLS)
    def test_on_a_side_stream(self, fresh, call, planned):
        problem, run = draw(call, "cuda"), planned()
        for _ in range(3):
            run(problem)
        other, side = draw(call, "cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # what runs elsewhere reads the tensors as they were
            refill(problem, other)
            results = run(problem)
        side.synchronize()
        judge(problem, results)

    def test_tensors_that_lie_otherwise_are_right(self, fresh):
        problem = draw(CASES["causal_groups"], "cuda")
        for name in ("q", "v", "do"):
            x = getattr(problem, name)
            odd = torch.empty(x.numel() + 4, dtype=x.dtype, device="cuda")[4:].view(x.shape)
            setattr(problem, name, odd.copy_(x))
        run = Both()
        for _ in range(3):
            judge(problem, run(problem))

    @pytest.mark.parametrize("extra", ["nothing", "sinks", "seqlens_k", "alibi_slopes", "bias"])
    def test_the_public_call_and_its_gradient_are_right(self, fresh, extra):
        name = {"seqlens_k": "key_lengths", "alibi_slopes": "alibi"}.get(extra, extra)
        call = CASES["causal_groups" if extra == "nothing" else name]
        for _ in range(5):
            p = draw(call, "cuda")
            leaves = {"q": p.q, "k": p.k, "v": p.v}
            given = {} if extra == "nothing" else {extra: getattr(p, extra)}
            leaves |= {n: x for n, x in given.items() if n in ("bias", "sinks")}
            for x in leaves.values():
                x.requires_grad_()
            o, lse = ops.attention(
                p.q, p.k, p.v, causal=call.window == CAUSAL, return_lse=True, backend="gluon",
                **given,
            )  # fmt: skip
            grads = torch.autograd.grad((o, lse), list(leaves.values()), (p.do, p.dlse))
            results = {"o": o, "lse": lse} | {
                f"d{n}": x for n, x in zip(leaves, grads, strict=True)
            }
            for x in leaves.values():
                x.requires_grad_(False)
            judge(p, {n: x.detach() for n, x in results.items()})


def refill(problem: Problem, other: Problem) -> None:
    """Give the tensors of a problem the contents of another's."""
    theirs = tensors_of(other, dlse=other.dlse)
    for name, x in tensors_of(problem, dlse=problem.dlse).items():
        x.copy_(theirs[name])
    problem.visible = other.visible
