"""Run calls of every kernel again and again and say whether all runs gave the same bits.

    python benchmarks/stress_kernels.py --seconds 600 --json stress.json
    python benchmarks/stress_kernels.py --cases forward/packed backward_in_order/ --seconds 120
    python benchmarks/stress_kernels.py --delays 8,4096 --cases forward/ --seconds 300
    python benchmarks/stress_kernels.py --list

Needs a Hopper GPU, the repository (its tests have the cases) and nothing else. A row for each case;
the last line is JSON, and --json holds what is known so far at any time. The exit status is 1 where
runs differed or a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(int("TILEWISE_DELAYED" in os.environ), str(ROOT))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="for all cases together")
    parser.add_argument("--runs", type=int, default=1_000_000, help="of a case, at most")
    parser.add_argument("--cases", nargs="*", default=[""], help="what their names begin with")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the order of cases")
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that all cases are gone through"
    )
    parser.add_argument(
        "--delays", metavar="CHANCE,MOST",
        help="stall each warp once in CHANCE places for up to MOST ns (powers of two)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the results so far")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    return parser.parse_args()


def _with_delays(chance: int, most: int) -> None:
    """Start again with a copy of the package whose Hopper kernels stall."""
    from tests.kernels.gluon.delays import write_package

    folder = tempfile.mkdtemp(prefix="tilewise-delayed-")
    count = write_package(Path(folder), chance, most)
    print(f"kernels stall at {count} places; their copy is in {folder}", flush=True)
    path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TILEWISE_DELAYED": folder}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _write(path: Path | None, summary: dict[str, Any]) -> None:
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(summary) + "\n")
        beside.replace(path)


def main() -> int:
    arguments = _arguments()
    if arguments.delays and "TILEWISE_DELAYED" not in os.environ:
        _with_delays(*(int(part) for part in arguments.delays.split(",")))
    import torch

    from tests.kernels.kernel_stress import gpu_cases, stress

    cases = [
        (name, prepare)
        for name, prepare in gpu_cases()
        if any(name.startswith(wanted) for wanted in arguments.cases)
    ]
    if arguments.list:
        print("\n".join(name for name, _ in cases))
        return 0
    if not cases:
        raise SystemExit(f"cases must begin names that --list shows, got {arguments.cases}")
    cases *= arguments.rounds
    random.Random(arguments.seed).shuffle(cases)
    begin = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    summary: dict[str, Any] = {
        "device": properties.name,
        "torch": torch.__version__,
        "delays": arguments.delays,
        "seed": arguments.seed,
        "cases_wanted": len(cases),
        "runs": 0,
        "differing": 0,
        "failed": 0,
        "cases": [],
    }
    print(f"{'case':52} {'runs':>9} {'differ':>7} {'seconds':>8}", flush=True)
    for number, (name, prepare) in enumerate(cases):
        left = arguments.seconds - (time.perf_counter() - begin)
        if left <= 0:
            break
        # What preparing takes is not known: the time left is shared by the cases left.
        share = left / (len(cases) - number)
        torch.manual_seed(arguments.seed)
        started = time.perf_counter()
        try:
            prepared = prepare()
            prepared.run()
            torch.cuda.synchronize()
            most = max(share - (time.perf_counter() - started), min(1.0, share))
            found = asdict(stress(name, prepared, most, arguments.runs))
            del prepared
        except Exception as error:
            found = {"name": name, "runs": 0, "differing": 0, "error": f"{error!r}"[:500]}
            summary["failed"] += 1
        summary["cases"].append(found)
        summary["runs"] += found["runs"]
        summary["differing"] += found["differing"]
        summary["seconds"] = time.perf_counter() - begin
        took = found.get("seconds", 0.0)
        note = found.get("error") or (json.dumps(found["first"])[:300] if found["first"] else "")
        print(
            f"{name:52} {found['runs']:>9,} {found['differing']:>7,} {took:>8.1f} {note}",
            flush=True,
        )
        _write(arguments.json, summary)
    print(json.dumps(summary))
    return int(summary["differing"] > 0 or summary["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
