"""What ranks agree on before they add up."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from tests.distributed.thread_group import on_ranks
from tilewise.distributed.shard_group import ShardGroup


@pytest.mark.parametrize("refused", [[0.0, 0.0], [0.0, 1.0]])
def test_whether_all_have_buffers_is_not_asked_through_the_buffers(monkeypatch, refused):
    """A rank without them would wait for words, and the others for its arrival at a barrier."""
    group, memory, asked = ShardGroup(0, 2, torch.device("cpu")), object(), []
    group._buffer, group._memory = torch.zeros(4), memory

    def stack(x):
        asked.append(group._memory)
        return torch.tensor(refused).unsqueeze(1)

    monkeypatch.setattr(group, "stack", stack)
    is_refused = any(refused)
    assert group._agreed(None) == ("rank 1 cannot" if is_refused else None)
    assert asked == [None]
    assert group._memory is (None if is_refused else memory)


class _Symmetric:
    """torch's functions, for ranks that are threads; `fails` says what each rank's do."""

    def __init__(self, fails):
        self._fails, self._ranks, self.asked = fails, {}, []

    def enter(self, rank):
        self._ranks[threading.get_ident()] = rank

    def empty(self, *_, **__):
        return self._done("empty", torch.zeros(4))

    def rendezvous(self, *_):
        return self._done("rendezvous", object())

    def _done(self, what, value):
        rank = self._ranks[threading.get_ident()]
        self.asked.append((what, rank))
        if (what, rank) in self._fails:
            raise self._fails[what, rank]
        return value


@pytest.fixture
def share(monkeypatch):
    """Let two ranks share a buffer; return what each says, and what was asked of torch."""

    def run(fails):
        fake = _Symmetric(fails)
        monkeypatch.setattr(symmetric, "empty", fake.empty)
        monkeypatch.setattr(symmetric, "rendezvous", fake.rendezvous)

        def work(group):
            fake.enter(group.rank)
            group.group = type("Group", (), {"group_name": "0"})()
            return group._share_buffer(), group._buffer is None

        return on_ranks(2, work), sorted(fake.asked)

    return run


def test_a_buffer_is_shared_where_all_ranks_can(share):
    said, asked = share({})
    assert said == [(None, False)] * 2
    assert asked == [("empty", 0), ("empty", 1), ("rendezvous", 0), ("rendezvous", 1)]


def test_nobody_comes_to_the_rendezvous_when_one_rank_has_no_buffer(share):
    """The others would wait there for ever."""
    said, asked = share({("empty", 1): RuntimeError("no\n peer access")})
    assert said == [("rank 1 cannot", True), ("no peer access", True)]
    assert asked == [("empty", 0), ("empty", 1)]


def test_a_rendezvous_that_one_rank_cannot_hold_is_told_to_all(share):
    said, _ = share({("rendezvous", 0): RuntimeError("no handle")})
    assert said == [("no handle", True), ("rank 0 cannot", True)]


def test_too_little_memory_is_an_error_and_no_reason_to_do_without(share):
    with pytest.raises((torch.OutOfMemoryError, threading.BrokenBarrierError)) as raised:
        share({("empty", 0): torch.OutOfMemoryError("CUDA out of memory")})
    assert isinstance(raised.value, torch.OutOfMemoryError)
