"""ssd and its step: Mamba-2 as its paper and transformers write it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.recurrent.problem import BACKENDS, KEEPS
from tilewise import ops
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
GROUPS, HEADS, STATE, DIM = 2, 4, 16, 8
_LENGTHS = (70, 1, 0, 64)


def _draw(dtype: torch.dtype, place: str, skip: tuple[int, ...] | None = (HEADS,)):
    generator, total = torch.Generator().manual_seed(4), sum(_LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, b, c = (
        normal(total, *sizes).to(place, dtype)
        for sizes in ((HEADS, DIM), (GROUPS, STATE), (GROUPS, STATE))
    )
    dt, a = normal(total, HEADS).abs().to(place), -normal(HEADS).abs().to(place)
    d = None if skip is None else normal(*skip).to(place)
    state = normal(len(_LENGTHS), HEADS, STATE, DIM).to(place)
    edges = torch.tensor([0, *_LENGTHS]).cumsum(0).to(place, torch.int32)
    return (x, dt, a, b, c), d, state, edges


def _plain(rows, d, state, edges, dtype) -> tuple[Tensor, Tensor]:
    """Mamba-2's step as its authors write it, (H, P, N) for a state."""
    x, dt, a, b, c = (t.cpu().to(dtype) for t in rows)
    b, c = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (b, c))
    y, states, ends = torch.zeros_like(x), [], edges.tolist()
    for n, (first, end) in enumerate(itertools.pairwise(ends)):
        s = state[n].cpu().to(dtype).mT
        for t in range(first, end):
            da = torch.exp(dt[t] * a)
            s = s * da[:, None, None] + (dt[t, :, None] * x[t])[:, :, None] * b[t][:, None, :]
            y[t] = (s * c[t][:, None, :]).sum(-1)
        states.append(s.mT)
    if d is not None:
        d = d.cpu().to(dtype)
        y = y + (d if d.dim() == 2 else d[:, None]) * x
    return y, torch.stack(states)


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skip", [None, (HEADS,), (HEADS, DIM)], ids=str)
def test_results_keep_the_budget(skip, dtype, backend, place):
    rows, d, state, edges = _draw(dtype, place, skip)
    y, after = ops.ssd(
        *rows, d=d, cu_seqlens=edges, initial_state=state, return_state=True, backend=backend
    )
    truth, true_state = _plain(rows, d, state, edges, torch.float64)
    eager, eager_state = _plain(rows, d, state, edges, torch.float32)
    assert y.dtype == dtype
    # Logs of decays add up to some 60 in a chunk, which round the logs' differences; results are
    # up to 50. The recurrence is rounded before the skipped part is added.
    factor = 2.0 if dtype == torch.float32 else 3.0
    assert_within_budget(y, truth, eager.to(dtype), factor=factor, scale=400.0)
    # Tokens of 16 bits are multiplied with what is rounded to theirs on tensor cores.
    is_coarse = backend == "triton" and dtype != torch.float32
    after, eager_state = (x.to(dtype) if is_coarse else x for x in (after, eager_state))
    assert_within_budget(after, true_state, eager_state, scale=400.0)


@pytest.mark.usefixtures("products_in_order")
@on_each_backend
def test_sequences_in_parts_have_the_bits_of_the_whole(backend, place):
    rows, d, _, edges = _draw(torch.bfloat16, place)
    whole = ops.ssd(*rows, d=d, cu_seqlens=edges, backend=backend)
    x, dt, a, b, c = rows
    states = ops.recurrent_states(
        4,
        HEADS,
        STATE,
        DIM,
        num_key_heads=GROUPS,
        is_delta=False,
        dtype=x.dtype,
        device=place,
        keeps=KEEPS[backend],
    )
    ends = edges.tolist()
    for n, length in enumerate(_LENGTHS):
        for first, end in ((0, 1), (1, 30), (30, 64), (64, 65), (65, 70)):
            first, end = min(first, length) + ends[n], min(end, length) + ends[n]
            part = ops.ssd_step(
                x[first:end], dt[first:end], a, b[first:end], c[first:end], states, d=d,
                slots=torch.tensor([3 - n], device=place),
                starts=torch.tensor([first - ends[n]], device=place),
                cu_seqlens=torch.tensor([0, end - first], dtype=torch.int32, device=place),
                backend=backend,
            )  # fmt: skip
            assert torch.equal(part, whole[first:end])


def test_gradients_are_those_of_the_paper():
    rows, d, state, edges = _draw(torch.float64, "cpu")
    leaves = [x.double().requires_grad_() for x in (*rows, d, state)]

    def loss(y, after):
        return y.square().sum() + after.sin().sum()

    ours = loss(
        *ops.ssd(
            *leaves[:5], d=leaves[5], initial_state=leaves[6], cu_seqlens=edges, return_state=True
        )
    )
    plain = [x.detach().clone().requires_grad_() for x in leaves]
    x, dt, a, b, c, skip, before = plain
    b, c = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (b, c))
    y, states, ends = [], [], edges.tolist()
    for n, (first, end) in enumerate(itertools.pairwise(ends)):
        s = before[n]
        for t in range(first, end):
            s = s * torch.exp(dt[t] * a)[:, None, None]
            s = s + b[t][:, :, None] * (dt[t, :, None] * x[t])[:, None, :]
            y.append((s * c[t][:, :, None]).sum(1) + skip[:, None] * x[t])
        states.append(s)
    wanted = torch.autograd.grad(loss(torch.stack(y), torch.stack(states)), plain)
    for got, want in zip(torch.autograd.grad(ours, leaves), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_small_call_matches_mamba_2_of_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = pytest.importorskip("transformers").Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, expand=2, state_size=16, n_groups=2, chunk_size=8
    )
    torch.manual_seed(0)
    mixer = modeling.Mamba2Mixer(config, layer_idx=0).eval()
    hidden = torch.randn(2, 21, 16)
    with torch.no_grad():
        want = mixer(hidden)
        gate, inner, dt = mixer.in_proj(hidden).split([32, 32 + 2 * 2 * 16, 4], -1)
        inner = ops.causal_conv1d(
            inner, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation="silu"
        )
        x, b, c = inner.split([32, 32, 32], -1)
        y = ops.ssd(
            x.unflatten(-1, (4, 8)), torch.nn.functional.softplus(dt + mixer.dt_bias),
            -mixer.A_log.exp(), b.unflatten(-1, (2, 16)), c.unflatten(-1, (2, 16)), d=mixer.D,
        )  # fmt: skip
        got = mixer.out_proj(mixer.norm(y.flatten(-2), gate))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
