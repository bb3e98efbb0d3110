"""Plan tiled exact attention on the CPU, for dense and packed (varlen) tensors.

What      describes a call to the kernels in plain numbers, but for addresses and the lengths that
          tensors hold; a run adds these, and allocates.
Grid      see forward.py and backward.py.
One call  is one parallel region; the backward pass adds a few element-wise torch operations.
Traffic   forward: inputs and outputs once, no copies of strided inputs.
Numerics  see forward.py and backward.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention import backward_amx, forward_amx
from tilewise.kernels.cpu.attention.backward import attention_backward
from tilewise.kernels.cpu.attention.backward_few import MOST_ROWS as FEW_ROWS
from tilewise.kernels.cpu.attention.backward_few import attention_backward_few
from tilewise.kernels.cpu.attention.backward_row import attention_backward_row, padded_dim
from tilewise.kernels.cpu.attention.call import (
    CallFrame,
    is_strided,
    unit_stride,
    with_unit_strides,
)
from tilewise.kernels.cpu.attention.delta import delta_kernel
from tilewise.kernels.cpu.attention.forward import MAX_TILES, attention_forward
from tilewise.kernels.cpu.attention.forward_few import MOST_ROWS, attention_forward_few
from tilewise.kernels.cpu.attention.frame import frame_of
from tilewise.kernels.cpu.attention.gradients import (
    BackwardTasks,
    count_row_tasks,
    gradients_of,
    has_far_rows,
    place_gradients,
    place_offsets,
)
from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    Q_LEN,
    TASK,
    TILE_M,
    TILE_N,
    Backward,
    Problem,
    Sizes,
    float_type,
    packed_type,
)
from tilewise.kernels.cpu.attention.short import (
    Alone,
    fresh,
    made_of,
    run_short,
    run_short_gradient,
)
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.amx_tiles import PARTS
from tilewise.kernels.cpu.machine.blocks import UNROLLED
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, F32, F64, why_not_dtype
from tilewise.kernels.cpu.machine.team import run_on_team
from tilewise.kernels.cpu.machine.threads import run_alone, run_tasks
from tilewise.kernels.cpu.paged.decode import attend_rows
from tilewise.kernels.cpu.paged.decode_launch import NOT_SHARED, Rows, rows_of, run_decode
from tilewise.kernels.plan import Call, Layout, Refusal, Results
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.tiles.paged import TileConfig

# Products of two numbers up to which a call stays on its own thread, since waking another takes
# longer than half of them (16 queries and keys, 4 heads, D 64, float32, on two busy cores of a Xeon
# with AMX: 0.27 ms with a helper, 0.14 ms without; 32 and 8 heads 0.32 and 0.23; 2026-11-22).
_SMALL = 2**20
_ADDRESSED = (0,) * 7  # starts hold the addresses of q, k, v, o, do, dk and dv


def why_not(spec: AttentionSpec) -> str | None:
    """Return why the CPU's kernels of dense and packed attention cannot run `spec`, or None if they
    can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def plan_fwd(call: Call) -> ForwardPlan | Refusal:
    """Return the plan of o = softmax(logits) v and of the log-sum-exp of the logits, or a Refusal.

    Its results are o like q with v's head dim, and lse (B, Hq, Sq) or (Hq, T), float32, or float64
    for float64; with spec.needs_max the largest logits, laid out as lse.

    Source: Dao 2023, FlashAttention-2, algorithm 1.
    """
    reason = why_not(call.spec)
    return ForwardPlan(call) if reason is None else Refusal(reason)


def plan_bwd(call: Call) -> GradientPlan:
    """Return the plan of the gradients, bitwise reproducible, for a call whose forward pass
    `plan_fwd` does not refuse.

    ds = p (dp - delta), delta = rowsum(do * o) - dlse;
    dsinks = -sum exp(sink - lse) delta over the rows.

    Its results are dq, dk, dv, dbias (None unless spec.needs_dbias) and dsinks (None without
    sinks), shaped like the inputs.

    Source: Dao 2023, FlashAttention-2, algorithm 2.
    """
    return GradientPlan(call)


class ForwardPlan:
    """The plan of the forward pass of a call, which is made once and run for each call like it.

    Attributes:
        tiles: an empty dict, since tiles are the same for all calls.
        run: a function from the tensors to o, lse and, where they are wanted, row maxima. A short
            call of q, k and v alone has one that keeps all arguments at hand and runs on the
            caller's thread.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        layouts, spec = AttentionTensors(*call.layouts), call.spec
        q = layouts.q
        self._spec, self._dtype, self._real = spec, q.dtype, float_type(q.dtype)
        self._o_shape = (*q.shape[:-1], spec.v_head_dim)
        self._lse_shape = lse_shape(q, spec)
        self._o_made = made_of(self._o_shape, q.dtype)
        self._lse_made = made_of(self._lse_shape, self._real)
        self._frame = CallFrame(
            spec, layouts, torch.empty(self._o_shape, dtype=q.dtype, device="meta")
        )
        self._is_small = _is_small(spec, 1)
        self._ready: dict[int, _Ready] = {}  # by threads
        self._rows: dict[int, Rows] = {}
        self._decodes = _decodes(spec, self._frame.sizes.slopes_batch)
        if self._decodes:  # over a cache of one block a sequence, which lies at its start
            self._block_size, self._cache_dtype = layouts.k.shape[1], layouts.k.dtype
            self._block_table = np.zeros((spec.batch, 1), np.int32)
            self._key_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in layouts[1:3])
        takes_frames = self._decodes or spec.needs_max or not _multiplies_tiles(q.dtype)
        self._is_ready_once = self._frame.is_plain and takes_frames
        self._num_few = 0  # tasks of a call over keys of one tile
        self.run: Callable[..., Results] = self._run
        if self._is_ready_once and not self._decodes and _has_few_keys(spec):
            problem = self._frame.plain_problem()
            self._num_few, arrays = spec.batch * spec.num_kv_heads, problem.arrays
            self._kept, self._few = problem, (arrays.like, arrays.packed_like, frame_of(problem))
            self.run = self._run_few
        elif self._is_ready_once and self._decodes:
            self.run = self._run_rows
        if self.run != self._run and self._is_small and not self._frame.copies:
            self.run = run_short(
                attend_rows if self._decodes else attention_forward_few,
                self._rows_alone if self._decodes else self._few_alone,
                self._o_made,
                self._lse_made,
            )

    @property
    def steps(self) -> list[str]:
        """The steps of the plan in words, a line each."""
        if self._decodes:
            return ["run the decode kernel"]
        takes_tiles = _multiplies_tiles(self._dtype) and not self._spec.needs_max
        return [f"run the forward kernel by {_unit(takes_tiles)}"]

    def _run(self, *tensors: Tensor | None) -> Results:
        """Return o, lse and, where wanted, row maxima of any call. Raises ValueError for lengths or
        a mask that the tensors do not allow."""
        if self._is_ready_once:
            return self._run_ready(*tensors[:3])
        given, spec = with_unit_strides(self._frame, AttentionTensors(*tensors)), self._spec
        if not spec.is_varlen or int(given.cu_seqlens_q[-1]) == self._o_shape[0]:
            o = torch.empty(self._o_shape, dtype=self._dtype)
            lse = torch.empty(self._lse_shape, dtype=self._real)
        else:  # rows that belong to no sequence
            o = torch.zeros(self._o_shape, dtype=self._dtype)
            lse = torch.full(self._lse_shape, float("-inf"), dtype=self._real)
        problem = self._frame.problem(given, o)
        maxima = torch.full_like(lse, float("-inf")) if spec.needs_max else None
        if self._decodes:
            problem = self._as_cache(problem)
            threads = 1 if self._is_small else torch.get_num_threads()
            rows = rows_of(problem, self._cache_dtype, threads, size=self._key_bytes)
            run_decode(rows, lse, is_small=self._is_small)
        else:
            q_len = None if spec.is_varlen else self._o_shape[1]
            run_forward(problem, lse, q_len, is_small=self._is_small, maxima=maxima)
        return (o, lse) if maxima is None else (o, lse, maxima)

    def _as_cache(self, problem: Problem) -> Problem:
        return problem._replace(
            sizes=problem.sizes._replace(block_size=self._block_size),
            arrays=problem.arrays._replace(table=self._block_table),
        )

    def _few_alone(self) -> Alone:
        return self._few, (), self._num_few

    def _rows_alone(self) -> Alone:
        rows = self._rows.get(1)
        if rows is None:
            problem = self._as_cache(self._frame.plain_problem())
            rows = rows_of(problem, self._cache_dtype, 1, size=self._key_bytes)
            rows = self._rows.setdefault(1, rows)  # those of another thread that came first
        return rows.given, (rows.given[0], NOT_SHARED), rows.num_tasks

    def _run_few(self, q: Tensor, k: Tensor, v: Tensor, *_: None) -> Results:
        """Return o and lse of a dense call of q, k and v alone whose keys fit one tile; a small one
        stays on this thread."""
        if self._frame.copies:
            q, k, v = map(unit_stride, (q, k, v))
        o, lse = fresh(*self._o_made), fresh(*self._lse_made)
        addresses = [x.data_ptr() for x in (q, k, v, o, lse)]
        given = (*self._few, *addresses)
        if self._is_small:  # as `run_alone` would
            attention_forward_few(*given, np.zeros(1, np.int64), self._num_few)
        else:
            run_tasks(attention_forward_few, self._num_few, *given)
        return o, lse

    def _run_rows(self, q: Tensor, k: Tensor, v: Tensor, *_: None) -> Results:
        """Return o and lse of a dense call of q, k and v alone with one query a sequence, by the
        decode kernel over a cache of one block a sequence."""
        if self._frame.copies:
            q, k, v = map(unit_stride, (q, k, v))
        o, lse = fresh(*self._o_made), fresh(*self._lse_made)
        threads = 1 if self._is_small else torch.get_num_threads()
        rows = self._rows.get(threads)
        if rows is None:
            problem = self._as_cache(self._frame.plain_problem())
            rows = rows_of(problem, self._cache_dtype, threads, size=self._key_bytes)
            self._rows[threads] = rows
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
        run_decode(rows, lse, addresses, is_small=self._is_small)
        return o, lse

    def _run_ready(self, *tensors: Tensor | None) -> Results:
        """Return o, lse and, where wanted, row maxima of a dense call of q, k and v alone, by the
        vector unit's kernel; its frame is made once for each number of threads."""
        q, k, v = tensors
        if self._frame.copies:
            q, k, v = map(unit_stride, (q, k, v))
        o = fresh(*self._o_made)
        lse = fresh(*self._lse_made)
        maxima = torch.full_like(lse, float("-inf")) if self._spec.needs_max else None
        threads = 1 if self._is_small else torch.get_num_threads()
        ready = self._ready.get(threads)
        if ready is None:
            ready = _ready(self._frame.plain_problem(), self._o_shape[1], threads)
            self._ready[threads] = ready
        run = run_alone if self._is_small else run_tasks
        run(
            attention_forward,
            ready.num_tasks,
            ready.like,
            ready.packed_like,
            ready.frame,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            lse.data_ptr(),
            0 if maxima is None else maxima.data_ptr(),
            ready.tiles,
        )
        return (o, lse) if maxima is None else (o, lse, maxima)


class _Ready(NamedTuple):
    """A problem of q, k and v alone as the kernels of a plan take it, made once and used by each
    run.

    Attributes:
        num_tasks: the number of the kernel's tasks.
        like, packed_like: the empty arrays of the problem.
        frame: the problem in int64 words, with offsets instead of addresses.
        tiles: the query tiles of a task of the forward pass; 0 for a gradient.
        kept: the problem with the arrays to which the frame points.
    """

    num_tasks: int
    like: np.ndarray
    packed_like: np.ndarray
    frame: np.ndarray
    tiles: int
    kept: Problem


def _ready(problem: Problem, q_len: int | None, threads: int) -> _Ready:
    arrays = problem.arrays
    tiles, num_tasks = _plan_tasks(arrays.starts, problem.sizes, q_len, threads)
    frame = frame_of(problem)
    return _Ready(num_tasks, arrays.like, arrays.packed_like, frame, tiles, problem)


def _decodes(spec: AttentionSpec, slopes_batch: int) -> bool:
    """Return whether the decode kernel computes a forward pass: a dense call of one query a
    sequence, without bias, mask, dropout, row maxima or slopes of each sequence, and with even head
    dims."""
    return (
        spec.max_seqlen_q == 1
        and spec.max_seqlen_k > 0
        and not (spec.is_varlen or spec.has_bias or spec.mask_tile or spec.dropout_threshold)
        and not spec.needs_max
        and slopes_batch == 0
        and spec.head_dim % 2 == spec.v_head_dim % 2 == 0
    )


def _has_few_keys(spec: AttentionSpec) -> bool:
    """Return whether `forward_few` computes the forward pass of a dense call of q, k and v alone:
    its keys fit one tile, its rows of a key head MOST_ROWS, and its logits are scaled products."""
    return (
        not spec.needs_max
        and spec.softcap == 0.0
        and spec.softmax_scale > 0.0
        and spec.batch > 0
        and 0 < spec.max_seqlen_k <= TILE_N
        and 0 < spec.max_seqlen_q * spec.group_size <= MOST_ROWS
    )


def _has_few(spec: AttentionSpec) -> bool:
    """Return whether `backward_few` computes the gradient of a dense call of q, k and v alone: in
    float32 or float64, with keys and rows of one tile and head dims that are multiples of 32."""
    is_stored = DTYPE_CODES[spec.dtype] in (F32, F64)
    return (
        is_stored
        and spec.softcap == 0.0
        and spec.softmax_scale > 0.0
        and spec.batch > 0
        and 0 < spec.max_seqlen_k <= TILE_N
        and spec.max_seqlen_k % UNROLLED == 0
        and 0 < spec.max_seqlen_q * spec.group_size <= FEW_ROWS
        and spec.head_dim % 32 == spec.v_head_dim % 32 == 0
    )


def _is_small(spec: AttentionSpec, passes: int) -> bool:
    """Return whether a call has so few products of two numbers that sharing it among threads would
    take longer than computing it: at most _SMALL, `passes` times those of the forward pass."""
    pairs = spec.batch * spec.num_q_heads * spec.max_seqlen_q * spec.max_seqlen_k
    return pairs * (spec.head_dim + spec.v_head_dim) * passes <= _SMALL


def _multiplies_tiles(dtype: torch.dtype) -> bool:
    """Return whether the matrix unit (Intel AMX) computes the forward pass of `dtype`: bfloat16 on
    a CPU that has it."""
    return packed_type(dtype, simd.HAS_BF16_DOT) is np.uint16 and amx.HAS_AMX


def _unit(takes_tiles: bool) -> str:
    return "the matrix unit" if takes_tiles else "the vector unit"


class GradientPlan:
    """The plan of the backward pass of a call, which is made once and run for each call like it.

    Attributes:
        tiles: an empty dict, since tiles are the same for all calls.
        run: a function from the tensors of `plan.GRADIENT_TENSORS` to dq, dk, dv, dbias and dsinks.
            A short call of q, k and v alone has one that keeps all arguments at hand and runs on
            the caller's thread.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        do, dlse, o, lse, *rest = call.layouts
        layouts, spec = AttentionTensors(*rest), call.spec
        assert do is not None
        assert o is not None
        assert lse is not None
        # No bit depends on how these lie: those that kernels cannot read where they lie are copied.
        self._copies = is_strided(do) or is_strided(o) or not lse.meta().is_contiguous()
        self._lse_shape = lse.shape
        q, k, v = (x.meta() for x in layouts[:3])
        do, o = (unit_stride(x.meta()) for x in (do, o))
        self._spec, self._dtype, self._real = spec, q.dtype, float_type(q.dtype)
        self._frame = CallFrame(spec, layouts, o)
        bias = layouts.bias.meta() if spec.needs_dbias else None
        self._tasks = tasks = BackwardTasks.of(spec, bias)
        # Sequences may be shorter than the memory of their keys.
        self._make = torch.zeros if spec.is_varlen or spec.has_seqlens_k else torch.empty
        self._shapes = [x.shape for x in (q, k, v)]
        self._bias_like = None if bias is None else (bias.shape, bias.dtype)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (q, k, v))
        dbias = torch.empty(tasks.dbias_shape, device="meta")
        self._grads = gradients_of(tasks, do, dq, dk, dv, dbias)
        if not spec.is_varlen:
            count = count_row_tasks(self._frame.starts, self._grads.rows_per_task)
            self._grads = self._grads._replace(num_row_tasks=count)
        self._num_tasks, self._is_small = tasks.num_owners * tasks.num_chunks, _is_small(spec, 3)
        self._num_parts = 0  # numbers that chunks of keys leave of dq
        if tasks.num_chunks > 1:
            self._num_parts = (
                self._num_tasks * spec.group_size * padded_dim(self._frame.like, spec.head_dim)
            )
        self._multiplies_tiles = q.dtype in PARTS and amx.HAS_AMX
        is_plain = self._frame.is_plain and dlse is None
        self._is_row = is_plain and spec.max_seqlen_q == 1 and spec.softcap == 0.0
        # A short call has the bits of a longer one: both by the matrix unit, where that takes one.
        self._has_few = is_plain and not (self._is_row or self._multiplies_tiles) and _has_few(spec)
        self._is_short = self._is_row or self._has_few
        self._makes = tuple(made_of(x.shape, x.dtype) for x in (q, k, v))
        self.run: Callable[..., Results] = self._run
        self._ready: _Ready | None = None
        if self._is_short or (is_plain and not self._multiplies_tiles):
            problem = self._frame.plain_problem()
            starts = problem.arrays.starts
            first_q, first_k = (self._frame.numbers for _ in range(2))
            place_offsets(starts, do, dq, dk, dv, first_q, first_k)
            frame = frame_of(problem, self._grads)
            arrays = problem.arrays
            self._ready = _Ready(
                self._grads.num_row_tasks + self._num_tasks,
                arrays.like,
                arrays.packed_like,
                frame,
                0,
                problem,
            )
        is_alone = self._is_short and self._is_small and not (self._copies or self._frame.copies)
        if is_alone and tasks.num_chunks == 1:
            assert self._ready is not None
            kernel, beside = attention_backward_few, list[np.ndarray]()
            if self._is_row:  # chunks of keys would need parts, and counters of those done
                kernel, beside = attention_backward_row, [self._frame.like, NOT_SHARED]
            _, like, _, frame, _, problem = self._ready
            self.run = run_short_gradient(
                kernel, like, frame, problem, self._makes, beside, self._num_tasks
            )

    @property
    def steps(self) -> list[str]:
        """The steps of the plan in words, a line each."""
        if self._is_row:
            return ["run the backward kernel of one query by the vector unit"]
        return [f"run the backward kernel by {_unit(self._multiplies_tiles)}"]

    def _run(self, *tensors: Tensor | None) -> Results:
        """Return dq, dk, dv, dbias (None unless wanted) and dsinks (None without sinks). Raises
        ValueError for lengths or a mask that the tensors do not allow."""
        do, dlse, o, lse, *rest = tensors
        if self._ready is not None:
            return *self._run_ready(self._ready, do, o, lse, *rest[:3]), None, None
        assert do is not None
        assert o is not None
        assert lse is not None
        spec, real = self._spec, self._real
        given = with_unit_strides(self._frame, AttentionTensors(*rest))
        do, o = unit_stride(do).detach(), unit_stride(o).detach()
        lse = lse.detach().contiguous()
        problem = self._frame.problem(given, o)
        starts, grads, tasks = problem.arrays.starts, self._grads, self._tasks
        q_shape, k_shape, v_shape = self._shapes
        dk, dv = self._make(k_shape, dtype=self._dtype), self._make(v_shape, dtype=self._dtype)
        sums = _zeros(q_shape, real)
        if spec.is_varlen:
            tasks = tasks.over(int(starts[:, K_LEN].max(initial=0)))
        num_tasks = tasks.num_owners * tasks.num_chunks
        dbias = torch.zeros(tasks.dbias_shape, dtype=real)
        place_gradients(starts, do, sums, dk, dv, *self._frame.firsts(given))
        if spec.is_varlen:
            count = count_row_tasks(starts, grads.rows_per_task)
            grads = grads._replace(num_row_tasks=count, num_chunks=tasks.num_chunks)
        delta = _zeros(lse.shape, real) if dlse is None else dlse.to(real, copy=True).contiguous()
        done = np.zeros(num_tasks + 1, np.int64)
        # Products of parts are not rounded as those of the forward pass: large logits feel it.
        has_parts = self._multiplies_tiles and PARTS[self._dtype] > 1
        if self._multiplies_tiles and not (has_parts and has_far_rows(lse)):
            run = run_alone if self._is_small else run_tasks
            numbers = [tensor.view(-1).numpy() for tensor in (lse, delta, sums, dbias)]
            call = Backward(*problem, grads, *numbers, done)
            call = call._replace(arrays=call.arrays._replace(packed_like=np.empty(0, np.uint16)))
            run(delta_kernel, grads.num_row_tasks, call)
            run(backward_amx.attention_backward, num_tasks, call, PARTS[self._dtype])
            sums.mul_(spec.softmax_scale)
        else:
            run = run_alone if self._is_small else run_on_team
            run(
                attention_backward,
                grads.num_row_tasks + num_tasks,
                *problem.arrays[:2],
                frame_of(problem, grads),
                _ADDRESSED,
                lse.data_ptr(),
                delta.data_ptr(),
                sums.data_ptr(),
                dbias.data_ptr(),
                done,
            )
        dsinks = None
        if given.sinks is not None:
            weights = torch.exp(given.sinks.detach().to(real).unsqueeze(-1) - lse)
            weights = torch.where(lse == float("-inf"), 0.0, weights)
            kept = (weights * delta).sum(-1)
            dsinks = -(kept if spec.is_varlen else kept.sum(0)).to(given.sinks.dtype)
        if self._bias_like is None:
            return sums.to(self._dtype), dk, dv, None, dsinks
        shape, dtype = self._bias_like
        dbias = dbias.sum(0).sum_to_size(shape).to(dtype).contiguous()
        return sums.to(self._dtype), dk, dv, dbias, dsinks

    def _run_ready(
        self, ready: _Ready, do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a dense call of q, k and v alone, of which only o has a gradient,
        with the frame `ready` that was made with the plan."""
        if self._frame.copies:
            q, k, v = map(unit_stride, (q, k, v))
        if self._copies:
            do, o, lse = unit_stride(do), unit_stride(o), lse.detach().contiguous()
        if self._is_short:
            return self._run_few(ready, do, o, lse, q, k, v)
        _, made_k, made_v = self._makes
        dk, dv = fresh(*made_k), fresh(*made_v)
        addresses = tuple([x.data_ptr() for x in (q, k, v, o, do, dk, dv)])
        run = run_alone if self._is_small else run_on_team
        sums = _zeros(self._shapes[0], self._real)
        delta = np.zeros(self._lse_shape, ready.like.dtype)
        run(
            attention_backward,
            ready.num_tasks,
            ready.like,
            ready.packed_like,
            ready.frame,
            addresses,
            lse.data_ptr(),
            delta.ctypes.data,
            sums.data_ptr(),
            0,
            np.zeros(self._num_tasks + 1, np.int64),
        )
        return sums.to(self._dtype), dk, dv

    def _run_few(
        self, ready: _Ready, do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a dense call of q, k and v alone with one query a sequence
        (`backward_row`), or with keys and rows of one tile (`backward_few`)."""
        dq, dk, dv = [fresh(*made) for made in self._makes]
        addresses = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            do.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            lse.data_ptr(),
            dq.data_ptr(),
        )
        if self._is_row:
            run = run_alone if self._is_small else run_on_team
            run(
                attention_backward_row,
                self._num_tasks,
                ready.like,
                ready.frame,
                *addresses,
                np.empty(self._num_parts, ready.like.dtype),
                np.zeros(self._tasks.num_owners, np.int64),
            )
        else:
            run = run_alone if self._is_small else run_tasks
            run(attention_backward_few, self._num_tasks, ready.like, ready.frame, *addresses)
        return dq, dk, dv


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros, float64 for float64 and else float32, made without torch's threads,
    which spin for milliseconds once woken."""
    return torch.from_numpy(np.zeros(shape, np.float64 if dtype == torch.float64 else np.float32))


def run_forward(
    problem: Problem,
    lse: Tensor,
    q_len: int | None = None,
    *,
    is_small: bool = False,
    maxima: Tensor | None = None,
) -> None:
    """Compute attention for a problem: write o to the addresses in it, and fill lse and `maxima`.
    bfloat16 takes the matrix unit where the CPU has one.

    Args:
        lse: a tensor for the log-sum-exps, contiguous.
        q_len: the query length of every sequence; None if they differ.
        is_small: True to stay on the calling thread.
        maxima: a tensor for the largest logit of each row, in the shape of lse. It is filled by the
            vector unit, since the matrix unit's kernel tracks powers of two above the maxima only.
    """
    run, threads = run_alone if is_small else run_tasks, torch.get_num_threads()
    multiplies_tiles = problem.arrays.packed_like.dtype == np.uint16 and amx.HAS_AMX
    if multiplies_tiles and maxima is None:
        tiles, num_tasks = _plan_tasks(problem.arrays.starts, problem.sizes, q_len, threads)
        run(forward_amx.attention_forward, num_tasks, problem, lse.view(-1).numpy(), tiles)
        return
    ready = _ready(problem, q_len, threads)
    run(
        attention_forward,
        ready.num_tasks,
        ready.like,
        ready.packed_like,
        ready.frame,
        0,
        0,
        0,
        0,
        lse.data_ptr(),
        0 if maxima is None else maxima.data_ptr(),
        ready.tiles,
    )


def _plan_tasks(
    starts: np.ndarray, sizes: Sizes, q_len: int | None, threads: int
) -> tuple[int, int]:
    """Return (query tiles of a task, number of tasks) of the forward pass, and write the number of
    each sequence's first task to `starts` in place.

    Args:
        starts: (B, columns) int64, see `Problem.starts`.
        q_len: the query length of every sequence; None if they differ.
        threads: the number of threads, of which each gets about four tasks.
    """
    if q_len is None:
        num_tiles = -(-starts[:, Q_LEN] * sizes.group // TILE_M)
        all_tiles, most = int(num_tiles.sum()), int(num_tiles.max(initial=1))
    else:  # Python's own integers: a short call feels each of NumPy's operations
        num_tiles = -(-q_len * sizes.group // TILE_M)
        all_tiles, most = num_tiles * len(starts), num_tiles
    # Sharing packed keys among tiles saves packing; four tasks a thread keep several busy.
    per_task = all_tiles * sizes.num_kv_heads // (4 * threads if threads > 1 else 1)
    tiles = max(1, min(MAX_TILES, per_task, most))
    tasks = -(-num_tiles // tiles) * sizes.num_kv_heads
    if q_len is not None:
        if len(starts) > 1:
            starts[:, TASK] = np.arange(len(starts)) * tasks
        return tiles, tasks * len(starts)
    starts[:, TASK] = np.cumsum(tasks) - tasks
    return tiles, int(tasks.sum())


def lse_shape(q: Tensor | Layout, spec: AttentionSpec) -> tuple[int, ...]:
    """Return the shape of lse for queries q: (Hq, T) for packed and (B, Hq, Sq) for dense ones."""
    if spec.is_varlen:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]
