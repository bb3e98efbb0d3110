"""Products by experts with weights of 8 and 4 bits on Hopper: float64 on the format's values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.test_quantised import make_weight
from tests.ops.test_expert_mlp import eager
from tilewise.kernels.gluon.quantised import mixture
from tilewise.kernels.tiles.experts import NarrowTile
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import EmulationError, Program, emulated

# kind of the weights, tokens, width, inner, experts, active, tile, options
CLAMPED = {"activation": "clamped", "interleaved": True}
SORTED, TOKENS, TOKEN = 0, 1, 2


def problem(kind, tokens, width, inner, experts, active, dtype, *, has_gates=True, has_bias=True):
    """Return the arguments of a call but the weights, and both weights."""
    torch.manual_seed(tokens + width)
    outputs = 2 * inner if has_gates else inner
    up, down = (
        make_weight(kind, experts * outputs, width),
        make_weight(kind, experts * width, inner),
    )
    bias = {"up_bias": torch.randn(experts, outputs), "down_bias": torch.randn(experts, width)}
    given = {"x": torch.randn(tokens, width) * width**-0.5}
    given |= bias if has_bias else {}
    given = {name: x.to(dtype) for name, x in given.items()}
    top, chosen = torch.randn(tokens, experts).topk(active, dim=-1)
    return given | {"chosen": chosen.int(), "weights": top.softmax(-1)}, up, down


def check(
    kind, tokens, width, inner, experts, active, tile, dtype, place="cpu", shared=None, **options
):
    """Compare a call with float64; with `shared`, what it is added to."""
    has = {n: options.pop(n) for n in ("has_gates", "has_bias") if n in options}
    given, up, down = problem(kind, tokens, width, inner, experts, active, dtype, **has)
    told = {"activation": "silu", "interleaved": False, "limit": 7.0, "alpha": 1.702,
            "weighs_input": False} | options  # fmt: skip
    moved = {name: x.to(place) for name, x in given.items()}
    biases = [moved.pop(name, None) for name in ("up_bias", "down_bias")]
    read = [weight.padded().to(place).lanes() for weight in (up, down)]
    y = mixture.launch(
        moved["x"], moved["chosen"], moved["weights"], read[0], biases[0], read[1], biases[1],
        shared, None, inner=inner, batch_invariant=False, tile=tile, **told,
    )  # fmt: skip
    wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    values = {
        "up": up.dequantise().view(experts, -1, width),
        "down": down.dequantise().view(experts, -1, inner),
    }
    expected = eager(**wide, **{n: v.double() for n, v in values.items()}, **told,
                     has_gates=has.get("has_gates", True))  # fmt: skip
    plain = eager(**given, **{n: v.to(dtype) for n, v in values.items()}, **told,
                  has_gates=has.get("has_gates", True))  # fmt: skip
    if shared is not None:
        expected, plain = expected + shared, plain + shared
    assert_within_budget(y.cpu(), expected, plain)
    return y


NO_BIAS = {"has_bias": False}
BARE = {"weighs_input": True, "has_bias": False}
CASES = [
    ("mxfp4", 1, 192, 64, 4, 2, (8, TOKEN, 1, 2, 4), CLAMPED),
    ("mxfp4", 5, 192, 64, 4, 2, (8, TOKENS, 1, 1, 4), CLAMPED),
    ("mxfp4", 11, 320, 64, 3, 2, (16, SORTED, 1, 1, 4), {"activation": "gelu_tanh"}),
    ("mxfp4", 40, 320, 64, 3, 2, (32, SORTED, 2, 1, 1), CLAMPED),
    ("int4", 3, 256, 128, 4, 2, (8, TOKENS, 1, 2, 4), {}),
    ("int4", 40, 256, 128, 4, 2, (32, SORTED, 2, 1, 1), BARE),
    ("fp8_blocks", 1, 128, 192, 4, 3, (8, TOKEN, 1, 3, 4), NO_BIAS),
    (
        "fp8_blocks", 21, 128, 192, 2, 1, (32, SORTED, 2, 1, 1),
        {"activation": "relu_squared", "has_gates": False},
    ),
    ("int8", 9, 128, 64, 4, 2, (16, TOKENS, 1, 1, 4), BARE | {"activation": "gelu"}),
    ("q6", 33, 128, 128, 5, 2, (32, SORTED, 2, 1, 1), {}),
    ("mxfp4", 70, 256, 64, 2, 1, (64, SORTED, 4, 1, 1), CLAMPED),
    # one group in a row, whose zero points the columns of the padding have, too
    ("float_zeros", 3, 192, 64, 4, 2, (8, TOKENS, 1, 2, 4), NO_BIAS),
    ("float_zeros", 21, 64, 64, 2, 1, (32, SORTED, 2, 1, 1), BARE),
    ("one_scale_a_row", 3, 192, 64, 4, 2, (16, TOKENS, 1, 1, 4), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tokens", "width", "inner", "experts", "active", "tile", "options"), CASES
)
def test_every_form_keeps_the_budget(kind, tokens, width, inner, experts, active, tile, options):
    with emulated(tokens) as names:
        check(
            kind, tokens, width, inner, experts, active, NarrowTile(*tile), torch.bfloat16,
            **options,
        )  # fmt: skip
    assert names == ["experts_kernel"] * 2


def test_a_block_of_all_tokens_is_added():
    shared = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    tile = NarrowTile(8, TOKENS, 1, 2, 4)
    with emulated(3):
        check("int4", 3, 256, 128, 4, 2, tile, torch.bfloat16, shared=shared)


def run_many_items(program: Program | None = None) -> None:
    """Compute a call in which each CTA has several items, and fills its ring again."""
    with emulated(1, **({} if program is None else {"program": program})):
        tile = NarrowTile(16, SORTED, 1, 1, 1)
        check("mxfp4", 21, 320, 256, 3, 2, tile, torch.bfloat16, **CLAMPED)


_EXPERTS = "quantised/experts"
MISTAKES = {
    "the_wrong_phase_of_free": Mutation(
        f"{_EXPERTS}:_load_items", "(place // shape.stages & 1) ^ 1",
        "place // shape.stages & 1", "",
    ),
    "an_item_that_begins_where_the_last_did": Mutation(
        f"{_EXPERTS}:_multiply_items", "filled += steps", "pass", ""
    ),
    "rows_of_the_next_expert_are_written": Mutation(
        f"{_EXPERTS}:_places", "first + row < end", "first + row < end + 1", ""
    ),
    "gates_of_another_expert": Mutation(
        f"{_EXPERTS}:_load_items", "expert * outputs, output", "expert * half, output", ""
    ),
    "scales_of_the_first_expert": Mutation(
        f"{_EXPERTS}:_multiply_items", "base_rows += expert * outputs", "pass", ""
    ),
}  # fmt: skip


def test_many_items_of_a_cta():
    run_many_items()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name):
    with pytest.raises((AssertionError, EmulationError)):
        run_many_items(MISTAKES[name].program())


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), [
    ("mxfp4", torch.bfloat16), ("mxfp4", torch.float16), ("int4", torch.bfloat16),
    ("fp8_blocks", torch.bfloat16), ("int8", torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 7, 16, 40, 90, 300])
def test_every_number_of_tokens_keeps_the_budget_on_a_gpu(kind, dtype, tokens):
    width = 1984 if kind == "mxfp4" else 2048
    options = CLAMPED if kind == "mxfp4" else {}
    check(kind, tokens, width, 768, 16, 4, None, dtype, place="cuda", **options)
