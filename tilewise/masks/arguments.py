"""The argument checks that the builders of masks share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.masks.tile_map import TILES, Bools

Tile = int | tuple[int, int]
Window = int | tuple[int | None, int | None]
Device = torch.device | str | None


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int; raise TypeError if it is no integer and ValueError below `least`.
    Messages begin with `name`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def check_pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return (value, value), or a tuple or list of two as a tuple; raise ValueError if it has
    another length. The type of a single value is not checked."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name} must be an int or a pair, got {value!r}")
        return value[0], value[1]
    return value, value


def check_tile(tile: Tile) -> tuple[int, int]:
    """Return (tile_q, tile_k) of a builder's argument `tile`, an int or a pair; raise ValueError
    unless both are 64 or 128."""
    tile_q, tile_k = check_pair("tile", tile)
    if tile_q not in TILES or tile_k not in TILES:
        raise ValueError(f"tile must be 64 or 128 or a pair of them, got {tile!r}")
    return tile_q, tile_k


def check_seqlens(seqlen_q: Any, seqlen_k: Any) -> tuple[int, int]:
    """Return (Sq, Sk) as ints of at least 0; Sk is Sq when seqlen_k is None."""
    first = check_count("seqlen_q", seqlen_q)
    return first, first if seqlen_k is None else check_count("seqlen_k", seqlen_k)


def check_window(window: Any) -> tuple[int | None, int | None]:
    """Return (left, right) numbers of keys, None unlimited, of a window as `attention` takes it: an
    int w gives (w - 1, 0), and None or -1 in a pair is unlimited."""
    if not isinstance(window, (tuple, list)):
        return check_count("window", window, 1) - 1, 0
    left, right = check_pair("window", window)
    bounds = []
    for name, bound in (("left", left), ("right", right)):
        unlimited = bound is None or check_count(f"window {name}", bound, -1) == -1
        bounds.append(None if unlimited else operator.index(bound))
    return bounds[0], bounds[1]


def check_bool(name: str, tensor: Tensor, least_dims: int, most_dims: int) -> Tensor:
    """Return `tensor` with 1s prepended to its shape until it has `most_dims` dimensions; raise
    TypeError if it is not bool, ValueError unless it has `least_dims` to `most_dims`."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a bool tensor, got {got}")
    if not least_dims <= tensor.dim() <= most_dims:
        raise ValueError(
            f"{name} must have {least_dims} to {most_dims} dimensions, "
            f"got shape {tuple(tensor.shape)}"
        )
    return tensor.reshape((1,) * (most_dims - tensor.dim()) + tuple(tensor.shape))


def check_integers(name: str, values: Any, dims: int) -> NDArray[np.int64]:
    """Return an integer tensor or sequence as numpy int64, with 1s prepended to its shape until it
    has `dims` dimensions; raise TypeError if it holds no integers, ValueError if it is a scalar or
    has more dimensions."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if not 0 < array.ndim <= dims:
        raise ValueError(f"{name} must have at most {dims} dimensions, got shape {array.shape}")
    return array.reshape((1,) * (dims - array.ndim) + array.shape).astype(np.int64)


def token_flags(name: str, tokens: Any, seqlen: int) -> Bools:
    """Return numpy bool flags (Bm, S) from a count of first tokens, positions, or flags (S,) or (B,
    S); raise an error if a count, a position or the number of flags does not fit `seqlen`."""
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        flags: Bools = check_bool(name, tokens, 1, 2).cpu().numpy()
        if flags.shape[1] != seqlen:
            raise ValueError(f"{name} must flag {seqlen} tokens, got {flags.shape[1]}")
        return flags
    if not isinstance(tokens, (Tensor, Sequence, np.ndarray)):
        count = check_count(name, tokens)
        if count > seqlen:
            raise ValueError(f"{name} must be at most {seqlen} tokens, got {count}")
        return np.arange(seqlen)[None] < count
    positions = check_integers(name, tokens, 1)
    if ((positions < 0) | (positions >= seqlen)).any():
        raise ValueError(f"{name} must be positions from 0 to {seqlen - 1}, got {tokens!r}")
    flags = np.zeros((1, seqlen), dtype=bool)
    flags[0, positions] = True
    return flags


def home(device: Device, *given: Any) -> torch.device:
    """Return the mask's device: `device`, else that of the first tensor given, else torch's
    default."""
    if device is not None:
        return torch.device(device)
    for tensor in given:
        if isinstance(tensor, Tensor):
            return tensor.device
    return torch.get_default_device()
