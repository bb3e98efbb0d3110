"""Linear layers of quantised weights: fused ones of unlike parts, moves and casts, embeddings."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_quantised_weight import random_weight
from tilewise import ops
from tilewise.nn.quantised import QuantisedEmbedding, QuantisedLinear


@pytest.fixture(autouse=True)
def _by_the_reference(monkeypatch):
    """Multiply by the reference: the kernels have tests of their own."""
    plain = ops.quantised_linear
    monkeypatch.setattr(
        ops, "quantised_linear", lambda *args, **kwargs: plain(*args, **kwargs, backend="reference")
    )


def test_parts_of_unlike_formats_are_one_projection():
    parts = [random_weight("table"), random_weight("table"), random_weight("fp8_blocks")]
    bias = torch.randn(72)
    module = QuantisedLinear(parts, bias, torch.float32)
    assert len(module.parts) == 2  # alike neighbours are one
    x = torch.randn(5, 64)
    whole = torch.cat([part.dequantise() for part in parts])
    assert torch.equal(module.dequantised(), whole)
    torch.testing.assert_close(module(x), F.linear(x, whole, bias))
    assert module.out_features == 72
    assert [name for name, _ in module.named_parameters()] == ["bias"]


def test_a_cast_leaves_the_weight_as_it_is():
    module = QuantisedLinear([random_weight("int4_zeros")], torch.randn(24), torch.float32)
    before = module.parts[0].dequantise()
    module = module.to(torch.bfloat16)
    assert module.parts[0].scales.dtype == torch.float16
    assert torch.equal(module.parts[0].dequantise(), before)
    assert module(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


def test_an_embedding_looks_rows_up():
    table = random_weight("two_levels")
    module = QuantisedEmbedding([table], torch.bfloat16)
    ids = torch.tensor([[3, 1], [23, 3]])
    assert torch.equal(module(ids), table.dequantise()[ids].bfloat16())
    with pytest.raises(ValueError, match="parts must be alike in an embedding, got 2 kinds"):
        QuantisedEmbedding([table, random_weight("table")], torch.bfloat16)


def test_a_projection_has_at_least_one_part():
    with pytest.raises(ValueError, match="parts must have at least one weight"):
        QuantisedLinear([], None, torch.float32)


def test_a_layer_on_a_cpu_has_codes_in_the_order_of_columns():
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (24, 64), dtype=torch.uint8)
    weight = ops.QuantisedWeight(codes, torch.rand(24, 1), (1, 128))
    module = QuantisedLinear([weight.lanes()], None, torch.float32)
    assert torch.equal(module.parts[0].codes, codes)
    module.hold([weight.lanes()])
    assert not module.parts[0].in_lanes
