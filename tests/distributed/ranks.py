"""Processes that run functions of the tests together, with gloo between them.

They are started once for all tests; a test names a function and gives plain values.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from tests import warm
from tilewise.distributed.environment import worker_environment

PATIENCE_S = 120.0
MARK = "RANK-ANSWERS "


class Ranks:
    """`count` processes; calls may use the first few of them."""

    def __init__(
        self, count: int, folder: Path, backend: str = "gloo", patience_s: float = PATIENCE_S
    ) -> None:
        self.patience = patience_s
        root = str(Path(__file__).parents[2])
        environment = worker_environment()
        environment["PYTHONPATH"] = os.pathsep.join([root, environment["PYTHONPATH"]])
        environment["OMP_NUM_THREADS"] = environment["NUMBA_NUM_THREADS"] = "1"
        self.processes = [
            warm.Popen(
                [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(count),
                 str(folder / "meet"), backend],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        self._number = 0
        self._readers = []
        self._answers = [queue.SimpleQueue() for _ in self.processes]
        for process, answers in zip(self.processes, self._answers, strict=True):
            reader = threading.Thread(target=_read, args=(process, answers), daemon=True)
            reader.start()
            self._readers.append(reader)

    def run(self, function, size: int, **values):
        """Return what the function gives on each of the first `size` ranks.

        An answer {"error": [type, text]} is what it raised.
        """
        self._number += 1
        ask = {"module": function.__module__, "name": function.__name__, "size": size,
               "values": values, "number": self._number}  # fmt: skip
        for process in self.processes[:size]:
            process.stdin.write(json.dumps(ask) + "\n")
            process.stdin.flush()
        return [self._answer(answers) for answers in self._answers[:size]]

    def _answer(self, answers):
        while True:
            number, answer = answers.get(timeout=self.patience)
            if number == self._number:  # not what an earlier call was too impatient for
                return answer

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
        for reader in self._readers:
            reader.join(PATIENCE_S)


def _read(process, answers) -> None:
    with process.stdout as lines:
        for line in lines:
            if line.startswith(MARK):
                answers.put(json.loads(line[len(MARK) :]))


def _serve(rank: int, count: int, meeting: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(meeting, count), rank=rank,
                            world_size=count)  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in range(1, count + 1)}
    for line in sys.stdin:
        ask = json.loads(line)
        function = getattr(importlib.import_module(ask["module"]), ask["name"])
        try:
            answer = function(groups[ask["size"]], rank, ask["size"], **ask["values"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": [type(error).__name__, str(error)]}
        print(MARK + json.dumps([ask["number"], answer]), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
