"""Play seeds: python -m tests.simulation FIRST [LAST]; what fails is made small and told."""

from __future__ import annotations

import sys
import time

from tests.simulation.minimise import report, why_fails
from tests.simulation.plan import plan_of
from tests.simulation.world import digest, play

TOLD_EVERY = 500  # seeds, some 40 s


def main(given: list[str]) -> int:
    """Play the seeds from the first to the last; return 1 if one fails."""
    first = int(given[0])
    last = int(given[1]) if len(given) > 1 else first
    began, failed = time.perf_counter(), []
    for seed in range(first, last + 1):
        if why_fails(plan_of(seed)) is not None:
            failed.append(seed)
            print(report(plan_of(seed)), flush=True)
        if (seed + 1 - first) % TOLD_EVERY == 0:
            print(f"seeds {first} to {seed}: {len(failed)} failed", file=sys.stderr, flush=True)
    if first == last and not failed:
        world = play(plan_of(first))
        print("\n".join(world.log))
        print(f"{len(world.outcomes)} requests, digest {digest(world)}")
    seconds = time.perf_counter() - began
    print(f"{last - first + 1} seeds, {len(failed)} failed {failed}, {seconds:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
