"""Random schedules of the engine's scheduler, many thousands of them, in parallel processes.

Each schedule is a story of the simulation tests: requests arrive, end, fail and are aborted over a
tiny cache, all invariants are checked after each step, and the tokens must be those of each request
alone. The kinds take turns, so that however many run, each kind has its share:

    plain    one pool of blocks, forks, aborts, failing steps          test_scheduler_simulation
    tiers    policies, victims, main memory, files, deadlines           test_tier_simulation
    groups   layers with windows, several pools, main memory            test_group_simulation
    beams    beam searches that meet in a small cache                   test_beams
    drafts   guesses in chains, verified                                test_speculative
    trees    guesses in trees                                           test_speculative
    whole    all of these at once                                       test_whole_simulation
    states   the same over layers that keep states                      test_state_simulation
    short    that with few requests, which takes an eighth of the time  test_state_simulation

    python lab/random_schedules.py --count 100000 --processes 2 --json F

A schedule that fails is printed with its kind and seed, and the exit status is 1; `--kind tiers
--first SEED --count 1` plays it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine import (
    test_group_simulation,
    test_state_simulation,
    test_tier_simulation,
    test_whole_simulation,
)
from tests.engine.test_beams import BeamStory
from tests.engine.test_scheduler_simulation import Story
from tests.engine.test_speculative import DraftStory, TreeStory

BATCH = 50  # schedules that a process plays at a time


def play_plain(seed: int) -> None:
    """Play one schedule; it raises if anything is wrong."""
    story = Story(seed, overlap=seed % 2 == 1, fails=seed % 4 == 3, damages=seed % 5 == 4)
    story.play()
    story.judge()
    story.retry_failed()


def play_tiers(seed: int) -> None:
    """Play one schedule."""
    test_tier_simulation.play(seed).retry_failed()


def play_groups(seed: int) -> None:
    """Play one schedule."""
    test_group_simulation.play(seed)


def play_beams(seed: int) -> None:
    """Play one schedule."""
    story = BeamStory(seed, overlap=seed % 2 == 0)
    story.play()
    story.judge()


def play_drafts(seed: int) -> None:
    """Play one schedule."""
    story = DraftStory(seed, overlap=seed % 2 == 0)
    story.play()
    story.judge()


def play_trees(seed: int) -> None:
    """Play one schedule."""
    story = TreeStory(seed, overlap=seed % 2 == 0)
    story.play()
    story.judge()


def play_whole(seed: int) -> None:
    """Play one schedule."""
    test_whole_simulation.play(seed)


def play_states(seed: int) -> None:
    """Play one schedule."""
    test_state_simulation.play(seed)


def play_short(seed: int) -> None:
    """Play one schedule."""
    test_state_simulation.play(seed, test_state_simulation.ShortStory)


KINDS = {
    "plain": play_plain,
    "tiers": play_tiers,
    "groups": play_groups,
    "beams": play_beams,
    "drafts": play_drafts,
    "trees": play_trees,
    "whole": play_whole,
    "states": play_states,
    "short": play_short,
}


def play_many(kind: str, first: int, count: int) -> tuple[str, int, list[tuple[int, str]], float]:
    """Play schedules `first` ... and return the kind, how many, what failed, and the CPU time."""
    failed: list[tuple[int, str]] = []
    start = time.process_time()
    for seed in range(first, first + count):
        try:
            KINDS[kind](seed)
        except Exception:  # whatever it is, the seed is what is wanted
            failed.append((seed, traceback.format_exc(limit=-3)))
    return kind, count, failed, time.process_time() - start


def main() -> int:
    """Play, print progress, write what ran; 1 if a schedule failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="schedules of all kinds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=1_000_000, help="seed of each kind's first")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after")
    parser.add_argument("--json", type=Path, help="where counts and failures go, also meanwhile")
    args = parser.parse_args()
    done, failed, cpu_s = Counter[str](), list[tuple[str, int, str]](), 0.0
    start = time.monotonic()

    def write() -> None:
        if args.json is not None:
            counts = {
                "schedules": sum(done.values()),
                "by_kind": dict(done),
                "first_seed": args.first,
                "failed": [[kind, seed, text] for kind, seed, text in failed],
                "wall_s": round(time.monotonic() - start, 1),
                "cpu_s": round(cpu_s, 1),
            }
            args.json.write_text(json.dumps(counts, indent=1) + "\n")

    tasks, per_kind = [], -(-args.count // len(args.kind))
    for offset in range(0, per_kind, BATCH):
        size = min(BATCH, per_kind - offset)
        tasks += [(kind, args.first + offset, size) for kind in args.kind]
    tasks.reverse()
    with ProcessPoolExecutor(args.processes) as pool:
        running = {
            pool.submit(play_many, *tasks.pop()) for _ in range(min(args.processes, len(tasks)))
        }
        shown = start
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                kind, count, wrong, seconds = future.result()
                done[kind] += count
                cpu_s += seconds
                for seed, text in wrong:
                    failed.append((kind, seed, text))
                    print(f"FAILED {kind} {seed}\n{text}", flush=True)
                if tasks and time.monotonic() - start < args.seconds:
                    running.add(pool.submit(play_many, *tasks.pop()))
            if time.monotonic() - shown > 10 or not running:
                shown = time.monotonic()
                total = sum(done.values())
                print(
                    f"{total:,} of {args.count:,} in {shown - start:.0f} s, {len(failed)} failed",
                    flush=True,
                )
                write()
    write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
