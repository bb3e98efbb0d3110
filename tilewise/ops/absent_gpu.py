"""A GPU that is not there: tensors that lie on one, so that calls are planned as on it.

What follows from a call's shapes, dtypes and alignment needs no GPU: the backend, the tiles, and
what Triton compiles. In a process that has called `stand_in`, tensors on "cuda" have sizes, strides
and addresses. Integers also have values, because a step looks up lengths and blocks by them;
floating-point numbers have none, so nothing is multiplied and a model of any size takes no memory.
Launches must be recorded (`requests.recording`), since nothing could run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tilewise.ops import library
from tilewise.ops.attention.op import attention_bwd, attention_fwd

__all__ = ["stand_in"]

_GPU = torch.device("cuda", 0)
_CPU, _META = torch.device("cpu"), torch.device("meta")
_PINNING = (torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default)
_MEMORY = 80 << 30  # bytes; whatever is allocated fits
_ALIGNMENT = 512  # bytes, as of torch's allocator


def _has_values(x: Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


class _OnGpu(Tensor):
    """A tensor that reports a GPU as its device although the machine has none.

    Attributes:
        own: the tensor that does the work: integers and booleans have values on the CPU, floating
            point and complex numbers are on "meta".
    """

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> _OnGpu:
        found = Tensor._make_wrapper_subclass(
            cls,
            own.size(),
            strides=own.stride(),
            storage_offset=own.storage_offset(),
            dtype=own.dtype,
            layout=own.layout,
            device=_GPU,
        )
        found.own = own
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def data_ptr(self) -> int:
        """Return an invented address, at which nothing lies.

        It is a fixed multiple of 512 bytes plus the storage offset: aligned as on a GPU.
        """
        return _ALIGNMENT * 1024 + int(self.storage_offset()) * self.itemsize

    # torch's own ask which GPU is current, and a torch without CUDA has none.
    def __getitem__(self, key: Any) -> Tensor:
        return _named(self.own[_of_key(key, self.own.device)])

    def __setitem__(self, key: Any, value: Any) -> None:
        own = value.own if isinstance(value, _OnGpu) else value
        if self.own.device == _CPU and not (isinstance(own, Tensor) and own.is_meta):
            self.own[_of_key(key, _CPU)] = own

    def copy_(self, source: Any, non_blocking: bool = False) -> _OnGpu:
        self[...] = source
        return self

    def record_stream(self, stream: Any) -> None:
        """Do nothing: no kernel runs that could still read the memory."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


def _of_key(key: Any, where: torch.device) -> Any:
    """Return an index whose tensors, `_OnGpu` or plain, are plain ones on `where`.

    Args:
        key: an index as `__getitem__` gets it: a number, slice, tensor or tuple of these.
        where: the device of the tensor that is indexed.
    """

    def own(x: Tensor) -> Tensor:
        return (x.own if isinstance(x, _OnGpu) else x).to(where)

    return tree_map_only(Tensor, own, key)


def _named(x: Tensor) -> _OnGpu:
    """Return an `_OnGpu` tensor with the sizes, strides and dtype of `x`, its `own` tensor.

    `x` is replaced first if it lies on the wrong device: integers on "meta" by zeros on the CPU,
    floating-point numbers on the CPU by a tensor without values on "meta".
    """
    if _has_values(x) and x.is_meta:
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()
    elif not _has_values(x) and not x.is_meta:
        x = x.to(_META)
    return _OnGpu(x)


class _Mode(TorchDispatchMode):
    """A dispatch mode that passes ops on the absent GPU to `_compute`.

    These are ops that take an `_OnGpu` tensor or name a "cuda" device, also those that only copy
    from the host; other ops run as usual. Requests to pin memory are ignored.

    Attributes:
        needs_gradients: True if each call of `attention_fwd` is followed by one of its backward
            pass. It belongs to the class, so to the process.
    """

    needs_gradients = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func in _PINNING:
            return args[0]
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(x, _OnGpu) for x in leaves) or _are_on(leaves, "cuda"):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


def _are_on(leaves: list[Any], kind: str) -> bool:
    return any(isinstance(x, torch.device) and x.type == kind for x in leaves)


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an op on a GPU that is not there.

    An op of tilewise runs its own Python code, which plans and launches. Of torch's ops those of
    integers are computed on the CPU, and those with floating-point numbers on "meta", so only in
    shape. Results are `_OnGpu`, or plain CPU tensors (zeros for floating-point numbers) if an
    argument names the device "cpu"; `.item()` of a floating-point number is 0.
    """
    if func.namespace == library.LIBRARY.ns:
        with _Mode():  # which was left for this op
            results = library.kernel_of(func._opname)(*args, **kwargs)
            if func is attention_fwd and _Mode.needs_gradients:
                _differentiate(args, *results)
        return results
    leaves = tree_leaves((args, kwargs))
    owns = [x.own if isinstance(x, _OnGpu) else x for x in leaves if isinstance(x, Tensor)]
    leaves_gpu = _are_on(leaves, "cpu")
    if func is torch.ops.aten._local_scalar_dense.default:
        return owns[0].item() if _has_values(owns[0]) else 0.0
    are_integers = all(map(_has_values, owns)) if owns else not _makes_floats(func, args, kwargs)
    found, names = _on(_CPU if are_integers else _META, func, args, kwargs)

    def named(x: Tensor) -> Tensor:
        owner = names.get(id(x))
        if leaves_gpu and (owner is None or isinstance(owner, _OnGpu)):
            return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x.clone()
        if owner is not None and (isinstance(owner, _OnGpu) or not _are_on(leaves, "cuda")):
            return owner
        if owner is not None:
            x = x.clone()
        return _named(x)

    return tree_map_only(Tensor, named, found)


def _differentiate(args: tuple[Any, ...], o: Tensor, lse: Tensor) -> None:
    """Call `attention_bwd` right after `attention_fwd`, so that its launches are recorded too.

    On a GPU that is not there autograd records no graph that would call it later. Results are
    dropped.

    Args:
        args: the arguments of `attention_fwd`.
        o, lse: the results of `attention_fwd`.
    """
    q, k, v, *rest = args
    attention_bwd(torch.empty_like(o), None, q, k, v, o, lse, False, *rest)


def _makes_floats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    made, _ = _on(_META, func, args, kwargs)
    return not all(_has_values(x) for x in tree_leaves(made) if isinstance(x, Tensor))


def _on(
    where: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[int, Tensor]]:
    """Run an op on the device `where`, in place of the absent GPU.

    Tensors of `args` and `kwargs` are unwrapped and moved to `where`; devices there become `where`.

    Returns:
        The results, plain tensors on `where`, and a dict from the id of each tensor that the op was
            given to the caller's tensor that it stands for, by which results of ops in place are
            recognised.
    """
    names, kept = dict[int, Tensor](), list[Tensor]()

    def own(x: Any) -> Any:
        if isinstance(x, torch.device):
            return where
        if not isinstance(x, Tensor):
            return x
        found = x.own if isinstance(x, _OnGpu) else x
        if found.device != where:
            found = found.to(where)
        names[id(found)] = x
        kept.append(found)
        return found

    args, kwargs = tree_map(own, (args, kwargs))
    return func(*args, **kwargs), names


def stand_in(
    target: Any, sm_count: int, *, needs_gradients: bool = False
) -> AbstractContextManager[object]:
    """Let this process have a GPU that is not there, for good: functions of torch are replaced.

    Args:
        target: the `GPUTarget` that Triton compiles for.
        sm_count: the multiprocessors of the GPU, by which work is split.
        needs_gradients: True to compute the gradient of each dense or packed call, too.

    Returns:
        A context in which torch makes tensors on it, as device "cuda:0".
    """
    import triton

    from tilewise.kernels.host import lasting
    from tilewise.kernels.host.compile_worker import StubDriver

    triton.runtime.driver.set_active(StubDriver(target))
    _Mode.needs_gradients = needs_gradients
    cuda, core = torch.cuda, torch._C
    major, minor = divmod(target.arch, 10)
    name = f"NVIDIA sm_{target.arch}"
    facts = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sm_count, total_memory=_MEMORY
    )
    stands: dict[Any, dict[str, Any]] = {
        cuda: {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "get_device_capability": lambda *_: (major, minor),
            "get_device_name": lambda *_: name,
            "get_device_properties": lambda *_: facts,
            "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "device": lambda _: nullcontext(),
            "stream": lambda _: nullcontext(),
            "current_stream": lambda *_: _Stream(),
            "Stream": _Stream,
            "Event": _Event,
        },
        lasting: {"lasting": lambda make, _: make()},  # another thread has no such tensors
        torch: {"tensor": _on_host_first(torch.tensor)},  # which asks the GPU before any op
        core: {
            # Views of tensors that inference mode made count no versions, and these would.
            "_InferenceMode": lambda is_on: torch.no_grad() if is_on else nullcontext(),
            "_cuda_getDevice": lambda: 0,
            "_cuda_getCurrentRawStream": lambda _: 0,
        },
        core._dynamo.guards: {
            "_empty_strided_cuda": lambda shape, stride, dtype: torch.empty_strided(
                shape, stride, dtype=dtype, device=_GPU
            ),
        },
    }
    for module, functions in stands.items():
        for each, function in functions.items():
            setattr(module, each, function)
    return _on_it()


@contextmanager
def _on_it() -> Iterator[None]:
    # Autograd asks which GPU is current, and a torch without CUDA has none.
    with _Mode(), torch._C._AutoDispatchBelowAutograd():
        yield


def _on_host_first(make: Any) -> Any:
    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found: Tensor = make(data, **options)
        return found if device is None else found.to(device)

    return made


class _Event:
    """A stand-in for `torch.cuda.Event`: its methods do nothing, and `query` returns True."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    synchronize = record


class _Stream(_Event):
    """A CUDA stream whose methods do nothing, since no work is in flight."""

    cuda_stream = 0

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, *_: Any) -> _Event:
        return _Event()
