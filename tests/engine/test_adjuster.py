"""The counts that stay on the device are those of the texts, whoever comes, leaves and returns."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tilewise.engine.batch import PENDING, Asked, Batch, SampledToken, ScheduledSequence
from tilewise.engine.request import NO_TOKEN, Request, SamplingParams
from tilewise.engine.steps.adjuster import FIRST_SLOTS, Adjuster, put_errors
from tilewise.reference.adjust import penalised

VOCAB = 70
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}


def run_of(seq_id, request, tokens, num_prompt, *, pending=False):
    """A decoding sequence whose last token the host knows, or does not."""
    start = len(tokens) - 1 + pending
    last = PENDING if pending else tokens[-1]
    asked = Asked.of(request, tokens, num_prompt)
    count = len(tokens) - num_prompt + pending
    return ScheduledSequence(
        seq_id, (last,), start, (0,), 1, request.sampling, (0,), count, 0, asked
    )


def penalised_row(row, tokens, num_prompt, sampling):
    output = tokens[num_prompt:]
    return [
        penalised(
            x,
            in_prompt=token in tokens[:num_prompt],
            count=output.count(token),
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
        )
        for token, x in enumerate(row.double().tolist())
    ]


@pytest.mark.parametrize("seed", range(4))
def test_counts_follow_texts_with_tokens_that_only_the_device_knows(seed):
    draw = random.Random(seed)
    adjuster = Adjuster(torch.device("cpu"))
    request = Request("a", [1], SamplingParams(**PENALTIES))
    texts: dict[int, tuple[list[int], int]] = {}
    was_pending: dict[int, int] = {}
    next_id, left = 0, []
    for _ in range(60):
        while len(texts) < draw.randrange(1, 3 * FIRST_SLOTS):
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 30))]
            texts[next_id], next_id = (prompt, len(prompt)), next_id + 1
        device = torch.zeros(200, dtype=torch.int64)
        runs, rows, whole = [], [], []
        chosen = draw.sample(sorted(texts), draw.randrange(1, len(texts) + 1))
        for place, seq_id in enumerate(chosen):
            tokens, num_prompt = texts[seq_id]
            if seq_id in was_pending:  # what it was is known by now
                tokens.append(was_pending.pop(seq_id))
            unknown = draw.random() < 0.5 and len(tokens) > 0
            if unknown:
                was_pending[seq_id] = draw.randrange(VOCAB)
                device[place] = was_pending[seq_id]
            else:
                tokens.append(draw.randrange(VOCAB))
            runs.append(run_of(seq_id, request, tokens, num_prompt, pending=unknown))
            rows.append(place)
            extra = [was_pending[seq_id]] if unknown else []
            whole.append(([*tokens, *extra], num_prompt))
        batch = Batch(tuple(runs), left=tuple(left))
        logits = torch.randn(len(runs), VOCAB)
        before = logits.clone()
        assert adjuster.follow(batch, batch.asks)
        assert adjuster.adjust(logits, runs, rows, tokens=device, token_rows=rows) == {}
        for row, (tokens, num_prompt) in enumerate(whole):
            wanted = penalised_row(before[row], tokens, num_prompt, request.sampling)
            torch.testing.assert_close(logits[row].double(), torch.tensor(wanted).double())
        left = draw.sample(sorted(texts), draw.randrange(len(texts) // 2 + 1))
        for seq_id in left:  # ended, or preempted: as if it were new when it comes back
            if draw.random() < 0.6:
                del texts[seq_id]
                was_pending.pop(seq_id, None)
            elif seq_id in was_pending:
                texts[seq_id][0].append(was_pending.pop(seq_id))


def test_a_batch_without_such_rows_needs_nothing():
    adjuster = Adjuster(torch.device("cpu"))
    plain = ScheduledSequence(0, (1,), 0, (0,), 1, SamplingParams(), (0,))
    assert not Batch((plain,)).asks
    assert not adjuster.follow(Batch((plain,)), False)
    scored = Request("a", [1, 2], SamplingParams(prompt_logprobs=1))
    run = run_of(1, scored, [1, 2], 2)
    assert Batch((run,)).asks
    assert not adjuster.follow(Batch((run,)), True)
    chunk = run_of(2, Request("a", [1], SamplingParams(**PENALTIES)), [1], 1)._replace(
        num_samples=0
    )
    assert not adjuster.follow(Batch((chunk,)), True)
    assert adjuster.counts is None


def test_bad_words_look_at_the_output_only():
    sampling = SamplingParams(bad_words=["stands for ids"])
    request = Request("a", [1], sampling, bad_word_ids=((5, 6), (7,), (1, 2, 3)))
    adjuster = Adjuster(torch.device("cpu"))

    def forbidden(seq_id, tokens, num_prompt):
        run = run_of(seq_id, request, tokens, num_prompt)
        logits = torch.zeros(1, VOCAB)
        adjuster.follow(Batch((run,)), True)
        assert adjuster.adjust(logits, [run], [0]) == {}
        return set(torch.nonzero(logits[0] == -math.inf)[:, 0].tolist())

    assert forbidden(1, [5], 1) == {7}
    assert forbidden(2, [9, 5], 1) == {7, 6}
    assert forbidden(3, [1, 2], 1) == {7}
    assert forbidden(4, [0, 1, 2], 1) == {7, 3}


@pytest.mark.parametrize("token", [0, 31, 32, 63, 69])
def test_every_token_has_its_bit(token):
    adjuster = Adjuster(torch.device("cpu"))
    request = Request("a", [1], SamplingParams(allowed_token_ids=[token]))
    run = run_of(1, request, [3], 1)
    logits = torch.zeros(2, VOCAB)
    adjuster.follow(Batch((run,)), True)
    adjuster.adjust(logits, [run], [1])
    assert np.flatnonzero(logits[1].numpy() == 0).tolist() == [token]
    assert not logits[0].any()


def test_errors_take_the_place_of_all_samples():
    samples = [[SampledToken(3)], [SampledToken(4), SampledToken(5)]]
    error = ValueError("no")
    put_errors(samples, {1: error})
    assert samples == [[SampledToken(3)], [SampledToken(NO_TOKEN, error=error)] * 2]
