"""What a rank holds of a shared sequence: with twice the ranks half as much."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.test_context_parallel import FUNCTIONS

TOKENS, HEADS, KV_HEADS, DIM = 1024, 8, 2, 32


class Held(TorchDispatchMode):
    """Counts the bytes of memory that live tensors have, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage())
        return result

    def _note(self, storage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def most_bytes(group, rank, size, *, method, tokens=TOKENS):
    """Return the most bytes that tensors have, of a call forward and backward, arguments too.

    The least of three calls, as a thread that sends may let go of a tensor late.
    """
    length, found = tokens // size, []
    gc.collect()
    gc.freeze()  # what was there before, and stays, need not be looked at three times
    for _ in range(3):
        gc.collect()
        with Held() as held:
            q = torch.randn(1, length, HEADS, DIM, requires_grad=True)
            k, v = (torch.randn(1, length, KV_HEADS, DIM, requires_grad=True) for _ in range(2))
            o = FUNCTIONS[method](q, k, v, group=group, causal=True)
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        found.append(held.most)
        del q, k, v, o
    gc.unfreeze()
    return min(found)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_rank_holds_its_share(ranks, method):
    two, four = (max(ranks.run(most_bytes, size, method=method)) for size in (2, 4))
    longer = max(ranks.run(most_bytes, 4, method=method, tokens=2 * TOKENS))
    whole = 4 * TOKENS * DIM * (HEADS + KV_HEADS)  # q and k, in float32
    assert four > whole / 4  # something was counted
    assert four < 0.6 * two
    assert longer < 2.1 * four


def test_a_gather_holds_the_keys_of_all(ranks):
    """As docs/guide/several-gpus.md says: so it is picked for short pieces alone."""
    ring, gather = (max(ranks.run(most_bytes, 4, method=m)) for m in ("ring", "gather"))
    assert gather > 1.2 * ring
