"""Ray Serve's part of routing: it tells who is there, and sends a request where the gateway says.

Ray pickles this file by value, so that what all share in a process is imported when it is used.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

__all__ = ["DirectedRouter"]


class DirectedRouter(RequestRouter):  # type: ignore[misc]
    """Offers the replica that a call names as `target`; where that is gone, the call fails.

    A replica is asked for the length of its queue before it gets a request; one that is busy with a
    step on a loaded machine may take a while to say, and is waited for.
    """

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 20.0

    def update_replicas(self, replicas: list[Any]) -> None:
        """Note who takes requests."""
        from tilewise.cluster.directory import DIRECTORY

        super().update_replicas(replicas)
        DIRECTORY.publish(
            self._deployment_id.name,
            {
                r.replica_id.unique_id: int((r.routing_stats or {}).get("capacity", 0))
                for r in replicas
            },
        )

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Note that a replica is gone."""
        from tilewise.cluster.directory import DIRECTORY

        super().on_replica_actor_died(replica_id)
        DIRECTORY.drop(self._deployment_id.name, replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replica that the gateway has chosen."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else Ray asks without a pause
        target = None if pending_request is None else pending_request.kwargs.get("target")
        found = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        # Ray asks again and again until somebody takes the request: one that is gone never will, so
        # another one gets it, sees that it is not meant and says so.
        return [found or candidate_replicas]
