"""Whether PTX keeps numbers before their flags, see `tilewise.kernels.triton.step.flagged_sum`."""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"^\s*(?:@!?%?\w+\s+)?"
    r"(?P<what>bar\.sync|fence\.acq_rel\.sys|st\.relaxed\.sys|ld\.acquire\.sys|st\.global|ld\.global\.cg)",
    re.M,
)


def bare_flags(ptx: str) -> list[str]:
    """Return what is wrong, in the order of the text; nothing where no flag is awaited.

    Between numbers that are stored and a flag must be a barrier and then a fence; between a flag
    that is awaited and numbers that are read past L1, a barrier.
    """
    if "ld.acquire.sys" not in ptx:
        return []
    wrong = []
    is_stored = is_met = is_fenced = is_awaited = False
    for match in _WORDS.finditer(ptx):
        what = match["what"]
        if what == "bar.sync":
            is_met, is_awaited = True, False
        elif what == "fence.acq_rel.sys":
            is_fenced = is_met
        elif what == "st.global":
            is_stored, is_met, is_fenced = True, False, False
        elif what == "ld.acquire.sys":
            is_awaited = True
        elif what == "st.relaxed.sys":
            if is_stored and not is_fenced:
                wrong.append("a flag that its numbers may follow")
        elif is_awaited:
            wrong.append("numbers that are read before their flag")
    return wrong
