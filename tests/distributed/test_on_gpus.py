"""Two GPUs and NCCL: the same comparisons as on a CPU, at sizes of GPU tiles."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.test_context_parallel import FUNCTIONS, compare, refused

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
