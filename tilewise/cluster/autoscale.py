"""How many replicas are wanted: by their queues, their seats and their caches.

    load of a replica = the larger of (running + waiting sequences) / seats
                        and the share of its cache that sequences own
    wanted            = ceil(sum of the loads / target)

A queue makes the load larger than 1, a cache cannot. What only the prefix cache keeps is no load.
No torch, no Ray: `policy` reads what Ray hands it by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["load_of", "policy", "wanted_replicas"]

TARGET = 0.7  # of each replica: the rest is for bursts that come before a new one is ready


def load_of(running: int, waiting: int, seats: int, used_fraction: float) -> float:
    """Return the load of a replica.

    Args:
        running, waiting: sequences.
        seats: sequences that may run at once.
        used_fraction: share of the cache's blocks that sequences own, 0 to 1.
    """
    return max((running + waiting) / seats, used_fraction)


def wanted_replicas(loads: Iterable[float]) -> int:
    """Return how many replicas would have the target load if all did as much, at least 1."""
    return max(1, math.ceil(sum(loads) / TARGET - 1e-9))


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return what Ray Serve shall scale to; bounds and delays are those of its settings.

    Args:
        context: Ray Serve's AutoscalingContext; a metric "load" of each replica is read.
    """
    told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    loads = list(told.get("load", {}).values())
    # Replicas that have not said yet count as loaded as they should be: nothing is known of them.
    unheard = max(0, context.current_num_replicas - len(loads))
    wanted = wanted_replicas([*loads, *[TARGET] * unheard])
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}
