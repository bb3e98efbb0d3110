"""A model without tensors, to run the scheduler's own steps thousands of times per second.

The virtual cache keeps, in each slot, a fingerprint of the token there and of all before it, so a
slot is right only if its whole prefix is. The virtual model first does the copies, then writes the
step's tokens, then reads every slot that a real one would read, and draws the next token from the
fingerprint and the sample's random stream.

It is the most unpunctual of devices: what a step is to write it spoils when the step is submitted,
and what a step is to read it reads when its result is asked for, which may be after the next step
has been submitted. A block that was given away while an unfinished step still used it shows.
Where layers are of several groups, each has slots of its own, of which a query reads its window.
Only what a step moves to main memory is read in turn, before that step and later ones write.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable

from tilewise.cache.contents import Content
from tilewise.engine.batch import BROKEN, PENDING, Batch, SampledToken, TokenEvent
from tilewise.engine.request import FinishReason, Request, Sequence
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.seeds import derive_seed

VOCAB = 6


def _digest(*parts: object) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class VirtualModel:
    """Executes batches on a virtual cache and refuses any step that a real one would get wrong.

    Whoever reads a slot that `damages` chose while it was written has no finite logits. Such a slot
    holds a negative number of its own.
    """

    def __init__(self, scheduler: Scheduler, damages: Callable[[], bool] = lambda: False) -> None:
        self.scheduler, self.damages, self.num_damages = scheduler, damages, 0
        self._has_waited = False  # the first, in the last step: newcomers ran alone
        self.block_size = scheduler.limits.block_size
        self.slots: list[list[int | None]] = [
            [None] * self.block_size for _ in range(scheduler.limits.num_blocks)
        ]
        limits = scheduler.limits
        self.windows = limits.windows
        self.pools = [self.slots]  # of each group of layers
        for count in limits.other_blocks:
            self.pools.append([[None] * self.block_size for _ in range(count)])
        self.other_tables: dict[tuple[int, int], list[int]] = {}  # by sequence and group
        memory = scheduler.tables.memory
        self.rooms = [] if memory is None else memory.rooms
        self.hosts: list[list[list[int | None]]] = [[] for _ in self.pools]  # of each group
        for host, room in zip(self.hosts, self.rooms, strict=False):
            host += ([None] * self.block_size for _ in range(room.allocator.num_blocks))
        self.host = self.hosts[0]
        self.tables: dict[int, list[int]] = {}  # as a device knows them, from what batches tell
        self.drawn: dict[int, int] = {}
        self.unfinished: list[Step] = []
        self.has_lost_steps = False  # the first may have lost its blocks with them

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        """Compute one step."""
        self.submit(batch)
        return self.result(batch)

    def submit(self, batch: Batch) -> None:
        """Begin a step."""
        self._check_limits(batch)
        step = Step(batch)
        for seq_id in batch.left:
            self.tables.pop(seq_id, None)
            for group in range(1, len(self.pools)):
                self.other_tables.pop((seq_id, group), None)
        for run in batch.sequences:
            seq = self.scheduler.roster.live[run.seq_id]
            end = run.start + len(run.token_ids)
            drafts = run.token_ids[len(run.token_ids) - run.num_drafts :]
            known = [*seq.token_ids, *drafts][:end]
            is_pending = run.token_ids == (PENDING,)
            assert is_pending or list(run.token_ids) == known[run.start :]
            assert len(known) + is_pending == end
            assert is_pending <= bool(self.unfinished), "only an unfinished step draws"
            table = self.tables.get(run.seq_id, [])[: run.first_new_block]
            assert len(table) == run.first_new_block, "what was told was told"
            table += run.block_ids[run.first_new_block :]
            assert table == list(run.block_ids), "what changed is told"
            self.tables[run.seq_id] = table
            step.runs.append((known, table[: -(-end // self.block_size)]))
            step.others.append([self._other_table(run, end, g) for g in range(1, len(self.pools))])
            step.salts[run.seq_id] = seq.request.salt
        written: set[tuple[int, int]] = set()
        for run, (_, table) in zip(batch.sequences, step.runs, strict=True):
            for position in range(run.start, run.start + len(run.token_ids)):
                block = table[position // self.block_size]
                slot = (block, position % self.block_size)
                assert self.scheduler.tables.allocator.ref_count(block) == 1, "exclusive writer"
                assert slot not in written, "one writer per slot"
                written.add(slot)
        self.unfinished.append(step)
        for group in range(len(self.pools)):
            self._check_transfers(group)
        self._check_other_writes(step)
        still_read = {block for s in self.unfinished for block, _ in s.batch.swap_out}
        for block, place in written:
            if block not in still_read:
                self.slots[block][place] = None
        overwritten = [block for _, block in (*batch.swap_in, *batch.block_copies)]
        for block in overwritten:
            if block not in still_read:
                self.slots[block] = [None] * self.block_size
        for group, host in enumerate(self.hosts):
            for _, slot in step.of_group(group).swap_out:
                host[slot] = [None] * self.block_size

    def result(self, batch: Batch) -> list[list[SampledToken]]:
        """Compute the oldest unfinished step."""
        step = self.unfinished.pop(0)
        assert step.batch is batch
        for seq_id in batch.left:
            self.drawn.pop(seq_id, None)
        for group, (pool, host) in enumerate(zip(self.pools, self.hosts, strict=True)):
            part = step.of_group(group)
            for block, slot in part.swap_out:
                host[slot] = list(pool[block])
            for slot, block in part.swap_in:
                pool[block] = list(host[slot])
        self._copy(batch)
        self.begin_states(step)
        prefixes = []
        for run, (known, table), others in zip(
            batch.sequences, step.runs, step.others, strict=True
        ):
            if run.token_ids == (PENDING,):
                known = [*known, self.drawn.get(run.seq_id, 0)]
            salt = step.salts[run.seq_id]
            if run.draft_parents:
                prefixes.append(tree_fingerprints(known, run.num_drafts, run.draft_parents, salt))
            else:
                prefixes.append(fingerprints(known, salt))
            for position in range(run.start, len(known)):
                place = position % self.block_size
                value = prefixes[-1][position]
                if self.damages():
                    self.num_damages += 1
                    value = -self.num_damages
                for pool, own in zip(self.pools, (table, *others), strict=True):
                    pool[own[position // self.block_size]][place] = value
        drawn = [
            [SampledToken(0)] * run.num_samples
            if run.seq_id in step.spoilt
            else self._read_and_draw(run, (table, *others), prefix)
            for run, (_, table), others, prefix in zip(
                batch.sequences, step.runs, step.others, prefixes, strict=True
            )
        ]
        for run, tokens in zip(batch.sequences, drawn, strict=True):
            if tokens:
                self.drawn[run.seq_id] = tokens[0].token_id
        self.end_states(step, prefixes)
        return drawn

    def begin_states(self, step: Step) -> None:
        """Do what a step does with states before it runs; `state_model` has some."""

    def end_states(self, step: Step, prefixes: list[list[int]]) -> None:
        """Read and write the states of a step's sequences, and keep what it keeps of them.

        Args:
            prefixes: the fingerprints of all tokens of each run's sequence.
        """

    def drop(self, batch: Batch) -> None:
        """Let a step fail: what a later one computes for its sequences is worth nothing."""
        place = next(i for i, step in enumerate(self.unfinished) if step.batch is batch)
        del self.unfinished[place]
        for step in self.unfinished[place:]:
            step.spoilt |= {run.seq_id for run in batch.sequences}
        for group in range(len(self.pools)):
            part = batch.of_group(group)
            blocks = {block for _, block in part.swap_in}
            slots = {slot for _, slot in part.swap_out}
            for step in self.unfinished[place:]:
                later = step.of_group(group)
                slots |= {slot for block, slot in later.swap_out if block in blocks}
                blocks |= {block for slot, block in later.swap_in if slot in slots}
                blocks |= {copy for source, copy in later.block_copies if source in blocks}
                for run, (_, own), others in zip(
                    step.batch.sequences, step.runs, step.others, strict=True
                ):
                    if not blocks.isdisjoint((own, *others)[group]):
                        step.spoilt.add(run.seq_id)

    def damaged(self, blocks: list[int], count: int | None = None) -> set[int]:
        """Return the numbers of the damaged slots in these blocks, or in the first `count` slots.

        Those behind may still hold what somebody else has left there.
        """
        values = [value for b in blocks for value in self.slots[b]]
        return {value for value in values[:count] if value is not None and value < 0}

    def damaged_slots(self) -> set[int]:
        """Return the numbers of the damaged places of prefixes in main memory."""
        cold = [
            value
            for room, host in zip(self.rooms, self.hosts, strict=False)
            for slot in room.node_at
            for value in host[slot]
        ]
        return {value for value in cold if value is not None and value < 0}

    def _check_transfers(self, group: int) -> None:
        """What moves has one target each, and nothing that is read is written meanwhile."""
        *before, batch = (step.of_group(group) for step in self.unfinished)
        outs, ins = [s for _, s in batch.swap_out], [b for _, b in batch.swap_in]
        assert len(set(outs)) == len(outs), "one transfer per slot"
        assert len(set(ins)) == len(ins), "one transfer per block"
        busy = {slot for step in before for slot, _ in step.swap_in}
        busy |= {slot for step in before for _, slot in step.swap_out}
        assert not busy & set(outs), "a slot on its way is not written"
        if batch.swap_out or batch.swap_in:
            pool = self.rooms[group].allocator
            moving = {*outs, *(slot for slot, _ in batch.swap_in)}
            assert all(pool.ref_count(slot) for slot in moving), "a slot on its way is pinned"

    def _check_limits(self, batch: Batch) -> None:
        limits = self.scheduler.limits
        assert 1 <= batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.sequences) <= limits.max_num_seqs
        chunk = limits.long_prefill_token_threshold or limits.max_num_batched_tokens
        assert all(1 <= len(run.token_ids) <= chunk for run in batch.sequences)
        runs, first = {run.seq_id for run in batch.sequences}, self._first()
        if self.unfinished:
            self._has_waited &= first.seq_id not in runs
        else:
            ordered = self.scheduler.order.name == "fcfs"
            is_plain = ordered and self.scheduler.preemption.victim == "newest"
            if self.host or self.has_lost_steps or not is_plain:
                waits = first.seq_id not in runs and first.num_told_blocks > 0
                is_apart = self.scheduler.newcomers.ran_alone
                assert not waits or is_apart, "the first always runs but beside newcomers"
                assert not (waits and self._has_waited), "and in every second step at least"
                self._has_waited = waits
            else:
                assert batch.sequences[0].seq_id == self._oldest_id(), "the oldest always runs"

    def _first(self) -> Sequence:
        return self.scheduler.roster.running[0]

    def _oldest_id(self) -> int:
        family = next(iter(self.scheduler.roster.requests.values()))
        return next(s.seq_id for s in family if s.finish_reason is None)

    def _other_table(self, run, end: int, group: int) -> list[int]:
        """Return the blocks of a run in a group beyond the first, as what was told says."""
        blocks, first = run.others[group - 1]
        table = self.other_tables.get((run.seq_id, group), [])[:first]
        assert len(table) == first, "what was told was told"
        table += blocks[first:]
        assert table == list(blocks), "what changed is told"
        self.other_tables[run.seq_id, group] = table
        return table[: -(-end // self.block_size)]

    def _check_other_writes(self, step: Step) -> None:
        """Spoil what a step is to write in the groups beyond the first, each slot once."""
        for group in range(1, len(self.pools)):
            pool, allocator = self.pools[group], self.scheduler.tables.pools[group].allocator
            written: set[tuple[int, int]] = set()
            for run, others in zip(step.batch.sequences, step.others, strict=True):
                for position in range(run.start, run.start + len(run.token_ids)):
                    block = others[group - 1][position // self.block_size]
                    slot = (block, position % self.block_size)
                    assert allocator.ref_count(block) == 1, "exclusive writer"
                    assert slot not in written, "one writer per slot"
                    written.add(slot)
            unfinished = [s.of_group(group) for s in self.unfinished]
            still_read = {block for batch in unfinished for block, _ in batch.swap_out}
            for block, place in written:
                if block not in still_read:
                    pool[block][place] = None
            batch = unfinished[-1]
            for _, block in (*batch.swap_in, *batch.block_copies):
                if block not in still_read:
                    pool[block] = [None] * self.block_size

    def _copy(self, batch: Batch) -> None:
        for pool, pairs in zip(self.pools, (batch.block_copies, *batch.other_copies), strict=True):
            sources = {source for source, _ in pairs}
            destinations = [destination for _, destination in pairs]
            assert not sources & set(destinations), "a source is never a destination"
            assert len(destinations) == len(set(destinations)), "one copy per destination"
            for source, destination in pairs:
                pool[destination] = list(pool[source])

    def _read_and_draw(self, run, tables: tuple[list[int], ...], prefix) -> list[SampledToken]:
        is_broken = False
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            window = self.windows[group]
            first = 0 if window is None else max(0, run.start - window + 1)
            for position in range(first, len(prefix)):
                block = table[position // self.block_size]
                value = pool[block][position % self.block_size]
                is_damaged = value is not None and value < 0
                is_broken |= is_damaged
                assert value == prefix[position] or is_damaged, (
                    f"sequence {run.seq_id} reads a wrong key at {position}, block {block} of "
                    f"group {group}"
                )
        assert len(run.seeds) == run.num_samples
        if is_broken:
            return [BROKEN] * run.num_samples
        if run.num_drafts:
            return self._verify(run, prefix)
        return [
            SampledToken(_digest(prefix[-1], seed, run.num_generated) % VOCAB) for seed in run.seeds
        ]

    def _verify(self, run, prefix: list[int]) -> list[SampledToken]:
        """Draw a token before each draft while these are right, and one more."""
        drawn: list[SampledToken] = []
        first = len(prefix) - 1 - run.num_drafts
        if run.draft_parents:
            return self._verify_tree(run, prefix[first:])
        for i, draft in enumerate((*run.token_ids[1:], None)):
            token = _digest(prefix[first + i], run.seeds[0], run.num_generated + i) % VOCAB
            drawn.append(SampledToken(token))
            if token != draft:
                break
        return drawn

    def _verify_tree(self, run, rows: list[int]) -> list[SampledToken]:
        """Draw a token after the last one, and after each draft that was drawn."""
        drawn, row = [], 0
        while row is not None:
            token = _digest(rows[row], run.seeds[0], run.num_generated + len(drawn)) % VOCAB
            drawn.append(SampledToken(token))
            children = [i for i, p in enumerate(run.draft_parents, start=1) if p == row]
            row = next((i for i in children if run.token_ids[i] == token), None)
        return drawn


class Step:
    """An unfinished step: for each run the tokens that the host knew, and the blocks."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.runs: list[tuple[list[int], list[int]]] = []
        self.others: list[list[list[int]]] = []  # of each run, its blocks in groups 1, 2, ...
        self.spoilt: set[int] = set()
        self.salts: dict[int, str] = {}
        self._of_group: dict[int, Batch] = {}

    def of_group(self, group: int) -> Batch:
        """Return the batch as a group of layers sees it."""
        if group not in self._of_group:
            self._of_group[group] = self.batch.of_group(group)
        return self._of_group[group]


class VirtualStore:
    """A directory of blocks that loses some, tears some, and is full now and then."""

    def __init__(self, chance: Callable[[], float], group: int = 0) -> None:
        self.chance, self.group, self.model = chance, group, None
        self.files: dict[bytes, tuple[Content, list[int | None]]] = {}
        self.num_hits = 0

    def save(self, content: Content, slot: int) -> None:
        """Keep a slot, which must hold just this."""
        tokens = array("i")
        tokens.frombytes(content.tokens)
        size = self.model.block_size
        truth = fingerprints(list(tokens), content.salt)[-size:]
        held = self.model.hosts[self.group][slot]
        for value, right in zip(held, truth, strict=True):
            assert value == right or (value is not None and value < 0), "a cold slot is whole"
        if self.chance() < 0.9:
            self.files[content.digest] = content, list(held)

    def has(self, digest: bytes) -> bool:
        """Whether there is a file."""
        return digest in self.files

    def load(self, content: Content, slot: int) -> bool:
        """Fill a slot; a torn file leaves it spoilt."""
        host = self.model.hosts[self.group]
        host[slot] = [None] * self.model.block_size
        kept, values = self.files[content.digest]
        if kept != content or self.chance() < 0.3:
            return False
        host[slot] = list(values)
        self.num_hits += 1
        return True

    def forget(self, digest: bytes) -> None:
        """Drop a file and all that follow it."""
        gone = {digest}
        while True:
            more = {d for d, (c, _) in self.files.items() if c.parent in gone} - gone
            if not more:
                break
            gone |= more
        self.files = {d: f for d, f in self.files.items() if d not in gone}

    def clear(self) -> None:
        """Drop all files."""
        self.files.clear()


def fingerprints(token_ids: list[int], salt: str = "") -> list[int]:
    """Return for each position a number that depends on the salt and all tokens up to it."""
    out, value = [], _digest(salt) if salt else 0
    for token in token_ids:
        value = abs(hash((value, token)))
        out.append(value)
    return out


def tree_fingerprints(
    token_ids: list[int], num_drafts: int, parents: tuple[int, ...], salt: str
) -> list[int]:
    """Return those of tokens of which the last are a tree: each depends on the path to it."""
    out = fingerprints(token_ids[: len(token_ids) - num_drafts], salt)
    first = len(out) - 1
    for parent, token in zip(parents, token_ids[first + 1 :], strict=True):
        out.append(abs(hash((out[first + parent], token))))
    return out


class Outputs:
    """Collects events and insists that each sample ends once, with nothing after."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.stop_reasons: dict[tuple[str, int], int | str | None] = {}

    def add(self, events: list[TokenEvent]) -> None:
        """Append one step's events."""
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.reasons, f"{key} went on after its end"
            if event.token is None and event.finish_reason is FinishReason.DEADLINE:
                assert event.error is None
            elif event.token is None:
                assert isinstance(event.error, FloatingPointError)
                assert event.finish_reason is FinishReason.ERROR
            else:
                self.tokens.setdefault(key, []).append(event.token.token_id)
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
                self.stop_reasons[key] = event.stop_reason


def run_to_end(scheduler: Scheduler, max_steps: int = 20_000) -> Outputs:
    """Step until nothing is unfinished, checking everything in each step."""
    model, outputs = VirtualModel(scheduler), Outputs()
    unfinished: list[Batch] = []
    for _ in range(max_steps):
        while len(unfinished) < scheduler.max_in_flight:
            batch = scheduler.schedule()
            if batch is None:
                break
            model.submit(batch)
            unfinished.append(batch)
            scheduler.check_integrity()
        if not unfinished:
            break
        batch = unfinished.pop(0)
        outputs.add(scheduler.update(batch, model.result(batch)))
        scheduler.check_integrity()
    assert not scheduler.has_unfinished(), f"unfinished after {max_steps} steps"
    check_idle(scheduler)
    return outputs


def check_idle(scheduler: Scheduler) -> None:
    """Idle means no used block, no pinned one, an empty swap space, nothing on its way."""
    stats = scheduler.stats()
    assert (stats.blocks_used, stats.swap_blocks_used) == (0, 0)
    memory = scheduler.tables.memory
    rooms = () if memory is None else memory.rooms
    assert not any(room.going or room.coming for room in rooms)
    assert (scheduler.roster.num_queued, scheduler.roster.num_queued_tokens) == (0, 0)


def draw_alone(request: Request, max_len: int) -> Outputs:
    """Answer one request with a given seed by the definition: no scheduler, no cache, no steps.

    run_alone() gives the same, a hundred times slower.
    """
    sampling, outputs = request.sampling, Outputs()
    first = derive_seed("request", sampling.seed)
    prompt = fingerprints(request.prompt_token_ids, request.salt)[-1]
    for index in range(sampling.n):
        seed = derive_seed("sample", first, index) if index else first
        value, drawn, key = prompt, [], (request.request_id, index)
        while key not in outputs.reasons:
            token = _digest(value, seed, len(drawn)) % VOCAB
            drawn.append(token)
            value = abs(hash((value, token)))
            if token in request.end_ids:
                outputs.reasons[key] = FinishReason.STOP
                outputs.stop_reasons[key] = token if token in request.stop_ids else None
            elif len(request.prompt_token_ids) + len(drawn) >= max_len:
                outputs.reasons[key], outputs.stop_reasons[key] = FinishReason.LENGTH, None
        outputs.tokens[key] = drawn
    return outputs


def run_alone(request: Request, max_model_len: int) -> Outputs:
    """Answer one request with room for all of it at once, whole prompt in one step, no cache."""
    room = (max_model_len + 1) * request.sampling.n
    scheduler = Scheduler(
        room,
        1,
        max_num_seqs=request.sampling.n,
        max_num_batched_tokens=room,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    scheduler.add(request)
    outputs = run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0
    return outputs
