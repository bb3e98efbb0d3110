"""Ray Serve's part of routing: report the replicas, and deliver a request to the gateway's choice.

Ray pickles this file by value, so objects shared within a process are imported when they are used.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

__all__ = ["DirectedRouter"]


class DirectedRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve's request router that offers only the replica which a call names as `target`.

    If that replica is gone, another one gets the call and answers 421, so that the gateway chooses
    again.

    A replica is asked for the length of its queue before it gets a request. A replica that is busy
    with a step on a loaded machine may take a while to answer, and is waited for.
    """

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 20.0

    def update_replicas(self, replicas: list[Any]) -> None:
        """Publish the replicas that accept requests, with the tokens that each caches, in
        DIRECTORY; Ray calls it."""
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
        """Remove a replica that is gone from DIRECTORY; Ray calls it."""
        from tilewise.cluster.directory import DIRECTORY

        super().on_replica_actor_died(replica_id)
        DIRECTORY.drop(self._deployment_id.name, replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replica that the request names as `target`, as one rank of candidates; all of
        them if it is gone."""
        if pending_request is not None:
            # otherwise Ray retries without a pause
            pending_request.routing_context.should_backoff = True
        target = None if pending_request is None else pending_request.kwargs.get("target")
        found = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        # Ray retries until a replica accepts the request. A replica that is gone never will, so
        # another one gets the request and answers that it is not meant for it.
        return [found or candidate_replicas]
