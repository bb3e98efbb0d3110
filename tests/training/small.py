"""Small corpora and models of the training tests."""

from __future__ import annotations

import numpy as np
import torch

from tilewise.models import ModelConfig, build_model
from tilewise.training.corpus import Corpus
from tilewise.training.encoder import Bert, BertShape
from tilewise.training.packing import Packer

WORDS = 90


def make_corpus(documents: int = 40, longest: int = 60, seed: int = 0) -> Corpus:
    """Documents of 5 ... longest random ids, each with token 0 before it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, longest, documents)
    return Corpus.of_ids([rng.integers(4, WORDS, size).tolist() for size in sizes], WORDS, 0)


def make_packer(corpus: Corpus | None = None, **options) -> Packer:
    corpus = make_corpus() if corpus is None else corpus
    return Packer(corpus, np.arange(len(corpus)), **({"tokens": 256, "context": 64} | options))


def make_decoder(architecture: str = "GPT2LMHeadModel", rows: int = 128, **changes):
    """A decoder of two layers with an embedding of `rows` rows."""
    if architecture == "GPT2LMHeadModel":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    else:
        sizes = {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        }  # fmt: skip
    config = {
        "architectures": [architecture], "vocab_size": rows, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0,
    } | sizes | changes  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return build_model(ModelConfig.from_hf(config), generator=generator)


def make_bert(rows: int = 128) -> Bert:
    bert = Bert(BertShape(WORDS, 64, 2, 2, 96, 64), rows)
    bert.init_weights(generator=torch.Generator().manual_seed(0))
    return bert
