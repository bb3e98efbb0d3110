"""The Ray Serve application: N replicas of the server behind one gateway.

    HTTP -> Ray's proxy -> gateway (one) -> replicas, each an engine with the routes of a server

The gateway chooses the replica (`cluster.router`). Ray Serve delivers the request, starts and stops
replicas, and drains them: a replica that is to stop gets no new requests and ends when its requests
have. A replica's GPUs are one bundle of a placement group, which lies on one node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response

from tilewise.cluster.directory import DIRECTORY
from tilewise.cluster.gateway import Call, Gateway, Start
from tilewise.cluster.router import PrefixRouter, RoundRobin
from tilewise.errors import ReplicaLostError

__all__ = ["APP", "ROUTERS", "serve_app"]

APP = "tilewise"  # name of the application in Ray Serve
REPLICA = "replica"
ROUTERS = {"prefix": PrefixRouter, "round-robin": RoundRobin}
# Ray's own queue of a replica would hide requests from the router and from the engine's queue,
# which has limits of its own: Ray's limit is so high that it is never reached.
MOST_REQUESTS = 100_000
# Seconds without a step after which Ray restarts a replica, unless stall_s is given. A step may
# wait for a kernel to compile, and a restarted replica would have to compile it again.
STALL_S = 300.0
NOT_MEANT = 421  # HTTP's "misdirected request": a replica got a request for another one


class Replica:
    """One replica, an actor of Ray Serve: an engine and the server's routes, without sockets.

    Args:
        model: the model, see LLM.
        options: options of `tilewise serve`, by name.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from tilewise.server.command import Steps, application, checked, new_service

        settings, keys = checked(options)
        self.service, self._close = new_service(model, settings, keys, Steps())
        self.app = application(self.service)
        self.name = serve.get_replica_context().replica_id.unique_id

    async def call(
        self, method: str, path: str, query: bytes, headers: Any, body: bytes, *, target: str
    ) -> AsyncGenerator[Any, None]:
        """Serve one HTTP request: yield (status, headers), then the parts of the answer's body as
        bytes.

        `target` is the replica for which the request is meant; another one yields only status 421.
        If the caller closes the generator, the request is cancelled.
        """
        if target != self.name:
            yield (NOT_MEANT, [])
            return
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {},
        }
        has_left = asyncio.Event()
        inbox: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        parts: asyncio.Queue[Any] = asyncio.Queue(64)

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await parts.put((message["status"], [(n, v) for n, v in message["headers"]]))
            else:
                if message.get("body"):
                    await parts.put(bytes(message["body"]))

        async def run() -> None:
            try:
                await self.app(scope, receive, send)
            finally:
                await parts.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await task
        finally:
            has_left.set()
            if not task.done():
                with suppress(asyncio.TimeoutError, asyncio.CancelledError):
                    await asyncio.wait_for(task, 5.0)

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has stopped working; Ray, which calls this, then starts
        another replica."""
        trouble = self.service.bridge.trouble()
        if trouble is not None:
            raise RuntimeError(trouble)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return {"capacity": the number of tokens for which the cache has room}, for the gateway's
        router."""
        limits = self.service.bridge.llm.limits
        return {"capacity": int(limits.num_blocks * limits.block_size)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return {"load": the replica's load}, as `cluster.autoscale.load_of` computes it, for the
        autoscaler."""
        from tilewise.cluster.autoscale import load_of

        stats = self.service.bridge.llm.stats().scheduler
        seats = self.service.bridge.llm.limits.max_num_seqs
        load = load_of(stats.num_running, stats.num_waiting, seats, stats.used_fraction)
        return {"load": float(load)}

    def __del__(self) -> None:
        """Close the engine; Ray calls this when the last request has ended."""
        service = getattr(self, "service", None)
        if service is not None:
            self._close(5.0)
            service.template.renderer.close()


class _Replicas:
    """The gateway's `Backend` that reaches replicas by a handle of Ray Serve."""

    def __init__(self, handle: Any) -> None:
        # This also begins to ask Ray for the replicas.
        self._handle = handle.options(stream=True, method_name="call")

    def replicas(self) -> dict[str, int]:
        """Return the names of the replicas to which Ray sends requests, with the tokens that each
        caches."""
        return DIRECTORY.replicas(REPLICA)

    async def open(self, name: str, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """Send a request to replica `name`; yield the start of the answer, then its parts.

        Raises ReplicaLostError if the replica is gone or takes no requests any more; one that Ray
        reports dead is removed from the directory of replicas. If the caller stops early, the
        request is cancelled.
        """
        answer = self._handle.remote(
            call.method, call.path, call.query, list(call.headers), call.body, target=name
        )
        is_over = False
        try:
            async for part in answer:
                if isinstance(part, bytes):
                    yield part
                elif part[0] == NOT_MEANT:
                    raise ReplicaLostError(f"replica {name} takes no requests any more")
                else:
                    yield Start(part[0], tuple((bytes(n), bytes(v)) for n, v in part[1]))
            is_over = True
        except (RayActorError, DeploymentUnavailableError, TaskCancelledError) as error:
            is_over = True
            DIRECTORY.drop(REPLICA, name)
            said = " ".join(str(error).split())[:200]
            raise ReplicaLostError(f"replica {name}: {said}") from None
        finally:
            if not is_over:
                with contextlib.suppress(Exception):
                    answer.cancel()


class _Relay(Response):
    """A Starlette response that lets the gateway read the request and write the answer itself."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve the request by the gateway, as an ASGI application."""
        await self._gateway(scope, receive, send)


class Front:
    """The gateway as a deployment of Ray Serve.

    Args:
        replicas: the handle of the replicas.
        routing: the name of a router in ROUTERS.
        max_body_bytes: the largest body of a request.
    """

    def __init__(self, replicas: Any, routing: str, max_body_bytes: int) -> None:
        self.gateway = Gateway(_Replicas(replicas), ROUTERS[routing](), max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        """Return the response for one request, which forwards it to a replica when Starlette sends
        it."""
        return _Relay(self.gateway)


def serve_app(
    model: str = "story",
    *,
    replicas: int = 1,
    max_replicas: int | None = None,
    routing: str = "prefix",
    num_cpus: float = 1.0,
    num_gpus: float | None = None,
    upscale_delay_s: float = 10.0,
    downscale_delay_s: float = 300.0,
    **options: Any,
) -> Any:
    """Return a Ray Serve application: replicas of one server behind one OpenAI-compatible address.

    Run again on the same cluster, it replaces the replicas one by one; an old one ends when its
    requests have. A single replica is replaced before it ends. If it has GPUs, which may be all
    there are, it ends first: requests then wait, and are refused after 30 s.

    Args:
        model: the checkpoint directory, on every node, or "story".
        replicas: the number of servers; the smallest number if they are scaled.
        max_replicas: the largest number; None for no scaling.
        routing: the routing, "prefix" (where the beginning is cached, weighed against load) or
            "round-robin".
        num_cpus: the cores that each replica reserves.
        num_gpus: the GPUs that each replica reserves; None for tensor_parallel_size on a cuda
            device, otherwise none.
        upscale_delay_s, downscale_delay_s: the seconds for which more, or fewer, replicas must be
            wanted before the number is changed.
        options: options of `tilewise serve` by name, without those of its sockets. Without keys
            clients must use an address or localhost, unless allow_open is set.

    Returns:
        The argument of `ray.serve.run(app, name=APP)`.

    Raises:
        ValueError: a number is out of its range, or an option is wrong.

    Example:
        >>> from ray import serve
        >>> from tilewise.distributed import serve_app
        >>> serve.run(serve_app("story", replicas=3), name="tilewise")
    """
    from tilewise.server.command import checked

    settings, _ = checked(options)
    if "stall_s" not in options:
        settings["stall_s"] = STALL_S
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if max_replicas is not None and max_replicas < replicas:
        raise ValueError(f"max_replicas must be at least replicas {replicas}, got {max_replicas}")
    if routing not in ROUTERS:
        raise ValueError(f"routing must be one of {', '.join(ROUTERS)}, got {routing!r}")
    if num_gpus is None:
        is_cuda = str(settings["device"] or "").startswith("cuda")
        num_gpus = float(settings["tensor_parallel_size"] or 1) if is_cuda else 0.0
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    bundle = {"CPU": num_cpus, "GPU": num_gpus}
    bundle = {name: value for name, value in bundle.items() if value}
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas,
                max_replicas=max_replicas,
                upscale_delay_s=upscale_delay_s,
                downscale_delay_s=downscale_delay_s,
                look_back_period_s=10.0,
                policy=AutoscalingPolicy(policy_function="tilewise.cluster.autoscale:policy"),
            )
        }
    placed: dict[str, Any] = {"ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}}
    if num_gpus > 1:
        placed |= {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    servers = serve.deployment(
        Replica,
        name=REPLICA,
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=settings["shutdown_timeout"],
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        # A second replica may find no free GPUs; reserved cores are not used up.
        max_surge_percent=0 if num_gpus else 100 if replicas == 1 else 0,
        request_router_config=RequestRouterConfig(
            request_router_class="tilewise.cluster.directed.DirectedRouter",
            request_routing_stats_period_s=1.0,
        ),
        **scaling,
        **placed,
    )
    front = serve.deployment(
        Front,
        name="gateway",
        # the gateway passes all requests, so a new one must be ready before the old one ends
        max_surge_percent=100,
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings["shutdown_timeout"],
        graceful_shutdown_wait_loop_s=0.2,
    )
    # All options, so that no variable or file of another node changes one.
    handle = servers.bind(model, {n: v for n, v in settings.items() if v is not None})
    return front.bind(handle, routing, settings["max_body_bytes"])


def running_replicas() -> int:
    """Return how many replicas are running, according to Ray Serve."""
    status = serve.status().applications.get(APP)
    if status is None or REPLICA not in status.deployments:
        return 0
    return int(status.deployments[REPLICA].replica_states.get("RUNNING", 0))
