"""A worker without a model: it does with each step what the step says for its rank. No torch."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time

LENGTH = struct.Struct("<Q")


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def main() -> None:
    line, lock = socket.socket(fileno=int(sys.argv[1])), threading.Lock()
    is_quiet = threading.Event()

    def tell(*message: object) -> None:
        body = json.dumps(message).encode()
        with lock:
            line.sendall(LENGTH.pack(len(body)) + body)

    def beat() -> None:
        while not is_quiet.wait(0.1):
            tell("beat", 7)

    threading.Thread(target=beat, daemon=True).start()
    rank = None
    while True:
        (length,) = LENGTH.unpack(_exactly(line, LENGTH.size))
        what, *rest = json.loads(_exactly(line, length))
        if what == "settings":
            rank = rest[0]["rank"]
            if rest[0].get("refuses") == rank:
                tell("failed", -1, "ValueError", "a setting must be another")
            else:
                tell("ready", rank)
        if what != "step":
            continue
        number, does = rest
        act = does[rank]
        if act == "done":
            tell("done", number, [[rank]], 0)
        elif act == "fail":
            tell("failed", number, "MemoryError", "too large")
        elif act == "exit":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        elif act == "silence":
            is_quiet.set()
            time.sleep(60)


if __name__ == "__main__":
    main()
