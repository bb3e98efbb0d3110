"""`python -m tilewise` is the command line."""

import sys

from tilewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
