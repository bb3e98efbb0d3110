"""The contents of a checkpoint's config.json under this package's names; frozen once read."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.causal_body import as_causal
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    eos_token_ids,
    object_of,
    read_object,
    text_or_none,
    token_id,
)
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families import FAMILIES, Family
from tilewise.models.naming import not_a_checkpoint
from tilewise.models.quantised.choose import format_of, quantisation_of
from tilewise.models.text_part import text_part
from tilewise.models.unread_fields import ReadFields, must_be, tell_unread

__all__ = ["ModelConfig", "read_config"]

_NOT_BUILT: dict[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "per_layer_config": {},
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Fields that matter to any decoder and are not built, and the value that asks for nothing."""


@dataclass(frozen=True, slots=True)
class ModelConfig(DecoderConfig):
    """A decoder's configuration that is read from a config.json, and written to one.

    Attributes:
        source: the contents of the config.json that this was read from; None if it was made
            otherwise. Two configurations of different sources may be equal.
    """

    source: Json | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration that the contents of a Hugging Face config.json describe.

        Both spellings of the rotary settings are read: `rope_parameters` (transformers 5) and
        `rope_theta` with `rope_scaling` (before). Unknown fields are named in a warning.

        Raises:
            CheckpointError: the architecture or a setting is not supported, or a field is missing.
        """
        return cls(**_read(config))

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that transformers, and `from_hf`, read as this model.

        Where the family has no writer for this model, it is the file that this was read from.

        Raises:
            CheckpointError: no config.json of the architecture says what this model is.
        """
        family, ends = FAMILIES[self.architecture], self.eos_token_ids
        try:
            written = family.write(self) if family.write is not None else None
        except CheckpointError:
            if not self._is_as_read():
                raise
            written = None
        if written is None:
            if not self._is_as_read():
                raise CheckpointError(
                    "architecture must be one whose config.json is written, or the configuration "
                    f"as it was read, got {self.architecture}"
                )
            written = dict(self.source or {})
        return {
            "model_type": family.model_type,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tie_word_embeddings,
            **written,
            "architectures": [self.architecture],
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
            "dtype": self.dtype,
        }

    def _is_as_read(self) -> bool:
        """Return whether the config.json that this was read from still describes this model.

        It never does for models with a block that layers share: their files have other names for
        its weights. The dtype and the tokens that begin and end a text do not count.
        """
        if self.source is None or any(layer.shared is not None for layer in self.layers):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unread fields, which the first reading told
            read = type(self).from_hf(self.source)
        begin, ends = self.bos_token_id, self.eos_token_ids
        return replace(read, dtype=self.dtype, bos_token_id=begin, eos_token_ids=ends) == self


def read_config(directory: str | Path) -> ModelConfig:
    """Return the configuration in a checkpoint's config.json, with the end tokens of
    generation_config.json, too.

    Raises:
        CheckpointError: the file is missing or no JSON object, or the quantised format is not
            served, or see `ModelConfig.from_hf`.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(not_a_checkpoint(directory))
    config = read_object(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = (eos_token_ids(part) for part in (config, read_object(generation)))
        config["eos_token_id"] = list(dict.fromkeys(itertools.chain(*ends)))
    found = ModelConfig.from_hf(config)
    quantisation_of(directory)  # a format that is not served is refused before anything is read
    return found


def _read(config: Json) -> dict[str, Any]:
    """Return the keyword arguments of `ModelConfig` for a config.json, or for its text part."""
    source = text_part(as_causal(config))
    fields = ReadFields(source)
    family = _family(fields)
    _check_format(fields, family)
    for name, allowed in _NOT_BUILT.items():
        if name not in family.own_fields:
            must_be(fields, name, allowed)
    found = {
        "architecture": family.architecture,
        "vocab_size": count(fields, "vocab_size"),
        "bos_token_id": token_id(fields, "bos_token_id"),
        "eos_token_ids": eos_token_ids(fields),
        "dtype": (
            text_or_none(fields, "dtype") or text_or_none(fields, "torch_dtype") or "float32"
        ),
        **family.read(fields),
        "source": {k: v for k, v in source.items() if k not in ("quantization_config", "dtype")},
    }
    _check_type(fields, family)
    unread = fields.unread("config.json")
    tell_unread("config.json", [name for name in unread if name not in family.harmless.split()])
    return found


def _check_format(config: Json, family: Family) -> None:
    """Refuse quantised formats that are not served, and warn of unknown fields of those that are.

    Raises:
        CheckpointError: the format is not served.
    """
    fields = ReadFields(object_of(config, "quantization_config"))
    must_be(config, "compression_config")
    if not fields:
        return
    if fields.get("quant_method", "unknown") in family.formats:
        tell_unread("quantization_config of config.json", fields.unread("quantization_config"))
        return
    format_of(object_of(config, "quantization_config"))


def _family(config: Json) -> Family:
    names = config.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures must be a list of names, got {names!r}")
    if not names:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        model_type = text_or_none(config, "model_type")
        names = [by_type.get(model_type or "", model_type)]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(FAMILIES)
    raise UnknownModelError(f"architecture must be one of {known}, got {names[0]!r}")


def _check_type(config: Json, family: Family) -> None:
    """Refuse a file whose `architectures` and `model_type` name different models.

    An unknown `model_type` is named in a warning.
    """
    model_type = text_or_none(config, "model_type")
    if model_type not in (None, family.model_type, *family.other_types):
        if any(model_type == other.model_type for other in FAMILIES.values()):
            raise CheckpointError(
                f"model_type must be {family.model_type!r} for {family.architecture}, "
                f"got {model_type!r}"
            )
        tell_unread("config.json", [f"model_type {model_type}"])
