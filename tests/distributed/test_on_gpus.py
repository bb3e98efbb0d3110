"""Two GPUs and NCCL: the same comparisons as on a CPU, at sizes of GPU tiles."""

from __future__ import annotations

import time

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.test_context_parallel import FUNCTIONS, compare, gpu_of, refused
from tilewise.distributed import exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PATIENCE_S = 240.0  # a first call compiles its kernels, forward and backward

OPTIONS = {
    "tokens": 1024, "heads": (8, 2), "dims": (64, 64), "dtype": "bfloat16", "scale": 0.125,
    "on_gpu": True, "deterministic": True,
}  # fmt: skip
CASES = {
    "plain": {"causal": False},
    "causal": {},
    "window": {"window": 200},
    "documents": {"documents": [0, 5, 5, 700, 701, 1024]},
    "documents_with_window": {"documents": [0, 640, 1024], "window": 100},
    "odd_chunks": {"tokens": 1012},
    "dealt_out": {"documents": [0, 5, 5, 700, 701, 1024], "layout": "documents"},
    "dealt_out_with_window": {"documents": [0, 640, 1024], "window": 100, "layout": "documents"},
    "dealt_out_plain": {"documents": [0, 333, 1024], "causal": False, "layout": "documents"},
    "dealt_out_float16": {"documents": [0, 333, 1024], "dtype": "float16", "layout": "documents"},
}


def assert_both_are_told(ranks, method):
    """That two ranks which disagree hear of it, and go on with the next call."""
    options = [{"softmax_scale": 0.5}, {}]
    for text, seconds in ranks.run(refused, 2, method=method, options=options, on_gpu=True):
        assert "must be the same on all ranks" in text
        assert seconds < 30
    assert ranks.run(compare, 2, method=method, **OPTIONS) == [{}] * 2


def agreed_beside_work(group, rank, size, *, is_same):
    """Agree while the GPU is busy; return what was said, whether it still was, and the seconds."""
    torch.cuda.set_device(gpu_of(rank))
    q = torch.zeros(1, 8, 4, 16, device="cuda")
    said = ""
    # First without a load: a kernel that runs for the first time is loaded when the GPU is idle.
    for cycles in (1, 1_000_000_000):
        torch.cuda.synchronize()
        started = time.monotonic()
        torch.cuda._sleep(cycles)  # about half a second: the layers before
        agreement = exchange.Agreement(group, {"q": q}, ("ring", is_same or rank), None)
        torch.cuda._sleep(cycles)  # attention to the rank's own keys
        busy = torch.cuda.current_stream().record_event()
        try:
            agreement.finish()
        except ValueError as error:
            said = str(error)
        seconds, is_busy = time.monotonic() - started, not busy.query()
    torch.cuda.synchronize()
    return said, is_busy, seconds


def assert_no_wait(ranks, is_same):
    """That the host hears of the others while its GPU computes."""
    for said, is_busy, seconds in ranks.run(agreed_beside_work, 2, is_same=is_same):
        assert ("must be the same on all ranks" in said) is not is_same
        assert is_busy
        assert seconds < 0.3


@pytest.mark.parametrize("is_same", [True, False])
def test_an_agreement_of_two_gpus_does_not_wait_for_them(gpus, is_same):
    assert_no_wait(gpus, is_same)


@pytest.mark.parametrize("method", FUNCTIONS)
def test_two_gpus_that_disagree_are_both_told(gpus, method):
    """The ring's ranks have begun to attend by then; nothing waits, and the next call works."""
    assert_both_are_told(gpus, method)


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    started = Ranks(2, tmp_path_factory.mktemp("gpus"), "nccl", patience_s=PATIENCE_S)
    yield started
    started.close()


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_two_gpus(gpus, case, method):
    assert gpus.run(compare, 2, method=method, **{**OPTIONS, **CASES[case]}) == [{}] * 2
