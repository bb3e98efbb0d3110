"""What compiled code does where one partition hands shared memory over to another.

The emulator counts on barriers among the warps of a partition that Triton puts in, not the kernel
(see tools/gluon_emulator/recording.py). Whether they are there is looked up in PTX.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_BARRIER = re.compile(r"^\s*(bar\.sync\s+\w+, \w+;\s*$|bar\.sync\s+\w+;|bar\.warp\.sync|barrier\.)")
_ACCESS = re.compile(r"\b(ldmatrix|stmatrix|ld\.shared|st\.shared|wgmma\.mma_async|wgmma\.wait)\b")
_WRITE = re.compile(r"\b(stmatrix|st\.shared)\b")
_LABEL = re.compile(r"^\s*(\$L__\w+):")
_BRANCH = re.compile(r"^\s*(@!?%\w+\s+)?(bra|brx)\b[^;]*?(\$L__\w+)?;")
_END = re.compile(r"^\s*(ret|exit|trap);")


class _State(NamedTuple):
    """What holds at a line: of several ways to it, what holds on all, and what on some."""

    guarded: bool  # a barrier has been met, and no access since
    written: bool  # or none has been met, or memory has been written since
    waits: bool  # for outgoing copies, and no barrier since

    def joined(self, other: _State) -> _State:
        return _State(
            self.guarded and other.guarded, self.written or other.written, self.waits or other.waits
        )


def bare_handovers(ptx: str) -> list[str]:
    """Return the hand-overs that no barrier of the warps of their partition guards.

    An arrival at an mbarrier must come after such a barrier, and no access of shared memory in
    between, a copy out of shared memory likewise, and nothing written in between, whichever way
    leads there; a wait for outgoing copies must be followed by one.
    """
    if "mbarrier.arrive" not in ptx and "cp.async.bulk" not in ptx:
        return []  # nothing is handed over
    lines = ptx.splitlines()
    starts = sorted({0, *(n for n, line in enumerate(lines) if _LABEL.match(line))})
    blocks = list(zip(starts, [*starts[1:], len(lines)], strict=True))
    labels = {m[1]: n for n, (at, _) in enumerate(blocks) if (m := _LABEL.match(lines[at]))}
    nothing = _State(guarded=False, written=True, waits=False)
    before = {0: nothing}  # where the way there is not followed: partitions begin by a table
    for table in re.findall(r"\.branchtargets([^;]*);", ptx):
        before |= {labels[label]: nothing for label in re.findall(r"\$L__\w+", table)}
    pending = list(before)
    while pending:
        block = pending.pop()
        for target, state in _leave(lines[slice(*blocks[block])], before[block], labels, block + 1):
            joined = state.joined(before.get(target, state))
            if target < len(blocks) and before.get(target) != joined:
                before[target] = joined
                pending.append(target)
    found: list[str] = []
    for block, state in sorted(before.items()):
        for line in lines[slice(*blocks[block])]:
            state = _after(line, state, found)
    return found


def _leave(
    lines: list[str], state: _State, labels: dict[str, int], following: int
) -> list[tuple[int, _State]]:
    """Return the blocks that a block goes on to, and the state that each is entered with."""
    found = []
    for line in lines:
        state = _after(line, state, [])
        if branch := _BRANCH.match(line):
            if branch[3] in labels:
                found.append((labels[branch[3]], state))
            if branch[1] is None:
                return found
        elif _END.match(line):
            return found
    return [*found, (following, state)]


def _after(line: str, state: _State, found: list[str]) -> _State:
    """Return what holds after a line; add to `found` what is wrong there."""
    if _BARRIER.search(line):
        return _State(guarded=True, written=False, waits=False)
    if _ACCESS.search(line):
        if state.waits:
            found.append(f"after a wait for copies: {line.strip()}")
        written = state.written or _WRITE.search(line) is not None
        return _State(guarded=False, written=written, waits=False)
    if "mbarrier.arrive.shared" in line or "cp.async.bulk.tensor" in line:
        leaves = "cp.async.bulk.tensor" in line and ".global.shared" in line
        if state.written if leaves else "mbarrier.arrive" in line and not state.guarded:
            found.append(line.strip())
    elif re.search(r"cp\.async\.bulk\.wait_group\.read", line):
        return state._replace(waits=True)
    return state
