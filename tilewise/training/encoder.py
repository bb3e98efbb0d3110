"""BERT for training: a masked language model whose head sees the masked places only.

Encoder after Devlin et al., 2019: learned positions, norms after each block, GELU, tied head. Text
is packed without padding; names are those of `transformers`, to and from which the table goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.models.weight_table import Weight
from tilewise.training.decoder import Documents, attend, layer_norm, linear

__all__ = ["Bert", "BertShape"]


@dataclass(frozen=True, slots=True)
class BertShape:
    """The sizes of a BERT; the defaults are BERT-base's.

    Attributes:
        vocab_size: the number of words; the embedding may have more rows, see `Bert`.
        max_positions: the number of tokens of the longest text.
    """

    vocab_size: int = 30_522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads {self.num_heads}, "
                f"got {self.hidden_size}"
            )

    def to_hf(self, *, pad_token_id: int = 0) -> dict[str, Any]:
        """Return, as a dict, the config.json by which transformers reads this model."""
        return {
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": 2,
            "layer_norm_eps": self.norm_eps,
            "pad_token_id": pad_token_id,
            "tie_word_embeddings": True,
        }


class BertLayer(nn.Module):
    """A layer of BERT: x = norm(x + attention(x)), then norm(x + mlp(x)); attention sees all of a
    text."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.qkv_proj = nn.Linear(size, 3 * size)
        self.o_proj = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, shape.norm_eps)
        self.up_proj = nn.Linear(size, shape.intermediate_size)
        self.down_proj = nn.Linear(shape.intermediate_size, size)
        self.mlp_norm = nn.LayerNorm(size, shape.norm_eps)
        self.num_heads = shape.num_heads

    def forward(self, x: Tensor, documents: Documents | None, deterministic: bool) -> Tensor:
        """Map x (T, E) to the layer's output (T, E); attention stays within each of `documents`."""
        heads = linear(x, self.qkv_proj).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.unbind(-3)
        o = attend(q, k, v, documents, None, causal=False, deterministic=deterministic)
        x = layer_norm(x + linear(o.flatten(-2), self.o_proj), self.attention_norm)
        y = linear(F.gelu(linear(x, self.up_proj)), self.down_proj)
        return layer_norm(x + y, self.mlp_norm)


class Bert(nn.Module):
    """BERT as a masked language model over packed texts: encoder, and the head's transform.

    The output projection is embed_tokens.weight with head_bias; the loss applies it.

    Args:
        shape: the sizes of the model.
        rows: the number of rows of the embedding and of the head; more than the vocabulary pads it,
            which makes the head's product faster when it is a multiple of 128. None is the
            vocabulary's size.
    """

    def __init__(self, shape: BertShape, rows: int | None = None) -> None:
        super().__init__()
        size, rows = shape.hidden_size, rows or shape.vocab_size
        self.shape = shape
        self.embed_tokens = nn.Embedding(rows, size)
        self.embed_positions = nn.Embedding(shape.max_positions, size)
        self.embed_types = nn.Embedding(2, size)
        self.embed_norm = nn.LayerNorm(size, shape.norm_eps)
        self.layers = nn.ModuleList(BertLayer(shape) for _ in range(shape.num_layers))
        self.head = nn.Linear(size, size)
        self.head_norm = nn.LayerNorm(size, shape.norm_eps)
        self.head_bias = nn.Parameter(torch.zeros(rows))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        documents: Documents | None,
        places: Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = False,
    ) -> Tensor:
        """Return the hidden states at `places`, after the head's dense layer, activation and norm.

        Args:
            ids: int64 (T,), masked already; positions: int64 (T,), counted in each text.
            documents: the edges of the texts.
            places: int64 (K,), the rows that are predicted.

        Returns:
            (K, E) in `dtype`, which the output head multiplies.
        """
        x = self.embed_tokens(ids) + self.embed_positions(positions) + self.embed_types.weight[0]
        x = layer_norm(x.to(dtype), self.embed_norm)
        for layer in self.layers:
            x = layer(x, documents, deterministic)
        return layer_norm(F.gelu(linear(x[places], self.head)), self.head_norm)

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw random weights in place: matrices normal(0, std), norms 1, biases 0. Source: Devlin
        et al., 2019."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def weight_table(self) -> tuple[Weight, ...]:
        """Return, for each parameter, the names of its tensors in transformers' BertForMaskedLM."""
        size = self.shape.hidden_size
        modules = [
            ("embed_tokens", "bert.embeddings.word_embeddings", False),
            ("embed_positions", "bert.embeddings.position_embeddings", False),
            ("embed_types", "bert.embeddings.token_type_embeddings", False),
            ("embed_norm", "bert.embeddings.LayerNorm", True),
            ("head", "cls.predictions.transform.dense", True),
            ("head_norm", "cls.predictions.transform.LayerNorm", True),
        ]
        table = [Weight("head_bias", ("cls.predictions.bias",))]
        for i in range(self.shape.num_layers):
            theirs = f"bert.encoder.layer.{i}"
            table += [
                Weight(
                    f"layers.{i}.qkv_proj.{kind}",
                    tuple(f"{theirs}.attention.self.{n}.{kind}" for n in ("query", "key", "value")),
                    (size, size, size),
                )
                for kind in ("weight", "bias")
            ]
            modules += [
                (f"layers.{i}.o_proj", f"{theirs}.attention.output.dense", True),
                (f"layers.{i}.attention_norm", f"{theirs}.attention.output.LayerNorm", True),
                (f"layers.{i}.up_proj", f"{theirs}.intermediate.dense", True),
                (f"layers.{i}.down_proj", f"{theirs}.output.dense", True),
                (f"layers.{i}.mlp_norm", f"{theirs}.output.LayerNorm", True),
            ]
        for ours, source, has_bias in modules:
            for kind in ("weight", "bias") if has_bias else ("weight",):
                table.append(Weight.of(f"{ours}.{kind}", f"{source}.{kind}"))
        return tuple(table)
