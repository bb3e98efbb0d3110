"""Parameters in and out: Hugging Face's tensors, padded vocabularies, checkpoints to serve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilewise.models import Decoder, ModelConfig, build_model, save_model
from tilewise.models.weights import save_tensors
from tilewise.training.encoder import Bert

__all__ = ["export", "load_parameters", "pad_vocabulary", "to_hugging_face"]

# Tensor cores multiply tiles of this many columns; 50,257 of them cost as much as 50,304.
COLUMNS = 128


def pad_vocabulary(words: int) -> int:
    """Return the rows of an embedding for `words` words: the next multiple of 128."""
    return -(-words // COLUMNS) * COLUMNS


@torch.no_grad()
def load_parameters(model: Decoder | Bert, tensors: Mapping[str, Tensor]) -> None:
    """Fill the parameters of `model`, in place, from tensors in Hugging Face's names; rows that pad
    a vocabulary become 0.

    Raises:
        KeyError: a tensor is missing.
    """
    for weight in model.weight_table():
        for source, target in weight.parts(model.get_parameter(weight.name)):
            tensor = tensors[source]
            if target.shape[0] > tensor.shape[0]:
                target.zero_()
            target[: tensor.shape[0]].copy_(tensor)


@torch.no_grad()
def to_hugging_face(model: Decoder | Bert, words: int) -> dict[str, Tensor]:
    """Return copies of the parameters on the CPU in Hugging Face's names, without padding.

    Args:
        words: the size of the vocabulary, to which tensors with a row for each word are cut.
    """
    rows = model.get_parameter("embed_tokens.weight").shape[0]
    tensors: dict[str, Tensor] = {}
    for weight in model.weight_table():
        parameter = model.get_parameter(weight.name).detach()
        is_words = parameter.shape[0] == rows and weight.name in _OF_WORDS
        for name, part in weight.parts(parameter[:words] if is_words else parameter):
            tensors[name] = part.contiguous().clone().cpu()
    return tensors


_OF_WORDS = ("embed_tokens.weight", "lm_head.weight", "head_bias")


def export(
    model: Decoder | Bert,
    directory: str | Path,
    *,
    words: int,
    dtype: torch.dtype = torch.bfloat16,
    pad_token_id: int = 0,
) -> None:
    """Write a checkpoint in Hugging Face's layout to `directory`: config.json and safetensors.

    transformers loads it, and of a decoder `tilewise.LLM` too; a BERT has nothing to generate.

    Args:
        words: the size of the vocabulary, without its padding.
        dtype: the dtype of the tensors written.
        pad_token_id: the id of a BERT's padding; decoders have none.
    """
    directory = Path(directory)
    if isinstance(model, Bert):
        directory.mkdir(parents=True, exist_ok=True)
        name = str(dtype).removeprefix("torch.")
        config = model.shape.to_hf(pad_token_id=pad_token_id) | {"dtype": name}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: part.to(dtype) for name, part in to_hugging_face(model, words).items()}
        save_tensors(tensors, directory / "model.safetensors")
        return
    config_of_words: ModelConfig = dataclasses.replace(model.config, vocab_size=words)
    plain = build_model(config_of_words, dtype=dtype)
    load_parameters(plain, to_hugging_face(model, words))
    save_model(plain, directory)
