"""How makers of a model say to draw from it: generation_config.json as SamplingParams takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.engine.request import SamplingParams
from tilewise.errors import CheckpointError
from tilewise.models.config_fields import flag, read_object
from tilewise.models.unread_fields import ReadFields, tell_unread

__all__ = ["sampling_defaults"]

# Our names of the fields that are taken, those that vLLM takes.
_TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Ways to draw that are not built, or not taken from the file: the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "stop_strings": ([],),
    "sequence_bias": ({}, []),
    "assistant_temperature": (1,),
}


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Return the arguments of SamplingParams that a checkpoint's generation_config.json gives.

    They are temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens (max_tokens),
    as vLLM takes them; do_sample false is a temperature of 0. Other fields that would change how
    tokens are drawn are named in a warning. End tokens are read by `read_config`. Without the file
    the result is {}.

    Raises:
        CheckpointError: the file is no JSON object, or a value is out of its range.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    fields = ReadFields(read_object(path))
    found: dict[str, Any] = {ours: fields.get(name) for name, ours in _TAKEN.items()}
    found = {name: value for name, value in found.items() if value is not None}
    if not flag(fields, "do_sample", True):
        drawing = ("temperature", "top_p", "top_k", "min_p")
        found = {name: value for name, value in found.items() if name not in drawing}
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"generation_config.json must be usable, got: {error}") from None
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            fields.names.discard(name)
    tell_unread("generation_config.json", fields.unread("generation_config.json"))
    return found
