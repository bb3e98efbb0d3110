"""Which kernels and which code run a backward pass on Hopper: pure functions of a spec."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilewise.kernels import device
from tilewise.kernels.gluon.backward.span import BwdVariant
from tilewise.kernels.spec import AttentionSpec

UNIT = 8  # elements; TMA wants strides in multiples of 16 bytes
KEYS = 128  # of a tile
SEPARATE_DQ_KEYS = 64  # where dq has a kernel of its own
L2_BYTES = 16 << 20  # what CTAs that run together share; of 50 MB, of which half is near
ROW_TILE = 128  # rows of packed sequences start on multiples of it in buffers
_MOST_QUERIES_A_KEY = 4
_FULL_WAVES = 1.1  # adding up a group takes 3 to 4 % (D 128, N 4,096)
_FEW_WAVES = 6  # of CTAs: no more, and balance matters more than L2
_BYTES_PER_ELEMENT = 8  # of q, do and the sum of dq
_LONG = 8192  # keys
# Calls with a diagonal of no more than SHORT keys: what share of a head's CTAs pre- and postprocess
# for others, how many sections of heads ahead, and the bytes of a section. With 2, 1 and 16 MiB, as
# other calls have them, N 512 and 1,024 take 1 to 4 % longer (D 64 and 128, H100, 2026-11-27).
SHORT = 1024
SHORT_SHARE = 1
SHORT_AHEAD = 3
SHORT_BYTES = 8 << 20
_NO_END = 1 << 31
# Of q and do at D 64 with dropout: 1 % slower to 8 % faster than 3 (N 4,096 and 16,384, H100,
# 2026-11-27), which are 0 to 6 % faster than 2.
DROPPING_STAGES = 4
# Of reproducible sums: CTAs of several heads are launched together, tile by tile, so many heads as
# fill the device so many times, and two warps send dq, with no chores beside them
# (docs/results/hopper-tried.md, "Where a reproducible dq's time goes").
ORDERED_WAVES = 1
ORDERED_SENDERS = 2


class Way(NamedTuple):
    """How CTAs of plain calls of some lengths take tiles of keys and the queries on a diagonal.

    Plain: without a window's left side, packed or ragged lengths, a softcap, ALiBi, a bias, a
    block mask, dropout and an order of sums.
    """

    channels: int  # channels of a tile: 64, 128
    has_diagonal: bool
    least_keys: int
    most_keys: int
    # Tiles of a head that a CTA takes one after the other: what a CTA costs beside its steps is
    # then paid once for all of them. The heads of the last wave of CTAs have single ones.
    turns: int
    behind: int  # waves of CTAs, after which a head with such CTAs is postprocessed
    # The warpgroup of the upper 64 keys leaves out the first 64 queries on the diagonal, of which
    # it sees nothing. For as many queries as keys.
    passes_by: bool


# Where a way is faster than what others have: docs/results/hopper-tried.md, "Where short calls
# lose".
WAYS: list[Way] = [
    Way(64, True, 1, 512, turns=1, behind=2, passes_by=True),
    Way(64, True, 513, 1024, turns=2, behind=2, passes_by=True),
    Way(64, False, 1, 2048, turns=2, behind=2, passes_by=False),
    Way(128, False, 8192, _NO_END, turns=2, behind=1, passes_by=False),
]
_OTHERS = Way(0, False, 0, _NO_END, turns=1, behind=2, passes_by=False)


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; Triton's own takes microseconds on the host."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def why_not_bwd(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run the backward pass of `spec`, or return None: they need
    Triton, CUDA, 16 bits, head dims that are multiples of 8 up to 256, and mask tiles of 128 x
    128."""
    if not device.has_triton():
        return "triton is not installed"
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if width % UNIT or not 8 <= width <= 256:
            return f"{name} must be a multiple of 8 up to 256, got {width}"
    if spec.mask_tile not in (None, (128, 128)):
        return f"tiles of a block mask must be (128, 128), got {spec.mask_tile}"
    return None


def has_separate_dq(spec: AttentionSpec) -> bool:
    """Say whether dq has a kernel of its own.

    Heads wider than 128 channels need that kernel: beside the sums of dk and dv a CTA has no room
    for dq. Reproducible sums need that kernel in two cases, in which CTAs would wait for one
    another in any fixed order of adding to dq: under a block mask; and without a diagonal, if a
    window has a left side or sequences differ in length.
    """
    if max(spec.head_dim, spec.v_head_dim) > 128:
        return True
    has_diagonal = 0 <= spec.window_right < spec.max_seqlen_q - 1
    has_left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    is_uneven = has_left or spec.is_varlen or spec.has_seqlens_k
    return spec.deterministic and (spec.mask_tile is not None or (is_uneven and not has_diagonal))


def order_of(spec: AttentionSpec) -> tuple[bool, bool]:
    """Say whether sums of dq have an order, and whether the last tiles of keys start first.

    For reproducible sums a CTA waits for others, which must be running already, however little of
    the device other kernels leave: so it waits only for CTAs that were launched before it. With a
    diagonal, sums go from the last tile of keys to the first, so the last tiles start first, though
    they have the least work.
    """
    if has_separate_dq(spec) or (spec.mask_tile and spec.is_varlen):
        return False, False  # lists of a mask may visit tiles past the end of a sequence
    if not spec.deterministic:
        return False, False
    return True, 0 <= spec.window_right < spec.max_seqlen_q - 1


def variant_of(spec: AttentionSpec) -> BwdVariant:
    """Return the BwdVariant, the compile-time choices, of a call; a window that hides nothing is
    compiled away."""
    return _form_for_length(_variant_of_features(spec), spec)


def is_short(spec: AttentionSpec) -> bool:
    """Return whether a call is dense, causal without a left window, and has at most SHORT keys.

    Pre- and postprocessing take a large share of such a call.
    """
    has_diagonal = spec.window_right >= 0 > spec.window_left
    return has_diagonal and not spec.is_varlen and spec.max_seqlen_k <= SHORT


def with_copied_bias(variant: BwdVariant, *, is_shared: bool) -> BwdVariant:
    """Return the variant for a call whose bias comes by copies, for which steps of 64 queries leave
    room."""
    return variant._replace(
        tile_m=64,
        by_query=False,
        flat=False,
        prepost="none",
        bias_copied=True,
        shares_bias=is_shared and not variant.packed,
        senders=1,
    )


def sum_width_of(variant: BwdVariant) -> int:
    """Return the channels of a row of the float32 sums of dq: those of a head where only the copy
    engine and the kernels before and after reach the sums, which cut tiles off, else those of a
    tile."""
    is_cut = not variant.flat and variant.prepost == "none"
    return variant.width if is_cut else variant.d


def features_of(spec: AttentionSpec, keys: int) -> dict[str, Any]:
    """Return the fields of a variant that a call's features decide on any device.

    They depend on lengths only by the sides of a window that hide a key, and by the keys of the
    last tile, where a tile has `keys` keys.
    """
    lengths_vary = spec.is_varlen or spec.has_seqlens_k
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    hides = left or right or lengths_vary
    softcap = "fast" if spec.dtype == torch.bfloat16 else "exact"
    has_mask = spec.mask_tile is not None
    return {
        "tile_n": keys,
        "width": spec.head_dim,
        "v_width": spec.v_head_dim,
        "left": left,
        "right": right,
        "tail": lengths_vary or (spec.max_seqlen_k % keys > 0 and (hides or not has_mask)),
        "packed": spec.is_varlen,
        "ragged": spec.has_seqlens_k,
        "positive": spec.softmax_scale > 0,
        "softcap": softcap if spec.softcap > 0 else "none",
        "alibi": spec.has_alibi,
        "bias": spec.has_bias,
        "bias_rows": False,
        "bias_pairs": False,
        "dropout": spec.dropout_threshold > 0,
        "mask": has_mask,
        "ruled": has_mask and hides,
        "together": False,
    }


def _variant_of_features(spec: AttentionSpec) -> BwdVariant:
    """Return the variant that a call's features ask for, before `_form_for_length` adapts it."""
    d = max(64, power_of_2(max(spec.head_dim, spec.v_head_dim)))
    separate_dq = has_separate_dq(spec)
    dv = d
    d_high = 0
    stages = 2
    if separate_dq and 128 < spec.head_dim <= 192 and spec.v_head_dim <= 128:
        d, d_high, dv = 128, 64, 128  # no product with channels that are padding
        stages = 3  # 2 % faster than two (D 192, Dv 128, N 4,096; H200, 2026-11-22)
    keys = SEPARATE_DQ_KEYS if separate_dq else KEYS
    ordered, last_first = order_of(spec)
    features = features_of(spec, keys)
    left, drops = features["left"], features["dropout"]
    varies = left or spec.is_varlen or spec.has_seqlens_k or spec.mask_tile is not None
    ring = (ordered or d == 64) and not (varies or features["right"] or separate_dq)
    if drops and d == 64 and not separate_dq:
        stages = DROPPING_STAGES
    # 128 queries and the words of dropout do not fit the registers: 81 of 1,086 instructions of a
    # step move them, of 64 queries none of 615 (full, words drawn in their own step). Calls take
    # 1.17 to 1.47 times as long (H200, lab/results/dropping_forms_h200.json).
    long_steps = d == 64 and not (separate_dq or drops)
    # A reproducible dq is faster without a flat sum of D 64: full, causal calls of 1,024, 4,096 and
    # 16,384 keys cost 14, 9, 8 / 6, 6, 4 % without and 11, 10, 11 / 4, 6, 11 % with it (H200,
    # lab/results/training_forms_h200.json).
    flat = long_steps and not ordered
    # Beside dropout the loop grew from 801 to 964 instructions (D 128, a word for each query then).
    senders = ORDERED_SENDERS if ordered and not drops else 1
    return BwdVariant(
        **features,
        # Measured on an H200 (bf16, 16,384 tokens, hidden 2,048; 2026-11-20).
        tile_m=128 if long_steps else 64,
        d=d,
        d_high=d_high,
        dv=dv,
        stages=stages,
        two_loops=d == 128 and not separate_dq and not ring and not (left and ordered),
        ordered=ordered,
        ring=ring,
        last_first=last_first,
        prepost="none" if senders > 1 else _prepost_of_code(spec, d),
        by_query=flat and ring,
        flat=flat and not varies,
        senders=senders,
    )


def _form_for_length(variant: BwdVariant, spec: AttentionSpec) -> BwdVariant:
    """Return the variant changed to the form that is fastest for the call's number of keys: plain
    calls by `WAYS`, and long ones of D 128 that are plain or full with dropout; others stay as they
    are.

    Measured on an H200 (bf16, 16,384 tokens, hidden 2,048; 2026-11-23, TFLOP/s). A flat sum of dq,
    with ds query by query, takes a tenth of what shared memory moves, the busiest part of all: full
    calls of D 64 go from 388, 501, 524 (N 1,024, 4,096, 16,384) to 404, 519, 554; with a diagonal a
    flat sum alone is best, 456 -> 470 at 4,096 and as fast elsewhere. At D 128 full calls in a ring
    go from 567 to 600 at 16,384 (561 at 4,096), causal ones whose warpgroups stay together from 519
    to 536 at 4,096, from 560 to 608 in one loop at 16,384 (327 -> 322 at 1,024). Warpgroups that
    add to the sum themselves, without a sender, were 1 to 8 % slower on 11 of 12 rows. Full calls
    that drop go from 506 to 537 at 16,384 (lab/results/dropping_forms_h200.json).
    """
    seqlen_k = spec.max_seqlen_k
    drops_else = variant.dropout and (variant.right or variant.ordered)
    extras = variant.alibi or variant.bias or drops_else or variant.softcap != "none"
    lengths = variant.packed or variant.ragged or variant.left or variant.mask
    plain = not (extras or lengths or variant.dropout or variant.ordered)
    if plain and variant.tile_n == KEYS:
        way = _way_of(variant, seqlen_k)
        several = _turns(way, cdiv(seqlen_k, KEYS)) > 1
        level = spec.max_seqlen_q == seqlen_k and spec.window_right == 0 and variant.positive
        variant = variant._replace(several=several, passes_by=way.passes_by and level)
    if variant.d != 128 or variant.tile_n != KEYS or extras or lengths or not variant.positive:
        return variant
    flat = variant._replace(flat=True, by_query=True)
    if not variant.right:
        return flat._replace(ring=True, two_loops=False) if seqlen_k >= _LONG else variant
    if seqlen_k < _LONG // 2:
        return variant
    return flat._replace(together=True, two_loops=seqlen_k < _LONG)


def _way_of(variant: BwdVariant, seqlen_k: int) -> Way:
    """Return the Way of a plain call with seqlen_k keys: the row of `WAYS` that fits it, else
    `_OTHERS`."""
    for row in WAYS:
        way = Way(*row)
        is_kind = way.channels == variant.d and way.has_diagonal == variant.right
        if is_kind and way.least_keys <= seqlen_k <= way.most_keys:
            return way
    return _OTHERS


def _turns(way: Way, num_tiles: int) -> int:
    """Return how many tiles of keys a CTA takes: a divisor of num_tiles, the tiles of a head."""
    return math.gcd(num_tiles, way.turns)


def _prepost_of_code(spec: AttentionSpec, d: int) -> str:
    """Return `BwdVariant.prepost`: how CTAs pre- and postprocess other heads, for tiles of d
    channels."""
    if has_separate_dq(spec) or spec.dropout_threshold > 0:
        return "none"
    has_diagonal = 0 <= spec.window_right < spec.max_seqlen_q - 1
    return "preprocess_first" if d == 128 and has_diagonal else "interleaved"


def heads_per_section(rows: int, spec: AttentionSpec, num_tiles: int, d: int, num_sms: int) -> int:
    """Return the number of key heads whose tiles are launched together, interleaved, those with
    most work first.

    More heads leave fewer long tiles to the end, but q, do and sums of dq should stay in L2.
    """
    heads = spec.batch * spec.num_kv_heads
    most = SHORT_BYTES if is_short(spec) else L2_BYTES
    in_l2 = max(1, most // (spec.group_size * rows * d * _BYTES_PER_ELEMENT))
    if spec.is_varlen:
        return min(heads, in_l2 * spec.batch)
    if spec.deterministic and not has_separate_dq(spec):
        # Each CTA follows the one before it on its head at some distance, and they end as they
        # began: the heads that run side by side leave as many places at a time as they are.
        return max(1, min(heads, ORDERED_WAVES * num_sms // num_tiles))
    if spec.window_right < 0:
        return 1
    few = heads * num_tiles < _FEW_WAVES * num_sms
    return heads if few else min(heads, in_l2)


def ring_size(spec: AttentionSpec, num_sms: int) -> int:
    """Return how many CTAs of a head that see all tiles of queries may start at different ones.

    1 if sums are reproducible: in a ring some CTA would wait for one that is launched later.
    """
    return 1 if spec.deterministic else num_sms // 2


def with_ungrouped_heads(spec: AttentionSpec) -> AttentionSpec:
    """Return a copy of a spec that has as many key heads as query heads.

    Kernels with this spec write one dk and one dv for each query head; the caller adds them up over
    each group of query heads. k and v themselves keep their heads.
    """
    return spec._replace(num_kv_heads=spec.num_q_heads)


class Turns(NamedTuple):
    """How many tiles of keys of a head a CTA takes one after the other, for how many of the first
    heads, and after how many waves of CTAs a head is postprocessed."""

    each: int  # tiles that a CTA takes
    heads: int  # the first ones, whose CTAs do; those of the others take one each
    behind: int  # waves of CTAs, after which a head is postprocessed


_ONE_EACH = Turns(1, 0, _OTHERS.behind)


def turns_of(spec: AttentionSpec, variant: BwdVariant, section: int, num_sms: int) -> Turns:
    """Return how CTAs share tiles of keys: where variant.several, CTAs in full waves take several
    tiles, and those of the last wave one each.

    Args:
        section: the heads whose tiles are interleaved.
        num_sms: the multiprocessors of the GPU.
    """
    if not variant.several:
        return _ONE_EACH
    heads, num_tiles = spec.batch * spec.num_kv_heads, cdiv(spec.max_seqlen_k, KEYS)
    way = _way_of(variant, spec.max_seqlen_k)
    each = _turns(way, num_tiles)
    ctas = num_tiles // each
    full = heads * ctas // num_sms * num_sms // ctas // section * section
    return Turns(each, full, way.behind if full else _OTHERS.behind)


class PrePostPlan(NamedTuple):
    """Which heads a CTA pre- and postprocesses for others: row terms, and dq rounded.

    Heads are counted over all sequences, in the order of their launch. A CTA waits for
    preprocessing by CTAs of `ahead` heads before its own: at least a section of heads, so that
    those were launched before it, and as many heads as run at a time, so that it seldom waits.
    """

    ahead: int
    behind: int
    blocks: int  # the CTAs of a head that pre- and postprocess
    rows: int  # each of them


def prepost_of(
    spec: AttentionSpec, section: int, num_tiles: int, num_sms: int, turns: Turns = _ONE_EACH
) -> PrePostPlan:
    """Return the PrePostPlan of a call: how far ahead and behind CTAs pre- and postprocess other
    heads, and how many rows each.

    Args:
        section: the number of heads that are launched together.
        num_tiles: the tiles of keys of a head.
        num_sms: the multiprocessors of the GPU.
        turns: the number of tiles that CTAs take.
    """
    heads = spec.batch * spec.num_kv_heads
    sections, share = (SHORT_AHEAD, SHORT_SHARE) if is_short(spec) else (1, 2)
    ctas = num_tiles // turns.each
    ahead = max(sections * section, cdiv(num_sms, ctas))
    behind = max(section, cdiv(turns.behind * num_sms, ctas))
    # With a diagonal the first tiles of keys have most to do, and this too.
    has_diagonal = spec.window_right >= 0 > spec.window_left
    blocks = cdiv(num_tiles, share) if has_diagonal else num_tiles
    tiles_of_rows = cdiv(spec.max_seqlen_q, ROW_TILE)
    if spec.max_seqlen_q > _MOST_QUERIES_A_KEY * spec.max_seqlen_k:
        ahead = behind = heads  # few CTAs, each with many rows to pre- and postprocess
    rows = cdiv(tiles_of_rows, blocks) * ROW_TILE
    return PrePostPlan(min(ahead, heads), min(behind, heads), blocks, rows)


def splits_groups(spec: AttentionSpec, mask_heads: int, num_sms: int) -> bool:
    """Say whether each query head of a group makes its own dk and dv, to be added up at the end.

    They do if the heads of a group see different tiles of a mask, or if CTAs that walk a whole
    group would be too few: a few waves of uneven length, or a last wave that is too empty.
    """
    if spec.group_size == 1 or mask_heads > 1:
        return spec.group_size > 1
    ctas = spec.batch * spec.num_kv_heads * cdiv(spec.max_seqlen_k, KEYS)
    hides = max(spec.window_left, spec.window_right) >= 0 or spec.mask_tile is not None
    if hides or spec.is_varlen or spec.has_seqlens_k:
        return ctas < _FEW_WAVES * num_sms
    return cdiv(ctas, num_sms) * num_sms > _FULL_WAVES * ctas
