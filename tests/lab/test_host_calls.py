"""lab/host_calls.py: its calls of each kind are what it says, and mistakes end it."""

import copy
import json

import pytest
import torch

from tests.lab.scripts import load

host_calls = load("host_calls")
BYTES = host_calls.KINDS_OF_BYTES


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(host_calls, "DEVICE", "cpu")


@pytest.mark.parametrize("name", host_calls.KINDS)
def test_each_kind_is_right_and_a_mistake_is_seen(name):
    kind = host_calls.Kind(name, (1, 24, 2, 64))
    o = host_calls.fresh(kind)
    assert o.requires_grad
    assert not kind.unrecorded().requires_grad
    do = torch.randn_like(o)
    host_calls.check(kind, o, do)
    wrong = copy.copy(kind)
    wrong.options = kind.options | {"causal": False}
    with pytest.raises(SystemExit, match="is off by"):
        host_calls.check(kind, wrong.forward(), do)


@pytest.mark.parametrize("name", BYTES)
def test_8_bits_are_right_and_a_mistake_is_seen(name, monkeypatch):
    monkeypatch.setattr(host_calls, "SIZES", (1, 24, 2, 64))
    calls = host_calls.Bytes(name)
    calls.check()
    right = calls.forward()
    monkeypatch.setattr(calls, "forward", lambda: right * 1.1)
    with pytest.raises(SystemExit, match=r"8 bits, .* is off by"):
        calls.check()


def test_calls_take_turns(monkeypatch):
    seen = []
    monkeypatch.setattr(host_calls, "host_time", lambda call: call() or 1.0)
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    found = host_calls.in_turns(calls)
    assert found == {"a": [1.0] * host_calls.ROUNDS, "b": [1.0] * host_calls.ROUNDS}
    assert seen == [*"aaaaabbbbb", *("ab" * host_calls.ROUNDS)]


def test_nothing_takes_a_gradient_of_all_leaves():
    kind = host_calls.Kind("sinks", (1, 24, 2, 64))
    do = torch.randn(1, 24, 2, 64, dtype=torch.bfloat16)
    grads = kind.gradient(host_calls.Nothing.apply(do.clone(), *kind.leaves), do)
    assert all(map(torch.equal, grads, kind.leaves))


def test_all_calls_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(host_calls, "SIZES", (1, 24, 2, 64))
    monkeypatch.setattr(host_calls.Kind.__init__, "__defaults__", ((1, 24, 2, 64),))
    monkeypatch.setattr(host_calls, "host_time", lambda call: len(call()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["host_calls.py", "--is-compiled", "--json", str(out)])
    host_calls.main()
    found = json.loads(out.read_text())
    rows = found["host, us"]
    assert {name for name in rows if "packed" in name} == {
        "packed sinks: gradient", "packed sinks: forward", "packed sinks: recorded",
        "8 bits, packed: forward",
    }  # fmt: skip
    assert [rows[f"{name}: forward"][0] for name in BYTES] == [1, 24, 1]
    assert rows["engine"] == rows["sinks: gradient"] == [4] * host_calls.ROUNDS
    assert rows["bias, differentiated: gradient"] == [4] * host_calls.ROUNDS
    assert "bias: recorded" in capsys.readouterr().out
