"""Calls of the recurrence, what they should give, and its slots full of NaN."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops
from tilewise.reference.recurrent import recurrence

BACKENDS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]
KEEPS = {"cpu": "updates", "triton": "tokens"}  # what a backend's slots keep


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths; heads are (Hk, H, K, V)."""

    name: str
    lengths: tuple[int, ...] = (70,)
    heads: tuple[int, int, int, int] = (2, 4, 16, 32)
    is_delta: bool = True
    by_channel: bool = False
    strength: float = 0.3  # of decays, the largest -g
    has_state: bool = True

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("grouped_heads"),
    Case("one_head_for_each_key", heads=(2, 2, 32, 16)),
    Case("odd_dims", heads=(1, 2, 24, 40)),
    Case("wide_heads", lengths=(66,), heads=(1, 1, 128, 128)),
    Case("whole_chunks", lengths=(128, 64)),
    Case("packed", lengths=(5, 0, 1, 130, 64, 63)),
    Case("nothing_but_the_state", lengths=(0, 0)),
    Case("no_sequence", lengths=()),
    Case("from_zero", has_state=False),
    Case("strong_decay", lengths=(150,), strength=30.0),
    Case("no_decay", strength=0.0, has_state=False),
    Case("by_channel", lengths=(3, 70), by_channel=True),
    Case("by_channel_odd_dims", heads=(1, 2, 24, 40), by_channel=True),
    Case("by_channel_strong_decay", lengths=(100,), by_channel=True, strength=30.0),
    Case("mamba", lengths=(5, 0, 1, 130), heads=(1, 4, 16, 16), is_delta=False),
    Case("mamba_odd_dims", heads=(2, 2, 12, 20), is_delta=False),
    Case("mamba_wide", lengths=(65,), heads=(1, 2, 128, 64), is_delta=False),
    Case("no_delta_by_channel", is_delta=False, by_channel=True),
]


@dataclass
class Problem:
    """The tensors of a case, packed."""

    case: Case
    rows: tuple[Tensor, ...]  # q, k, v, g, beta
    state: Tensor | None
    edges: Tensor

    @classmethod
    def draw(cls, case: Case, dtype: torch.dtype, place: str = "cpu", seed: int = 0) -> Problem:
        """Draw one; keys have length 1, as models normalise them."""
        generator = torch.Generator().manual_seed(seed)
        total, (key_heads, heads, key_dim, value_dim) = sum(case.lengths), case.heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q, k = (F.normalize(normal(total, key_heads, key_dim), dim=-1) for _ in range(2))
        v = normal(total, heads, value_dim)
        channels = (key_dim,) if case.by_channel else ()
        g = -case.strength * torch.rand(total, heads, *channels, generator=generator)
        beta = torch.rand(total, heads, generator=generator)
        state = normal(len(case.lengths), heads, key_dim, value_dim) if case.has_state else None
        wide = torch.promote_types(dtype, torch.float32)
        rows = (*(x.to(place, dtype) for x in (q, k, v)), *(x.to(place, wide) for x in (g, beta)))
        edges = torch.tensor([0, *case.lengths]).cumsum(0).to(place, torch.int32)
        return cls(case, rows, None if state is None else state.to(place, wide), edges)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The first row of each sequence and its end."""
        ends = self.edges.tolist()
        return list(itertools.pairwise(ends))

    def solve(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return o and the states of the reference, computed in `dtype` on a CPU."""
        rows = [x.cpu().to(dtype) for x in self.rows]
        outputs, states = [torch.zeros(0, *rows[2].shape[1:], dtype=dtype)], []
        for index, (first, end) in enumerate(self.runs):
            state = None if self.state is None else self.state[index].cpu().to(dtype)
            o, _, state = recurrence(
                *(x[first:end] for x in rows), state, q_scale=0.5, is_delta=self.case.is_delta
            )
            outputs.append(o)
            states.append(state)
        shape = (0, self.case.heads[1], *self.case.heads[2:])
        return torch.cat(outputs), torch.stack(states) if states else torch.zeros(shape)

    def run(self, backend: str | None, rows: tuple[Tensor, ...] | None = None, **options):
        """Call the public op; returns o and the states."""
        q, k, v, g, beta = self.rows if rows is None else rows
        options = {"cu_seqlens": self.edges, "initial_state": self.state} | options
        if self.case.is_delta:
            return ops.gated_delta(
                q, k, v, g, beta, q_scale=0.5, return_state=True, backend=backend, **options
            )
        op = torch.ops.tilewise.recurrence.default
        return op(q, k, v, g, beta, options["initial_state"], options["cu_seqlens"], 0.5, False,
                  backend)  # fmt: skip

    def slots(self, num_slots: int, keeps: str | None) -> ops.RecurrentStates:
        """Return slots full of NaN."""
        key_heads, heads, key_dim, value_dim = self.case.heads
        states = ops.recurrent_states(
            num_slots,
            heads,
            key_dim,
            value_dim,
            num_key_heads=key_heads,
            by_channel=self.case.by_channel,
            is_delta=self.case.is_delta,
            dtype=self.rows[0].dtype,
            device=self.rows[0].device,
            keeps=keeps,
        )
        for x in states:
            if x is not None:
                x.fill_(float("nan"))
        return states

    def step(self, parts: list[tuple[int, int, int]], states, slots, backend) -> Tensor:
        """Give (sequence, first, end) of the next tokens to one call; returns their rows of o."""
        ends = self.edges.tolist()
        taken = [torch.arange(ends[n] + first, ends[n] + end) for n, first, end in parts]
        rows = [x[torch.cat(taken).to(x.device)] for x in self.rows]
        place = rows[0].device
        sizes = torch.tensor([0, *(end - first for _, first, end in parts)])
        slots_ = torch.tensor([slots[n] for n, _, _ in parts], device=place)
        starts = torch.tensor([first for _, first, _ in parts], device=place)
        edges = sizes.cumsum(0).to(place, torch.int32)
        if self.case.is_delta:
            return ops.gated_delta_step(
                *rows, states, slots=slots_, starts=starts, cu_seqlens=edges, q_scale=0.5,
                backend=backend,
            )  # fmt: skip
        op = torch.ops.tilewise.recurrence_step.default
        return op(*rows, *states, slots_.long(), starts.long(), edges, 0.5, False, backend)
