"""The virtual model with layers that keep a state, as slots and checkpoints of fingerprints.

A slot holds what a real one does: the state at the start of the open chunk, which is the
fingerprint of all tokens before it; a row for each token of the chunk; and a ring of the inputs of
a convolution. A run is right only if all that it reads is that of its own text. What the next step
makes a checkpoint of is spoilt when the step is submitted, so that one that an unfinished step
still reads shows. Slots change in the turn of steps, as on a device.
"""

from __future__ import annotations

from array import array
from typing import Any

from tests.engine.beam_model import BeamModel
from tests.engine.simulator import Step, VirtualStore, fingerprints
from tilewise.cache.contents import Content
from tilewise.engine.batch import BROKEN, Batch, SampledToken

TAPS = 3  # of the convolution: two tokens before its own


class Slot:
    """The state of one sequence.

    Attributes:
        state: the position of the open chunk and the fingerprint of all tokens before it.
        rows: fingerprints of the open chunk's tokens, by their place in it.
        ring: the last tokens' fingerprints, by position modulo its length.
    """

    def __init__(self, chunk: int) -> None:
        self.state: Any = None
        self.rows: list[Any] = [None] * chunk
        self.ring: list[Any] = [None] * (chunk + TAPS - 1)


def state_at(prefix: list[int], position: int) -> tuple[int, int]:
    """Return the state behind the first tokens of a text."""
    return position, prefix[position - 1] if position else 0


def logprob_after(fingerprint: int, token_id: int) -> float:
    """Return the log-probability of a token behind the text of a fingerprint."""
    return -(abs(hash((fingerprint, token_id, 1))) % 9973) / 997


class StateModel(BeamModel):
    """A virtual model of blocks and of states."""

    def __init__(self, scheduler, damages=lambda: False) -> None:
        super().__init__(scheduler, damages)
        self.states = scheduler.tables.states
        self.chunk, self.group = self.states.limits.chunk, self.states.group
        self.state_slots = [Slot(self.chunk) for _ in range(self.states.num_slots)]
        self.checkpoints: list[Any] = [None] * self.states.limits.num_checkpoints
        self.state_host: list[Any] = []
        if self.rooms:
            self.state_host = [None] * self.rooms[self.group].allocator.num_blocks

    def submit(self, batch: Batch) -> None:
        """Begin a step."""
        super().submit(batch)
        moves, slots = batch.states, [run.state_slot for run in batch.sequences]
        assert len(set(slots)) == len(slots), "one writer per slot"
        for run in batch.sequences:
            seq = self.scheduler.roster.live[run.seq_id]
            assert run.state_slot == self.states.slot_of(seq), "a sequence writes its own slot"
        targets = [each[1] for each in (*moves.restores, *moves.forks)]
        assert len(set(targets)) == len(targets), "a slot is filled once"
        assert not {source for source, _ in moves.forks} & set(targets), "a source is no target"
        if self.rooms:
            self._check_transfers(self.group)
        part = self.unfinished[-1].of_group(self.group)
        still_read = {
            block for s in self.unfinished for block, _ in s.of_group(self.group).swap_out
        }
        for checkpoint in (*(each[1] for each in moves.saves), *(b for _, b in part.swap_in)):
            if checkpoint not in still_read:
                self.checkpoints[checkpoint] = None
        for _, slot in part.swap_out:
            self.state_host[slot] = None

    def begin_states(self, step: Step) -> None:
        """Fill slots and checkpoints."""
        part = step.of_group(self.group)
        for checkpoint, slot in part.swap_out:
            self.state_host[slot] = self.checkpoints[checkpoint]
        for slot, checkpoint in part.swap_in:
            self.checkpoints[checkpoint] = self.state_host[slot]
        for checkpoint, number, position in step.batch.states.restores:
            slot = self.state_slots[number] = Slot(self.chunk)
            held = self.checkpoints[checkpoint]
            if held is not None:
                slot.state, taps = held
                for i, value in enumerate(taps):
                    place = position - len(taps) + i
                    if place >= 0:
                        slot.ring[place % len(slot.ring)] = value
        for source, target in step.batch.states.forks:
            copy, slot = Slot(self.chunk), self.state_slots[source]
            copy.state, copy.rows, copy.ring = slot.state, list(slot.rows), list(slot.ring)
            self.state_slots[target] = copy

    def end_states(self, step: Step, prefixes: list[list[int]]) -> None:
        """Run the recurrence."""
        for run, prefix in zip(step.batch.sequences, prefixes, strict=True):
            slot = self.state_slots[run.state_slot]
            if run.seq_id not in step.spoilt:
                self._check(run, slot, prefix)
            if run.start == 0:
                slot.state = state_at(prefix, 0)
            for position in range(run.start, len(prefix)):
                slot.rows[position % self.chunk] = prefix[position]
                slot.ring[position % len(slot.ring)] = prefix[position]
                if (position + 1) % self.chunk == 0:
                    slot.state = state_at(prefix, position + 1)
        for number, checkpoint, position in step.batch.states.saves:
            slot, taps = self.state_slots[number], range(position - TAPS + 1, position)
            values = [slot.ring[p % len(slot.ring)] if p >= 0 else None for p in taps]
            self.checkpoints[checkpoint] = slot.state, tuple(values)

    def _check(self, run, slot: Slot, prefix: list[int]) -> None:
        """Refuse a run that reads anything but its own text."""
        start = run.start
        if start == 0:
            return
        first = start // self.chunk * self.chunk
        what = f"sequence {run.seq_id} at {start} in slot {run.state_slot}"
        assert slot.state == state_at(prefix, first), f"{what} reads a wrong state"
        for position in range(first, start):
            row = slot.rows[position % self.chunk]
            assert row == prefix[position], f"{what} reads a wrong row of its chunk"
        for position in range(max(start - TAPS + 1, 0), start):
            tap = slot.ring[position % len(slot.ring)]
            assert tap == prefix[position], f"{what} convolves a wrong token"

    def _read_and_draw(self, run, tables, prefix: list[int]) -> list[SampledToken]:
        """Give every drawn token its log-probability, which beams have already."""
        drawn = super()._read_and_draw(run, tables, prefix)
        first = len(prefix) - 1 - run.num_drafts
        return [
            token
            if token is BROKEN or token.logprob is not None
            else token._replace(
                logprob=logprob_after(prefix[first + i * (run.num_drafts > 0)], token.token_id)
            )
            for i, token in enumerate(drawn)
        ]

    def drop(self, batch: Batch) -> None:
        """Let a step fail: what it should have filled is spoilt for the steps behind it."""
        place = next(i for i, step in enumerate(self.unfinished) if step.batch is batch)
        later = self.unfinished[place + 1 :]
        spoilt = {each[1] for each in (*batch.states.restores, *batch.states.forks)}
        lost = {checkpoint for _, checkpoint in batch.of_group(self.group).swap_in}
        slots = {slot for _, slot in batch.of_group(self.group).swap_out}
        super().drop(batch)
        for step in later:
            part = step.of_group(self.group)
            slots |= {slot for checkpoint, slot in part.swap_out if checkpoint in lost}
            lost |= {checkpoint for slot, checkpoint in part.swap_in if slot in slots}
            for checkpoint, slot, _ in step.batch.states.restores:
                (spoilt.add if checkpoint in lost else spoilt.discard)(slot)
            spoilt |= {copy for source, copy in step.batch.states.forks if source in spoilt}
            for run in step.batch.sequences:
                if run.start == 0:
                    spoilt.discard(run.state_slot)
                elif run.state_slot in spoilt:
                    step.spoilt.add(run.seq_id)

    def lose(self) -> None:
        """Lose all unfinished steps, of which some have run as far as any layer."""
        for step in self.unfinished:
            moves = step.batch.states
            for number in (each[1] for each in (*moves.restores, *moves.forks)):
                self.state_slots[number] = Slot(self.chunk)
            for run in step.batch.sequences:
                slot, end = self.state_slots[run.state_slot], run.start + len(run.token_ids)
                if run.start // self.chunk != end // self.chunk:
                    slot.state, slot.rows = None, [None] * self.chunk
                for position in range(run.start, end):
                    slot.rows[position % self.chunk] = None
                    slot.ring[position % len(slot.ring)] = None
        self.unfinished.clear()


class StateStore(VirtualStore):
    """A directory of checkpoints."""

    def save(self, content: Content, slot: int) -> None:
        """Keep a slot, which must hold just this."""
        tokens = array("i")
        tokens.frombytes(content.tokens)
        prefix = fingerprints(list(tokens), content.salt)
        state, taps = self.model.state_host[slot]
        assert state == state_at(prefix, len(tokens)), "a cold checkpoint is that of its text"
        last = tuple(prefix[max(len(prefix) - TAPS + 1, 0) :])
        assert taps[len(taps) - len(last) :] == last, "and so are the tokens before it"
        if self.chance() < 0.9:
            self.files[content.digest] = content, [state, taps]

    def load(self, content: Content, slot: int) -> bool:
        """Fill a slot; a torn file leaves it spoilt."""
        self.model.state_host[slot] = None
        kept, values = self.files[content.digest]
        if kept != content or self.chance() < 0.3:
            return False
        self.model.state_host[slot] = tuple(values)
        self.num_hits += 1
        return True
