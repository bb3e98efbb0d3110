"""Hits inside a block where layers are of several groups: who owns a source, and until when."""

from __future__ import annotations

from tilewise.engine.request import Request, SamplingParams, Sequence
from tilewise.engine.tables.block_tables import BlockTables

PROMPT = list(range(1, 13))  # three blocks of 4
WINDOWS = (None, 5)


def tables_of(*counts: int, slots: int = 0) -> BlockTables:
    return BlockTables(counts or (12, 12), 4, WINDOWS, 16, True, (slots, slots))


def sequence(number: int, tokens: list[int], salt: str = "") -> Sequence:
    request = Request(str(number), tokens, SamplingParams(), salt=salt)
    return Sequence(number, request, 0, list(tokens), len(tokens), max_len=99)


def compute(tables: BlockTables, seq: Sequence) -> list[tuple[tuple[int, int], ...]]:
    """Begin a step of all that a sequence lacks; return the copies of each group."""
    assert tables.extend(seq, seq.num_tokens)
    tables.begin_step()
    copies = [tables.take_copies(), *tables.take_other_copies()]
    seq.num_scheduled_tokens = seq.num_tokens
    return copies


def finish(tables: BlockTables, *seqs: Sequence) -> None:
    tables.end_step(0)
    for seq in seqs:
        seq.num_computed_tokens = seq.num_scheduled_tokens
        tables.register(seq)


def remember(tables: BlockTables, tokens: list[int], salt: str = "") -> list[list[int]]:
    """Let the cache know a prompt that has ended; return its blocks in each group."""
    seq = sequence(99, tokens, salt)
    assert tables.reserve(seq, 0)
    compute(tables, seq)
    finish(tables, seq)
    blocks = [list(tables.table(seq, number)) for number in range(len(tables.pools))]
    tables.release(seq)
    tables.check_integrity([], [])
    return blocks


def owners(tables: BlockTables, blocks: list[list[int]], place: int) -> list[int]:
    pools = [pool.allocator for pool in tables.pools]
    return [pool.ref_count(own[place]) for pool, own in zip(pools, blocks, strict=True)]


def test_what_is_common_is_found_to_the_token_and_copied_in_each_group():
    tables = tables_of()
    known = remember(tables, PROMPT)
    seq = sequence(1, [*PROMPT[:6], 50, 51, 52])
    assert tables.reserve(seq, 0)
    assert seq.num_computed_tokens == 6
    assert owners(tables, known, 1) == [1, 1], "a source has an owner before it is copied"
    tables.check_integrity([seq], [])
    copies = compute(tables, seq)
    assert [pairs[0][0] for pairs in copies] == [own[1] for own in known]
    assert [pairs[0][1] for pairs in copies] == [tables.table(seq, n)[1] for n in range(2)]
    assert owners(tables, known, 1) == [1, 1], "and until the copy has been made"
    finish(tables, seq)
    assert owners(tables, known, 1) == [0, 0]
    assert tables.prefix_counts == (len(PROMPT) + 9, 6)
    tables.check_integrity([seq], [])


def test_the_last_token_is_computed_and_a_first_block_is_found_whole_or_not():
    tables = tables_of()
    remember(tables, PROMPT)
    for tokens, found in (
        (PROMPT, 11), (PROMPT[:7], 6), ([*PROMPT, 50], 12), (PROMPT[:5], 4), (PROMPT[:4], 0),
        ([*PROMPT[:3], 50, 51], 0), ([*PROMPT[:4], 50, 51], 4),
    ):  # fmt: skip
        seq = sequence(1, tokens)
        assert tables.reserve(seq, 0)
        assert seq.num_computed_tokens == found
        tables.release(seq)
        tables.check_integrity([], [])


def test_a_hit_inside_a_block_never_crosses_salts():
    tables = tables_of()
    remember(tables, PROMPT, "a")
    remember(tables, [*PROMPT[:4], 60, 61, 62, 63], "b")
    seq = sequence(1, [*PROMPT[:6], 50], "b")
    assert tables.reserve(seq, 0)
    assert seq.num_computed_tokens == 4
    other = sequence(2, [*PROMPT[:6], 50], "")
    assert tables.reserve(other, 0)
    assert other.num_computed_tokens == 0


def test_two_share_one_source_in_one_step():
    tables = tables_of()
    known = remember(tables, PROMPT)
    both = [sequence(i, [*PROMPT[: 5 + i], 50 + i]) for i in (1, 2)]
    for seq in both:
        assert tables.reserve(seq, 0)
        assert tables.extend(seq, seq.num_tokens)
    assert [seq.num_computed_tokens for seq in both] == [6, 7]
    tables.begin_step()
    for own, pairs in zip(known, (tables.take_copies(), *tables.take_other_copies()), strict=True):
        assert [source for source, _ in pairs] == [own[1]] * 2
        assert len({copy for _, copy in pairs}) == 2
    assert owners(tables, known, 1) == [1, 1], "one of them is left until the step has finished"
    for seq in both:
        seq.num_scheduled_tokens = seq.num_tokens
    finish(tables, *both)
    assert owners(tables, known, 1) == [0, 0]
    tables.check_integrity(both, [])


def test_a_source_that_is_given_away_for_the_prompts_own_blocks_is_not_found():
    tokens = [*PROMPT[:6], *range(50, 57)]  # four blocks, of which one is found whole
    for count, spare, found in ((4, 0, 4), (5, 0, 6), (5, 1, 4), (6, 1, 6)):
        tables = tables_of(count, 9)
        remember(tables, PROMPT[:8])
        seq = sequence(1, tokens)
        assert tables.reserve(seq, spare)
        assert seq.num_computed_tokens == found, (count, spare)
        tables.check_integrity([seq], [])
        assert tables.extend(seq, seq.num_tokens), "there is room for the copy"


def test_every_group_must_have_the_source():
    for group in range(2):
        tables = tables_of()
        known = remember(tables, PROMPT)
        assert tables.prefix is not None
        assert tables.prefix.forget_block(group, known[group][1])
        seq = sequence(1, [*PROMPT[:6], 50])
        assert tables.reserve(seq, 0)
        assert seq.num_computed_tokens == 4
        tables.check_integrity([seq], [])


def test_who_holds_a_source_that_turns_out_to_be_damaged_tells_nobody():
    tables = tables_of()
    remember(tables, PROMPT)
    damaged, seq = sequence(1, PROMPT), sequence(2, [*PROMPT[:6], 50, 51, 52])
    assert tables.reserve(damaged, 0)
    assert tables.reserve(seq, 0)
    tables.forget([damaged], [damaged, seq])
    tables.release(damaged)
    assert seq.is_doubtful
    compute(tables, seq)
    finish(tables, seq)
    tables.check_integrity([seq], [])
    assert tables.prefix is not None
    assert tables.prefix.find([*seq.token_ids, 0], "") == []


def test_who_found_a_source_is_swapped_out_and_back_with_a_block_of_its_own():
    tables = tables_of(12, 12, slots=6)
    known = remember(tables, PROMPT)
    seq = sequence(1, [*PROMPT[:6], 50, 51, 52])
    assert tables.reserve(seq, 0)
    assert tables.swap_out([seq])
    tables.release(seq)
    assert tables.begin_step()[0] == ((known[0][0], 0), (known[0][1], 1))
    assert tables.take_other_moves()[0][0] == ((known[1][0], 0), (known[1][1], 1))
    tables.end_step(0)
    assert tables.swap_in([seq], 0)
    assert seq.num_computed_tokens == 6
    assert [tables.table(seq, n)[0] for n in range(2)] == [own[0] for own in known]
    assert all(tables.table(seq, n)[1] != known[n][1] for n in range(2))
    tables.check_integrity([seq], [])
    assert compute(tables, seq) == [(), ()]
    finish(tables, seq)
    tables.check_integrity([seq], [])
