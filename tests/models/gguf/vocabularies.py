"""Small tokenizers of Hugging Face's, trained on the spot, and their metadata in GGUF files."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

__all__ = [
    "CORPUS",
    "SPECIAL",
    "TEMPLATE",
    "byte_pairs",
    "byte_pairs_metadata",
    "pieces",
    "pieces_metadata",
]

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "She sells sea shells by the sea shore; 1234567890 shells in 2024!",
    "def f(x):\n    return x ** 2  # squares\n\n\nprint(f(12))\n",
    "Stra\u00dfe, caf\u00e9, na\u00efve, \u65e5\u672c\u8a9e\u306e\u6587\u7ae0, "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440",
    "I'll say they've WON'T I'M we'd  two spaces   three spaces\t\ttabs",
] * 4
SPECIAL = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")


@functools.cache
def byte_pairs(pre: str) -> Tokenizer:
    """Return byte pairs over words of a kind: qwen2, llama-bpe, gpt-2 or smollm."""
    library = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    first: dict[str, Any] = {
        "qwen2": pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
        "llama-bpe": pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
        "smollm": pre_tokenizers.Digits(individual_digits=True),
    }
    library.pre_tokenizer = pre_tokenizers.Sequence([first[pre], plain]) if pre in first else plain
    library.normalizer = normalizers.NFC() if pre == "qwen2" else None
    library.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens([AddedToken(x, special=True) for x in SPECIAL])
    library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return library


def byte_pairs_metadata(pre: str, size: int | None = None) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of `byte_pairs`, for an embedding of `size` rows."""
    library = byte_pairs(pre)
    count = library.get_vocab_size()
    tokens = [library.id_to_token(i) for i in range(count)]
    tokens += [f"[PAD{i}]" for i in range(count, size or count)]
    merges = json.loads(library.to_str())["model"]["merges"]
    kinds = [3 if t in SPECIAL else 4 if t == "<tool>" else 1 for t in tokens[:count]]
    kinds += [5] * (len(tokens) - count)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


@functools.cache
def pieces(prefix: bool = True) -> Tokenizer:
    """Return a tokenizer like Llama 2's: pieces, bytes for what is none, a space in front."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    space = normalizers.Replace(" ", "\u2581")
    steps = [normalizers.Prepend("\u2581"), space] if prefix else [space]
    trained.normalizer = normalizers.Sequence(steps)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator([line.split("\u65e5")[0] for line in CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pairs = [tuple(pair) for pair in model["merges"]]
    for text in [*("".join(pair) for pair in pairs), *model["vocab"]]:
        vocabulary.setdefault(text, len(vocabulary))
    library = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    library.normalizer = trained.normalizer
    back: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return library


def pieces_metadata(prefix: bool = True) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of `pieces`."""
    library = pieces(prefix)
    count = library.get_vocab_size()
    tokens = [library.id_to_token(i) for i in range(count)]
    merged = ["".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    rank = {text: -float(i) for i, text in reversed(list(enumerate(merged)))}
    scores = np.array([rank.get(text, -1e4) for text in tokens], np.float32)
    kinds = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
