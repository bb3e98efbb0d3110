"""The adapters that requests may name: loaded, unloaded, and kept in main memory while used.

A request holds its adapter, so that one that is unloaded while requests use it stays until the last
of them has ended. Names are for requests to come only.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import finalize, ref

import torch

from tilewise.engine.request import Adapted
from tilewise.errors import CheckpointError, RequestError, shown
from tilewise.models.adapters import Adapter, AdapterSite, AdapterTensors, read_adapter

__all__ = ["Adapters", "LoadedAdapter", "fingerprint_of", "salted"]


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter in main memory.

    Attributes:
        number: the number of this loading, which no other adapter of the process has.
        fingerprint: a digest of all that it adds to the model.
        weights: the tensors of the adapter, by linear layer.
    """

    number: int
    fingerprint: str
    weights: Adapter


class Elsewhere(Protocol):
    """Other processes that keep copies of the adapters, such as a
    `tensor_parallel.runner.ParallelRunner`'s workers."""

    def load_adapter(self, number: int, path: str) -> None:
        """Let the other processes read the adapter of a folder, and know it by `number`."""
        ...

    def forget_adapter(self, number: int) -> None:
        """Let the other processes drop adapter `number`; a garbage collection may call this."""
        ...


@dataclass(slots=True)
class _Named:
    """An adapter that has a name, in main memory or not.

    Attributes:
        path: the folder or hub name from which it is read; "tensors" if it was given as tensors.
        number, fingerprint: as of `LoadedAdapter`.
        adapter: a weak reference to the adapter, dead once it is in main memory no more.
        kept: the adapter itself if no file holds it, so that it is never freed while it has a name;
            else None.
    """

    path: str
    number: int
    fingerprint: str
    adapter: ref[LoadedAdapter]
    kept: LoadedAdapter | None


class Adapters:
    """The adapters of an engine by name; any thread may use it.

    Args:
        sites: the linear layers of the model, see `models.adapters.adapter_sites`.
        max_rank: the largest rank of an adapter.
        most_held: adapters that stay in main memory while no request uses them, the ones that were
            used last; the others are read again when a request names them. None keeps all.

    Attributes:
        max_rank: the largest rank of an adapter; it may be lowered once all that are loaded have
            one as low.
        largest_rank: the largest rank of those that were loaded.
    """

    def __init__(
        self, sites: Mapping[str, AdapterSite], *, max_rank: int, most_held: int | None = None
    ) -> None:
        self._sites, self._most_held = sites, most_held
        self.max_rank, self.largest_rank = max_rank, 0
        self._named: dict[str, _Named] = {}
        self._held: OrderedDict[int, LoadedAdapter] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._elsewhere: Elsewhere | None = None

    def paths(self) -> dict[str, str]:
        """Return the folder or hub name of each loaded adapter, by name; "tensors" for one given as
        tensors."""
        with self._lock:
            return {name: named.path for name, named in self._named.items()}

    def load(self, name: str, path: str | Path | AdapterTensors, *, replaces: bool = False) -> None:
        """Read an adapter and give it a name; where anything is wrong nothing changes.

        Args:
            name: the name by which requests use the adapter.
            path: a folder in PEFT's format, or a hub name; or what its files would hold, which then
                stays in main memory.
            replaces: True if another adapter of this name may be unloaded.

        Raises:
            CheckpointError: see `models.adapters.read_adapter`.
            RequestError: the name is empty, or in use and `replaces` is False; or tensors are given
                where other processes hold adapters, too.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"lora_name must be a name, got {shown(name)}")
        self._check_free(name, replaces)
        is_of_files = not isinstance(path, AdapterTensors)
        if not is_of_files and self._elsewhere is not None:
            raise RequestError(
                "lora_path must be a folder with tensor_parallel_size above 1, as tensors do not "
                "leave their process, got tensors"
            )
        weights = read_adapter(path, self._sites, max_rank=self.max_rank)
        self.largest_rank = max(self.largest_rank, weights.rank)
        adapter = LoadedAdapter(next(self._numbers), fingerprint_of(weights), weights)
        if self._elsewhere is not None:
            self._elsewhere.load_adapter(adapter.number, str(path))
        self._watch(adapter)
        with self._lock:
            if not replaces and name in self._named:
                raise RequestError(_in_use(name))
            before = self._named.pop(name, None)
            if before is not None:
                self._held.pop(before.number, None)
                if before.adapter() is None:
                    self._end(before.number)
            self._named[name] = _Named(
                str(path) if is_of_files else "tensors",
                adapter.number,
                adapter.fingerprint,
                ref(adapter),
                None if is_of_files else adapter,
            )
            self._hold(adapter)

    def unload(self, name: str) -> None:
        """Forget the adapter of a name; requests that use it go on.

        Raises:
            RequestError: no adapter of this name is loaded.
        """
        with self._lock:
            self._find(name, "lora_name")
            named = self._named.pop(name)
            self._held.pop(named.number, None)
            if named.adapter() is None:  # no request uses it, nor is it in main memory
                self._end(named.number)

    def get(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name, and count it as used last.

        Raises:
            RequestError: no adapter of this name is loaded; or it had to be read from its files
                again, which cannot be read or hold other weights than before.
        """
        with self._lock:
            named = self._find(name, "lora_request")
            adapter = named.adapter()
            if adapter is not None:
                self._hold(adapter)
                return adapter
        try:
            weights = read_adapter(named.path, self._sites, max_rank=self.max_rank)
        except CheckpointError as error:
            raise RequestError(f"adapter {name!r} cannot be read again: {error}") from error
        if fingerprint_of(weights) != named.fingerprint:
            raise RequestError(
                f"adapter {name!r} must be as it was when it was loaded, got other weights in "
                f"{named.path}"
            )
        with self._lock:
            adapter = named.adapter()  # another thread may have been faster
            if adapter is None:
                adapter = LoadedAdapter(named.number, named.fingerprint, weights)
                self._watch(adapter)
                named.adapter = ref(adapter)
            if self._named.get(name) is named:
                self._hold(adapter)
            return adapter

    def load_elsewhere(self, elsewhere: Elsewhere) -> None:
        """Load every adapter, present and future, in other processes, too.

        An adapter is forgotten there when no name and no request has it any more.
        """
        self._elsewhere = elsewhere
        for named in list(self._named.values()):
            elsewhere.load_adapter(named.number, named.path)

    def _watch(self, adapter: LoadedAdapter) -> None:
        finalize(adapter, self._end, adapter.number).atexit = False

    def _end(self, number: int) -> None:
        """Let the other processes forget adapter `number`, unless a name still has it.

        A finalizer calls this when the adapter is freed here. Nothing happens without other
        processes.
        """
        is_named = any(named.number == number for named in list(self._named.values()))
        if self._elsewhere is not None and not is_named:
            self._elsewhere.forget_adapter(number)

    def holds(self, name: str) -> bool:
        """Return whether an adapter of this name is in main memory."""
        with self._lock:
            named = self._named.get(name)
            return named is not None and named.adapter() is not None

    def _check_free(self, name: str, replaces: bool) -> None:
        with self._lock:
            if not replaces and name in self._named:
                raise RequestError(_in_use(name))

    def _find(self, name: str, field: str) -> _Named:
        named = self._named.get(name)
        if named is None:
            names = ", ".join(sorted(self._named)) or "none"
            raise RequestError(
                f"{field} must be an adapter that is loaded ({names}), got {shown(name)}"
            )
        return named

    def _hold(self, adapter: LoadedAdapter) -> None:
        """Count an adapter as the last used; let go of the least recently used beyond
        `_most_held`."""
        self._held[adapter.number] = adapter
        self._held.move_to_end(adapter.number)
        while self._most_held is not None and len(self._held) > self._most_held:
            self._held.popitem(last=False)


def salted(cache_salt: str, adapter: Adapted | None) -> str:
    """Return the namespace in the prefix cache of a request, made of its salt and its adapter's
    digest.

    Without an adapter the namespace is the salt itself, unless the salt begins with a NUL. All
    others begin with a NUL; so no salt of a caller's is the namespace of an adapter.
    """
    if adapter is None and not cache_salt.startswith("\0"):
        return cache_salt
    return f"\0{'' if adapter is None else adapter.fingerprint}\0{cache_salt}"


def _in_use(name: str) -> str:
    return f"lora_name must be of no adapter that is loaded, got {shown(name)}"


def fingerprint_of(weights: Adapter) -> str:
    """Return the SHA-256 digest, in hexadecimal, of all that an adapter adds to a model.

    Digested are the modules' names and, of each part, its first output, scale, shapes, dtypes and
    numbers.
    """
    digest = hashlib.sha256()
    for module in sorted(weights.parts):
        for part in weights.parts[module]:
            digest.update(f"{module} {part.first} {part.scale!r}".encode())
            for tensor in (part.a, part.b):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
