"""Quantised checkpoints: a file for alike formats, which reads tensors into `QuantisedWeight`."""

from tilewise.models.quantised.choose import quantisation_of
from tilewise.models.quantised.format import Format, Stored
from tilewise.models.quantised.modules import QuantisedModules

__all__ = ["Format", "QuantisedModules", "Stored", "quantisation_of"]
