"""A decoder without its output head, or with a classifier in its place: which decoder it is."""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json

__all__ = ["CLASSIFIER", "as_causal", "kind_of_decoder"]

CLASSIFIER = r"score\..*"
"""A regular expression of the tensors of a decoder's classifier."""
# Class names whose decoder is not the same name with ForCausalLM.
_CAUSAL = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
_KINDS = {"ForSequenceClassification": "classify", "Model": "embed"}


def kind_of_decoder(config: Json) -> tuple[str, str]:
    """Return the class of a decoder with an output head, and the kind of a checkpoint's last layer.

    Returns:
        The class that config.json names, or for a bare or a classifying model the class of the same
        decoder with an output head; and "generate" for an output head, "embed" for none, "classify"
        for a classifier.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name in _CAUSAL.values():
        return str(name), "generate"
    for ending, kind in _KINDS.items():
        body = name.removesuffix(ending)
        if body != name and body and not body.endswith("LMHead"):
            return _CAUSAL.get(body, f"{body}ForCausalLM"), kind
    return name, "generate"


def as_causal(config: Json) -> Json:
    """Return a config.json as that of a decoder with an output head, tied if the checkpoint has
    none.

    Raises:
        CheckpointError: the checkpoint has no head, and its tokens see those after them.
    """
    name, kind = kind_of_decoder(config)
    if kind == "generate":
        return config
    for field in ("is_causal", "use_bidirectional_attention"):
        if config.get(field) is (field != "is_causal"):
            raise CheckpointError(
                f"{field} must be {str(field == 'is_causal').lower()} for a decoder, "
                f"got {str(config[field]).lower()}"
            )
    found: dict[str, Any] = {**config, "architectures": [name], "tie_word_embeddings": True}
    return found
