"""`python -m tilewise` is the command line."""

import os
import sys

# Python has put the current folder first. Unless this package is in it, its modules are not ours.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from tilewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
