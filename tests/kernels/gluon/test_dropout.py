"""Words of dropout in a WGMMA's layout: the reference's bits, where threads want them."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, make_problem
from tests.kernels.gluon.emulator import emulated
from tests.kernels.gluon.problem import assert_forward_right, forward
from tilewise.kernels.gluon.backward.logits import (
    drop_gradients,
    kept_pairs,
    words_of_dropout,
)
from tilewise.kernels.gluon.device.dropout import draw_of, drop, drop_pairs, random_words
from tilewise.kernels.gluon.device.warpgroup import operand_layout, pack, sum_layout, unpack
from tilewise.kernels.gluon.forward import tiles
from tilewise.reference import dropout

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
SEED = (-(2**61) + 12345, 2**33 + 77)
HEAD, ROW, KEY = 3, 192, 128


@gluon.jit
def _store(out, x, N: gl.constexpr):
    row = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, N, gl.SliceLayout(0, x.type.layout))
    gl.store(out + gl.expand_dims(row * N, 1) + gl.expand_dims(column, 0), x.to(gl.float32))


@gluon.jit
def of_queries(philox, out, out_pairs, limit, head, first_row, first_key, N: gl.constexpr):
    """Drop ones of 64 queries and N keys, as float32 and as pairs."""
    S: gl.constexpr = sum_layout(N)
    ones = gl.full([64, N], 1.0, gl.float32, S)
    words = random_words(draw_of(philox, limit), head, first_row, first_key, N, S)
    _store(out, drop(ones, words, gl.zeros_like(ones)), N)
    pairs = drop_pairs(pack(ones, gl.bfloat16), words)
    _store(out_pairs, unpack(pairs, gl.bfloat16, operand_layout(64)), N)


@gluon.jit
def of_keys(philox, out, out_pairs, limit, head, first_row, first_key, N: gl.constexpr):
    """Drop ones of 64 keys and N queries, as float32 and as pairs."""
    S: gl.constexpr = sum_layout(N)
    ones = gl.full([64, N], 1.0, gl.float32, S)
    words = words_of_dropout(ones, draw_of(philox, limit), head, first_row, first_key)
    delta = gl.zeros([N], gl.float32, gl.SliceLayout(0, S))
    _store(out, drop_gradients(ones, words, 1.0, delta), N)
    pairs = pack(ones, gl.bfloat16)
    _store(out_pairs, unpack(pairs & kept_pairs(pairs, words), gl.bfloat16, operand_layout(64)), N)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("threshold", [1, 26, 128, 255, 256])
@pytest.mark.parametrize("kernel", [of_queries, of_keys], ids=["queries", "keys"])
def test_words_are_the_references(kernel: object, threshold: int, n: int, device: str) -> None:
    philox = torch.tensor(SEED, device=device)
    results = [torch.full((64, n), torch.nan, device=device) for _ in range(2)]
    arguments = (philox, *results, (threshold << 16) - 1, HEAD, ROW, KEY, n)
    if device == "cpu":
        with emulated():
            kernel[(1,)](*arguments, num_warps=4)  # type: ignore[index]
    else:
        kernel[(1,)](*arguments, num_warps=4)  # type: ignore[index]
    keys_first = kernel is of_keys
    rows, keys = (n, 64) if keys_first else (64, n)
    keep = dropout.keep_mask(
        philox, (1, 1, rows, keys), threshold / 256,
        first_head=HEAD, first_query=ROW, first_key=KEY,
    )[0, 0]  # fmt: skip
    want = (keep.T if keys_first else keep).float()
    for result in results:
        assert torch.equal(result, want)


@pytest.mark.parametrize(
    "call",
    [
        Call(200, 150, (2, 1), (64, 64), 1, BRAIN, CAUSAL, dropout_p=0.3),
        Call(heads=(2, 1), dims=(64, 64), dtype=BRAIN, lengths=((130, 70), (9, 9)), dropout_p=0.3),
    ],
    ids=["causal", "packed"],
)  # fmt: skip
def test_three_warpgroups_drop_what_two_do(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    torch.manual_seed(0)
    problem = make_problem(call, "cpu")
    two = forward(problem, num_sms=2)
    monkeypatch.setattr(tiles, "THREE_THAT_DROP", True)
    assert tiles.tile_config_fwd(problem.spec).warpgroups == 3
    three = forward(problem, num_sms=2)
    assert_forward_right(problem, three)
    for name, x in two.items():
        assert_close(three[name], x, rtol=1e-5 if name == "lse" else 1e-2, atol=1e-5)


def test_only_calls_with_dropout_alone_have_three_warpgroups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_problem(Call(64, 64, (1, 1), (64, 64), 1, BRAIN), "cpu").spec
    drops = spec._replace(dropout_p=0.1)
    others: list[dict[str, object]] = [
        {"has_bias": True}, {"softcap": 3.0}, {"has_alibi": True}, {"mask_tile": (128, 128)},
    ]  # fmt: skip
    before = [tiles.tile_config_fwd(drops._replace(**each)) for each in others]
    wide = tiles.tile_config_fwd(drops._replace(head_dim=128, v_head_dim=128))
    assert tiles.tile_config_fwd(drops).warpgroups == 2
    monkeypatch.setattr(tiles, "THREE_THAT_DROP", True)
    assert tiles.tile_config_fwd(drops).warpgroups == 3
    assert [tiles.tile_config_fwd(drops._replace(**each)) for each in others] == before
    assert tiles.tile_config_fwd(drops._replace(head_dim=128, v_head_dim=128)) == wide
