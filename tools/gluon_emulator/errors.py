"""What an emulated kernel can do wrong."""

from __future__ import annotations

__all__ = [
    "Deadlock",
    "EmulationError",
    "InFlight",
    "NotEmulated",
    "OutOfBounds",
    "Protocol",
    "Race",
]


class EmulationError(AssertionError):
    """The kernel did what a GPU would punish, with wrong numbers, a hang or a fault."""


class Race(EmulationError):
    """Two accesses of shared memory are not ordered, and one of them writes."""


class Deadlock(EmulationError):
    """Every partition waits and nothing is under way that could wake one."""


class OutOfBounds(EmulationError):
    """An address lies outside its tensor."""


class InFlight(EmulationError):
    """The sum of a product that still runs was read."""


class Protocol(EmulationError):
    """A barrier or a copy was used against its rules."""


class NotEmulated(NotImplementedError):
    """The emulator does not know an operation; teach it rather than work around it."""
