"""Several draft continuations of a sequence, verified in one step as a tree.

No torch, no numpy: the scheduler reads it.

A run with drafts is its last token, row 0, and a row for each draft; the parent of a draft is the
row after whose token it would come. A single continuation is a chain, parents 0, 1, 2 ...; where
continuations differ, siblings have one parent, and attention lets a row see its ancestors only
(`inputs.tree_mask`). A row is rotated by its depth and written to the slot of its number in the
run.

Verification descends from row 0: the token sampled from a row is final, and if it is one of the
row's children, that child's row is the next. So one of the siblings is accepted with the sum of
their probabilities, and the token sampled otherwise has the distribution without them,
renormalised: this is rejection sampling for several deterministic drafts, with one random number
for all of them. The tokens are those without drafts, as for a chain.

Of the right rows only those from row 0 on without a gap lie in the slots of their positions. The
tokens after the first gap are known then, but their keys are not in place: the next step computes
them again, in one run without drafts. So a branch costs some rows of a step and never a copy, and
no key is kept that was computed in the wrong place.

Source: Miao et al., "SpecInfer", ASPLOS 2024, section 4 for trees and their mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["depths", "merge", "num_in_place", "path"]


def merge(chains: Iterable[Sequence[int]], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the drafts of a tree that contains the chains, and the row of each draft's parent.

    The parents are () if the tree is a single chain. Row 0 is the token before the drafts; draft i
    is row i + 1.

    The first chain has rows 1, 2, 3 ... in this order, so that it is computed in its place.

    Args:
        chains: the continuations, the likeliest first.
        most: the largest number of drafts; the rest is left out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    row_of: dict[tuple[int, int], int] = {}  # row of a token after a row
    for chain in chains:
        row = 0
        for token in chain:
            found = row_of.get((row, token))
            if found is None:
                if len(tokens) >= most:
                    break
                tokens.append(token)
                parents.append(row)
                found = row_of[row, token] = len(tokens)
            row = found
    is_chain = parents == list(range(len(parents)))
    return tuple(tokens), () if is_chain else tuple(parents)


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each row of a run below row 0, for row 0 and all drafts."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def path(drafts: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return the rows whose tokens are right, in order: row 0, then the accepted drafts.

    Args:
        drafts: the tokens of the drafts.
        parents: the row of each draft's parent, () for a chain.
        drawn: the sampled token of each row, or of those on the path only, in its order.
    """
    row, found = 0, [0]
    child_of = {
        (parents[i] if parents else i, token): i + 1 for i, token in reversed([*enumerate(drafts)])
    }
    is_whole = len(drawn) == len(drafts) + 1
    while True:
        place = row if is_whole else len(found) - 1
        child = child_of.get((row, drawn[place])) if place < len(drawn) else None
        if child is None:
            return found
        row = child
        found.append(row)


def num_in_place(rows: Sequence[int]) -> int:
    """Return how many of the rows of a path lie in the slots of their positions."""
    return next((i for i, row in enumerate(rows) if row != i), len(rows))
