"""What is told to a worker is what the scheduler said: batches, samples, errors, frames."""

from __future__ import annotations

import json
import socket
import struct
from types import SimpleNamespace

import pytest

from tilewise.engine.batch import (
    PENDING,
    Asked,
    Batch,
    LaterRuns,
    PlainDraws,
    SampledToken,
    ScheduledSequence,
    StateMoves,
)
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.tensor_parallel.wire import (
    BatchReader,
    BatchWriter,
    FrameReader,
    error_of,
    named,
    read_samples,
    send,
    write_samples,
)


class _Wire:
    """A writer and a reader with JSON between them."""

    def __init__(self):
        self.made = []
        self.writer = BatchWriter()
        self.reader = BatchReader(lambda outputs: self.made.append(outputs) or object)

    def pass_on(self, batch: Batch) -> Batch:
        self.message = self.writer.write(batch)
        return self.reader.read(json.loads(json.dumps(self.message)))


def _run(seq_id=3, tokens=(1, 2), start=0, blocks=(7, 9), **fields):
    fields = {"num_samples": 1, "sampling": SamplingParams(temperature=0.5), **fields}
    return ScheduledSequence(seq_id, tokens, start, list(blocks), **fields)


def _same(got: ScheduledSequence, want: ScheduledSequence) -> None:
    for name in want._fields:
        if name not in ("sampling", "asked", "known", "block_ids"):
            assert getattr(got, name) == getattr(want, name), name
    assert got.block_ids == want.block_ids
    for name in ("temperature", "top_p", "top_k", "min_p", "logprobs", "greedy"):
        assert getattr(got.sampling, name) == getattr(want.sampling, name)


def test_a_step_arrives_as_it_was():
    wire = _Wire()
    others = {"other_copies": (((8, 9),), ()), "other_moves": ((((1, 0),), ((2, 3),)), ((), ()))}
    states = StateMoves(((3, 1, 64),), ((1, 2),), ((0, 5, 128), (1, 4, 64)))
    run = _run(seeds=(2**63 - 1,), state_slot=2)
    batch = Batch((run,), ((1, 2),), (5,), ((3, 4),), ((6, 7),), states=states, **others)
    got = wire.pass_on(batch)
    _same(got.sequences[0], batch.sequences[0])
    assert (got.block_copies, got.left) == (batch.block_copies, batch.left)
    assert (got.swap_out, got.swap_in) == (batch.swap_out, batch.swap_in)
    assert (got.other_copies, got.other_moves) == (batch.other_copies, batch.other_moves)
    assert got.states == states


def test_only_what_is_new_travels():
    wire, sampling = _Wire(), SamplingParams(temperature=0.5)
    first = _run(blocks=range(100), sampling=sampling, seeds=(4,))
    wire.pass_on(Batch((first,)))
    then = first._replace(
        token_ids=(5,), start=2, block_ids=[*range(100), 777], first_new_block=100
    )
    got = wire.pass_on(Batch((then,)))
    _same(got.sequences[0], then)
    assert len(json.dumps(wire.message)) < 100
    same = then._replace(start=3, first_new_block=101)
    _same(wire.pass_on(Batch((same,))).sequences[0], same)
    assert len(json.dumps(wire.message)) < 100


def test_tables_of_every_group_travel_and_only_what_is_new_of_them():
    wire = _Wire()
    first = _run(others=(([4, 5], 0), ([8], 0)))
    got = wire.pass_on(Batch((first,), other_copies=(((1, 2),), ())))
    _same(got.sequences[0], first)
    assert got.other_copies == (((1, 2),), ())
    then = first._replace(first_new_block=2, others=(([4, 5, 6], 2), ([8, 9], 0)))
    _same(wire.pass_on(Batch((then,))).sequences[0], then)
    assert wire.message[0][0][-2] == [(2, [6]), (0, [8, 9])]
    wire.pass_on(Batch((_run(seq_id=4, others=(([], 0), ([], 0))),), left=(3,)))
    back = first._replace(others=(([1, 2], 1), ([3], 1)))  # it was told a table that has gone
    got = wire.pass_on(Batch((back,))).sequences[0]
    assert got.others == (([1, 2], 0), ([3], 0))


def test_after_a_reset_all_is_told_again():
    wire, run = _Wire(), _run(first_new_block=2, start=2)
    wire.pass_on(Batch((run._replace(first_new_block=0),)))
    wire.writer.reset()
    wire.reader.reset()
    got = wire.pass_on(Batch((run,))).sequences[0]
    assert got.first_new_block == 0
    assert got.block_ids == [7, 9]


def _plain_step(count=40):
    """Return the first step of sequences that go on, and their tables."""
    tables = [[10 * i, 10 * i + 1] for i in range(count)]
    sampling = SamplingParams(temperature=0.5)
    runs = tuple(
        ScheduledSequence(i, (i,), 7 + i, table, 1, sampling, (2**40 + i,), 3, 2)
        for i, table in enumerate(tables)
    )
    return Batch(runs, is_plain=True), tables


def _assert_same_step(got: Batch, want: Batch) -> None:
    assert got.is_plain == want.is_plain
    for mine, theirs in zip(got.sequences, want.sequences, strict=True):
        _same(mine, theirs)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_of_a_step_that_goes_on_only_new_blocks_travel(is_drawn):
    wire, (first, tables) = _Wire(), _plain_step()
    made = wire.pass_on(first)
    for number in range(1, 9):
        told = []
        if number % 3 == 0:
            told = [(5, len(tables[5])), (8, len(tables[8]))]
            tables[5].append(500 + number)
            tables[8] += [800 + number, 900 + number]
        tokens = None if is_drawn else [number * 100 + i for i in range(len(tables))]
        batch = Batch(LaterRuns(first.sequences, number, told, tokens), is_plain=True)
        got = wire.pass_on(batch)
        assert isinstance(got.sequences, LaterRuns)
        assert got.sequences.first is made.sequences
        assert got.sequences.told == told
        _assert_same_step(got, batch)
        if is_drawn:
            assert got.sequences[3].token_ids == (PENDING,)
            assert len(json.dumps(wire.message)) < 100


@pytest.mark.parametrize(
    "between", ["left", "copy", "state", "gap", "reset", "other step", "not plain"]
)
def test_a_step_that_does_not_go_on_is_told_whole(between):
    wire, (first, tables) = _Wire(), _plain_step(4)
    wire.pass_on(first)
    wire.pass_on(Batch(LaterRuns(first.sequences, 1, [], None), is_plain=True))
    number, more = 2, {"is_plain": True}
    if between == "left":
        more["left"] = (77,)
    elif between == "copy":
        more["block_copies"] = ((1, 2),)
    elif between == "state":
        more["states"] = StateMoves(saves=((0, 5, 128),))
    elif between == "gap":
        number = 3
    elif between == "reset":
        wire.writer.reset()
        wire.reader.reset()
    elif between == "other step":
        wire.pass_on(Batch((_run(seq_id=1000),)))
    else:
        more["is_plain"] = False
    batch = Batch(LaterRuns(first.sequences, number, [], None), **more)
    got = wire.pass_on(batch)
    assert wire.message[0] != "later"
    assert (got.left, got.block_copies) == (batch.left, batch.block_copies)
    assert got.states == batch.states
    if between != "reset":  # where all tables are told anew
        _assert_same_step(got, batch)
    # What follows is counted from there.
    tables[2].append(99)
    later = Batch(LaterRuns(first.sequences, number + 1, [(2, 2)], None), is_plain=True)
    got = wire.pass_on(later)
    assert (wire.message[0] == "later") == (between != "not plain")
    if between not in ("reset", "not plain"):
        assert got.sequences.number == 1
    _assert_same_step(got, later)


def test_no_step_goes_on_with_one_that_was_not_read():
    """A step is sent before the answer to the one before: its rows must not be those of an older.

    Their slots would be written anew, with other tokens.
    """
    wire, (first, _) = _Wire(), _plain_step(4)
    wire.pass_on(first)
    second, _ = _plain_step(3)
    message = json.loads(json.dumps(wire.writer.write(second)))
    message[0][1][10]["sampling"] = {"temperature": -1.0}
    with pytest.raises(ValueError, match="temperature"):
        wire.reader.read(message)
    later = wire.writer.write(Batch(LaterRuns(second.sequences, 1, [], None), is_plain=True))
    assert later[0] == "later"
    with pytest.raises(RuntimeError, match="must go on with one that was read"):
        wire.reader.read(json.loads(json.dumps(later)))


def test_who_left_and_comes_back_is_new():
    wire, run = _Wire(), _run()
    wire.pass_on(Batch((run,)))
    other = run._replace(block_ids=[1])
    wire.pass_on(Batch((_run(seq_id=4),), left=(3,)))
    assert wire.pass_on(Batch((other,))).sequences[0].block_ids == [1]


def test_options_travel():
    wire, tokens = _Wire(), [1, 2, 3]
    sampling = SamplingParams(
        logit_bias={5: -1.5}, allowed_token_ids=[4, 5], presence_penalty=0.5, min_tokens=2,
        logprobs=3, prompt_logprobs=1, structured=StructuredOutputs(json={"type": "object"}),
    )  # fmt: skip
    asked = Asked(True, tokens, 3, frozenset({-2, 8}), ((1, 2), (3,)), lambda: None, "mean")
    run = _run(sampling=sampling, asked=asked, num_drafts=2, draft_parents=(0, 0))
    got = wire.pass_on(Batch((run,))).sequences[0]
    assert got.sampling.logit_bias == {5: -1.5}
    assert got.sampling.allowed_token_ids == [4, 5]
    assert (got.sampling.logprobs, got.sampling.prompt_logprobs) == (3, 1)
    assert got.sampling.structured == sampling.structured
    assert wire.made == [sampling.structured]
    assert got.asked.pooling == "mean"
    assert got.draft_parents == (0, 0)
    assert got.asked[:5] == (True, [1, 2, 3], 3, frozenset({-2, 8}), ((1, 2), (3,)))
    tokens.append(9)
    got = wire.pass_on(Batch((run._replace(first_new_block=2),))).sequences[0]
    assert got.asked.token_ids == [1, 2, 3, 9]
    chosen = asked._replace(token_ids=[1, 2, 4, 4])  # a beam that goes on from another
    got = wire.pass_on(Batch((run._replace(asked=chosen, is_chosen=True),))).sequences[0]
    assert got.asked.token_ids == [1, 2, 4, 4]


def test_a_function_is_refused_and_not_left_out():
    run = _run(sampling=SamplingParams(logits_processors=[lambda prompt, output, row: row]))
    writer = BatchWriter()
    for _ in range(2):  # nor is it known the second time
        with pytest.raises(ValueError, match="logits_processors must be None where other"):
            writer.write(Batch((run,)))


def test_samples_arrive_as_they_were():
    samples = [
        [SampledToken(4), SampledToken(4, prompt_state=(0.1, -2.5))],
        [],
        [SampledToken(5, -0.1, ((5, -0.1), (6, float("-inf"))), ((1, -2.5, ((1, -2.5),)),))],
    ]
    assert read_samples(json.loads(json.dumps(write_samples(samples)))) == samples


def test_tokens_of_a_plain_step_arrive_as_ids():
    got = read_samples(json.loads(json.dumps(write_samples(PlainDraws([4, 0, 7])))))
    assert isinstance(got, PlainDraws)
    assert got.ids == [4, 0, 7]


def test_errors_keep_their_type_and_text():
    token = SampledToken(-2, error=ValueError("no grammar"))
    [[got]] = read_samples(write_samples([[token]]))
    assert isinstance(got.error, ValueError)
    assert str(got.error) == "no grammar"
    strange = error_of(*named(KeyError("x")))
    assert type(strange) is RuntimeError
    assert "KeyError" in str(strange)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_frames_come_in_any_pieces(step):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (["a", 1], ["b", [2.5, None]], []):
            send(ours, message)
        data, reader, got = theirs.recv(1 << 16), FrameReader(), []
    for i in range(0, len(data), step):
        got += reader.feed(data[i : i + step])
    assert got == [["a", 1], ["b", [2.5, None]], []]


def test_a_frame_that_is_no_data_is_an_error():
    body = b"\x80\x04K\x01."  # a pickle
    with pytest.raises(ValueError, match="decode|JSON|Expecting"):
        FrameReader().feed(struct.pack("<Q", len(body)) + body)


def test_adapters_travel_by_their_numbers():
    here, there = SimpleNamespace(number=4), SimpleNamespace(number=4)
    wire = _Wire()
    wire.reader = BatchReader(lambda outputs: object, {4: there})
    run = _run(adapter=here)
    assert wire.pass_on(Batch((run, _run(5)))).sequences[0].adapter is there
    later = run._replace(token_ids=(PENDING,), start=2, first_new_block=2)
    got = wire.pass_on(Batch((later,))).sequences[0]
    assert got.adapter is there
    assert "adapter" not in wire.message[0][0][10]
    assert wire.pass_on(Batch((_run(5),))).sequences[0].adapter is None


def test_every_field_of_a_step_travels():
    # `known` is read by draft models only, `token_type_ids` by encoders only, which other processes
    # do not have.
    told = {
        "seq_id", "token_ids", "start", "block_ids", "num_samples", "sampling", "seeds",
        "num_generated", "first_new_block", "asked", "is_chosen", "num_drafts", "known",
        "draft_parents", "others", "adapter", "state_slot",
    }  # fmt: skip
    assert set(ScheduledSequence._fields) == told
    assert set(Batch.__slots__) == {
        "sequences", "block_copies", "left", "swap_out", "swap_in", "other_copies",
        "other_moves", "is_plain", "states",
    }  # fmt: skip
    assert set(Asked._fields) == {
        "adjusts", "token_ids", "num_prompt_tokens", "end_ids", "bad_word_ids", "new_matcher",
        "pooling", "token_type_ids",
    }  # fmt: skip
    assert set(SampledToken._fields) == {
        "token_id", "logprob", "top_logprobs", "prompt_logprobs", "error",
        "prompt_state",
    }  # fmt: skip
