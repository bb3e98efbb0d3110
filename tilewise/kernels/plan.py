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
    """How a tensor lies in memory, but for its address; shape and stride in elements, as torch has
    them.

    Attributes:
        is_aligned: True if the tensor's address is a multiple of 16 bytes.
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
        """Return a tensor on the device "meta", without memory, of this shape, stride and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class Call(NamedTuple):
    """All that decides how a call is computed.

    Attributes:
        device: the device of the call's tensors.
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
        """Return the call of `spec` with the layouts of `tensors`, which come in the order of
        `layouts`. None stays None; the device is the one of the first tensor given."""
        first = next(x for x in tensors if x is not None)
        layouts = [x if x is None else Layout.of(x) for x in tensors]
        return cls(spec, first.device, tuple(layouts))

    def gradient(self, spec: AttentionSpec) -> Call:
        """Return the call of the backward pass of this forward call, as it is when only o has a
        gradient: do, o and lse are taken to be contiguous, dlse is None, and the layouts of this
        call's tensors follow. `spec` becomes the spec of the new call."""
        q = self.layouts[0]
        assert q is not None
        o = (*q.shape[:-1], spec.v_head_dim)
        lse = (o[1], o[0]) if spec.is_varlen else (o[0], o[2], o[1])
        rows = contiguous(lse, torch.float64 if q.dtype == torch.float64 else torch.float32)
        do = contiguous(o, q.dtype)
        return Call(spec, self.device, (do, None, do, rows, *self.layouts))


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """Return the layout of a fresh tensor: contiguous strides, aligned to 16 bytes."""
    return _new(Layout, (shape, _steps(shape), dtype, True))


@functools.lru_cache(maxsize=4096)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor; a dimension of size 0 counts as
    1."""
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
    """Plan a forward pass with `planner`, run the plan once on `tensors`, and return its results.
    Used where the run of another plan needs attention as a part; the plan is not kept.

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
        tiles: the tile sizes of each kernel by its part ("fwd", "dq", ...); empty where the backend
            has no table of them.
        steps: the steps of a run in words, a line each.
    """

    @property
    def tiles(self) -> dict[str, TileConfig]: ...

    @property
    def steps(self) -> list[str]: ...

    def run(self, *tensors: Tensor | None) -> Results:
        """Run the plan for tensors with the layouts of its call, in their order; return the
        results, contiguous tensors, or None for one that the call does not have."""


class Again(Protocol):
    """Repeated runs of one plan, one after another on a stream, that reuse the same buffers between
    its steps; made by `LaunchPlan.again`."""

    def run(self, out: Tensor, tensors: Sequence[Tensor | None]) -> bool:
        """Run the plan for `tensors` with its only result written to `out`, and return True; return
        False, with nothing run, where `out` or the tensors do not allow it."""


class View(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


class Place(NamedTuple):
    """A tensor of a plan: the index of the buffer that holds it, and which view of the buffer it
    is; `view` is None for a whole buffer.

    Attributes:
        kind: the facts for which kernels are compiled: the dtype, whether it starts at a multiple
            of 16 bytes, and the device.
        slot: the index of the tensor's address in a run's list of addresses; equal to `buffer` for
            a whole buffer.
    """

    buffer: int
    offset: int  # bytes
    view: View | None
    kind: tuple[torch.dtype, bool, torch.device]
    slot: int

    def fill(self, run: Run) -> Tensor:
        """Return the tensor that this place stands for in a run."""
        return run.tensor(self)


class Buffer(NamedTuple):
    """Memory that the steps of a plan read or write, as the plan knows it before a run.

    Attributes:
        kind: the origin of the memory: "input" (a tensor of the call), "result" (allocated on its
            own, and returned), "work" (scratch allocated for the run), "made" (returned by a step
            of torch's) or "asked" (returned by a function when a run begins, see `Maker.ask`).
        whole: the contiguous tensor that fills the buffer, on "meta"; None where only views of it
            are known.
        num_bytes: the size of the buffer; 0 for an input.
    """

    kind: str
    whole: Tensor | None
    num_bytes: int
    dtype: torch.dtype


class Run:
    """One run of a plan: the tensors that its places stand for.

    Attributes:
        tensors: the tensor of each buffer, by index; None for an input that was not given, and
            until a step makes it.
        stream: the address of the current CUDA stream; 0 on a CPU and where no step needs it.
    """

    __slots__ = ("stream", "tensors")

    def __init__(self, tensors: list[Any], stream: int) -> None:
        self.tensors, self.stream = tensors, stream

    def buffer(self, index: int) -> Tensor:
        """Return the whole tensor of the buffer with this index."""
        x: Tensor = self.tensors[index]
        return x

    def store(self, index: int, x: Tensor) -> None:
        """Set the tensor of the buffer with this index to `x`, as a step does that made it."""
        self.tensors[index] = x

    def tensor(self, place: Place) -> Tensor:
        """Return the tensor of a place: its whole buffer, or the view of it that the place
        describes, without a copy."""
        x, view = self.buffer(place.buffer), place.view
        if view is None:
            return x
        if x.dtype != view.dtype:
            x = x.view(view.dtype)
        return x.as_strided(view.shape, view.stride, x.storage_offset() + view.offset)


class Compute:
    """A step that torch does: `function` is called with the tensors of `places`. Its result becomes
    the buffer with the index `made`; with None it writes to one of the tensors instead."""

    def __init__(
        self, function: Callable[..., Tensor], places: list[Place], made: int | None
    ) -> None:
        self._function, self._places, self._made = function, places, made

    def __str__(self) -> str:
        return f"torch: {getattr(self._function, '__name__', self._function)}"

    def run(self, run: Run) -> None:
        """Call the function on the tensors of a run, and keep its result in the run as the buffer
        `made`; the result is dropped if `made` is None."""
        found = self._function(*map(run.tensor, self._places))
        if self._made is not None:
            run.store(self._made, found)


class Launch:
    """A step that a Triton kernel does, started by Triton's own launcher on `grid` programs.

    Args:
        arguments: the kernel's run-time arguments in their order, with a Place for each tensor,
            also inside of tuples.
        options: the kernel's constants and num_warps and the like, by name.
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
        """Start the kernel with the tensors of a run in place of its Places; it may not have ended
        on return."""
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
    """The steps of a call in order, launches and what torch computes between them; made by a
    `Maker`, and run by `run` for any tensors with the layouts of the call."""

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
        """The tile sizes of the kernels that have a choice of tiles, by the part that each
        computes: for example "fwd", "split", "dkdv" or "dq"."""
        return self._tiles()

    @property
    def steps(self) -> list[str]:
        """The actions of the plan in words, a line each."""
        return [str(action) for action in self.actions]

    def run(self, *tensors: Tensor | None, out: Tensor | None = None) -> Results:
        """Run the plan for tensors with the layouts of its call; return its results in the order of
        `Maker.finish`, None where that had None.

        Args:
            tensors: the tensors of the call, None for those that were not given.
            out: memory for the first result, of its layout and at a multiple of 16 bytes, which is
                returned in its place; None allocates it.
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
        would save nothing: always so here, where Triton's own launcher starts each kernel; plans
        whose launches take addresses may return an object.
        """
        return None

    def run_for(self, places: Sequence[Place], *tensors: Tensor | None) -> list[Tensor]:
        """Run the plan for tensors with the layouts of its call and return the tensors at `places`,
        which need not be results."""
        run = self._done(tensors)
        return [run.tensor(place) for place in places]

    def _done(self, tensors: Sequence[Tensor | None]) -> Run:
        """Allocate the buffers of a call, do all steps in order on the plan's device, and return
        the run with its buffers. On a GPU kernels have been launched and need not have ended."""
        with device_of(self.device):
            run = self._begin(tensors)
            for action in self.actions:
                action.run(run)
        return run

    def launcher(self, tensors: Sequence[Tensor | None]) -> Callable[[], None]:
        """Return a function that only does the steps of a run, to be measured: this method runs the
        plan once, so that its kernels are compiled, and allocates all memory of the run that the
        function repeats."""
        self.run(*tensors)
        run = self._begin(tensors)

        def start() -> None:
            for action in self.actions:
                action.run(run)

        return start

    def _begin(self, tensors: Sequence[Tensor | None]) -> Run:
        """Return a run for `tensors` with the results, the scratch and the "asked" buffers of a
        call allocated; buffers that steps make are None yet."""
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
    """Return a context in which kernels are launched on `device`; it does nothing on a CPU or where
    `device` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class Maker:
    """A recorder of a plan: a planner calls its methods in the order of the plan's steps, and
    `finish` returns the plan. Nothing is launched or computed meanwhile.

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

    @functools.cached_property
    def tensors(self) -> AttentionTensors:
        """The fields of `AttentionTensors` of the call, as tensors on "meta" without memory. All
        but q, k, v and bias may be indexed without strides: the first reading of the property adds
        a copy of each that is not contiguous to the plan."""
        given = self.inputs[-len(AttentionTensors._fields) :]
        for index, x in enumerate(given):
            if x is not None and index not in _STRIDED and not x.is_contiguous():
                given[index] = self.copy(x)
        return AttentionTensors(*given)

    def input(self, name: str) -> Tensor | None:
        """Return the tensor of the call with this name, on "meta"; None if it was not given. Raises
        ValueError for a name that is none of `names`."""
        return self.inputs[self._names.index(name)]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor on "meta" for memory that launches write: scratch of each run,
        or a result if `finish` is given it."""
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
        """Add a launch of `kernel` on `grid` programs to the plan. `arguments` may hold tensors of
        this maker; `options` are num_warps and the kernel's constants, by name."""
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
        """Return a tensor that kernels may index without strides: `x` itself if it is contiguous or
        None, else a copy, whose computation is added to the plan."""
        if x is None or x.is_contiguous():
            return x
        return self.copy(x)

    def copy(self, x: Tensor) -> Tensor:
        """Add a contiguous copy of `x` to the plan, and return the tensor that stands for it."""
        like = torch.empty(x.shape, dtype=x.dtype, device=_META)
        return self.compute(_contiguous_copy, x, like=like)

    def full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        """Add the filling of a new tensor with one value to the plan, and return the tensor that
        stands for it."""
        x = self.empty(shape, dtype)

        def fill(x: Tensor) -> Tensor:
            return x.fill_(value)

        return self.compute(fill, x, like=x)

    def ask(self, make: Callable[[int], Tensor], like: Tensor) -> Tensor:
        """Add a buffer to the plan that each run gets from `make(stream)`, with the address of the
        run's CUDA stream; return `like`, whose layout it has and which stands for it."""
        index = self._add(like, Buffer("asked", like, like.nbytes, like.dtype))
        self._asked.append((index, make))
        return like

    def finish(
        self, results: Sequence[Tensor | None], tiles: Callable[[], dict[str, TileConfig]] = dict
    ) -> LaunchPlan:
        """Return the plan of the recorded actions.

        Args:
            results: the results of the plan, None for one that the call does not have: whole
                tensors that were allocated for it or computed by it.
            tiles: a function that returns the tile sizes of the plan's kernels, by part.
        """
        indices = [None if x is None else self._as_result(x) for x in results]
        kinds = self._buffers, self._asked, self._actions, indices, tiles
        return self._plan(self.device, len(self.inputs), *kinds)

    def run_at_once(
        self, wanted: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Run the recorded actions once for a call's tensors, without a plan that is kept; return
        the tensors that `wanted` stand for.

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
        """Return the Place of a tensor of this maker or of a view of one. A tensor on "meta" whose
        memory the plan does not know yet is added as scratch of each run."""
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
        """Return the index of the buffer whose memory a tensor shares, None for memory that the
        plan does not know."""
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
        """Add a buffer to the plan and return its index. `x` is the buffer as a tensor, or a view
        of it where `buffer.whole` is None; it is kept alive."""
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
