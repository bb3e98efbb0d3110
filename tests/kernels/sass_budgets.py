"""How long the inner loops of Hopper's kernels may be: as long as when they were recorded.

    python -m tests.kernels.sass_budgets NAME ...      records cases (all without a name)

An inner loop is a few hundred instructions that run a thousand times: one spill, or one descriptor
that moves into ordinary registers, costs percents, and no test of numbers sees it. Spills outside
of the hot loop cost little, but must not grow unseen. Numbers are by version of Triton, since ptxas
comes with it; a version that was not recorded has no budget.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton

from tests.kernels.sass import Loop

TOLERANCE = 0.03
SPILL_TOLERANCE = 32  # bytes: what an edit elsewhere moves about
_FILE = Path(__file__).with_name("sass_budgets.json")
Kernels = dict[str, list[int]]  # name -> [instructions, products of its hot loop, bytes spilled]


def hot_loop(loops: list[dict[str, int]]) -> Loop | None:
    """Return the loop that runs most: the shortest of those with many products.

    The others are the bodies of waits that ptxas has moved out of line.
    """
    most = max((loop["products"] for loop in loops), default=0)
    hot = [Loop(**loop) for loop in loops if 2 * loop["products"] >= most]
    return min(hot, key=lambda loop: loop.length, default=None)


def measured(kernels: list[dict[str, Any]]) -> Kernels:
    """Return what is recorded of the kernels of a case."""
    hot = ((kernel, hot_loop(kernel["loops"])) for kernel in kernels)
    return {
        kernel["kernel"]: [loop.length, loop.products, kernel["spilled_bytes"]]
        for kernel, loop in hot
        if loop is not None
    }


def recorded(case: str) -> Kernels | None:
    """Return the budget of a case, None where this version of Triton has none."""
    budgets = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    return budgets.get(triton.__version__, {}).get(case)


def record(cases: dict[str, Kernels]) -> None:
    """Write budgets of this version of Triton; those of other cases stay."""
    budgets = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    mine = budgets.setdefault(triton.__version__, {})
    mine.update(cases)
    budgets = {version: dict(sorted(of.items())) for version, of in sorted(budgets.items())}
    lines = json.dumps(budgets, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ")
    _FILE.write_text(lines.replace("\n   ]", "]") + "\n")


def main(names: list[str]) -> None:
    """Compile cases and record what they are now."""
    from tests.kernels.test_compile import run_cases

    reports = run_cases(names)
    good = {
        name: measured(kernels)
        for name, kernels in reports.items()
        if not any("error" in kernel for kernel in kernels)
    }
    record(good)
    print(f"recorded {len(good)} of {len(names)} cases of triton {triton.__version__}")


if __name__ == "__main__":
    from tests.kernels.compile_cases_gluon import CASES

    main(sys.argv[1:] or [case.name for case in CASES])
