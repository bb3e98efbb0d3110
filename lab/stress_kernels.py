"""Run calls of every kernel again and again and say whether all runs gave the same bits.

    python lab/stress_kernels.py --seconds 600 --warm-processes 14 --json stress.json
    python lab/stress_kernels.py --cases forward/packed backward_in_order/ --seconds 120
    python lab/stress_kernels.py --delays 8,4096 --cases forward/ --seconds 300
    python lab/stress_kernels.py --skip-done lab/results/stress_h200.json --runs 100000
    python lab/stress_kernels.py --list

Needs a Hopper GPU, the repository (its tests have the cases) and nothing else. Processes compile
cases side by side, others prepare what is compiled and run it in turn, cheap cases first
(`tests/kernels/stress_queue.py`). A line every few seconds, one for each case that fails or
differs; the last line is JSON with totals. --json holds every case, written anew after each. The
exit status is 1 where runs differed or a case failed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import queue
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if "TILEWISE_DELAYED" not in os.environ:  # else PYTHONPATH has both, the copy first
    sys.path.insert(0, str(ROOT))

from tests.kernels.stress_queue import Cases, Process, drive, former_records  # noqa: E402


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for all, compiling and starts included"
    )
    parser.add_argument("--runs", type=int, default=100_000, help="of a case, after which it ends")
    parser.add_argument("--cases", nargs="*", default=[""], help="what their names begin with")
    parser.add_argument(
        "--warm-processes",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="that compile; 0 where the kernels are compiled already",
    )
    parser.add_argument(
        "--runners", type=int, default=3, help="processes that prepare cases; one runs at a time"
    )
    parser.add_argument(
        "--lanes",
        type=int,
        default=1,
        help="runs of a case at once: small calls leave most of a GPU idle",
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs")
    parser.add_argument(
        "--skip-done",
        type=Path,
        metavar="JSON",
        help="results of an earlier stress: its runs are counted on, and its finished cases kept",
    )
    parser.add_argument(
        "--enough", type=int, help="runs that finish a case of --skip-done (default: --runs)"
    )
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=math.inf,
        help="of runs of a case, after which it ends too: a long call hands over more often",
    )
    parser.add_argument(
        "--delays",
        metavar="CHANCE,MOST",
        help="stall each warp once in CHANCE places for up to MOST ns (powers of two)",
    )
    parser.add_argument("--json", type=Path, help="file for the results so far")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
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


def _check_package() -> None:
    """End unless the package that is imported is the copy with stalls, where there is one."""
    import tilewise

    folder, found = os.environ.get("TILEWISE_DELAYED"), Path(tilewise.__file__).resolve()
    if folder is not None and not found.is_relative_to(Path(folder).resolve()):
        raise SystemExit(f"kernels that stall must be those of {folder}, got {found}")


def _write(path: Path | None, summary: dict[str, Any]) -> None:
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(summary) + "\n")
        beside.replace(path)


def _last_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.split("\n")[-1][:500]


def _work(seed: int, lanes: int) -> None:
    """Compile, prepare and run cases as lines of the standard input ask, one answer to each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    import torch

    from tests.kernels.kernel_stress import Captured, first_run, gpu_cases

    cases = dict(gpu_cases())
    torch.cuda.init()
    answer(verb="there")
    captured: Captured | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        verb, name = asked["verb"], asked["name"]
        prepared = None
        try:
            if verb == "run":
                assert captured is not None
                found = asdict(captured.stress(name, asked["seconds"], asked["runs"]))
                captured = None
                answer(verb=verb, found=found)
            elif verb == "warm":
                torch.manual_seed(seed)
                prepared = cases[name]()
                prepared.run()
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(5):
                    prepared.run()
                torch.cuda.synchronize()
                answer(verb=verb, each=(time.perf_counter() - started) / 5)
            else:
                torch.manual_seed(seed)
                prepared = cases[name]()
                captured = Captured(prepared, first_run(prepared), lanes=lanes)
                answer(verb=verb, each=captured.each)
        except BaseException as error:
            traceback.print_exc()
            captured = None
            answer(verb=verb, error=_last_line(error))
            del error
            torch.cuda.synchronize()  # raises where the context is lost: this process ends
        prepared = None
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    arguments = _arguments()
    _check_package()
    if arguments.worker:
        _work(arguments.seed, arguments.lanes)
        return 0
    # The copy with stalls is another process under the same bound.
    began = float(os.environ.setdefault("TILEWISE_STRESS_BEGAN", str(time.time())))
    if arguments.delays and "TILEWISE_DELAYED" not in os.environ:
        _with_delays(*(int(part) for part in arguments.delays.split(",")))
    until = time.monotonic() + arguments.seconds - (time.time() - began)
    import torch

    from tests.kernels.kernel_stress import gpu_cases

    names = [
        name
        for name, _ in gpu_cases()
        if any(name.startswith(wanted) for wanted in arguments.cases)
    ]
    if arguments.list:
        print("\n".join(names))
        return 0
    if not names:
        raise SystemExit(f"cases must begin names that --list shows, got {arguments.cases}")
    former = {}
    if arguments.skip_done is not None:
        former = former_records(arguments.skip_done, arguments.delays)
    cases = Cases(
        names, arguments.runs, former, arguments.enough, arguments.warm_processes > 0,
        arguments.most_seconds,
    )  # fmt: skip
    known: dict[str, Any] = {
        "device": torch.cuda.get_device_properties(0).name,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "delays": arguments.delays,
        "seed": arguments.seed,
        "lanes": arguments.lanes,
        "runs_asked": arguments.runs,
        "cases_wanted": len(names),
    }
    logs = Path(tempfile.mkdtemp(prefix="tilewise-stress-"))
    print(
        f"{cases.count('cold', 'ready')} of {len(names)} cases to run; what processes print "
        f"is in {logs}",
        flush=True,
    )

    def start(role: str, events: queue.Queue[tuple[Process, Any]]) -> Process:
        command = [sys.executable, __file__, "--worker", "--seed", str(arguments.seed)]
        command += ["--lanes", str(arguments.lanes)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return Process(command, role, events, environment, logs / f"{role}.log")

    def note() -> None:
        _write(arguments.json, known | {"seconds": time.time() - began} | cases.summary())

    def say(line: str) -> None:
        print(line, flush=True)

    drive(
        cases, start, warmers=arguments.warm_processes, runners=arguments.runners, until=until,
        note=note, say=say,
    )  # fmt: skip
    summary = known | {"seconds": time.time() - began} | cases.summary()
    not_run = [case.name for case in cases.all.values() if not case.runs]
    if not_run:
        say(f"{len(not_run)} cases have not run: {' '.join(not_run)[:2000]}")
    del summary["cases"]
    print(json.dumps(summary))
    return int(summary["differing"] > 0 or summary["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
