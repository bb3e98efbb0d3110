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
    """Other processes that have adapters, too, see `tensor_parallel.runner.ParallelRunner`."""

    def load_adapter(self, number: int, path: str) -> None:
        """Read an adapter."""
        ...

    def forget_adapter(self, number: int) -> None:
        """Forget adapter `number`; a garbage collection may call this."""
        ...


@dataclass(slots=True)
class _Named:
    """An adapter by its name, in main memory or not; `kept` is one that no file holds."""

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
        """Return where each adapter comes from, by name."""
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
            RequestError: the name is empty, or in use.
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
        """Forget a name; requests that use its adapter go on.

        Raises:
            RequestError: there is no such adapter.
        """
        with self._lock:
            self._find(name, "lora_name")
            named = self._named.pop(name)
            self._held.pop(named.number, None)
            if named.adapter() is None:  # no request uses it, nor is it in main memory
                self._end(named.number)

    def get(self, name: str) -> LoadedAdapter:
        """Return the adapter of a name, read again if it is in main memory no more.

        Raises:
            RequestError: there is no such adapter, or its files are not what they were.
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
        """Load every adapter in other processes, too, from now on, and forget it there when it is
        freed."""
        self._elsewhere = elsewhere
        for named in list(self._named.values()):
            elsewhere.load_adapter(named.number, named.path)

    def _watch(self, adapter: LoadedAdapter) -> None:
        finalize(adapter, self._end, adapter.number).atexit = False

    def _end(self, number: int) -> None:
        """Let the workers forget an adapter that no request uses any more, unless a name still has
        it."""
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
        """Keep an adapter as the last used; drop the least recently used beyond `_most_held`."""
        self._held[adapter.number] = adapter
        self._held.move_to_end(adapter.number)
        while self._most_held is not None and len(self._held) > self._most_held:
            self._held.popitem(last=False)


def salted(cache_salt: str, adapter: Adapted | None) -> str:
    """Return the namespace of a request's cached blocks: that of its salt and its adapter.

    It begins with a NUL where there is an adapter, or where the salt does; so no salt of a caller's
    is the namespace of an adapter.
    """
    if adapter is None and not cache_salt.startswith("\0"):
        return cache_salt
    return f"\0{'' if adapter is None else adapter.fingerprint}\0{cache_salt}"


def _in_use(name: str) -> str:
    return f"lora_name must be of no adapter that is loaded, got {shown(name)}"


def fingerprint_of(weights: Adapter) -> str:
    """Return a digest of all that an adapter adds to a model."""
    digest = hashlib.sha256()
    for module in sorted(weights.parts):
        for part in weights.parts[module]:
            digest.update(f"{module} {part.first} {part.scale!r}".encode())
            for tensor in (part.a, part.b):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
