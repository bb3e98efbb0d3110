"""expert_mlp against float64, packed and plain weights, and a row's bits whatever is beside it."""

from __future__ import annotations

import pytest
import torch

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels.tiles.experts import expert_tile, most_row_tiles
from tilewise.ops.mxfp4 import pack_mxfp4, unpack_mxfp4
from tilewise.testing import assert_within_budget

on_triton = pytest.mark.parametrize(("backend", "place"), BACKENDS[1:])


def problem(tokens, width, inner, experts, dtype, place, *, packed=False, seed=0):
    """Return the arguments of a call; weights have the size that keeps activations near 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=draw) * scale

    up, down = (
        normal(experts, 2 * inner, width, scale=2 * width**-0.5),
        normal(experts, width, inner, scale=inner**-0.5),
    )
    given = {
        "x": normal(tokens, width), "logits": normal(tokens, experts), "up": up, "down": down,
        "up_bias": normal(experts, 2 * inner), "down_bias": normal(experts, width),
    }  # fmt: skip
    given = {name: x.to(place, dtype) for name, x in given.items()}
    if packed:
        for name in ("up", "down"):
            blocks, scales = pack_mxfp4(given[name])
            given |= {name: blocks, f"{name}_scale": scales}
    return given


def eager(x, logits, up, down, up_bias, down_bias, num_active, limit=7.0, alpha=1.702):
    """The definition with torch's operations in the dtype of x, over all experts at once."""
    top, chosen = logits.topk(num_active, dim=-1)
    weights = torch.zeros_like(logits).scatter(1, chosen, top.softmax(-1))
    both = torch.einsum("te,nie->tni", x, up) + up_bias
    gate, other = both[..., 0::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    a = (other + 1) * gate * torch.sigmoid(alpha * gate)
    return torch.einsum("tn,tne->te", weights, torch.einsum("tni,nei->tne", a, down) + down_bias)


def unpacked(given):
    plain = {name: x for name, x in given.items() if not name.endswith("scale")}
    for name in ("up", "down"):
        if f"{name}_scale" in given:
            blocks, scales = given[name], given[f"{name}_scale"]
            plain[name] = unpack_mxfp4(blocks, scales, given["x"].dtype)
    return plain


@on_triton
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "active", "packed"),
    [
        (1, 64, 32, 4, 2, False),
        (3, 40, 24, 5, 5, False),
        (37, 64, 96, 8, 4, True),
        (70, 96, 64, 3, 1, True),
        (7, 33, 17, 6, 3, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_keeps_the_budget(tokens, width, inner, experts, active, packed, dtype, backend, place):
    given = problem(tokens, width, inner, experts, dtype, place, packed=packed)
    y = ops.expert_mlp(**given, num_active=active, backend=backend)
    wide = {name: x.double() for name, x in unpacked(given).items()}
    assert_within_budget(
        y, eager(**wide, num_active=active), eager(**unpacked(given), num_active=active)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_is_the_definition(packed):
    given = problem(9, 64, 32, 5, torch.float32, "cpu", packed=packed)
    y = ops.expert_mlp(**given, num_active=3, limit=0.5, alpha=1.1, backend="reference")
    wide = {name: x.double() for name, x in unpacked(given).items()}
    expected = eager(**wide, num_active=3, limit=0.5, alpha=1.1)
    torch.testing.assert_close(y, expected.float(), rtol=1e-6, atol=1e-6)


@on_triton
def test_packed_weights_give_the_bits_of_unpacked_ones(backend, place):
    given = problem(21, 64, 32, 4, torch.bfloat16, place, packed=True)
    y = ops.expert_mlp(**given, num_active=2, backend=backend)
    assert torch.equal(y, ops.expert_mlp(**unpacked(given), num_active=2, backend=backend))


@on_triton
def test_a_row_does_not_depend_on_others(backend, place):
    given = problem(75, 64, 40, 4, torch.bfloat16, place)
    rest = {name: x for name, x in given.items() if name not in ("x", "logits")}
    options = {"num_active": 2, "batch_invariant": True, "backend": backend}
    together = ops.expert_mlp(**given, **options)
    for rows in (slice(3, 4), slice(10, 51), slice(1, 70, 9)):
        some = ops.expert_mlp(
            given["x"][rows], given["logits"][rows].contiguous(), **rest, **options
        )
        assert torch.equal(some, together[rows])


@on_triton
def test_all_rows_to_one_expert_and_equal_logits(backend, place):
    """A tile more than full, experts that nobody takes, and ties: the first of the equal ones."""
    given = problem(40, 32, 32, 9, torch.float32, place)
    given["logits"] = torch.zeros(40, 9, device=place)
    given["logits"][:, 7] = 1.0
    y = ops.expert_mlp(**given, num_active=2, backend=backend)
    given["logits"][:, 0] = 0.5  # of the equal ones the first, now by its size
    wide = {name: x.double() for name, x in given.items()}
    top = torch.tensor([1.0, 0.0], dtype=torch.float64).softmax(0)
    expected = sum(
        weight * eager(**(wide | {"logits": _only(40, 9, e).to(place)}), num_active=1)
        for weight, e in zip(top.tolist(), (7, 0), strict=True)
    )
    torch.testing.assert_close(y.cpu().double(), expected.cpu(), rtol=1e-4, atol=1e-4)


def _only(tokens, experts, e):
    logits = torch.zeros(tokens, experts, dtype=torch.float64)
    logits[:, e] = 5.0
    return logits


@on_triton
def test_a_token_that_is_not_finite_hurts_itself_alone(backend, place):
    given = problem(12, 32, 32, 4, torch.bfloat16, place)
    expected = ops.expert_mlp(**given, num_active=2, backend=backend)
    given["x"][3], given["logits"][5, 1], given["logits"][8] = (
        float("nan"),
        float("nan"),
        float("nan"),
    )
    given["logits"][9, 2] = float("inf")
    y = ops.expert_mlp(**given, num_active=2, backend=backend)
    broken = [3, 5, 8, 9]
    assert y[broken].isnan().all()
    others = [i for i in range(12) if i not in broken]
    assert torch.equal(y[others], expected[others])


@on_triton
def test_no_tokens_and_rows_that_lie_apart(backend, place):
    given = problem(10, 32, 32, 4, torch.float32, place)
    y = ops.expert_mlp(**given, num_active=2, backend=backend)
    apart = {"x": given["x"][::2], "logits": given["logits"][::2]}
    some = ops.expert_mlp(**(given | apart), num_active=2, backend=backend)
    torch.testing.assert_close(some, y[::2], rtol=1e-6, atol=1e-6)
    none = {"x": given["x"][:0], "logits": given["logits"][:0]}
    assert ops.expert_mlp(**(given | none), num_active=2, backend=backend).shape == (0, 32)


def test_five_launches_whatever_the_experts_and_nothing_is_waited_for(monkeypatch):
    """Grids follow from sizes that the host knows: no count is read back."""
    from tilewise.kernels.triton.experts import launch

    launched = []

    class Noted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append((self.name, grid))
            return self.kernel[grid]

    for name in ("choose", "place", "up", "down", "combine"):
        kernel = getattr(launch, f"{name}_kernel")
        monkeypatch.setattr(launch, f"{name}_kernel", Noted(name, kernel))
    grids = []
    for seed in range(3):
        given = problem(40, 32, 32, 8, torch.float32, "cpu", seed=seed)
        if seed == 2:
            given["logits"][:, :2] = 9.0  # two experts for all
        monkeypatch.setattr(torch.Tensor, "item", None)
        monkeypatch.setattr(torch.Tensor, "tolist", None)
        ops.expert_mlp(**given, num_active=2, backend="triton")
        monkeypatch.undo() if seed == 2 else None
        grids.append(launched[-5:])
    assert len(launched) == 15
    assert grids[0] == grids[1] == grids[2]
    assert [name for name, _ in grids[0]] == ["choose", "place", "up", "down", "combine"]


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
    "experts that are not there": (lambda g: g | {"num_active": 5}, ValueError,
                                   r"num_active must be in 1 \.\.\. 4"),
    "logits of another number": (lambda g: g | {"logits": g["logits"][:, :3]}, ValueError,
                                 "logits must have shape"),
    "another dtype": (lambda g: g | {"down": g["down"].half()}, TypeError, "down must have dtype"),
    "scales without blocks": (lambda g: g | {"up_scale": torch.zeros(4, 64, 1, dtype=torch.uint8)},
                              TypeError, "up must be uint8 in MXFP4"),
    "a weight that lies apart": (lambda g: g | {"up": g["up"].mT.contiguous().mT}, ValueError,
                                 "up must be contiguous"),
    "an unknown backend": (lambda g: g | {"backend": "mps"}, ValueError, "backend must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    change, error, match = REFUSED[case]
    given = problem(3, 32, 32, 4, torch.float32, "cpu") | {"num_active": 2, "backend": "reference"}
    with pytest.raises(error, match=match):
        ops.expert_mlp(**change(given))


def test_there_is_no_kernel_for_cpus(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = problem(3, 32, 32, 4, torch.float32, "cpu")
    with pytest.raises(UnsupportedError, match="expert_mlp"):
        ops.expert_mlp(**given, num_active=2)


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


def test_mxfp4_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 6, 3), generator=draw, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(unpack_mxfp4(blocks, scales, torch.bfloat16), theirs.transpose(1, 2))


def test_opcheck():
    given = problem(3, 32, 32, 4, torch.float32, "cpu")
    torch.library.opcheck(
        torch.ops.tilewise.expert_mlp.default,
        (given["x"], given["logits"], given["up"], None, given["up_bias"], given["down"], None,
         given["down_bias"], 2, 7.0, 1.702, False, "reference"),
    )  # fmt: skip
