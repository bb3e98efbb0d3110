"""A second decoder that shares the parameters of a first, and new weights for it, in place.

An engine packs weights, or refers to them without gradients; the model that is trained must stay as
it is. So the engine has a decoder of its own, whose parameters are the trained ones themselves
where dtype and device agree. `refill` overwrites those that it does not share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from tilewise.models.decoder import Decoder
from tilewise.models.native import NativeDecoder, for_device
from tilewise.models.registry import empty_model
from tilewise.nn.experts import Experts
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.packed import PackedEmbedding, PackedLinear
from tilewise.nn.quantised import QuantisedEmbedding, QuantisedLinear

__all__ = ["move", "refill", "sharing", "why_not_refill"]

_NARROW = (QuantisedLinear, QuantisedEmbedding)


def sharing(
    model: nn.Module,
    dtype: str | torch.dtype,
    device: torch.device,
    held: Callable[[str], Tensor],
) -> Decoder:
    """Return a decoder like `model`, made of its parameters.

    Those of another dtype or device are copied, and so are those that are computed anew whenever
    they are asked for, as parametrisations are.

    Args:
        model: the decoder that lives elsewhere; nothing of it changes.
        dtype: the dtype of the decoder that is returned; "auto" is that of the model.
        device: the device of its parameters.
        held: a function that returns a parameter of `model`, as it is now, by its name.

    Raises:
        TypeError: the model is no decoder of this package.
        ValueError: `model` is packed for inference.
    """
    if not isinstance(model, NativeDecoder):
        raise TypeError(
            f"model must be a decoder of load_model or build_model, got {type(model).__name__}"
        )
    wanted = model.dtype if dtype == "auto" else dtype
    made = empty_model(for_device(model.config, device), wanted, "meta")
    for name, shape in list(made.named_parameters()):
        try:
            now = held(name)
        except AttributeError:
            raise ValueError(
                f"model must have its parameters, got one packed for inference, without {name}"
            ) from None
        place, _, own = name.rpartition(".")
        as_is = isinstance(now, nn.Parameter) and (now.dtype, now.device) == (shape.dtype, device)
        copied = now if as_is else now.detach().to(device, shape.dtype, copy=True)
        parameter = copied if isinstance(copied, nn.Parameter) else nn.Parameter(copied, False)
        setattr(made.get_submodule(place), own, parameter)
    return made.eval()


def move(model: Decoder, device: torch.device) -> None:
    """Move the weights of a decoder to a device, in place; those that share memory still do
    afterwards."""
    moved: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def fn(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place not in moved:
            moved[place] = tensor.to(device)
        return moved[place]

    model._apply(fn)  # type: ignore[no-untyped-call]


def why_not_refill(model: nn.Module) -> str | None:
    """Say why other weights cannot be written into a decoder, or return None where they can."""
    if not isinstance(model, NativeDecoder):
        return f"the model must be a decoder of this package, got {type(model).__name__}"
    for name, module in model.named_modules():
        is_narrow = isinstance(module, PackedLinear) and module.panels.is_narrow
        if isinstance(module, _NARROW) or (is_narrow and not module.is_int8):
            return f"weights must not be quantised in the checkpoint, got {name} of few bits"
    return None


@torch.no_grad()
def refill(model: Decoder, names: Iterable[str], held: Callable[[str], Tensor]) -> None:
    """Overwrite the weights of a decoder in place; weights shared already stay as they are.

    Args:
        model: the decoder, packed or with products of fixed tiles; `why_not_refill` is None.
        names: the names of its parameters before it was packed.
        held: a function that returns the new weight by its name, on any device. The tensor is only
            read, and not kept; it may be what is overwritten itself, but no other part of it.
    """
    by_place: dict[str, list[str]] = {}
    for name in names:
        place, _, own = name.rpartition(".")
        by_place.setdefault(place, []).append(own)
    for place, own_names in by_place.items():
        _refill_one(model, place, {own: held(f"{place}.{own}") for own in own_names})


def _refill_one(model: Decoder, place: str, given: Mapping[str, Tensor]) -> None:
    parent, _, own = place.rpartition(".")
    above = model.get_submodule(parent)
    if isinstance(above, MultiheadLatentAttention) and own == "kv_b_proj" and above.packed_uk:
        above.refill_up_projections(_fitting(given["weight"], model))
        return
    module = model.get_submodule(place)
    if isinstance(module, PackedEmbedding):
        assert isinstance(model.packed_head, PackedLinear)
        module = model.packed_head  # they are one weight
    if isinstance(module, PackedLinear):
        bias = given.get("bias")
        bias = None if bias is None else bias.to("cpu")
        module.refill(given["weight"].to("cpu", module.dtype), bias)
    elif isinstance(module, Experts) and module.packed is not None:
        dtype = model.dtype
        module.refill(
            {n: t.to("cpu", dtype if n in ("up", "down") else t.dtype) for n, t in given.items()}
        )
    else:
        for name, tensor in given.items():
            _write(getattr(module, name), tensor)
        # A head that is tied refers to the same memory.
        assert not isinstance(module, InvariantLinear) or set(given) <= {"weight", "bias"}


def _fitting(weight: Tensor, model: Decoder) -> Tensor:
    return weight.to("cpu", model.dtype)


def _write(target: Tensor, now: Tensor) -> None:
    if target.data_ptr() != now.data_ptr() or target.device != now.device:
        target.copy_(now)
