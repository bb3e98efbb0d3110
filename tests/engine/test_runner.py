"""How many threads a step runs on, and that torch has its own back afterwards."""

from __future__ import annotations

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.sizing import widest_batch
from tilewise.engine.steps.inputs import build_inputs
from tilewise.engine.steps.runner import WORK_PER_THREAD, ModelRunner, threads_for


@pytest.mark.parametrize(
    ("work", "available", "expected"),
    [
        (0, 4, 1),
        (WORK_PER_THREAD - 1, 4, 1),
        (2 * WORK_PER_THREAD - 1, 4, 1),
        (2 * WORK_PER_THREAD, 4, 2),
        (10**15, 4, 4),
        (10**15, 1, 1),
    ],
)
def test_threads_grow_with_the_work_up_to_those_available(work, available, expected):
    assert threads_for(work, available) == expected


class Recorder:
    """A model that notes on how many threads it runs, and may fail."""

    def __init__(self, fails=False):
        self.fails = fails
        self.threads = None

    def __call__(self, ids, positions, *, ctx, kv):
        self.threads = torch.get_num_threads()
        if self.fails:
            raise RuntimeError("no")
        return torch.zeros(len(ids), 4)

    def compute_logits(self, hidden):
        return hidden


def run(model, num_tokens, num_parameters):
    storage = KVStorage(CacheSpec(1, 4, KVSpec(1, 4, 4, torch.float32)), 8, torch.device("cpu"))
    runner = ModelRunner(model, storage, num_parameters=num_parameters)
    runner.forward(build_inputs(widest_batch(1, num_tokens, num_tokens, 4), 4, runner.device))
    return model.threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("num_tokens", "num_parameters", "expected"),
    [(1, 1000, 1), (2, WORK_PER_THREAD, 2), (8, WORK_PER_THREAD, 3), (1, None, 3)],
    ids=["little", "some", "much", "unknown"],
)
def test_a_step_runs_on_the_threads_that_it_is_worth(num_tokens, num_parameters, expected):
    assert run(Recorder(), num_tokens, num_parameters) == expected
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_step_that_fails_gives_the_threads_back():
    with pytest.raises(RuntimeError, match="no"):
        run(Recorder(fails=True), 1, 1000)
    assert torch.get_num_threads() == 3
