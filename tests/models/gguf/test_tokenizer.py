"""A tokenizer of a GGUF file gives the ids of the one that it was made of."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.models.gguf import vocabularies
from tests.models.gguf.vocabularies import CORPUS, SPECIAL, TEMPLATE
from tilewise.errors import CheckpointError
from tilewise.models.gguf.tokenizer import end_tokens, tokenizer_files

TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "  leading and trailing  ",
    "12345678 9",
    "e\u0301 decomposed",
    "\U0001f600 emoji \U0001f469\u200d\U0001f4bb",
    "<|im_start|>user\nhello<|im_end|>\n<tool>x</tool>",
    "\r\n\r\n\ta\u00a0b",
    "\u4e2d\u6587\u6d4b\u8bd5123",
]


def texts():
    """Many texts: those above, and random ones of their characters."""
    rng = random.Random(0)
    letters = sorted({*"".join(CORPUS), *"\U0001f600\u0301\u00a0<|>"})
    return TEXTS + ["".join(rng.choices(letters, k=rng.randint(1, 60))) for _ in range(300)]


def library_of(metadata) -> Tokenizer:
    files = tokenizer_files(metadata)
    assert files is not None
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_byte_pairs_give_the_ids_and_texts_of_the_original(pre):
    ours = library_of(vocabularies.byte_pairs_metadata(pre, size=440))
    theirs = vocabularies.byte_pairs(pre)
    for text in texts():
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_give_the_ids_and_texts_of_the_original(prefix):
    ours, theirs = library_of(vocabularies.pieces_metadata(prefix)), vocabularies.pieces(prefix)
    for text in texts():
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_beginnings_and_ends_are_as_the_file_says():
    metadata = vocabularies.byte_pairs_metadata("qwen2")
    first, last = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    for begins, ends in ((True, True), (True, False), (False, True)):
        told = {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.add_eos_token": ends}
        ids = library_of(metadata | told).encode("x").ids
        assert (ids[0] == first, ids[-1] == last) == (begins, ends)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert library_of(metadata).encode("x").ids[0] != first
    llama = vocabularies.byte_pairs_metadata("llama-bpe")
    del llama["tokenizer.ggml.add_bos_token"]
    assert library_of(llama).encode("x").ids[0] == first


def test_special_tokens_and_the_template_are_named():
    files = tokenizer_files(vocabularies.byte_pairs_metadata("qwen2"))
    assert files is not None
    config = files["tokenizer_config.json"]
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|im_end|>")
    assert config["chat_template"] == TEMPLATE


def test_ends_are_those_of_the_file_and_known_texts():
    tokens = ["a", *SPECIAL, "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>"]
    found = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 4}
    # without the end of a message of gpt-oss
    assert end_tokens(found) == [4, 2, 5, 7, 8]
    assert end_tokens({"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 1}) == [
        4,
        1,
    ]
    assert end_tokens({}) == []


def test_a_file_without_a_vocabulary_has_no_tokenizer():
    assert tokenizer_files({}) is None
    assert tokenizer_files({"tokenizer.ggml.model": "no_vocab"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model must be gpt2 or llama, got 'bert'"),
        ({"pre": "made-up"}, "pre must be one of .*qwen2.*, got 'made-up'"),
        ({"tokens": np.arange(3)}, "tokens must be a list of texts"),
        ({"token_type": np.arange(3)}, "token_type must have .* entries, got 3"),
        ({"merges": ["ab"]}, "pairs with a space between, got 'ab'"),
        ({"merges": ["no such"]}, "merges must be of tokens"),
        ({"eos_token_id": 10**6}, "eos_token_id must be one of .* tokens, got 1000000"),
    ],
)
def test_what_is_no_tokenizer_is_refused(changes, message):
    told = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(vocabularies.byte_pairs_metadata("qwen2") | told)


def test_pieces_without_scores_are_refused():
    metadata = vocabularies.pieces_metadata()
    metadata["tokenizer.ggml.scores"] = np.arange(3, dtype=np.float32)
    with pytest.raises(CheckpointError, match="scores must have .* numbers"):
        tokenizer_files(metadata)
