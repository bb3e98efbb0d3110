"""How many threads a step should use, learnt from how long steps took."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Teams"]

STEPS = 3  # of a team whose median counts, and of a trial of the slower one
SOONEST, LATEST = 64, 4096  # steps until a slower team is tried again: doubled each time it loses


@dataclass
class _Kind:
    """Steps of one kind: what each team took of late, and when the slower one is tried again."""

    times: dict[int, list[float]] = field(default_factory=dict)
    wait: int = SOONEST
    left: int = SOONEST  # steps until then, negative during a trial
    best: int = 0


class Teams:
    """Chooses between one thread and all that a step's work allows, by their measured times.

    Where threads get no core, since others use the machine, a second one makes a step slower: then
    one is chosen. What a step computes does not depend on it. The slower team is tried again for
    three steps after 64, then 128, at last every 4,096 steps.

    Example:
        >>> teams = Teams()
        >>> num_threads = teams.choose(kind, most)
        >>> teams.record(kind, most, num_threads, seconds)
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def choose(self, kind: int, most: int) -> int:
        """Return the number of threads for a step of `kind`: 1 or `most`."""
        if most == 1:
            return 1
        known = self._kinds.setdefault((kind, most), _Kind())
        for team in (most, 1):
            if len(known.times.get(team, ())) < STEPS:
                return team
        return known.best if known.left > 0 else most + 1 - known.best

    def record(self, kind: int, most: int, team: int, seconds: float) -> None:
        """Note what a step of `kind`, for which there were `most`, took on `team` threads."""
        if most == 1:
            return
        known = self._kinds.setdefault((kind, most), _Kind())
        if known.left > STEPS and known.best:
            known.left -= 1
            return  # before the next trial there are STEPS others, whose median will count
        times = known.times.setdefault(team, [])
        times.append(seconds)
        del times[:-STEPS]
        if any(len(known.times.get(each, ())) < STEPS for each in (1, most)):
            return
        known.left -= 1
        if known.best == 0 or known.left == -STEPS:
            best = min((1, most), key=lambda each: _median(known.times[each]))
            known.wait = min(2 * known.wait, LATEST) if best == known.best else SOONEST
            known.best, known.left = best, known.wait


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]
