"""Small random checkpoints with a tokenizer, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from tests.models.tiny import make_hf, save_hf

VOCAB = 300
TEXT = ["the quick brown fox jumps over the lazy dog", "once upon a time there was a small cat"]


def write_tokenizer(directory: Path) -> None:
    """Save a byte-level tokenizer of 290 tokens, so that the last ten ids have no text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_checkpoint(directory: Path, case: str, *, has_tokenizer: bool = True) -> PreTrainedModel:
    """Save a random model of one of the cases of `tests.models.tiny`; returns transformers'."""
    model = make_hf(case, 5, vocab_size=VOCAB)
    save_hf(model, directory)
    if has_tokenizer:
        write_tokenizer(directory)
    return model


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily, past its end token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return whole[0, len(prompt) :].tolist()
