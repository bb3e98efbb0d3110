"""What adapters add to the products of modules: beside any weight, in parts or whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tilewise import ops
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.layers import MLP, GatedMLP, project, project_in_parts
from tilewise.nn.quantised import QuantisedLinear
from tilewise.ops import QuantisedWeight


def low_rank(inputs: int, edges: tuple[int, ...], slots: int = 2) -> ops.LowRank:
    parts = len(edges) - 1
    return ops.LowRank(
        torch.randn(slots, parts * 16, inputs) / 8,
        torch.randn(slots, 16, edges[-1]),
        torch.ones(slots, parts),
        torch.full((slots, parts), 16, dtype=torch.int32),
        torch.tensor(edges, dtype=torch.int32),
    )


def step(weights: dict[nn.Module, ops.LowRank], slots: list[int]) -> StepAdapters:
    tiles, rows = ops.tile_rows(np.array(slots))
    return StepAdapters(weights, ops.RowTiles(torch.from_numpy(tiles), torch.from_numpy(rows)))


def with_delta(linear: nn.Linear, own: ops.LowRank, slot: int) -> nn.Linear:
    """Return a layer with the merged weight."""
    merged = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    merged.load_state_dict(linear.state_dict())
    for part, (first, end) in enumerate(zip(own.edges[:-1], own.edges[1:], strict=True)):
        a = own.a[slot, part * 16 : (part + 1) * 16]
        merged.weight.data[first:end] += (a.T @ own.b[slot, :, first:end]).T
    return merged


@torch.no_grad()
def test_every_way_of_a_product_adds_the_same():
    linear = nn.Linear(40, 48)
    own = low_rank(40, (0, 32, 48))
    given = step({linear: own}, [1, -1, 0])
    x = torch.randn(3, 40)
    wanted = linear(x)
    for row, slot in ((0, 1), (2, 0)):
        wanted[row] = with_delta(linear, own, slot)(x[row])
    for way in (project, project_in_parts):
        torch.testing.assert_close(way(linear, x, given), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(way(linear, x, None), linear(x))
    other = nn.Linear(40, 48)
    assert torch.equal(project(other, x, given), other(x))  # it has no adapter


@torch.no_grad()
def test_adapters_are_added_to_products_with_quantised_weights():
    weight = QuantisedWeight(
        torch.randint(-8, 8, (32, 64), dtype=torch.int8), torch.full((32, 1), 0.1), (1, 64)
    )
    linear = QuantisedLinear([weight], None, torch.float32)
    own = low_rank(64, (0, 32))
    x = torch.randn(2, 64)
    found = project(linear, x, step({linear: own}, [0, -1]))
    wanted = linear(x)
    wanted[0] += x[0] @ own.a[0].T @ own.b[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_blocks_hand_adapters_to_their_products():
    x = torch.randn(2, 24)
    gated = GatedMLP(24, 32, "silu")
    weights = {
        gated.gate_up_proj: low_rank(24, (0, 32, 64)),
        gated.down_proj: low_rank(32, (0, 24)),
    }
    found = gated(x, step(weights, [1, -1]))
    merged = GatedMLP(24, 32, "silu")
    merged.gate_up_proj = with_delta(gated.gate_up_proj, weights[gated.gate_up_proj], 1)
    merged.down_proj = with_delta(gated.down_proj, weights[gated.down_proj], 1)
    torch.testing.assert_close(found[0], merged(x[:1])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], gated(x)[1])
    plain = MLP(24, 32, "gelu")
    own = {plain.up_proj: low_rank(24, (0, 32)), plain.down_proj: low_rank(32, (0, 24))}
    found = plain(x, step(own, [0, -1]))
    merged = MLP(24, 32, "gelu")
    merged.up_proj = with_delta(plain.up_proj, own[plain.up_proj], 0)
    merged.down_proj = with_delta(plain.down_proj, own[plain.down_proj], 0)
    torch.testing.assert_close(found[0], merged(x)[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], plain(x)[1])
