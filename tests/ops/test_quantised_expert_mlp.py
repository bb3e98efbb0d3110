"""quantised_expert_mlp: the definition on the format's values, refusals, and who reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.gluon.test_experts import CLAMPED, problem
from tests.ops.test_expert_mlp import eager
from tilewise import ops
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.quantised import QuantisedLinear
from tilewise.ops.mxfp4 import mxfp4_rows, pack_mxfp4, unpack_mxfp4


def call(kind="mxfp4", tokens=5, width=192, inner=64, experts=4, active=2, **changes):
    given, up, down = problem(kind, tokens, width, inner, experts, active, torch.bfloat16)
    given |= {"up": up, "down": down, "inner_size": inner, "backend": "reference"} | CLAMPED
    return given | changes


@pytest.mark.parametrize("kind", ["mxfp4", "float_zeros", "one_scale_a_row"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_reference_is_the_definition(padded, kind):
    given = call(kind)
    values = {name: given[name].dequantise().double() for name in ("up", "down")}
    plain = {n: x.double() if x.is_floating_point() else x for n, x in given.items()
             if isinstance(x, torch.Tensor)}  # fmt: skip
    expected = eager(
        **plain, up=values["up"].view(4, 128, 192), down=values["down"].view(4, 192, 64), **CLAMPED
    )
    if padded:
        given |= {name: given[name].padded() for name in ("up", "down")}
        assert given["up"].shape == (512, 256)
    y = ops.quantised_expert_mlp(**given)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-8)
    shared, gate = y.flip(0), y[:, :1]
    both = ops.quantised_expert_mlp(**given, shared=shared, shared_gate=gate)
    torch.testing.assert_close(both, y + torch.sigmoid(gate) * shared, rtol=2**-7, atol=2**-7)


REFUSED = {
    "rows of no expert": (lambda g: g | {"down": g["down"]._by_row(torch.arange(100))},
                          "down must have a multiple of 192 rows, got 100"),
    "rows of other experts": (lambda g: g | {"inner_size": 65},
                              r"up must have 4 times 65 or 130 rows, got 512"),
    "columns of another width": (
        lambda g: g | {"up": g["up"].cut((0, 512), (0, 128))}, "up must have 192 columns, got 128"),
    "a scale of another shape": (
        lambda g: g | {"up": replace(g["up"], scales=g["up"].scales[:, :2])},
        "up.scales must have shape"),
    "biases of other rows": (lambda g: g | {"up_bias": g["down_bias"]}, "up_bias must have shape"),
    "a block of other channels": (lambda g: g | {"shared": g["x"][:, :64]},
                                  "shared must have shape"),
    "clamped without gates": (
        lambda g: g | {"up": g["up"]._by_row(torch.arange(256)), "up_bias": None},
        "activation must not be clamped without gates"),
    "a backend that has none": (lambda g: g | {"backend": "triton"}, "triton"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    change, match = REFUSED[case]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=match):
        ops.quantised_expert_mlp(**change(call()))


PLACED = {"width": 192, "inner_size": 64, "dtype": torch.bfloat16}
UNREAD = {
    "act_order": (
        {"kind": "act_order", "width": 128, "inner": 128}, {}, "up must have no permutation"
    ),
    "float32": ({}, {"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
    "odd": ({"width": 160}, {"width": 160}, "channels must be a multiple of 64, got 160"),
    "rows": (
        {"kind": "fp8_blocks", "width": 128}, {"width": 128}, "whole blocks of 24 rows, got 128"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_what_no_kernel_reads_is_said(case):
    sizes, changes, reason = UNREAD[case]
    given = call(**sizes)
    inner = sizes.get("inner", 64)
    told = PLACED | {"inner_size": inner, "width": given["x"].shape[1]} | changes
    found = ops.placed_experts(given["up"], given["down"], **told)
    assert isinstance(found, str)
    assert reason in found


def test_powers_of_two_that_operands_do_not_hold_are_left_to_others():
    given = call()
    assert not isinstance(ops.placed_experts(given["up"], given["down"], **PLACED), str)
    given["up"].scales.view(torch.uint8)[3, 1] = 200
    assert "2 ** 65" in str(ops.placed_experts(given["up"], given["down"], **PLACED))


def test_rows_of_mxfp4_are_its_blocks():
    blocks, scales = pack_mxfp4(torch.randn(3, 8, 96, generator=torch.Generator().manual_seed(0)))
    wide = unpack_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(mxfp4_rows(blocks, scales).dequantise(), wide.flatten(0, 1))


def test_a_mixture_in_mxfp4_is_the_same_where_a_gpu_reads_its_codes():
    """On a CPU, whose products are by expert."""
    config = ExpertsConfig(
        4, 2, 64, activation="clamped", is_interleaved=True, is_packed=True, has_bias=True
    )
    block = Experts(192, config).bfloat16()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("up", "down"):
            getattr(block, name).random_(0, 256, generator=draw)
            getattr(block, f"{name}_scale").fill_(122)
        x = torch.randn(7, 192, generator=draw).bfloat16()
        before = block(x)
        block.place_on_gpu()
        assert isinstance(block.up, QuantisedLinear)
        assert torch.equal(block(x), before)
