"""torch.multiprocessing.spawn, of processes that have imported torch: see `tests/warm.py`."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm

_ROOT = Path(__file__).parents[2]


def spawn(function: Callable[..., object], args: tuple[Any, ...], nprocs: int) -> None:
    """Run function(rank, *args) in `nprocs` processes; raise if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "call")
        path.write_bytes(pickle.dumps((function, args)))
        command = [sys.executable, "-m", "tests.lab.spawned", str(path)]
        started = [warm.Popen([*command, str(rank)], cwd=_ROOT) for rank in range(nprocs)]
        statuses = [process.wait() for process in started]
    if any(statuses):
        raise RuntimeError(f"processes must end with 0, got {statuses}")


if __name__ == "__main__":
    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(int(sys.argv[2]), *args)
