"""Slots and checkpoints of states: their sizes, and what is copied between them."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.cache.spec import STATE_CHUNK, CacheSpec, KVSpec, StateSpec
from tilewise.cache.states import StateStorage, checkpoint_bytes
from tilewise.cache.storage import KVStorage
from tilewise.kernels.spec import CHUNK, RecurrentStates

DELTA = StateSpec(48, 4, 2, 1, 16, 16, dtype=torch.bfloat16)
KIMI = StateSpec(48, 3, 2, 2, 16, 8, by_channel=True)
MAMBA = StateSpec(48, 4, 2, 1, 16, 8, is_delta=False)
CONVOLUTION = StateSpec(24, 3, dtype=torch.bfloat16)
SPECS = ((0, DELTA), (1, CONVOLUTION), (3, DELTA), (4, KIMI))


def test_a_chunk_is_that_of_the_kernels():
    assert STATE_CHUNK == CHUNK


@pytest.mark.parametrize("keeps", ["updates", "tokens"])
@pytest.mark.parametrize("spec", [DELTA, KIMI, MAMBA], ids=["delta", "kimi", "mamba"])
def test_a_slot_has_the_tensors_that_the_ops_read(spec, keeps):
    made = ops.recurrent_states(
        3, spec.num_heads, spec.key_dim, spec.value_dim, num_key_heads=spec.num_key_heads,
        by_channel=spec.by_channel, is_delta=spec.is_delta, dtype=spec.dtype, keeps=keeps,
    )  # fmt: skip
    ours = spec.recurrence(keeps_tokens=keeps == "tokens")
    theirs = [(tuple(x.shape[1:]), x.dtype) for x in made if x is not None]
    assert ours == theirs
    total = sum(x[0].numel() * x.element_size() for x in made if x is not None)
    rows = STATE_CHUNK + spec.conv_width - 1
    total += rows * spec.conv_channels * spec.dtype.itemsize
    assert spec.slot_bytes(keeps_tokens=keeps == "tokens") == total


def fill(storage: StateStorage) -> None:
    for stack in storage._stacks:
        for tensor in (*stack.recurrence, stack.convolution):
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape))


def test_a_checkpoint_has_the_state_and_the_tokens_before_its_position():
    storage = StateStorage(SPECS, 4, 3)
    fill(storage)
    assert storage.checkpoints.shape == (3, checkpoint_bytes(SPECS))
    before = {
        layer: (slots.recurrence and slots.recurrence[0][2].clone(), slots.convolution[2].clone())
        for layer, slots in storage.layers.items()
    }
    storage.save([(2, 1, 128), (0, 2, 64)])
    fill(storage)
    storage.restore([(1, 3, 128)])
    for layer, spec in SPECS:
        slots, (state, convolution) = storage.layers[layer], before[layer]
        if state is not None:
            assert torch.equal(slots.recurrence[0][3], state)
        rows = STATE_CHUNK + spec.conv_width - 1
        for position in range(128 - spec.conv_width + 1, 128):
            assert torch.equal(slots.convolution[3][position % rows], convolution[position % rows])


def test_a_fork_has_all_of_a_slot():
    storage = StateStorage(SPECS, 4, 0)
    fill(storage)
    storage.fork([(0, 3), (2, 1)])
    for slots in storage.layers.values():
        for tensor in (*(slots.recurrence or ()), slots.convolution):
            if tensor is not None:
                assert torch.equal(tensor[0], tensor[3])
                assert torch.equal(tensor[2], tensor[1])


def test_a_restored_sequence_goes_on_with_the_bits_of_one_that_never_stopped():
    """With the ops themselves: 70 tokens, a checkpoint at 64, three taps and a state back."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    storage = StateStorage([(0, StateSpec(16, 4, 2, 2, 8, 8))], 3, 1)
    slots, weight = storage.layers[0], normal(16, 4)
    x, (q, k, v), g = normal(100, 16), normal(3, 100, 2, 8), -normal(100, 2).abs()
    beta = torch.rand(100, 2, generator=generator)

    def step(first, end, slot):
        edges = torch.tensor([0, end - first], dtype=torch.int32)
        places = {"slots": torch.tensor([slot]), "starts": torch.tensor([first])}
        rows = (part[first:end] for part in (q, k, v, g, beta))
        return (
            ops.causal_conv1d_step(
                x[first:end], weight, None, slots.convolution, cu_seqlens=edges, **places
            ),
            ops.gated_delta_step(
                *rows, RecurrentStates(*slots.recurrence), cu_seqlens=edges, **places
            ),
        )

    step(0, 70, 0)
    storage.save([(0, 0, 64)])
    true = step(70, 100, 0)
    storage.restore([(0, 2, 64)])
    step(64, 66, 2)
    storage.fork([(2, 1)])
    step(66, 70, 2)  # taken back: another six tokens were read
    for slot in (1, 2):
        again = [step(66, 70, slot), step(70, 100, slot)]
        for whole, part in zip(true, again[1], strict=True):
            assert torch.equal(whole, part)


def test_a_model_may_have_states_alone_or_beside_keys():
    spec = CacheSpec.of_layers(16, [KVSpec(1, 8, 8, torch.float32)], [None], (), SPECS)
    assert not spec.is_plain
    storage = KVStorage(spec, 4, num_slots=2, num_checkpoints=3)
    assert storage.states is not None
    assert len(storage.layers) == 1
    assert storage.num_bytes == 4 * spec.bytes_per_block + storage.states.num_bytes
    alone = CacheSpec.of_layers(16, [], [], (), SPECS)
    assert alone.bytes_per_token == 0
    assert KVStorage(alone, 4, num_slots=2).layers == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "num_heads must be at least 1 or conv_width at least 2, got 0 and 1"),
        ({"num_heads": 2}, ValueError, "key_dim must be at least 1, got 0"),
        ({"conv_width": 4}, ValueError, "conv_channels must be at least 1, got 0"),
        (
            {"conv_width": 4, "conv_channels": 8, "dtype": torch.int8},
            TypeError,
            "dtype of a state's tokens must be float32, .* got torch.int8",
        ),
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        StateSpec(**arguments)


@pytest.mark.parametrize(
    ("counts", "message"),
    [((0, 1), "num_slots must be at least 1"), ((1, -1), "num_checkpoints must be at least 0")],
)
def test_what_is_no_number_of_slots_is_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        StateStorage(SPECS, *counts)
