"""The numbers of rows of captured steps: few sizes, so that few graphs serve all steps."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["buckets", "padded_rows", "prompt_sizes"]


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows for which decode steps are captured as CUDA graphs, ascending.

    1, 2, 4, 8, then in steps of 8 to 64, of 16 to 256 and of 32 from there; `max_num_seqs` is last.
    Less than half of a step's rows are padding, and from 64 rows on less than a fifth.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def prompt_sizes(most: int) -> list[int]:
    """Return the numbers of tokens for which steps with prompts are captured, ascending to `most`.

    Powers of 2 from 16 to 256, then eight sizes an octave, so that above 256 tokens at most one in
    nine is padding; sizes above `most` are left out, and `most` is the last.
    """
    sizes = [16, 32, 64, 128, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return [*(size for size in sizes if size < most), most]


_BUCKETS, _PROMPTS = buckets(4096), prompt_sizes(1 << 20)


def padded_rows(rows: int, *, is_decode: bool) -> int:
    """Return the number of rows that a captured step for `rows` rows runs: the next size of
    `buckets` for a step that only decodes, else of `prompt_sizes`; `rows` itself beyond the largest
    size.

    An engine's last size, its largest number of rows, may be less than this.
    """
    sizes = _BUCKETS if is_decode else _PROMPTS
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else rows
