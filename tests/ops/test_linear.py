"""linear: float64 on the same inputs, on every tile, and the same bits for any number of rows."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.tiles import invariant_linear as invariant_tiles
from tilewise.kernels.tiles import linear as linear_tiles
from tilewise.kernels.tiles import linear_rows
from tilewise.kernels.tiles.linear import LinearTile
from tilewise.nn import layers
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.layers import Parts, RMSNorm, project, project_in_parts
from tilewise.testing import assert_within_budget

linear_op = import_module("tilewise.ops.linear")  # its function has the name of the module
on_each_triton = pytest.mark.parametrize(("backend", "place"), BACKENDS[1:])
TILES = {
    "one_slice": LinearTile(32, 64, 1, 1, 4, 3),
    "ways": LinearTile(8, 32, 4, 1, 4, 3),
    "parts": LinearTile(16, 32, 1, 3, 4, 2),
    "ways_and_parts": LinearTile(16, 32, 2, 4, 2, 2),
}


def _problem(rows, channels, outputs, dtype, place):
    x, weight, bias = (
        torch.randn(shape).to(place, dtype)
        for shape in ((rows, channels), (outputs, channels), (outputs,))
    )
    return x, weight, bias


@on_each_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "channels", "outputs"),
    [(1, 200, 40), (3, 64, 8), (16, 300, 33), (5, 8, 1), (27, 130, 40)],
)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_keeps_the_budget(
    tile, rows, channels, outputs, has_bias, dtype, backend, place
):
    from tilewise.kernels.triton.step import linear

    x, weight, bias = _problem(rows, channels, outputs, dtype, place)
    given = bias if has_bias else None
    y = linear.launch(x, weight, given, TILES[tile])
    wide = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert_within_budget(y, wide, F.linear(x, weight, given))


@on_each_triton
# Many channels and many outputs take the interpreter long together, and are here each alone.
@pytest.mark.parametrize(
    ("channels", "outputs"),
    [(96, 100), (40, 2100), (2100, 100), pytest.param(2100, 2100, marks=pytest.mark.slow)],
)
def test_a_row_does_not_depend_on_others(channels, outputs, backend, place):
    x, weight, bias = _problem(32, channels, outputs, torch.bfloat16, place)
    together = ops.linear(x, weight, bias, backend=backend)
    wide = F.linear(x.double(), weight.double(), bias.double())
    assert_within_budget(together, wide, F.linear(x, weight, bias))
    for rows in (slice(0, 1), slice(7, 10), slice(1, 16, 5), slice(3, 30)):
        assert torch.equal(ops.linear(x[rows], weight, bias, backend=backend), together[rows])


@on_each_triton
def test_shapes_strides_and_no_rows(backend, place):
    x, weight, _ = _problem(12, 48, 20, torch.float16, place)
    apart = x.view(3, 4, 48)[:, ::2]
    y = ops.linear(apart, weight[::2], backend=backend)
    assert y.shape == (3, 2, 10)
    assert y.is_contiguous()
    torch.testing.assert_close(y, F.linear(apart, weight[::2]), rtol=2e-3, atol=2e-2)
    assert ops.linear(x[:0], weight, backend=backend).shape == (0, 20)
    assert torch.equal(
        ops.linear(x[0], weight, backend=backend), ops.linear(x, weight, backend=backend)[0]
    )


def test_the_reference_rounds_once():
    x, weight, bias = _problem(2, 30, 7, torch.bfloat16, "cpu")
    y = ops.linear(x, weight, bias, backend="reference")
    assert torch.equal(y, F.linear(x.double(), weight.double(), bias.double()).bfloat16())


def test_the_table_knows_every_shape():
    for outputs in (1, 1024, 4096, 6144, 28672, 151936, 1 << 30):
        for channels in (1, 1024, 14336):
            tile = linear_tiles.tile_of(outputs, channels)
            assert tile.num_warps % tile.ways == 0
            assert not linear_tiles.pays(outputs, channels, 80)
    assert linear_tiles.pays(1024, 2048, 90)
    assert not linear_tiles.pays(1024, 2044, 90)
    assert not linear_tiles.pays(151936, 1024, 90)
    assert not ops.linear_pays(torch.randn(1024, 2048, dtype=torch.bfloat16))


def test_projections_on_a_cpu_are_those_of_their_modules():
    layer = torch.nn.Linear(8, 5)
    x = torch.randn(3, 8)
    assert torch.equal(project(layer, x), layer(x))


@pytest.mark.gpu
def test_projections_use_it_where_it_pays():
    layer = torch.nn.Linear(2048, 1024, bias=False, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 2048, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        wanted = ops.linear(x, layer.weight) if ops.linear_pays(layer.weight) else layer(x)
        assert torch.equal(project(layer, x), wanted)
        assert torch.equal(project(layer, x.repeat(2, 1)), layer(x.repeat(2, 1)))
    assert project(layer, x).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_a_head_keeps_the_budget_and_beginning_early_its_bits(rows):
    x, weight, _ = _problem(rows, 1024, 151_936, torch.bfloat16, "cuda")
    y = ops.linear(x, weight, backend="triton")
    assert_within_budget(y, x.double() @ weight.double().T, F.linear(x, weight))
    for _ in range(20):
        with ops.launching_early(x.device):
            normed = ops.rms_norm(x, torch.ones_like(x[0]), 1e-6)
            early = ops.linear(normed, weight, backend="triton")
        late = ops.linear(ops.rms_norm(x, torch.ones_like(x[0]), 1e-6), weight, backend="triton")
        assert torch.equal(early, late)


@pytest.mark.gpu
def test_a_norm_gets_the_parts_of_projections_that_leave_them(monkeypatch):
    layer = torch.nn.Linear(4096, 1024, bias=False, dtype=torch.bfloat16, device="cuda")
    norm = RMSNorm(1024, 1e-6).to("cuda", torch.bfloat16)
    form = linear_rows.RowsTile(64, 128, 4, 2)
    monkeypatch.setitem(linear_rows._TABLE, (1024, 4096), (form, True))
    x = torch.randn(32, 4096, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(32, 1024, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        parts = project_in_parts(layer, x)
        assert isinstance(parts, Parts) == ops.linear_leaves_parts(layer.weight)
        wanted = norm.add(project(layer, x), residual)
        assert all(
            torch.equal(a, b) for a, b in zip(norm.add(parts, residual), wanted, strict=True)
        )
        many = project_in_parts(layer, x.repeat(2, 1))  # more rows than the product takes
        assert isinstance(many, torch.Tensor)
    assert isinstance(project_in_parts(layer, x), torch.Tensor)  # to be differentiated


def test_an_invariant_product_leaves_parts_of_more_rows(monkeypatch):
    layer = InvariantLinear(torch.randn(7, 30, dtype=torch.bfloat16))
    plain = torch.nn.Linear(30, 7, bias=False, dtype=torch.bfloat16)
    monkeypatch.setattr(layers, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(layers, "invariant_linear_leaves_parts", lambda _: True)
    monkeypatch.setattr(layers, "linear_leaves_parts", lambda _: True)
    monkeypatch.setattr(ops, "linear_parts", lambda x, w: x.float() @ w.float().T)
    monkeypatch.setattr(ops, "invariant_linear", lambda x, w, b: x @ w.T)
    x = torch.randn(300, 30, dtype=torch.bfloat16)

    def leaving(module: torch.nn.Module) -> list[bool]:
        rows = (32, 33, 64, 65, 256, 257)
        return [isinstance(project_in_parts(module, x[:n]), Parts) for n in rows]

    with torch.inference_mode():
        assert leaving(layer) == [*[True] * 5, False]
        assert leaving(plain) == [True, *[False] * 5]


@pytest.mark.gpu
def test_on_a_gpu_norms_give_the_bits_of_an_invariant_product_for_any_rows():
    layer = InvariantLinear(torch.randn(1024, 3072, dtype=torch.bfloat16, device="cuda"))
    norm = RMSNorm(1024, 1e-6).to("cuda", torch.bfloat16)
    x = torch.randn(600, 3072, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(600, 1024, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        wanted = norm.add(project_in_parts(layer, x), residual)
        for rows in (1, 32, 33, 64, 65, 200, 256, 257, 512, 513):
            found = norm.add(project_in_parts(layer, x[:rows]), residual[:rows])
            for y, whole in zip(found, wanted, strict=True):
                assert torch.equal(y, whole[:rows]), rows


def test_parts_of_the_reference_are_the_product():
    x, weight, _ = _problem(2, 30, 7, torch.bfloat16, "cpu")
    parts = ops.linear_parts(x, weight, backend="reference")
    assert parts.shape == (1, 2, 7)
    assert torch.equal(parts[0].bfloat16(), ops.linear(x, weight, backend="reference"))
    torch.library.opcheck(torch.ops.tilewise.linear_parts.default, (x, weight, "reference"))
    assert not ops.linear_leaves_parts(weight)
    layer = torch.nn.Linear(30, 7, bias=False, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(project_in_parts(layer, x), layer(x))
    for backend, message in (("triton", "must run on gluon or reference"), (None, "linear")):
        with pytest.raises(UnsupportedError, match=message):
            ops.linear_parts(x, weight, backend=backend)
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.linear_parts(x, weight[:, :29], backend="reference")


def test_it_is_a_clean_node_of_a_graph():
    x, weight, bias = _problem(2, 30, 7, torch.bfloat16, "cpu")
    torch.library.opcheck(torch.ops.tilewise.linear.default, (x, weight, bias, "reference"))


def test_refuses():
    x, weight, bias = _problem(2, 30, 7, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="x must have at most 32 rows, got 33"):
        ops.linear(x.repeat(17, 1)[:33], weight)
    with pytest.raises(TypeError, match="weight must have dtype bfloat16"):
        ops.linear(x, weight.half())
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.linear(x, weight[:, :29])
    with pytest.raises(ValueError, match="bias must have shape"):
        ops.linear(x, weight, bias[:5])
    with pytest.raises(UnsupportedError, match="cpu: it has no kernel for this op"):
        ops.linear(x, weight)
    with pytest.raises(UnsupportedError, match="dtype must be float16 or bfloat16"):
        ops.linear(x.float(), weight.float(), backend="triton")


@on_each_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "outputs"), [(96, 100), (40, 70), (1, 3)])
@pytest.mark.usefixtures("products_in_order")
def test_an_invariant_product_has_rows_of_their_own(channels, outputs, dtype, backend, place):
    x, weight, bias = _problem(150, channels, outputs, dtype, place)
    together = ops.invariant_linear(x, weight, bias, backend=backend)
    wide = F.linear(x.double(), weight.double(), bias.double())
    eager = F.linear(x, weight, bias)
    if dtype == torch.float32:  # channel after channel, as tiles are; cuBLAS adds up pairs
        eager = torch.zeros_like(eager)
        for channel in range(channels):  # a GPU's cumsum is a tree, too
            eager += x[:, channel, None] * weight[:, channel]
        eager += bias
    assert_within_budget(together, wide, eager)
    for rows in (slice(0, 1), slice(63, 66), slice(1, 150, 7), slice(149, 150)):
        some = ops.invariant_linear(x[rows], weight, bias, backend=backend)
        assert torch.equal(some, together[rows])
    assert ops.invariant_linear(x[:0], weight, backend=backend).shape == (0, outputs)


@on_each_triton
@pytest.mark.parametrize(("channels", "outputs"), [(200, 300), (1024, 2048)])
def test_all_tiles_of_an_invariant_product_give_the_same_bits(channels, outputs, backend, place):
    """On a GPU their instructions differ in width; the interpreter sees to masks and edges."""
    from tilewise.kernels.triton.step import invariant_linear

    rows = 150 if place == "cuda" else 70
    if place == "cpu" and channels > 200:
        pytest.skip("large ones are for a GPU")
    x, weight, bias = _problem(rows, channels, outputs, torch.bfloat16, place)
    first, *others = (
        invariant_linear.launch(x, weight, bias, tile) for tile in invariant_tiles.candidates()
    )
    wide = F.linear(x.double(), weight.double(), bias.double())
    assert_within_budget(first, wide, F.linear(x, weight, bias))
    for y in others:
        assert_same_rounding(y, first) if place == "cpu" else torch.testing.assert_close(
            y, first, rtol=0, atol=0
        )


def assert_same_rounding(y, other):
    """Equal but for the order of sums in float32, which numpy's products choose by shape."""
    torch.testing.assert_close(y.float(), other.float(), rtol=2**-7, atol=1e-2)


def test_the_tile_of_an_invariant_product_fills_the_device():
    choose = invariant_tiles.invariant_tile
    assert choose(1, 1024, 2, 90).tile_n == 16
    assert choose(1, 151_936, 2, 90).tile_n == 128
    assert choose(8192, 4096, 2, 90)[:2] == (128, 256)
    assert choose(1, 6144, 2, 90).tile_n == 64
    assert choose(256, 1024, 2, 90)[:2] == (64, 32)
    assert choose(1024, 6144, 2, 90)[:2] == (128, 128)  # of the larger a second wave is half empty
    assert choose(1024, 4096, 2, 90)[:2] == (128, 256)
    # Where another instruction may be behind another width, there is one tile.
    assert len({choose(r, n, 2, 80) for r in (1, 99, 8192) for n in (16, 4096)}) == 1
    assert len({choose(r, n, 4, 90) for r in (1, 99, 8192) for n in (16, 4096)}) == 1
    assert all(tile.tile_m >= 64 for tile in invariant_tiles.candidates())


def test_an_invariant_product_says_what_is_wrong():
    x, weight, bias = _problem(3, 8, 5, torch.float32, "cpu")
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.invariant_linear(x, weight[:, :7].contiguous())
    with pytest.raises(TypeError, match="bias must"):
        ops.invariant_linear(x, weight, bias.double())
    with pytest.raises(UnsupportedError):
        ops.invariant_linear(x, weight, backend="gluon")


def test_models_take_invariant_products_everywhere():
    from tilewise.models import ModelConfig, build_model
    from tilewise.nn.invariant_linear import InvariantLinear

    model = build_model(
        ModelConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": 16,
                "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                "tie_word_embeddings": True, "max_position_embeddings": 32,
            }
        )
    )  # fmt: skip
    model.use_invariant_linears()
    kinds = [type(m) for m in model.modules()]
    assert torch.nn.Linear not in kinds
    assert kinds.count(InvariantLinear) == 5
    assert model.packed_head.get_buffer("weight").data_ptr() == model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("channels", "backend"), [(64, "gluon"), (32, "triton"), (16, "triton"), (60, "triton")]
)
def test_a_table_says_where_hoppers_own_product_is_chosen(channels, backend, monkeypatch):
    tile = linear_rows.RowsTile(64, 64, 1, 2)
    table = {(20, 64): (tile, True), (20, 60): (tile, True), (20, 32): (tile, False)}
    monkeypatch.setattr(linear_rows, "_TABLE", table)
    monkeypatch.setattr(device, "arch_of", lambda _: 90)
    weight = torch.empty(20, channels, dtype=torch.bfloat16, device="meta")
    spec = replace(linear_op.spec_of(weight), device_type="cuda")
    assert linear_op._backend_of(spec, None) == backend
    assert linear_op._backend_of(spec, "gluon") == "gluon"
    assert linear_op._backend_of(spec, "reference") == "reference"
    assert linear_op._backend_of(replace(spec, device_type="cpu"), None) is None


def test_who_cannot_address_a_weight_is_told():
    weight = torch.empty(20, 80, dtype=torch.bfloat16)
    assert linear_op.spec_of(weight).addressable
    assert linear_op.spec_of(weight[:, 8:16]).addressable
    assert not linear_op.spec_of(weight[:, 3:11]).addressable
    assert not linear_op.spec_of(torch.empty(20, 81, dtype=torch.bfloat16)).addressable
    with pytest.raises(UnsupportedError, match="device must be cuda"):
        ops.linear(weight[:3], weight, backend="gluon")
