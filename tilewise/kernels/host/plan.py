"""Plans on Hopper: launches past Triton, to which a call gives nothing but addresses.

What `launch_now` works out, types, kinds, descriptors and numbers, follows from a call's spec
and layouts. A launch of a plan goes that way the first time; from then on it writes the addresses
into parameters that are ready, encodes the descriptors that it has not met at these addresses, and
starts the kernel. What is allocated for a call besides its results is one workspace.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels import plan
from tilewise.kernels.host import descriptors
from tilewise.kernels.host.descriptors import Described
from tilewise.kernels.host.launch import (
    Addressed,
    Calls,
    Prepared,
    calls_of,
    kind_of_integer,
    launch_now,
    picker,
    prepare_nested,
)
from tilewise.kernels.host.requests import observed
from tilewise.kernels.plan import Buffer, Place, Results, device_of

__all__ = ["LaunchPlan", "Maker"]

_PIECE = 512  # bytes; what torch's allocator aligns to
_new = tuple.__new__  # a named tuple in a third of the time of its class

try:  # what torch's own compiler allocates with, in a third of the time
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
        _empty_strided_cuda as _fresh,
    )
except ImportError:  # an earlier or a later torch

    def _fresh(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


try:
    _current_device = torch._C._cuda_getDevice  # torch.cuda's own asks first if CUDA is there
except AttributeError:  # a torch without CUDA

    def _current_device() -> int:
        raise AssertionError("a launch that takes addresses needs CUDA")


class Run(plan.Run):
    """The buffers of one run of a plan: a call's inputs, results and scratch.

    Attributes:
        at: the address of each buffer by its number, and, from the end of the list, addresses
            inside of buffers; 0 before a buffer is made.
        workspace: the memory of all scratch buffers, uint8; None if there are none.
        plan: the plan that runs.
    """

    __slots__ = ("at", "plan", "workspace")

    def __init__(
        self,
        tensors: list[Any],
        stream: int,
        at: list[int],
        workspace: Tensor | None,
        its_plan: LaunchPlan,
    ) -> None:
        self.tensors, self.stream = tensors, stream
        self.at, self.workspace, self.plan = at, workspace, its_plan

    def buffer(self, index: int) -> Tensor:
        """Return a buffer of the run as a tensor; a scratch buffer is a view of the workspace.

        Args:
            index: the number of the buffer.
        """
        x: Tensor | None = self.tensors[index]
        if x is None:
            assert self.workspace is not None
            first, each = self.plan.pieces[index]
            x = self.workspace[first : first + each.num_bytes].view(each.dtype)
            if each.whole is not None:
                x = x.view(each.whole.shape)
            self.tensors[index] = x
        return x

    def store(self, index: int, x: Tensor) -> None:
        """Make `x` the buffer with the number `index`, and write its addresses to `at`."""
        self.tensors[index] = x
        self.at[index] = x.data_ptr()
        self.plan.place_inner(self.at, index)


class Launch(plan.Launch):
    """A launch of one kernel in a plan, by Triton's launcher at first and by addresses later.

    Args:
        leaves: the arguments one by one, those of tuples as well: with a Place for each tensor,
            and a Described of one for each descriptor.
        tuples: the place among the arguments, the type and the length of each tuple.

    Attributes:
        addressed: the same launch by addresses alone; None until the kernel is prepared.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | plan.Grid,
        leaves: list[Any],
        tuples: list[tuple[int, type, int]],
        options: dict[str, Any],
    ) -> None:
        super().__init__(kernel, grid, (), options)
        self._leaves, self._tuples = leaves, tuples
        self.addressed: Addressed | None = None
        self._is_tritons = False  # only its launcher starts this

    def run(self, run: plan.Run) -> None:
        """Start the kernel on the buffers of a run.

        It is started by addresses if it is prepared, else by `launch_now`, which prepares it. While
        launches are observed, see `requests.observed`, it goes through `launch_now`, too.
        """
        assert isinstance(run, Run)
        addressed = self.addressed
        if addressed is None and run.plan.has_addresses and not self._is_tritons:
            addressed = self._address(self._find())
        if addressed is None or observed():
            prepared = launch_now(self.kernel, self.grid, *self._filled(run), **self.options)
            if addressed is None and not self._is_tritons:
                self._address(prepared)
            return
        addressed.run(run)

    def _address(self, prepared: Prepared | None) -> Addressed | None:
        """Set `addressed` and return it; None where only Triton's launcher can start the kernel.

        Args:
            prepared: the prepared kernel, or None if there is none.
        """
        if prepared is None:
            return None
        try:
            self.addressed = Addressed(prepared, self.grid, self._leaves)
        except struct.error:  # a number that does not fit its parameter
            self._is_tritons = True
        return self.addressed

    def _filled(self, run: plan.Run) -> list[Any]:
        """Return the arguments for Triton's launcher, with a run's tensors for their places.

        Descriptors are made of `Described` ones, and tuples are put together again.
        """
        found: list[Any] = []
        for leaf in self._leaves:
            if type(leaf) is Place:
                found.append(run.tensor(leaf))
            elif type(leaf) is Described:
                found.append(descriptors.at(leaf, run.tensor(leaf.base).data_ptr()))
            else:
                found.append(leaf)
        for index, kind, count in self._tuples:
            fields = found[index : index + count]
            made = kind(*fields) if hasattr(kind, "_fields") else tuple(fields)
            found[index : index + count] = [made]
        return found

    def _find(self) -> Prepared | None:
        """Return the kernel that an earlier launch of equal types and kinds prepared, or None."""
        launched = tuple(map(_LAUNCHED_AS.__getitem__, map(type, self._leaves)))
        calls = calls_of(self.kernel, launched, **self.options)
        return None if calls is None else calls.prepared.get(_kind_of(self._leaves, calls))


class NestedLaunch(plan.Launch):
    """A launch in a plan with numbers inside of tuples, which Triton may compile in.

    Attributes:
        addressed: the launch by addresses alone, for these numbers; None until the kernel is
            prepared.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.addressed: Addressed | None = None
        self._is_decided = False

    def run(self, run: plan.Run) -> None:
        """Start the kernel on the buffers of a run, by addresses if it is prepared, else by Triton.

        The first launch by Triton prepares it, where that is possible.
        """
        assert isinstance(run, Run)
        if self.addressed is not None and not observed():
            self.addressed.run(run)
            return
        grid = self.grid if isinstance(self.grid, tuple) else (self.grid,)
        compiled = self.kernel[grid](*plan.filled(self.arguments, run), **self.options)
        if run.plan.has_addresses and not (self._is_decided or observed()):
            self._address(compiled)

    def _address(self, compiled: Any) -> None:
        found, self._is_decided = prepare_nested(compiled, self.arguments), True
        if found is not None:
            prepared, leaves = found
            with contextlib.suppress(struct.error):  # a number that does not fit its parameter
                self.addressed = Addressed(prepared, self.grid, leaves)


def _kind_of(leaves: list[Any], calls: Calls) -> tuple[Any, ...]:
    """Return the key that `Calls.kind_of` would return for the tensors that places stand for.

    Args:
        leaves: the arguments of a launch one by one, with a Place for each tensor and a Described
            for each descriptor.
        calls: the memory of launches with arguments of these types.
    """
    return (
        *[leaves[i].form.kind for i in calls.descriptors],
        *[leaves[i].kind for i in calls.tensors],
        *[kind_of_integer(leaves[i]) for i in calls.specialised],
    )


class _Types(dict[type, type]):
    def __missing__(self, kind: type) -> type:
        self[kind] = kind
        return kind


_LAUNCHED_AS = _Types({Place: Tensor, Described: TensorDescriptor})


class LaunchPlan(plan.LaunchPlan):
    """A plan whose launches take addresses; on a CPU, where kernels are emulated, tensors.

    Attributes:
        pieces: the first byte in the workspace and the buffer, of each scratch buffer by number.
        has_addresses: whether launches take addresses, as on a GPU.
        inner: the places inside of buffers: the buffer's number, the offset in bytes, and the index
            in `Run.at`.
    """

    # inner: as the attribute, slots by buffer and offset.
    def __init__(
        self,
        device: torch.device,
        num_inputs: int,
        buffers: list[Buffer],
        *rest: Any,
        inner: dict[tuple[int, int], int],
    ) -> None:
        super().__init__(device, num_inputs, buffers, *rest)
        self._made: list[tuple[int, tuple[Any, ...]]] = []
        size = 0
        self.pieces: dict[int, tuple[int, Buffer]] = {}
        for index in range(num_inputs, len(buffers)):
            each = buffers[index]
            if each.kind == "work":
                self.pieces[index] = size, each
                size += -(-each.num_bytes // _PIECE) * _PIECE
            elif each.kind == "result":
                assert each.whole is not None
                layout = (tuple(each.whole.shape), each.whole.stride(), each.dtype)
                self._made.append((index, layout))
        self._makes_first = any(index == self._results[0] for index, _ in self._made)
        self._workspace = ((size,), (1,), torch.uint8)
        self.inner = [(index, offset, slot) for (index, offset), slot in inner.items()]
        self.has_addresses = _is_on_gpu(device)
        self._index = device.index
        # What a run begins with, and which inputs it has.
        self._given = [i for i in range(num_inputs) if buffers[i].whole is not None]
        self._at = [0] * (len(buffers) + len(inner))
        self._unmade = [None] * (len(buffers) - num_inputs + 1)  # one stays None, for no result
        self._found = picker([-1 if i is None else i for i in self._results])
        self._steps: list[Any] = self.actions
        self._is_settled = False

    def place_inner(self, at: list[int], buffer: int) -> None:
        """Write the addresses of all places inside of a buffer that has just been made.

        Args:
            at: the addresses of a run, changed in place.
            buffer: the number of the buffer.
        """
        for index, offset, slot in self.inner:
            if index == buffer:
                at[slot] = at[buffer] + offset

    def run(self, *tensors: Tensor | None, out: Tensor | None = None) -> Results:
        """Run the plan for tensors with the dtypes, sizes and strides of the planned ones.

        Args:
            tensors: the tensors of a call, in the order of the plan.
            out: memory for the first result; None allocates it.

        Returns:
            The results, None for those that the plan does not have.
        """
        if out is not None and not (self.has_addresses and self._makes_first):
            return super().run(*tensors, out=out)
        if self.has_addresses and _current_device() != self._index:
            with device_of(self.device):
                return self.run(*tensors, out=out)
        run = self._begin(tensors, out)
        for step in self.actions if observed() else self._steps:
            step.run(run)
        if not self._is_settled:
            self._settle()
        return tuple(self._found(run.tensors))

    def again(self, out: Tensor, tensors: Sequence[Tensor | None]) -> _Again | None:
        """Return an object that repeats the launches with new addresses in one set of buffers.

        The results and scratch buffers are allocated here.

        Args:
            out, tensors: the first result and the tensors of a call.

        Returns:
            The object; None unless all steps are launches that take nothing but addresses, or while
            a graph is captured, or if another device is current.
        """
        if not (self.has_addresses and self._makes_first) or self._asked:
            return None
        if not all(isinstance(step, Addressed) for step in self._steps):
            return None
        if _current_device() != self._index or torch.cuda.is_current_stream_capturing():
            return None
        first = self._results[0]
        assert first is not None
        return _Again(self._begin(tensors, out), first, self._given, self._steps)

    def _settle(self) -> None:
        """Replace each launch by its addressed form where there is one, for later runs."""
        steps = [getattr(action, "addressed", None) or action for action in self.actions]
        self._is_settled = not any(isinstance(step, Launch) for step in steps)
        self._steps = steps

    def _begin(self, tensors: Sequence[Tensor | None], out: Tensor | None = None) -> Run:
        """Allocate the results and buffers of a run, and return it with all addresses.

        Args:
            tensors: the tensors of the call.
            out: memory for the first result; None allocates it.
        """
        if not self.has_addresses:
            slow = super()._begin(tensors)
            return Run([*slow.tensors, None], 0, self._at.copy(), None, self)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        at = self._at.copy()
        found: list[Any] = [*tensors, *self._unmade]
        for index in self._given:
            at[index] = found[index].data_ptr()
        for index, made in self._made:
            if out is None or index != self._results[0]:
                x = _fresh(*made)
            else:
                x = out
            found[index] = x
            at[index] = x.data_ptr()
        for index, ask in self._asked:
            x = found[index] = ask(stream)
            at[index] = x.data_ptr()
        workspace = None
        if self.pieces:
            workspace = _fresh(*self._workspace)
            start = workspace.data_ptr()
            for index, (first, _) in self.pieces.items():
                at[index] = start + first
        for index, offset, slot in self.inner:
            at[slot] = at[index] + offset
        return Run(found, stream, at, workspace, self)


class _Again:
    """A repeater of a plan's launches in the buffers of one call; made by `LaunchPlan.again`.

    Each repetition overwrites the scratch of the one before; inputs and the first result are new
    each time. A captured graph would use the buffers after they are freed, so it is refused.

    Args:
        run: the buffers of the call.
        first: the number of the buffer that is the first result.
        inputs: the numbers of the inputs that the plan has.
        steps: the launches of the plan, in order.
    """

    def __init__(self, run: Run, first: int, inputs: Sequence[int], steps: list[Addressed]) -> None:
        self._buffers, self._first, self._inputs, self._steps = run, first, inputs, steps
        self._device = run.plan.device.index
        self._inner = [each for each in run.plan.inner if each[0] in {first, *inputs}]
        for index in (first, *inputs):  # of these addresses are enough
            run.tensors[index] = None

    def run(self, out: Tensor, tensors: Sequence[Tensor | None]) -> bool:
        """Launch the plan for other tensors, with its scratch in the kept buffers.

        Args:
            out: the memory of the first result.
            tensors: the tensors of the call, with the sizes and strides of the plan's.

        Returns:
            True; False, and nothing is launched, where the current device or stream differs, an
                address is no multiple of 16 bytes, a graph is captured, or launches are observed.
        """
        run, at = self._buffers, self._buffers.at
        if _current_device() != self._device or observed():
            return False
        if torch._C._cuda_getCurrentRawStream(self._device) != run.stream:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        odd = at[self._first] = out.data_ptr()
        for index in self._inputs:
            x = tensors[index]
            assert x is not None
            address = at[index] = x.data_ptr()
            odd |= address
        if odd & 15:  # kernels were made for multiples of 16 bytes
            return False
        for index, offset, slot in self._inner:
            at[slot] = at[index] + offset
        for step in self._steps:
            step.run(run)
        return True


class Maker(plan.Maker):
    """A maker of plans whose launches take addresses: the `kernels.plan.Maker` of GPU kernels.

    A planner calls its methods in the order of the steps; `finish` returns the plan.

    Args:
        call: the call to plan, with the layouts of its tensors.
        names: as of `kernels.plan.Maker`.
    """

    def __init__(self, call: plan.Call, *names: Sequence[str]) -> None:
        super().__init__(call, *names)
        self._inner: dict[tuple[int, int], int] = {}

    def _plan(self, *kinds: Any) -> LaunchPlan:
        return LaunchPlan(*kinds, inner=self._inner)

    def _place_of_view(self, x: Tensor) -> Place:
        found = super()._place_of_view(x)
        if found.offset == 0:
            return found
        # Those of buffers come first, and how many there will be is not known yet.
        slot = self._inner.setdefault((found.buffer, found.offset), -1 - len(self._inner))
        return found._replace(slot=slot)

    def launch(self, kernel: Any, grid: int | plan.Grid, *arguments: Any, **options: Any) -> None:
        """Note a launch of `kernel` in the plan; nothing starts until the plan runs.

        Args:
            kernel: a kernel of Triton or Gluon.
            grid: the number of programs; a tuple for several dimensions.
            arguments: the arguments by position: numbers, None, tensors that the maker knows,
                descriptors, and tuples of them.
            options: constexpr arguments by name, and num_warps and other options of the compiler.
        """
        leaves, tuples = list(arguments), list[tuple[int, type, int]]()
        places = self._places
        for index in _visited(tuple(map(type, arguments))):
            argument = arguments[index]
            if type(argument) is Described:
                base, shape, strides, form = argument
                base = places.get(id(base)) or self.place(base)
                leaves[index] = _new(Described, (base, shape, strides, form))
                continue
            if not isinstance(argument, tuple):
                leaves[index] = places.get(id(argument)) or self.placed(argument)
                continue
            if any(isinstance(field, int | tuple) for field in argument):
                given = self.placed(arguments)
                self._actions.append(NestedLaunch(kernel, grid, given, options))
                return
            tuples.append((index, type(argument), len(argument)))
            leaves[index : index + 1] = [
                x if x is None else places.get(id(x)) or self.placed(x) for x in argument
            ]
        tuples.reverse()
        self._actions.append(Launch(kernel, grid, leaves, tuples, options))

    def addressable(self, x: Tensor) -> Tensor:
        """Return `x` if TMA can read it in place, else a tensor for a copy that the plan will make.

        TMA reads `x` in place if it has elements, an aligned start and strides of multiples of 16
        bytes.
        """
        if self.is_aligned(x) and x.numel() > 0:
            # Strides of a contiguous tensor are multiples of its last dim's.
            if x.is_contiguous() and x.shape[-1] * x.itemsize % 16 == 0:
                return x
            if x.stride(-1) == 1 and not descriptors.why_no_descriptor(x):
                return x
        return self.copy(x)


@functools.cache
def _visited(types: tuple[type, ...]) -> list[int]:
    """Return the indices of a launch's arguments that are no numbers and not None, the last first.

    The order is descending because a tuple is replaced by its fields, which shifts the arguments
    after it.

    Args:
        types: the types of the arguments.
    """
    numbers = (int, float, bool, type(None))
    return [index for index in reversed(range(len(types))) if types[index] not in numbers]
