"""A row that sees one key returns its value, bit for bit, whatever the logit is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise import attention, attention_varlen, masks

BACKENDS = ["reference", "cpu", "triton"]  # "gluon" in tests/kernels/gluon/test_one_visible_key.py
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CAPS = [0.0, 15.0, 50.0]
_UNIT = {torch.bfloat16: 2e-5, torch.float16: 2e-4, torch.float32: 2e-5, torch.float64: 1e-13}


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.fixture(params=[(b, d) for b in BACKENDS for d in DTYPES], ids=str)
def kind(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Every dtype that a backend takes, on a CPU; Triton's kernels in the interpreter."""
    backend, dtype = request.param
    if backend == "triton":
        pytest.importorskip("triton")
        from tilewise.kernels import device

        if not device.interpreting():
            pytest.skip("the interpreter is off")
        if dtype == torch.float64:
            pytest.skip("no float64 in these kernels")
    return backend, dtype


@pytest.mark.parametrize("softcap", CAPS)
def test_of_a_window_of_the_own_key(kind: tuple[str, torch.dtype], softcap: float) -> None:
    backend, dtype = kind
    q, do = draw(dtype, 2, 90, 4, 40), draw(dtype, 2, 90, 4, 24)
    k, v = draw(dtype, 2, 90, 2, 40), draw(dtype, 2, 90, 2, 24)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    o, lse = attention(
        q, k, v, window=(0, 0), softmax_scale=0.9, softcap=softcap, return_lse=True, backend=backend
    )
    assert torch.equal(o, v.repeat_interleave(2, 2))
    s = 0.9 * (q.double() * k.double().repeat_interleave(2, 2)).sum(-1).transpose(1, 2)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    torch.testing.assert_close(lse.double(), s, rtol=1e-6, atol=1e-5)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    # dp - delta is what the rounding of two equal sums leaves.
    ds = float(do.double().norm(dim=-1).max() * v.detach().double().norm(dim=-1).max())
    assert dq.abs().max() <= _UNIT[dtype] * ds * k.detach().abs().max()
    assert dk.abs().max() <= _UNIT[dtype] * ds * 2 * q.detach().abs().max()
    rounding = 4e-3 if dtype.itemsize == 2 else 1e-5  # of two numbers of size 1 that are added
    assert torch.allclose(dv.double(), do.double().unflatten(2, (2, 2)).sum(3), 1e-2, rounding)


@pytest.mark.parametrize("softcap", CAPS)
def test_of_two_queries_over_one_key(kind: tuple[str, torch.dtype], softcap: float) -> None:
    backend, dtype = kind
    q, k, v = draw(dtype, 1, 2, 2, 64), draw(dtype, 1, 1, 2, 64), draw(dtype, 1, 1, 2, 64)
    o = attention(q, k, v, causal=True, softmax_scale=0.9, softcap=softcap, backend=backend)
    assert torch.equal(o[:, 1], v[:, 0])
    assert not o[:, 0].any()


@pytest.mark.parametrize("softcap", CAPS)
def test_of_rows_of_a_mask(kind: tuple[str, torch.dtype], softcap: float) -> None:
    """Rows 0, 3, 6 ... see one key somewhere, the others none or all."""
    backend, dtype = kind
    q, k, v = draw(dtype, 1, 70, 2, 32), draw(dtype, 1, 200, 2, 32), draw(dtype, 1, 200, 2, 32)
    visible = torch.zeros(1, 1, 70, 200, dtype=torch.bool)
    visible[..., 1::3, :] = True
    keys = [row * 37 % 200 for row in range(0, 70, 3)]
    visible[0, 0, torch.arange(0, 70, 3), torch.tensor(keys)] = True
    mask = masks.dense(visible, tile=(64, 64))
    o = attention(q, k, v, mask=mask, softmax_scale=0.9, softcap=softcap, backend=backend)
    for row, key in zip(range(0, 70, 3), keys, strict=True):
        assert torch.equal(o[0, row], v[0, key]), row


def test_of_packed_sequences(kind: tuple[str, torch.dtype]) -> None:
    backend, dtype = kind
    starts = torch.tensor([0, 1, 1, 40], dtype=torch.int32)
    q, k, v = draw(dtype, 40, 2, 32), draw(dtype, 40, 2, 32), draw(dtype, 40, 2, 32)
    o = attention_varlen(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=39, max_seqlen_k=39,
        causal=True, softmax_scale=0.9, softcap=15.0, backend=backend,
    )  # fmt: skip
    assert torch.equal(o[:2], v[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_on_a_gpu(backend: str, dtype: torch.dtype, softcap: float) -> None:
    if backend == "gluon" and dtype == torch.float32:
        pytest.skip("16 bits only")
    q, do = (draw(dtype, 2, 500, 4, 64).cuda() for _ in range(2))
    k, v = (draw(dtype, 2, 500, 2, 64).cuda() for _ in range(2))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    o = attention(q, k, v, window=(0, 0), softmax_scale=0.9, softcap=softcap, backend=backend)
    assert torch.equal(o, v.repeat_interleave(2, 2))
    dq, dk, _ = torch.autograd.grad(o, (q, k, v), do)
    ds = float(do.double().norm(dim=-1).max() * v.detach().double().norm(dim=-1).max())
    # Tensor cores round sums of 16-bit products to about 2**-22 of their largest term.
    assert dq.abs().max() <= 1e-4 * ds * k.detach().abs().max()
    assert dk.abs().max() <= 1e-4 * ds * 2 * q.detach().abs().max()
