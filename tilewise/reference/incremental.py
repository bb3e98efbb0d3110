"""Attention in pieces, as the papers print it, on a memory that counts accesses.

    incremental_forward   chunks of keys, all queries at once (eq. 2)
    flash_forward         Algorithm 1 of 2022: keys outside, queries inside, m and l written back
    flash_forward_2       FlashForward2: queries outside, one division at the end, xi saved
    flash_backward        gradients from tiles that are computed again
    standard_forward      the baseline: S and P in HBM

One head: q (Nq, d), k (Nk, d), v (Nk, dv). Rows that see no key give o = 0, m = xi = -inf, l = 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.reference.memory import Memory
from tilewise.reference.tiling import Tiling, chunks

__all__ = [
    "Backward",
    "Forward",
    "Forward2",
    "flash_backward",
    "flash_forward",
    "flash_forward_2",
    "incremental_forward",
    "standard_forward",
]


class Forward(NamedTuple):
    """Output of `flash_forward`: m is the row maximum, l the sum of exp(s - m)."""

    o: Tensor  # (Nq, dv)
    m: Tensor  # (Nq,)
    l: Tensor  # (Nq,)  # noqa: E741
    memory: Memory


class Forward2(NamedTuple):
    """Output of `flash_forward_2`: xi = m + log l, the log-sum-exp of a row."""

    o: Tensor  # (Nq, dv)
    xi: Tensor  # (Nq,)
    memory: Memory


class Backward(NamedTuple):
    """Output of `flash_backward`: gradients in the shapes of q, k and v, and the counting
    memory."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    memory: Memory


def _finite(m: Tensor) -> Tensor:
    """Return m with -inf, the maximum of an empty row, replaced by 0, so that -inf - m is -inf and
    not NaN."""
    return torch.where(m == -math.inf, 0.0, m)


def _nonzero(total: Tensor) -> Tensor:
    """Return `total` with 0, the sum of an empty row, replaced by 1, so that 0 / l is 0 and not
    NaN."""
    return torch.where(total == 0, 1.0, total)


def standard_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, stores_p: bool = True
) -> tuple[Tensor, Memory]:
    """Compute attention as three matrix operations that exchange their results through HBM.

    S = tau Q K^T is written; it is read, and P = softmax(S) is written over it; P is read, and O =
    P V written: 4 N d + 4 N^2 accesses. With `stores_p` False the softmax is fused into the second
    product, which leaves 4 N d + 2 N^2. Each matrix is moved once and whole, as the papers count.

    Returns:
        o (Nq, dv), and the counting memory.

    Source: the fourth and fifth papers' three steps; the third paper's two.
    """
    memory = Memory(q=q, k=k, v=v)
    scale = q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale
    memory.alloc("s", q.shape[0], k.shape[0])
    memory.alloc("o", q.shape[0], v.shape[1], output=True)
    memory.store("s", scale * memory.load("q") @ memory.load("k").T)
    p = memory.load("s").softmax(dim=1)
    if stores_p:
        memory.store("s", p)
        p = memory.load("s")
    memory.store("o", p @ memory.load("v"))
    return memory["o"], memory


def incremental_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    stable: bool = True,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Memory]:
    """Compute attention over chunks of keys, all queries at once, overwriting pi and O.

    pi_new = pi + exp(A_j).sum(2); O_new = (pi / pi_new) O + (exp(A_j) / pi_new) V_j, where
    A_j = tau Q K_j^T. The stable form keeps a running maximum c and multiplies pi by
    exp(c - c_new) first; the other overflows where exp does. Additional memory is O(N chunk_size).

    Returns:
        o (Nq, dv), and the counting memory.

    Source: Stratos, "Efficient Attention", eq. 2.
    """
    memory, rows = Memory(q=q, k=k, v=v), slice(0, q.shape[0])
    tiling = Tiling(rows.stop, chunk_size, softmax_scale=softmax_scale)
    memory.alloc("o", rows.stop, v.shape[1], fill=0.0, output=True)
    memory.alloc("pi", rows.stop, 1, fill=0.0)
    if stable:
        memory.alloc("c", rows.stop, 1, fill=-math.inf)
    for columns in chunks(k.shape[0], chunk_size):
        memory.alloc("a", rows.stop, columns.stop - columns.start)
        a = tiling.scores(memory.load("q"), memory.load("k", columns), rows, columns)
        memory.store("a", a)
        a, pi, o = memory.load("a"), memory.load("pi"), memory.load("o")
        if stable:
            c = memory.load("c")
            c_new = torch.maximum(c, a.amax(dim=1, keepdim=True))
            memory.store("c", c_new)
            a, pi = a - c_new, torch.exp(c - c_new) * pi
        e = torch.exp(a)
        pi_new = pi + e.sum(dim=1, keepdim=True)
        memory.store("o", (pi / pi_new) * o + (e / pi_new) @ memory.load("v", columns))
        memory.store("pi", pi_new)
    return memory["o"], memory


def flash_forward(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Forward:
    """Run Algorithm 1 of FlashAttention: keys in the outer loop, queries in the inner one.

    O_i, l_i and m_i are read from HBM and written back for each tile, O_i normalised each time.
    With Tc = ceil(N / Bc): 3 N d + 2 N + Tc (3 N d + 4 N) accesses, Theta(N^2 d^2 / M), and 2 N
    elements of additional memory. A layout scales the second term by its density.

    Source: Dao et al. 2022, Algorithms 1, 2 (mask and dropout) and 5 (block-sparse).
    """
    memory = Memory(q=q, k=k, v=v)
    memory.alloc("o", q.shape[0], v.shape[1], fill=0.0, output=True)
    memory.alloc("l", q.shape[0], 1, fill=0.0)
    memory.alloc("m", q.shape[0], 1, fill=-math.inf)
    for column, columns in enumerate(chunks(k.shape[0], tiling.tile_k)):
        k_j, v_j = memory.load("k", columns), memory.load("v", columns)
        for row, rows in enumerate(chunks(q.shape[0], tiling.tile_q)):
            if not tiling.keeps_tile(row, column):
                continue
            q_i, o_i, l_i, m_i = (memory.load(name, rows) for name in ("q", "o", "l", "m"))
            s = memory.keep("s", tiling.scores(q_i, k_j, rows, columns))
            m_tile = s.amax(dim=1, keepdim=True)
            p = memory.keep("s", torch.exp(s - _finite(m_tile)))
            l_tile = p.sum(dim=1, keepdim=True)
            m_new = torch.maximum(m_i, m_tile)
            old, new = torch.exp(m_i - _finite(m_new)), torch.exp(m_tile - _finite(m_new))
            l_new = old * l_i + new * l_tile
            pv = tiling.dropped(p, rows, columns) @ v_j
            memory.store("o", (l_i * old * o_i + new * pv) / _nonzero(l_new), rows)
            memory.store("l", l_new, rows)
            memory.store("m", m_new, rows)
            memory.drop("q", "o", "l", "m", "s")
        memory.drop("k", "v")
    return Forward(memory["o"], memory["m"].squeeze(1), memory["l"].squeeze(1), memory)


def flash_forward_2(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Forward2:
    """Run FlashForward2: queries in the outer loop, so that a tile of O is written once.

    G <- exp(c - c_new) G + exp(A_ij - c_new) V_j stays on chip without normalisation; at the end
    O_i = G / pi and xi_i = c + log pi. With Tr = ceil(N / Br): 2 N d + N + 2 N d Tr accesses and N
    elements of additional memory.

    Source: Stratos, "Efficient Attention", appendix D; Dao 2024, "FlashAttention-2".
    """
    memory = Memory(q=q, k=k, v=v)
    memory.alloc("o", q.shape[0], v.shape[1], output=True)
    memory.alloc("xi", q.shape[0], 1)
    for row, rows in enumerate(chunks(q.shape[0], tiling.tile_q)):
        q_i = memory.load("q", rows)
        g = memory.keep("g", q.new_zeros(len(q_i), v.shape[1]))
        pi = memory.keep("pi", q.new_zeros(len(q_i), 1))
        c = memory.keep("c", q.new_full((len(q_i), 1), -math.inf))
        for column, columns in enumerate(chunks(k.shape[0], tiling.tile_k)):
            if not tiling.keeps_tile(row, column):
                continue
            k_j, v_j = memory.load("k", columns), memory.load("v", columns)
            a = memory.keep("a", tiling.scores(q_i, k_j, rows, columns))
            c_new = torch.maximum(c, a.amax(dim=1, keepdim=True))
            old = torch.exp(c - _finite(c_new))
            p = memory.keep("a", torch.exp(a - _finite(c_new)))
            pi = old * pi + p.sum(dim=1, keepdim=True)
            g = old * g + tiling.dropped(p, rows, columns) @ v_j
            c = c_new
            memory.drop("k", "v", "a")
        memory.store("o", g / _nonzero(pi), rows)
        memory.store("xi", c + torch.log(pi), rows)
        memory.drop("q", "g", "pi", "c")
    return Forward2(memory["o"], memory["xi"].squeeze(1), memory)


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, xi: Tensor, tiling: Tiling
) -> Backward:
    """Compute dq, dk, dv from tiles of P that are recomputed from xi.

    P_ij = exp(A_ij - xi_i); dV_j += P_ij^T dO_i; dP_ij = dO_i V_j^T; u_i = rowsum(O_i * dO_i);
    dA_ij = P_ij * (dP_ij - u_i); dQ_i += tau dA_ij K_j; dK_j += tau dA_ij^T Q_i. Dropout is applied
    to P before it is multiplied with V. With Tc = ceil(N / Bc): 9 N d + Tc (5 N d + N) accesses for
    dv = d, and no additional memory.

    Args:
        do, o: (Nq, dv), the gradient of the output, and the output.
        xi: (Nq,), the result of `flash_forward_2`, or m + log l of `flash_forward`.
        tiling: the Tiling of the forward pass; the tile sizes may differ without a layout.

    Source: Stratos, "Efficient Attention", section 2.3 (FlashBackward, lemma 2.1) and appendix D.
    """
    memory = Memory(q=q, k=k, v=v, o=o, do=do, xi=xi.unsqueeze(1))
    scale = q.shape[1] ** -0.5 if tiling.softmax_scale is None else tiling.softmax_scale
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        memory.alloc(name, *like.shape, fill=0.0, output=True)
    for column, columns in enumerate(chunks(k.shape[0], tiling.tile_k)):
        k_j, v_j, dk_j, dv_j = (memory.load(name, columns) for name in ("k", "v", "dk", "dv"))
        for row, rows in enumerate(chunks(q.shape[0], tiling.tile_q)):
            if not tiling.keeps_tile(row, column):
                continue
            names = ("q", "o", "do", "dq", "xi")
            q_i, o_i, do_i, dq_i, xi_i = (memory.load(name, rows) for name in names)
            a = tiling.scores(q_i, k_j, rows, columns)
            p = memory.keep("p", torch.exp(a - _finite(xi_i)))
            dv_j = dv_j + tiling.dropped(p, rows, columns).T @ do_i
            dp = memory.keep("dp", tiling.dropped(do_i @ v_j.T, rows, columns))
            u_i = (o_i * do_i).sum(dim=1, keepdim=True)
            da = memory.keep("dp", p * (dp - u_i))
            memory.store("dq", dq_i + scale * da @ k_j, rows)
            dk_j = dk_j + scale * da.T @ q_i
            memory.drop(*names, "p", "dp")
        memory.store("dk", dk_j, columns)
        memory.store("dv", dv_j, columns)
        memory.drop("k", "v", "dk", "dv")
    return Backward(memory["dq"], memory["dk"], memory["dv"], memory)
