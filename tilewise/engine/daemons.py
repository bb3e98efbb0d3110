"""Work that may take long or never end, on threads that do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")


def beside(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a new daemon thread, which does not keep the process from ending.

    A thread pool is not used: in it other work would wait behind this one, and the interpreter
    waits for a pool's threads at its end.

    Returns:
        The future of the result of `work`, or of the exception that it raises.
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
