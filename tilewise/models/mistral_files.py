"""Mistral's own files: params.json and consolidated safetensors, as the checkpoint they stand for.

Rows of q and k are stored in pairs of neighbours, as the rotation takes them; Hugging Face's files
have the first halves of pairs before the second ones.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import read_object
from tilewise.models.gguf.folder import cache_of, write_folder

__all__ = ["MistralTensors", "has_mistral_files", "mistral_folder"]

_PARAMS = "params.json"
_WEIGHTS = "consolidated*.safetensors"
_POSITIONS = 32_768  # of files that do not say it
_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
# params.json's name of a field, and config.json's.
_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
}
_NEEDED = ("dim", "n_layers", "n_heads", "head_dim", "hidden_dim", "norm_eps", "vocab_size")
_HARMLESS = ("model_type", "use_biases", "causal")


def has_mistral_files(folder: Path) -> bool:
    """Return whether a folder holds params.json and consolidated safetensors, and no
    config.json."""
    has_own = (folder / _PARAMS).is_file() and any(folder.glob(_WEIGHTS))
    return has_own and not (folder / "config.json").is_file()


def mistral_folder(folder: Path) -> Path:
    """Return the checkpoint folder that Mistral's files stand for, written to the user's cache if
    need be.

    Raises:
        CheckpointError: params.json lacks a field, or has one that is not served.
    """
    folder = folder.absolute()
    config = _config(read_object(folder / _PARAMS))
    files = tuple(sorted(x for x in folder.iterdir() if x.is_file()))
    digest = hashlib.sha256(repr(config).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    place = cache_of("mistral") / digest.hexdigest()[:32]
    if (place / "config.json").is_file():
        return place
    return write_folder(place, files, {"config.json": config})


def _config(params: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that mean the same as those of params.json.

    Raises:
        CheckpointError: a field is missing, or describes another kind of model.
    """
    missing = [name for name in _NEEDED if params.get(name) is None]
    if missing:
        raise CheckpointError(f"{_PARAMS} must hold {missing[0]}, got none")
    told = {name: value for name, value in params.items() if value not in (None, {}, False)}
    others = [name for name in told if name not in _FIELDS and name not in _HARMLESS]
    if others or told.get("use_biases"):
        raise CheckpointError(
            f"{_PARAMS} must describe a dense text model, got {(others or ['use_biases'])[0]}"
        )
    found = {_FIELDS[name]: value for name, value in told.items() if name in _FIELDS}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "num_key_value_heads": told["n_heads"],
        "rope_theta": 10_000.0,
        "max_position_embeddings": _POSITIONS,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **found,
    }


class MistralTensors:
    """The tensors of a consolidated file by Hugging Face's names.

    Args:
        file: the path of the file, beside which params.json lies.
        reader: the open reader of the file.

    Raises:
        CheckpointError: a tensor has a name that is not known.
    """

    def __init__(self, file: Path, reader: Any) -> None:
        params = read_object(file.parent / _PARAMS)
        self._heads = {"attention.wq": params["n_heads"]}
        self._heads["attention.wk"] = params.get("n_kv_heads") or params["n_heads"]
        self._reader, self._sources = reader, {}
        for name in reader.keys():  # noqa: SIM118 - a reader is no mapping
            part = _LAYER.fullmatch(name)
            if name in _NAMES:
                self._sources[_NAMES[name]] = (name, 0)
            elif part is not None and part[2] in _PARTS:
                own = f"model.layers.{part[1]}.{_PARTS[part[2]]}.weight"
                self._sources[own] = (name, self._heads.get(part[2], 0))
            else:
                raise CheckpointError(
                    f"{file.name} must hold tensors of a dense text model, got {name}"
                )

    def keys(self) -> list[str]:
        """Return Hugging Face's names of the file's tensors."""
        return list(self._sources)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor by Hugging Face's name, with the rows of q and k in Hugging Face's
        order."""
        source, heads = self._sources[name]
        tensor: Tensor = self._reader.get_tensor(source)
        if not heads:
            return tensor
        pairs = tensor.reshape(heads, -1, 2, tensor.shape[1])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def get_slice(self, name: str) -> Any:
        """Return a tensor whose rows and columns can be read by slicing, without the rest."""
        source, heads = self._sources[name]
        part = self._reader.get_slice(source)
        return _Reordered(self, name, part) if heads else part


class _Reordered:
    """A lazy tensor of q or k rows: it is read whole and put in Hugging Face's order before it is
    cut."""

    def __init__(self, tensors: MistralTensors, name: str, stored: Any) -> None:
        self._tensors, self._name, self._stored = tensors, name, stored

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor, which the order of rows does not change."""
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        name: str = self._stored.get_dtype()
        return name

    def __getitem__(self, at: Any) -> Tensor:
        """Return the part of the reordered tensor at an index or slices."""
        return self._tensors.get_tensor(self._name)[at]
