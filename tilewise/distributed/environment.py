"""What a process of several on one machine finds in its environment. No torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from tilewise.children import environment

__all__ = ["MULTICAST_OFF", "worker_environment"]

# NVLink multicast stays off: a program that fails while it uses it can put the host's GPUs, which
# others share, out of service.
MULTICAST_OFF: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: this package, sockets of this machine, no multicast."""
    found = environment()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        found.setdefault(name, _loopback())
    found.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it
    found.update(MULTICAST_OFF)
    return found


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")
