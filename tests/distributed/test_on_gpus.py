"""Two GPUs and NCCL: the same comparisons as on a CPU, at sizes of GPU tiles."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.test_context_parallel import FUNCTIONS, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES = {
    "plain": {"causal": False},
    "causal": {},
    "window": {"window": 200},
    "documents": {"documents": [0, 5, 5, 700, 701, 1024]},
    "documents_with_window": {"documents": [0, 640, 1024], "window": 100},
    "odd_chunks": {"tokens": 1012},
}


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    started = Ranks(2, tmp_path_factory.mktemp("gpus"), "nccl")
    yield started
    started.close()


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_two_gpus(gpus, case, method):
    options = {
        "tokens": 1024, "heads": (8, 2), "dims": (64, 64), "dtype": "bfloat16", "scale": 0.125,
        "on_gpu": True, "deterministic": True, **CASES[case],
    }  # fmt: skip
    assert gpus.run(compare, 2, method=method, **options) == [{}] * 2
