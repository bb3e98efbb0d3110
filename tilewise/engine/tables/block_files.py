"""A directory of cache blocks: one file each, found by content, checked when it is read.

A file carries all that says what it is (the model, the salt, every token up to the end of the
block) and a checksum of everything. Its name is a digest, which decides nothing: a file is used
only if what it carries equals what is looked for. One that is torn, foreign or changed is a miss,
and is removed. Files are written by a thread of their own under another name and renamed when they
are whole, so that a process that is killed never leaves half of one behind.

    line 1      b"tilewise block 1\\n"
    32 bytes    BLAKE2b of all that follows
    4 x int64   bytes of: model, salt, tokens, data
    model, salt, tokens (int32 each), data (the block in all layers, tensor by tensor)

The least recently used files are removed when the directory holds more than it may. When it cannot
be written to, a warning says so once and nothing more is written; what is there is still found.
"""

from __future__ import annotations

import hashlib
import os
import queue
import struct
import threading
import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewise.cache.contents import Content
from tilewise.engine.tables.host_cache import HostGroup, HostMemory
from tilewise.errors import DeviceLostError

__all__ = ["BlockFiles", "GroupFiles"]

MAGIC = b"tilewise block 1\n"
LENGTHS = struct.Struct("<4q")
SUFFIX, UNFINISHED = ".block", ".part"
MOST_QUEUED = 64  # blocks that wait to be written; more are let go of
IDLE_S = 1.0  # without a block to write the thread ends: it would keep main memory from being freed


class BlockFiles:
    """Keeps blocks in a directory; a `BlockStore` of `engine.tables.swap_space`.

    Args:
        directory: the folder of the files, made if need be; processes may share it, each counting
            the files that it knows.
        host: main memory, or that of one group of layers, from which blocks come and to which they
            go.
        model: a name for everything beside the tokens that keys and values depend on, exactly.
        max_bytes: the bound of the bytes of all files together.

    Attributes:
        model: the argument of that name; a random one after `clear`.
        is_writable: False after a write has failed, for good.
        num_hits, num_misses: reads that gave a block, and that did not.

    Raises:
        ValueError: the directory cannot be made or read, or max_bytes is below 1.
    """

    def __init__(
        self, directory: Path, host: HostMemory | HostGroup, model: bytes, max_bytes: int
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.directory, self.host, self.model = Path(directory), host, model
        self.max_bytes = max_bytes
        self.is_writable = True
        self.num_hits = self.num_misses = 0
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # by digest, the longest unused first
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._num_bytes = 0
        self._waiting: dict[bytes, tuple[Content, list[NDArray[np.uint8]]]] = {}
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise ValueError(
                f"offload_dir must be a directory that can be read, got {self.directory}: {error}"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that this object knows."""
        return self._num_bytes

    def save(self, content: Content, slot: int) -> None:
        """Queue a block to be written to a file by another thread; never fails.

        Nothing is done if the block is known already, if too many wait, or after a write has
        failed.

        Args:
            content: the tokens and the namespace by which the block is found.
            slot: the slot of main memory that holds it; it is copied before this returns.
        """
        digest = content.digest
        with self._lock:
            is_known = digest in self._sizes or digest in self._waiting
            if is_known or not self.is_writable or len(self._waiting) >= MOST_QUEUED:
                return
            try:
                self._waiting[digest] = content, self.host.read(slot)
            except DeviceLostError:
                return  # of the workers that had it, which others will tell of
            self._queue.put(digest)
            if self._thread is None or not self._thread.is_alive():  # it is not, after a fork
                self._thread = threading.Thread(target=self._write_all, daemon=True, name="blocks")
                self._thread.start()

    def has(self, digest: bytes) -> bool:
        """Return whether the store has a block of this digest; load() may fail nevertheless."""
        with self._lock:
            return digest in self._sizes or digest in self._waiting

    def load(self, content: Content, slot: int) -> bool:
        """Read the block of this content into a slot of main memory; return whether it was found.

        A file that is damaged, or holds other content, is removed and counts as not found.
        """
        with self._lock:
            waiting = self._waiting.get(content.digest)
        if waiting is not None:
            kept, arrays = waiting
            found = arrays if kept == content else None
        else:
            found = self._read(content)
        if found is None:
            self.num_misses += 1
            return False
        try:
            self.host.write(slot, found)
        except DeviceLostError:
            return False
        self.num_hits += 1
        return True

    def forget(self, digest: bytes) -> None:
        """Remove a block, by its digest, and all blocks that follow it, whether they are written or
        wait."""
        with self._lock:
            gone = [digest]
            for each in gone:  # it grows meanwhile
                gone += self._children.get(each, ())
            for each in gone:
                self._drop(each)
            while True:  # those that wait are few
                more = [d for d, (c, _) in self._waiting.items() if d in gone or c.parent in gone]
                if not more:
                    break
                gone += more
                for each in more:
                    del self._waiting[each]

    def clear(self) -> None:
        """Remove all files, as after a change of weights; blocks saved later are found by this
        object alone.

        `model` becomes random: it names the old weights, so a process that has these would find
        blocks of the new ones under it.
        """
        with self._lock:
            self.model = os.urandom(32)
            self._waiting.clear()
            for digest in list(self._sizes):
                self._drop(digest)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all saved blocks are written, or for `timeout_s`; return whether they are.

        None waits without a bound.
        """
        with self._lock:
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is None:
            return True
        thread.join(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return not thread.is_alive()

    def path(self, digest: bytes, parent: bytes) -> Path:
        """Return the path of a block's file, whether it exists or not, from its and its parent's
        digest."""
        return self.directory / f"{digest.hex()}-{parent.hex()}{SUFFIX}"

    def _scan(self) -> None:
        """Note the files in the directory, the oldest first; remove unfinished ones of killed
        processes.

        If the files take more than `max_bytes`, the oldest are removed.
        """
        found = []
        for entry in os.scandir(self.directory):
            name, suffix = os.path.splitext(entry.name)
            if suffix == UNFINISHED:
                with suppress(OSError):
                    os.unlink(entry.path)
            if suffix != SUFFIX:
                continue
            with suppress(ValueError, OSError):
                digest, parent = (bytes.fromhex(part) for part in name.split("-"))
                status = entry.stat()
                found.append((status.st_mtime_ns, digest, parent, status.st_size))
        for _, digest, parent, size in sorted(found):
            self._note(digest, parent, size)
        self._make_room(0)

    def _note(self, digest: bytes, parent: bytes, size: int) -> None:
        if digest in self._sizes:
            return
        self._sizes[digest], self._parents[digest] = size, parent
        self._children.setdefault(parent, set()).add(digest)
        self._num_bytes += size

    def _drop(self, digest: bytes) -> None:
        """Remove a file and forget it, if this object knows it."""
        size = self._sizes.pop(digest, None)
        if size is None:
            return
        parent = self._parents.pop(digest)
        self._num_bytes -= size
        siblings = self._children[parent]
        siblings.discard(digest)
        if not siblings:
            del self._children[parent]
        with suppress(OSError):
            self.path(digest, parent).unlink()

    def _make_room(self, size: int) -> None:
        while self._sizes and self._num_bytes + size > self.max_bytes:
            self._drop(next(iter(self._sizes)))

    def _read(self, content: Content) -> list[NDArray[np.uint8]] | None:
        """Return the arrays of a file, one for each tensor of a block; None if it is not exactly
        this content.

        A file that is torn, damaged or of other content is removed.
        """
        path = self.path(content.digest, content.parent)
        try:
            raw = path.read_bytes()
        except OSError:
            raw = b""
        data = self._checked(raw, content)
        with self._lock:
            if data is None:
                self._drop(content.digest)
            elif content.digest in self._sizes:
                self._sizes.move_to_end(content.digest)
        return data

    def _checked(self, raw: bytes, content: Content) -> list[NDArray[np.uint8]] | None:
        first = len(MAGIC)
        start = first + 32
        if not raw.startswith(MAGIC) or len(raw) < start + LENGTHS.size:
            return None
        if hashlib.blake2b(memoryview(raw)[start:], digest_size=32).digest() != raw[first:start]:
            return None
        head = self._head(content)
        end = start + LENGTHS.size + sum(map(len, head))
        sizes = self.host.sizes()
        wanted = LENGTHS.pack(*map(len, head), sum(sizes)) + b"".join(head)
        if raw[start:end] != wanted or len(raw) != end + sum(sizes):
            return None
        edges = np.cumsum(sizes)[:-1]
        return np.split(np.frombuffer(raw, np.uint8, offset=end), edges)

    def _head(self, content: Content) -> tuple[bytes, bytes, bytes]:
        salt = content.salt.encode("utf-8", "surrogatepass")
        return self.model, salt, content.tokens

    def _write_all(self) -> None:
        """Write the waiting blocks to files, on a thread of its own, until asked to end or long
        idle.

        After the first failure it warns, and further blocks are dropped.
        """
        while (digest := self._next()) is not None:
            with self._lock:
                waiting = self._waiting.get(digest)
            if waiting is not None and self.is_writable:
                try:
                    self._write(*waiting)
                except OSError as error:
                    self.is_writable = False
                    warnings.warn(
                        f"offload_dir must be writable to keep cold blocks, got {error}; no more "
                        "are written",
                        RuntimeWarning,
                        stacklevel=1,
                    )
            with self._lock:
                self._waiting.pop(digest, None)

    def _next(self) -> bytes | None:
        """Wait for a block to write; None ends the thread, and the next block begins another."""
        with suppress(queue.Empty):
            digest = self._queue.get(timeout=IDLE_S)
            if digest is not None:
                return digest
        with self._lock:
            with suppress(queue.Empty):  # one that came just now
                while (digest := self._queue.get_nowait()) is None:
                    pass
                return digest
            self._thread = None
        return None

    def _write(self, content: Content, arrays: list[NDArray[np.uint8]]) -> None:
        head = self._head(content)
        lengths = LENGTHS.pack(*map(len, head), sum(a.nbytes for a in arrays))
        parts: list[bytes] = [lengths, *head, *(a.tobytes() for a in arrays)]
        digest = hashlib.blake2b(digest_size=32)
        for part in parts:
            digest.update(part)
        size = len(MAGIC) + 32 + sum(len(part) for part in parts)
        if size > self.max_bytes:
            return
        with self._lock:
            self._make_room(size)
        path = self.path(content.digest, content.parent)
        # A name that no other engine writes to, also none of this process.
        unfinished = path.with_suffix(f".{os.getpid()}-{id(self):x}{UNFINISHED}")
        try:
            with unfinished.open("wb") as file:
                file.write(MAGIC + digest.digest())
                for part in parts:
                    file.write(part)
            with self._lock:
                if content.digest not in self._waiting:  # it was forgotten meanwhile
                    unfinished.unlink()
                    return
                try:
                    unfinished.replace(path)
                except FileNotFoundError:
                    return  # an engine that began just now took it for a dead writer's
                self._note(content.digest, content.parent, size)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise


class GroupFiles(tuple[BlockFiles, ...]):
    """The files of every group of layers, each in a directory of its own."""

    __slots__ = ()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the saved blocks of all groups are written, or for `timeout_s` altogether.

        Returns:
            Whether all are written.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        left = (None if end is None else max(0.0, end - time.monotonic()) for _ in self)
        done = [files.flush(wait) for files, wait in zip(self, left, strict=True)]
        return all(done)
