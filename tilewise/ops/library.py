"""The registered boundary: torch.library schemas, fakes and the call of the chosen kernel.

Every op of the package is registered here, so that torch.compile, export and FakeTensor see one
opaque node with known shapes. Arguments have been checked before; derivatives are registered next
to each op (see derivatives.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError

LIBRARY = torch.library.Library("tilewise", "DEF")
_kernels: dict[str, Callable[..., Any]] = {}


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the op of `schema` in torch's namespace `tilewise`, and return the callable op.

    Args:
        schema: the op's name, arguments and results in torch's notation.
        kernel: a function that runs the op on real tensors of any device (it chooses the backend
            itself); the GPU of its first argument, a tensor, is made current around each call.
        fake: a function of the same arguments that returns empty results, for traces.
    """
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    _kernels[name] = where_its_tensors_are(kernel)
    LIBRARY.impl(name, _kernels[name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.tilewise, name).default


def kernel_of(name: str) -> Callable[..., Any]:
    """Return the function that the op `name` runs below the dispatcher on real tensors."""
    return _kernels[name]


def where_its_tensors_are(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `kernel` that makes the GPU of its first argument, a tensor, current.

    The GPU that was current before is so again after the call.
    """

    @functools.wraps(kernel)
    def launch(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return kernel(first, *rest)
        with torch.cuda.device(first.device):
            return kernel(first, *rest)

    return launch


def register_vmap(name: str, rule: Callable[..., Any]) -> None:
    """Register the function that torch.vmap calls for op `name`: (info, in_dims, *args) -> outputs,
    dims."""
    torch.library.register_vmap(f"tilewise::{name}", rule, lib=LIBRARY)


def refuse_vmap(name: str) -> None:
    """Make torch.vmap over the op `name` raise UnsupportedError.

    It is for ops of a whole batch: the error says that all sequences must come in one call.
    """

    def rule(*_: Any) -> Any:
        raise UnsupportedError(
            f"{name} must be given all sequences in one call, got a call under torch.vmap: "
            "a cache and its block tables belong to one batch"
        )

    register_vmap(name, rule)
