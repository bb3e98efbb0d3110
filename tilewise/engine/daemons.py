"""Work that may take long or never end, on threads that do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")


def beside(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a thread of its own, which does not keep the process from ending.

    A pool would let others wait behind it, and the interpreter waits for a pool's threads.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, name="tilewise-beside", daemon=True).start()
    return future
