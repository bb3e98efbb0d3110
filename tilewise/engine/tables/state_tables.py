"""Which slot has a sequence's state, and which checkpoints of states are kept. No torch.

A layer with a state remembers a whole text in one slot, so nothing of it is shared as blocks are.
Every sequence that runs has a slot, from its admission until it loses its blocks. A slot changes in
place: it knows the state at the start of the sequence's open chunk, and the chunk's tokens, so that
tokens of that chunk are taken back by a smaller start, and others not at all.

Checkpoints are to states what cached blocks are to keys: the prefix cache lists them, owners are
counted, the least recently used one is given away, to main memory if there is some. To the cache
they are one more group, of which a hit needs what its last block has: so a hit is as long as every
group of layers, and the states, have what it needs. A checkpoint stands at the end of a chunk that
is the end of a block, too. Kept are

    ends        the last such place of a prompt, when it has been read
    intervals   every `interval` tokens; runs of prompts end there
    branches    where a prompt leaves what the cache knows of its tokens; its run ends there
    tails       the last such place of a text that grows, in place of the tail before it, unless
                somebody has gone on from that

What a step does is told by its batch, see `StateMoves`. Steps run in turn, so a slot that becomes
free is another's at once: a step that still writes it was begun before. A checkpoint that is made
by a step is found when that has finished; one that is read has an owner until then.

A sequence that is preempted leaves its blocks and its tail to the prefix cache, and so to main
memory: it comes back by a hit. Forked sequences copy their parent's slot in the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import lcm

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.prefix import PrefixCache, PrefixNode
from tilewise.engine.batch import Batch, StateMoves
from tilewise.engine.request import Sequence

__all__ = ["StateLimits", "StateTables"]


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The sizes by which slots and checkpoints of states are kept.

    Attributes:
        num_checkpoints: checkpoints of the device; 0 keeps none, and no prefix is found.
        interval: tokens between two checkpoints that are kept of a long text.
        chunk: tokens of a chunk of the recurrence, from the start of a sequence.

    Raises:
        ValueError: a number is below 1, or that of checkpoints below 0.
    """

    num_checkpoints: int
    interval: int
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.num_checkpoints < 0:
            raise ValueError(f"num_checkpoints must be at least 0, got {self.num_checkpoints}")
        for name in ("interval", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True)
class _Held:
    """The slot and the checkpoints of a running sequence's state.

    Attributes:
        slot: the number of its slot.
        known: the position of its last checkpoint, saved or gone on from.
        reached: the number of its tokens that steps have been given so far, those taken back
            included.
        branch: a position at which a checkpoint is wanted; 0 for none.
        tail: the node and the checkpoint of its tail; None without one.
    """

    slot: int
    known: int = 0
    reached: int = 0
    branch: int = 0
    tail: tuple[PrefixNode, int] | None = None


@dataclass(frozen=True, slots=True)
class _Save:
    """A checkpoint of a state that a step makes.

    Attributes:
        seq: the sequence whose state it is.
        num_preemptions: the number of preemptions that the sequence had had when the step was
            built.
        slot: the slot that the state lies in.
        checkpoint: the number of the checkpoint that is written.
        position: the number of tokens of the sequence that the checkpoint covers.
        is_tail: True if the sequence's next checkpoint replaces it.
    """

    seq: Sequence
    num_preemptions: int
    slot: int
    checkpoint: int
    position: int
    is_tail: bool


class StateTables:
    """Gives running sequences slots of states, and keeps checkpoints of these states.

    Args:
        limits: the number, interval and chunk of checkpoints.
        num_slots: sequences that run at once.
        block_size: tokens of a block.
        group: the index of the checkpoints among the prefix cache's groups: that of the last one.

    Attributes:
        unit: the number of tokens, of whole chunks and blocks, between places where one may stand.
        interval: the interval of `limits`, rounded up to a multiple of `unit`.
        allocator: the allocator of checkpoints; None where none are kept.
        prefix: the prefix cache that lists the checkpoints; None without prefix caching. Set by the
            tables.
        num_saved, num_restored: checkpoints made, and gone on from, since the start.
    """

    def __init__(self, limits: StateLimits, num_slots: int, block_size: int, group: int) -> None:
        self.limits, self.num_slots, self.group = limits, num_slots, group
        self.block_size = block_size
        self.unit = lcm(limits.chunk, block_size)
        self.interval = -(-limits.interval // self.unit) * self.unit
        count = limits.num_checkpoints
        self.allocator = BlockAllocator(count) if count else None
        self.prefix: PrefixCache | None = None
        self.num_saved = self.num_restored = 0
        self._free = list(range(num_slots))[::-1]
        self._held: dict[Sequence, _Held] = {}
        self._unplaced: list[tuple[int, Sequence]] = []  # (slot of the parent, child)
        self._restores: list[tuple[int, int, int]] = []
        self._forks: list[tuple[int, int]] = []
        self._saves: list[_Save] = []
        # Of unfinished steps, the oldest first: checkpoints that they read, and those they make.
        self._reads: deque[list[int]] = deque()
        self._making: deque[list[_Save]] = deque()
        self._made: list[_Save] = []
        self._wanted: set[int] = set()  # checkpoints that no later tail replaces

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the fields of `SchedulerStats` on states, by name, each (in use, in all)."""
        num_found = 0 if self.prefix is None else len(self.prefix.nodes_at(self.group))
        return {
            "state_slots": (self.num_slots - len(self._free), self.num_slots),
            "checkpoints": (num_found, self.limits.num_checkpoints),
        }

    def told_of(self, seq: Sequence) -> dict[str, int]:
        """Return a running sequence's slot, and the tokens at its last checkpoint."""
        return {"slot": self._held[seq].slot, "checkpoint": self._held[seq].known}

    def positions(self) -> list[tuple[int, int]]:
        """Return pairs of a checkpoint that the prefix cache finds on the device and its number of
        tokens."""
        if self.prefix is None:
            return []
        found = list[tuple[int, int]]()
        for checkpoint, node in self.prefix.nodes_at(self.group).items():
            depth, at = 0, node
            while at.parent is not None:
                depth, at = depth + 1, at.parent
            found.append((checkpoint, depth * self.block_size))
        return sorted(found)

    @property
    def has_fenced(self) -> bool:
        """Whether unfinished steps read checkpoints, which may become free after these steps."""
        return any(self._reads)

    def slot_of(self, seq: Sequence) -> int:
        """Return the slot of a running sequence."""
        return self._held[seq].slot

    def num_lost(self, seq: Sequence) -> int:
        """Return the number of a sequence's computed tokens behind its last checkpoint.

        They are computed again if it loses its blocks.
        """
        return max(seq.num_computed_tokens - self._held[seq].known, 0)

    # Slots

    def admit(self, seq: Sequence, position: int, checkpoint: int) -> None:
        """Give a sequence a slot, which the next step fills from a checkpoint.

        Args:
            seq: the sequence, which holds its blocks.
            position: the tokens that it has computed: those of a hit.
            checkpoint: the checkpoint of that position, with an owner counted for this use; -1 at
                position 0.
        """
        held = self._held[seq] = _Held(self._free.pop(), position, position)
        if position:
            self._restore(held, checkpoint, position)

    def move(self, seq: Sequence, position: int, checkpoint: int) -> None:
        """Let a running sequence continue from a later checkpoint, which the next step puts into
        its slot.

        Args:
            position: the number of tokens of the checkpoint.
            checkpoint: the checkpoint's number.
        """
        held = self._held[seq]
        self._forget_moves_to(held.slot)
        held.known = held.reached = position
        self._restore(held, checkpoint, position)

    def _restore(self, held: _Held, checkpoint: int, position: int) -> None:
        self._restores.append((checkpoint, held.slot, position))
        self._wanted.add(checkpoint)
        self.num_restored += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Note that a child begins with its parent's state; `settle` gives it a slot."""
        self._unplaced.append((self._held[parent].slot, child))
        self._held[child] = _Held(-1, self._held[parent].known, parent.num_computed_tokens)

    def settle(self) -> None:
        """Give forked sequences their slots, after those without a seat have lost their blocks
        again.

        The next step copies the parents' states to them.
        """
        for source, child in self._unplaced:
            slot = self._held[child].slot = self._free.pop()
            self._forks.append((source, slot))
        self._unplaced.clear()

    def release(self, seq: Sequence) -> None:
        """Free a sequence's slot; if another sequence must still copy its state, that one gets
        the slot."""
        held = self._held.pop(seq, None)
        if held is None:
            return
        self._unplaced = [pair for pair in self._unplaced if pair[1] is not seq]
        slot = held.slot
        if slot < 0:
            return
        self._forget_moves_to(slot)
        for place, (source, child) in enumerate(self._unplaced):
            if source == slot:
                self._held[child].slot = slot
                del self._unplaced[place]
                return
        for place, (source, copy) in enumerate(self._forks):
            if source == slot:
                heir = next(other for other in self._held.values() if other.slot == copy)
                heir.slot = slot
                del self._forks[place]
                slot = copy
                break
        self._free.append(slot)

    def _forget_moves_to(self, slot: int) -> None:
        """Cancel the restores and forks that were to fill a slot in the next step.

        The slot's sequence has lost it, or begins from another checkpoint.
        """
        for each in [each for each in self._restores if each[1] == slot]:
            self._restores.remove(each)
            self._let_go([each[0]])
        self._forks = [pair for pair in self._forks if pair[1] != slot]

    # Runs

    def cut(self, seq: Sequence, num_tokens: int, depth: int) -> int:
        """Return the number of tokens of a prompt's next run, which ends at the next checkpoint.

        Args:
            seq: a sequence with several tokens to run.
            num_tokens: the number of tokens that it may run.
            depth: the number of blocks at its beginning whose content the prefix cache has now.
        """
        start, held = seq.num_scheduled_tokens, self._held[seq]
        held.branch = min(depth * self.block_size, seq.num_tokens - 1) // self.unit * self.unit
        end = min(start + num_tokens, (start // self.interval + 1) * self.interval)
        return (held.branch if start < held.branch < end else end) - start

    def num_drafts(self, seq: Sequence) -> int:
        """Return the most drafts behind a sequence's next token: all must lie in the token's
        chunk."""
        chunk = self.limits.chunk
        return chunk - 1 - (seq.num_scheduled_tokens + 1) % chunk

    def schedule(self, seq: Sequence, start: int, end: int) -> int:
        """Record a run, of positions start ... end - 1, of the step being built; return the slot it
        writes.

        If a checkpoint may stand at the end of the run's last whole chunk, and one is free, the
        step saves it.
        """
        held, chunk = self._held[seq], self.limits.chunk
        held.reached = max(held.reached, end)
        position = end // chunk * chunk
        if (
            self.allocator is not None
            and self.prefix is not None
            and not seq.is_doubtful
            and position > held.known
            and position % self.block_size == 0
            and self.allocator.num_free
        ):
            [checkpoint] = self.allocator.allocate(1)
            self._wanted.discard(checkpoint)
            ends_prompt = start < seq.num_prompt_tokens <= end
            is_tail = not (ends_prompt or position % self.interval == 0 or position == held.branch)
            held.known = position
            self._saves.append(
                _Save(seq, seq.num_preemptions, held.slot, checkpoint, position, is_tail)
            )
        return held.slot

    def has_passed(self, seq: Sequence) -> bool:
        """Return whether a step that was taken back may have moved a sequence's state past its next
        token.

        It has if the tokens given to steps reach beyond the chunk of the next token.
        """
        chunk, computed = self.limits.chunk, seq.num_computed_tokens
        return computed > 0 and self._held[seq].reached // chunk > computed // chunk

    def can_run_again(self, batch: Batch) -> bool:
        """Return whether a failed step would compute the same if it ran again.

        It would if it takes no state out of the chunk in which the step found it; states that the
        step restores, and sequences that begin, do not matter.
        """
        chunk, filled = self.limits.chunk, {slot for _, slot, _ in batch.states.restores}
        return all(
            run.start == 0
            or run.state_slot in filled
            or run.start // chunk == (run.start + len(run.token_ids)) // chunk
            for run in batch.sequences
        )

    # Steps

    def begin_step(self) -> StateMoves:
        """Return the copies of states (restores, forks and saves) of the step that begins now, and
        forget them."""
        moves = StateMoves(
            tuple(self._restores),
            tuple(self._forks),
            tuple((save.slot, save.checkpoint, save.position) for save in self._saves),
        )
        self._reads.append([checkpoint for checkpoint, _, _ in self._restores])
        self._making.append(self._saves)
        self._restores, self._forks, self._saves = [], [], []
        return moves

    def end_step(self, index: int) -> None:
        """Note that unfinished step `index`, 0 the oldest, has finished or was taken back.

        The checkpoints that it read are released, after older steps; those that it made can be
        registered.
        """
        reads, self._made = self._reads[index], [*self._made, *self._making[index]]
        del self._reads[index], self._making[index]
        if index == 0:
            self._let_go(reads)
        else:
            self._reads[index - 1] += reads

    def register(self, seq: Sequence, node: PrefixNode | None, num_registered: int) -> None:
        """Enter the checkpoints that finished steps made of a sequence into the prefix cache.

        Args:
            seq: the sequence, whose full blocks are registered.
            node: the node of its last registered block.
            num_registered: the number of these blocks.
        """
        for save in [save for save in self._made if save.seq is seq]:
            depth = save.position // self.block_size
            if (
                save.num_preemptions != seq.num_preemptions
                or node is None
                or seq.is_doubtful
                or depth > num_registered
            ):
                continue  # it is let go of by `end_update`
            self._made.remove(save)
            at: PrefixNode = node
            for _ in range(num_registered - depth):
                assert at.parent is not None
                at = at.parent
            self._put(self._held[seq], save, at)

    def _put(self, held: _Held, save: _Save, node: PrefixNode) -> None:
        assert self.prefix is not None
        kept = self.prefix.put(node, self.group, save.checkpoint)
        self._let_go([save.checkpoint])
        self.num_saved += kept == save.checkpoint
        if not save.is_tail:
            self._wanted.add(kept)
        before, held.tail = held.tail, None
        if save.is_tail and kept == save.checkpoint:
            held.tail = (node, kept)
        if before is not None:
            self._drop_tail(*before)

    def _drop_tail(self, node: PrefixNode, checkpoint: int) -> None:
        """Remove a tail's checkpoint, which a later one replaces, from the prefix cache and free
        it.

        It stays if a sequence has gone on from it, or still owns it.
        """
        assert self.prefix is not None
        assert self.allocator is not None
        is_there = node.blocks[self.group] == checkpoint
        if is_there and checkpoint not in self._wanted and not self.allocator.ref_count(checkpoint):
            self.prefix.forget_block(self.group, checkpoint)

    def end_update(self) -> None:
        """Release the checkpoints of finished steps that `register` has not entered.

        Their sequences have ended or lost their blocks.
        """
        made, self._made = self._made, []
        self._let_go([save.checkpoint for save in made])

    def spoilt_by(self, batch: Batch) -> list[Sequence]:
        """Return the sequences whose slots a failed step was to fill from checkpoints or other
        slots."""
        slots = {slot for _, slot, _ in batch.states.restores}
        slots |= {copy for _, copy in batch.states.forks}
        return [seq for seq, held in self._held.items() if held.slot in slots]

    def filled_by(self, batch: Batch, checkpoints: Collection[int]) -> list[Sequence]:
        """Return the sequences whose slots `batch`, or the next step, fills from one of
        `checkpoints`."""
        restores = (*batch.states.restores, *self._restores)
        slots = {slot for checkpoint, slot, _ in restores if checkpoint in checkpoints}
        return [seq for seq, held in self._held.items() if held.slot in slots]

    def restores_of(self, seq: Sequence) -> list[int]:
        """Return the checkpoints from which the next step fills a sequence's slot."""
        slot = self._held[seq].slot
        return [checkpoint for checkpoint, target, _ in self._restores if target == slot]

    def _let_go(self, checkpoints: list[int]) -> None:
        if checkpoints:
            assert self.allocator is not None
            self.allocator.release(checkpoints)

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Verify that slots, checkpoints and sequences agree.

        Raises:
            AssertionError: an invariant is broken, and the message names it.
        """
        slots = [self._held[seq].slot for seq in holders if seq in self._held]
        pool = self.allocator
        owners: dict[int, int] = {}
        for checkpoint in (
            *(each[0] for each in self._restores),
            *(checkpoint for reads in self._reads for checkpoint in reads),
            *(save.checkpoint for saves in self._making for save in saves),
        ):
            owners[checkpoint] = owners.get(checkpoint, 0) + 1
        counts = {}
        if pool is not None:
            pool.check_integrity()
            found = ((i, pool.ref_count(i)) for i in range(pool.num_blocks))
            counts = {i: count for i, count in found if count}
        targets = [each[1] for each in (*self._restores, *self._forks)]
        sources = {source for source, _ in self._forks}
        rules = [
            (set(holders) == set(self._held), "exactly the running sequences have slots"),
            (
                sorted([*slots, *self._free]) == list(range(self.num_slots)),
                "a slot is free, or one sequence's",
            ),
            (not (self._unplaced or self._made), "nothing is left over from an update"),
            (owners == counts, "a checkpoint's owners are the steps that read or make it"),
            (
                len(set(targets)) == len(targets) and sources.isdisjoint(targets),
                "a slot is filled once, and no source of a copy is",
            ),
            (set(targets) <= set(slots), "what is filled is held"),
        ]
        for holds, rule in rules:
            if not holds:
                raise AssertionError(f"broken invariant: {rule}")
