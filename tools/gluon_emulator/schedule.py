"""One schedule of a recorded run, compiled: the loop behind `replay.Replay`.

A step takes some tenths of a microsecond. All is numbers in one array `m`, since numba passes one
array to a function quickly and fifty slowly: `m[AT]` says where the table AT begins, so that
`m[m[AT] + actor]` is how far an actor is. Actors are warps, lanes are the places of their clocks,
records are accesses. `replay` fills in what is recorded, and says in words what ERROR holds.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numba import njit

from tilewise.kernels.cpu.machine.threads import inner

NEVER = (1 << 31) - 1
FENCES = 8  # of one access that are kept; more could only prove it fenced in one more way
PHASES = 4  # of a barrier whose clocks are kept

# Steps, and the columns of one.
INIT, ARRIVE, WAIT, BRING, SEND, SENT, LOAD, STORE = range(8)
FENCE, MULTIPLY, MULTIPLIED, MEET, BARRIER, START, JOIN, ATOMIC = range(8, 16)
KIND, FIRST, A, B, C, D, E = range(7)
STEP = 7
# What an actor that cannot go on waits for; what happens later; what is wrong.
ON_PHASE, ON_SENT, ON_ISSUED, ON_NAMED, ON_WARPS, ON_END, ON_VALUE = range(7)
GO_ON, LAND, HAVE_READ, HAVE_WRITTEN = range(4)
RIGHT, UNORDERED, UNFENCED, BOX, DEADLOCK, PRODUCTS, COPIES, ARRIVALS, TWICE = range(9)
EARLY_ARRIVAL, LATE_WAIT, EARLY_COPY, EARLY_MEETING = range(9, 13)
# Columns of a record; lanes and epochs of fences follow.
R_LANE, R_EPOCH, R_ENGINE, R_SETTLES, R_ACTOR, R_KIND, R_FENCES, R_DEAD, R_BARRIER, R_BYTES = range(
    10
)
RECORD = 10 + 2 * FENCES
EVENT = 5  # due, order, kind, two numbers

# Numbers at the begin of m: sizes, what one schedule counts, the random number, the error's six.
(
    LANES, NUM_ACTORS, NUM_PARTITIONS, NUM_CTAS, NUM_VALUES, RESIDENT, PROOF, ZERO, ZERO_END,
    NOW, NUM_EVENTS, DUE, COUNT, NUM_READY, NUM_BLOCKED, NUM_RECORDS, NUM_LOOSE, NEXT_CTA, DELAY,
    SEED, ERROR, ERROR_ACTOR, ERROR_STEP, ERROR_OTHER, ERROR_KIND, ERROR_REGION,
) = range(26)  # fmt: skip
# Tables. What is recorded:
(
    STEPS, LISTS,  # lists of numbers that steps point into
    P_BEGIN, P_END, P_ACTOR, P_WARPS, P_COPIES, P_WRITTEN, P_CTA, P_NUMBER, P_SENDS,  # partitions
    A_PARTITION, A_LANE, A_FIRST,  # actors
    CTAS,  # their first partitions
    MATES,  # of each lane, the partition whose warp it is, or -1
    OVERLAPS_AT, OVERLAPS, INSIDE_AT, INSIDE,  # of each region, which it overlaps, which it covers
    BARRIER_LANES, NAMED_LANES,  # whose epochs are phases and generations
    SLOT_LANES,  # of each kind of outgoing copy, the lane that says that it is written
    VALUES_FIRST, UPDATES_AT,  # of each counter in global memory
    # What a schedule begins with zeros in:
    CLOCKS, ISSUED, MET, ENDED, STARTED, ARRIVED, GENERATION, SENDS, BYTES, FINISHED, COLLECTED,
    NAMED_ARRIVED, NAMED_GENERATION, NAMED_MARK, NAMED_COLLECTED, NAMED_PUBLISHED, SIZES, SLOTS,
    UPDATED, WAITED,  # (barriers, actors): the epoch of a wait, in a proof
    # What it writes before it reads:
    AT, WAITS_FOR, READY, BLOCKED, LEFT, SENT_STATE, ARRIVALS_WANTED, PENDING,
    PUBLISHED, WAITED_PHASE, TABLES, RECORDS, LOOSE, SLOT_ACTORS, VALUES, UPDATES, UPDATE_VALUES,
    EVENTS,
) = range(26, 26 + 63)  # fmt: skip
HEADER = 26 + 63


def memory(recorded: dict[int, Any], resident: int) -> np.ndarray:
    """Return the array for a recording.

    Args:
        recorded: the tables of the first kind.
        resident: CTAs at a time.
    """
    actors, lanes = len(recorded[A_LANE]), len(recorded[MATES])
    partitions, barriers = len(recorded[P_BEGIN]), len(recorded[BARRIER_LANES])
    named, regions = len(recorded[NAMED_LANES]), len(recorded[OVERLAPS_AT]) - 1
    slots, values = len(recorded[SLOT_LANES]), len(recorded[VALUES_FIRST])
    updates = int(recorded[UPDATES_AT][-1])
    steps = np.asarray(recorded[STEPS]).reshape(-1, STEP)
    events = int(np.isin(steps[:, KIND], (SEND, BRING)).sum()) + actors + 1
    copies = int((steps[:, KIND] == SEND).sum()) + 1
    accesses = 1
    for begin, end, warps in zip(
        recorded[P_BEGIN], recorded[P_END], recorded[P_WARPS], strict=True
    ):
        for step in steps[begin:end]:
            times = 1 if step[FIRST] else warps
            accesses += times * (step[B] - step[A] if step[KIND] == MULTIPLY else 1)
    zeros = {
        CLOCKS: actors * lanes, ISSUED: actors, MET: actors, ENDED: partitions * lanes,
        STARTED: partitions, ARRIVED: partitions, GENERATION: partitions, SENDS: partitions,
        BYTES: barriers, FINISHED: barriers, COLLECTED: barriers * lanes, NAMED_ARRIVED: named,
        NAMED_GENERATION: named, NAMED_MARK: named * actors, NAMED_COLLECTED: named * lanes,
        NAMED_PUBLISHED: named * lanes, SIZES: 2 * regions, SLOTS: slots, UPDATED: values,
        WAITED: barriers * actors,
    }  # fmt: skip
    others = {
        AT: actors, WAITS_FOR: actors, READY: actors, BLOCKED: actors,
        LEFT: partitions, SENT_STATE: copies, ARRIVALS_WANTED: barriers, PENDING: barriers,
        PUBLISHED: barriers * PHASES * lanes, WAITED_PHASE: barriers * actors,
        TABLES: 2 * regions * lanes, RECORDS: accesses * RECORD, LOOSE: accesses,
        SLOT_ACTORS: slots, VALUES: values, UPDATES: updates * lanes, UPDATE_VALUES: updates,
        EVENTS: events * EVENT,
    }  # fmt: skip
    sizes = {table: len(numbers) for table, numbers in recorded.items()} | zeros | others
    begins = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=HEADER), strict=False))
    m = np.zeros(HEADER + sum(sizes.values()), np.int64)
    for table, numbers in recorded.items():
        m[begins[table] : begins[table] + sizes[table]] = numbers
    for table, begin in begins.items():
        m[table] = begin
    m[LANES], m[NUM_ACTORS], m[NUM_PARTITIONS] = lanes, actors, partitions
    m[NUM_CTAS], m[NUM_VALUES], m[RESIDENT] = len(recorded[CTAS]), values, resident
    m[ZERO], m[ZERO_END] = begins[CLOCKS], begins[AT]
    return m


@inner
def _random(m):
    """Return a number of 31 bits (xorshift, Marsaglia 2003)."""
    x = np.uint32(m[SEED])
    x ^= np.uint32(x << np.uint32(13))
    x ^= np.uint32(x >> np.uint32(17))
    x ^= np.uint32(x << np.uint32(5))
    m[SEED] = np.int64(x)
    return np.int64(x >> np.uint32(1))


@inner
def _row(m, table, number):
    """Return where the clock of a table of clocks begins."""
    return table + number * m[LANES]


@inner
def _join(m, into, other):
    """Let one clock learn what another knows."""
    for lane in range(m[LANES]):
        m[into + lane] = max(m[into + lane], m[other + lane])


@inner
def _copy(m, into, other):
    for lane in range(m[LANES]):
        m[into + lane] = m[other + lane]


@inner
def _clear(m, clock):
    for lane in range(m[LANES]):
        m[clock + lane] = 0


@inner
def _advance(m, actor):
    """What an actor does from now on is not in what it has told."""
    m[_row(m, m[CLOCKS], actor) + m[m[A_LANE] + actor]] += 1


@inner
def _make_ready(m, actor):
    m[m[READY] + m[NUM_READY]] = actor
    m[NUM_READY] += 1


@inner
def _block(m, actor, reason):
    m[m[WAITS_FOR] + actor] = reason
    return False


@inner
def _wake(m, reason):
    kept = 0
    for at in range(m[NUM_BLOCKED]):
        actor = m[m[BLOCKED] + at]
        if m[m[WAITS_FOR] + actor] == reason:
            _make_ready(m, actor)
        else:
            m[m[BLOCKED] + kept] = actor
            kept += 1
    m[NUM_BLOCKED] = kept


@inner
def _later(m, most):
    """Return a new event, due in less than `most` steps; the caller says what it is."""
    due = m[NOW] + _random(m) % most
    event = m[EVENTS] + EVENT * m[NUM_EVENTS]
    m[event], m[event + 1] = due, m[COUNT]
    m[NUM_EVENTS] += 1
    m[COUNT] += 1
    m[DUE] = min(m[DUE], due)
    return event


@inner
def _begin(m, partition, clock):
    """Let the warps of a partition run; they know what the clock does."""
    if m[m[STARTED] + partition]:
        return
    m[m[STARTED] + partition] = 1
    first = m[m[P_ACTOR] + partition]
    for actor in range(first, first + m[m[P_WARPS] + partition]):
        _copy(m, _row(m, m[CLOCKS], actor), clock)
        _advance(m, actor)
        _make_ready(m, actor)


@inner
def _next_cta(m):
    if m[NEXT_CTA] < m[NUM_CTAS]:
        partition = m[m[CTAS] + m[NEXT_CTA]]
        _begin(m, partition, _row(m, m[ENDED], partition))  # which is all zeros still
        m[NEXT_CTA] += 1


@inner
def _end(m, actor):
    """Let a warp end, if it may."""
    partition = m[m[A_PARTITION] + actor]
    clock, ended = _row(m, m[CLOCKS], actor), _row(m, m[ENDED], partition)
    if m[m[ISSUED] + actor] > m[clock + m[m[A_LANE] + actor] + 1]:
        m[ERROR] = PRODUCTS
        return False
    m[m[LEFT] + partition] -= 1
    _join(m, ended, clock)
    if m[m[LEFT] + partition] == 0:
        if m[m[SENDS] + partition] > m[ended + m[m[P_COPIES] + partition]]:
            m[ERROR] = COPIES
            return False
        _wake(m, 8 * m[m[P_CTA] + partition] + ON_END)
        if m[m[P_NUMBER] + partition] == 0:
            _next_cta(m)
    return True


@inner
def _is_fenced(m, record, clock):
    for at in range(record + 10, record + 10 + 2 * m[record + R_FENCES], 2):
        if m[clock + m[at]] >= m[at + 1]:
            return True
    return False


@inner
def _access(m, actor, row, region):
    """Note an access; return where its record is, or -1 where another is not ordered before it."""
    kind, clock, mine = m[row + KIND], _row(m, m[CLOCKS], actor), m[m[A_PARTITION] + actor]
    engine, writes = kind not in (LOAD, STORE), int(kind in (STORE, BRING))
    settles = not engine and m[row + B]
    lane = m[m[A_LANE] + actor]
    if kind == BRING:
        lane, epoch = m[m[BARRIER_LANES] + m[row + B]], NEVER
    elif kind == SEND:
        lane, epoch = m[m[P_COPIES] + mine], m[m[SENDS] + mine]
    elif kind == MULTIPLY:
        lane, epoch = lane + 1, m[m[ISSUED] + actor]
    else:
        epoch = m[clock + lane]
    mates, tables, lanes = m[MATES], m[TABLES], m[LANES]
    for at in range(m[m[OVERLAPS_AT] + region], m[m[OVERLAPS_AT] + region + 1]):
        other = m[m[OVERLAPS] + at]
        for reads in range(1 + writes):
            table = 2 * other + reads
            for entry in range(m[m[SIZES] + table]):
                old = m[tables + table * lanes + entry]
                known = m[clock + m[old + R_LANE]] >= m[old + R_EPOCH]
                if known and (not engine or m[old + R_ENGINE] or _is_fenced(m, old, clock)):
                    continue
                if not known:
                    if not engine and m[mates + m[old + R_LANE]] == mine:
                        continue  # of the same partition, whose barriers Triton has seen to
                    if settles and not (reads == 0 and not m[old + R_SETTLES]):
                        continue
                    if m[old + R_SETTLES] and not writes:
                        continue
                m[ERROR] = UNFENCED if known else UNORDERED
                m[ERROR_OTHER], m[ERROR_KIND] = m[old + R_ACTOR], m[old + R_KIND]
                m[ERROR_REGION] = region
                return -1
    new = m[RECORDS] + RECORD * m[NUM_RECORDS]
    m[NUM_RECORDS] += 1
    m[new + R_LANE], m[new + R_EPOCH], m[new + R_ENGINE] = lane, epoch, engine
    m[new + R_SETTLES], m[new + R_ACTOR], m[new + R_KIND] = settles, actor, kind
    m[new + R_FENCES] = m[new + R_DEAD] = 0
    if writes and not settles:
        for at in range(m[m[INSIDE_AT] + region], m[m[INSIDE_AT] + region + 1]):
            inside = 2 * m[m[INSIDE] + at]
            for table in range(inside, inside + 2):
                kept = 0
                for entry in range(m[m[SIZES] + table]):
                    old = m[tables + table * lanes + entry]
                    if m[mates + m[old + R_LANE]] == mine:
                        m[tables + table * lanes + kept] = old
                        kept += 1
                    else:
                        m[old + R_DEAD] = 1
                m[m[SIZES] + table] = kept
    table = 2 * region + 1 - writes
    size = m[m[SIZES] + table]
    entry = 0
    while entry < size and m[m[tables + table * lanes + entry] + R_LANE] != lane:
        entry += 1
    if entry == size:
        m[m[SIZES] + table] += 1
    else:
        m[m[tables + table * lanes + entry] + R_DEAD] = 1
    m[tables + table * lanes + entry] = new
    if not engine:
        m[m[LOOSE] + m[NUM_LOOSE]] = new
        m[NUM_LOOSE] += 1
    return new


@inner
def _fence(m, actor):
    """Order the ordinary accesses that a warp knows of before copies and products."""
    clock, lane = _row(m, m[CLOCKS], actor), m[m[A_LANE] + actor]
    kept = 0
    for at in range(m[NUM_LOOSE]):
        old = m[m[LOOSE] + at]
        if m[old + R_DEAD]:
            continue
        if m[clock + m[old + R_LANE]] >= m[old + R_EPOCH]:
            count = m[old + R_FENCES]
            known = False
            for fence in range(count):
                known = known or m[old + 10 + 2 * fence] == lane
            if not known and count < FENCES:
                m[old + 10 + 2 * count] = lane
                m[old + 11 + 2 * count] = m[clock + lane]
                m[old + R_FENCES] = count + 1
        m[m[LOOSE] + kept] = old
        kept += 1
    m[NUM_LOOSE] = kept


@inner
def _boxes_meet(m, actor, begin, end):
    """Say whether a copy from or to global memory meets one that may be under way."""
    clock = _row(m, m[CLOCKS], actor)
    for at in range(begin, end):
        slot = m[m[LISTS] + at]
        if m[m[SLOTS] + slot] > m[clock + m[m[SLOT_LANES] + slot]]:
            m[ERROR], m[ERROR_OTHER] = BOX, m[m[SLOT_ACTORS] + slot]
            return True
    return False


@inner
def _maybe_end_phase(m, barrier):
    """End a phase that has all its arrivals and bytes; return whether that is right."""
    if m[m[PENDING] + barrier] != 0 or m[m[BYTES] + barrier] != 0:
        return True
    m[m[FINISHED] + barrier] += 1
    phase = m[m[FINISHED] + barrier]
    m[m[PENDING] + barrier] = m[m[ARRIVALS_WANTED] + barrier]
    now, collected = (
        _row(m, m[PUBLISHED], barrier * PHASES + phase % PHASES),
        _row(m, m[COLLECTED], barrier),
    )
    _copy(m, now, collected)
    if phase > 1:
        _join(m, now, _row(m, m[PUBLISHED], barrier * PHASES + (phase - 1) % PHASES))
    m[now + m[m[BARRIER_LANES] + barrier]] = phase
    _clear(m, collected)
    if m[PROOF]:
        for actor in range(m[NUM_ACTORS]):
            at = barrier * m[NUM_ACTORS] + actor
            epoch = m[m[WAITED] + at]
            if epoch and m[m[WAITED_PHASE] + at] < phase:
                if m[now + m[m[A_LANE] + actor]] < epoch:
                    m[ERROR], m[ERROR_OTHER], m[ERROR_ACTOR] = LATE_WAIT, barrier, actor
                    return False
                m[m[WAITED] + at] = 0
    _wake(m, 8 * barrier + ON_PHASE)
    return True


@inner
def _arrive(m, actor, barrier, count, nbytes):
    clock = _row(m, m[CLOCKS], actor)
    if m[PROOF] and m[clock + m[m[BARRIER_LANES] + barrier]] < m[m[FINISHED] + barrier]:
        m[ERROR], m[ERROR_OTHER] = EARLY_ARRIVAL, barrier
        return False
    m[m[BYTES] + barrier] += nbytes
    _join(m, _row(m, m[COLLECTED], barrier), clock)
    _advance(m, actor)
    m[m[PENDING] + barrier] -= count
    if m[m[PENDING] + barrier] < 0:
        m[ERROR], m[ERROR_OTHER] = ARRIVALS, barrier
        return False
    return _maybe_end_phase(m, barrier)


@inner
def _wait(m, actor, barrier, parity):
    finished = m[m[FINISHED] + barrier]
    if finished & 1 == parity:
        return _block(m, actor, 8 * barrier + ON_PHASE)
    clock = _row(m, m[CLOCKS], actor)
    # Of the phases that let it go on, the first may have been the one; more is not known.
    phase = m[clock + m[m[BARRIER_LANES] + barrier]]
    if phase & 1 == parity:
        phase += 1
    if phase > 0:
        kept = max(phase, finished - PHASES + 1)
        _join(m, clock, _row(m, m[PUBLISHED], barrier * PHASES + kept % PHASES))
    if m[PROOF]:
        if phase < finished:
            m[ERROR], m[ERROR_OTHER] = LATE_WAIT, barrier
            return False
        at = barrier * m[NUM_ACTORS] + actor
        m[m[WAITED] + at] = m[clock + m[m[A_LANE] + actor]]
        m[m[WAITED_PHASE] + at] = phase
    return True


@inner
def _bring(m, actor, row):
    barrier = m[row + B]
    lane = m[m[BARRIER_LANES] + barrier]
    if m[PROOF] and m[_row(m, m[CLOCKS], actor) + lane] < m[m[FINISHED] + barrier]:
        m[ERROR], m[ERROR_OTHER] = EARLY_COPY, barrier
        return False
    if _boxes_meet(m, actor, m[row + D], m[row + E]):
        return False
    record = _access(m, actor, row, m[row + A])
    if record < 0:
        return False
    m[record + R_BARRIER], m[record + R_BYTES] = barrier, m[row + C]
    event = _later(m, m[DELAY] + 1)
    m[event + 2], m[event + 3] = LAND, record
    return True


@inner
def _send(m, actor, row):
    partition = m[m[A_PARTITION] + actor]
    m[m[SENDS] + partition] += 1
    count = m[m[SENDS] + partition]
    if _access(m, actor, row, m[row + A]) < 0:
        return False
    if _boxes_meet(m, actor, m[row + D], m[row + E]):
        return False
    m[m[SLOTS] + m[row + B]], m[m[SLOT_ACTORS] + m[row + B]] = count, actor
    m[m[SENT_STATE] + m[m[P_SENDS] + partition] + count] = 1
    event = _later(m, m[DELAY] + 1)
    m[event + 2], m[event + 3], m[event + 4] = HAVE_READ, partition, count
    return True


@inner
def _sent(m, actor, pendings, written):
    partition = m[m[A_PARTITION] + actor]
    last = m[m[SENDS] + partition] - pendings
    for count in range(1, last + 1):
        if m[m[SENT_STATE] + m[m[P_SENDS] + partition] + count] < 2 + written:
            return _block(m, actor, 8 * partition + ON_SENT)
    copies = _row(m, m[CLOCKS], actor) + m[m[P_COPIES] + partition]
    m[copies] = max(m[copies], last)
    if written:
        lane = _row(m, m[CLOCKS], actor) + m[m[P_WRITTEN] + partition]
        m[lane] = max(m[lane], last)
    return True


@inner
def _multiplied(m, actor, outstanding):
    """Wait for products, which the four warps of a warpgroup make together."""
    partition, clock = m[m[A_PARTITION] + actor], _row(m, m[CLOCKS], actor)
    done = m[m[ISSUED] + actor] - outstanding
    first = m[m[P_ACTOR] + partition]
    last = first + m[m[P_WARPS] + partition]
    for mate in range(first, last):
        if m[m[ISSUED] + mate] < done:
            return _block(m, actor, 8 * partition + ON_ISSUED)
    for mate in range(first, last):
        lane = clock + m[m[A_LANE] + mate] + 1
        m[lane] = max(m[lane], done)
    return True


@inner
def _meet(m, actor, named, warps, blocks):
    clock, lane = _row(m, m[CLOCKS], actor), m[m[NAMED_LANES] + named]
    published, collected = _row(m, m[NAMED_PUBLISHED], named), _row(m, m[NAMED_COLLECTED], named)
    if m[m[MET] + actor] == 0:
        mine = m[m[NAMED_GENERATION] + named]
        mark = m[NAMED_MARK] + named * m[NUM_ACTORS] + actor
        if m[mark] == mine + 1:
            m[ERROR], m[ERROR_OTHER] = TWICE, named
            return False
        if m[PROOF] and m[clock + lane] < mine:
            m[ERROR], m[ERROR_OTHER] = EARLY_MEETING, named
            return False
        m[mark] = mine + 1
        _join(m, collected, clock)
        _advance(m, actor)
        m[m[NAMED_ARRIVED] + named] += 1
        if m[m[NAMED_ARRIVED] + named] == warps:
            m[m[NAMED_GENERATION] + named] += 1
            m[m[NAMED_ARRIVED] + named] = 0
            _join(m, published, collected)
            m[published + lane] = m[m[NAMED_GENERATION] + named]
            _clear(m, collected)
            _wake(m, 8 * named + ON_NAMED)
        if not blocks:
            return True
        m[m[MET] + actor] = mine + 1
    if m[m[NAMED_GENERATION] + named] == m[m[MET] + actor] - 1:
        return _block(m, actor, 8 * named + ON_NAMED)
    m[m[MET] + actor] = 0
    _join(m, clock, published)
    return True


@inner
def _barrier(m, actor):
    """Meet the other warps of the partition."""
    partition = m[m[A_PARTITION] + actor]
    if m[m[MET] + actor] == 0:
        m[m[MET] + actor] = m[m[GENERATION] + partition] + 1
        m[m[ARRIVED] + partition] += 1
        warps = m[m[P_WARPS] + partition]
        if m[m[ARRIVED] + partition] == warps:
            m[m[ARRIVED] + partition] = 0
            m[m[GENERATION] + partition] += 1
            first = m[m[P_ACTOR] + partition]
            clock = _row(m, m[CLOCKS], first)
            for mate in range(first + 1, first + warps):
                _join(m, clock, _row(m, m[CLOCKS], mate))
            for mate in range(first + 1, first + warps):
                _copy(m, _row(m, m[CLOCKS], mate), clock)
            for mate in range(first, first + warps):
                _advance(m, mate)
            _wake(m, 8 * partition + ON_WARPS)
    if m[m[GENERATION] + partition] == m[m[MET] + actor] - 1:
        return _block(m, actor, 8 * partition + ON_WARPS)
    m[m[MET] + actor] = 0
    return True


@inner
def _start_or_join(m, actor, row):
    """Start partitions, which learn what the starting warp knows; or wait for their ends."""
    cta, clock = m[m[P_CTA] + m[m[A_PARTITION] + actor]], _row(m, m[CLOCKS], actor)
    first = m[m[CTAS] + cta]
    begin, end = m[row + A], m[row + B]
    if m[row + KIND] == START:
        for at in range(begin, end):
            _begin(m, first + m[m[LISTS] + at], clock)
        _advance(m, actor)
        return True
    for at in range(begin, end):
        if m[m[LEFT] + first + m[m[LISTS] + at]] > 0:
            return _block(m, actor, 8 * cta + ON_END)
    for at in range(begin, end):
        _join(m, clock, _row(m, m[ENDED], first + m[m[LISTS] + at]))
    return True


@inner
def _atomic(m, actor, row):
    """Find the number that the recording found; learn and tell what its order says."""
    place, value, old, how = m[row + A], m[row + B], m[row + C], m[row + D]
    adds, acquires, releases = how & 1, how & 2, how & 4
    clock, found, base = _row(m, m[CLOCKS], actor), m[m[VALUES] + place], m[m[UPDATES_AT] + place]
    last = base + m[m[UPDATED] + place]
    known = last
    if adds:
        if (found < old) if value == 0 else (found != old):
            return _block(m, actor, 8 * place + ON_VALUE)
        if value == 0:  # of the updates that it may have found, the first
            known = base
            while m[m[UPDATE_VALUES] + known] < old:
                known += 1
        m[m[VALUES] + place] = found + value
    else:
        m[m[VALUES] + place] = value
    if acquires:
        _join(m, clock, _row(m, m[UPDATES], known))
    if value != 0 or not adds:
        m[m[UPDATED] + place] += 1
        update = _row(m, m[UPDATES], last + 1)
        _copy(m, update, _row(m, m[UPDATES], last))
        m[m[UPDATE_VALUES] + last + 1] = m[m[VALUES] + place]
        if releases:
            _join(m, update, clock)
            _advance(m, actor)
        _wake(m, 8 * place + ON_VALUE)
    return True


@inner
def _do(m, actor, step):
    """Do a step; return False where the actor must wait or something is wrong."""
    row = m[STEPS] + STEP * step
    kind, a, b = m[row + KIND], m[row + A], m[row + B]
    if kind == BARRIER:
        return _barrier(m, actor)
    if kind == WAIT:
        return _wait(m, actor, a, b)
    if kind == ARRIVE:
        return _arrive(m, actor, a, b, m[row + C])
    if kind in (LOAD, STORE):
        return _access(m, actor, row, a) >= 0
    if kind == MULTIPLY:
        m[m[ISSUED] + actor] += 1
        for at in range(a, b):
            if _access(m, actor, row, m[m[LISTS] + at]) < 0:
                return False
        _wake(m, 8 * m[m[A_PARTITION] + actor] + ON_ISSUED)
        return True
    if kind == MULTIPLIED:
        return _multiplied(m, actor, a)
    if kind == BRING:
        return _bring(m, actor, row)
    if kind == SEND:
        return _send(m, actor, row)
    if kind == SENT:
        return _sent(m, actor, a, b)
    if kind == FENCE:
        _fence(m, actor)
        return True
    if kind == MEET:
        return _meet(m, actor, a, b, m[row + C])
    if kind == ATOMIC:
        return _atomic(m, actor, row)
    if kind == INIT:
        m[m[ARRIVALS_WANTED] + a] = b
        m[m[PENDING] + a] = b
        return True
    return _start_or_join(m, actor, row)


@inner
def _happen(m):
    """Let the first of the events happen."""
    events = m[EVENTS]
    first = events
    for at in range(events + EVENT, events + EVENT * m[NUM_EVENTS], EVENT):
        if m[at] < m[first] or (m[at] == m[first] and m[at + 1] < m[first + 1]):
            first = at
    due, kind, a, b = m[first], m[first + 2], m[first + 3], m[first + 4]
    m[NOW] = max(m[NOW], due)
    m[NUM_EVENTS] -= 1
    last = events + EVENT * m[NUM_EVENTS]
    for at in range(EVENT):
        m[first + at] = m[last + at]
    m[DUE] = NEVER
    for at in range(events, last, EVENT):
        m[DUE] = min(m[DUE], m[at])
    if kind == GO_ON:
        _make_ready(m, a)
    elif kind == LAND:
        barrier = m[a + R_BARRIER]
        m[m[BYTES] + barrier] -= m[a + R_BYTES]
        phase = m[m[FINISHED] + barrier] + 1
        m[a + R_EPOCH] = phase
        lane = _row(m, m[COLLECTED], barrier) + m[m[BARRIER_LANES] + barrier]
        m[lane] = max(m[lane], phase)
        _maybe_end_phase(m, barrier)
    else:
        m[m[SENT_STATE] + m[m[P_SENDS] + a] + b] = 2 if kind == HAVE_READ else 3
        _wake(m, 8 * a + ON_SENT)
        if kind == HAVE_READ:
            event = _later(m, m[DELAY] + 1)
            m[event + 2], m[event + 3], m[event + 4] = HAVE_WRITTEN, a, b


@inner
def _reset(m, seed, proof):
    for at in range(NOW, HEADER - 63):
        m[at] = 0
    for at in range(m[ZERO], m[ZERO_END]):
        m[at] = 0
    # Neighbouring seeds are far apart, and none is zero.
    m[SEED] = ((seed * 2654435769 + 0x1234567) & 0xFFFFFFFF) | 1
    m[PROOF] = proof
    m[DUE] = NEVER
    for actor in range(m[NUM_ACTORS]):
        m[m[AT] + actor] = m[m[P_BEGIN] + m[m[A_PARTITION] + actor]]
    for partition in range(m[NUM_PARTITIONS]):
        m[m[LEFT] + partition] = m[m[P_WARPS] + partition]
    for place in range(m[NUM_VALUES]):
        base = m[m[UPDATES_AT] + place]
        m[m[VALUES] + place] = m[m[VALUES_FIRST] + place]
        m[m[UPDATE_VALUES] + base] = m[m[VALUES_FIRST] + place]
        _clear(m, _row(m, m[UPDATES], base))


@inner
def _run(m, seed, proof):
    """Run one schedule; m[ERROR] says what is wrong with it."""
    _reset(m, seed, proof)
    # How this schedule is: long runs or short ones, late copies or early ones, stalls or none.
    burst = (1, 2, 8, 40)[_random(m) % 4]
    m[DELAY] = (2, 20, 100, 400)[_random(m) % 4]
    stall = (0, 2, 20)[_random(m) % 3]  # of 1,000 steps
    if proof:
        stall = 0
    for _ in range(m[RESIDENT]):
        _next_cta(m)
    while True:
        while (m[NUM_EVENTS] and m[NUM_READY] == 0) or (not proof and m[DUE] <= m[NOW]):
            _happen(m)
            if m[ERROR]:
                return
        if m[NUM_READY] == 0:
            break
        chosen = m[READY] + _random(m) % m[NUM_READY]
        actor = m[chosen]
        m[NUM_READY] -= 1
        m[chosen] = m[m[READY] + m[NUM_READY]]
        end, first = m[m[P_END] + m[m[A_PARTITION] + actor]], m[m[A_FIRST] + actor]
        left = _random(m) % (2 * burst) + 1
        goes_on = True
        while left > 0:
            step = m[m[AT] + actor]
            m[ERROR_ACTOR], m[ERROR_STEP] = actor, step
            if step == end:
                if not _end(m, actor):
                    return
                goes_on = False
                break
            if m[m[STEPS] + STEP * step + FIRST] and not first:
                m[m[AT] + actor] += 1
                continue
            m[NOW] += 1
            left -= 1
            if not _do(m, actor, step):
                if m[ERROR]:
                    return
                m[m[BLOCKED] + m[NUM_BLOCKED]] = actor
                m[NUM_BLOCKED] += 1
                goes_on = False
                break
            m[m[AT] + actor] += 1
            if stall and _random(m) % 1000 < stall:
                event = _later(m, 10 * m[DELAY] + 1)
                m[event + 2], m[event + 3] = GO_ON, actor
                goes_on = False
                break
            while not proof and m[DUE] <= m[NOW]:
                _happen(m)
                if m[ERROR]:
                    return
        if goes_on:
            _make_ready(m, actor)
    if m[NUM_BLOCKED] or m[NEXT_CTA] < m[NUM_CTAS]:
        m[ERROR] = DEADLOCK


@njit(cache=True)
def run_many(m, first, count, proof):
    """Run schedules until one is wrong; return how many were right."""
    for seed in range(first, first + count):
        _run(m, seed, proof)
        if m[ERROR]:
            return seed - first
    return count
