"""The launcher of rope_write_kv_cache for backend="reference": norms and rotation in float64."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.reference import paged


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> Tensor:
    """Write normalised and rotated k, and v, to the caches in place; return q, treated as k.

    The arguments are those of `ops.rope_write_kv_cache`; norms and rotation are computed in
    float64, and q is returned in its dtype.
    """
    wide: dict[str, Any] = {
        name: value.double() if isinstance(value, Tensor) and "scale" not in name else value
        for name, value in options.items()
    }
    rotated = paged.rope_write_kv_cache(
        q.double(), k.double(), v.double(), k_cache, v_cache, slot_mapping, **wide
    )
    return rotated.to(q.dtype)
