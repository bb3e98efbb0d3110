"""The repair of attention on Hopper: portable kernels, launched in microseconds.

See `kernels.triton.attention_repair`. Looking cost 3 to 8 us a forward pass and 9 to 29 us a
backward pass (H200, 2026-11-22), so calls that hide pairs by no more than a diagonal go without.
"""

from __future__ import annotations

import functools

from tilewise.kernels.gluon._launch import launch
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.triton import attention_repair as portable

__all__ = ["needs_repair", "repair_bwd", "repair_fwd"]

repair_fwd = functools.partial(portable.repair_fwd, start=launch)
repair_bwd = functools.partial(portable.repair_bwd, start=launch)


def needs_repair(spec: AttentionSpec) -> bool:
    """Say whether results of `spec` are looked at."""
    return spec.mask_tile is not None
