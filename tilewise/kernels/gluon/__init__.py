"""Hopper's own kernels (sm_90a), in Gluon: TMA, WGMMA, specialised warps.

The launchers have the signatures of `kernels.triton`. No kernel module may hold inline assembly or
ask for a Triton version: that is in `device.compat` and `device.warpgroup`, which the CPU emulator
of the tests replaces.
"""

from tilewise.kernels.host.keys import settle_names

settle_names()
