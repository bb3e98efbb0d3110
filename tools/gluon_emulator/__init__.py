"""A CPU emulator of the Hopper subset of Gluon, for tests.

It runs the unmodified source of Gluon kernels: partitions are threads, copies (TMA) land after
random delays, products (WGMMA) are finished when they are waited for, shared memory is full of NaN
until written, and vector clocks prove that every access is ordered. Races, deadlocks, reads of
unfinished sums, addresses out of bounds and misused barriers raise. One seed gives one schedule.

Not emulated: layouts, registers, clusters, what the compiler makes of it all (tests/kernels/
test_compile.py judges that), and the rounding inside a product of 8-bit numbers.

    with emulated(seed=1):
        o, lse = launch_fwd(q, k, v, spec)  # on CPU tensors
"""

from tools.gluon_emulator.clocks import unjudged
from tools.gluon_emulator.errors import (
    Deadlock,
    EmulationError,
    InFlight,
    NotEmulated,
    OutOfBounds,
    Protocol,
    Race,
)
from tools.gluon_emulator.launcher import emulated, recorded
from tools.gluon_emulator.program import Program
from tools.gluon_emulator.recording import Recording
from tools.gluon_emulator.replay import Replay

__all__ = [
    "Deadlock",
    "EmulationError",
    "InFlight",
    "NotEmulated",
    "OutOfBounds",
    "Program",
    "Protocol",
    "Race",
    "Recording",
    "Replay",
    "emulated",
    "recorded",
    "unjudged",
]
