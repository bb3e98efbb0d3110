"""Two processes on one GPU, with gloo between them: what NCCL needs two GPUs for."""

from __future__ import annotations

import time

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.test_context_parallel import FUNCTIONS, compare
from tests.distributed.test_on_gpus import CASES, OPTIONS, PATIENCE_S, assert_both_are_told
from tilewise.distributed import exchange

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    started = Ranks(2, tmp_path_factory.mktemp("sharing"), "gloo", patience_s=PATIENCE_S)
    yield started
    started.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", FUNCTIONS)
def test_two_ranks_share_a_gpu(sharing, case, method):
    assert sharing.run(compare, 2, method=method, **{**OPTIONS, **CASES[case]}) == [{}] * 2


@pytest.mark.parametrize("method", FUNCTIONS)
def test_ranks_on_one_gpu_that_disagree_are_both_told(sharing, method):
    assert_both_are_told(sharing, method)


class _Sent:
    """Work on a stream of its own, as NCCL's is: streams wait for it, the host does not."""

    def __init__(self, room, x):
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            room.copy_(x.expand_as(room))
        self._done = self._stream.record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self._done)


@pytest.mark.parametrize("is_same", [True, False])
def test_an_agreement_does_not_wait_for_the_attention_that_runs_beside_it(monkeypatch, is_same):
    """The words lie on the GPU and come on a side stream while the current one is busy."""

    def begin(room, x, group):
        sent = _Sent(room, x)
        if not is_same:
            with torch.cuda.stream(sent._stream):
                room[1, 1] += 1  # other options on the other rank
            sent._done = sent._stream.record_event()
        return sent

    monkeypatch.setattr(exchange, "rank_and_size", lambda group: (0, 2))
    monkeypatch.setattr(exchange.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(exchange, "_all_gather", begin)
    q = torch.zeros(1, 8, 4, 16, device="cuda")
    torch.cuda.synchronize()
    # First without a load: a kernel that runs for the first time is loaded when the GPU is idle, so
    # on an H200 each that was new waited for all sleeps (2026-11). Memory is used again, too.
    for cycles in (1, 1_000_000_000, 1_000_000_000):
        started = time.monotonic()
        torch.cuda._sleep(cycles)  # about half a second: the layers before
        agreement = exchange.Agreement(None, {"q": q}, ("ring", True), None)
        torch.cuda._sleep(cycles)  # attention to the rank's own keys
        busy = torch.cuda.current_stream().record_event()
        others = [torch.full((64,), 7, dtype=torch.int64, device="cuda") for _ in range(8)]
        if is_same:
            agreement.finish()
        else:
            with pytest.raises(ValueError, match="must be the same on all ranks"):
                agreement.finish()
        if cycles > 1:
            assert not busy.query()
            assert time.monotonic() - started < 0.3
        del others
        torch.cuda.synchronize()
