"""tree_mask_from_parents(): which new tokens each draft of speculative decoding sees."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks


@names
def tree_mask_from_parents(
    parents: Tensor, cu_seqlens_q: Tensor, *, max_seqlen_q: int, **unknown: Never
) -> Tensor:
    """Let every new token see itself and its ancestors: a `tree_mask` of `paged_attention`.

    A chain (parents 0, 1, 2, ... after a root -1) gives the causal rule; a tree of drafts verifies
    several continuations in one call.

    Args:
        parents: (T,) int32 or int64, place of each token's parent among the new tokens of its own
            sequence; -1 for a token that follows the cached context. A parent usually stands
            before its children; nothing asks for it.
        cu_seqlens_q: (B + 1,) int32 or int64, the rows of each sequence; rows past the last one see
            nothing.
        max_seqlen_q: columns of the mask, at least the longest run.

    Returns:
        bool (T, max_seqlen_q): row t, column j is True where token t sees new token j of its own
        sequence. Made on the device of `parents` without a synchronisation.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: SpecInfer (Miao et al. 2024), section 4.2, tree attention's topology-aware mask.

    Example:
        >>> parents = torch.tensor([-1, 0, 0, 1])  # two children of the first, one grandchild
        >>> mask = tree_mask_from_parents(parents, torch.tensor([0, 4], dtype=torch.int32),
        ...                               max_seqlen_q=4)
    """
    if unknown:
        raise unknown_keyword(tree_mask_from_parents, unknown)
    checks.check_dims("parents", parents, "(T)")
    if parents.dtype not in (torch.int32, torch.int64):
        got = checks.dtype_name(parents.dtype)
        raise TypeError(f"parents must have dtype int32 or int64, got {got}")
    checks.check_dims("cu_seqlens_q", cu_seqlens_q, "(B + 1)")
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, tuple(cu_seqlens_q.shape), parents.device)
    if len(cu_seqlens_q) < 1:
        raise ValueError("cu_seqlens_q must hold at least the leading 0, got an empty tensor")
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q must be at least 0, got {max_seqlen_q}")
    rows = torch.arange(len(parents), device=parents.device)
    edges = cu_seqlens_q.long()
    seq = torch.searchsorted(edges, rows, right=True) - 1
    owned = rows < edges[-1]
    start = edges[seq.clamp(max=len(edges) - 1)]
    columns = torch.arange(max_seqlen_q, device=parents.device)
    mask = (columns == (rows - start)[:, None]) & owned[:, None]
    # Pointer doubling: after step i a row holds its 2**i nearest ancestors-or-self, and `above` is
    # the row 2**i generations up (T where there is none: an added row that sees nothing).
    none = len(parents)
    above = torch.where(owned & (parents >= 0), start + parents, none)
    above = torch.cat([above, above.new_full((1,), none)])
    mask = torch.cat([mask, mask.new_zeros(1, max_seqlen_q)])
    for _ in range(max(0, max_seqlen_q - 1).bit_length()):
        mask = mask | mask[above]
        above = above[above]
    return mask[:-1]
