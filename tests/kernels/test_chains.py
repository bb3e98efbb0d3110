"""A chain of a decode step's kernels gives the bits of the same kernels launched one by one.

Two layers of Qwen3-0.6B's shape and a head: norm, product, rotation and cache, attention, product
in parts, norm of parts, product, activation, product, tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tilewise import ops
from tilewise.kernels import early

ROWS = (1, 8, 32)
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER, _VOCAB = 1024, 16, 8, 128, 3072, 2048
_BLOCK, _LENGTH, _LAYERS, _EPS = 16, 200, 2, 1e-6
_MODES: dict[str, Any] = {"chosen": None, "chosen_large": early.CHOSEN_LARGE}


class Chain:
    """The weights, the caches and the rows of one step, and the step."""

    def __init__(self, rows: int) -> None:
        draw = torch.Generator(device="cuda").manual_seed(rows)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(shape, generator=draw, device="cuda") * scale
            return x.to(torch.bfloat16)

        q_channels, kv_channels = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
        shapes = {
            "qkv": (q_channels + 2 * kv_channels, _WIDTH), "o": (_WIDTH, q_channels),
            "gate_up": (2 * _INNER, _WIDTH), "down": (_WIDTH, _INNER),
        }  # fmt: skip
        self.layers = [
            {name: normal(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
            for _ in range(_LAYERS)
        ]
        self.scale, self.head_scale = normal(_WIDTH), normal(_HEAD_DIM)
        self.head = normal(_VOCAB, _WIDTH, scale=_WIDTH**-0.5)
        blocks = -(-_LENGTH // _BLOCK)
        self.caches = [
            [normal(rows * blocks, _BLOCK, _KV_HEADS, _HEAD_DIM) for _ in range(2)]
            for _ in range(_LAYERS)
        ]
        self.x, self.residual = normal(rows, _WIDTH), normal(rows, _WIDTH)
        table = torch.arange(rows * blocks, device="cuda", dtype=torch.int32)
        self.table = table.view(rows, blocks)
        self.lengths = _LENGTH - torch.arange(rows, device="cuda", dtype=torch.int32)
        last = self.lengths.long() - 1
        self.slots = self.table.long().gather(1, (last // _BLOCK)[:, None])[:, 0] * _BLOCK
        self.slots += last % _BLOCK
        angles = torch.rand(rows, _HEAD_DIM // 2, generator=draw, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()
        self.options = {
            "block_table": self.table, "seqlens_k": self.lengths, "max_seqlen_q": 1,
            "cu_seqlens_q": torch.arange(rows + 1, device="cuda", dtype=torch.int32),
        }  # fmt: skip
        self.plan = ops.plan_paged_attention(
            normal(rows, _HEADS, _HEAD_DIM), *self.caches[0], **self.options
        )
        seeds = torch.arange(rows, device="cuda")
        self.drawn = {
            "temperature": torch.full((rows,), 0.8, device="cuda"), "seeds": seeds,
            "counters": torch.zeros_like(seeds),
        }  # fmt: skip
        ops.settle(self.x.device)

    def run(self, modes: str = "off") -> dict[str, Tensor]:
        """Run the step; modes: "off", "chosen" or "chosen_large", when kernels begin."""
        launching = nullcontext() if modes == "off" else early.launching(_MODES[modes])
        with launching:
            return self._step()

    def _step(self) -> dict[str, Tensor]:
        from tilewise.kernels.gluon.step import linear

        x, residual = ops.add_rms_norm(self.x, self.residual, self.scale, _EPS)
        q_channels, kv_channels = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
        for layer, (k_cache, v_cache) in zip(self.layers, self.caches, strict=True):
            qkv = linear.launch(x, layer["qkv"], None)
            q, k, v = qkv.split([q_channels, kv_channels, kv_channels], dim=-1)
            q = ops.rope_write_kv_cache(
                q.unflatten(-1, (_HEADS, _HEAD_DIM)), k.unflatten(-1, (_KV_HEADS, _HEAD_DIM)),
                v.unflatten(-1, (_KV_HEADS, _HEAD_DIM)), k_cache, v_cache, self.slots,
                cos=self.cos, sin=self.sin, q_norm=self.head_scale, k_norm=self.head_scale,
            )  # fmt: skip
            o = ops.paged_attention(q, k_cache, v_cache, plan=self.plan, **self.options)
            parts = linear.launch_parts(o.flatten(1), layer["o"])
            x, residual = ops.add_parts_rms_norm(parts, residual, self.scale, _EPS)
            a = ops.silu_mul(linear.launch(x, layer["gate_up"], None))
            parts = linear.launch_parts(a, layer["down"])
            x, residual = ops.add_parts_rms_norm(parts, residual, self.scale, _EPS)
        logits = linear.launch(x, self.head, None)
        tokens, _ = ops.sample_tokens(logits, **self.drawn)
        return {"x": x, "residual": residual, "logits": logits, "tokens": tokens}

    def check(self) -> None:
        """Compare a run in which kernels begin early with one in which none does."""
        alone = {name: x.clone() for name, x in self.run("off").items()}
        for modes in _MODES:
            for name, x in self.run(modes).items():
                assert torch.equal(x, alone[name]), (modes, name)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
def test_on_a_gpu_kernels_that_begin_early_give_the_same_bits(rows: int) -> None:
    torch.cuda.synchronize()
    chain = Chain(rows)
    for _ in range(20):
        chain.check()
    assert all(bool(x.isfinite().all()) for x in chain.run("chosen").values())
