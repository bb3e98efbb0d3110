"""Merging the parts of sequences that several CTAs shared, by log-sum-exp.

What: o = sum of w_i o_i and lse, w_i = exp(lse_i - lse); rows of no sequence get o = 0, lse = -inf.
Grid: `groups` programs for each new token of each sequence, but none waits for another.
One program: a part of the pairs (head, 64 columns) of one new token, one after the other; none
      where the sequence has one part, which has been written to o already.
Traffic: parts once, 4 * (512 + 1) bytes a row; o once.
Numerics: float32, sums in the order of the parts.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
import triton
import triton.language as tl

from tilewise.kernels.triton.merge import add_parts, store_whole
from tilewise.kernels.triton.paged.keys import LOWEST, run_of

COLUMNS = 64  # merged at once


@triton.jit(do_not_specialize=["batch", "tokens", "heads", "row_tiles", "longest", "groups"])
def mla_merge_kernel(
    part_o,
    part_lse,
    plan,
    cu_seqlens_q,
    o,
    lse,
    batch,
    tokens,
    heads,
    row_tiles,
    longest,
    groups,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    which = program // groups
    sequence = which // longest
    token = which % longest
    # All at once: a chain of loads would take longer than most of these programs.
    used = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + batch), 0), tokens)
    start, run = run_of(cu_seqlens_q, sequence, True, tokens)
    first = tl.load(plan + 2 * sequence)  # never written where there is no row
    parts = tl.load(plan + 2 * sequence + 1)
    _clear_padding(o, lse, used + program, tokens, heads, WIDTH)
    if (token >= run) | (parts == 1):
        return
    pairs = heads * (WIDTH // COLUMNS)
    for pair in range(program % groups, pairs, groups):
        head = pair // (WIDTH // COLUMNS)
        column = pair % (WIDTH // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        row = token * heads + head
        acc = tl.zeros([COLUMNS], tl.float32)
        l = 0.0
        m = LOWEST
        for base in range(0, parts, PARTS):
            part = base + tl.arange(0, PARTS)
            inside = part < parts
            tile = (first + part).to(tl.int64) * row_tiles + row // ROWS
            at = tile * ROWS + row % ROWS
            lses = tl.load(part_lse + at, mask=inside, other=float("-inf"))
            at = at[:, None] * WIDTH + column[None, :]
            values = tl.load(part_o + at, mask=inside[:, None], other=0.0)
            acc, l, m = add_parts(acc, l, m, values, lses)
        o_row = o + ((start + token).to(tl.int64) * heads + head) * WIDTH
        lse_at = lse + head.to(tl.int64) * tokens + start + token
        store_whole(acc, l, m, o_row + column, None, lse_at)


@triton.jit
def _clear_padding(o, lse, first, tokens, heads, WIDTH: tl.constexpr):
    """Write o = 0 and lse = -inf, for all heads, to this program's share of the rows behind the
    last sequence: row `first` and each num_programs-th one after it, below row `tokens`."""
    column = tl.arange(0, WIDTH)
    for token in range(first, tokens, tl.num_programs(0)):
        start = tl.full([WIDTH], token, tl.int64) * heads
        for head in range(heads):
            at = (start + head) * WIDTH + column
            tl.store(o + at, tl.zeros([WIDTH], o.dtype.element_ty))
            tl.store(lse + head * tokens + token, float("-inf"))
