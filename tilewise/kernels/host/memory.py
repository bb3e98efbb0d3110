"""The one memory of launches: prepared kernels, encoded maps, and tensors that outlive a call."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

__all__ = ["LaunchMemory", "launches"]

_MAX_MET = 8192  # maps of all launches together: some 2 KB each


class LaunchMemory:
    """The state that launches keep for later ones; `launches` is the process's only one.

    Attributes:
        calls: the `Calls` of each kernel, by kernel, constants and types of arguments.
        met: the memories of launches that hold encoded maps, one entry for each map.
        tensors: the tensors of `lasting.made_once`, by their keys.
        zeros: the `lasting.Zeros` that kernels count with, by the index of a device.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[object, ...], Any] = {}
        self.met: list[dict[tuple[int, ...], Any]] = []
        self.tensors: dict[tuple[object, ...], Tensor] = {}
        self.zeros: dict[int, Any] = {}
        self._lock = threading.Lock()

    def add_met(self, met: dict[tuple[int, ...], Any], places: tuple[int, ...], found: Any) -> None:
        """Keep the encoded descriptors `found` of a launch for the addresses `places`.

        If very many are kept, all launches forget theirs.
        """
        with self._lock:
            if len(self.met) >= _MAX_MET:
                for each in self.met:
                    each.clear()
                self.met.clear()
            self.met.append(met)
            met[places] = found


launches = LaunchMemory()
