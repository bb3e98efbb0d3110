"""What gated_delta, ssd and their steps refuse, and the words that name it."""

from __future__ import annotations

import re

import pytest
import torch

from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels.spec import RecurrentSpec

_ROWS = {"q": (2, 5, 2, 8), "k": (2, 5, 2, 8), "v": (2, 5, 4, 6), "g": (2, 5, 4), "beta": (2, 5, 4)}


def _dense(**changes):
    return {name: torch.ones(shape) for name, shape in _ROWS.items()} | changes


def _edges(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.ones(5, 2, 8)}, ValueError, "q must be (B, S, Hk, K), got shape (5, 2, 8)"),
        ({"q": torch.ones(2, 5, 2, 8).int()}, TypeError, "q must be one of float16"),
        ({"k": torch.ones(2, 5, 2, 8).half()}, TypeError, "k must have dtype float32, got float16"),
        ({"k": torch.ones(2, 5, 2, 9)}, ValueError, "k must have shape (2, 5, 2, 8)"),
        ({"k": torch.ones(2, 5, 8, 2).mT}, ValueError, "k must have stride 1 in its last dim"),
        (
            {"v": torch.ones(2, 4, 4, 6)},
            ValueError,
            "v must have the rows of k, (2, 5), got (2, 4)",
        ),
        ({"v": torch.ones(2, 5, 3, 6)}, ValueError, "heads of v must be a multiple of those of k"),
        ({"v": torch.ones(2, 5, 4, 6, device="meta")}, ValueError, "v must be on cpu, got meta"),
        ({"g": torch.ones(2, 5, 2)}, ValueError, "g must have shape (2, 5, 4) or (2, 5, 4, 8)"),
        ({"g": torch.ones(2, 5, 4).int()}, TypeError, "g must be one of float16"),
        ({"beta": torch.ones(2, 5, 4, 8)}, ValueError, "beta must have shape (2, 5, 4), got"),
        ({"q_scale": "1"}, TypeError, "q_scale must be a number, got str"),
        ({"q_scale": float("inf")}, ValueError, "q_scale must be finite"),
        (
            {"initial_state": torch.ones(2, 4, 8, 6).bfloat16()},
            TypeError,
            "initial_state must have dtype float32, got bfloat16",
        ),
        (
            {"initial_state": torch.ones(2, 4, 6, 8)},
            ValueError,
            "initial_state must have shape (2, 4, 8, 6), got (2, 4, 6, 8)",
        ),
        ({"backend": "cuda"}, ValueError, "backend must be one of reference, cpu, triton, gluon"),
        ({"scale": 1.0}, TypeError, "scale"),
        ({"cu_seqlens": _edges(0, 5)}, ValueError, "q must be (T, Hk, K)"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ops.gated_delta(**_dense(**changes))


@pytest.mark.parametrize(
    ("edges", "error", "message"),
    [
        (_edges(0, 6, 11), ValueError, "cu_seqlens must rise from 0 to at most 10, got [0, 6, 11]"),
        (_edges(1, 6, 10), ValueError, "cu_seqlens must rise from 0"),
        (_edges(0, 7, 6, 10), ValueError, "cu_seqlens must rise from 0"),
        (torch.tensor([0, 10]), TypeError, "cu_seqlens must have dtype int32, got int64"),
        (_edges(0, 10).view(1, 2), ValueError, "cu_seqlens must be (N + 1,), got shape (1, 2)"),
        (torch.empty(0, dtype=torch.int32), ValueError, "cu_seqlens must be (N + 1,)"),
    ],
    ids=str,
)
def test_lengths_that_do_not_match_are_named(edges, error, message):
    rows = {name: x.flatten(0, 1) for name, x in _dense().items()}
    with pytest.raises(error, match=re.escape(message)):
        ops.gated_delta(**rows, cu_seqlens=edges)
    with pytest.raises(error, match=re.escape(message)):
        _step(cu_seqlens=edges)


def _step(**changes):
    rows = {name: x.flatten(0, 1) for name, x in _dense().items()}
    number = torch.arange(10)
    given = {"slots": number, "starts": 0 * number} | rows
    given["states"] = ops.recurrent_states(10, 4, 8, 6, num_key_heads=2)
    return ops.gated_delta_step(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": torch.arange(10) + 1}, ValueError, "slots must lie in [-1, 9], got 10"),
        ({"slots": torch.zeros(10).int()}, ValueError, "slots must differ from one another"),
        ({"slots": torch.arange(9)}, ValueError, "slots must have shape (10,), got (9,)"),
        ({"starts": torch.arange(10) - 1}, ValueError, "starts must lie in [0, "),
        ({"starts": torch.zeros(10)}, TypeError, "starts must have dtype int32 or int64"),
        ({"states": None}, TypeError, "states must be of type RecurrentStates, got NoneType"),
        (
            {"states": ops.recurrent_states(10, 4, 8, 6)},
            ValueError,
            "states.keys must have shape (10, 64, 2, 8), got (10, 64, 4, 8)",
        ),
        (
            {"states": ops.recurrent_states(10, 4, 8, 6, num_key_heads=2, dtype=torch.float64)},
            TypeError,
            "states.state must have dtype float32, got float64",
        ),
        (
            {"states": ops.recurrent_states(10, 4, 8, 6, num_key_heads=2, by_channel=True)},
            ValueError,
            "states.gates must have shape (10, 64, 4), got (10, 64, 4, 8)",
        ),
        (
            {"states": ops.recurrent_states(
                10, 4, 8, 6, num_key_heads=2, keeps="tokens", is_delta=False)},
            ValueError,
            "states.inverses must be a tensor for the delta rule, got None",
        ),
        (
            {"states": ops.recurrent_states(10, 4, 8, 6, num_key_heads=2, keeps="tokens"),
             "backend": "cpu"},
            NotImplementedError,
            "states must keep updates, got states that keep tokens",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_bad_slots_are_named(changes, error, message):
    assert _step().shape == (10, 4, 6)
    with pytest.raises(error, match=re.escape(message)):
        _step(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.int8}, TypeError, "dtype must be one of float16, bfloat16, float32"),
        ({"num_slots": -1}, ValueError, "num_slots must be at least 0, got -1"),
        ({"key_dim": 1.5}, TypeError, "key_dim must be an integer, got 1.5"),
        ({"keeps": "all"}, ValueError, "keeps must be 'updates', 'tokens' or None, got 'all'"),
    ],
    ids=str,
)
def test_slots_that_cannot_be_are_named(changes, error, message):
    given = {"num_slots": 2, "num_heads": 2, "key_dim": 8, "value_dim": 8}
    with pytest.raises(error, match=re.escape(message)):
        ops.recurrent_states(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": torch.ones(3)}, ValueError, "a must have shape (4,), got (3,)"),
        ({"dt": torch.ones(2, 5, 1)}, ValueError, "dt must have shape (2, 5, 4)"),
        ({"d": torch.ones(4, 2)}, ValueError, "d must have shape (4,) or (4, 6), got (4, 2)"),
        ({"b": torch.ones(2, 5, 2, 9)}, ValueError, "b must have shape (2, 5, 2, 8)"),
        ({"x": torch.ones(2, 5, 3, 6)}, ValueError, "heads of x must be a multiple of those of b"),
        ({"initial_state": torch.ones(2, 4, 6, 8)}, ValueError, "initial_state must have shape"),
        ({"D": torch.ones(4)}, TypeError, "D"),
    ],
    ids=str,
)
def test_bad_arguments_of_ssd_are_named(changes, error, message):
    given = {
        "x": torch.ones(2, 5, 4, 6), "dt": torch.ones(2, 5, 4), "a": -torch.ones(4),
        "b": torch.ones(2, 5, 2, 8), "c": torch.ones(2, 5, 2, 8),
    }  # fmt: skip
    with pytest.raises(error, match=re.escape(message)):
        ops.ssd(**given | changes)


def test_a_key_that_is_too_wide_for_a_gpus_kernels_is_refused(monkeypatch):
    scan = pytest.importorskip("tilewise.kernels.triton.recurrent.scan")
    spec = RecurrentSpec("cuda", torch.bfloat16, 256, 128, False, None)
    monkeypatch.setattr(device, "interpreting", lambda: False)
    assert scan.why_not(spec) is None
    wide = RecurrentSpec("cuda", torch.bfloat16, 512, 128, False, None)
    assert scan.why_not(wide) == "key_dim must be at most 256, got 512"
