"""What sentence-transformers writes beside a model: how it is pooled, layers behind, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import count, flag, read_object, text_or_none, token_id
from tilewise.models.vector_head import Stage, head_activation

__all__ = ["SentenceFiles", "read_sentence_files"]

_MODULES = "modules.json"
# Their names of the ways to pool; in newer files the value of pooling_mode.
_POOLINGS = {
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
    "mean": "mean",
    "mean_tokens": "mean",
    "weightedmean": "weightedmean",
    "weightedmean_tokens": "weightedmean",
}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The settings in the files that sentence-transformers writes.

    Attributes:
        pooling: the way in which hidden states are pooled; None if no file says one.
        stages: the layers that are applied to the pooled vector, in order.
        score_ids: the tokens whose logits score a pair, the one for "yes" first; empty for none.
        prompts: the texts that are put before a text, by name.
        default_prompt: the name of the prompt that is put there if a request names none; None for
            none.
        similarity: the way in which two vectors are compared.
        max_length: the tokens to which texts are cut there; None for no bound of its own.
        is_lower: True if texts are made lower case.
    """

    pooling: str | None = None
    stages: tuple[Stage, ...] = ()
    score_ids: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    is_lower: bool = False


def read_sentence_files(directory: Path) -> SentenceFiles:
    """Read modules.json and the folders that it names, and the two files of settings.

    Raises:
        CheckpointError: a file cannot be read, or says what is not built.
    """
    pooling: str | None = None
    stages, score_ids = list[Stage](), tuple[int, ...]()
    for kind, folder in _modules(directory):
        path = directory / folder / "config.json"
        if kind == "Pooling":
            if path.is_file():
                pooling = _pooling(path)
        elif kind == "Normalize":
            stages.append(Stage("unit"))
        elif kind == "Dense":
            stages.append(_dense(path, folder))
        elif kind == "LogitScore":
            score_ids = _score_ids(path)
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(
                f"{_MODULES} must be of Transformer, Pooling, Dense, Normalize, Dropout or "
                f"LogitScore, got {shown(kind)}"
            )
    path = directory / "sentence_bert_config.json"
    config = read_object(path) if path.is_file() else {}
    max_length = None if config.get("max_seq_length") is None else count(config, "max_seq_length")
    return SentenceFiles(
        pooling,
        tuple(stages),
        score_ids,
        *_settings(directory),
        max_length=max_length,
        is_lower=flag(config, "do_lower_case", False),
    )


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return (kind, folder) of each module of a sentence-transformers checkpoint, in order.

    Without modules.json the only one is ("Pooling", "1_Pooling").

    Raises:
        CheckpointError: modules.json is no such list, or names a folder outside the checkpoint.
    """
    path = directory / _MODULES
    if not path.is_file():
        return [("Pooling", "1_Pooling")]
    try:
        modules = json.loads(path.read_text(encoding="utf-8-sig"))
        found = [(m["type"].rsplit(".", 1)[-1], m["path"]) for m in modules]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{_MODULES} must be a list of modules with type and path, got {error!r}"
        ) from None
    for _, folder in found:
        if not isinstance(folder, str) or Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{_MODULES} must have paths below it, got {shown(folder)}")
    return found


def _pooling(path: Path) -> str | None:
    config = read_object(path)
    mode = text_or_none(config, "pooling_mode")
    modes = [mode] if mode is not None else []
    modes += [
        name for name in config if name.startswith("pooling_mode_") and flag(config, name, False)
    ]
    if not flag(config, "include_prompt", True):
        raise CheckpointError(
            f"include_prompt of {path.parent.name}/config.json must be true, got false"
        )
    found = {_POOLINGS.get(name.removeprefix("pooling_mode_")) for name in modes}
    if not modes:
        return None
    if len(found) == 1 and None not in found:
        return found.pop()
    known = ", ".join(dict.fromkeys(_POOLINGS.values()))
    raise CheckpointError(
        f"pooling of {path.parent.name}/config.json must be one of {known}, got {', '.join(modes)}"
    )


def _dense(path: Path, folder: str) -> Stage:
    """Return the stage of a dense layer; a file without an activation means tanh."""
    config = read_object(path)
    name = text_or_none(config, "activation_function") or "torch.nn.modules.activation.Tanh"
    bias = "linear.bias" if flag(config, "bias", True) else None
    activation = head_activation(name, f"activation_function of {folder}/config.json")
    size = count(config, "out_features")
    return Stage("linear", "linear.weight", bias, size, activation, folder=folder)


def _score_ids(path: Path) -> tuple[int, ...]:
    config = read_object(path)
    yes, no = token_id(config, "true_token_id"), token_id(config, "false_token_id")
    if yes is None:
        raise CheckpointError(
            f"{path.parent.name}/config.json must hold true_token_id, got {shown(dict(config))}"
        )
    return (yes,) if no is None else (yes, no)


def _settings(directory: Path) -> tuple[dict[str, str], str | None, str]:
    """Return the prompts by name, the default prompt's name or None, and the similarity's name.

    They are {}, None and "cosine" without config_sentence_transformers.json.

    Raises:
        CheckpointError: a value of the file is wrong.
    """
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None, "cosine"
    config: dict[str, Any] = read_object(path)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise CheckpointError(f"prompts of {path.name} must be texts by name, got {shown(prompts)}")
    default = text_or_none(config, "default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"default_prompt_name of {path.name} must be one of {', '.join(prompts)}, "
            f"got {default!r}"
        )
    similarity = text_or_none(config, "similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise CheckpointError(
            f"similarity_fn_name of {path.name} must be one of {', '.join(_SIMILARITIES)}, "
            f"got {similarity!r}"
        )
    return prompts, default, similarity
