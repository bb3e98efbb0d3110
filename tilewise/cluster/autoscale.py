"""Compute the wanted number of replicas from their queues, their running requests and their caches.

    load of a replica = the larger of (running + waiting sequences) / seats
                        and the share of its cache that sequences own
    wanted            = ceil(sum of the loads / target)

A queue can make the load larger than 1, a cache cannot. Blocks that only the prefix cache holds do
not count. No torch, no Ray: `policy` reads Ray's object by attribute names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["load_of", "policy", "wanted_replicas"]

TARGET = 0.7  # load of each replica: the rest is for bursts that come before a new one is ready


def load_of(running: int, waiting: int, seats: int, used_fraction: float) -> float:
    """Return the load of a replica: the larger of (running + waiting) / seats and used_fraction.

    Args:
        running, waiting: the numbers of sequences.
        seats: the number of sequences that may run at once.
        used_fraction: the share of the cache's blocks that sequences own, 0 to 1.
    """
    return max((running + waiting) / seats, used_fraction)


def wanted_replicas(loads: Iterable[float]) -> int:
    """Return the number of replicas, at least 1, that would each have the target load."""
    return max(1, math.ceil(sum(loads) / TARGET - 1e-9))


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for Ray Serve, within its bounds, and an empty dict, its
    policy's state.

    Replicas that have not reported a load yet count with the target load.

    Args:
        context: Ray Serve's AutoscalingContext; a metric "load" of each replica is read.
    """
    told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    loads = list(told.get("load", {}).values())
    # Replicas without a metric yet count as having the target load.
    unheard = max(0, context.current_num_replicas - len(loads))
    wanted = wanted_replicas([*loads, *[TARGET] * unheard])
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}
