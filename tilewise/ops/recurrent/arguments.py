"""Argument checks of the recurrent ops, and `recurrent_states`, which allocates their slots.

A slot holds the state of one running sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import CHUNK, RecurrentStates
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, values


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states for tokens of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def inverse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of `RecurrentStates.inverses` for tokens of `dtype`.

    It is bfloat16 for bfloat16, else that of states.
    """
    return dtype if dtype == torch.bfloat16 else state_dtype(dtype)


def check_rows(
    names: tuple[str, str, str], q: Tensor, k: Tensor, v: Tensor, *, is_packed: bool
) -> None:
    """Raise unless q, k (..., Hk, K) and v (..., H, V) are rows of the same tokens.

    They must have one float dtype and device and contiguous last dims, and H must be a multiple of
    Hk. The error is TypeError for a dtype, otherwise ValueError.

    Args:
        names: the names of the three arguments, for messages.
        is_packed: True for (T, heads, channels), False for (B, S, heads, channels).
    """
    first, second, third = names
    layout = "(T, {0}, {1})" if is_packed else "(B, S, {0}, {1})"
    checks.check_float(first, q)
    for name, x, sizes in (
        (first, q, ("Hk", "K")),
        (second, k, ("Hk", "K")),
        (third, v, ("H", "V")),
    ):
        checks.check_dims(name, x, layout.format(*sizes))
        checks.check_same_dtype(name, x, q.dtype)
        checks.check_device(name, x, q.device)
        checks.check_last_dim_contiguous(name, x)
    checks.check_shape(second, k, tuple(q.shape))
    if v.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"{third} must have the rows of {second}, {tuple(k.shape[:-2])}, "
            f"got {tuple(v.shape[:-2])}"
        )
    if k.shape[-2] < 1 or v.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"heads of {third} must be a multiple of those of {second}, "
            f"got {v.shape[-2]} and {k.shape[-2]}"
        )


def check_gate(name: str, x: Tensor, shapes: tuple[tuple[int, ...], ...], v: Tensor) -> Tensor:
    """Return x, numbers of rows and heads such as decays, checked and cast to the dtype of states.

    Args:
        name: the name of the argument.
        shapes: the shapes that it may have.
        v: the values, whose device and dtype decide.

    Raises:
        ValueError, TypeError: x has another shape or device, or is not floating-point.
    """
    checks.check_float(name, x)
    if tuple(x.shape) not in shapes:
        allowed = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(x.shape)}")
    checks.check_device(name, x, v.device)
    return x.to(state_dtype(v.dtype))


def check_lengths(cu_seqlens: Tensor | None, v: Tensor) -> int:
    """Return the number of sequences; raise unless cu_seqlens (N + 1,) int32 cuts the rows of v.

    For None it is the batch of v (B, S, ...). The values of cu_seqlens are read on a CPU only.
    """
    if cu_seqlens is None:
        return v.shape[0]
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be (N + 1,), got shape {tuple(cu_seqlens.shape)}")
    checks.check_int32("cu_seqlens", cu_seqlens, tuple(cu_seqlens.shape), v.device)
    values.check_edges("cu_seqlens", cu_seqlens, v.shape[0])
    return cu_seqlens.shape[0] - 1


def check_state(
    name: str, state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> None:
    """Raise unless a tensor is None, or of this shape and dtype and on the device of `like`.

    The error is TypeError for the dtype, otherwise ValueError.
    """
    if state is None:
        return
    checks.check_same_dtype(name, state, dtype)
    checks.check_shape(name, state, shape)
    checks.check_device(name, state, like.device)


def check_places(
    slots: Tensor, starts: Tensor, num_sequences: int, num_slots: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return slots and starts (N,) as int64, checked; their values are read on a CPU only.

    Raises:
        ValueError, TypeError: slots or starts are no integers (N,) on the device, a slot does not
            exist (-1 is none and allowed) or comes twice, or a start is negative.
    """
    for name, x in (("slots", slots), ("starts", starts)):
        checks.check_integers(name, x, (num_sequences,), device)
    values.check_ids("slots", slots, -1, num_slots - 1)
    values.check_lengths("starts", starts, torch.iinfo(torch.int32).max)
    if values.readable(slots):
        used = slots[slots >= 0]
        if len(used.unique()) < len(used):
            raise ValueError(f"slots must differ from one another, got {slots.tolist()}")
    return checks.as_int64(slots), checks.as_int64(starts)


def check_states(
    states: RecurrentStates, k: Tensor, v: Tensor, by_channel: bool, is_delta: bool
) -> None:
    """Check the shapes and dtypes of all buffers of slots against k (T, Hk, K) and v (T, H, V).

    Args:
        states: the states (slots, H, K, V), and the keys, gates, values and betas of up to CHUNK
            tokens that each slot keeps beside its state.
        by_channel: True if a gate is a vector (H, K) and not one number of each head.
        is_delta: True if the delta rule applies, which needs the inverses beside tokens.

    Raises:
        ValueError, TypeError: a shape, dtype, device or stride is another; the message names it.
    """
    wide, num_slots = state_dtype(v.dtype), states.state.shape[0]
    (key_heads, key_dim), (num_heads, value_dim) = k.shape[1:], v.shape[1:]
    gates = (num_heads, key_dim) if by_channel else (num_heads,)
    values_dtype = wide if states.betas is None else v.dtype
    if is_delta and states.betas is not None and states.inverses is None:
        raise ValueError("states.inverses must be a tensor for the delta rule, got None")
    for name, x, sizes, dtype in (
        ("state", states.state, (num_heads, key_dim, value_dim), wide),
        ("keys", states.keys, (CHUNK, key_heads, key_dim), k.dtype),
        ("gates", states.gates, (CHUNK, *gates), wide),
        ("values", states.values, (CHUNK, num_heads, value_dim), values_dtype),
        ("betas", states.betas, (CHUNK, num_heads), wide),
        ("inverses", states.inverses, (CHUNK, num_heads, CHUNK), inverse_dtype(v.dtype)),
    ):
        if x is None:
            continue
        check_state(f"states.{name}", x, (num_slots, *sizes), dtype, v)
        if not x.is_contiguous():
            raise ValueError(f"states.{name} must be contiguous, got strides {x.stride()}")


def check_edges(cu_seqlens: Tensor | None, v: Tensor) -> Tensor:
    """Return cu_seqlens (N + 1,) of a step, checked by `check_lengths`, which reads values on a CPU
    only.

    For None it is 0, 1, ... T, int32: each of the T rows of v is a sequence of its own.
    """
    if cu_seqlens is None:
        return torch.arange(v.shape[0] + 1, dtype=torch.int32, device=v.device)
    check_lengths(cu_seqlens, v)
    return cu_seqlens


@names
def recurrent_states(
    num_slots: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_key_heads: int | None = None,
    by_channel: bool = False,
    is_delta: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keeps: str | None = None,
    **unknown: object,
) -> RecurrentStates:
    """Allocate slots for the states of running sequences of one layer.

    A slot holds the state before the sequence's last chunk of 64 tokens, and the tokens of that
    chunk, so that the next token is computed as it would be within its prompt. It needs no
    initialisation: what it holds is not read at a sequence's start.

    Args:
        num_slots: the number of slots.
        num_heads: H, the heads of values.
        key_dim, value_dim: K and V, the sizes of a head's state.
        num_key_heads: Hk, the heads of queries and keys; H when None.
        by_channel: True where each channel of the keys has a decay.
        is_delta: True for `gated_delta_step`; with False slots are smaller, for `ssd_step` alone.
        dtype: the dtype of tokens. States are float32, or float64 for float64.
        device: the device of the slots.
        keeps: "updates", what tokens add to the state, which a CPU reads; "tokens", with what a GPU
            needs to compute the updates again; None chooses by the device.

    Returns:
        The tensors of all slots, see `RecurrentStates`.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Example:
        >>> states = recurrent_states(16, 32, 128, 128, num_key_heads=16, dtype=torch.bfloat16)
    """
    if unknown:
        raise unknown_keyword(recurrent_states, unknown)
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    sizes = {"num_slots": num_slots, "num_heads": num_heads, "num_key_heads": num_key_heads}
    sizes |= {"key_dim": key_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        checks.check_length(name, size)
    if dtype not in checks.FLOAT_DTYPES:
        wanted = ", ".join(checks.dtype_name(each) for each in checks.FLOAT_DTYPES)
        raise TypeError(f"dtype must be one of {wanted}, got {dtype}")
    keeps = keeps or ("updates" if torch.device(device).type == "cpu" else "tokens")
    if keeps not in ("updates", "tokens"):
        raise ValueError(f"keeps must be 'updates', 'tokens' or None, got {keeps!r}")
    wide, is_raw = state_dtype(dtype), keeps == "tokens"
    gates = (num_heads, key_dim) if by_channel else (num_heads,)

    def empty(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.empty(num_slots, *shape, dtype=dtype, device=device)

    return RecurrentStates(
        empty(num_heads, key_dim, value_dim),
        empty(CHUNK, num_key_heads, key_dim, dtype=dtype),
        empty(CHUNK, *gates),
        empty(CHUNK, num_heads, value_dim, dtype=dtype if is_raw else wide),
        empty(CHUNK, num_heads) if is_raw else None,
        empty(CHUNK, num_heads, CHUNK, dtype=inverse_dtype(dtype)) if is_raw and is_delta else None,
    )
