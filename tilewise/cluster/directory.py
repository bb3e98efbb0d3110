"""The replicas of a deployment: written by Ray's callbacks, read by the gateway.

Both are in one process, on different threads. No torch, no Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

__all__ = ["DIRECTORY", "Directory"]


class Directory:
    """A thread-safe table of the replicas of each deployment: name -> tokens that the replica
    caches, 0 if not known yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, int]] = {}

    def publish(self, deployment: str, replicas: Mapping[str, int]) -> None:
        """Replace the replicas of a deployment by these, which accept requests from now on."""
        with self._lock:
            self._known[deployment] = dict(replicas)

    def drop(self, deployment: str, name: str) -> None:
        """Remove a replica that is gone, before the cluster reports it."""
        with self._lock:
            self._known.get(deployment, {}).pop(name, None)

    def replicas(self, deployment: str) -> dict[str, int]:
        """Return the replicas of a deployment by name, with the tokens that each caches; empty if
        unknown."""
        with self._lock:
            return dict(self._known.get(deployment, {}))


DIRECTORY = Directory()
"""That of this process."""
