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
from collections.abc import Sequence
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
from tilewise.kernels.cpu.latent.kernel import (
    LOG2_E,
    attend_latents,
    merge_splits,
)
from tilewise.kernels.cpu.latent.kernel import Arrays as LatentArrays
from tilewise.kernels.cpu.latent.kernel import Sizes as LatentSizes
from tilewise.kernels.cpu.latent.plan import TASKS_PER_CORE
from tilewise.kernels.cpu.latent.tiles import ACC_PAD, PAD, ROWS
from tilewise.kernels.cpu.machine import amx, threads
from tilewise.kernels.cpu.machine.calls import address_of
from tilewise.kernels.cpu.machine.frame import words_of
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES
from tilewise.kernels.cpu.machine.simd import HAS_BF16_DOT, REGISTER_BYTES
from tilewise.kernels.cpu.paged.decode import SPLIT, chunk_of
from tilewise.kernels.cpu.paged.decode_launch import address_of_rows, key_bytes, takes_integers
from tilewise.kernels.cpu.paged.decode_tiles import address_of_tiles
from tilewise.kernels.cpu.paged.plan import CODES
from tilewise.kernels.cpu.recurrent.convolution import convolve
from tilewise.kernels.cpu.recurrent.scan import keep_keys, scan
from tilewise.kernels.cpu.step.codes import (
    ACTIVE_GROUPS,
    ADD,
    ALPHA,
    ANGLES,
    ATTEND,
    BEST_IN_GROUP,
    BETA,
    BETA_ROWS,
    BETA_STRIDE,
    BIAS,
    CAP,
    CENTRES,
    CHUNK,
    CHUNK_KEYS,
    CODE,
    COPIES,
    CORRECTION,
    DIM,
    EMBED,
    EPILOGUE,
    EPS,
    EXPERT_SCALE,
    EXTRA,
    EXTRA_ROW,
    FACTOR,
    FORM,
    FRAME,
    FUNCTION,
    GATE,
    GATE_ROWS,
    GATE_STRIDE,
    GROUPS,
    GROWTH_FIRST,
    GROWTH_LENGTH,
    HALF,
    INPUTS,
    IS_AFTER,
    IS_INTERLEAVED,
    IS_NORMALISED,
    IS_PART,
    IS_SAMPLED,
    JOINS,
    K_AT,
    K_BIAS,
    K_BLOCK,
    K_CACHE,
    K_HEAD,
    K_NORM,
    K_ROW,
    K_SCALE,
    K_WEIGHT,
    KEPT_GATES,
    KEPT_KEYS,
    KEPT_UPDATES,
    KERNEL,
    KIND,
    LAYER,
    LIMIT,
    NARROW_PANELS,
    NORM,
    NORM_CODE,
    NORM_STEP,
    NUM_ACTIVE,
    NUM_COLUMNS,
    NUM_EXPERTS,
    NUM_GROUPS,
    NUM_KV,
    NUM_NUMBERS,
    NUM_Q,
    NUM_SLOTS,
    ORDER,
    OUTPUTS,
    OWN_KERNEL,
    PANELS,
    PARTS,
    PHASE,
    PIECES,
    PLACES,
    PRODUCT,
    Q_AT,
    Q_BIAS,
    Q_NORM,
    Q_STEP,
    Q_WEIGHT,
    ROTATE,
    ROUNDS,
    SCALE_BLOCK,
    SCALE_HEAD,
    SCALE_ROW,
    SCORES,
    SHIFT,
    SOURCE,
    SOURCE_ROW,
    SOURCE_STEP,
    STATE,
    STORE,
    TARGET,
    TARGET_ROW,
    TARGET_STEP,
    V_AT,
    V_BLOCK,
    V_CACHE,
    V_DIM,
    V_FROM,
    V_HEAD,
    V_ROW,
    V_SCALE,
    V_WEIGHT,
    WEIGHT,
    WEIGHTS,
    WINDOW,
    Batch,
    Likes,
    Shape,
    Tables,
    Workspace,
)
from tilewise.kernels.cpu.step.crew import SYSCALL, Crew
from tilewise.kernels.cpu.step.functions import CLAMPED
from tilewise.kernels.cpu.step.functions import CODES as FUNCTIONS
from tilewise.kernels.cpu.step.gated import GATE_FIRST, NORMALISES, gate_rows, multiply_elements
from tilewise.kernels.cpu.step.latents import (
    ATTEND_LATENTS,
    MERGE,
    attend_rows_to_latents,
)
from tilewise.kernels.cpu.step.latents import NUM_STARTS as NUM_LATENT_STARTS
from tilewise.kernels.cpu.step.layers import BLOCK_ROWS
from tilewise.kernels.cpu.step.meeting import LINE
from tilewise.kernels.cpu.step.mixture import COMBINE, FLOATS, GATHER, ROUTE, mix_rows
from tilewise.kernels.cpu.step.operands import (
    Buffer,
    Growth,
    Heads,
    Held,
    Latents,
    Mixture,
    Norm,
    Recurrence,
)
from tilewise.kernels.cpu.step.panels import STEP, WIDTH, Panels, padded, row_stride
from tilewise.kernels.cpu.step.recurrence import (
    BY_CHANNEL,
    DELTA,
    TIME_STEPS,
    convolve_rows,
    keep_rows,
    scan_rows,
    weigh_rows,
)
from tilewise.kernels.cpu.step.run import (
    ASKED,
    CHUNK_BYTES,
    FIRST_COUNTER,
    MOST_MEMBERS,
    OWN,
    OWNER,
    STOPPED,
    run_list,
)
from tilewise.kernels.cpu.step.wide_product import multiply_wide

__all__ = ["REAL_LIKE", "WORD_LIKE", "Program"]

WORD_LIKE = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.float32: np.empty(0, np.float32),
}
REAL_LIKE = np.empty(0, np.float32)


def _find_yield() -> int:
    """Return the address of the C function sched_yield, or 0 if there is none."""
    if os.name != "posix":
        return 0
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


_GIVE_WAY = _find_yield()
_KINDS = {"delta": DELTA, "channels": BY_CHANNEL, "time steps": TIME_STEPS}
# What the kernels of states are called with, told apart by type.
_PLACES = (np.empty(0, np.int64),) * 3
_TASKS = np.empty(0, np.int64), 0
_CONVOLVE = (REAL_LIKE, *[0] * 10, True, *_PLACES, 0, 0, True, *_TASKS)
_HEADS = (*[0] * 4, 1.0, True)
_ROWS = (REAL_LIKE, 0, True, REAL_LIKE, 0)
_SCAN = (REAL_LIKE, *[0] * 14, *_ROWS, *[REAL_LIKE] * 2, True, *[0] * 3, *_PLACES, *_HEADS, *_TASKS)
_KEEP = (REAL_LIKE, *[0] * 6, *_PLACES, 0, 0, *_TASKS)


def _form_of(weight: Panels) -> int:
    return NARROW_PANELS if weight.is_narrow else PANELS


@dataclass
class _Weight:
    """A weight of a module that an operation reads unpacked; the module may change or replace it
    later, see `Program.follow_weights`.

    Attributes:
        held: a function that returns the current weight.
        op, column: the operation, and the column of its row that holds the weight's address; -1
            for a weight whose copy lies where it always did.
        padded, dtype: the number of elements that the operation reads, at least the weight's, 0 for
            all of a table's, and their dtype.
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


class _Memory(NamedTuple):
    """The sizes of a declared buffer: the columns of a row with padding, the dtype, the rows for
    each token, and True if it has rows for sampled tokens only."""

    columns: int
    dtype: torch.dtype
    copies: int
    is_sampled: bool


class Program:
    """A list of operations over one model's weights and cache, with their buffers and threads;
    methods append operations, and `run` runs a range of them for a batch, which can be repeated.

    Args:
        dtype: the dtype of weights and activations.
        kv: any layer's cache, see `Heads`, or latents: its dtype and its blocks are those of all.
        batch_invariant: True if a single row of a sequence must attend with the same bits as among
            several.
    """

    def __init__(
        self, dtype: torch.dtype, kv: Sequence[Tensor], *, batch_invariant: bool = False
    ) -> None:
        self.dtype, self.size = dtype, dtype.itemsize
        cache = kv[0]
        self.code, self.cache_size = DTYPE_CODES[dtype], cache.element_size()
        self.block_size, self._cache_dtype = cache.shape[1], cache.dtype
        self._most_dim = 1
        self.batch_invariant = batch_invariant
        self._likes: Likes | None = None  # None until a kernel for attention is needed
        self._shape = Shape(0, 0, 0, 0)
        self._packed = np.empty(0, np.float32)
        self._most_group = self._most_v_dim = self._most_lse = self._num_kv_heads = 0
        self._most_kv_heads = 0
        self._ops: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._places: list[tuple[int, int, str, int]] = []  # operation, column, buffer, start
        self._memory: dict[str, _Memory] = {}
        self._kept: list[Any] = []  # tensors and arrays to which addresses refer
        self._problem: Problem | None = None  # any of those of attention
        self._own_kernels: list[tuple[int, Any]] = []  # operations and their kernels
        self._called: list[tuple[int, Any, tuple[Any, ...]]] = []  # what such kernels call
        self._most_latent_sums = 0  # numbers of a split of latents
        self._weights: list[_Weight] = []
        self._most_inputs = self._most_narrow = self._most_permuted = 0
        self._partial = np.empty(0, np.float32)
        self._workspace_key = (0, 0)
        self._counters = np.empty(0, np.int64)
        self._step = self._stopped = 0  # numbers of the running step, and of the step to stop
        self._stopping = threading.Lock()  # held around both
        self._hire()
        self.buffers: dict[str, Tensor] = {}
        self._may_join = False  # whether only the next operation reads the last norm
        self._private: set[str] = set()  # buffers in which threads have rows of their own
        self._reserved = (-1, -1)
        self.ops = np.empty((0, NUM_COLUMNS), np.int64)
        self.numbers = np.empty((0, NUM_NUMBERS))

    def __len__(self) -> int:
        return len(self._ops)

    def buffer(
        self,
        name: str,
        columns: int,
        dtype: torch.dtype | None = None,
        *,
        copies: int = 1,
        is_sampled: bool = False,
    ) -> Buffer:
        """Declare a buffer of the program, whose memory `reserve` allocates for a step's number of
        tokens, and return it as an operand.

        Args:
            name: the buffer's name; an earlier buffer of the same name is replaced.
            columns: the elements of a row, which is padded to whole cache lines.
            dtype: the dtype of the elements; None is the program's.
            copies: the rows of each token.
            is_sampled: True for rows of those tokens only whose logits are needed.
        """
        dtype = dtype or self.dtype
        self._memory[name] = _Memory(row_stride(columns), dtype, copies, is_sampled)
        return Buffer(name, row_stride(columns) * dtype.itemsize)

    def embed(
        self,
        table: Held | Panels,
        target: Buffer,
        *,
        factor: float = 1.0,
        positions: Held | None = None,
    ) -> None:
        """Append an operation that sets target[r] = round(round(row ids[r] of the table * factor) +
        row positions[r] of `positions`).

        Args:
            table: a function that returns the table (V, K), or panels of it.
            positions: a function that returns a table (P, K) whose rows are added, or None.
        """
        op = self._append(EMBED, None, target)
        self._numbers[-1][FACTOR] = factor
        if isinstance(table, Panels):
            op[FORM], op[INPUTS] = _form_of(table), table.num_inputs
            op[WEIGHT] = self._words(table)
        else:
            op[INPUTS] = table().shape[1]
            self._read(table, WEIGHT)
        if positions is not None:
            self._read(positions, BIAS)

    def norm(
        self,
        source: Buffer,
        target: Buffer,
        norm: Norm,
        *,
        adds: bool = False,
        factor: float = 1.0,
        is_shared: bool = False,
        is_sampled: bool = False,
        parts: int = 0,
        scale: Held | None = None,
    ) -> None:
        """Append an operation that sets target = norm(source) for each row, or, with `adds`, target
        = (target + norm(source) * factor) * scale.

        Args:
            scale: a function that returns the factor (1,) of the sum, which is rounded before; None
                for no factor; only with `adds`.
            is_shared: True if several operations read the target.
            is_sampled: True for the sampled rows only.
            parts: the number of parts of equal width of a row, each normalised by itself; 0 for the
                whole row, which is followed by padding.
        """
        op = self._append(NORM, source, target)
        weight = norm.weight()
        dim = weight.shape[-1]
        op[INPUTS], op[IS_SAMPLED], op[EPILOGUE] = dim, is_sampled, ADD if adds else STORE
        op[KIND] = ROUNDS * norm.rounds + CENTRES * norm.centres + IS_PART * (parts > 0)
        op[PARTS] = max(parts, 1)
        op[SOURCE_STEP] = op[TARGET_STEP] = dim * self.size
        op[NORM_STEP] = dim * self.size if weight.dim() > 1 else 0
        self._numbers[-1][[EPS, SHIFT, FACTOR]] = norm.eps, norm.shift, factor
        count = padded(weight.numel(), REGISTER_BYTES // 4)
        self._read(norm.weight, WEIGHT, count)
        if norm.bias is not None:
            self._read(norm.bias, BIAS, count)
        if scale is not None:
            assert adds
            self._read(scale, EXTRA, 1, torch.float32)
        self._may_join = not (adds or is_shared or parts)
        if self._may_join:
            self._private.add(target.name)

    def product(
        self,
        source: Buffer,
        target: Buffer,
        weight: Panels,
        epilogue: int,
        *,
        function: str = "identity",
        factor: float = 1.0,
        limit: float = 0.0,
        alpha: float = 0.0,
        cap: float = 0.0,
        extra: Buffer | None = None,
        outputs: int = 0,
        is_sampled: bool = False,
    ) -> None:
        """Append a product, source weight.T + bias for each row, whose result is stored, added to
        the target, used as gate and factor, or stored as float32 logits.

        Args:
            epilogue: the use of the result: STORE, ADD, GATE or LOGITS of `codes.py`.
            function: the name of the function of what is stored, or of the gate; "clamped" with
                `limit` and `alpha`, see `layers.py`.
            factor: the factor of the stored or added result, or of logits.
            cap: c of c tanh(logits / c), 0 for none.
            extra: rows that are added to what is added, or multiply what is stored.
            outputs: the columns that may be stored; 0 for whole groups of 64.
            is_sampled: True for the sampled rows only.
        """
        assert weight.dtype == self.dtype
        op = self._append(PRODUCT, source, target)
        op[WEIGHT], op[BIAS] = self._words(weight), self._address(weight.bias)
        op[INPUTS], op[FORM] = weight.padded_inputs, _form_of(weight)
        op[GROUPS] = weight.padded_outputs // WIDTH
        op[EPILOGUE], op[IS_SAMPLED], op[OUTPUTS] = epilogue, is_sampled, outputs
        op[FUNCTION] = CLAMPED if function == "clamped" else FUNCTIONS[function]
        self._numbers[-1][[FACTOR, LIMIT, ALPHA, CAP]] = factor, limit, alpha, cap
        if extra is not None:
            op[EXTRA_ROW] = extra.row
        before = self._ops[-2] if len(self._ops) > 1 else op
        is_next = self._places[-3][:3] == (len(self._ops) - 2, TARGET, source.name)
        if before[CODE] == NORM and is_next and self._may_join:
            before[JOINS] = 1
        if extra is not None:
            self._places.append((len(self._ops) - 1, EXTRA, extra.name, extra.start))
        self._most_inputs = max(self._most_inputs, weight.padded_inputs)
        if weight.is_narrow:
            self._most_narrow = max(self._most_narrow, weight.padded_inputs)
        if weight.is_permuted:
            self._most_permuted = max(self._most_permuted, weight.padded_inputs)

    def wide_product(self, source: Buffer, target: Buffer, weight: Panels) -> None:
        """Append a product, target = source weight.T + bias for each row, of a float32 weight: rows
        of the program's dtype are widened, and the target is float32."""
        assert weight.dtype == torch.float32
        op = self._append(OWN_KERNEL, source, target)
        op[WEIGHT], op[BIAS] = self._address(weight.words), self._address(weight.bias)
        op[INPUTS], op[GROUPS] = weight.padded_inputs, weight.padded_outputs // WIDTH
        self._own_kernels.append((len(self._ops) - 1, multiply_wide))

    def products_of_heads(
        self,
        source: Buffer,
        target: Buffer,
        weights: Sequence[Panels],
        *,
        source_step: int,
        target_step: int,
        outputs: int = 0,
    ) -> None:
        """Append one operation of a product for each head, target[h] = source[h] weights[h].T +
        bias, of heads that lie side by side in a row.

        Args:
            source_step, target_step: the columns from a head to the next.
            outputs: the columns of a head that may be written; 0 for whole groups of 64.
        """
        self.product(source, target, weights[0], STORE, outputs=outputs)
        op = self._ops[-1]
        self._with_parts(op, weights)
        op[SOURCE_STEP], op[TARGET_STEP] = source_step * self.size, target_step * self.size

    def _with_parts(self, op: np.ndarray, weights: Sequence[Panels]) -> None:
        """Let the operation `op` be several products of equal size, one for each of `weights`, by a
        table of the addresses of weights and biases."""
        addresses = [[self._words(w), self._address(w.bias)] for w in weights]
        table = np.array(addresses, np.int64)
        self._kept.append(table)
        op[PARTS], op[WEIGHT] = len(weights), table.ctypes.data

    def mix(
        self,
        source: Buffer,
        logits: Buffer,
        target: Buffer,
        mixture: Mixture,
        *,
        has_wide_logits: bool = False,
        adds: bool = False,
        factor: float = 1.0,
        shared: Buffer | None = None,
        shared_gate: Buffer | None = None,
    ) -> None:
        """Append operations that store a mixture of experts' output in target, or add to target.

        The output of a row is the weighted sum of the outputs of its experts, plus the row of
        `shared`. Without `adds`, target = output; with `adds`, target += output * factor.

        Args:
            source: the rows that enter the experts.
            logits: the logits of the experts for each row; float32 with `has_wide_logits`,
                otherwise of the program's dtype.
            target: the rows that are written.
            mixture: the weights of the experts, and the rule by which rows choose experts.
            has_wide_logits: True if the logits are float32.
            adds: True to add to target, False to overwrite target.
            factor: the factor of the output; used only with `adds`.
            shared: the output of a block that all tokens use, or None.
            shared_gate: a buffer whose first column has a logit for each row: the sigmoid of the
                logit multiplies the row of `shared`. None for no such factor.
        """
        active, up, down = mixture.num_active, mixture.up[0], mixture.down[0]
        rows = self.buffer("mixed rows", down.num_outputs, copies=active)
        first, parts_of_up = (GATE, 2) if mixture.is_gated else (STORE, 1)
        inner = self.buffer("mixed inner", up.num_outputs // parts_of_up, copies=active)
        parts = self.buffer("mixed parts", down.num_outputs, copies=active)
        weights = self.buffer("weights of experts", active, torch.float32)
        places = self.buffer("places of rows", active, torch.int64)
        order = self.buffer("rows by place", active, torch.int64)
        pieces = self.buffer("runs of experts", 3 * active + 1, torch.int64)
        tables = (WEIGHTS, weights), (PLACES, places), (ORDER, order), (PIECES, pieces)

        def phase(number: int, of: Buffer, to: Buffer) -> np.ndarray:
            op = self._append(OWN_KERNEL, of, to)
            op[PHASE], op[NUM_ACTIVE] = number, active
            self._own_kernels.append((len(self._ops) - 1, mix_rows))
            weighs = number == ROUTE or mixture.weighs_input == (number == GATHER)
            for column, buffer in tables:
                if column != WEIGHTS or weighs:
                    self._places.append((len(self._ops) - 1, column, buffer.name, 0))
            return op

        op = phase(ROUTE, logits, weights)
        op[NUM_EXPERTS], op[FORM] = len(mixture.up), FLOATS * has_wide_logits
        op[SCORES] = ("softmax", "sigmoid", "sparse_mixer").index(mixture.scores)
        op[IS_NORMALISED], op[NUM_GROUPS] = mixture.normalised, mixture.num_groups
        op[ACTIVE_GROUPS], op[BEST_IN_GROUP] = mixture.num_active_groups, mixture.best_in_group
        self._numbers[-1][[EPS, FACTOR, LIMIT, ALPHA]] = (
            mixture.norm_eps,
            mixture.scale,
            mixture.jitter,
            mixture.logit_scale,
        )
        longest = max(up.padded_inputs, down.padded_inputs) + STEP
        op[CHUNK] = max(CHUNK_BYTES // (4 * longest) // BLOCK_ROWS, 1) * BLOCK_ROWS
        count = len(mixture.up)
        for held, column in (
            (mixture.correction_bias, CORRECTION),
            (mixture.expert_scale, EXPERT_SCALE),
        ):
            if held is not None:
                self._read(held, column, count, torch.float32)
        phase(GATHER, source, rows)[INPUTS] = up.padded_inputs
        options: dict[str, Any] = {"function": mixture.function}
        if mixture.is_gated:
            options |= {"limit": mixture.limit, "alpha": mixture.alpha}
        for of, to, panels, epilogue, own in (
            (rows, inner, mixture.up, first, options),
            (inner, parts, mixture.down, STORE, {}),
        ):
            self.product(of, to, panels[0], epilogue, **own)
            self._with_parts(self._ops[-1], panels)
            self._ops[-1][COPIES] = active
            self._places.append((len(self._ops) - 1, PIECES, pieces.name, 0))
        op = phase(COMBINE, parts, target)
        op[INPUTS], op[EPILOGUE] = down.padded_outputs, ADD if adds else STORE
        self._numbers[-1][FACTOR] = factor
        for buffer, columns in (
            (shared, (EXTRA, EXTRA_ROW)),
            (shared_gate, (GATE_ROWS, GATE_STRIDE)),
        ):
            if buffer is not None:
                self._places.append((len(self._ops) - 1, columns[0], buffer.name, buffer.start))
                op[columns[1]] = buffer.row

    def multiply(
        self,
        source: Buffer,
        target: Buffer,
        columns: int,
        *,
        factor: float = 1.0,
        factors: Held | None = None,
        other: Buffer | None = None,
        function: str = "identity",
    ) -> None:
        """Append an operation that sets target = round(source * factor), or round(source *
        round(f(other))), for the first `columns` columns of each row.

        Args:
            factors: a function that returns a factor for each column, the same in all rows, in
                place of `other`; or None.
            other: rows of factors, or None.
            function: the name of f, see `functions.py`.
        """
        op = self._append_own(multiply_elements, source, target)
        op[INPUTS], op[FUNCTION] = columns, FUNCTIONS[function]
        self._numbers[-1][FACTOR] = factor
        if factors is not None:
            self._read(factors, EXTRA, padded(columns, REGISTER_BYTES // 4))
        if other is not None:
            self._reach(EXTRA, other, EXTRA_ROW)

    def convolve(
        self,
        source: Buffer,
        target: Buffer,
        weight: Held,
        bias: Held | None,
        states: Tensor | None,
        *,
        function: str = "identity",
    ) -> None:
        """Append an operation that sets target = f(causal convolution of each channel of the source
        with the tokens before), and writes the step's tokens to their slots.

        Args:
            weight, bias: functions that return (C, W), and (C,) or None.
            states: the slots of the layer, (slots, R, C); None for one tap, which needs none.
            function: f, "silu" or "identity".
        """
        op = self._append_own(convolve_rows, source, target)
        op[NORM_CODE], op[FUNCTION] = self.code, FUNCTIONS[function]
        op[INPUTS], op[FORM] = weight().shape
        self._read(weight, WEIGHT)
        if bias is not None:
            self._read(bias, BIAS)
        if states is not None:
            assert states.is_contiguous()
            op[STATE], op[NUM_SLOTS] = self._address(states), states.shape[1]
        self._called.append((len(self._ops) - 1, convolve, _CONVOLVE))

    def weigh(
        self,
        a: Buffer,
        b: Buffer | None,
        gates: Buffer,
        betas: Buffer,
        recurrence: Recurrence,
        *,
        a_log: Held,
        dt_bias: Held,
        factor: float = 1.0,
        limits: tuple[float, float] | None = None,
    ) -> None:
        """Append an operation that computes the logs of decays and the strengths of writes of a
        recurrence from projections.

        Args:
            a, b: the rows of which decays and strengths are made; b is None for Mamba-2, where both
                are made of a.
            gates, betas: the float32 targets: logs of decays, and strengths.
            a_log, dt_bias: functions that return (H,), and (H,) or (H K,), float32.
            factor: the largest strength.
            limits: the least and the largest time step; None for none.
        """
        op = self._append_own(weigh_rows, a, gates)
        heads, dim = recurrence.heads[0], recurrence.dims[0]
        is_wide = recurrence.kind == "channels"
        op[KIND], op[NUM_Q], op[DIM] = _KINDS[recurrence.kind], heads, dim if is_wide else 1
        self._numbers[-1][FACTOR] = factor
        if limits is not None:
            self._numbers[-1][[ALPHA, LIMIT, CAP]] = 1.0, *limits
        if b is not None:
            self._reach(Q_AT, b, V_AT)
        self._reach(BETA_ROWS, betas, BETA_STRIDE)
        lanes = REGISTER_BYTES // 4
        self._read(a_log, WEIGHT, padded(heads, lanes), torch.float32)
        count = heads * dim if is_wide else heads
        self._read(dt_bias, BIAS, padded(count, lanes) + lanes, torch.float32)

    def recur(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        gates: Buffer,
        betas: Buffer,
        target: Buffer,
        recurrence: Recurrence,
    ) -> None:
        """Append a recurrence: target becomes its output for rows of q, k and v that lie in one
        buffer, and the slots of the sequences are updated.

        These are two operations: the keys of open chunks are replaced once all heads have read
        them.
        """
        state, keys, kept_gates, updates = recurrence.states[:4]
        for kernel, function, call in (
            (scan_rows, scan, _SCAN),
            (keep_rows, keep_keys, _KEEP),
        ):
            op = self._append_own(kernel, k, target)
            op[KIND], op[NORM_CODE] = _KINDS[recurrence.kind], self.code
            op[[NUM_Q, NUM_KV]] = recurrence.heads
            op[[DIM, V_DIM]] = recurrence.dims
            op[STATE], op[NUM_SLOTS] = self._address(state), state.shape[0]
            op[KEPT_KEYS], op[KEPT_GATES] = self._address(keys), self._address(kept_gates)
            op[KEPT_UPDATES] = self._address(updates)
            self._numbers[-1][FACTOR] = recurrence.q_scale
            for column, buffer in ((Q_AT, q), (V_AT, v)):
                self._reach(column, buffer)
            self._reach(GATE_ROWS, gates, GATE_STRIDE)
            self._reach(BETA_ROWS, betas, BETA_STRIDE)
            self._called.append((len(self._ops) - 1, function, call))

    def gate(
        self,
        source: Buffer,
        gates: Buffer,
        target: Buffer,
        columns: int,
        *,
        function: str,
        norm: Norm | None = None,
        parts: int = 1,
        gate_first: bool = False,
        skipped: Buffer | None = None,
        skip: Held | None = None,
        head_dim: int = 1,
    ) -> None:
        """Append an operation that sets target = norm(source + skip * skipped) f(gates) for each
        row, see `gated.py`.

        Args:
            columns: the columns of a row.
            function: the name of f, see `functions.py`.
            norm: the norm, of `parts` parts of a row, whose weights are those of a part or of all;
                None for none.
            gate_first: True if the gate multiplies before the norm.
            skipped, skip: rows that are added to those of the source first, and a function that
                returns their factor of each head of `head_dim` columns, float32; None for nothing.
        """
        op = self._append_own(gate_rows, source, target)
        dim = columns // parts
        op[PARTS], op[INPUTS], op[FUNCTION] = parts, dim, FUNCTIONS[function]
        op[KIND] = GATE_FIRST * gate_first
        self._reach(GATE_ROWS, gates, GATE_STRIDE)
        if norm is not None:
            weight = norm.weight()
            op[KIND] |= NORMALISES | ROUNDS * norm.rounds
            op[NORM_STEP] = 0 if weight.numel() == dim else dim * self.size
            self._numbers[-1][EPS] = norm.eps
            lanes = REGISTER_BYTES // 4
            self._read(
                norm.weight, WEIGHT, padded(weight.numel(), lanes) + lanes * (dim % lanes > 0)
            )
        if skipped is not None and skip is not None:
            op[DIM] = head_dim
            self._reach(EXTRA, skipped, EXTRA_ROW)
            self._read(skip, CORRECTION, skip().numel(), torch.float32)

    def rotate(
        self,
        qkv: Buffer,
        heads: Heads,
        *,
        eps: float = 0.0,
        q_norm: Held | None = None,
        k_norm: Held | None = None,
        q_rounded: Norm | None = None,
        k_rounded: Norm | None = None,
        is_after: bool = False,
        v_norm: Norm | None = None,
        v_is_k: bool = False,
        growth: Growth | None = None,
    ) -> None:
        """Append an operation that rotates q and k in place in `qkv`, after or before their norms
        if given, and writes k and v to their slots of the cache.

        Args:
            q_norm, k_norm: functions that return the weights (D,) of root mean square norms with
                `eps` before the rotation, which nothing rounds in between.
            q_rounded, k_rounded: norms of heads, of weights (D,) or (H, D), which round; those of
                q and k differ in their weights only.
            is_after: True if q_rounded and k_rounded follow the rotation.
            v_norm: the norm of the values of a head, without rounding between; its eps holds for
                the other norms, too. None for none.
            v_is_k: True if values are made of the keys' columns, before their norm; the values' own
                columns are written to.
            growth: the growth of queries with their position, or None.
        """
        before, dim = self._ops[-1], heads.kv[0].shape[-1]
        if (
            before[CODE] == PRODUCT
            and self._places[-1][1:3] == (TARGET, qkv.name)
            and heads.are_side_by_side
            and not v_is_k
            and (WIDTH % dim == 0 or dim % WIDTH == 0)
        ):
            before[JOINS] = max(1, dim // WIDTH)
        op = self._append(ROTATE, qkv, qkv)
        self._numbers[-1][EPS] = eps
        self._with_cache(op, heads)
        for held, column in ((q_norm, Q_NORM), (k_norm, K_NORM)):
            if held is not None:
                weight = held()
                op[NORM_CODE] = DTYPE_CODES[weight.dtype]
                self._read(held, column, len(weight), weight.dtype)
        op[IS_AFTER], op[V_FROM] = is_after, op[K_AT if v_is_k else V_AT]
        if growth is not None:
            op[GROWTH_LENGTH], op[GROWTH_FIRST] = growth.length, growth.first
            self._numbers[-1][BETA] = growth.beta
        if v_norm is not None:
            self._numbers[-1][EPS] = v_norm.eps
            self._read(v_norm.weight, V_WEIGHT, padded(int(op[V_DIM]), REGISTER_BYTES // 4))
        columns = (Q_WEIGHT, Q_BIAS), (K_WEIGHT, K_BIAS)
        for norm, (weights, biases) in zip((q_rounded, k_rounded), columns, strict=True):
            if norm is None:
                continue
            weight = norm.weight()
            op[KIND] = ROUNDS * norm.rounds + CENTRES * norm.centres
            op[NORM_STEP] = dim * self.size if weight.dim() > 1 else 0
            self._numbers[-1][[EPS, SHIFT]] = norm.eps, norm.shift
            count = padded(weight.numel(), REGISTER_BYTES // 4)
            self._read(norm.weight, weights, count)
            if norm.bias is not None:
                self._read(norm.bias, biases, count)

    def attend(
        self,
        q: Buffer,
        o: Buffer,
        heads: Heads,
        *,
        scale: float,
        window: int | None = None,
        is_chunked: bool = False,
        softcap: float = 0.0,
        sinks: Held | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        """Append attention to the cache from one row of each sequence; see `ops.paged_attention`.

        Args:
            q, o: the buffers of the queries and of the result.
            heads: the places of the heads, and the cache.
            scale, softcap: the factor of q . k, and the bound of logits, 0 for none.
            window: the keys that a query sees, its own included; None for all.
            is_chunked: True if a query sees only its own chunk of `window` keys, at multiples of
                `window`, a multiple of the block size.
            sinks: a function that returns the sink of each head; None for none.
            slopes: the ALiBi slopes; None for none.
        """
        op = self._append(ATTEND, q, o)
        self._with_cache(op, heads)
        op[WINDOW] = -1 if window is None else window - 1
        if is_chunked and window is not None:
            assert window % self.block_size == 0
            op[CHUNK_KEYS] = window
        op[LAYER] = self._num_kv_heads
        sink_logits = np.full(heads.num_q, -np.inf, np.float32)
        slope_of = np.zeros(heads.num_q, np.float32)
        if slopes is not None:
            slope_of[:] = slopes.detach().float().numpy()
        is_scaled_only = softcap == 0.0 and slopes is None and scale > 0.0
        rule = Rule(is_scaled_only, float(scale), float(softcap), False, slopes is not None)
        if sinks is not None:
            weight = _Weight(
                sinks,
                len(self._ops) - 1,
                -1,
                heads.num_q,
                torch.float32,
                kept=torch.from_numpy(sink_logits),
                is_copy=True,
            )
            self._weights.append(weight)
            self._place(weight, sinks().detach())
        self._problem = self._problem_of(op, rule, slope_of, sink_logits)
        frame = frame_of(self._problem)
        self._kept += [frame, self._problem]
        op[FRAME] = frame.ctypes.data
        channels = heads.kv[0].shape[-1] + heads.kv[1].shape[-1]
        op[CHUNK] = chunk_of(heads.num_kv * key_bytes(channels, self.cache_size))
        self._num_kv_heads += heads.num_kv
        self._most_kv_heads = max(self._most_kv_heads, heads.num_kv)
        self._most_group = max(self._most_group, heads.num_q // heads.num_kv)
        self._most_v_dim = max(self._most_v_dim, heads.kv[1].shape[-1])
        self._most_lse = max(self._most_lse, heads.num_q)

    def attend_latents(
        self, q_latent: Buffer, q_rope: Buffer, o: Buffer, latents: Latents, *, rope_step: int
    ) -> None:
        """Append attention of one row of each sequence to cached latents, in two operations: one
        that attends, one that merges splits.

        Args:
            q_latent, o: latent queries and the result: rows of heads of R channels, padded to whole
                groups of 64.
            q_rope: the rotated channels of queries, from the first head's on, in the same rows.
            rope_step: the columns from a head's rotated channels to the next's.
        """
        cache, *scales = latents.cache
        size, width = self.size, self.cache_size
        rope_dim, head = cache.shape[-1] - latents.rank, padded(latents.rank, WIDTH) * self.size
        is_narrow = self._cache_dtype == self.dtype or width == 1
        is_bf16 = self.dtype == torch.bfloat16 and is_narrow
        block_rows = min(ROWS, padded(latents.num_heads, PAD))
        scale_row = [4 * x for x in scales[0].stride()[:2]] if scales else [0, 0]
        sizes = LatentSizes(
            latents.num_heads,
            latents.rank,
            rope_dim,
            self.code,
            CODES[self._cache_dtype],
            cache.shape[-1] * width,
            q_latent.row,
            head,
            q_rope.row,
            rope_step * size,
            o.row,
            head,
            0,
            self._address(cache),
            cache.stride(0) * width,
            cache.stride(1) * width,
            self._address(scales[0] if scales else None),
            *scale_row,
            self.block_size,
            block_rows,
            0,
            float(latents.scale) * LOG2_E,
            amx.HAS_AMX and is_bf16,
        )
        frame = np.array(words_of(sizes), np.int64)
        packed = np.empty(0, packed_type(self.dtype, HAS_BF16_DOT and is_narrow))
        nothing = np.empty((0, NUM_LATENT_STARTS), np.int64), np.empty((0, 0), np.int32)
        arrays = LatentArrays(REAL_LIKE, packed, *nothing, *[REAL_LIKE] * 3)
        call = sizes, arrays, REAL_LIKE, np.empty(0, np.int64), 1
        self._kept.append(frame)
        for phase, function in ((ATTEND_LATENTS, attend_latents), (MERGE, merge_splits)):
            op = self._append(OWN_KERNEL, q_latent, o)
            op[PHASE], op[FRAME], op[EXTRA_ROW] = phase, frame.ctypes.data, packed.itemsize
            if not self.batch_invariant:
                op[CHUNK] = TASKS_PER_CORE * (os.cpu_count() or 1)
            self._places.append((len(self._ops) - 1, Q_AT, q_rope.name, q_rope.start))
            self._own_kernels.append((len(self._ops) - 1, attend_rows_to_latents))
            self._called.append((len(self._ops) - 1, function, call))
        self._most_lse = max(self._most_lse, latents.num_heads)
        blocks = -(-latents.num_heads // block_rows)
        row = padded(latents.rank, 32) + ACC_PAD + 2
        self._most_latent_sums = max(self._most_latent_sums, blocks * block_rows * row)

    def _problem_of(
        self, op: np.ndarray, rule: Rule, slopes: np.ndarray, sinks: np.ndarray
    ) -> Problem:
        """Return an attention problem without sequences, which each step enters.

        Args:
            op: the operation's record, with its heads and window.
            rule: the rule of the logits.
            slopes, sinks: the ALiBi slope and the sink of each query head.
        """
        dim, v_dim, num_q, num_kv = (int(op[column]) for column in (DIM, V_DIM, NUM_Q, NUM_KV))
        is_wide = self.cache_size > 1 and self._cache_dtype != self.dtype
        packed = packed_type(self.dtype, HAS_BF16_DOT and not is_wide)
        if not self.batch_invariant and self.cache_size == 1:
            has_integers = takes_integers(self._cache_dtype, self.code, dim)
            packed = np.uint16 if has_integers else np.float32
        self._packed = np.empty(0, packed)
        sizes = Sizes(
            num_kv,
            num_q // num_kv,
            dim,
            v_dim,
            int(op[WINDOW]),
            0,
            self.code,
            CODES[self._cache_dtype],
            self.cache_size,
            int(op[SOURCE_ROW]),
            int(op[Q_STEP]),
            int(op[K_ROW]),
            int(op[K_HEAD]),
            int(op[V_ROW]),
            int(op[V_HEAD]),
            int(op[TARGET_ROW]),
            v_dim * self.size,
            0,
            self.block_size,
            int(op[K_BLOCK]),
            int(op[V_BLOCK]),
            k_scale=int(op[K_SCALE]),
            k_scale_block=int(op[SCALE_BLOCK]),
            k_scale_row=int(op[SCALE_ROW]),
            k_scale_head=int(op[SCALE_HEAD]),
            v_scale=int(op[V_SCALE]),
            v_scale_block=int(op[SCALE_BLOCK]),
            v_scale_row=int(op[SCALE_ROW]),
            v_scale_head=int(op[SCALE_HEAD]),
        )
        nothing = np.empty((0, NUM_STARTS), np.int64), np.empty((0, 0), np.int32)
        arrays = Arrays(REAL_LIKE, self._packed, *nothing, slopes, sinks)
        return Problem(sizes, rule, arrays)

    def _find_likes(self) -> Likes:
        """Return the `Likes` of the list: the empty arrays of its types, and the address of the
        kernel of attention, which is compiled or loaded now, as are the kernels of single
        operations."""
        in_tiles, problem, address = self.batch_invariant, self._problem, 0
        if problem is not None and in_tiles:
            address = address_of_tiles(problem)
        elif problem is not None:
            address = address_of_rows(REAL_LIKE, self._packed, self._cache_dtype)
        self._find_own_kernels()
        return Likes(
            REAL_LIKE,
            WORD_LIKE[self.dtype],
            address,
            int(in_tiles),
            self.cache_size,
            self._packed.itemsize,
        )

    def _find_own_kernels(self) -> None:
        """Compile or load the kernels of single operations, and write their addresses into the
        operations."""
        found = dict[Any, int]()
        nothing, numbers = np.empty(0, np.int64), np.empty(0)
        none = np.empty(0, np.int32)
        batch = Batch(*[nothing] * 3, none, none, none.reshape(0, 0), nothing)
        work = Workspace(REAL_LIKE, nothing, REAL_LIKE)
        given = REAL_LIKE, WORD_LIKE[self.dtype], nothing, numbers, batch, work, nothing, 1
        for index, kernel in self._own_kernels:
            if kernel not in found:
                found[kernel] = address_of(kernel, *given)
            self._ops[index][KERNEL] = found[kernel]
        for index, kernel, call in self._called:
            if kernel not in found:
                found[kernel] = address_of(kernel, *call)
            self._ops[index][EXTRA] = found[kernel]
        if len(self.ops):
            self.ops[:, KERNEL] = [op[KERNEL] for op in self._ops]
            for index, _, _ in self._called:
                self.ops[index, EXTRA] = self._ops[index][EXTRA]

    def _append(self, code: int, source: Buffer | None, target: Buffer) -> np.ndarray:
        op, index = np.zeros(NUM_COLUMNS, np.int64), len(self._ops)
        op[CODE], op[COPIES], op[PARTS] = code, 1, 1
        if source is not None:
            op[SOURCE_ROW] = source.row
            self._places.append((index, SOURCE, source.name, source.start))
        op[TARGET_ROW] = target.row
        self._places.append((index, TARGET, target.name, target.start))
        self._ops.append(op)
        numbers = np.zeros(NUM_NUMBERS)
        numbers[FACTOR] = 1.0
        self._numbers.append(numbers)
        return op

    def _append_own(self, kernel: Any, source: Buffer, target: Buffer) -> np.ndarray:
        """Append an operation that is a kernel of its own, from source to target, and return its
        row of columns, which the caller fills in."""
        op = self._append(OWN_KERNEL, source, target)
        self._own_kernels.append((len(self._ops) - 1, kernel))
        return op

    def _reach(self, column: int, buffer: Buffer, row: int | None = None) -> None:
        """Let column `column` of the last operation be the address of a buffer, and column `row`,
        if given, the bytes of the buffer's rows."""
        self._places.append((len(self._ops) - 1, column, buffer.name, buffer.start))
        if row is not None:
            self._ops[-1][row] = buffer.row

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _words(self, weight: Panels) -> int:
        """Return the address of a weight's words, or of the table of its narrow groups; the weight
        is kept alive."""
        self._kept.append(weight)
        return self._address(weight.words if weight.table is None else weight.table)

    def _read(
        self, held: Held, column: int, count: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """Let `column` of the last operation be the address of a module's weight, of which it reads
        `count` elements, padded with zeros, or 0 for all of a table's; `dtype` None is the
        program's."""
        weight = _Weight(held, len(self._ops) - 1, column, count, dtype or self.dtype)
        self._weights.append(weight)
        self._place(weight, held().detach())

    def _place(self, weight: _Weight, now: Tensor) -> None:
        as_is = now.dtype == weight.dtype and now.is_contiguous()
        weight.address, weight.num_bytes = now.data_ptr(), 0
        if weight.column < 0:
            weight.kept.copy_(now)
            return
        flat = now if now.dim() == 1 or not weight.padded else now.reshape(-1)
        weight.is_copy = not as_is or len(flat) < weight.padded
        kept = now
        if weight.is_copy:
            weight.num_bytes = now.nbytes if as_is else 0
            shape = (max(len(flat), weight.padded), *flat.shape[1:])
            kept = torch.zeros(shape, dtype=weight.dtype)
            kept[: len(flat)] = flat
        weight.kept = kept
        for ops in (self._ops, self.ops):  # the second is empty until rows are reserved
            if len(ops) > weight.op:
                ops[weight.op][weight.column] = kept.data_ptr()

    def follow_weights(self) -> None:
        """Update the addresses, and the copies, of all weights that are not packed to what their
        modules hold now; called before a step whose weights may have changed."""
        for weight in self._weights:
            now = weight.held()
            if now.data_ptr() != weight.address:
                self._place(weight, now.detach())
            elif weight.num_bytes:
                ctypes.memmove(weight.kept.data_ptr(), weight.address, weight.num_bytes)
            elif weight.is_copy:
                flat = now.detach().reshape(-1) if weight.padded else now.detach()
                weight.kept[: len(flat)] = flat

    def _with_cache(self, op: np.ndarray, heads: Heads) -> None:
        k_cache, v_cache, *scales = heads.kv
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape[1] == self.block_size
        assert k_cache.dtype == self._cache_dtype
        dims = k_cache.shape[-1], v_cache.shape[-1]
        size, width = self.size, self.cache_size
        op[K_CACHE], op[V_CACHE] = self._address(k_cache), self._address(v_cache)
        op[[K_BLOCK, K_ROW, K_HEAD]] = [stride * width for stride in k_cache.stride()[:3]]
        op[[V_BLOCK, V_ROW, V_HEAD]] = [stride * width for stride in v_cache.stride()[:3]]
        if scales:
            op[K_SCALE], op[V_SCALE] = map(self._address, scales)
            op[[SCALE_BLOCK, SCALE_ROW, SCALE_HEAD]] = [4 * x for x in scales[0].stride()]
        op[NUM_Q], op[NUM_KV], (op[DIM], op[V_DIM]) = heads.num_q, heads.num_kv, dims
        op[[Q_AT, K_AT, V_AT]] = [at * size for at in (heads.q_at, heads.k_at, heads.v_at)]
        op[Q_STEP], op[HALF], op[ANGLES] = heads.q_step * size, heads.half, heads.angles
        op[IS_INTERLEAVED] = heads.is_interleaved
        self._most_dim = max(self._most_dim, *dims)

    def reserve(self, rows: int, sampled: int) -> None:
        """Enlarge the buffers to at least `rows` rows, those for sampled tokens to at least
        `sampled`, each rounded up to a power of two, and write their addresses into the list.
        Enlarged buffers lose their contents."""
        if rows <= self._reserved[0] and sampled <= self._reserved[1]:
            return
        rows, sampled = max(rows, self._reserved[0]), max(sampled, self._reserved[1])
        self._reserved = tuple[int, int](
            max(BLOCK_ROWS, 1 << (count - 1).bit_length()) for count in (rows, sampled)
        )
        for name, memory in self._memory.items():
            count = self._reserved[memory.is_sampled] * memory.copies
            if memory.copies > 1:
                count += BLOCK_ROWS  # products read whole blocks of rows from any row on
            if name in self._private:
                count = max(count, MOST_MEMBERS * BLOCK_ROWS)
            held = self.buffers.get(name)
            if held is None or len(held) < count:
                self.buffers[name] = torch.zeros((count, memory.columns), dtype=memory.dtype)
        self.ops, self.numbers = np.stack(self._ops), np.stack(self._numbers)
        for index, column, name, start in self._places:
            self.ops[index, column] = self.buffers[name].data_ptr() + start

    def run(self, batch: Batch, tables: Tables, num_threads: int, first: int, last: int) -> None:
        """Run operations first ... last - 1 on rows that the buffers hold, and return when they are
        done; kernels are compiled at the first call.

        Args:
            batch: the tokens and sequences of the step.
            tables: the result of `with_angles`.
            num_threads: the number of threads, this one included; the others are the crew's.
            first, last: the range of operations, as their numbers in the order of appending.

        Raises:
            StepStoppedError: stop() was called for this step; its results must be computed again.
        """
        if self._step and self._stopped == self._step:
            raise StepStoppedError(f"step {self._step} was stopped between two lists")
        if self._likes is None:
            self._likes = self._find_likes()
            cache_code = CODES[self._cache_dtype]
            self._shape = Shape(self.code, cache_code, self.block_size, self._most_dim)
        meeting = self._meeting(len(self._ops))
        work = self._workspace(batch)
        given = (
            self.ops,
            self.numbers,
            first,
            last,
            num_threads,
            _GIVE_WAY,
            SYSCALL,
            meeting,
            batch,
            self._shape,
            tables,
            work,
            self._likes,
            self._most_inputs,
            self._most_narrow,
            self._most_permuted,
        )
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
        """Set the number of the step to which the next calls of `run` belong, for `stop`; the step
        0 cannot be stopped."""
        with self._stopping:
            self._step = number

    def stop(self, number: int) -> None:
        """Keep the step of this number from beginning another operation, now or when it runs; `run`
        then raises StepStoppedError. Any thread may call this; a number below the current step's
        does nothing."""
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
        """Run a list on this thread and `count` helpers of the pool, for systems without futexes,
        where helpers begin late; `given` are the arguments of `run_list`."""
        pool = threads.pool()
        helpers = [pool.submit(run_list, *given) for _ in range(count)]
        try:
            run_list(*given)
        finally:
            # A helper that has not begun is cancelled; one that has finds the list at its end.
            for helper in helpers:
                helper.cancel() or helper.result()

    def with_angles(self, cos: Tensor, sin: Tensor) -> Tables:
        """Return the `Tables` of a run with these cosines and sines, (positions, n) float32, as
        views of the tensors."""
        return Tables(cos.reshape(-1).numpy(), sin.reshape(-1).numpy(), cos.shape[-1])

    def _meeting(self, num_ops: int) -> np.ndarray:
        """Return the counters of a call of run_list over `num_ops` operations, int64 zeros with the
        step's number: cache lines of their own for each operation. The same memory serves all
        calls."""
        lines = (FIRST_COUNTER + 2 * num_ops) * LINE // 8
        if len(self._counters) < lines:
            memory = np.zeros(lines + LINE // 8, np.int64)
            skip = -memory.ctypes.data % LINE // 8
            self._counters = memory[skip : skip + lines]
        self._counters.fill(0)
        self._counters[OWN] = self._step
        return self._counters

    def _workspace(self, batch: Batch) -> Workspace:
        """Return the memory that attention needs for the batch, which is kept from step to step;
        counters are zeroed."""
        num_sequences = len(batch.lengths)
        splits = 1
        if not self.batch_invariant or self._most_latent_sums:
            splits = int((batch.lengths // SPLIT).sum()) + 2 * num_sequences
        key = (num_sequences, 1 << (splits - 1).bit_length())
        if self._workspace_key != key:
            group = 1 if self._most_group == 1 else -(-self._most_group // 4) * 4
            rows = key[1] * self._most_kv_heads * group
            width = -(-self._most_v_dim // 64) * 64  # 64: elements of the widest load
            sums = max(rows * (width + 2), key[1] * self._most_latent_sums)
            lse = self._most_lse * num_sequences
            if len(self._partial) < sums + lse:
                self._partial = np.empty(1 << (sums + lse).bit_length(), np.float32)
            finished = np.zeros(self._num_kv_heads * num_sequences, np.int64)
            self._work = Workspace(self._partial[:sums], finished, self._partial[sums : sums + lse])
            self._workspace_key = key
        self._work.finished.fill(0)
        return self._work
