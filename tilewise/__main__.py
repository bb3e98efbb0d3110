"""Run the command line: `python -m tilewise`."""

import os
import sys

# Python has put the current folder first: drop it, unless it contains this package.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from tilewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
