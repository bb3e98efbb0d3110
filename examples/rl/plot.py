"""Draw runs of grpo.py beside each other: reward, difference, KL, ratio.

python examples/rl/plot.py exact.json mismatch.json --out rl.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = (
    ("reward", "mean reward", "linear"),
    ("difference", "max |logp_train - logp_rollout|", "symlog"),
    ("kl", "KL(rollout || train), first pass", "symlog"),
    ("ratio", "max |ratio - 1|, first pass", "symlog"),
)


def main(given: Sequence[str] | None = None) -> None:
    """Draw the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2))
    for path in options.runs:
        run = json.loads(path.read_text())
        steps = run["steps"]
        for axis, (name, title, scale) in zip(axes, PANELS, strict=True):
            axis.plot([s["step"] for s in steps], [s[name] for s in steps], label=path.stem)
            if scale == "symlog":
                axis.set_yscale("symlog", linthresh=1e-8)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("step")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
