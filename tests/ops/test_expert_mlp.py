"""expert_mlp against float64, packed and plain weights, and a row's bits whatever is beside it."""

from __future__ import annotations

import functools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels.tiles.experts import expert_tile, most_row_tiles
from tilewise.kernels.triton.experts import launch
from tilewise.ops.expert_mlp import ExpertActivation
from tilewise.ops.mxfp4 import pack_mxfp4, unpack_mxfp4
from tilewise.testing import assert_within_budget

on_triton = pytest.mark.parametrize(("backend", "place"), BACKENDS[1:])


def problem(
    tokens, width, inner, experts, active, dtype, place, *, packed=False, seed=0, has_gates=True
):
    """Return the arguments of a call; weights have the size that keeps activations near 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=draw) * scale

    rows = 2 * inner if has_gates else inner
    up, down = (
        normal(experts, rows, width, scale=2 * width**-0.5),
        normal(experts, width, inner, scale=inner**-0.5),
    )
    given = {
        "x": normal(tokens, width), "up": up, "down": down,
        "up_bias": normal(experts, rows), "down_bias": normal(experts, width),
    }  # fmt: skip
    given = {name: x.to(place, dtype) for name, x in given.items()}
    top, chosen = normal(tokens, experts).topk(active, dim=-1)
    given["chosen"] = chosen.to(place, torch.int32)
    given["weights"] = top.softmax(-1).to(place)
    if packed:
        for name in ("up", "down"):
            blocks, scales = pack_mxfp4(given[name])
            given |= {name: blocks, f"{name}_scale": scales}
    return given


GATES = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu_squared": lambda x: F.relu(x) ** 2,
         "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}  # fmt: skip


def eager(
    x, chosen, weights, up, down, up_bias=None, down_bias=None, activation="silu",
    interleaved=False, limit=7.0, alpha=1.702, weighs_input=False, has_gates=True, **_,
):  # fmt: skip
    """The definition with torch's operations in the dtype of x, over all experts at once."""
    every = torch.zeros(len(x), len(up), dtype=x.dtype, device=x.device)
    every = every.scatter(1, chosen.long(), weights.to(x.dtype))
    rows = x[:, None] * every[..., None] if weighs_input else x[:, None].expand(-1, len(up), -1)
    both = torch.einsum("tne,nie->tni", rows, up)
    both = both if up_bias is None else both + up_bias
    if has_gates:
        gate, other = (both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    else:
        gate, other = both, 1.0
    if activation == "clamped":
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
        a = (other + 1) * gate * torch.sigmoid(alpha * gate)
    else:
        a = GATES[activation](gate) * other
    o = torch.einsum("tni,nei->tne", a, down)
    o = o if down_bias is None else o + down_bias
    every = (every != 0).to(x.dtype) if weighs_input else every
    return torch.einsum("tn,tne->te", every, o)


def unpacked(given):
    plain = {name: x for name, x in given.items() if not name.endswith("scale")}
    for name in ("up", "down"):
        if f"{name}_scale" in given:
            blocks, scales = given[name], given[f"{name}_scale"]
            plain[name] = unpack_mxfp4(blocks, scales, given["x"].dtype)
    return plain


def wide(given):
    return {n: x.double() if x.is_floating_point() else x for n, x in unpacked(given).items()}


def without_biases(given):
    return {name: x for name, x in given.items() if not name.endswith("bias")}


CLAMPED = {"activation": "clamped", "interleaved": True}


def with_shared(y, shared, gate):
    """Return what torch's operations make of the result, rounded one after another."""
    return y + (shared if gate is None else torch.sigmoid(gate) * shared)


@on_triton
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "active", "packed", "options"),
    [
        (1, 64, 32, 4, 2, False, {}),
        (3, 40, 24, 5, 5, False, CLAMPED),
        (37, 64, 96, 8, 4, True, CLAMPED),
        (70, 96, 64, 3, 1, True, {"activation": "gelu_tanh"}),
        (7, 33, 17, 6, 3, False, {"activation": "gelu", "interleaved": True}),
        (21, 40, 24, 6, 2, False, {"activation": "relu", "weighs_input": True}),
        (21, 40, 24, 6, 2, False, {"activation": "relu_squared", "has_gates": False}),
        (2, 64, 96, 4, 2, True, {"activation": "silu", "has_gates": False}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_keeps_the_budget(
    tokens, width, inner, experts, active, packed, options, dtype, backend, place
):
    has_gates = options.get("has_gates", True)
    given = problem(
        tokens, width, inner, experts, active, dtype, place, packed=packed, has_gates=has_gates
    )
    if options is not CLAMPED:
        given = without_biases(given)
    told = {name: x for name, x in options.items() if name != "has_gates"}
    y = ops.expert_mlp(**given, **told, backend=backend)
    assert_within_budget(y, eager(**wide(given), **options), eager(**unpacked(given), **options))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", get_args(ExpertActivation))
def test_the_reference_is_the_definition(packed, activation):
    given = problem(9, 64, 32, 5, 3, torch.float32, "cpu", packed=packed)
    options = {"activation": activation, "limit": 0.5, "alpha": 1.1, "interleaved": packed}
    y = ops.expert_mlp(**given, **options, backend="reference")
    expected = eager(**wide(given), **options)
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=1e-6)


@on_triton
@pytest.mark.parametrize("tokens", [21, 5])
def test_packed_weights_give_the_bits_of_unpacked_ones(tokens, backend, place):
    given = problem(tokens, 64, 32, 4, 2, torch.bfloat16, place, packed=True)
    y = ops.expert_mlp(**given, **CLAMPED, backend=backend)
    assert torch.equal(y, ops.expert_mlp(**unpacked(given), **CLAMPED, backend=backend))


@on_triton
def test_a_row_does_not_depend_on_others(backend, place):
    """Few rows are not sorted, and have the bits of rows that are."""
    given = problem(75, 64, 40, 4, 2, torch.bfloat16, place)
    options = {"batch_invariant": True, "backend": backend}
    together = ops.expert_mlp(**given, **options)
    for rows in (slice(3, 4), slice(10, 51), slice(1, 70, 9)):
        some = {name: given[name][rows].contiguous() for name in ("x", "chosen", "weights")}
        assert torch.equal(ops.expert_mlp(**(given | some), **options), together[rows])


@pytest.mark.parametrize(
    ("backend", "place"), [pytest.param("reference", "cpu", id="reference"), *BACKENDS[1:]]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [40, 3])
def test_a_block_of_all_tokens_is_added_as_by_torch(tokens, dtype, backend, place):
    given = problem(tokens, 48, 32, 5, 2, dtype, place)
    plain = ops.expert_mlp(**given, backend=backend)
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(tokens, 96, generator=draw).to(place, dtype)
    shared, gate = wide[:, :48], 3 * wide[:, 50:51]  # rows that lie apart
    y = ops.expert_mlp(**given, shared=shared, backend=backend)
    assert torch.equal(y, with_shared(plain, shared, None))
    y = ops.expert_mlp(**given, shared=shared, shared_gate=gate, backend=backend)
    expected = with_shared(plain, shared, gate)
    if place == "cuda":
        assert torch.equal(y, expected)
    else:  # another exponential
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y, expected, rtol=2 * eps, atol=2 * eps)
    given["chosen"][:] = -1
    alone = ops.expert_mlp(**given, shared=shared, shared_gate=gate, backend=backend)
    torch.testing.assert_close(alone, torch.sigmoid(gate) * shared, rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_gate_of_16_bits_has_the_bits_of_torch(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    source = torch.bfloat16 if dtype == torch.float32 else dtype
    gate = bits.view(source).to(dtype)[:, None]
    tokens = len(gate)
    if dtype == torch.float32:
        gate = gate * 1.0009765
    given = problem(4, 16, 16, 2, 1, dtype, "cuda")
    given |= {name: given[name].repeat(tokens // 4, 1) for name in ("x", "chosen", "weights")}
    shared = torch.randn(tokens, 16, device="cuda").to(dtype)
    y = ops.expert_mlp(**given, shared=shared, shared_gate=gate)
    expected = with_shared(ops.expert_mlp(**given), shared, gate)
    assert expected.isfinite().any(1).sum() > 60_000
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@on_triton
@pytest.mark.parametrize("tokens", [40, 9])
def test_all_rows_to_few_experts_in_their_order(tokens, backend, place):
    """A tile more than full, and experts that nobody takes."""
    given = problem(tokens, 32, 32, 9, 2, torch.float32, place)
    given["chosen"] = torch.tensor([[7, 0]], device=place).repeat(tokens, 1)  # int64
    y = ops.expert_mlp(**given, backend=backend)
    torch.testing.assert_close(y.double(), eager(**wide(given)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "place"), [pytest.param("reference", "cpu", id="reference"), *BACKENDS[1:]]
)
@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize("tokens", [40, 5])
def test_a_choice_of_no_expert_adds_nothing(tokens, weighs_input, backend, place):
    """Whatever its weight is; 2^32 is expert 0 to whoever reads half of it."""
    given = problem(tokens, 32, 32, 5, 3, torch.float32, place)
    if weighs_input:
        given = without_biases(given)
    given["chosen"] = given["chosen"].long()
    stray = torch.tensor([5, -1, 2**32, 31, -(2**40)], device=place).repeat(tokens // 5)
    right = given | {"weights": given["weights"].clone()}
    given["chosen"], given["weights"] = given["chosen"].clone(), given["weights"].clone()
    given["chosen"][:, 1], given["weights"][:, 1] = stray, float("nan")
    right["weights"][:, 1] = 0
    given["chosen"][2], right["weights"][2] = -1, 0
    y = ops.expert_mlp(**given, weighs_input=weighs_input, backend=backend)
    expected = eager(**wide(right), weighs_input=weighs_input)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@on_triton
def test_more_choices_than_each_program_counts(backend, place):
    given = without_biases(problem(300, 16, 16, 40, 3, torch.float32, place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "COUNTED_CHOICES", 2)
        counted = ops.expert_mlp(**given, backend=backend)
    assert torch.equal(counted, ops.expert_mlp(**given, backend=backend))
    torch.testing.assert_close(counted.double(), eager(**wide(given)), rtol=1e-4, atol=1e-4)


@on_triton
@pytest.mark.parametrize("tokens", [40, 12])
def test_a_token_that_is_not_finite_hurts_itself_alone(tokens, backend, place):
    given = problem(tokens, 32, 32, 4, 2, torch.bfloat16, place)
    expected = ops.expert_mlp(**given, backend=backend)
    given["x"][3], given["weights"][5] = float("nan"), float("nan")
    y = ops.expert_mlp(**given, backend=backend)
    assert y[[3, 5]].isnan().all()
    others = [i for i in range(tokens) if i not in (3, 5)]
    assert torch.equal(y[others], expected[others])


@on_triton
def test_no_tokens_and_rows_that_lie_apart(backend, place):
    given = problem(10, 32, 32, 4, 2, torch.float32, place)
    y = ops.expert_mlp(**given, backend=backend)
    some = {name: given[name][::2].contiguous() for name in ("chosen", "weights")}
    got = ops.expert_mlp(**(given | some | {"x": given["x"][::2]}), backend=backend)
    torch.testing.assert_close(got, y[::2], rtol=1e-6, atol=1e-6)
    none = {name: given[name][:0] for name in ("x", "chosen", "weights")}
    assert ops.expert_mlp(**(given | none), backend=backend).shape == (0, 32)


@pytest.mark.parametrize(("tokens", "names"), [
    (40, ["place", "up", "down", "combine"]), (3, ["up", "down", "combine"]),
])  # fmt: skip
def test_launches_are_the_same_whatever_the_experts(tokens, names, monkeypatch):
    """Grids follow from sizes that the host knows: no count is read back."""
    launched = []

    class Noted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append((self.name, grid))
            return self.kernel[grid]

    for name in ("count", "place", "up", "down", "combine"):
        kernel = getattr(launch, f"{name}_kernel")
        monkeypatch.setattr(launch, f"{name}_kernel", Noted(name, kernel))
    grids = []
    for seed in range(3):
        given = problem(tokens, 32, 32, 8, 2, torch.float32, "cpu", seed=seed)
        if seed == 2:
            given["chosen"][:] = torch.tensor([0, 1])  # two experts for all
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", None)
            patch.setattr(torch.Tensor, "tolist", None)
            ops.expert_mlp(**given, backend="triton")
        grids.append(launched[-len(names) :])
    assert len(launched) == 3 * len(names)
    assert grids[0] == grids[1] == grids[2]
    assert [name for name, _ in grids[0]] == names


def test_row_tiles_are_enough_for_any_counts():
    """By trying all ways to deal 12 rows to 3 experts."""
    for tile in (1, 4, 5):
        most = max(
            sum(-(-count // tile) for count in (a, b, 12 - a - b))
            for a in range(13)
            for b in range(13 - a)
        )
        assert most <= most_row_tiles(12, 3, tile) <= most + 1
    assert most_row_tiles(2, 64, 16) == 2
    tiles = {expert_tile(rows, 32, 2, batch_invariant=True) for rows in (1, 900, 10**6)}
    assert len(tiles) == 1 < len({expert_tile(rows, 32, 2) for rows in (1, 900, 10**6)})


REFUSED = {
    "experts that are not there": (lambda g: g | {"chosen": g["chosen"].repeat(1, 3)}, ValueError,
                                   "chosen must have 1 to 4 columns, got 6"),
    "choices of other tokens": (lambda g: g | {"chosen": g["chosen"][:2]}, ValueError,
                                "chosen must have shape"),
    "choices that are no integers": (lambda g: g | {"chosen": g["weights"]}, TypeError,
                                     "chosen must be int32 or int64"),
    "another dtype": (lambda g: g | {"down": g["down"].half()}, TypeError, "down must have dtype"),
    "weights of 16 bits": (lambda g: g | {"weights": g["weights"].half()}, TypeError,
                           "weights must have dtype"),
    "scales without blocks": (lambda g: g | {"up_scale": torch.zeros(4, 64, 1, dtype=torch.uint8)},
                              TypeError, "up must be uint8 in MXFP4"),
    "a weight that lies apart": (lambda g: g | {"up": g["up"].mT.contiguous().mT}, ValueError,
                                 "up must be contiguous"),
    "rows of a gate alone": (lambda g: g | {"up": g["up"][:, :3]}, ValueError,
                             r"up must be \(N, 2 I, E\)"),
    "a block of other tokens": (lambda g: g | {"shared": g["x"][:2]}, ValueError,
                                "shared must have shape"),
    "a block of another dtype": (lambda g: g | {"shared": g["x"].half()}, TypeError,
                                 "shared must have dtype"),
    "channels that lie apart": (lambda g: g | {"shared": g["x"].T.contiguous().T}, ValueError,
                                "shared must have stride 1 in its last"),
    "a gate for each channel": (lambda g: g | {"shared": g["x"], "shared_gate": g["x"]}, ValueError,
                                "shared_gate must have shape"),
    "a gate of no block": (lambda g: g | {"shared_gate": g["x"][:, :1]}, ValueError,
                           "shared_gate must be None without shared"),
    "an unknown activation": (lambda g: g | {"activation": "tanh"}, ValueError,
                              "activation must be one of silu"),
    "an unknown backend": (lambda g: g | {"backend": "mps"}, ValueError, "backend must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    change, error, match = REFUSED[case]
    given = problem(3, 32, 32, 4, 2, torch.float32, "cpu") | {"backend": "reference"}
    with pytest.raises(error, match=match):
        ops.expert_mlp(**change(given))


def test_there_is_no_kernel_for_cpus(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = problem(3, 32, 32, 4, 2, torch.float32, "cpu")
    with pytest.raises(UnsupportedError, match="expert_mlp"):
        ops.expert_mlp(**given)


def test_mxfp4_there_and_back():
    """All numbers of the format at many scales come back exactly; others to the nearest."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6] * 2)
    for exponent in (-100, -3, 0, 7, 100):
        x = torch.ldexp(values, torch.tensor(exponent)).expand(3, 2, 32).flatten(-2)
        blocks, scales = pack_mxfp4(x)
        assert blocks.shape == (3, 2, 16)
        assert scales.unique().tolist() == [127 + exponent]
        assert torch.equal(unpack_mxfp4(blocks, scales, torch.bfloat16).float(), x)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    again = unpack_mxfp4(*pack_mxfp4(x), torch.float32)
    largest = x.unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True)
    assert ((again - x).unflatten(-1, (2, 32)).abs() <= largest / 3).all()
    assert pack_mxfp4(torch.zeros(1, 32))[0].eq(0).all()


def test_mxfp4_in_float64_is_exact_at_every_scale():
    """float32 has no numbers of 2 ** 128 and above. Scale 255 is NaN, as the format says."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((magnitudes, -magnitudes))
    bytes_ = torch.arange(256)
    pairs = torch.stack((values[bytes_ & 15], values[bytes_ >> 4]), -1).flatten()
    wanted = pairs * 2.0 ** (torch.arange(255, dtype=torch.float64) - 127).unsqueeze(1)
    found = unpack_mxfp4(blocks, scales, torch.float64).flatten(1)
    assert torch.equal(found[:255], wanted)
    assert found[255].isnan().all()
    rounded = unpack_mxfp4(blocks, scales, torch.float32).flatten(1)
    assert torch.equal(rounded[:255], wanted.float())
    assert rounded[255].isnan().all()


def test_mxfp4_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 6, 3), generator=draw, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(unpack_mxfp4(blocks, scales, torch.bfloat16), theirs.transpose(1, 2))


def test_opcheck():
    given = problem(3, 32, 32, 4, 2, torch.float32, "cpu")
    torch.library.opcheck(
        torch.ops.tilewise.expert_mlp.default,
        (given["x"], given["chosen"], given["weights"], given["up"], None, given["up_bias"],
         given["down"], None, given["down_bias"], given["x"], given["x"][:, :1],
         "clamped", True, 7.0, 1.702, False, False, "reference"),
    )  # fmt: skip
