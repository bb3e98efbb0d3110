"""Sums through inboxes: the kernel in Triton's interpreter on several processes, and all orders."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from tests.distributed.inbox_ranks import rounded_norms, sums
from tilewise.distributed import inbox as inboxes
from tilewise.distributed.inbox import inbox_words, why_not

pytest.importorskip("triton")


def _files(folder, size, dim, itemsize):
    for rank in range(size):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(8 * inbox_words(dim, itemsize, size, deals=True))
    return str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("one_shot", [8, 0], ids=["all", "dealt"])
def test_sums_of_ranks_in_turn(ranks, tmp_path, size, dtype, one_shot, monkeypatch):
    """Rows come and go from one sum to the next, and one rank is late, then another."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, size, 40, getattr(torch, dtype).itemsize)
    rows = [5, 1, 3, 8, 2, 2, 7, 1, 1, 8]
    given = {"folder": folder, "dim": 40, "dtype": dtype, "rows": rows, "one_shot": one_shot}
    assert ranks.run(sums, size, **given) == [[]] * size


def test_ways_may_change_between_sums(ranks, tmp_path, monkeypatch):
    """Three rows are added up on all ranks, more by turns; the same places serve both."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 4, 24, 2)
    rows = [8, 1, 8, 3, 3, 8, 4, 2]
    given = {"folder": folder, "dim": 24, "dtype": "bfloat16", "rows": rows, "one_shot": 3}
    assert ranks.run(sums, 4, **given) == [[]] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_an_inbox_of_a_model_that_does_not_deal_has_no_more_than_it_uses(
    ranks, tmp_path, size, monkeypatch
):
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    monkeypatch.setattr(inboxes, "ONE_SHOT_ROWS", {2: 6, 4: 6})
    folder = _files(tmp_path, size, 40, 2)
    given = {"folder": folder, "dim": 40, "dtype": "bfloat16", "rows": [5, 1, 6, 6, 2, 6]}
    given["most_rows"] = 6  # of the processes, in which this number alone is another
    assert ranks.run(sums, size, **given, one_shot=6, deals=False) == [[]] * size
    words = inbox_words(40, 2, size, deals=False)
    assert words == 2 * 6 * size * 20
    used = torch.from_file(f"{folder}/0", size=words, dtype=torch.int64)
    assert used[-20:].all(), "the last rank's numbers of the last row"


def test_products_leave_parts(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 2, 32, 2)
    given = {"folder": folder, "dim": 32, "dtype": "bfloat16", "rows": [3, 2, 3], "parts": 3}
    assert ranks.run(sums, 2, **given, one_shot=8) == [[]] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_with_flags_of_ranks_in_turn(ranks, tmp_path, size, dtype, monkeypatch):
    """Groups of rows are full and not, and come and go; sums, embeddings and norms take turns."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, size, 40, getattr(torch, dtype).itemsize)
    rows = [5, 1, 3, 8, 2, 2, 7, 1, 1, 8, 6]
    given = {"folder": folder, "dim": 40, "dtype": dtype, "rows": rows, "one_shot": 8, "plain": 0}
    assert ranks.run(sums, size, **given) == [[]] * size


def test_flags_take_turns_with_words_and_parts(ranks, tmp_path, monkeypatch):
    """One row goes to all ranks, two and three are dealt, more have flags; products leave parts."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    given = {"dim": 24, "dtype": "bfloat16", "one_shot": 1, "plain": 3}
    rows = [8, 1, 8, 3, 2, 5, 4, 1, 6]
    for parts in (0, 1, 3):
        (tmp_path / str(parts)).mkdir()
        folder = _files(tmp_path / str(parts), 4, 24, 2)
        found = ranks.run(sums, 4, folder=folder, rows=rows, parts=parts, **given)
        assert found == [[]] * 4


def test_the_residual_is_added_and_rounded_before_the_norm_whichever_way_rows_travel(
    ranks, tmp_path, monkeypatch
):
    """Integers, whose squares add up to the same in any order: each way gives the same bits."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 4, 32, 2)
    found = ranks.run(rounded_norms, 4, folder=folder, dim=32, rows=7)
    for ways in found:
        assert set(ways) == {"all", "dealt", "flags", "rounded", "as it is"}
        assert ways["rounded"] != ways["as it is"]
        assert ways["all"] == ways["dealt"] == ways["flags"] == ways["rounded"]


def test_sums_may_be_more_than_an_int32_counts(ranks, tmp_path, monkeypatch):
    """After 2^31 - 1 sums of a row comes number -2^31; words and flags are only ever compared."""
    monkeypatch.setattr(inboxes, "MOST_ROWS", 8)
    folder = _files(tmp_path, 2, 24, 2)
    given = {"dim": 24, "dtype": "bfloat16", "one_shot": 8, "plain": 3, "before": 2**31 - 3}
    assert ranks.run(sums, 2, folder=folder, rows=[5, 2, 5, 1, 5, 3, 6, 2], **given) == [[]] * 2


def test_what_has_flags_is_bounded_by_bytes_and_rows():
    given = (0, [0] * 4, 4096, torch.bfloat16, torch.device("cpu"))
    four = inboxes.Inbox(*given, deals=True)
    assert not four.has_flags(32)  # 256 KiB
    assert four.has_flags(33)
    assert four.takes(256, 4096, torch.bfloat16)
    assert not four.takes(257, 4096, torch.bfloat16)
    assert not inboxes.Inbox(*given, deals=False).takes(256, 4096, torch.bfloat16)


def test_memory_of_flags_begins_where_that_of_words_ends():
    box = inboxes.Inbox(0, [0, 64], 4096, torch.bfloat16, torch.device("cpu"), deals=True)
    first = 8 * 2 * 256 * 3 * 2048
    assert box._flagged.tolist() == [first, 64 + first]
    # Two places of x and of y for every row, and their flags.
    assert 8 * inbox_words(4096, 2, 2, deals=True) - first == 256 * (4 * 8192 + 8)


def test_what_an_inbox_takes_is_bounded_by_bytes_and_rows():
    def box(size, deals):
        given = (0, [0] * size, 4096, torch.bfloat16, torch.device("cpu"))
        return inboxes.Inbox(*given, deals=deals)

    two, four = box(2, True), box(4, True)
    assert two.takes(256, 4096, torch.bfloat16)
    assert not two.takes(257, 4096, torch.bfloat16)
    assert four.takes(256, 4096, torch.bfloat16)
    assert not four.takes(257, 4096, torch.bfloat16)
    assert not box(4, False).takes(33, 4096, torch.bfloat16)
    small = box(4, False)
    small.one_shot_rows = 256  # as a benchmark asks for: there is no memory for more than 32
    assert small.takes(32, 4096, torch.bfloat16)
    assert not small.takes(33, 4096, torch.bfloat16)
    assert not two.takes(1, 2048, torch.bfloat16)
    assert not two.takes(1, 4096, torch.float16)
    assert not two.takes(0, 4096, torch.bfloat16)


def test_why_not():
    assert why_not(4096, torch.bfloat16, 2) is None
    assert why_not(8192, torch.bfloat16, 4) is None
    assert "multiple of 8" in why_not(4092, torch.bfloat16, 2)
    assert "got 5" in why_not(4096, torch.bfloat16, 5)
    assert "at most" in why_not(16384, torch.bfloat16, 4)
    assert "got 8" in why_not(8192, torch.bfloat16, 8)
    assert "float64" in why_not(4096, torch.float64, 2)


def _walk(programs):
    """Follow all orders in which ranks' actions can happen; return what goes wrong.

    Actions are
        ("put", inbox, place, word): the word is on its way until it is delivered, in any order;
        ("raise", inbox, place, word): likewise, but after all that this rank has put before;
        ("read", ((own place, word), ...)): waits until every word is there;
        ("take", ((own place, word), ...)): does not wait, and is wrong where one is not there;
        ("send", actions): several puts and raises at once.
    A rank waits for ever where a word can never come, since it was written over.
    """
    start = (tuple(0 for _ in programs), frozenset(), frozenset())
    seen, stack = {start}, [start]
    while stack:
        at, flying, memory = stack.pop()
        moves = []
        for item in flying:  # delivered: what was in the place is gone
            source, step, is_last, word = item
            if is_last and any(o[0] == source and o[1] < step and not o[2] for o in flying):
                continue
            kept = frozenset(m for m in memory if m[:2] != word[:2])
            moves.append((at, flying - {item}, kept | {word}))
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            kind, *what = program[at[rank]]
            ahead = (*at[:rank], at[rank] + 1, *at[rank + 1 :])
            if kind in ("put", "raise", "send"):
                actions = what[0] if kind == "send" else (program[at[rank]],)
                sent = {
                    (rank, (at[rank], i), action[0] == "raise", tuple(action[1:]))
                    for i, action in enumerate(actions)
                }
                moves.append((ahead, flying | sent, memory))
            elif all((rank, *word) in memory for word in what[0]):
                moves.append((ahead, flying, memory))
            elif kind == "take":
                return f"rank {rank} takes what is not there at {at}"
        if not moves and any(a < len(p) for a, p in zip(at, programs, strict=True)):
            return f"ranks wait for ever at {at}"
        for state in moves:
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return None


def _program(rank, size, kinds, places):
    """Return one rank's actions for a row: sums on all ranks ("all"), or on the first ("dealt")."""
    actions = []
    for epoch, kind in enumerate(kinds, 1):
        slot = epoch % places
        if kind == "all":
            actions += [("put", r, (slot, rank), epoch) for r in range(size)]
            actions.append(("read", tuple(((slot, r), epoch) for r in range(size))))
            continue
        actions.append(("put", 0, (slot, rank), epoch))
        if rank == 0:
            actions.append(("read", tuple(((slot, r), epoch) for r in range(size))))
            actions += [("put", r, (slot, "answer"), epoch) for r in range(1, size)]
        else:
            actions.append(("read", (((slot, "answer"), epoch),)))
    return actions


@pytest.mark.parametrize("kinds", list(itertools.product(("all", "dealt"), repeat=3)))
def test_two_places_are_enough_in_every_order(kinds):
    programs = [_program(rank, 2, kinds, 2) for rank in range(2)]
    assert _walk(programs) is None


def test_one_place_is_not():
    programs = [_program(rank, 2, ("all", "all"), 1) for rank in range(2)]
    assert "for ever" in _walk(programs)


def test_three_ranks_in_every_order():
    programs = [_program(rank, 3, ("dealt", "dealt"), 2) for rank in range(3)]
    assert _walk(programs) is None


def _flagged(rank, size, rows, epoch, places=2, *, fences="raise", awaits="read"):
    """Return one rank's actions in a sum of a group's first rows, each the row of one rank."""
    place, actions = epoch % places, []
    others = [r for r in range(size) if r != rank]
    owners = [r for r in others if r < rows]

    def send(what, goals):
        puts = [("put", r, (what, place, rank), epoch) for r in goals]
        flags = [(fences, r, (what, "flag", rank), epoch) for r in goals]
        actions.append(("send", tuple(puts + flags)))

    def take(what, sources):
        if awaits is not None:
            actions.append((awaits, tuple(((what, "flag", r), epoch) for r in sources)))
        actions.append(("take", tuple(((what, place, r), epoch) for r in sources)))

    send("x", owners)
    if rank < rows:
        take("x", others)
        send("y", others)
    take("y", owners)
    return actions


def _flagged_program(rank, size, kinds, **options):
    """Return one rank's actions: sums of so many rows of a group with flags, or of other ways."""
    actions = []
    for epoch, kind in enumerate(kinds, 1):
        if isinstance(kind, int):  # counted apart from other ways
            count = sum(isinstance(k, int) for k in kinds[:epoch])
            actions += _flagged(rank, size, kind, count, **options)
        else:
            own = [k for k in kinds[:epoch] if not isinstance(k, int)]
            before = _program(rank, size, own[:-1], 2)
            actions += _program(rank, size, own, 2)[len(before) :]
    return actions


@pytest.mark.parametrize(
    "kinds", [*itertools.product((1, 2), repeat=4), *itertools.product((1, 2, "all"), repeat=3),
              (2, "dealt", 2), ("dealt", 2, "dealt", 1)], ids=str,
)  # fmt: skip
def test_flags_and_two_places_are_enough_in_every_order(kinds):
    assert _walk([_flagged_program(rank, 2, kinds) for rank in range(2)]) is None


@pytest.mark.parametrize("kinds", [(3, 3, 3), (1, 3, 2), (2, 1, 3), (3, "dealt", 3)], ids=str)
def test_flags_of_three_ranks_in_every_order(kinds):
    assert _walk([_flagged_program(rank, 3, kinds) for rank in range(3)]) is None


def test_a_flag_without_a_fence_is_wrong():
    programs = [_flagged_program(rank, 2, (2,), fences="put") for rank in range(2)]
    assert "not there" in _walk(programs)


def test_an_entry_that_is_taken_without_its_flag_is_wrong():
    programs = [_flagged_program(rank, 2, (2,), awaits=None) for rank in range(2)]
    assert "not there" in _walk(programs)


def test_a_rank_that_does_not_await_the_answers_overwrites_entries():
    """What makes two places enough is that a sum ends with the answers of all."""
    programs = [_flagged_program(rank, 2, (2, 2, 2)) for rank in range(2)]
    hasty = [a for a in programs[1] if not (a[0] in ("read", "take") and a[1][0][0][0] == "y")]
    assert _walk([programs[0], hasty]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [1024, 4096])
@pytest.mark.parametrize(
    ("size", "rows", "one_shot", "has_flags"),
    [(2, 1, 8, False), (2, 8, 8, False), (4, 3, 8, False), (4, 8, 0, False),
     (2, 128, 0, True), (4, 7, 0, True), (4, 128, 0, True)],
)  # fmt: skip
def test_many_sums_in_graphs_of_ranks_that_are_streams(dim, size, rows, one_shot, has_flags):
    """The kernels of all ranks run at once on one GPU, which needs room for each of them."""
    device, replays, chain = torch.device("cuda"), int(os.environ.get("SUMS", "4000")) // 40, 40
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    words = inbox_words(dim, 2, size, deals=True)
    memory = torch.zeros(size, words, dtype=torch.int64, device=device)
    given, residual, weight = numbers(size, rows, dim), numbers(rows, dim), numbers(dim)
    boxes = [
        inboxes.Inbox(rank, [x.data_ptr() for x in memory], dim, torch.bfloat16, device, deals=True)
        for rank in range(size)
    ]
    streams = [torch.cuda.Stream() for _ in boxes]
    found = [torch.full_like(given, torch.nan) for _ in boxes]

    def sums(rank: int) -> None:
        """A chain, each sum of what the one before gave, and all that it gave."""
        box, y, kept = boxes[rank], given[rank], residual
        for _ in range(chain):
            y, kept = box.add_rms_norm(y + given[rank], kept, weight, 1e-5)
            kept = kept.clamp(-8, 8)
        found[rank][rank].copy_(y)

    def on_all(work) -> None:
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                work(rank)

    # A kernel that is loaded while others wait may wait for them, so all are loaded before: of each
    # rank, since where a number lies decides which of torch's kernels adds to it.
    wrong = torch.zeros(size, dtype=torch.int64, device=device)
    for rank in range(size):
        found[rank][rank].copy_((given[rank] + given[rank]).clamp(-8, 8))
        wrong[rank] += (found[rank][rank] != given[rank]).sum()
    wrong.zero_()
    torch.cuda.synchronize()
    for box in boxes:
        box.one_shot_rows = one_shot
        box.flagged_bytes = (0, 1 << 30) if has_flags else (0, 0)
    on_all(sums)
    torch.cuda.synchronize()
    first = [found[rank][rank].clone() for rank in range(size)]
    assert all(torch.equal(first[0], each) for each in first)
    assert first[0].isfinite().all()
    graphs = [torch.cuda.CUDAGraph() for _ in boxes]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=streams[rank]):
            sums(rank)

    def replay(rank: int) -> None:
        graphs[rank].replay()
        wrong[rank] += (found[rank][rank] != first[rank]).sum()

    for count in range(replays):
        on_all(replay)
        if count % 16 == 0:  # a stream takes only so many launches that wait
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0] * size
