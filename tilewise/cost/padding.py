"""Rows that a captured step runs: the next of a few sizes, so that few graphs serve all steps."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["buckets", "padded_rows", "prompt_sizes"]


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that decode steps are made for, ascending: the last is the most.

    1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 from there: at most 8 rows in 9, and
    later one in eight, run for nothing.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def prompt_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that steps with prompts are captured for, ascending.

    Powers of 2 from 16 to 256, then eight sizes an octave: at most one token in nine runs for
    nothing. The last is `most`.
    """
    sizes = [16, 32, 64, 128, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return [*(size for size in sizes if size < most), most]


_BUCKETS, _PROMPTS = buckets(4096), prompt_sizes(1 << 20)


def padded_rows(rows: int, *, is_decode: bool) -> int:
    """Return how many rows a captured step of `rows` runs.

    The last size of an engine, its most rows, may be less.
    """
    sizes = _BUCKETS if is_decode else _PROMPTS
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else rows
