"""The argument checks that public ops share.

They read shapes, dtypes and devices only: no value of a tensor, so no synchronisation.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tilewise.ops.derivatives import transforms_active

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name as users write it, e.g. bfloat16."""
    return str(dtype).removeprefix("torch.")


def check_float(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless `tensor` is float16, bfloat16, float32 or float64."""
    if tensor.dtype not in FLOAT_DTYPES:
        wanted = ", ".join(dtype_name(d) for d in FLOAT_DTYPES)
        raise TypeError(f"{name} must be one of {wanted}, got {dtype_name(tensor.dtype)}")


def check_same_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise TypeError(
            f"{name} must have dtype {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}"
        )


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless `value` is of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")


def check_dims(name: str, tensor: Tensor, layout: str) -> None:
    """Raise ValueError unless `tensor` has as many dimensions as `layout`, e.g. "(T, Hq, D)"."""
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {tuple(tensor.shape)}")


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension has stride 1 or at most one element.

    Under a transform of torch.func nothing is checked: the rule of vmap makes tensors contiguous.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and not transforms_active():
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got {tensor.stride(-1)}"
        )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly `shape`."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_int32(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless `tensor` is int32 (else TypeError) of `shape` on `device` (else ValueError)."""
    check_same_dtype(name, tensor, torch.int32)
    check_shape(name, tensor, shape)
    check_device(name, tensor, device)


_INTEGERS = (torch.int32, torch.int64)
_INT32 = torch.iinfo(torch.int32)


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless an argument is an int32 or int64 tensor of `shape` on `device`.

    The error is TypeError for another type or dtype, ValueError for another shape or device.
    """
    check_type(name, tensor, Tensor)
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must have dtype int32 or int64, got {dtype_name(tensor.dtype)}")
    check_shape(name, tensor, shape)
    check_device(name, tensor, device)


def as_int32(tensor: Tensor) -> Tensor:
    """Return checked integers as int32, for lengths and tables in kernels.

    A number outside int32's range becomes the nearest number inside, which lies outside of every
    table, too. Truncated to its lower half it might be a valid block.
    """
    if tensor.dtype is torch.int32:
        return tensor
    return tensor.clamp(_INT32.min, _INT32.max).to(torch.int32)


def as_int64(tensor: Tensor) -> Tensor:
    """Return checked integers as int64, for slots and pairs of blocks in kernels."""
    return tensor if tensor.dtype is torch.int64 else tensor.to(torch.int64)


def with_packed_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` if its last dimension has stride 1, as kernels need it, else a copy."""
    if tensor.stride(-1) == 1:
        return tensor
    # contiguous() does not change the strides of a tensor without elements.
    return tensor.clone(memory_format=torch.contiguous_format)


def check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the query heads are a multiple of the key heads, at least one."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads != 0:
        raise ValueError(
            "query heads must be a multiple of key heads, "
            f"got {num_q_heads} query and {num_kv_heads} key heads"
        )


def check_per_head(
    name: str, tensor: Tensor | None, num_q_heads: int, device: torch.device
) -> None:
    """Raise unless `tensor` is None, or a float tensor of shape (num_q_heads,) on `device`.

    The error is TypeError for a dtype that is no float, ValueError for the shape or device.
    """
    if tensor is None:
        return
    check_float(name, tensor)
    check_shape(name, tensor, (num_q_heads,))
    check_device(name, tensor, device)


def check_bias(name: str, bias: Tensor | None, q: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise unless `bias` is None or a tensor on q's device that broadcasts to `full`.

    Args:
        name: the name of the argument in messages.
        bias: q's dtype or float32, at most four dims, each 1 or as in `full`; or None.
        q: the queries, of which only the dtype and the device count.
        full: the shape (B, Hq, Sq, Sk) of all logits.

    Raises:
        TypeError: the dtype of the bias is neither q's nor float32.
        ValueError: the bias is on another device, or its shape does not broadcast.
    """
    if bias is None:
        return
    check_device(name, bias, q.device)
    if bias.dtype not in (q.dtype, torch.float32):
        raise TypeError(
            f"{name} must have dtype {dtype_name(q.dtype)} or float32, got {dtype_name(bias.dtype)}"
        )
    fits = bias.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(bias.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {full}, got shape {tuple(bias.shape)}")


def check_alibi(slopes: Tensor | None, batch: int, num_q_heads: int, device: torch.device) -> None:
    """Raise unless `slopes` is None or a float tensor (Hq,) or (B, Hq) on `device`.

    A tensor that requires a gradient is refused. The error is TypeError for the dtype, otherwise
    ValueError, about the argument alibi_slopes.
    """
    if slopes is None:
        return
    check_float("alibi_slopes", slopes)
    if tuple(slopes.shape) not in ((num_q_heads,), (batch, num_q_heads)):
        raise ValueError(
            f"alibi_slopes must have shape {(num_q_heads,)} or {(batch, num_q_heads)}, "
            f"got {tuple(slopes.shape)}"
        )
    check_device("alibi_slopes", slopes, device)
    if slopes.requires_grad:
        raise ValueError("alibi_slopes must not require a gradient; pass a bias to learn one")


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is a finite number of Python's or numpy's, or a one-element tensor.

    The error is TypeError for another type (a bool too), ValueError for an infinity or NaN. The
    value of a tensor is not checked here: the op reads it when called, which waits for its device.
    A tensor that requires a gradient is refused, as torch does for its own scale: the gradient
    would be lost silently.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.requires_grad:
            raise TypeError(f"{name} must be a number without a gradient, got a tensor with one")
        return
    is_number = isinstance(value, Real | torch.SymFloat | torch.SymInt)
    is_number = is_number or getattr(value, "ndim", None) == 0  # a numpy array of one element
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {value}")


def check_softcap(softcap: float) -> None:
    """Raise unless softcap is 0 (off) or a positive finite number; errors as of `check_number`."""
    check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be at least 0, got {softcap}")


def check_dropout(dropout_p: float) -> None:
    """Raise unless dropout_p is a number in [0, 1], both included; errors as of `check_number`."""
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1], got {dropout_p}")


def scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """Return the factor of q . k: the given `softmax_scale` if it passes `check_number`.

    For None it is `head_dim` ** -0.5.
    """
    if softmax_scale is None:
        return float(head_dim**-0.5)
    check_number("softmax_scale", softmax_scale)
    return softmax_scale


def host_int(name: str, value: Any, rule: str = "an integer") -> int:
    """Return an int from an integer of Python, numpy or a traced graph, or a one-element tensor.

    A torch.SymInt of a traced graph is returned as it is.

    Args:
        name: the name of the argument in the message.
        value: the argument; a bool is no integer.
        rule: the text of what is allowed, for the message.

    Raises:
        TypeError: the value is none of these.
    """
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value  # type: ignore[return-value]
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {rule}, got {value!r}") from None


def check_length(name: str, value: Any) -> int:
    """Return a length, such as max_seqlen_q, as an integer of at least 0.

    Raises:
        TypeError: the value is no integer, see `host_int`.
        ValueError: the length is negative.
    """
    length = host_int(name, value)
    if length < 0:
        raise ValueError(f"{name} must be at least 0, got {length}")
    return length


def window_bounds(
    causal: bool, window: int | tuple[int | None, int | None] | None
) -> tuple[int, int]:
    """Convert the user's `causal` and `window` to (left, right) numbers of keys; -1 is unlimited.

    An integer w is the last w keys, the query's own included: (w - 1, 0). A pair (left, right) does
    not count the query's own key, as in flash-attn; None in it is unlimited, and so is a number of
    2**31 - 1 or more. causal sets right to 0.

    Raises:
        ValueError, TypeError: window is no integer of at least 1 and no pair of numbers of at least
            -1.
    """
    if window is None:
        left, right = -1, -1
    elif isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(f"window must be None, an integer or (left, right), got {window!r}")
        left, right = (
            _bound(f"window {name}", bound)
            for name, bound in zip(("left", "right"), window, strict=True)
        )
    else:
        width = host_int("window", window, "None, an integer or (left, right)")
        if width < 1:
            raise ValueError(f"window must be at least 1 key, got {width}")
        left, right = _bound("window", width - 1), 0
    return left, (0 if causal else right)


def _bound(name: str, bound: object) -> int:
    if bound is None:
        return -1
    count = host_int(name, bound, "None, -1 or a key count")
    if count < -1:
        raise ValueError(f"{name} must be None, -1 or a key count, got {count}")
    return -1 if count >= _UNLIMITED else count


_UNLIMITED = 2**31 - 1  # keys: no sequence has more, and kernels count in int32
