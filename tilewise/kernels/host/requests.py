"""What Triton would compile for the launches of a thread, noted in place of launching.

Inside `recording` a launch runs no kernel. Arguments are bound and specialised by Triton itself, on
the device at hand, so that what is noted is what the same launch will ask for later: its place in
the cache on disk is the same. A request crosses to another process as plain data.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

__all__ = ["Request", "Work", "is_recording", "kernel_of", "observed", "recording", "work_of"]


class Request(NamedTuple):
    """One kernel to be compiled, as plain data that another process can be sent.

    Attributes:
        module, name: the module of the kernel and its name there.
        hash: the hash under which Triton keeps the compiled kernel on disk.
        file: the name that its files on disk begin with.
        work: all that it is compiled for, pickled; `work_of` reads it.
    """

    module: str
    name: str
    hash: str
    file: str
    work: bytes

    @property
    def is_on_disk(self) -> bool:
        """Whether the kernel's compiled files are in Triton's cache."""
        file = f"{self.file}.json"
        return file in (get_cache_manager(self.hash).get_group(file) or {})


class Work(NamedTuple):
    """The arguments of `triton.compile` and of its source for one kernel."""

    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any


class _Pickler(pickle.Pickler):
    def persistent_id(self, what: Any) -> tuple[str, str] | None:
        """Return the module and name of a Triton function, which is pickled by them; else None.

        A constant of a kernel may be such a function. Raises pickle.PicklingError if the name does
        not lead to the same function.
        """
        fn = getattr(what, "fn", None)
        if fn is None or not hasattr(what, "cache_key"):
            return None
        found = fn.__module__, fn.__qualname__
        if kernel_of(*found) is not what:
            raise pickle.PicklingError(f"{found} names another function")
        return found


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        return kernel_of(*name)


def kernel_of(module: str, name: str) -> Any:
    """Return a kernel by its module and its name there.

    Raises:
        ImportError, AttributeError: the module has no such kernel; one made inside a function
            cannot be found.
    """
    return operator.attrgetter(name)(importlib.import_module(module))


def work_of(request: Request) -> Work:
    """Return the unpickled `work` of a request: the arguments of `triton.compile` for it."""
    found: Work = _Unpickler(io.BytesIO(request.work)).load()
    return found


class _Recording:
    """The kernels that one thread's launches have asked for inside of `recording`.

    Attributes:
        requests: the requests by their hashes.
        note: a function that is called with each new request, or None.
        seen: pairs of a kernel's id and the kind of its arguments, for which a request was made.
    """

    def __init__(self, note: Callable[[Request], None] | None) -> None:
        self.requests: dict[str, Request] = {}
        self.note = note
        self.seen = set[tuple[int, str]]()


_recordings: dict[int, _Recording] = {}  # by the number of their thread
_lock = threading.Lock()
_run, _do_compile = JITFunction.run, JITFunction._do_compile


def is_recording() -> bool:
    """Whether launches of this thread are recorded instead of run."""
    return threading.get_ident() in _recordings


def observed() -> bool:
    """Return whether launches must go through Triton's own launcher to be seen.

    It is so inside of `recording` in this thread, and while a hook of Triton's, such as a
    profiler's, is set.
    """
    if _recordings and is_recording():
        return True
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@contextmanager
def recording(
    note: Callable[[Request], None] | None = None,
) -> Iterator[dict[str, Request]]:
    """Yield a dict in which this thread's launches are recorded instead of run, by hash.

    Kernels that the process has already compiled are left out. The kernels write nothing, so code
    in the context must not depend on their results.

    Args:
        note: a function that is called once with each request.
    """
    thread, recorded = threading.get_ident(), _Recording(note)
    with _lock:
        _recordings[thread] = recorded
        JITFunction.run, JITFunction._do_compile = _run_or_note, _compile_or_note
    try:
        yield recorded.requests
    finally:
        with _lock:
            del _recordings[thread]
            if not _recordings:
                JITFunction.run, JITFunction._do_compile = _run, _do_compile


def _run_or_note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    # A warm-up compiles and does not launch.
    return _run(self, *args, grid=grid, warmup=warmup or is_recording(), **options)


def _compile_or_note(
    self: Any,
    key: Any,
    signature: Any,
    device: Any,
    constants: Any,
    options: Any,
    attributes: Any,
    warmup: bool,
) -> Any:
    recorded = _recordings.get(threading.get_ident())
    if recorded is None:
        return _do_compile(self, key, signature, device, constants, options, attributes, warmup)
    if (id(self), str(key)) not in recorded.seen:
        recorded.seen.add((id(self), str(key)))
        _, _, target, backend, _ = self.device_caches[device]
        source = self.ASTSource(self, signature, constants, attributes)
        request = _request(self, source, target, backend, options.__dict__)
        if request is not None and request.hash not in recorded.requests:
            recorded.requests[request.hash] = request
            if recorded.note is not None:
                recorded.note(request)
    return None


def _request(fn: Any, source: Any, target: Any, backend: Any, options: Any) -> Request | None:
    """Return the request for a kernel, or None if another process could not make the same kernel.

    Args:
        fn: the jitted function.
        source, target, backend, options: the arguments of Triton's compilation.
    """
    name = fn.fn.__module__, fn.fn.__qualname__
    try:
        if kernel_of(*name) is not fn:
            return None
        work = io.BytesIO()
        given = Work(source.signature, source.constants, source.attrs, dict(options), target)
        _Pickler(work).dump(given)
    except (ImportError, AttributeError, TypeError, pickle.PicklingError):
        return None
    # As `triton.compile` does.
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    key = get_cache_key(source, backend, parsed, env_vars=_environment())
    if knobs.runtime.add_stages_inspection_hook is not None:
        key += knobs.runtime.add_stages_inspection_hook()[0]
    digest = hashlib.sha256(key.encode("utf-8")).hexdigest()
    return Request(*name, digest, source.name[:150], work.getvalue())


def _environment() -> Any:
    from triton.compiler import compiler

    return compiler.get_cache_invalidating_env_vars()
