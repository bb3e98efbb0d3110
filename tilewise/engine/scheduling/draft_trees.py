"""Several continuations of a sequence, guessed at once and verified in one step: a tree.

No torch, no numpy: the scheduler reads it.

A run with drafts is its last token, row 0, and a row for each draft; the parent of a draft is the
row after whose token it would come. Where all continuations are one, that is a chain, parents 0, 1,
2 ...; where they part, siblings have one parent, and attention lets a row see its ancestors only
(`inputs.tree_mask`). A row is rotated to its depth and written to the slot of its number in the
run.

Verification walks down from row 0: the token that is drawn from a row is right as it is, and if it
is one of the row's children, that child's row is the next. So a set of siblings is accepted with
the sum of their probabilities, and what is drawn beside them has the distribution without them,
renormalised: rejection sampling for several certain guesses, with one random number for all of
them. Tokens are those without guesses, as for a chain.

Of the rows that were right only those from row 0 on without a gap lie in the slots of their
positions. What comes after the first gap is known then, but not computed: the next step computes it
again, in its place, in one run with nothing guessed. So a branch costs some rows of a step and
never a copy, and no key is kept that was computed in the wrong place.

Source: Miao et al., "SpecInfer", ASPLOS 2024, section 4 for trees and their mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["depths", "merge", "num_in_place", "path"]


def merge(chains: Iterable[Sequence[int]], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the drafts of a tree that holds the chains, and the parent of each; () for one chain.

    The first chain has rows 1, 2, 3 ... in this order, so that it is computed in its place.

    Args:
        chains: continuations, the likeliest first.
        most: drafts at most; what does not fit is left out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    row_of: dict[tuple[int, int], int] = {}  # of a token after a row
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
    """Return how many tokens each row of a run comes after row 0, for row 0 and all drafts."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def path(drafts: Sequence[int], parents: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return the rows that were right, from row 0 on.

    Args:
        drafts: guesses.
        parents: row of the parent of each, () for a chain.
        drawn: token of each row, or of those on the path only, in its order.
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
