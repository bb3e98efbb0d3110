"""A list of operations over fixed buffers, and the team of threads that runs it.

A `Program` is made once for a model and its cache. Its buffers grow to the next power of two of the
largest number of rows so far and are kept, so memory does not depend on the number of different row
counts.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import StepStoppedError
from tilewise.kernels.cpu.attention.frame import frame_of
from tilewise.kernels.cpu.attention.problem import (
    NUM_STARTS,
    Arrays,
    Problem,
    Rule,
    Sizes,
    packed_type,
)
from tilewise.kernels.cpu.machine import threads
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES
from tilewise.kernels.cpu.machine.simd import HAS_BF16_DOT, REGISTER_BYTES
from tilewise.kernels.cpu.paged.decode import SPLIT, chunk_of
from tilewise.kernels.cpu.paged.decode_launch import address_of_rows, key_bytes, takes_integers
from tilewise.kernels.cpu.paged.decode_tiles import address_of_tiles
from tilewise.kernels.cpu.paged.plan import CODES
from tilewise.kernels.cpu.step.codes import (
    ATTEND,
    BIAS,
    CODE,
    EMBED,
    EPILOGUE,
    FORM,
    FRAME,
    GROUPS,
    INPUTS,
    IS_SAMPLED,
    JOINS,
    K_CACHE,
    K_NORM,
    K_SCALE,
    LAYER,
    NORM,
    NORM_CODE,
    NUM_COLUMNS,
    PANELS,
    PANELS_OF_INT8,
    PRODUCT,
    Q_NORM,
    ROTATE,
    SOURCE,
    SOURCE_ROW,
    TARGET,
    TARGET_ROW,
    V_CACHE,
    V_SCALE,
    WEIGHT,
    WINDOW,
    Batch,
    Likes,
    Shape,
    Tables,
    Workspace,
)
from tilewise.kernels.cpu.step.crew import SYSCALL, Crew
from tilewise.kernels.cpu.step.layers import BLOCK_ROWS
from tilewise.kernels.cpu.step.meeting import LINE
from tilewise.kernels.cpu.step.panels import WIDTH, Panels, padded, row_stride
from tilewise.kernels.cpu.step.run import (
    ASKED,
    FIRST_COUNTER,
    MOST_MEMBERS,
    OWN,
    OWNER,
    STOPPED,
    run_list,
)

__all__ = ["REAL_LIKE", "WORD_LIKE", "Buffer", "Program"]

WORD_LIKE = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.float32: np.empty(0, np.float32),
}
REAL_LIKE = np.empty(0, np.float32)


def _find_yield() -> int:
    """Return the address of sched_yield, or 0 if the C library has none."""
    if os.name != "posix":
        return 0
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


_GIVE_WAY = _find_yield()


def _form_of(weight: Panels) -> int:
    return PANELS_OF_INT8 if weight.is_int8 else PANELS


Held = Callable[[], Tensor]  # a function that returns a weight as its module holds it now


@dataclass
class _Weight:
    """A weight of a module, which may be changed or replaced later, and the operation that reads
    it.

    Attributes:
        held: a function that returns the current weight.
        op, column: the operation, and the column of its row that holds the weight's address.
        padded, dtype: the number of elements that it reads, at least the weight's, and their dtype.
        address: the address of the weight when it was last stored.
        kept: the tensor that the operation reads: the weight itself, or a copy if the weight is too
            short or of another dtype.
        is_copy, num_bytes: True for a copy, and the bytes to copy if both have one dtype, otherwise
            0.
    """

    held: Held
    op: int
    column: int
    padded: int
    dtype: torch.dtype
    address: int = -1
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    is_copy: bool = False
    num_bytes: int = 0


class Buffer(NamedTuple):
    """A buffer of rows: its name and the bytes from row to row."""

    name: str
    row: int


class Program:
    """Operations in order over one model's weights and cache; see `run.py` for what they do.

    Args:
        dtype: the dtype of weights and activations.
        kv: a layer's cache, (N, P, Hk, D) keys and values and, with 8 bits, (N, P, Hk) scales.
        num_q_heads: Hq, the number of query heads.
        num_layers: L, the number of layers.
        half: the pairs of channels that rotate.
        batch_invariant: True if a single row of a sequence must attend with the same bits as among
            several.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kv: Sequence[Tensor],
        *,
        num_q_heads: int,
        num_layers: int,
        half: int,
        batch_invariant: bool = False,
    ) -> None:
        self.dtype, self.size = dtype, dtype.itemsize
        k_cache, v_cache = kv[:2]
        assert k_cache.shape == v_cache.shape
        assert k_cache.is_contiguous()
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        width = k_cache.element_size()
        scales = [4 * stride for stride in kv[2].stride()] if len(kv) > 2 else [0, 0, 0]
        code = DTYPE_CODES[dtype]
        self.shape = Shape(
            num_q_heads, num_kv_heads, head_dim, half, code, CODES[k_cache.dtype], width,
            block_size, *(stride * width for stride in k_cache.stride()[:3]), *scales,
        )  # fmt: skip
        is_wide = width > 1 and k_cache.dtype != dtype
        packed = packed_type(dtype, HAS_BF16_DOT and not is_wide)
        if not batch_invariant and width == 1:
            has_integers = takes_integers(k_cache.dtype, code, head_dim)
            packed = np.uint16 if has_integers else np.float32
        self.batch_invariant = batch_invariant
        self._packed, self._cache_dtype = np.empty(0, packed), k_cache.dtype
        self._likes: Likes | None = None  # None until a kernel for attention is needed
        self._group = num_q_heads // num_kv_heads
        self._num_layers = num_layers
        self._slopes = np.zeros(num_q_heads, np.float32)
        self._sinks = np.full(num_q_heads, -np.inf, np.float32)
        self._ops: list[np.ndarray] = []
        self._numbers: list[float] = []
        self._places: list[tuple[int, int, str]] = []  # operation, column, buffer
        self._widths: dict[str, tuple[int, torch.dtype]] = {}
        self._kept: list[Tensor] = []  # tensors to which addresses refer
        self._frames: list[np.ndarray] = []  # frames to which addresses refer
        self._weights: list[_Weight] = []
        self._most_inputs = self._most_int8 = 0
        self._partial = np.empty(0, np.float32)
        self._workspace_key = (0, 0)
        self._counters = np.empty(0, np.int64)
        self._step = self._stopped = 0  # numbers of the running step, and of the step to stop
        self._stopping = threading.Lock()  # held around both
        self._hire()
        self.buffers: dict[str, Tensor] = {}
        self._private: set[str] = set()  # buffers in which threads have rows of their own
        # rows of each buffer, as a tensor's own length is slow to read
        self._rows: dict[str, int] = {}
        self.ops = np.empty((0, NUM_COLUMNS), np.int64)
        self.numbers = np.empty(0)

    def __len__(self) -> int:
        return len(self._ops)

    def buffer(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Buffer:
        """Name a buffer of rows of `columns` elements, of the list's dtype or another."""
        dtype = dtype or self.dtype
        self._widths[name] = (row_stride(columns), dtype)
        return Buffer(name, row_stride(columns) * dtype.itemsize)

    def embed(self, table: Held | Panels, target: Buffer) -> None:
        """target[r] = row ids[r] of a (V, K) table or of panels of it."""
        op = self._append(EMBED, 0.0, None, target)
        if isinstance(table, Panels):
            op[FORM], op[INPUTS] = _form_of(table), table.num_inputs
            op[WEIGHT] = self._address(table.words)
        else:
            op[INPUTS] = table().shape[1]
            self._read(table, WEIGHT)

    def norm(
        self,
        source: Buffer,
        target: Buffer,
        weight: Held,
        eps: float,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Target = rms_norm(source); of the sampled rows only if `is_sampled`."""
        op = self._append(NORM, eps, source, target)
        op[INPUTS], op[IS_SAMPLED] = len(weight()), is_sampled
        self._read(weight, WEIGHT, padded(int(op[INPUTS]), REGISTER_BYTES // 4))
        self._private.add(target.name)

    def product(
        self,
        source: Buffer,
        target: Buffer,
        weight: Panels,
        epilogue: int,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Target = source weight.T + bias, added, gated or stored; see `layers.py`."""
        assert weight.dtype == self.dtype
        op = self._append(PRODUCT, 0.0, source, target)
        op[WEIGHT], op[BIAS] = self._address(weight.words), self._address(weight.bias)
        op[INPUTS], op[FORM] = weight.padded_inputs, _form_of(weight)
        op[GROUPS] = weight.padded_outputs // WIDTH
        op[EPILOGUE], op[IS_SAMPLED] = epilogue, is_sampled
        before = self._ops[-2] if len(self._ops) > 1 else op
        if before[CODE] == NORM and self._places[-3] == (len(self._ops) - 2, TARGET, source.name):
            before[JOINS] = 1
        self._most_inputs = max(self._most_inputs, weight.padded_inputs)
        if weight.is_int8:
            self._most_int8 = max(self._most_int8, weight.padded_inputs)

    def rotate(
        self,
        qkv: Buffer,
        layer: int,
        kv: Sequence[Tensor],
        eps: float,
        norms: tuple[Held, Held] | None = None,
    ) -> None:
        """Rotate q and k in place in `qkv`, after their norms if given, and write k and v to the
        cache."""
        before, dim = self._ops[-1], self.shape.head_dim
        if (
            before[CODE] == PRODUCT
            and self._places[-1][1:] == (TARGET, qkv.name)
            and (WIDTH % dim == 0 or dim % WIDTH == 0)
        ):
            before[JOINS] = max(1, dim // WIDTH)
        op = self._append(ROTATE, eps, qkv, qkv)
        self._with_cache(op, layer, kv)
        if norms is not None:
            dtype = norms[0]().dtype
            op[NORM_CODE] = DTYPE_CODES[dtype]
            for weight, column in zip(norms, (Q_NORM, K_NORM), strict=True):
                self._read(weight, column, dim, dtype)

    def attend(
        self,
        q: Buffer,
        o: Buffer,
        layer: int,
        kv: Sequence[Tensor],
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """Attend to the cache from one row of each sequence."""
        op = self._append(ATTEND, 0.0, q, o)
        self._with_cache(op, layer, kv)
        op[WINDOW] = -1 if window is None else window - 1
        self._frames.append(frame_of(self._problem(op, scale)))
        op[FRAME] = self._frames[-1].ctypes.data

    def _problem(self, op: np.ndarray, scale: float) -> Problem:
        """Return a problem without sequences; the list inserts those of its step."""
        shape, size = self.shape, self.size
        head = shape.head_dim * size
        sizes = Sizes(
            shape.num_kv_heads, self._group, shape.head_dim, shape.head_dim, int(op[WINDOW]), 0,
            shape.code, shape.cache_code, shape.cache_size, int(op[SOURCE_ROW]), head,
            shape.row_bytes, shape.head_bytes, shape.row_bytes, shape.head_bytes,
            int(op[TARGET_ROW]), head, 0, shape.block_size, shape.block_bytes, shape.block_bytes,
            k_scale=int(op[K_SCALE]), k_scale_block=shape.scale_block, k_scale_row=shape.scale_row,
            k_scale_head=shape.scale_head, v_scale=int(op[V_SCALE]),
            v_scale_block=shape.scale_block, v_scale_row=shape.scale_row,
            v_scale_head=shape.scale_head,
        )  # fmt: skip
        nothing = np.empty((0, NUM_STARTS), np.int64), np.empty((0, 0), np.int32)
        arrays = Arrays(REAL_LIKE, self._packed, *nothing, self._slopes, self._sinks)
        return Problem(sizes, Rule(True, float(scale), 0.0, False, False), arrays)

    def _find_likes(self) -> Likes:
        """Return the kernel of attention, compiled or loaded, and the empty arrays of the list's
        types."""
        shape, in_tiles = self.shape, self.batch_invariant
        if in_tiles:
            address = address_of_tiles(self._problem(np.zeros(NUM_COLUMNS, np.int64), 1.0))
        else:
            address = address_of_rows(REAL_LIKE, self._packed, self._cache_dtype)
        return Likes(
            REAL_LIKE, WORD_LIKE[self.dtype], address, int(in_tiles), shape.cache_size,
            self._packed.itemsize,
            chunk_of(shape.num_kv_heads * key_bytes(2 * shape.head_dim, shape.cache_size)),
        )  # fmt: skip

    def _append(
        self, code: int, number: float, source: Buffer | None, target: Buffer
    ) -> np.ndarray:
        op, index = np.zeros(NUM_COLUMNS, np.int64), len(self._ops)
        op[CODE] = code
        if source is not None:
            op[SOURCE_ROW] = source.row
            self._places.append((index, SOURCE, source.name))
        op[TARGET_ROW] = target.row
        self._places.append((index, TARGET, target.name))
        self._ops.append(op)
        self._numbers.append(number)
        return op

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _read(
        self, held: Held, column: int, count: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """Add a weight to the last operation: `count` elements of it, or all of a table's."""
        weight = _Weight(held, len(self._ops) - 1, column, count, dtype or self.dtype)
        self._weights.append(weight)
        self._place(weight, held().detach())

    def _place(self, weight: _Weight, now: Tensor) -> None:
        as_is = now.dtype == weight.dtype and now.is_contiguous()
        weight.is_copy = not as_is or len(now) < weight.padded
        weight.address, weight.num_bytes, kept = now.data_ptr(), 0, now
        if weight.is_copy:
            weight.num_bytes = now.nbytes if as_is else 0
            shape = (max(len(now), weight.padded), *now.shape[1:])
            kept = torch.zeros(shape, dtype=weight.dtype)
            kept[: len(now)] = now
        weight.kept = kept
        for ops in (self._ops, self.ops):  # the second is empty until rows are reserved
            if len(ops) > weight.op:
                ops[weight.op][weight.column] = kept.data_ptr()

    def follow_weights(self) -> None:
        """Update the addresses and copies of weights that are not packed, as their modules hold
        them now."""
        for weight in self._weights:
            now = weight.held()
            if now.data_ptr() != weight.address:
                self._place(weight, now.detach())
            elif weight.num_bytes:
                ctypes.memmove(weight.kept.data_ptr(), weight.address, weight.num_bytes)
            elif weight.is_copy:
                weight.kept[: len(now)] = now.detach()

    def _with_cache(self, op: np.ndarray, layer: int, kv: Sequence[Tensor]) -> None:
        op[LAYER], op[K_CACHE], op[V_CACHE] = layer, *map(self._address, kv[:2])
        if len(kv) > 2:
            op[K_SCALE], op[V_SCALE] = map(self._address, kv[2:])

    def reserve(self, rows: int, names: Sequence[str]) -> None:
        """Enlarge the named buffers to at least `rows` rows, and update their addresses in the
        list."""
        grown = len(self.ops) != len(self._ops)
        for name in names:
            if rows > self._rows.get(name, -1):
                members = MOST_MEMBERS if name in self._private else 1
                count = max(members * BLOCK_ROWS, 1 << (rows - 1).bit_length())
                self._rows[name] = count
                width, dtype = self._widths[name]
                self.buffers[name] = torch.zeros((count, width), dtype=dtype)
                grown = True
        if grown:
            self.ops, self.numbers = np.stack(self._ops), np.array(self._numbers)
            for index, column, name in self._places:
                if name in self.buffers:
                    self.ops[index, column] = self.buffers[name].data_ptr()

    def run(self, batch: Batch, tables: Tables, num_threads: int, first: int, last: int) -> None:
        """Run operations first ... last - 1 on rows that the buffers hold.

        Args:
            batch: the tokens and sequences of the step.
            tables: the result of `with_angles`.
            num_threads: the number of threads, this one included; the others are the crew's.

        Raises:
            StepStoppedError: stop() was called for this step; its results must be computed again.
        """
        if self._step and self._stopped == self._step:
            raise StepStoppedError(f"step {self._step} was stopped between two lists")
        if self._likes is None:
            self._likes = self._find_likes()
        meeting = self._meeting(len(self._ops))
        work = self._workspace(batch)
        given = (
            self.ops, self.numbers, first, last, num_threads, _GIVE_WAY, SYSCALL, meeting, batch,
            self.shape, tables, work, self._likes, self._most_inputs, self._most_int8,
        )  # fmt: skip
        crew = self._crew
        if num_threads == 1:
            run_list(*given, crew.mailbox, OWNER)
        elif SYSCALL:
            if os.getpid() != self._pid:  # a forked child has none of its parent's threads
                crew = self._hire()
            crew.grow(num_threads - 1, run_list, *given)
            run_list(*given, crew.mailbox, OWNER)
        else:
            self._run_on_pool(num_threads - 1, (*given, crew.mailbox, OWNER))
        # Not by the number to stop: that may have come too late, or may have been replaced since.
        if meeting[STOPPED]:
            raise StepStoppedError(f"step {self._step} was stopped")

    def begin_step(self, number: int) -> None:
        """Set the number of the step to which the next calls of `run` belong; 0 cannot be
        stopped."""
        with self._stopping:
            self._step = number

    def stop(self, number: int) -> None:
        """Keep the step of this number, if it runs, from beginning another operation; from any
        thread."""
        with self._stopping:
            if number < self._step:
                return  # a late request must not replace one for the running step
            self._stopped = number
            if len(self._counters):
                self._counters[ASKED] = number

    def _hire(self) -> Crew:
        self._pid = os.getpid()
        self._crew = Crew()
        weakref.finalize(self, self._crew.leave)
        return self._crew

    def _run_on_pool(self, count: int, given: tuple[Any, ...]) -> None:
        """Run a list with helpers of the pool, for systems without futexes, where they begin
        late."""
        pool = threads.pool()
        helpers = [pool.submit(run_list, *given) for _ in range(count)]
        try:
            run_list(*given)
        finally:
            # A helper that has not begun is cancelled; one that has finds the list at its end.
            for helper in helpers:
                helper.cancel() or helper.result()

    def with_angles(self, cos: Tensor, sin: Tensor) -> Tables:
        """Return the tables of the list with these cosines and sines, (positions, half) float32."""
        flat = (cos.reshape(-1).numpy(), sin.reshape(-1).numpy())
        return Tables(*flat)

    def _meeting(self, num_ops: int) -> np.ndarray:
        """Return the counters of a call, zeros: cache lines of their own for each operation."""
        lines = (FIRST_COUNTER + 2 * num_ops) * LINE // 8
        if len(self._counters) < lines:
            memory = np.zeros(lines + LINE // 8, np.int64)
            skip = -memory.ctypes.data % LINE // 8
            self._counters = memory[skip : skip + lines]
        self._counters.fill(0)
        self._counters[OWN] = self._step
        return self._counters

    def _workspace(self, batch: Batch) -> Workspace:
        """Return the memory that attention to the batch needs, which is kept from step to step."""
        num_sequences = len(batch.lengths)
        splits = 1
        if not self.batch_invariant:
            splits = int((batch.lengths // SPLIT).sum()) + 2 * num_sequences
        key = (num_sequences, 1 << (splits - 1).bit_length())
        if self._workspace_key != key:
            num_kv_heads, dim = self.shape.num_kv_heads, self.shape.head_dim
            group = 1 if self._group == 1 else -(-self._group // 4) * 4
            rows = key[1] * num_kv_heads * group
            width = -(-dim // 64) * 64  # 64: elements of the widest load
            sums, lse = rows * (width + 2), self.shape.num_q_heads * num_sequences
            if len(self._partial) < sums + lse:
                self._partial = np.empty(1 << (sums + lse).bit_length(), np.float32)
            finished = np.zeros(self._num_layers * num_sequences * num_kv_heads, np.int64)
            self._work = Workspace(self._partial[:sums], finished, self._partial[sums : sums + lse])
            self._workspace_key = key
        self._work.finished.fill(0)
        return self._work
