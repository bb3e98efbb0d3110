"""torch's own context_parallel on tilewise's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilewise.integrations.torch_flash import register


def by_torch(group, rank, size, *, causal, balanced):
    """Run torch's ring over two ranks; return the largest errors of o, dq, dk, dv and the calls."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import (
        _cp_options,
        context_parallel_unshard,
    )

    from tilewise.integrations import torch_flash

    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, 4, 64, 16, generator=generator) for _ in range(4)]
    q, k, v, do = tensors
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    grads = torch.autograd.grad(want, leaves, do.double())
    calls = []
    forward = torch_flash.flash_forward

    def counting(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    _cp_options.enable_load_balance = balanced
    mesh = DeviceMesh.from_group(group, "cpu")
    torch_flash.flash_forward = counting
    try:
        with register(device_types=("cpu",)):
            parts = [t.clone() for t in tensors]
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
                ours = [t.detach().requires_grad_() for t in parts[:3]]
                o = F.scaled_dot_product_attention(*ours, is_causal=causal)
                got = (o.detach(), *torch.autograd.grad(o, ours, parts[3]))
                whole = context_parallel_unshard(mesh, [t.contiguous() for t in got], [2] * 4)
    finally:
        torch_flash.flash_forward = forward
    errors = [(a - b).abs().max().item() for a, b in zip(whole, (want, *grads), strict=True)]
    return [errors, len(calls)]


@pytest.mark.parametrize(("causal", "balanced"), [(True, True), (True, False), (False, False)])
def test_torchs_ring_runs_on_our_kernels(ranks, causal, balanced):
    for errors, calls in ranks.run(by_torch, 2, causal=causal, balanced=balanced):
        assert calls >= 1  # the first of two ranks sees nothing of the second's keys
        assert max(errors) < 1e-5


def test_a_cpu_takes_our_kernels_while_registered():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with register(device_types=("cpu",)):
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert type(o.grad_fn).__name__ == "ScaledDotProductFlashAttentionBackward0"
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        wide = F.scaled_dot_product_attention(q, q[:, :, :5], q[:, :, :5], is_causal=True)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(masked, want)
    torch.testing.assert_close(
        wide, F.scaled_dot_product_attention(q, q[:, :, :5], q[:, :, :5], is_causal=True)
    )
    after = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert type(after.grad_fn).__name__ != "ScaledDotProductFlashAttentionBackward0"


@pytest.mark.parametrize("device_types", [("tpu",), "cpu"])
def test_other_devices_are_refused(device_types):
    with pytest.raises(ValueError, match="device_types must be of 'cuda' and 'cpu'"):
        register(device_types)
