"""`python -m tools.hub_kernel OUT`: write the kernel's folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.hub_kernel.build import build


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.hub_kernel", description="Write a kernel of the Hugging Face hub."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    try:
        print(build(parser.parse_args().out))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
