"""Run `tilewise deploy` once its options are parsed: a cluster, the application, its end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from tilewise.cluster.application import APP, running_replicas, serve_app
from tilewise.server.command import checked
from tilewise.server.run import bind

__all__ = ["deploy"]

# Options of `tilewise serve` that concern a replica's sockets, or that Ray's proxy does not offer.
_OTHERS = ("ssl_keyfile", "ssl_certfile", "demo")
_OWN = (
    "replicas",
    "max_replicas",
    "routing",
    "num_cpus",
    "num_gpus",
    "upscale_delay_s",
    "downscale_delay_s",
)
LOOK_S = 0.5
# Settings of a cluster started here: no usage statistics are sent, and a proxy on a busy machine
# has time to start.
_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
}


def deploy(model: str, given: Mapping[str, Any]) -> int:
    """Run `tilewise deploy`: serve a model by several replicas until told to stop.

    Without `address` a Ray cluster on this machine is started, and stopped at the end. With one,
    the application is deployed there and stays; if it runs there already, its replicas are replaced
    one by one.

    Args:
        model: the model, see LLM.
        given: options by name: those of `serve_app`, the "address" of a Ray cluster or None, and
            those of `tilewise serve`.

    Returns:
        The exit code: 0, or 1 if the application ended by itself.

    Raises:
        ValueError: an option is wrong, the port is in use, or the cluster lacks resources.
        ConnectionError: no Ray cluster is at the address.
    """
    begun = time.perf_counter()
    options = {name: value for name, value in given.items() if name not in (*_OWN, "address")}
    settings, keys = checked(options)
    for name in _OTHERS:
        if settings[name]:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} must not be given to deploy: put what ends TLS before it, got "
                f"{settings[name]}"
            )
    host, port, address = settings["host"], settings["port"], given.get("address")
    if not port:
        raise ValueError("--port must be a number of its own for deploy, got 0")
    if address is None:
        bind(host, port).close()  # checked here, as Ray would report it late and in many lines
    # The options tell the replicas the address of Ray's proxy; they listen nowhere.
    own = {name: given[name] for name in _OWN if given.get(name) is not None}
    app = serve_app(model, **own, **options)
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    started = {"num_cpus": _cores(own), "include_dashboard": False} if address is None else {}
    ray.init(
        address or "local",
        namespace="tilewise",
        logging_level=logging.WARNING,
        log_to_driver=False,
        **started,
    )
    try:
        _check_resources(own, settings)
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        serve.run(app, name=APP, route_prefix="/")
        access = f"{len(keys)} keys" if keys else "no key needed"
        print(
            f"tilewise: {running_replicas()} replicas of {model} at http://{host}:{port} "
            f"({access}), {time.perf_counter() - begun:.2f} s after the start",
            file=sys.stderr,
            flush=True,
        )
        if address is not None:
            return 0
        code = _wait()
        serve.delete(APP)  # this waits for running requests
        serve.shutdown()
        return code
    finally:
        ray.shutdown()


def _cores(own: Mapping[str, Any]) -> float:
    """Return the number of cores to declare for a cluster of one machine: those it has, or more if
    all replicas reserve more."""
    most = own.get("max_replicas") or own.get("replicas") or 1
    # Replicas reserve cores so that Ray spreads them over machines; one machine leaves no choice.
    return float(max(os.cpu_count() or 1, 1 + most * own.get("num_cpus", 1.0)))


def _check_resources(own: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check that the cluster has the GPUs and cores of all replicas, for which Ray would otherwise
    wait.

    Raises:
        ValueError: replicas need more GPUs or cores than there are.
    """
    there = ray.cluster_resources()
    gpus = own.get("num_gpus")
    if gpus is None:
        is_cuda = str(settings["device"] or "").startswith("cuda")
        gpus = float(settings["tensor_parallel_size"] or 1) if is_cuda else 0.0
    replicas = own.get("replicas", 1)
    for kind, each in (("GPU", gpus), ("CPU", own.get("num_cpus", 1.0))):
        if replicas * each > there.get(kind, 0.0):
            raise ValueError(
                f"--replicas must fit the cluster's {there.get(kind, 0.0):g} {kind}s at {each:g} "
                f"each, got {replicas}"
            )


def _wait() -> int:
    """Wait for SIGTERM or SIGINT and return 0, or for the application to fail or end and return
    1."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    while not told.wait(LOOK_S):
        status = serve.status().applications.get(APP)
        if status is None or status.status == "DEPLOY_FAILED":
            print("tilewise: the application has ended", file=sys.stderr, flush=True)
            return 1
    return 0
