"""Layers that keep a state in steps: what a step does with slots before and behind it."""

from __future__ import annotations

import torch
from torch import nn

from tilewise.cache.spec import CacheSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence, StateMoves
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.steps.state_moves import FixedStates
from tilewise.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from tilewise.nn.short_conv import ShortConv, ShortConvConfig

VOCAB, WIDTH = 50, 16


class TinyRecurrent(nn.Module):
    """Two layers with states of two kinds, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            [
                GatedDeltaNet(WIDTH, GatedDeltaConfig(1, 2, 8, 8)),
                ShortConv(WIDTH, ShortConvConfig(WIDTH)),
            ]
        )
        for name, parameter in self.named_parameters():
            if name.endswith("conv"):
                nn.init.normal_(parameter)

    def spec(self) -> CacheSpec:
        states = tuple(
            (i, layer.config.state(torch.float32)) for i, layer in enumerate(self.layers)
        )
        return CacheSpec.of_layers(16, [], [], (), states)

    def forward(self, ids, positions, *, ctx, kv):
        assert kv == []
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            states = ctx.states
            x = x + layer.step(
                x, states.layers[i], slots=states.slots, starts=states.starts,
                cu_seqlens=ctx.cu_seqlens_q,
            )  # fmt: skip
        return x

    def compute_logits(self, hidden):
        return hidden @ self.embed_tokens.weight.T


def run(seq_id, tokens, start, slot):
    return ScheduledSequence(
        seq_id, tuple(tokens), start, list(range(12)), 1, SamplingParams(temperature=0.0),
        (0,), state_slot=slot,
    )  # fmt: skip


def close(logits, others):
    """Torch's products of other numbers of rows have other last bits."""
    torch.testing.assert_close(logits, others, rtol=1e-4, atol=1e-4)


class Watched(ModelRunner):
    """Keeps the logits of each step."""

    def forward(self, inputs):
        self.logits = super().forward(inputs)
        return self.logits


def test_restores_and_forks_come_before_a_step_and_saves_behind_it():
    model = TinyRecurrent()
    runner = Watched(model, KVStorage(model.spec(), 12, num_slots=4, num_checkpoints=2))
    tokens, other = (torch.randint(VOCAB, (150,)).tolist() for _ in range(2))

    def step(*runs, **moves):
        runner.submit(Batch(runs, states=StateMoves(**moves)))
        return runner.logits

    whole = step(run(0, tokens, 0, 3))[0]
    # A prompt in two parts beside another one; the first part ends behind a chunk's edge.
    step(run(1, tokens[:140], 0, 0), run(2, other, 0, 1), saves=((0, 1, 128),))
    close(step(run(1, tokens[140:], 140, 0))[0], whole)
    # Another sequence goes on from the checkpoint, in the step that brings it, beside a fork.
    rows = step(
        run(3, tokens[128:], 128, 3), run(4, other[:1], 150, 2),
        restores=((1, 3, 128),), forks=((1, 2),),
    )  # fmt: skip
    close(rows[0], whole)
    close(rows[1], step(run(2, other[:1], 150, 1))[0])


def test_a_part_of_a_step_has_the_moves_of_its_own_slots():
    moves = StateMoves(((1, 0, 64), (0, 2, 128)), ((3, 1),), ((0, 2, 64), (2, 3, 128)))
    batch = Batch((run(7, [1], 70, 0), run(8, [1], 130, 2), run(9, [1], 4, 1)), states=moves)
    part = batch.part(batch.sequences[:1])
    assert part.states == StateMoves(((1, 0, 64),), (), ((0, 2, 64),))
    assert batch.part(batch.sequences[1:]).states == StateMoves(
        ((0, 2, 128),), ((3, 1),), ((2, 3, 128),)
    )


def test_rows_that_a_step_does_not_run_write_no_slot():
    model = TinyRecurrent()
    states = FixedStates(KVStorage(model.spec(), 12, num_slots=4).states, 4)
    states.write(Batch((run(1, [1], 70, 3), run(2, [1], 4, 0), run(3, [1], 9, 2))), [0, 1, 2], 4)
    assert states.slots.tolist() == [3, 0, 2, -1]
    states.write(Batch((run(3, [1], 10, 2),)), [2], 4)
    assert states.slots.tolist() == [-1, -1, 2, -1]
