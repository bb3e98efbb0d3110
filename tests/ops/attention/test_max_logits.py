"""The largest logit of each head: float64's, on every backend, dense and packed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, attention_varlen, masks
from tilewise.reference import standard

BACKENDS = ["reference", "cpu", "triton"]  # "gluon" in tests/kernels/gluon/test_max_logits.py
HEADS, KEY_HEADS, WIDTH = 4, 2, 32


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def logits(q: Tensor, k: Tensor, *, visible: Tensor | None = None, **rule: Any) -> Tensor:
    """Write the rule of docs/guide/attention.md down once more, in float64: (B, Hq, Sq, Sk)."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * rule.get("softmax_scale", q.shape[-1] ** -0.5)
    cap = rule.get("softcap", 0.0)
    s = cap * torch.tanh(s / cap) if cap else s
    if rule.get("bias") is not None:
        s = s + rule["bias"].double()
    distance = (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    distance = distance - torch.arange(k.shape[1])
    if rule.get("alibi_slopes") is not None:
        s = s - rule["alibi_slopes"].double()[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool) if visible is None else visible
    if rule.get("causal"):
        seen = seen & (distance >= 0)
    if rule.get("window") is not None:
        left, right = rule["window"]
        seen = seen & (distance <= left) & (distance >= -right)
    return s.masked_fill(~seen, -math.inf)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs on a CPU; Triton's kernels in the interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        from tilewise.kernels import device

        if not device.interpreting():
            pytest.skip("the interpreter is off")
    return str(request.param)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == (HEADS,)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "capped": {"softcap": 2.0, "softmax_scale": 0.7},
    "negative_scale": {"softmax_scale": -0.4, "causal": True},
    "bias": {"bias": torch.randn(4, 1, 150)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.5]), "causal": True},
    "sinks": {"sinks": torch.tensor([9.0, -9.0, 0.0, 50.0]), "causal": True},
    "dropout": {"dropout_p": 0.9, "seed": 3},
}


@pytest.mark.parametrize("name", RULES)
def test_is_that_of_float64(backend: str, name: str) -> None:
    rule = RULES[name]
    q, k, v = draw(2, 70, HEADS, WIDTH), draw(2, 150, KEY_HEADS, WIDTH), draw(2, 150, KEY_HEADS, 24)
    q[:, :, 1] *= 4  # heads differ
    o, lse, most = attention(
        q, k, v, return_lse=True, return_max_logits=True, backend=backend, **rule
    )
    known = {key: x for key, x in rule.items() if key not in ("sinks", "dropout_p", "seed")}
    close(most, logits(q, k, **known).amax((0, 2, 3)))
    o_alone, lse_alone = attention(q, k, v, return_lse=True, backend=backend, **rule)
    torch.testing.assert_close(o, o_alone, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, lse_alone, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention(q, k, v, return_max_logits=True, backend=backend, **rule)[1], most)


def test_knows_hidden_keys_by_masks_and_lengths(backend: str) -> None:
    q, k = draw(2, 70, HEADS, WIDTH), draw(2, 150, KEY_HEADS, WIDTH)
    visible = torch.rand(1, HEADS, 70, 150) < 0.02
    visible[:, 3] = False
    mask = masks.dense(visible, tile=(64, 64))
    most = attention(q, k, k, mask=mask, return_max_logits=True, backend=backend)[1]
    close(most, logits(q, k, visible=visible).amax((0, 2, 3)))
    assert most[3] == -math.inf
    lengths = torch.tensor([150, 3], dtype=torch.int32)
    k[1, 3:] = math.nan
    k[0, 100] *= 5
    most = attention(q, k, k, seqlens_k=lengths, return_max_logits=True, backend=backend)[1]
    wanted = [logits(q[b : b + 1], k[b : b + 1, :n]) for b, n in ((0, 150), (1, 3))]
    close(most, torch.cat([x.amax((0, 2, 3))[None] for x in wanted]).amax(0))


@pytest.mark.parametrize("spare", [0, 5])
def test_of_packed_sequences(backend: str, spare: int) -> None:
    """Rows past the last sequence, which are NaN, do not count."""
    ends_q, ends_k = [0, 40, 41, 41, 70], [0, 50, 51, 60, 90]
    q, k = draw(70 + spare, HEADS, WIDTH), draw(90 + spare, KEY_HEADS, WIDTH)
    q[70:], k[90:] = math.nan, math.nan
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k))
    o, lse, most = attention_varlen(
        q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=40, max_seqlen_k=50,
        causal=True, return_lse=True, return_max_logits=True, backend=backend,
    )  # fmt: skip
    assert o.shape == q.shape
    assert lse.shape == (HEADS, 70 + spare)
    parts = []
    for b in (0, 1, 3):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        parts.append(logits(q[None, rows], k[None, keys], causal=True).amax((0, 2, 3)))
    close(most, torch.stack(parts).amax(0))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_of_nothing_is_minus_infinity(backend: str, sizes: tuple[int, int]) -> None:
    q, k = draw(2, sizes[0], HEADS, WIDTH), draw(2, sizes[1], KEY_HEADS, WIDTH)
    most = attention(q, k, k, return_max_logits=True, backend=backend)[1]
    assert torch.equal(most, torch.full((HEADS,), -math.inf))


def test_is_not_differentiable_and_disturbs_no_gradient() -> None:
    q, k, v = (draw(1, 40, HEADS, WIDTH, dtype=torch.float32).requires_grad_() for _ in range(3))
    o, lse, most = attention(q, k, v, causal=True, return_lse=True, return_max_logits=True)
    assert not most.requires_grad
    found = torch.autograd.grad((o.sum(), lse.sum()), (q, k, v))
    wanted = torch.autograd.grad(
        tuple(x.sum() for x in attention(q, k, v, causal=True, return_lse=True)), (q, k, v)
    )
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_under_vmap_jvp_and_compile() -> None:
    q, k, v = (draw(3, 2, 20, HEADS, WIDTH, dtype=torch.float32) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attention(q, k, v, causal=True, return_max_logits=True)

    _, most = torch.func.vmap(run)(q, k, v)
    for n in range(3):
        torch.testing.assert_close(most[n], run(q[n], k[n], v[n])[1])
    (_, most), (o_dot, most_dot) = torch.func.jvp(run, (q[0], k[0], v[0]), (q[1], k[1], v[1]))
    _, wanted = torch.func.jvp(
        lambda *x: attention(*x, causal=True), (q[0], k[0], v[0]), (q[1], k[1], v[1])
    )
    torch.testing.assert_close(o_dot, wanted)
    assert not most_dot.any()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q[0], k[0], v[0])[1], most)


def test_the_oracle_returns_the_largest_of_each_row() -> None:
    q, k = (draw(1, 9, n, 16, dtype=torch.float64) for n in (4, 2))
    _, lse, most = standard.attention(q, k, k, causal=True, sinks=torch.ones(4), return_max=True)
    assert torch.equal(most, logits(q, k, causal=True).amax(-1).to(most.dtype))
    assert (lse > most).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_on_a_gpu(backend: str, name: str) -> None:
    rule = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in RULES[name].items()}
    rule["bias"] = torch.randn(4, 1, 600, device="cuda") if "bias" in rule else None
    q, k = draw(2, 500, HEADS, 64), draw(2, 600, KEY_HEADS, 64)
    most = attention(q.cuda(), k.cuda(), k.cuda(), return_max_logits=True, backend=backend, **rule)[
        1
    ]
    known = {
        key: x.cpu() if isinstance(x, Tensor) else x
        for key, x in rule.items()
        if key not in ("sinks", "dropout_p", "seed")
    }
    wanted = logits(q, k, **known).amax((0, 2, 3))
    # Hopper's tanh is good to 2**-11; tensor cores cut off the last bits of a float32 sum.
    rtol = 1e-3 if name == "capped" and backend == "gluon" else 1e-4
    torch.testing.assert_close(most.cpu().double(), wanted, rtol=rtol, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_of_packed_sequences_on_a_gpu(backend: str) -> None:
    """Rows past the last sequence, which are NaN, do not count."""
    ends = [0, 300, 301, 301, 900]
    q, k = draw(905, HEADS, 64), draw(905, KEY_HEADS, 64)
    q[900:], k[900:] = math.nan, math.nan
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    most = attention_varlen(
        q.cuda(), k.cuda(), k.cuda(), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=599,
        max_seqlen_k=599, causal=True, return_max_logits=True, backend=backend,
    )[1]  # fmt: skip
    parts = [
        logits(q[None, a:b], k[None, a:b], causal=True).amax((0, 2, 3))
        for a, b in ((0, 300), (300, 301), (301, 900))
    ]
    wanted = torch.stack(parts).amax(0)
    torch.testing.assert_close(most.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
