"""A call is planned once and run many times: what it allocates, launches and computes, as data.

    Call -> backend.plan_fwd(call) -> Plan | Refusal;  plan.run(*tensors) -> results

A `Call` is a spec and how each tensor lies in memory, all but its address. A backend's planner
turns it into a `Plan`, which depends on nothing else and is run for every call like it. Planners of
GPU kernels write down with a `Maker` what they would do: tensors in it are torch's own, on the
device "meta", so that shapes, strides and views are torch's, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.tiles.paged import TileConfig

__all__ = [
    "FP8_TENSORS",
    "GRADIENT_TENSORS",
    "Again",
    "Call",
    "LaunchPlan",
    "Layout",
    "Maker",
    "Plan",
    "Refusal",
    "Results",
    "contiguous",
    "run_once",
]

Results = tuple[Tensor | None, ...]
Grid = tuple[int, int] | tuple[int, int, int]  # CTAs along each axis; an int is those of one
GRADIENT_TENSORS = ("do", "dlse", "o", "lse", *AttentionTensors._fields)
FP8_TENSORS = ("q_scale", "k_scale", "v_scale", "rotation", *AttentionTensors._fields)
_META = torch.device("meta")
_ALIGNMENT = 16  # bytes: kernels are compiled for multiples of it, and again for other addresses
_new = tuple.__new__  # a named tuple in a third of the time of its class


class Layout(NamedTuple):
    """How a tensor lies in memory, but for its address.

    Attributes:
        is_aligned: True if its address is a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool = True

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return _new(cls, (x.shape, x.stride(), x.dtype, x.data_ptr() % _ALIGNMENT == 0))

    def meta(self) -> Tensor:
        """Return a tensor without memory that lies so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class Call(NamedTuple):
    """All that decides how a call is computed.

    Attributes:
        device: the device of its tensors.
        layouts: layouts of the fields of `AttentionTensors`, None for those that were not given; a
            gradient has those of do, dlse, o and lse before them, attention in 8 bits has those of
            `FP8_TENSORS`. Paged attention has those of the fields of `PagedTensors` and of the
            tensors that `PagedTensors.of` names, attention over latents those of `LatentTensors`;
            see `QuantizeSpec` for tensors to quantise.
    """

    spec: Any  # AttentionSpec | PagedSpec | Fp8Spec | QuantizeSpec: who plans knows which
    device: torch.device
    layouts: tuple[Layout | None, ...]

    @classmethod
    def of(cls, spec: Any, tensors: Sequence[Tensor | None]) -> Call:
        """Return the call of these tensors, in the order of `layouts`."""
        first = next(x for x in tensors if x is not None)
        layouts = [x if x is None else Layout.of(x) for x in tensors]
        return cls(spec, first.device, tuple(layouts))

    def gradient(self, spec: AttentionSpec) -> Call:
        """Return the call of its gradient, where gradients of o alone come in contiguous."""
        q = self.layouts[0]
        assert q is not None
        o = (*q.shape[:-1], spec.v_head_dim)
        lse = (o[1], o[0]) if spec.is_varlen else (o[0], o[2], o[1])
        rows = contiguous(lse, torch.float64 if q.dtype == torch.float64 else torch.float32)
        do = contiguous(o, q.dtype)
        return Call(spec, self.device, (do, None, do, rows, *self.layouts))


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """Return how a fresh tensor lies."""
    return _new(Layout, (shape, _steps(shape), dtype, True))


@functools.lru_cache(maxsize=4096)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


class Refusal(NamedTuple):
    """The answer of a backend that has no plan for a call, with the reason."""

    reason: str


def run_once(
    planner: Callable[[Call], Plan | Refusal], spec: AttentionSpec, tensors: AttentionTensors
) -> Results:
    """Plan a forward pass and run it once, as a part of another plan's run.

    Raises:
        UnsupportedError: the planner refuses.
    """
    plan = planner(Call.of(spec, tensors))
    if isinstance(plan, Refusal):
        raise UnsupportedError(plan.reason)
    return plan.run(*tensors)


class Plan(Protocol):
    """How a backend runs a call.

    Attributes:
        tiles: the tiles of each part, where the backend has a table of them.
        steps: the steps of a run, a line each.
    """

    @property
    def tiles(self) -> dict[str, TileConfig]: ...

    @property
    def steps(self) -> list[str]: ...

    def run(self, *tensors: Tensor | None) -> Results:
        """Run the plan for tensors with the layouts of its call; results are contiguous."""


class Again(Protocol):
    """Calls of a plan that follow one another on a stream, in the same buffers."""

    def run(self, out: Tensor, tensors: Sequence[Tensor | None]) -> bool:
        """Run the plan with its only result in `out`; False, and nothing runs, where that is
        impossible."""


class View(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


class Place(NamedTuple):
    """A tensor of a plan: which of its buffers it lies in; `view` is None for a buffer itself.

    Attributes:
        kind: the facts for which kernels are compiled: the dtype, whether it starts at a multiple
            of 16 bytes, and the device.
        slot: the index of its address in the list of a run; a buffer has its number.
    """

    buffer: int
    offset: int  # bytes
    view: View | None
    kind: tuple[torch.dtype, bool, torch.device]
    slot: int

    def fill(self, run: Run) -> Tensor:
        """Return the tensor."""
        return run.tensor(self)


class Buffer(NamedTuple):
    """Memory that steps read or write.

    Attributes:
        kind: "input", "result" (allocated by itself), "work" (allocated for the call), "made" (by a
            step) or "asked" (for when a call begins).
        whole: the tensor that it is, on "meta"; None where only views of it are known.
    """

    kind: str
    whole: Tensor | None
    num_bytes: int
    dtype: torch.dtype


class Run:
    """The buffers of one call.

    Attributes:
        tensors: the tensor of each buffer; None until it is made.
        stream: the address of the current CUDA stream, 0 on a CPU.
    """

    __slots__ = ("stream", "tensors")

    def __init__(self, tensors: list[Any], stream: int) -> None:
        self.tensors, self.stream = tensors, stream

    def buffer(self, index: int) -> Tensor:
        """Return all of a buffer."""
        x: Tensor = self.tensors[index]
        return x

    def store(self, index: int, x: Tensor) -> None:
        """Let a buffer be `x`."""
        self.tensors[index] = x

    def tensor(self, place: Place) -> Tensor:
        """Return the tensor of a place."""
        x, view = self.buffer(place.buffer), place.view
        if view is None:
            return x
        if x.dtype != view.dtype:
            x = x.view(view.dtype)
        return x.as_strided(view.shape, view.stride, x.storage_offset() + view.offset)


class Compute:
    """A step that torch does: `function` of these tensors, and which buffer its result is."""

    def __init__(
        self, function: Callable[..., Tensor], places: list[Place], made: int | None
    ) -> None:
        self._function, self._places, self._made = function, places, made

    def __str__(self) -> str:
        return f"torch: {getattr(self._function, '__name__', self._function)}"

    def run(self, run: Run) -> None:
        """Compute the result from the buffers of a run."""
        found = self._function(*map(run.tensor, self._places))
        if self._made is not None:
            run.store(self._made, found)


class Launch:
    """A step that a kernel does, started by Triton's own launcher.

    Args:
        arguments: with a Place for each tensor, also inside of tuples.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | Grid,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self.kernel, self.grid, self.options = kernel, grid, options
        self.arguments = arguments

    def __str__(self) -> str:
        name = getattr(getattr(self.kernel, "fn", self.kernel), "__name__", "kernel")
        return f"launch {name} on {self.grid} programs"

    def run(self, run: Run) -> None:
        """Start the kernel on the buffers of a run."""
        grid = self.grid if isinstance(self.grid, tuple) else (self.grid,)
        self.kernel[grid](*filled(self.arguments, run), **self.options)


def filled(argument: Any, run: Run) -> Any:
    """Return an argument with its places, also inside tuples, replaced by the tensors of a run."""
    fill = getattr(argument, "fill", None)
    if fill is not None:
        return fill(run)
    if isinstance(argument, tuple):
        fields = [filled(field, run) for field in argument]
        return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
    return argument


class LaunchPlan:
    """A plan of launches and of what torch computes between them; made by a `Maker`."""

    def __init__(
        self,
        device: torch.device,
        num_inputs: int,
        buffers: list[Buffer],
        asked: list[tuple[int, Callable[[int], Tensor]]],
        actions: list[Compute | Launch],
        results: list[int | None],
        tiles: Callable[[], dict[str, TileConfig]],
    ) -> None:
        self.device, self._tiles, self.actions = device, tiles, actions
        self._num_inputs, self._buffers, self._results = num_inputs, buffers, results
        self._asked = asked

    @property
    def tiles(self) -> dict[str, TileConfig]:
        """The tile sizes of each kernel, by its part of the computation."""
        return self._tiles()

    @property
    def steps(self) -> list[str]:
        """The actions of the plan in words, a line each."""
        return [str(action) for action in self.actions]

    def run(self, *tensors: Tensor | None, out: Tensor | None = None) -> Results:
        """Run the plan for tensors with the layouts of its call.

        Args:
            out: memory for the first result, of its layout and at a multiple of 16 bytes; None
                allocates it.
        """
        run = self._done(tensors)
        results = tuple(None if i is None else run.tensors[i] for i in self._results)
        if out is not None:
            assert results[0] is not None
            return out.copy_(results[0]), *results[1:]
        return results

    def again(self, out: Tensor, tensors: Sequence[Tensor | None]) -> Again | None:
        """Return an object that repeats `run` with `out` for tensors like these, or None.

        The plan has run for tensors of the same sizes and strides before. None means that repeating
        would save nothing.
        """
        return None

    def run_for(self, places: Sequence[Place], *tensors: Tensor | None) -> list[Tensor]:
        """Run the plan and return the tensors at `places`, which need not be results."""
        run = self._done(tensors)
        return [run.tensor(place) for place in places]

    def _done(self, tensors: Sequence[Tensor | None]) -> Run:
        """Return the buffers of a call whose steps have run, or were launched."""
        with device_of(self.device):
            run = self._begin(tensors)
            for action in self.actions:
                action.run(run)
        return run

    def launcher(self, tensors: Sequence[Tensor | None]) -> Callable[[], None]:
        """Return a function that only launches the steps, to be measured; all memory is
        allocated here."""
        self.run(*tensors)
        run = self._begin(tensors)

        def start() -> None:
            for action in self.actions:
                action.run(run)

        return start

    def _begin(self, tensors: Sequence[Tensor | None]) -> Run:
        """Allocate the results and the scratch of a call."""
        run = Run([*tensors, *[None] * (len(self._buffers) - self._num_inputs)], 0)
        for index, each in enumerate(self._buffers):
            if each.kind not in ("result", "work"):
                continue
            if each.whole is None:
                count = each.num_bytes // each.dtype.itemsize
                x = torch.empty(count, dtype=each.dtype, device=self.device)
            else:
                x = torch.empty(each.whole.shape, dtype=each.dtype, device=self.device)
            run.tensors[index] = x
        for index, ask in self._asked:
            run.tensors[index] = ask(run.stream)
        return run


def device_of(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels are launched on `device`."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class Maker:
    """Writes down a plan while a planner says what is to be done, in its order.

    Memory that is only written by launches is torch.empty's, on "meta"; whatever torch computes
    goes through `compute`.

    Args:
        names: the names of the call's tensors, in the order of its layouts.
    """

    def __init__(self, call: Call, names: Sequence[str] = AttentionTensors._fields) -> None:
        self.device = call.device
        self.inputs = [x if x is None else x.meta() for x in call.layouts]
        self._names = names
        self._buffers: list[Buffer] = []
        self._kept = self.inputs.copy()  # of each buffer; ids and storages last with them
        self._views: list[Tensor] = []
        self._places: dict[int, Place] = {}  # by the id of a tensor that is kept
        self._storages: dict[int, int] = {}  # of the first buffers, which one each is
        self._num_stored = 0
        self._actions: list[Compute | Launch] = []
        self._asked: list[tuple[int, Callable[[int], Tensor]]] = []
        for index, layout in enumerate(call.layouts):
            if layout is None:
                self._buffers.append(_NOTHING)
                continue
            x = self.inputs[index]
            self._buffers.append(_new(Buffer, ("input", x, 0, layout.dtype)))
            kind = (layout.dtype, layout.is_aligned, self.device)
            self._places[id(x)] = _new(Place, (index, 0, None, kind, index))

    @property
    def tensors(self) -> AttentionTensors:
        """Return the call's tensors; all but q, k, v and bias may be indexed without strides."""
        given = self.inputs[-len(AttentionTensors._fields) :]
        for index, x in enumerate(given):
            if x is not None and index not in _STRIDED and not x.is_contiguous():
                given[index] = self.copy(x)
        return AttentionTensors(*given)

    def input(self, name: str) -> Tensor | None:
        """Return one of the call's tensors."""
        return self.inputs[self._names.index(name)]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that launches write."""
        x = torch.empty_strided(shape, _steps(shape), dtype=dtype, device=_META)
        index = len(self._buffers)
        kind = (dtype, True, self.device)
        self._places[id(x)] = _new(Place, (index, 0, None, kind, index))
        self._kept.append(x)
        self._buffers.append(_new(Buffer, ("work", x, x.nbytes, dtype)))
        return x

    def is_aligned(self, x: Tensor) -> bool:
        """Return whether `x` starts at a multiple of 16 bytes."""
        return self.place(x).kind[1]

    def launch(self, kernel: Any, grid: int | Grid, *arguments: Any, **options: Any) -> None:
        """Start `kernel` on `grid` programs; options: num_warps and constants, by name."""
        places = self.placed(arguments)
        self._actions.append(self._launch(kernel, grid, places, options))

    def compute(self, function: Callable[..., Tensor], *tensors: Tensor, like: Tensor) -> Tensor:
        """Add the computation of one tensor by torch to the plan.

        Args:
            function: a function of `tensors` that returns the result, or writes to one of them.
            tensors: tensors of this maker.
            like: a tensor with the layout of the result; the one of `tensors` to which `function`
                writes.

        Returns:
            `like`, which stands for the result.
        """
        places = [self.place(x) for x in tensors]
        made = None if any(like is x for x in tensors) else self._add_made(like)
        self._actions.append(Compute(function, places, made))
        return like

    def dense(self, x: Tensor | None) -> Tensor | None:
        """Return a tensor that kernels may index without its strides: a copy where needed."""
        if x is None or x.is_contiguous():
            return x
        return self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """Return a contiguous copy."""
        like = torch.empty(x.shape, dtype=x.dtype, device=_META)
        return self.compute(_contiguous_copy, x, like=like)

    def full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        """Return a tensor of one value."""
        x = self.empty(shape, dtype)

        def fill(x: Tensor) -> Tensor:
            return x.fill_(value)

        return self.compute(fill, x, like=x)

    def ask(self, make: Callable[[int], Tensor], like: Tensor) -> Tensor:
        """Add a buffer that each call gets from `make(stream)`; return it as a tensor like
        `like`."""
        index = self._add(like, Buffer("asked", like, like.nbytes, like.dtype))
        self._asked.append((index, make))
        return like

    def finish(
        self, results: Sequence[Tensor | None], tiles: Callable[[], dict[str, TileConfig]] = dict
    ) -> LaunchPlan:
        """Return the plan of the recorded actions.

        Args:
            results: the results of the plan: whole tensors that were allocated for it or computed
                by it.
            tiles: a function that returns the tile sizes of the plan's kernels, by part.
        """
        indices = [None if x is None else self._as_result(x) for x in results]
        kinds = self._buffers, self._asked, self._actions, indices, tiles
        return self._plan(self.device, len(self.inputs), *kinds)

    def run_at_once(
        self, wanted: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Run the recorded actions for a call's tensors; return the tensors that `wanted` stand
        for.

        Args:
            wanted: tensors of this maker, or views of them.
            tensors: the tensors of the call.
        """
        places = [self.place(x) for x in wanted]
        return self.finish([]).run_for(places, *tensors)

    def _as_result(self, x: Tensor) -> int:
        index = self.place(x).buffer
        buffer = self._buffers[index]
        if buffer.kind == "work":
            assert x.is_contiguous(), "a result is contiguous"
            assert x.nbytes == buffer.num_bytes, "a result is all of an allocation"
            self._buffers[index] = _new(Buffer, ("result", x, x.nbytes, x.dtype))
        return index

    # What a backend may do otherwise.
    _launch: Callable[..., Launch] = Launch
    _plan: Callable[..., LaunchPlan] = LaunchPlan

    def placed(self, argument: Any) -> Any:
        """Return `argument` with its tensors, also in nested tuples, replaced by their Places."""
        if isinstance(argument, Tensor):
            return self.place(argument)
        if isinstance(argument, tuple):
            fields = [self.placed(field) for field in argument]
            return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
        return argument

    def place(self, x: Tensor) -> Place:
        """Return where a tensor lies."""
        found = self._places.get(id(x))
        if found is None:
            found = self._places[id(x)] = self._place_of_view(x)
            self._views.append(x)
        return found

    def _place_of_view(self, x: Tensor) -> Place:
        assert x.is_meta, "a plan is made of tensors without memory"
        index = self._buffer_of(x)
        if index is None:
            size = x.untyped_storage().nbytes()
            is_whole = x.nbytes == size and x.is_contiguous()
            index = self._add(x, Buffer("work", x if is_whole else None, size, x.dtype))
        offset, stride = int(x.storage_offset()), x.stride()
        buffer = self._buffers[index]
        whole, at = buffer.whole, offset * x.itemsize
        is_aligned = at % _ALIGNMENT == 0
        if buffer.kind == "input":
            is_aligned = is_aligned and self._places[id(whole)].kind[1]
        view = View(x.dtype, x.shape, stride, offset)
        is_whole = whole is not None and offset == 0 and view[:3] == _view_of(whole)
        seen = None if is_whole else view
        return Place(index, at, seen, (x.dtype, is_aligned, self.device), index)

    def _buffer_of(self, x: Tensor) -> int | None:
        """Return which buffer a tensor lies in, None for one that is new."""
        found = self._places.get(id(x)) or self._places.get(id(x._base))
        if found is not None:
            return found.buffer
        for index in range(self._num_stored, len(self._kept)):
            kept = self._kept[index]
            if kept is not None:
                self._storages[kept.untyped_storage()._cdata] = index
        self._num_stored = len(self._kept)
        return self._storages.get(x.untyped_storage()._cdata)

    def _add_made(self, x: Tensor) -> int:
        return self._add(x, Buffer("made", x, x.nbytes, x.dtype))

    def _add(self, x: Tensor, buffer: Buffer) -> int:
        """Add the buffer that `x` is, or lies in where its layout is not known."""
        index = len(self._buffers)
        self._kept.append(x)
        self._buffers.append(buffer)
        if buffer.whole is not None:
            self._places[id(x)] = Place(index, 0, None, (x.dtype, True, self.device), index)
        return index


def _view_of(x: Tensor) -> tuple[object, ...]:
    return x.dtype, x.shape, x.stride()


_NOTHING = Buffer("input", None, 0, torch.uint8)
_STRIDED = [AttentionTensors._fields.index(name) for name in ("q", "k", "v", "bias")]


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
