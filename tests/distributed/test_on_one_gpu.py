"""Two processes on one GPU, with gloo between them: what NCCL needs two GPUs for."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.test_context_parallel import FUNCTIONS, compare
from tests.distributed.test_on_gpus import (
    CASES,
    OPTIONS,
    PATIENCE_S,
    assert_both_are_told,
    assert_no_wait,
)

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


@pytest.mark.parametrize("is_same", [True, False])
def test_an_agreement_does_not_wait_for_the_attention_that_runs_beside_it(sharing, is_same):
    assert_no_wait(sharing, is_same)
