"""Small random encoders made by transformers, with their configurations and texts of token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

logging.disable_progress_bar()

VOCAB = 101  # no tile or vector divides it
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
_LONG = _SHAPE | {"max_position_embeddings": 256, "bos_token_id": 3, "eos_token_id": 4}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 64,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 66,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", _SHAPE | {"pad_token_id": 0}),
    "Roberta": ("RobertaConfig", _SHAPE | {"type_vocab_size": 1}),
    "XLMRoberta": ("XLMRobertaConfig", _SHAPE | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "Camembert": ("CamembertConfig", _SHAPE | {"type_vocab_size": 1}),
    "DistilBert": ("DistilBertConfig", _DISTILBERT),
    "MPNet": ("MPNetConfig", _SHAPE | {"max_position_embeddings": 290}),
    "ModernBert": (
        "ModernBertConfig",
        _LONG
        | {"local_attention": 8, "num_hidden_layers": 4, "cls_token_id": 3, "sep_token_id": 4},
    ),
    "NomicBert": ("NomicBertConfig", _SHAPE | {"max_position_embeddings": 256}),
    "EuroBert": (
        "EuroBertConfig",
        _LONG | {"num_key_value_heads": 2, "mask_token_id": 5, "classifier_pooling": "mean"},
    ),
    "Gemma3Text": (
        "Gemma3TextConfig",
        _LONG
        | {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
            "use_bidirectional_attention": True,
        },
    ),
}


def write_encoder(directory, family, kind="Model", **changes):
    """Write a random model of transformers and return it, float32 and in eval mode."""
    config_class, fields = CASES[family]
    given = fields | changes
    config = getattr(transformers, config_class)(**given)
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not 1 and 0
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory)
    if "sliding_window" in given:  # 5.15 writes the half of it, which it computes with
        file = Path(directory) / "config.json"
        written = json.loads(file.read_text()) | {"sliding_window": given["sliding_window"]}
        file.write_text(json.dumps(written))
    return model


def texts(lengths, first=6):
    """Return texts of token ids without special tokens."""
    return [[first + (31 * n + 7 * i) % (VOCAB - first) for i in range(n)] for n in lengths]


def write_tokenizer(directory, *, has_types=True):
    """Write a tokenizer of words w0, w1 ..., which puts pairs together as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCAB))])}
    library = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(special)
    second = 1 if has_types else 0
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    library.enable_truncation(7)  # as sentence-transformers leaves it in the file
    library.enable_padding(length=9)
    library.save(str(directory / "tokenizer.json"))


def words(*numbers):
    """Return the text of words by their token ids."""
    return " ".join(f"w{i}" for i in numbers)
