"""A Ray cluster of this machine, and requests to what runs on it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time

import pytest

CPUS = 4  # that the cluster pretends to have: replicas of the story model need little
START_S = 240.0  # a first start compiles kernels

# Ray's own limits are for machines that do nothing else.
PATIENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Address:
    """Where a deployment is, and requests to it."""

    def __init__(self, port):
        self.port = port

    def connect(self, timeout=60.0):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path):
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, path, **fields):
        """Return status, headers with small names, and the body."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(fields), {"content-type": "text/json"})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, headers, answer.read()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(holds, seconds=START_S):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def cluster():
    """Ray and Ray Serve's proxy; yields the address."""
    import ray
    from ray import serve

    os.environ.update(PATIENT)
    port = free_port()
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    yield Address(port)
    serve.shutdown()
    ray.shutdown()
