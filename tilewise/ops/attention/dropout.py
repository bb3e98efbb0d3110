"""dropout_keep_mask(): which probabilities attention drops, and where the seed comes from."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks
from tilewise.reference import dropout

Seed = int | tuple[int, int] | Tensor | None


def philox_of(seed: Seed, device: torch.device) -> Tensor:
    """Return (seed, offset) as int64 (2,) on `device`, without waiting for it.

    An int is the seed, with offset 0; a pair is both; a tensor is returned as it is. None draws
    both from torch's generator of the device, so torch.manual_seed and activation checkpointing
    repeat them.

    Raises:
        ValueError, TypeError: the seed is none of these, or out of range.
    """
    if seed is None:
        return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        checks.check_same_dtype("seed", seed, torch.int64)
        checks.check_shape("seed", seed, (2,))
        checks.check_device("seed", seed, device)
        return seed
    if isinstance(seed, tuple | list):
        if len(seed) != 2:
            raise ValueError(f"seed must be an int or (seed, offset), got {seed!r}")
        key, offset = seed
    else:
        key, offset = seed, 0
    for name, given, low, high in (
        ("seed", key, -(2**63), 2**63),
        ("seed offset", offset, 0, 2**32),
    ):
        value = checks.host_int(name, given)
        if not low <= value < high:
            raise ValueError(f"{name} must lie in [{low}, {high}), got {value}")
    # Two fills: a copy from the host would wait for the device, and cannot enter a CUDA graph.
    words = [torch.full((), word, dtype=torch.int64, device=device) for word in (key, offset)]
    return torch.stack(words)


def scaled_as_given(o: Tensor, dropout_p: float) -> Tensor:
    """Return o of `attention`, rescaled as flash-attn scales: by (1 - r) / (1 - dropout_p).

    r is dropout_p rounded to steps of 1/256, the rate that both use. `attention` multiplies kept
    probabilities by 1 / (1 - r), so that o is right on average; flash-attn by 1 / (1 - dropout_p).
    """
    rate = dropout.dropout_rate(dropout_p)
    return o if dropout_p in (0, 1, rate) else o * ((1 - rate) / (1 - dropout_p))


@names
def dropout_keep_mask(
    shape: tuple[int, int, int, int],
    *,
    dropout_p: float,
    seed: int | tuple[int, int] | Tensor,
    device: torch.device | str = "cpu",
    **unknown: Never,
) -> Tensor:
    """Return which probabilities `attention` keeps when called with these dropout_p and seed.

    The mask is a function of the seed and of each probability's place alone: it is the same in the
    forward and backward pass, on every backend, and whatever the tiles. Kept probabilities are
    multiplied by 1 / (1 - r), where r is the rate in use.

    Args:
        shape: (B, Hq, Sq, Sk); a packed batch uses the longest lengths, and each sequence reads
            the upper left corner of its own part.
        dropout_p: probability of dropping, in [0, 1], rounded to the nearest multiple r of 1/256
            (of 1/256 to 255/256 but for 0 and 1).
        seed: as given to `attention`: an int, (seed, offset), or int64 (2,) on `device`.
        device: the device of the mask.

    Returns:
        bool (B, Hq, Sq, Sk), True where kept.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: Philox4x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Example:
        >>> keep = dropout_keep_mask((2, 8, 128, 128), dropout_p=0.1, seed=7)
        >>> o = attention(q, k, v, dropout_p=0.1, seed=7)
    """
    if unknown:
        raise unknown_keyword(dropout_keep_mask, unknown)
    if len(shape) != 4 or min(shape) < 0:
        raise ValueError(f"shape must be four sizes (B, Hq, Sq, Sk), got {shape}")
    checks.check_dropout(dropout_p)
    if seed is None:
        raise ValueError("seed must be given, for a mask that can be drawn again, got None")
    return dropout.keep_mask(philox_of(seed, torch.device(device)), shape, dropout_p)
