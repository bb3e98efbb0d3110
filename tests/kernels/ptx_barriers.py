"""What compiled code does where one partition hands shared memory over to another.

The emulator counts on barriers among the warps of a partition that Triton puts in, not the kernel
(see gluon_emulator/recording.py). Whether they are there is looked up in PTX.
"""

from __future__ import annotations

import re

_BARRIER = re.compile(r"^\s*(bar\.sync\s+\w+, \w+;\s*$|bar\.sync\s+\w+;|bar\.warp\.sync|barrier\.)")
_ACCESS = re.compile(r"\b(ldmatrix|stmatrix|ld\.shared|st\.shared|wgmma\.mma_async|wgmma\.wait)\b")
_LABEL = re.compile(r"^\s*\$L__BB")


def bare_handovers(ptx: str) -> list[str]:
    """Return the hand-overs that no barrier of the warps of their partition guards.

    An arrival at an mbarrier and a copy out of shared memory must come after such a barrier, and no
    access of shared memory in between; a wait for outgoing copies must be followed by one.
    """
    found = []
    guarded, waits = False, False
    for line in ptx.splitlines():
        if _BARRIER.search(line):
            guarded, waits = True, False
            continue
        if _LABEL.search(line):
            guarded = False
        elif _ACCESS.search(line):
            guarded = False
            if waits:
                found.append(f"after a wait for copies: {line.strip()}")
                waits = False
        elif "mbarrier.arrive.shared" in line or "cp.async.bulk.tensor" in line:
            leaves = "cp.async.bulk.tensor" in line and ".global.shared" in line
            if ("mbarrier.arrive.shared" in line or leaves) and not guarded:
                found.append(line.strip())
        elif re.search(r"cp\.async\.bulk\.wait_group\.read", line):
            waits = True
    return found
