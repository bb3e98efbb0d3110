"""Plan tiled exact attention on the CPU, for dense and packed (varlen) tensors.

What      describes a call to the kernels in plain numbers, but for addresses and the lengths that
          tensors hold; a run adds these, and allocates.
Grid      see forward.py and backward.py.
One call  is one parallel region; the backward pass adds a few element-wise torch operations.
Traffic   forward: inputs and outputs once, no copies of strided inputs.
Numerics  see forward.py and backward.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention import backward_amx, forward_amx
from tilewise.kernels.cpu.attention.backward import attention_backward
from tilewise.kernels.cpu.attention.delta import delta_kernel
from tilewise.kernels.cpu.attention.forward import MAX_TILES, attention_forward
from tilewise.kernels.cpu.attention.frame import frame_of
from tilewise.kernels.cpu.attention.gradients import (
    BackwardTasks,
    count_row_tasks,
    gradients_of,
    place_gradients,
    place_offsets,
)
from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    LSE,
    NUM_STARTS,
    Q_LEN,
    TASK,
    TILE_M,
    Arrays,
    Backward,
    K,
    O,
    Problem,
    Q,
    Rule,
    Sizes,
    V,
    bias_numbers,
    check_edges,
    check_longest,
    dropout_numbers,
    float_type,
    mask_numbers,
    packed_type,
    per_head,
    sizes_of,
)
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.amx_tiles import PARTS
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, why_not_dtype
from tilewise.kernels.cpu.machine.team import run_on_team
from tilewise.kernels.cpu.machine.threads import run_alone, run_tasks
from tilewise.kernels.cpu.paged.decode_launch import Rows, rows_of, run_decode
from tilewise.kernels.plan import Call, Layout, Refusal, Results
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.tiles.paged import TileConfig

# Products of two numbers up to which a call stays on its own thread: to wake another takes longer
# than half of them (16 queries and keys, 4 heads, D 64, float32, on two busy cores of a Xeon with
# AMX: 0.27 ms with a helper, 0.14 ms without; 32 and 8 heads 0.32 and 0.23; 2026-11-22).
_SMALL = 2**20
_NO_ADDRESSES = (0,) * (NUM_STARTS - 4)
_ADDRESSED = (0,) * 7  # starts hold the addresses of q, k, v, o, do, dk and dv


def why_not(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def plan_fwd(call: Call) -> ForwardPlan | Refusal:
    """Return how o = softmax(logits) v and the log-sum-exp of the logits are computed.

    Its results are o like q with v's head dim, and lse (B, Hq, Sq) or (Hq, T), float32, or float64
    for float64; with spec.needs_max the largest logits, lying as lse does.

    Source: Dao 2023, FlashAttention-2, algorithm 1.
    """
    reason = why_not(call.spec)
    return ForwardPlan(call) if reason is None else Refusal(reason)


def plan_bwd(call: Call) -> GradientPlan:
    """Return how the gradients are computed; bitwise reproducible.

    ds = p (dp - delta), delta = rowsum(do * o) - dlse;
    dsinks = -sum exp(sink - lse) delta over the rows.

    Its results are dq, dk, dv, dbias (None unless spec.needs_dbias) and dsinks (None without
    sinks), shaped like the inputs.

    Source: Dao 2023, FlashAttention-2, algorithm 2.
    """
    return GradientPlan(call)


class _Frame:
    """A call as the kernels take it, but for addresses and lengths that tensors hold.

    Attributes:
        sizes: with 0 for the address of the bias.
        starts: of a dense call, with offsets in place of addresses.
    """

    def __init__(self, spec: AttentionSpec, layouts: AttentionTensors, o: Tensor) -> None:
        q, k, v = (_unit_stride(x.meta()) for x in layouts[:3])
        bias = None if layouts.bias is None else layouts.bias.meta()
        slopes = layouts.alibi_slopes
        self.spec = spec
        self.copies = any(_is_strided(x) for x in layouts[:3])
        self._steps = [x.stride(0) * x.element_size() for x in (q, k, v, o)]
        starts = np.zeros((spec.batch, NUM_STARTS), np.int64)
        self.numbers = np.arange(spec.batch)
        if not spec.is_varlen:
            starts[:, Q_LEN], starts[:, K_LEN] = q.shape[1], k.shape[1]
            starts[:, LSE] = self.numbers * spec.num_q_heads * q.shape[1]
            self._place(starts, self.numbers, self.numbers)
        self.starts = starts
        self.sizes = _sizes_of(spec, q, k, v, o, bias, slopes)
        self._rule = Rule(
            is_scaled_only=bias is None
            and slopes is None
            and spec.softcap == 0.0
            and spec.softmax_scale > 0.0,
            scale=float(spec.softmax_scale),
            softcap=float(spec.softcap),
            has_bias=bias is not None,
            has_alibi=slopes is not None,
        )
        self._real = np.float64 if q.dtype == torch.float64 else np.float32
        self._like = np.empty(0, self._real)
        self._packed_like = np.empty(0, packed_type(q.dtype, simd.HAS_BF16_DOT))
        self._table = np.empty((0, 0), np.int32)
        self.is_plain = not (spec.is_varlen or spec.has_seqlens_k or spec.has_sinks) and (
            bias is None and slopes is None and not (spec.mask_tile or spec.dropout_threshold)
        )

    def _place(self, starts: np.ndarray, first_q: np.ndarray, first_k: np.ndarray) -> None:
        firsts = (first_q, first_k, first_k, first_q)
        for column, step, first in zip((Q, K, V, O), self._steps, firsts, strict=True):
            starts[:, column] = first * step

    def problem(self, tensors: AttentionTensors, o: Tensor) -> Problem:
        """Return the call of these tensors."""
        q, k, v = tensors[:3]
        spec, sizes = self.spec, self.sizes
        # The columns of Q, K, V and O are the first ones.
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), *_NO_ADDRESSES)
        starts = self.starts + np.array(addresses, np.int64)
        if self.is_plain:
            return self._problem(starts)
        if spec.is_varlen:
            self._fill_packed(starts, tensors)
            starts[:, :4] += np.array(addresses[:4], np.int64)
        elif tensors.seqlens_k is not None:
            lengths = tensors.seqlens_k.numpy()
            if lengths.size and not 0 <= lengths.min() <= lengths.max() <= k.shape[1]:
                raise ValueError(f"seqlens_k must lie in [0, {k.shape[1]}], got {lengths}")
            starts[:, K_LEN] = lengths
        if tensors.bias is not None:
            sizes = sizes._replace(bias=tensors.bias.data_ptr())
        slopes = per_head(tensors.alibi_slopes, spec.num_q_heads, 0.0, self._real)
        sinks = per_head(tensors.sinks, spec.num_q_heads, -np.inf, self._real)
        return Problem(
            sizes,
            self._rule,
            Arrays(self._like, self._packed_like, starts, self._table, slopes, sinks),
            mask_numbers(tensors.mask, spec.mask_tile),
            dropout_numbers(tensors.philox, spec),
        )

    def plain_problem(self) -> Problem:
        """Return a call without more than q, k and v, with offsets in place of addresses."""
        return self._problem(self.starts.copy())

    def _problem(self, starts: np.ndarray) -> Problem:
        heads = self.spec.num_q_heads
        slopes, sinks = (per_head(None, heads, x, self._real) for x in (0.0, -np.inf))
        arrays = Arrays(self._like, self._packed_like, starts, self._table, slopes, sinks)
        return Problem(self.sizes, self._rule, arrays)

    def _fill_packed(self, starts: np.ndarray, tensors: AttentionTensors) -> None:
        edges_q, edges_k = tensors.cu_seqlens_q.numpy(), tensors.cu_seqlens_k.numpy()
        check_edges("cu_seqlens_q", edges_q, tensors.q.shape[0])
        check_edges("cu_seqlens_k", edges_k, tensors.k.shape[0])
        first_q, first_k = self.firsts(tensors)
        starts[:, Q_LEN], starts[:, K_LEN] = np.diff(edges_q), np.diff(edges_k)
        check_longest("max_seqlen_q", starts[:, Q_LEN], self.spec.max_seqlen_q)
        check_longest("max_seqlen_k", starts[:, K_LEN], self.spec.max_seqlen_k)
        starts[:, LSE] = first_q
        self._place(starts, first_q, first_k)

    def firsts(self, tensors: AttentionTensors) -> list[np.ndarray]:
        """Return the first row of each sequence of queries and keys; of dense ones its number."""
        if not self.spec.is_varlen:
            return [self.numbers, self.numbers]
        edges = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        return [each.numpy()[:-1].astype(np.int64) for each in edges]


def _sizes_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    bias: Tensor | None,
    slopes: Layout | None,
) -> Sizes:
    sizes = sizes_of(spec, q, k, v, o, DTYPE_CODES[k.dtype], spec.window_right)
    shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
    _, code, to_batch, to_head, to_row, to_column = bias_numbers(bias, shape)
    return sizes._replace(
        bias_code=code, bias_batch=to_batch, bias_head=to_head, bias_row=to_row,
        bias_column=to_column,
        slopes_batch=spec.num_q_heads if slopes is not None and len(slopes.shape) == 2 else 0,
    )  # fmt: skip


class ForwardPlan:
    """The forward pass of a call.

    Attributes:
        tiles: none, they are the same for all calls.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        layouts, spec = AttentionTensors(*call.layouts), call.spec
        q = layouts.q
        self._spec, self._dtype, self._real = spec, q.dtype, float_type(q.dtype)
        self._o_shape = (*q.shape[:-1], spec.v_head_dim)
        self._lse_shape = lse_shape(q, spec)
        self._frame = _Frame(
            spec, layouts, torch.empty(self._o_shape, dtype=q.dtype, device="meta")
        )
        self._is_small = _is_small(spec, 1)
        self._ready: dict[int, _Ready | Rows] = {}  # by threads
        self._decodes = _decodes(spec, self._frame.sizes.slopes_batch)
        if self._decodes:  # over a cache of one block a sequence, which lies at its start
            self._block_size, self._cache_dtype = layouts.k.shape[1], layouts.k.dtype
            self._block_table = np.zeros((spec.batch, 1), np.int32)
        takes_frames = self._decodes or spec.needs_max or not _multiplies_tiles(q.dtype)
        self._is_ready_once = self._frame.is_plain and takes_frames

    @property
    def steps(self) -> list[str]:
        """What it does, a line each."""
        if self._decodes:
            return ["run the decode kernel"]
        unit = "the vector unit" if self._spec.needs_max else _unit_of(self._dtype)
        return [f"run the forward kernel by {unit}"]

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o, lse and row maxima where wanted."""
        if self._is_ready_once:
            return self._run_ready(*tensors[:3])
        given, spec = _with_unit_strides(self._frame, AttentionTensors(*tensors)), self._spec
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
            rows = rows_of(problem, self._cache_dtype, threads)
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

    def _run_ready(self, *tensors: Tensor | None) -> Results:
        """Run a call without more than q, k and v."""
        q, k, v = tensors
        if self._frame.copies:
            q, k, v = map(_unit_stride, (q, k, v))
        o = torch.empty(self._o_shape, dtype=self._dtype)
        lse = torch.empty(self._lse_shape, dtype=self._real)
        maxima = torch.full_like(lse, float("-inf")) if self._spec.needs_max else None
        threads = 1 if self._is_small else torch.get_num_threads()
        ready = self._ready.get(threads)
        if ready is None:
            problem = self._frame.plain_problem()
            if self._decodes:
                ready = rows_of(self._as_cache(problem), self._cache_dtype, threads)
            else:
                ready = _ready(problem, self._o_shape[1], threads)
            self._ready[threads] = ready
        if isinstance(ready, Rows):
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
            run_decode(ready, lse, addresses, is_small=self._is_small)
            return o, lse
        run = run_alone if self._is_small else run_tasks
        run(
            attention_forward, ready.num_tasks, ready.like, ready.packed_like, ready.frame,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(),
            0 if maxima is None else maxima.data_ptr(), ready.tiles,
        )  # fmt: skip
        return (o, lse) if maxima is None else (o, lse, maxima)


class _Ready(NamedTuple):
    """A problem as the forward kernel takes it.

    Attributes:
        kept: whose arrays the frame points to.
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
    """Whether the call is one query a sequence, as the decode kernel computes it."""
    return (
        spec.max_seqlen_q == 1
        and spec.max_seqlen_k > 0
        and not (spec.is_varlen or spec.has_bias or spec.mask_tile or spec.dropout_threshold)
        and not spec.needs_max
        and slopes_batch == 0
        and spec.head_dim % 2 == spec.v_head_dim % 2 == 0
    )


def _is_small(spec: AttentionSpec, passes: int) -> bool:
    """Whether `passes` of the forward pass's two products are too few to share."""
    pairs = spec.batch * spec.num_q_heads * spec.max_seqlen_q * spec.max_seqlen_k
    return pairs * (spec.head_dim + spec.v_head_dim) * passes <= _SMALL


def _multiplies_tiles(dtype: torch.dtype) -> bool:
    """Whether the forward pass of `dtype` is that of the matrix unit."""
    return packed_type(dtype, simd.HAS_BF16_DOT) is np.uint16 and amx.HAS_AMX


def _unit_of(dtype: torch.dtype) -> str:
    return "the matrix unit" if dtype in PARTS and amx.HAS_AMX else "the vector unit"


class GradientPlan:
    """The backward pass of a call.

    Attributes:
        tiles: none, they are the same for all calls.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        do, dlse, o, lse, *rest = call.layouts
        layouts, spec = AttentionTensors(*rest), call.spec
        assert do is not None
        assert o is not None
        assert lse is not None
        self._is_contiguous = not (_is_strided(do) or _is_strided(o)) and (
            lse.meta().is_contiguous() and dlse is None
        )
        self._lse_shape = lse.shape
        q, k, v = (x.meta() for x in layouts[:3])
        do, o = (_unit_stride(x.meta()) for x in (do, o))
        self._spec, self._dtype, self._real = spec, q.dtype, float_type(q.dtype)
        self._frame = _Frame(spec, layouts, o)
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
        self._multiplies_tiles = q.dtype in PARTS and amx.HAS_AMX
        self._ready: _Ready | None = None
        if self._frame.is_plain and self._is_contiguous and not self._multiplies_tiles:
            problem = self._frame.plain_problem()
            starts = problem.arrays.starts
            first_q, first_k = (self._frame.numbers for _ in range(2))
            place_offsets(starts, do, dq, dk, dv, first_q, first_k)
            frame = frame_of(problem, self._grads)
            arrays = problem.arrays
            self._ready = _Ready(
                self._grads.num_row_tasks + self._num_tasks, arrays.like, arrays.packed_like, frame,
                0, problem,
            )  # fmt: skip

    @property
    def steps(self) -> list[str]:
        """What it does, a line each."""
        return [f"run the backward kernel by {_unit_of(self._dtype)}"]

    def run(self, *tensors: Tensor | None) -> Results:
        """Return dq, dk, dv, dbias and dsinks."""
        if self._ready is not None:
            return self._run_ready(self._ready, *tensors[:7])
        do, dlse, o, lse, *rest = tensors
        assert do is not None
        assert o is not None
        assert lse is not None
        spec, real = self._spec, self._real
        given = _with_unit_strides(self._frame, AttentionTensors(*rest))
        do, o = _unit_stride(do).detach(), _unit_stride(o).detach()
        lse = lse.detach().contiguous()
        problem = self._frame.problem(given, o)
        starts, grads = problem.arrays.starts, self._grads
        q_shape, k_shape, v_shape = self._shapes
        dk, dv = self._make(k_shape, dtype=self._dtype), self._make(v_shape, dtype=self._dtype)
        sums = _zeros(q_shape, real)
        dbias = torch.zeros(self._tasks.dbias_shape, dtype=real)
        place_gradients(starts, do, sums, dk, dv, *self._frame.firsts(given))
        if spec.is_varlen:
            grads = grads._replace(num_row_tasks=count_row_tasks(starts, grads.rows_per_task))
        delta = _zeros(lse.shape, real) if dlse is None else dlse.to(real, copy=True).contiguous()
        done = np.zeros(self._num_tasks + 1, np.int64)
        if self._multiplies_tiles:
            run = run_alone if self._is_small else run_tasks
            numbers = [tensor.view(-1).numpy() for tensor in (lse, delta, sums, dbias)]
            call = Backward(*problem, grads, *numbers, done)
            call = call._replace(arrays=call.arrays._replace(packed_like=np.empty(0, np.uint16)))
            run(delta_kernel, grads.num_row_tasks, call)
            run(backward_amx.attention_backward, self._num_tasks, call, PARTS[self._dtype])
            sums.mul_(spec.softmax_scale)
        else:
            run = run_alone if self._is_small else run_on_team
            run(
                attention_backward, grads.num_row_tasks + self._num_tasks, *problem.arrays[:2],
                frame_of(problem, grads), _ADDRESSED, lse.data_ptr(), delta.data_ptr(),
                sums.data_ptr(), dbias.data_ptr(), done,
            )  # fmt: skip
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

    def _run_ready(self, ready: _Ready, *tensors: Tensor | None) -> Results:
        """Run a call without more than q, k and v, of which only o has a gradient."""
        do, _, o, lse, q, k, v = tensors
        if self._frame.copies:
            q, k, v = map(_unit_stride, (q, k, v))
        _, k_shape, v_shape = self._shapes
        dk, dv = torch.empty(k_shape, dtype=self._dtype), torch.empty(v_shape, dtype=self._dtype)
        sums, delta = (
            _zeros(self._shapes[0], self._real),
            np.zeros(self._lse_shape, ready.like.dtype),
        )
        addresses = tuple([x.data_ptr() for x in (q, k, v, o, do, dk, dv)])
        run = run_alone if self._is_small else run_on_team
        run(
            attention_backward, ready.num_tasks, ready.like, ready.packed_like, ready.frame,
            addresses, lse.data_ptr(), delta.ctypes.data, sums.data_ptr(), 0,
            np.zeros(self._num_tasks + 1, np.int64),
        )  # fmt: skip
        return sums.to(self._dtype), dk, dv, None, None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that no thread has touched: torch's own threads, once woken, spin for milliseconds."""
    return torch.from_numpy(np.zeros(shape, np.float64 if dtype == torch.float64 else np.float32))


def run_forward(
    problem: Problem,
    lse: Tensor,
    q_len: int | None = None,
    *,
    is_small: bool = False,
    maxima: Tensor | None = None,
) -> None:
    """Fill o, through its addresses, and lse.

    Args:
        q_len: that of every sequence, where it is one.
        is_small: stay on the calling thread.
        maxima: gets the largest logit of each row, in the shape of lse; by the vector unit, since
            the matrix unit's kernel follows no maxima, but powers of two above them.
    """
    run, threads = run_alone if is_small else run_tasks, torch.get_num_threads()
    multiplies_tiles = problem.arrays.packed_like.dtype == np.uint16 and amx.HAS_AMX
    if multiplies_tiles and maxima is None:
        tiles, num_tasks = _plan_tasks(problem.arrays.starts, problem.sizes, q_len, threads)
        run(forward_amx.attention_forward, num_tasks, problem, lse.view(-1).numpy(), tiles)
        return
    ready = _ready(problem, q_len, threads)
    run(
        attention_forward, ready.num_tasks, ready.like, ready.packed_like, ready.frame, 0, 0, 0, 0,
        lse.data_ptr(), 0 if maxima is None else maxima.data_ptr(), ready.tiles,
    )  # fmt: skip


def _plan_tasks(
    starts: np.ndarray, sizes: Sizes, q_len: int | None, threads: int
) -> tuple[int, int]:
    """Number the tasks of all sequences in `starts`; return tiles of a task, and how many tasks."""
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
    """(Hq, T) for packed and (B, Hq, Sq) for dense queries."""
    if spec.is_varlen:
        return q.shape[1], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


def _is_strided(x: Tensor | Layout) -> bool:
    step = x.stride(-1) if isinstance(x, Tensor) else x.stride[-1]
    return step != 1 and x.shape[-1] != 1


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy when its last dim is strided."""
    return tensor.detach().contiguous() if _is_strided(tensor) else tensor


def _with_unit_strides(frame: _Frame, tensors: AttentionTensors) -> AttentionTensors:
    """The tensors of a call, with copies of those of q, k and v whose last dim is strided."""
    if not frame.copies:
        return tensors
    q, k, v = (_unit_stride(x) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)
