"""What ranks send one another, as those see it who wait for it."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import constants

from tilewise.distributed import exchange
from tilewise.distributed.exchange import Pending, _FromHost


class _Work:
    def __init__(self, said, name):
        self._said, self._name = said, name

    def wait(self):
        self._said.append(self._name)


def _pending(said):
    tensors = [torch.tensor([float(i)]) for i in range(2)]
    return Pending(tensors, [_Work(said, "keys"), _Work(said, "values")], list(tensors))


def test_the_first_of_a_gather_is_there_before_the_next_is_waited_for():
    for wrap in (lambda pending: pending, lambda pending: _FromHost(pending, torch.device("cpu"))):
        said: list[str] = []
        pending = _pending(said)
        for tensor in wrap(pending).in_turn():
            said.append(f"got {int(tensor)}")
        assert said == ["keys", "got 0", "values", "got 1"]
        assert pending._sent == []


def test_what_has_other_works_than_tensors_is_waited_for_whole():
    said: list[str] = []
    tensors = [torch.zeros(1), torch.ones(1)]
    pending = Pending(tensors, [_Work(said, "both")], [])  # as a batch of sends has it
    assert [int(t) for t in pending.in_turn()] == [0, 1]
    assert said == ["both"]


def words_beside(group, rank, size):
    """Send a word by gloo beside a group, twice; return all words."""
    first = exchange.gloo_of(group)
    assert exchange.gloo_of(group) is first
    said = []
    for turn in range(2):
        room = torch.zeros(size, 1, dtype=torch.int64)
        first.allgather([list(room.unbind(0))], [torch.tensor([10 * turn + rank])]).wait()
        said.append(room.flatten().tolist())
    return said


@pytest.mark.parametrize("size", [3, 2, 4])
def test_ranks_that_are_in_different_groups_have_words_beside_one_of_them(ranks, size):
    """Of the fixture's groups rank 0 is in four and rank 3 in one, which torch's own form hangs."""
    own = list(range(size))
    assert ranks.run(words_beside, size) == [[own, [10 + rank for rank in own]]] * size


def words_again(group, rank, size):
    """Send a word by gloo of ranks that left their groups and met anew, the last of them late."""
    constants.default_pg_timeout = timedelta(seconds=5)
    said = []
    for turn in range(3):
        exchange._GLOO.clear()  # as a WORLD that was destroyed leaves it
        if rank == size - 1:
            time.sleep(0.2)
        room = torch.zeros(size, 1, dtype=torch.int64)
        word = torch.tensor([10 * turn + rank])
        exchange.gloo_of(group).allgather([list(room.unbind(0))], [word]).wait()
        said.append(room.flatten().tolist())
    return said


def test_ranks_that_meet_anew_by_the_same_store_do_not_find_old_addresses(ranks):
    expected = [[10 * turn + rank for rank in range(3)] for turn in range(3)]
    assert ranks.run(words_again, 3) == [expected] * 3


WITHOUT_RANKS = """
import sys, torch
sys.modules["torch.distributed.constants"] = None  # as where torch was built without ranks
torch.distributed.is_available = lambda: False
from tilewise.distributed import exchange
try:
    exchange.rank_and_size(None)
except ValueError as error:
    assert "torch.distributed be initialised" in str(error)
else:
    raise AssertionError
"""


def test_a_torch_that_knows_of_no_ranks_is_told_of():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RANKS], stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
