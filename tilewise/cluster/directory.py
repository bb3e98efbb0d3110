"""Which replicas of a deployment there are: written where the cluster tells, read by the gateway.

Both are in one process, on threads of their own. No torch, no Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

__all__ = ["DIRECTORY", "Directory"]


class Directory:
    """The replicas of deployments by name, with the tokens that each keeps; 0 is not known yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, int]] = {}

    def publish(self, deployment: str, replicas: Mapping[str, int]) -> None:
        """Say which replicas of a deployment take requests from now on."""
        with self._lock:
            self._known[deployment] = dict(replicas)

    def drop(self, deployment: str, name: str) -> None:
        """Say that a replica is gone, before the cluster does."""
        with self._lock:
            self._known.get(deployment, {}).pop(name, None)

    def replicas(self, deployment: str) -> dict[str, int]:
        """Return those that are known."""
        with self._lock:
            return dict(self._known.get(deployment, {}))


DIRECTORY = Directory()
"""That of this process."""
