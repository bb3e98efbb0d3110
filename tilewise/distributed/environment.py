"""The environment variables of one of several processes on a machine. No torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from tilewise.children import environment

__all__ = ["MULTICAST_OFF", "worker_environment"]

# NVLink multicast stays off: a program that fails while it uses multicast can take the host's GPUs
# out of service for all their users.
MULTICAST_OFF: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def worker_environment() -> dict[str, str]:
    """Return the environment variables for a worker process on this machine.

    They are those of `children.environment`, with gloo and NCCL on the loopback interface unless it
    is set otherwise, and NVLink multicast off.
    """
    found = environment()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found.setdefault(name, _loopback())
    found.setdefault("GOMP_SPINCOUNT", "1000")  # the value that the command line sets
    found.update(MULTICAST_OFF)
    return found


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")
