"""How many threads a step should use, learnt from how long steps took."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Teams"]

STEPS = 3  # of a team whose median counts in a trial
TRIAL = 4 * STEPS  # steps in turns: two on all threads, two on one, of which the second counts
DECISIVE = 1.4  # times as long at best: then the first eight steps of a trial are enough
SOONEST, LATEST = 32, 4096  # steps until the next trial: doubled each time the same team wins


@dataclass
class _Kind:
    """Steps of one kind: the times of the current trial by number of threads, and the number that
    won the last trial."""

    times: dict[int, list[float]] = field(default_factory=dict)
    tried: int = 0  # steps of the trial
    wait: int = SOONEST
    left: int = 0  # steps until the next trial
    best: int = 0


class Teams:
    """Chooses between one thread and all that a step's work allows, by their measured times.

    Where threads get no core, since others use the machine, a second one makes a step slower: then
    one is chosen. What a step computes does not depend on it. Both are tried in turns, so that what
    drifts, as caches and pages that are new do, is fair to both; and two steps at a time, since the
    first one may have to wake helpers. They are tried again after 32 steps, then 64, at last every
    4,096.

    Example:
        >>> teams = Teams()
        >>> num_threads = teams.choose(kind, most)
        >>> teams.record(kind, most, num_threads, seconds)
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def choose(self, kind: int, most: int) -> int:
        """Return the number of threads for a step of `kind`: 1 or `most`.

        It is the one of the last trial that won, or during a trial the one whose turn it is. Kinds
        are told apart together with `most`.
        """
        if most == 1:
            return 1
        known = self._kinds.setdefault((kind, most), _Kind())
        return known.best if known.left > 0 else _tried_next(known, most)

    def record(self, kind: int, most: int, team: int, seconds: float) -> None:
        """Note the seconds of a step on `team` threads, by which a trial is decided.

        Between two trials it only counts the steps.

        Args:
            kind: the kind of the step.
            most: the number of threads that the step might have used.
        """
        if most == 1:
            return
        known = self._kinds.setdefault((kind, most), _Kind())
        if known.left > 0:
            known.left -= 1
            return
        if team != _tried_next(known, most):
            return  # another step has chosen
        if known.tried % 2:
            known.times.setdefault(team, []).append(seconds)
        known.tried += 1
        if known.tried % 4 or known.tried == 4:
            return
        # Of two steps the better one: whatever else ran may have spoilt the other.
        rule = _median if known.tried == TRIAL else min
        found = {each: rule(known.times[each]) for each in (1, most)}
        best = min(found, key=lambda each: found[each])
        if known.tried == TRIAL or max(found.values()) > DECISIVE * found[best]:
            known.wait = min(2 * known.wait, LATEST) if best == known.best else SOONEST
            known.best, known.left = best, known.wait
            known.times, known.tried = {}, 0


def _tried_next(known: _Kind, most: int) -> int:
    return 1 if known.tried % 4 > 1 else most


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]
