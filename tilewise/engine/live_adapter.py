"""The adapter that is trained beside a model of this process, as an engine reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.engine.adapters import fingerprint_of
from tilewise.engine.versions import new_version
from tilewise.engine.weights import check_finite, check_shape
from tilewise.errors import CheckpointError
from tilewise.models.adapters import adapter_sites, read_adapter
from tilewise.models.decoder import Decoder
from tilewise.models.trained_adapter import adapted_linears, adapter_tensors
from tilewise.ops import LowRank

__all__ = ["LiveAdapter"]


class LiveAdapter:
    """The adapter trained in this process, which all requests of the engine use.

    Parameters of the engine's dtype and device are used where they lie. Of others the engine has a
    copy, which `write` updates in place.

    Args:
        model: the model with the adapter, see `models.trained_adapter`.
        dtype, device: the dtype and the device of the engine's rows.

    Attributes:
        number, fingerprint, weights: as of `engine.adapters.LoadedAdapter`; the weights of the only
            slot, by the names of the model's modules.
    """

    number = 1

    def __init__(self, model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self.fingerprint = new_version()  # of no other process: files hold no block of it
        self._held: dict[str, Tensor] = {}
        self.weights: dict[str, LowRank] = {}
        for module, linear in adapted_linears(model).items():
            own = linear.adapter
            a, b = (p.detach().to(device, dtype) for p in (own.a, own.b))
            self._held |= {f"{module}.adapter.a": a, f"{module}.adapter.b": b}
            self.weights[module] = own.slot(a, b)
        self.note()

    @property
    def is_shared(self) -> bool:
        """Whether the engine uses all parameters where they lie, so that `write` has nothing to
        copy."""
        now = self._now()
        return all(_is_same(now[name], held) for name, held in self._held.items())

    def digest(self) -> str:
        """Return the digest of the parameters as they are now, as `engine.adapters.fingerprint_of`
        makes it."""
        sites = adapter_sites(self._model)
        return fingerprint_of(read_adapter(adapter_tensors(self._model), sites))

    def check(self) -> None:
        """Refuse an adapter that is not of the layers, shapes and dtypes that the engine has.

        Raises:
            CheckpointError: a tensor is missing or unknown, or has another shape, or is no floating
                point, or is not finite; the message names it.
        """
        now = self._now()
        for name, held in self._held.items():
            if name not in now:
                raise CheckpointError(f"weights must hold tensor {name}, got none")
            check_shape(name, now[name], held)
            if not now[name].is_floating_point():
                raise CheckpointError(
                    f"tensor {name} must be floating point, got {now[name].dtype}"
                )
        extra = sorted(now.keys() - self._held.keys())
        if extra:
            raise CheckpointError(
                f"weights must hold only adapters that the engine was made with, got {extra[0]!r}"
            )
        check_finite(now)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the present parameters into the engine's copies, in place, where the engine has
        copies."""
        for name, tensor in self._now().items():
            held = self._held[name]
            if not _is_same(tensor, held):
                held.copy_(tensor)

    def note(self) -> None:
        """Remember addresses and versions of the parameters: the engine now has their present
        values."""
        self._noted = self._versions()

    @property
    def has_changed(self) -> bool:
        """Whether a parameter was written or replaced since `note`."""
        return self._versions() != self._noted

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (t.data_ptr(), t._version) for name, t in self._now().items()}

    def _now(self) -> dict[str, Tensor]:
        found = {}
        for module, linear in adapted_linears(self._model).items():
            for name, parameter in linear.adapter.named_parameters():
                found[f"{module}.adapter.{name}"] = parameter.detach()
        return found


def _is_same(tensor: Tensor, held: Tensor) -> bool:
    return (tensor.data_ptr(), tensor.device, tensor.dtype) == (
        held.data_ptr(),
        held.device,
        held.dtype,
    )
