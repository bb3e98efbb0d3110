"""The compiled step of models whose layers keep states: the bits of the modules, in any parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_state_families import CASES, make
from tests.models.tiny import VOCAB, save_hf
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.engine.steps.cpu_step import CompiledRunner, why_not
from tilewise.engine.steps.inputs import ModelInputs, build_inputs
from tilewise.engine.steps.runner import ModelRunner
from tilewise.models import load_model
from tilewise.ops.panels import why_not_pack

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
BLOCK = 16
# Parts of three texts, at, before and behind the ends of chunks; the first decodes.
STEPS: tuple[dict[int, tuple[int, int]], ...] = (
    {0: (0, 70)},
    {1: (0, 5), 0: (70, 71)},
    {2: (0, 63), 0: (71, 72), 1: (5, 6)},
    {2: (63, 64), 0: (72, 73)},
    {2: (64, 65), 0: (73, 74), 1: (6, 100)},
    {2: (65, 66), 0: (74, 75), 1: (100, 101)},
)


def storage_of(model: Any) -> KVStorage:
    """Return a cache and slots of NaN, so that nothing is read that was not written."""
    spec = cache_spec(model.config, BLOCK, model.dtype)
    storage = KVStorage(spec, 40, num_slots=4, num_checkpoints=1)
    assert storage.states is not None
    for slots in storage.states.layers.values():
        for tensor in (*(slots.recurrence or ()), slots.convolution):
            if tensor is not None:
                tensor.fill_(float("nan"))
    return storage


def inputs_of(runner: ModelRunner, runs: dict[int, tuple[int, int]]) -> ModelInputs:
    """Build a step that computes tokens first ... end - 1 of some texts."""
    draw = torch.Generator().manual_seed(5)
    texts = torch.randint(3, VOCAB, (3, 110), generator=draw).tolist()
    sequences = tuple(
        ScheduledSequence(
            seq_id=i,
            token_ids=tuple(texts[i][first:end]),
            start=first,
            block_ids=tuple(range(10 * i, 10 * i - (-end // BLOCK))),
            num_samples=1,
            sampling=SamplingParams(),
            seeds=(i,),
            state_slot=(i + 1) % 4,
        )
        for i, (first, end) in runs.items()
    )
    return build_inputs(
        Batch(sequences), BLOCK, torch.device("cpu"), batch_invariant=True, states=runner._states
    )


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Return the logits of all steps."""
    return torch.cat([runner.forward(inputs_of(runner, runs)).clone() for runs in STEPS])


SLOW = ("qwen3_next", "qwen3_5_moe", "nemotron_h_no_latents", "granitemoehybrid", "lfm2_moe")
OP_BY_OP = ("zamba2", "zamba2_one_block")  # families whose layers share blocks
COMPILED = [case for case in CASES if case not in OP_BY_OP]


@pytest.mark.parametrize("case", OP_BY_OP)
def test_blocks_that_layers_share_are_not_compiled(case: str, tmp_path: Path) -> None:
    model = load_model(save_hf(make(case), tmp_path), dtype=torch.bfloat16)
    model.pack_for_inference()
    found = why_not(model, storage_of(model))
    assert found is not None
    assert "must be the layer's own, got shared ones" in found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in COMPILED],
)
def test_a_step_has_the_bits_of_its_modules(case: str, tmp_path: Path) -> None:
    model = load_model(save_hf(make(case), tmp_path), dtype=torch.bfloat16)
    model.pack_for_inference()
    assert why_not(model, storage_of(model)) is None
    compiled, modules = (
        logits_of(kind(model, storage_of(model), batch_invariant=True))
        for kind in (CompiledRunner, ModelRunner)
    )
    assert modules.isfinite().all()
    assert torch.equal(compiled, modules)
