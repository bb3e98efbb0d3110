"""Weights from the ranks of a trainer to an engine's process: gloo here, NCCL on two GPUs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import Ranks
from tilewise.distributed import receive_weights, send_weights
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams

ASKED = SamplingParams(temperature=0.0, max_tokens=8)
PATIENCE_S = 240.0


def _answers(llm):
    return llm.generate("Once upon a time there was", ASKED)[0].outputs[0].token_ids


def trainer_and_engine(group, rank, size, *, device, dtype):
    """The last rank has an engine; all others train, and send what they have."""
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    [file] = packaged_model().glob("*.safetensors")
    state = {
        name: tensor.to(where, getattr(torch, dtype)) for name, tensor in load_file(file).items()
    }
    changed = {name: tensor.roll(1, 0) for name, tensor in state.items()}
    if rank < size - 1:
        send_weights(changed, group=group)
        send_weights(state, group=group)
        return []
    more = {"batch_invariant": True, "graphs": "lazy"} if device == "cuda" else {}
    found = []
    with LLM("story", device=where, dtype=dtype, num_blocks=64, **more) as llm:
        found.append(_answers(llm))
        llm.update_weights(receive_weights(group=group))
        found.append(_answers(llm))
        llm.update_weights(receive_weights(group=group))
        found.append(_answers(llm))
        llm.update_weights(changed)
        found.append(_answers(llm))
    return found


def other_names(group, rank, size):
    """Ranks that disagree about what is sent, and one that receives."""
    if rank == 2:
        return [name for name, _ in receive_weights(group=group)]
    send_weights({"a" if rank == 0 else "b": torch.zeros(2)}, group=group)
    return None


def no_weights_of_it(group, rank, size):
    """An engine that is sent what it has no room for."""
    if rank == 0:
        send_weights({"a": torch.zeros(2)}, group=group)
        return ""
    with LLM("story", device="cpu", dtype="float32", num_blocks=64) as llm:
        before = _answers(llm)
        try:
            llm.update_weights(receive_weights(group=group))
        except ValueError as error:
            assert _answers(llm) == before
            return str(error)
    return "it was taken"


def what_comes(group, rank, size):
    """The last rank receives, all others send; return what came beside what was sent."""
    draw = torch.Generator().manual_seed(3)
    sent = {
        "a": torch.randn(3, 5, generator=draw),
        "b": torch.randn(7, generator=draw).bfloat16(),
        "c": torch.arange(4).view(2, 2).t(),
        "d": torch.zeros(0, 4),
    }
    if rank < size - 1:
        send_weights(sent.items(), group=group)
        send_weights({"a": sent["a"]}, group=group, dtype=torch.float16)
        return []
    came = dict(receive_weights(group=group))
    [(name, narrow)] = receive_weights(group=group)
    places = {tensor.data_ptr() for tensor in came.values() if tensor.numel()}
    return [
        list(came) == list(sent),
        all(came[key].dtype == sent[key].dtype for key in sent),
        all(torch.equal(came[key], sent[key]) for key in sent),
        len(places) == 3,
        name == "a" and torch.equal(narrow, sent["a"].half()),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_come_by_name_with_their_bits(ranks, size):
    assert ranks.run(what_comes, size)[-1] == [True] * 5


# Processes of one thread compile an engine's kernels anew.
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_engine_answers_by_what_a_trainer_has_sent(ranks, size):
    told = ranks.run(trainer_and_engine, size, device="cpu", dtype="float32")
    old, new, again, alone = told[-1]
    assert old == again
    assert new == alone
    assert old != new


def test_ranks_that_disagree_are_told(ranks):
    told = ranks.run(other_names, 3)
    assert (told[0], told[2]) == (None, ["a"])
    assert told[1]["error"][1].startswith("tensors must have the same names")


@pytest.mark.slow
def test_what_is_sent_is_checked_before_it_is_written(ranks):
    told = ranks.run(no_weights_of_it, 2)
    assert "must hold tensor" in told[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_a_gpu_answers_by_what_another_gpu_has_sent(tmp_path):
    started = Ranks(2, tmp_path, "nccl", PATIENCE_S)
    try:
        told = started.run(trainer_and_engine, 2, device="cuda", dtype="bfloat16")
    finally:
        started.close()
    old, new, again, alone = told[-1]
    assert (old, new) == (again, alone)
    assert old != new
