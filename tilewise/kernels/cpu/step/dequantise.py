"""Panels of 8 and 4 bits as words of the model's dtype, in cache; see `narrow.py` for the layout.

What      the values of some steps of a group of four panels, in the layout of `panels.py`.
Grid      none: called by one thread of a step before a product.
One call  16 outputs x 32 inputs of a step at a time: 32 registers of 16 codes.
Traffic   the codes and factors once, in the order of memory, fetched ahead: between two calls a
          product reads none of them, and the prefetcher stops. What is written stays in the L1
          cache (few rows) or the L2 cache (many), see `layers.py`.
Numerics  products less a term, a minimum or a zero point times the scale, are computed in float32
          by one multiply-add, and rounded to the words. With scales of 16 bits products are exact:
          values are those of `QuantisedWeight`, where these are computed in float32.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import emit_prefetch
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.step.narrow import (
    BFLOAT16,
    E4M3,
    E5M2,
    EXPONENT,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    HEADER,
    INT8,
    KIND,
    LOOKUP,
    MODE,
    NONE,
    OUTER,
    OUTER_AT,
    OUTER_TERM,
    OUTER_TERM_AT,
    PART_BYTES,
    PART_STEPS,
    PLAIN,
    RUN,
    SCALE,
    SCALE_AT,
    SIGNED8,
    TABLE,
    TERM,
    TERM_AT,
    UINT8,
    ZERO,
)
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP, WIDTH
from tilewise.kernels.cpu.step.product import uses_dot, uses_tiles
from tilewise.kernels.cpu.step.words import narrow, put

AHEAD = 4096  # bytes prefetched ahead of their use
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f32 = ir.FloatType()
_BYTES, _SHORTS, _WORDS, _FLOATS = (ir.VectorType(k, COLUMNS) for k in (_i8, _i16, _i32, _f32))
_HALVES = ir.VectorType(ir.HalfType(), COLUMNS)
_REGISTERS = 8  # of codes of a place
_PLACES = 4  # of a panel in a step
# Places in scratch: factors and terms of two half steps of four panels, a register for the outputs
# of each half of a panel, then outer factors and outer terms of 64 outputs.
_HALF_BYTES = GROUP * 2 * 4 * COLUMNS
_TERMS, _OUTER, _OUTER_TERMS = 2 * _HALF_BYTES, 4 * _HALF_BYTES, 4 * _HALF_BYTES + 4 * WIDTH
SPARE = _OUTER_TERMS + 4 * WIDTH  # bytes of scratch

_is_pair = {types.uint16: True, types.int16: False, types.float32: False}


@intrinsic
def field(typingctx, form, index):
    """Return word number `index`, an int64, of the table at the address `form`, such as the
    description of how a narrow group is stored."""

    def codegen(context, builder, sig, args):
        at = builder.add(args[0], builder.mul(args[1], _i64(8)))
        return builder.load(builder.inttoptr(at, _i64.as_pointer()), align=8)

    return types.int64(types.int64, types.int64), codegen


def _eighth(builder, bytes_, is_wide_exponent=False):
    """Emit the conversion of 16 floats of 8 bits to float32: e4m3 divided by 256, or e5m2 if
    is_wide_exponent."""
    if simd.HAS_HALF:
        if is_wide_exponent:
            bits = builder.shl(builder.zext(bytes_, _SHORTS), simd.constant(_SHORTS, 8))
        else:
            # The sign is copied to bits 7 ... 15: one copy goes to bit 15, another to bit 14.
            bits = builder.shl(builder.sext(bytes_, _SHORTS), simd.constant(_SHORTS, 7))
            bits = builder.and_(bits, simd.constant(_SHORTS, 0xBFFF))
        return builder.fpext(builder.bitcast(bits, _HALVES), _FLOATS)
    word = builder.sext(bytes_, _WORDS)
    sign = builder.and_(word, simd.constant(_WORDS, 0x80000000))
    rest = builder.and_(word, simd.constant(_WORDS, 0x7F))
    rest = builder.shl(rest, simd.constant(_WORDS, 21 if is_wide_exponent else 20))
    # Exponents have a bias of 15 in these bits, of 127 in float32.
    number = builder.bitcast(builder.or_(sign, rest), _FLOATS)
    return builder.fmul(number, simd.constant(_FLOATS, 2.0**112))


def _stored(builder, how, address):
    """Emit a load of 16 factors at an address, stored as `how` says (FLOAT32, UINT8, ...), and
    return them as float32."""

    def load(kind):
        return simd.load_at(builder, address, kind, 1)

    if how == FLOAT32:
        return load(_FLOATS)
    if how == FLOAT16:
        return builder.fpext(load(_HALVES), _FLOATS) if simd.HAS_HALF else load(_FLOATS)
    if how == BFLOAT16:
        return simd.widen_bf16(builder, load(_SHORTS))
    if how == UINT8:
        return builder.uitofp(builder.zext(load(_BYTES), _WORDS), _FLOATS)
    if how == SIGNED8:
        return builder.sitofp(builder.sext(load(_BYTES), _WORDS), _FLOATS)
    if how == FLOAT8:
        return builder.fmul(_eighth(builder, load(_BYTES)), simd.constant(_FLOATS, 256.0))
    word = builder.zext(load(_BYTES), _WORDS)
    return builder.bitcast(builder.shl(word, simd.constant(_WORDS, 23)), _FLOATS)


def _factor_bytes(how):
    return {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2}.get(how, 1)


def _spread(builder, value, half):
    """Emit a vector with each lane of the first or second half (0 or 1) of `value` twice, as pairs
    of inputs of 8 outputs lie."""
    lanes = [COLUMNS // 2 * half + lane // 2 for lane in range(COLUMNS)]
    order = ir.Constant(ir.VectorType(_i32, COLUMNS), lanes)
    return builder.shuffle_vector(value, value, order)


def _outer_loader(how):
    @intrinsic
    def load_outer(typingctx, source, target):
        """Write the 64 outer factors at the address `source`, one for each output, to `target` as
        float32; ones if there are none."""

        def codegen(context, builder, sig, args):
            source_, target_ = args
            for panel in range(GROUP):
                at = builder.add(source_, _i64(panel * COLUMNS * _factor_bytes(how)))
                value = simd.constant(_FLOATS, 1.0)
                if how != NONE:
                    value = _stored(builder, how, at)
                simd.store_at(builder, value, builder.add(target_, _i64(64 * panel)), 64)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return load_outer


def _factor_loader(how):
    @intrinsic
    def load_factors(typingctx, word_like, source, outer, target):
        """Write the 64 factors at the address `source` times the outer factors at `outer` to
        `target`, as float32 in the arrangement of the registers of codes."""

        def codegen(context, builder, sig, args):
            _, source_, outer_, target_ = args
            for panel in range(GROUP):
                at = builder.add(source_, _i64(panel * COLUMNS * _factor_bytes(how)))
                value = _stored(builder, how, at)
                wide = simd.load_at(builder, builder.add(outer_, _i64(64 * panel)), _FLOATS, 64)
                value = builder.fmul(value, wide)
                for half in range(2):
                    is_pair = _is_pair[word_like.dtype]
                    lanes = _spread(builder, value, half) if is_pair else value
                    to = builder.add(target_, _i64(128 * panel + 64 * half))
                    simd.store_at(builder, lanes, to, 64)
            return context.get_dummy_value()

        return types.void(word_like, types.int64, types.int64, types.int64), codegen

    return load_factors


_outer_none, _outer_f32, _outer_f16, _outer_bf16 = map(
    _outer_loader, (NONE, FLOAT32, FLOAT16, BFLOAT16)
)
_f32s, _f16s, _bf16s, _u8s, _i8s, _f8s, _exponents = map(
    _factor_loader, (FLOAT32, FLOAT16, BFLOAT16, UINT8, SIGNED8, FLOAT8, EXPONENT)
)


@intrinsic
def _scale_terms(typingctx, factors):
    """Multiply the zero points in scratch by the scales beside them, in place.

    factors: the address of the scales; the zero points lie _TERMS bytes after them.
    """

    def codegen(context, builder, sig, args):
        for at in range(0, _HALF_BYTES, 64):
            scale_at = builder.add(args[0], _i64(at))
            term_at = builder.add(args[0], _i64(_TERMS + at))
            scale, term = (simd.load_at(builder, x, _FLOATS, 64) for x in (scale_at, term_at))
            simd.store_at(builder, builder.fmul(scale, term), term_at, 64)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@inner
def _load_outer(how, source, target):
    if how == NONE:
        _outer_none(source, target)
    elif how == FLOAT16:
        _outer_f16(source, target)
    elif how == BFLOAT16:
        _outer_bf16(source, target)
    else:
        _outer_f32(source, target)


@inner
def _load_factors(word_like, how, source, outer, target):
    if how == FLOAT16:
        _f16s(word_like, source, outer, target)
    elif how == FLOAT32:
        _f32s(word_like, source, outer, target)
    elif how == UINT8:
        _u8s(word_like, source, outer, target)
    elif how == SIGNED8:
        _i8s(word_like, source, outer, target)
    elif how == BFLOAT16:
        _bf16s(word_like, source, outer, target)
    elif how == FLOAT8:
        _f8s(word_like, source, outer, target)
    else:
        _exponents(word_like, source, outer, target)


def _look_up(builder, table, index):
    """Emit table[index & 15], lane by lane, of a vector of 16 float32."""
    if simd.REGISTER_BYTES == 64:
        name = "x86.avx512.permvar.sf.512"
        return simd.call_llvm(builder, name, _FLOATS, [table, index])
    low_bits = builder.and_(index, simd.constant(_WORDS, 15))
    if simd.REGISTER_BYTES == 32:
        eight = ir.VectorType(_f32, 8)
        parts = []
        for half in range(2):
            lanes = ir.Constant(ir.VectorType(_i32, 8), list(range(8 * half, 8 * half + 8)))
            eight_index = builder.shuffle_vector(low_bits, low_bits, lanes)
            found = []
            for side in range(2):
                of = ir.Constant(ir.VectorType(_i32, 8), list(range(8 * side, 8 * side + 8)))
                eighth = builder.shuffle_vector(table, table, of)
                found.append(
                    simd.call_llvm(builder, "x86.avx2.permps", eight, [eighth, eight_index])
                )
            is_high = builder.icmp_unsigned(
                ">", eight_index, simd.constant(ir.VectorType(_i32, 8), 7)
            )
            parts.append(builder.select(is_high, found[1], found[0]))
        return builder.shuffle_vector(*parts, ir.Constant(_WORDS, list(range(COLUMNS))))
    found = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(COLUMNS):
        number = builder.extract_element(table, builder.extract_element(low_bits, _i32(lane)))
        found = builder.insert_element(found, number, _i32(lane))
    return found


class _Place:
    """An emitter of code that dequantises codes of one kind, 8 registers of 16 codes at each call
    of `values`.

    These 128 codes are a place: a quarter of the codes of a panel, 16 outputs, in a step of 32
    inputs. The caller gives the address of each place.
    """

    def __init__(self, builder, kind, has_term, lookup):
        self.builder, self.kind, self.has_term = builder, kind, has_term
        self.bytes = _REGISTERS * COLUMNS * (4 if kind == TABLE else 8) // 8
        self.table = simd.load_at(builder, lookup, _FLOATS, 4) if kind == TABLE else None

    def values(self, at, factors):
        """Emit the loads and the widening of a place's codes, with prefetches of later ones, and
        return their values, 8 registers of float32.

        Args:
            at: the address of the codes.
            factors: the address of the panel's factors, of its half of the step.
        """
        builder, kind = self.builder, self.kind
        for line in range(0, self.bytes, 64):
            emit_prefetch(builder, builder.add(at, _i64(AHEAD + line)))

        def load(start):
            places = (builder.add(factors, _i64(start + 64 * half)) for half in range(2))
            return [simd.load_at(builder, place, _FLOATS, 64) for place in places]

        scales = load(0)
        terms = load(_TERMS) if self.has_term else []
        packed = simd.load_at(builder, at, _WORDS, 64) if kind == TABLE else None
        found = []
        for register in range(_REGISTERS):
            if kind == TABLE:
                index = packed
                if register:
                    index = builder.lshr(packed, simd.constant(_WORDS, 4 * register))
                x = _look_up(builder, self.table, index)
            else:
                where = builder.add(at, _i64(COLUMNS * register))
                bytes_ = simd.load_at(builder, where, _BYTES, 16)
                if kind == INT8:
                    x = builder.sitofp(builder.sext(bytes_, _WORDS), _FLOATS)
                else:
                    x = _eighth(builder, bytes_, kind == E5M2)
            if self.has_term:
                term = builder.fneg(terms[register % 2])
                x = simd.fuse(builder, x, scales[register % 2], term)
            else:
                x = builder.fmul(x, scales[register % 2])
            found.append(x)
        return found

    def line(self, first, second):
        """Emit the rounding of two registers of float32 to bfloat16, and return them as one cache
        line, `first` in front."""
        name = "x86.avx512bf16.cvtne2ps2bf16.512"
        kind = ir.VectorType(_i16, 2 * COLUMNS)
        return simd.call_llvm(self.builder, name, kind, [second, first])


def _widener(kind, has_term=False):
    """Return an intrinsic that widens one step, 32 inputs, of the four panels of a group, of one
    kind of codes, to words at `target`; has_term if a minimum or a zero point is subtracted."""

    @intrinsic
    def widen(typingctx, word_like, source, lookup, factors, half_bytes, target):
        def codegen(context, builder, sig, args):
            _, source_, lookup_, factors_, half_bytes_, target_ = args
            how = _Place(builder, kind, has_term, lookup_)
            word_bytes = 4 if word_like.dtype == types.float32 else 2
            # Four places of a panel, two for each half of the step.
            with cgutils.for_range(builder, _i64(_PLACES * GROUP)) as loop:
                place = loop.index
                panel, half = (builder.lshr(place, _i64(shift)) for shift in (2, 1))
                half = builder.and_(half, _i64(1))
                of = builder.add(factors_, builder.mul(panel, _i64(128)))
                of = builder.add(of, builder.mul(half, half_bytes_))
                at = builder.add(source_, builder.mul(place, _i64(how.bytes)))
                values = how.values(at, of)
                to = builder.add(
                    target_, builder.mul(place, _i64(_REGISTERS * COLUMNS * word_bytes))
                )
                for register in range(0, _REGISTERS, 2):
                    pair = values[register : register + 2]
                    where = builder.add(to, _i64(COLUMNS * word_bytes * register))
                    if _is_pair[word_like.dtype] and simd.HAS_BF16_DOT:
                        simd.store_at(builder, how.line(*pair), where, 64)
                        continue
                    for i, x in enumerate(pair):
                        lanes = narrow(builder, word_like, x)
                        there = builder.add(where, _i64(COLUMNS * word_bytes * i))
                        simd.store_at(builder, lanes, there, 32)
            return context.get_dummy_value()

        index = types.int64
        return types.void(word_like, index, index, index, index, index), codegen

    return widen


def _multiplier(kind, rows, has_term=False):
    """Return an intrinsic that adds the products of `rows` rows at `a` and one step of a group to
    the sums at `c`; the widened words stay in registers. Only for bfloat16 with VDPBF16PS:
    elsewhere it does nothing.

    A sum is the same chain of products as in `product.py`.
    """

    @intrinsic
    def multiply(typingctx, word_like, source, lookup, factors, half_bytes, c, a, lda):
        def codegen(context, builder, sig, args):
            if not uses_dot(word_like) or uses_tiles(word_like):
                return context.get_dummy_value()
            _, source_, lookup_, factors_, half_bytes_, c_, a_, lda_ = args
            how = _Place(builder, kind, has_term, lookup_)
            cells = [
                builder.add(c_, _i64(4 * WIDTH * row + 64 * panel))
                for row in range(rows)
                for panel in range(GROUP)
            ]
            before = [simd.load_at(builder, cell, _FLOATS, 64) for cell in cells]
            entry = builder.block
            body, done = (builder.append_basic_block(f"step.{name}") for name in ("body", "done"))
            builder.branch(body)
            builder.position_at_end(body)
            place = builder.phi(_i64)
            sums = [builder.phi(_FLOATS) for _ in cells]
            later = list(sums)
            half = builder.lshr(place, _i64(1))
            of = builder.add(factors_, builder.mul(half, half_bytes_))
            at = builder.add(source_, builder.mul(place, _i64(how.bytes)))
            number = builder.add(a_, builder.mul(place, _i64(2 * _REGISTERS)))
            for panel in range(GROUP):
                values = how.values(
                    builder.add(at, _i64(_PLACES * how.bytes * panel)),
                    builder.add(of, _i64(128 * panel)),
                )
                for word in range(_REGISTERS // 2):
                    line = builder.bitcast(how.line(*values[2 * word : 2 * word + 2]), _WORDS)
                    for row in range(rows):
                        from_ = builder.add(number, builder.mul(lda_, _i64(row)))
                        pointer = builder.inttoptr(
                            builder.add(from_, _i64(4 * word)), _i32.as_pointer()
                        )
                        pair = simd.broadcast(builder, builder.load(pointer, align=2), COLUMNS)
                        name, index = "x86.avx512bf16.dpbf16ps.512", row * GROUP + panel
                        operands = [later[index], pair, line]
                        later[index] = simd.call_llvm(builder, name, _FLOATS, operands)
            following = builder.add(place, _i64(1))
            builder.cbranch(builder.icmp_signed("<", following, _i64(_PLACES)), body, done)
            place.add_incoming(_i64(0), entry)
            place.add_incoming(following, builder.block)
            for phi, start, value in zip(sums, before, later, strict=True):
                phi.add_incoming(start, entry)
                phi.add_incoming(value, builder.block)
            builder.position_at_end(done)
            for cell, value in zip(cells, later, strict=True):
                simd.store_at(builder, value, cell, 64)
            return context.get_dummy_value()

        index = types.int64
        return types.void(word_like, *[index] * 7), codegen

    return multiply


_table, _table_less = _widener(TABLE), _widener(TABLE, True)
_int8, _int8_less = _widener(INT8), _widener(INT8, True)
_e4m3, _e5m2 = _widener(E4M3), _widener(E5M2)
_table_1, _table_less_1 = _multiplier(TABLE, 1), _multiplier(TABLE, 1, True)
_int8_1, _int8_less_1 = _multiplier(INT8, 1), _multiplier(INT8, 1, True)
_e4m3_1, _e5m2_1 = _multiplier(E4M3, 1), _multiplier(E5M2, 1)
_table_4, _table_less_4 = _multiplier(TABLE, 4), _multiplier(TABLE, 4, True)
_int8_4, _int8_less_4 = _multiplier(INT8, 4), _multiplier(INT8, 4, True)
_e4m3_4, _e5m2_4 = _multiplier(E4M3, 4), _multiplier(E5M2, 4)


@inner
def _widen_step(word_like, kind, has_term, source, lookup, factors, half_bytes, target):
    if kind == TABLE and has_term:
        _table_less(word_like, source, lookup, factors, half_bytes, target)
    elif kind == TABLE:
        _table(word_like, source, lookup, factors, half_bytes, target)
    elif kind == INT8 and has_term:
        _int8_less(word_like, source, lookup, factors, half_bytes, target)
    elif kind == INT8:
        _int8(word_like, source, lookup, factors, half_bytes, target)
    elif kind == E4M3:
        _e4m3(word_like, source, lookup, factors, half_bytes, target)
    else:
        _e5m2(word_like, source, lookup, factors, half_bytes, target)


@inner
def _multiply_step_1(word_like, kind, has_term, source, lookup, factors, half_bytes, c, a, lda):
    if kind == TABLE and has_term:
        _table_less_1(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == TABLE:
        _table_1(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == INT8 and has_term:
        _int8_less_1(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == INT8:
        _int8_1(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == E4M3:
        _e4m3_1(word_like, source, lookup, factors, half_bytes, c, a, lda)
    else:
        _e5m2_1(word_like, source, lookup, factors, half_bytes, c, a, lda)


@inner
def _multiply_step_4(word_like, kind, has_term, source, lookup, factors, half_bytes, c, a, lda):
    if kind == TABLE and has_term:
        _table_less_4(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == TABLE:
        _table_4(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == INT8 and has_term:
        _int8_less_4(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == INT8:
        _int8_4(word_like, source, lookup, factors, half_bytes, c, a, lda)
    elif kind == E4M3:
        _e4m3_4(word_like, source, lookup, factors, half_bytes, c, a, lda)
    else:
        _e5m2_4(word_like, source, lookup, factors, half_bytes, c, a, lda)


@inner
def _walk(word_like, group, form, first, end, target, spare, rows, c, a, lda):
    """Widen steps first ... end - 1 of a narrow group, or multiply them by 1 or 4 rows.

    Args:
        word_like: an empty array of the model's dtype.
        group, form: the addresses of the group and of the description of how it is stored.
        target: the address of the widened words.
        spare: the address of SPARE bytes of scratch.
        rows: the number of rows to multiply; 0 widens to `target` instead.
        c, a, lda: the addresses of sums, which are added to, and of rows, and the bytes of a row.
    """
    kind, mode, lookup = field(form, KIND), field(form, MODE), field(form, LOOKUP)
    part_steps, part_bytes = field(form, PART_STEPS), field(form, PART_BYTES)
    run, header = field(form, RUN), field(form, HEADER)
    how, term_how = field(form, SCALE), field(form, TERM)
    step_bytes = STEP * WIDTH if kind != TABLE else STEP * WIDTH // 2
    size = WIDTH * (4 if how == FLOAT32 else 2 if how <= BFLOAT16 else 1)
    term_size = WIDTH * (4 if term_how == FLOAT32 else 2 if term_how <= BFLOAT16 else 1)
    outer_how, outer_term_how = field(form, OUTER), field(form, OUTER_TERM)
    halves, half_bytes, run_steps = types.int64(1), types.int64(0), run // STEP
    if run < STEP:
        halves, half_bytes, run_steps = types.int64(2), types.int64(_HALF_BYTES), types.int64(1)
    held, held_run = types.int64(-1), types.int64(-1)
    for step in range(first, end):
        part = step // part_steps
        within = step - part * part_steps
        at = group + part * part_bytes
        if part != held:
            if held < 0 or outer_how != NONE:
                _load_outer(outer_how, at + field(form, OUTER_AT), spare + _OUTER)
            if mode != PLAIN and (held < 0 or outer_term_how != NONE):
                _load_outer(outer_term_how, at + field(form, OUTER_TERM_AT), spare + _OUTER_TERMS)
            held, held_run = part, types.int64(-1)
        which = within // run_steps
        if which != held_run:
            held_run = which
            for half in range(halves):
                index = halves * which + half
                to = spare + half * _HALF_BYTES
                _load_factors(
                    word_like, how, at + field(form, SCALE_AT) + index * size, spare + _OUTER, to
                )
                if mode != PLAIN:
                    _load_factors(
                        word_like,
                        term_how,
                        at + field(form, TERM_AT) + index * term_size,
                        spare + _OUTER_TERMS,
                        to + _TERMS,
                    )
                if mode == ZERO:
                    _scale_terms(to)
        source = at + header + within * step_bytes
        if rows == 0:
            to = target + (step - first) * (STEP * WIDTH * word_like.itemsize)
            _widen_step(word_like, kind, mode != PLAIN, source, lookup, spare, half_bytes, to)
        elif rows == 1:
            number = a + step * STEP * word_like.itemsize
            _multiply_step_1(
                word_like, kind, mode != PLAIN, source, lookup, spare, half_bytes, c, number, lda
            )
        else:
            number = a + step * STEP * word_like.itemsize
            _multiply_step_4(
                word_like, kind, mode != PLAIN, source, lookup, spare, half_bytes, c, number, lda
            )


@inner
def widen_steps(word_like, group, form, first, end, target, spare):
    """Write steps first ... end - 1 of a narrow group as words of the model's dtype.

    Args:
        word_like: an empty array of the model's dtype.
        group, form: the address of the group, and of how it is stored.
        target: the address of as many words, in the order of `panels.py`, on a cache line's
            boundary.
        spare: the address of scratch, SPARE bytes, on a cache line's boundary, too.
    """
    none = types.int64(0)
    _walk(word_like, group, form, first, end, target, spare, none, none, none, none)


@inner
def multiply_few(word_like, like, c, rows, a, lda, group, form, inputs, spare):
    """Compute the products of up to 4 rows and a narrow group; its widened words stay in registers.
    Four rows are computed if there are more than one, and old sums are overwritten.

    Args:
        c, rows, a, lda, inputs: as of `product.multiply_rows`; c has room for 4 rows, and words are
            multiplied by VDPBF16PS.
        group, form, spare: as of `widen_steps`.
    """
    count = types.int64(1)
    if rows > 1:
        count = types.int64(4)
    zero = simd.splat(like, 0.0)
    for at in range(c, c + 4 * WIDTH * count, simd.REGISTER_BYTES):
        put(like, at, zero)
    none = types.int64(0)
    _walk(word_like, group, form, none, inputs // STEP, none, spare, count, c, a, lda)
