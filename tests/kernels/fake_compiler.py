"""Answers requests as `compile_worker` does, as their names ask: a compiler to test its callers."""

from __future__ import annotations

import os
import pickle
import sys
import time


def main() -> None:
    busy = set[str]()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        what = request.name
        if what == "dies":
            os._exit(3)
        if what == "sleeps":
            time.sleep(600)
        if what == "busy" and request.hash not in busy:
            busy.add(request.hash)
            answer = ("busy", 0.0, "")
        elif what == "fails":
            answer = ("failed", 0.0, "ValueError: no")
        else:
            answer = ("found" if what == "found" else "compiled", 0.25, "")
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
