"""Encoders of transformers that no module here is made of, behind the interface of `Encoder`.

Texts of like lengths run together, padded to the longest and masked: what a layer does to tell its
texts apart is transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, read_object
from tilewise.models.encoder import EncoderShape, Packed
from tilewise.models.vector_head import VectorHead

__all__ = ["TransformersEncoder", "load_transformers_encoder", "why_no_encoder"]

# The padding that a text may get, as a share of its batch's longest.
_LEAST_FILLED = 0.75
_BARE = ("Model", "ForMaskedLM", "ForPreTraining")
_CLASSIFIES = "ForSequenceClassification"


def why_no_encoder(config: Json) -> str | None:
    """Say why transformers has no encoder for a config.json, or return None."""
    names, kind = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.endswith((*_BARE, _CLASSIFIES)):
        return f"architectures must name a bare model or a classifier, got {name!r}"
    if config.get("is_encoder_decoder") or config.get("is_decoder"):
        return f"{name} must be an encoder, got one with a decoder"
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except ImportError:
        return "transformers is not installed: pip install 'tilewise[transformers]'"
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or not hasattr(transformers, name):
        return f"transformers {transformers.__version__} has no encoder of that name"
    return None


class TransformersEncoder(nn.Module):
    """An encoder of transformers behind the interface of `Encoder`.

    Args:
        inner: the model; a classifier with its head, or a bare model.
        config: the shape of the encoder.

    Attributes:
        head: None: a classifier's is inside.
        gives_vectors: True if `forward` returns a row of a classifier's logits for each text, False
            if it returns a row for each token.
        embedding_source: the empty name of no tensor: transformers reads the checkpoint.
        lm_head: None: no token is drawn.
    """

    lm_head: None = None
    embedding_source = ""

    def __init__(self, inner: nn.Module, config: EncoderShape) -> None:
        super().__init__()
        self.inner, self.config = inner, config
        self.head: VectorHead | None = None
        self.gives_vectors = config.architecture.endswith(_CLASSIFIES)
        takes = inspect.signature(inner.forward).parameters
        self._has_types = config.num_types > 1 and "token_type_ids" in takes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def forward(self, packed: Packed) -> Tensor:
        """Return the last hidden states (T, E), or of a classifier the logits (B, labels)."""
        edges = packed.cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(edges)]
        found: list[Tensor | None] = [None] * len(lengths)
        for places in _alike(lengths):
            longest = max(lengths[i] for i in places)
            rows = torch.zeros(len(places), longest, dtype=torch.int64, device=packed.ids.device)
            types, mask = torch.zeros_like(rows), torch.zeros_like(rows)
            for row, i in enumerate(places):
                own = slice(edges[i], edges[i + 1])
                rows[row, : lengths[i]], mask[row, : lengths[i]] = packed.ids[own], 1
                if packed.types is not None:
                    types[row, : lengths[i]] = packed.types[own]
            more = {"token_type_ids": types} if self._has_types else {}
            output = self.inner(input_ids=rows, attention_mask=mask, **more)
            for row, i in enumerate(places):
                found[i] = (
                    output.logits[row : row + 1]
                    if self.gives_vectors
                    else output.last_hidden_state[row, : lengths[i]]
                )
        return torch.cat([one for one in found if one is not None])


def _alike(lengths: list[int]) -> Iterator[list[int]]:
    """Yield batches of places in `lengths`, the longest texts first.

    In a batch no text is shorter than three quarters of the longest.
    """
    batch = list[int]()
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[place] < _LEAST_FILLED * lengths[batch[0]]:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def load_transformers_encoder(
    path: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    random_weights: bool,
    before: Callable[[nn.Module], None] | None,
) -> TransformersEncoder:
    """Load an encoder through transformers.

    The arguments and errors are those of `models.registry.load_encoder`.
    """
    config = read_object(Path(path) / "config.json")
    reason = why_no_encoder(config)
    if reason is not None:
        raise CheckpointError(reason)
    import transformers

    name: str = config["architectures"][0]
    try:
        theirs: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever its checks raise is about the file
        raise CheckpointError(f"config.json: {' '.join(str(error).split())[:300]}") from error
    if getattr(theirs, "quantization_config", None) is not None:
        raise CheckpointError("quantization_config must be absent (float weights), got one")
    is_bare = not name.endswith(_CLASSIFIES)
    kind: Any = transformers.AutoModel if is_bare else getattr(transformers, name)
    make = kind.from_config if is_bare else kind
    own = dtype
    if own is None:
        own = theirs.dtype if isinstance(theirs.dtype, torch.dtype) else torch.float32
    with torch.device("meta"):
        empty = make(theirs).to(own)
    shape = _shape(name, theirs, empty, own)
    if before is not None:
        before(empty)
    if random_weights:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            return TransformersEncoder(make(theirs).to(own).eval(), shape)
    inner, report = kind.from_pretrained(
        path,
        config=theirs,
        dtype=own,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    lacking = [
        str(tensor)
        for tensor in (*report["missing_keys"], *report["mismatched_keys"])
        if not (is_bare and "pooler" in str(tensor))  # which nothing here reads
    ]
    if lacking:
        raise CheckpointError(
            f"checkpoint must hold tensor {min(lacking)} of {name}, got none that fits"
        )
    return TransformersEncoder(inner.to(device).eval(), shape)


def _shape(name: str, theirs: Any, empty: nn.Module, dtype: torch.dtype) -> EncoderShape:
    """Return the sizes of an encoder that an engine needs, from the encoder's configuration.

    Args:
        name: the architecture's class name.
        theirs: the configuration object of transformers.
        empty: the model on "meta"; where its table of positions has a padding row, texts use only
            the rows after the padding row.
        dtype: the dtype of the checkpoint.

    Raises:
        CheckpointError: max_position_embeddings is no positive integer.
    """
    longest = getattr(theirs, "max_position_embeddings", None)
    if type(longest) is not int or longest < 1:
        raise CheckpointError(f"max_position_embeddings must be a positive integer, got {longest}")
    for module in empty.modules():
        # RoBERTa's kin begin behind the padding token's id.
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            longest = min(longest, table.num_embeddings - table.padding_idx - 1)
    return EncoderShape(
        architecture=name,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        context_length=longest,
        num_types=getattr(theirs, "type_vocab_size", 0) or 0,
        dtype=str(dtype).removeprefix("torch."),
        is_native=False,
    )
