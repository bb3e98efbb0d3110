"""The gradient of gated_delta and ssd, in chunks of torch that know no backend.

With k and q of a chunk, G the running sum of its logs of decays, E_ts = exp(G_t - G_s) and S the
state before the chunk, its tokens compute

    A = strictly lower part of (k k^T E), P = lower part of q_scale (q k^T E)
    (1 + beta A) U = beta (v - (k exp(G)) S), or U = beta v without the delta rule
    o = (q_scale q exp(G)) S + P U,  S' = exp(G_C) S + (k exp(G_C - G))^T U

All but S and its gradient is computed for all chunks at once; these two go from chunk to chunk, for
all sequences and heads at once. Chunks have 64 tokens; 16 where each channel has a decay, as E then
has an element for each pair of tokens and channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_TOKENS, _TOKENS_BY_CHANNEL = 64, 16
_MOST_ELEMENTS = 2**24  # of E by channel at once: 64 MiB


class _Chunks(NamedTuple):
    """Where the chunks of packed sequences lie.

    Attributes:
        rows: (chunks * tokens,), the row of each token of each chunk; T where a chunk ends early.
        places: (T,), the index of each row in `rows`; len(rows) for a row that no sequence has.
        steps: the numbers of the chunks that are computed together: the first chunk of each
            sequence, then the second of each that has one, ...
        sequences: the sequences of the chunks of each step.
        tokens: the tokens of a chunk.
    """

    rows: Tensor
    places: Tensor
    steps: list[Tensor]
    sequences: list[Tensor]
    tokens: int

    @classmethod
    def of(cls, ends: Sequence[int], num_rows: int, tokens: int, device: torch.device) -> _Chunks:
        """Cut packed sequences into chunks.

        Args:
            ends: the first row of each sequence, and the end of the last.
            num_rows: T, also rows that no sequence has.
            tokens: the tokens of a chunk.
            device: the device of the tensors.
        """
        rows, steps, sequences = [], list[list[int]](), list[list[int]]()
        count = 0
        for sequence, (first, end) in enumerate(itertools.pairwise(ends)):
            length = -(-(end - first) // tokens)
            taken = torch.arange(first, first + length * tokens)
            rows.append(torch.where(taken < end, taken, num_rows))
            for number in range(length):
                if number == len(steps):
                    steps.append([])
                    sequences.append([])
                steps[number].append(count)
                sequences[number].append(sequence)
                count += 1
        all_rows = torch.cat([*rows, torch.empty(0, dtype=torch.int64)])
        places = torch.full((num_rows + 1,), len(all_rows))
        places[all_rows] = torch.arange(len(all_rows))
        return cls(
            all_rows.to(device),
            places[:num_rows].to(device),
            [torch.tensor(step, device=device) for step in steps],
            [torch.tensor(each, device=device) for each in sequences],
            tokens,
        )

    def cut(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Return rows x (T, H / group, ...) cut into chunks, (chunks, H, tokens, ...) of `dtype`.

        Each head is repeated `group` times, and places without a token are 0.
        """
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.rows].to(dtype)
        cut: Tensor = padded.unflatten(0, (-1, self.tokens)).transpose(1, 2)
        return cut.repeat_interleave(group, 1)

    def joined(self, x: Tensor, like: Tensor) -> Tensor:
        """Return chunks x (chunks, H, tokens, ...) as rows in the shape and dtype of `like`.

        It is the adjoint of `cut`: heads that `cut` made of one head are summed, and rows that no
        sequence has are 0.
        """
        rows = x.transpose(1, 2).flatten(0, 1)
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[self.places]
        if rows.shape[1] != like.shape[1]:
            rows = rows.unflatten(1, (like.shape[1], -1)).sum(2)
        return rows.to(like.dtype)


class _Decays:
    """The decays E_ts = exp(G_t - G_s) between tokens t and s of a chunk, 0 where s is after t.

    Args:
        running: G, the running sums of logs of decays, (chunks, H, tokens), or (chunks, H, tokens,
            K) if each channel has a decay.
    """

    def __init__(self, running: Tensor) -> None:
        self.by_channel = running.dim() == 4
        self.running, tokens = running, running.shape[2]
        self.later = torch.ones(tokens, tokens, dtype=torch.bool, device=running.device).triu(1)

    def _between(self, running: Tensor) -> Tensor:
        if self.by_channel:
            logs, later = running.unsqueeze(3) - running.unsqueeze(2), self.later.unsqueeze(-1)
        else:
            logs, later = running.unsqueeze(3) - running.unsqueeze(2), self.later
        return logs.masked_fill(later, -torch.inf).exp()

    def _slices(self) -> list[slice]:
        """Return slices of the chunks, each so short that its factors E fit the allowed memory."""
        _, heads, tokens, channels = self.running.shape
        step = max(1, _MOST_ELEMENTS // (heads * tokens * tokens * channels))
        return [slice(at, at + step) for at in range(0, len(self.running), step)]

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """Return sum over channels of a_t b_s E_ts, (chunks, H, tokens, tokens), 0 for later s.

        Args:
            a, b: (chunks, H, tokens, K).
        """
        if not self.by_channel:
            return a @ b.mT * self._between(self.running)
        parts = [
            (a[n].unsqueeze(3) * b[n].unsqueeze(2) * self._between(self.running[n])).sum(-1)
            for n in self._slices()
        ]
        return torch.cat(parts)

    def rows(self, weights: Tensor, b: Tensor) -> Tensor:
        """Return the gradient by a of sum(pairs(a, b) * weights), in the shape of a."""
        if not self.by_channel:
            return (weights * self._between(self.running)) @ b
        parts = [
            (weights[n].unsqueeze(-1) * b[n].unsqueeze(2) * self._between(self.running[n])).sum(3)
            for n in self._slices()
        ]
        return torch.cat(parts)

    def columns(self, weights: Tensor, a: Tensor) -> Tensor:
        """Return the gradient by b of sum(pairs(a, b) * weights), in the shape of b."""
        if not self.by_channel:
            return (weights * self._between(self.running)).mT @ a
        parts = [
            (weights[n].unsqueeze(-1) * a[n].unsqueeze(3) * self._between(self.running[n])).sum(2)
            for n in self._slices()
        ]
        return torch.cat(parts)


def gradient(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    dstate: Tensor | None,
    ends: Sequence[int],
    *,
    q_scale: float,
    is_delta: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the state before each sequence.

    The last one, (N, H, K, V) in float32 or wider, is computed also if there is no initial_state.

    Args:
        do: (T, H, V), the gradient of o.
        q, k, v, g, beta, initial_state, q_scale: the packed arguments of `gated_delta`.
        dstate: (N, H, K, V), the gradient of the state after each sequence; None where it is 0.
        ends: the first row of each sequence, and the end of the last.
        is_delta: True for the delta rule of `gated_delta`, False for the plain sum of `ssd`.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    num_heads, by_channel = v.shape[1], g.dim() == 3
    cut = _Chunks.of(ends, len(v), _TOKENS_BY_CHANNEL if by_channel else _TOKENS, v.device)
    shape = (len(ends) - 1, num_heads, k.shape[-1], v.shape[-1])
    given = v.new_zeros(shape, dtype=wide) if initial_state is None else initial_state.to(wide)
    dafter = v.new_zeros(shape, dtype=wide) if dstate is None else dstate.to(wide)
    if not cut.steps:
        return (*(torch.zeros_like(x) for x in (q, k, v, g, beta)), dafter.clone())
    originals, group = (q, k, v, g, beta), num_heads // k.shape[1]
    q, k = (cut.cut(x, group, wide) for x in (q, k))
    do, v, g, beta = (cut.cut(x, 1, wide) for x in (do, v, g, beta))
    beta = beta.unsqueeze(-1)
    running = g.cumsum(2)
    decays = _Decays(running)
    if not by_channel:
        running = running.unsqueeze(-1)
    last = running[:, :, -1:]
    into, out, total = running.exp(), (last - running).exp(), last.exp().mT
    p = q_scale * decays.pairs(q, k)
    keys_in, queries_in, keys_out = k * into, q_scale * q * into, k * out
    u = beta * v
    if is_delta:
        a = decays.pairs(k, k).tril(-1)
        system = beta * a  # with ones on its diagonal, which the solver puts there
        both = torch.cat([u, beta * keys_in], -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        u, w = both.split((v.shape[-1], k.shape[-1]), -1)
    else:
        a, w, system = p, keys_in, p  # never read
    # The states before all chunks, and U.
    before = v.new_empty(len(k), *shape[1:])
    state = given.clone()
    for chunks, sequences in zip(cut.steps, cut.sequences, strict=True):
        before[chunks] = s = state[sequences]
        update = u[chunks] - w[chunks] @ s if is_delta else u[chunks]
        state[sequences] = total[chunks] * s + keys_out[chunks].mT @ update
    if is_delta:
        u = u - w @ before
    # The gradients of the states after all chunks.
    du = p.mT @ do
    dbefore = queries_in.mT @ do
    if is_delta:
        dbefore = dbefore - w.mT @ du
    after = torch.empty_like(before)
    dstates = dafter.clone()
    for chunks, sequences in zip(reversed(cut.steps), reversed(cut.sequences), strict=True):
        after[chunks] = ds = dstates[sequences]
        passed = dbefore[chunks] + total[chunks] * ds
        if is_delta:
            passed = passed - w[chunks].mT @ (keys_out[chunks] @ ds)
        dstates[sequences] = passed
    du = du + keys_out @ after
    dp = (do @ u.mT).tril()
    dk_column = (u @ after.mT) * out
    dlast = (dk_column * k).sum(2, keepdim=True) + (before * after).sum(-1, keepdim=True).mT * (
        total.mT
    )
    dq = q_scale * (do @ before.mT * into + decays.rows(dp, k))
    dk_column = dk_column + q_scale * decays.columns(dp, q)
    dk_row = torch.zeros_like(k)
    if is_delta:
        y = torch.linalg.solve_triangular(system.mT, du, upper=True, unitriangular=True)
        dbeta = (y * (v - keys_in @ before - a @ u)).sum(-1)
        dv = beta * y
        da = -(dv @ u.mT).tril(-1)
        dk_row = decays.rows(da, k) - dv @ before.mT * into
        dk_column = dk_column + decays.columns(da, k)
    else:
        dbeta, dv = (du * v).sum(-1), beta * du
    # The log of a decay is in every product of a row with the rows before it.
    drunning = q * dq + k * (dk_row - dk_column)
    drunning[:, :, -1:] += dlast
    if not by_channel:
        drunning = drunning.sum(-1)
    dg = drunning.flip(2).cumsum(2).flip(2)
    grads = (dq, dk_row + dk_column, dv, dg, dbeta)
    return (*(cut.joined(x, like) for x, like in zip(grads, originals, strict=True)), dstates)
