"""One attention call to measure, as data: its shape, its rule, who computes it, what it costs.

FLOPs are counted as in the FlashAttention papers, whatever a kernel recomputes: two products of
every visible (i, j) forward and five backward; a causal square counts half of its entries, a window
or a block layout the entries that it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # side of a block of a random layout: FlexAttention's default
OPS = ("forward", "backward", "forward+backward")


@dataclass(frozen=True, slots=True)
class Problem:
    """A self-attention call on random bfloat16 inputs.

    Attributes:
        table: the table of the report that the rows belong to.
        batch: number of sequences.
        seqlen: N, tokens of a sequence; of the longest one in a packed batch.
        num_q_heads, num_kv_heads: numbers of heads of q, and of k and v.
        head_dim, v_head_dim: D of q and k, Dv of v and o.
        peers: names of `peers.PEERS`, ours first.
        causal, window_left: the rule; a window_left of w shows keys i - w ... i.
        lengths: the lengths of the sequences of a packed batch; () is a dense call of `batch`
            sequences.
        density: probability of a block of a random layout to be visible; 0 is no layout.
        feature: the feature beside the plain call, see `case.make_case`.
        ops: the ops to measure: some of forward, backward, forward+backward, jvp, double backward.
    """

    table: str
    batch: int
    seqlen: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    peers: tuple[str, ...]
    causal: bool = False
    window_left: int = -1
    lengths: tuple[int, ...] = ()
    density: float = 0.0
    feature: str = "plain"
    ops: tuple[str, ...] = OPS

    @property
    def label(self) -> str:
        """A short text that names the problem among those of a run, for progress."""
        wide = "" if self.head_dim == self.v_head_dim else f"/{self.v_head_dim}"
        rule = "causal" if self.causal else "full"
        parts = [self.table, f"N {self.seqlen}", f"D {self.head_dim}{wide}", rule]
        if self.feature != "plain":
            parts.append(self.feature)
        return " ".join(parts)

    def layout(self) -> Tensor:
        """Return the random block layout, bool (blocks, blocks), True for visible blocks; the same
        in every process."""
        blocks = -(-self.seqlen // BLOCK)
        generator = torch.Generator().manual_seed(self.seqlen)
        return torch.rand(blocks, blocks, generator=generator) < self.density

    def visible_entries(self) -> float:
        """Return the number of (query, key) entries of one head, over all sequences, that count for
        FLOPs: the visible ones, of a causal square half of all."""
        n = self.seqlen
        if self.lengths:
            return sum(length**2 for length in self.lengths) * (0.5 if self.causal else 1.0)
        if self.density:
            return self.batch * float((self.layout() * self._shown_in_blocks()).sum())
        if self.window_left >= 0:
            width = min(self.window_left + 1, n)
            return self.batch * (width * (width + 1) / 2 + (n - width) * width)
        return self.batch * n * n * (0.5 if self.causal else 1.0)

    def _shown_in_blocks(self) -> Tensor:
        """Return how many entries of each block causality and the window show, int64 (blocks,
        blocks)."""
        blocks = -(-self.seqlen // BLOCK)
        within = torch.arange(1 - BLOCK, BLOCK)  # of a row's place in its block less a key's
        distance = BLOCK * torch.arange(1 - blocks, blocks)[:, None] + within
        shown = torch.ones_like(distance)
        if self.causal:
            shown *= distance >= 0
        if self.window_left >= 0:
            shown *= distance <= self.window_left
        of_a_diagonal = (shown * (BLOCK - within.abs())).sum(1)
        places = torch.arange(blocks)
        return of_a_diagonal[places[:, None] - places + blocks - 1]

    def flops(self, op: str) -> float | None:
        """Return the FLOPs of one call of `op` by the papers' count; None for an op that they do
        not count."""
        d, dv = self.head_dim, self.v_head_dim
        products = {  # channels that each visible entry is multiplied with
            "forward": d + dv,
            "backward": 3 * d + 2 * dv,
            "forward+backward": 4 * d + 3 * dv,
        }
        if op not in products:
            return None
        return 2.0 * self.visible_entries() * self.num_q_heads * products[op]

    def columns(self) -> dict[str, Any]:
        """Return the columns that identify the problem in a row of the report, by name."""
        columns: dict[str, Any] = {"table": self.table, "B": self.batch, "H": self.num_q_heads}
        columns |= {"Hk": self.num_kv_heads, "N": self.seqlen}
        columns |= {"D": self.head_dim, "Dv": self.v_head_dim, "causal": self.causal}
        columns |= {"dtype": "bfloat16", "feature": self.feature}
        if self.lengths:
            columns |= {"lengths": list(self.lengths)}
        if self.window_left >= 0:
            columns |= {"window_left": self.window_left}
        if self.density:
            columns |= {"density": self.visible_entries() / (self.batch * self.seqlen**2)}
        return columns
