"""Text becomes ids once, with its documents' boundaries."""

from __future__ import annotations

import json
import math
import os
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

from tilewise.training.corpus import (
    END,
    Corpus,
    load_tokenizer,
    prepare,
    read_documents,
    train_tokenizer,
)

TALES = ("The fox ran home.", "A hen sat on the hill and slept.", "Two frogs sang.")


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(f"{TALES[0]}\n{END}\n{TALES[1]}\n{END}\n \n")
    (folder / "more" / "b.txt").write_text(TALES[2])
    return folder


def test_documents_begin_with_the_end_token_and_decode_to_the_text(text, tmp_path):
    corpus = prepare(text, tmp_path / "data", words=300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
    end = corpus.special[END]
    assert len(corpus) == 3
    assert corpus.words == tokenizer.get_vocab_size()
    for tale, first, last in zip(TALES, corpus.starts, corpus.starts[1:], strict=False):
        assert corpus.tokens[first] == end
        assert tokenizer.decode(corpus.tokens[first + 1 : last].tolist()) == tale
    assert corpus.tokens[corpus.starts[-1]] == end
    assert tokenizer.encode(TALES[0]).ids == corpus.tokens[: corpus.starts[1]].tolist()


def test_a_second_call_reads_what_the_first_wrote(text, tmp_path):
    first = prepare(text, tmp_path / "data", words=300)
    (text / "a.txt").unlink()
    again = prepare(text, tmp_path / "data", words=300)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.starts, again.starts)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"text": "more"}, r"text must be '.*text', with which the tokens in .* got '.*more'"),
        ({"words": 280}, "words must be 300, .* got 280"),
        ({"longest": 8}, "longest must be None, .* got 8"),
        ({"tokenizer": "data"}, "tokenizer must be None, .* got '.*data'"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_tokens_that_were_made_otherwise_are_refused(text, tmp_path, other, message):
    prepare(text, tmp_path / "data", words=300)
    asked = {"text": text, "words": 300} | other
    if "tokenizer" in other:
        asked["tokenizer"] = tmp_path / other["tokenizer"]
    if isinstance(asked["text"], str):
        asked["text"] = text / asked["text"]
    with pytest.raises(ValueError, match=message):
        prepare(asked.pop("text"), tmp_path / "data", **asked)


def test_tokens_that_do_not_say_how_they_were_made_are_refused(text, tmp_path):
    prepare(text, tmp_path / "data", words=300)
    facts = json.loads((tmp_path / "data" / "corpus.json").read_text())
    del facts["source"]
    (tmp_path / "data" / "corpus.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"text must be what corpus.json does not say"):
        prepare(text, tmp_path / "data", words=300)


def test_a_text_without_room_between_its_special_tokens_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="longest must leave room .* got 2"):
        prepare(text, tmp_path / "data", words=300, longest=2)


def test_a_masked_models_texts_are_cut_between_their_special_tokens(text, tmp_path):
    corpus = prepare(text, tmp_path / "data", words=300, longest=8)
    lengths = np.diff(corpus.starts)
    assert lengths.max() == 8
    for first, last in zip(corpus.starts, corpus.starts[1:], strict=False):
        assert corpus.tokens[first] == corpus.special["[CLS]"]
        assert corpus.tokens[last - 1] == corpus.special["[SEP]"]


def test_gpt2s_two_files_make_a_tokenizer(tmp_path):
    trained = train_tokenizer(TALES, 300)
    model = json.loads(trained.to_str())["model"]
    (tmp_path / "encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "vocab.bpe").write_text(f"#version: 0.2\n{merges}\n")
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(TALES[1]).ids == trained.encode(TALES[1]).ids


def test_every_share_of_documents_is_held_out():
    corpus = Corpus.of_ids([[1]] * 20, 2, 0)
    trained, held_out = corpus.split(0.1)
    assert held_out.tolist() == [5, 15]
    assert sorted([*trained, *held_out]) == list(range(20))
    assert len(corpus.split(0.0)[1]) == 0
    assert len(Corpus.of_ids([[1]], 2, 0).split(0.1)[1]) == 0


def test_no_text_and_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="text must hold documents in .txt files, got none in"):
        prepare(tmp_path, tmp_path / "data")
    with pytest.raises(ValueError, match="tokenizer must be tokenizer.json, or a folder"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_the_special_tokens_is_refused(text, tmp_path):
    train_tokenizer(TALES, 300).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer must have the token \[PAD\], got none"):
        prepare(text, tmp_path / "data", tokenizer=tmp_path, longest=8)


def test_bytes_that_are_no_utf8_are_told(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9\r\nau lait".encode("latin-1"))
    with pytest.warns(UserWarning, match=r"latin\.txt is not UTF-8 at byte 3"):
        assert list(read_documents(tmp_path)) == ["caf\ufffd\nau lait"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_a_byte_order_mark_says_the_encoding_and_is_no_text(tmp_path, encoding):
    mark = "\ufeff" if encoding.endswith("be") else ""  # the others write theirs
    (tmp_path / "a.txt").write_bytes(f"{mark}caf\u00e9\n{END}\nA hen.".encode(encoding))
    assert list(read_documents(tmp_path)) == ["caf\u00e9", "A hen."]


def test_a_tokenizer_with_a_byte_order_mark_is_read(tmp_path):
    trained = train_tokenizer(TALES, 300)
    (tmp_path / "tokenizer.json").write_text(trained.to_str(), encoding="utf-8-sig")
    assert load_tokenizer(tmp_path).encode(TALES[0]).ids == trained.encode(TALES[0]).ids


@pytest.mark.parametrize("longest", [None, 8])
@pytest.mark.parametrize(
    "setting",
    [
        lambda made: made.enable_truncation(4),
        lambda made: made.enable_padding(length=64),
        lambda made: made.enable_padding(direction="left", pad_to_multiple_of=16),
    ],
    ids=["truncation", "padding", "padding on the left"],
)
def test_truncation_and_padding_of_a_tokenizer_reach_no_corpus(text, tmp_path, setting, longest):
    made = train_tokenizer(TALES, 300, is_masked=longest is not None)
    made.save(str(tmp_path / "tokenizer.json"))
    plain = prepare(text, tmp_path / "plain", tokenizer=tmp_path, longest=longest)
    setting(made)
    made.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(text, tmp_path / "data", tokenizer=tmp_path, longest=longest)
    assert np.array_equal(corpus.tokens, plain.tokens)
    assert np.array_equal(corpus.starts, plain.starts)
    exported = json.loads((tmp_path / "data" / "tokenizer.json").read_text())
    assert exported["truncation"] is None
    assert exported["padding"] is None


def test_tokens_that_a_tokenizer_cut_are_refused_until_they_are_made_anew(text, tmp_path):
    prepare(text, tmp_path / "data", words=300)
    file = tmp_path / "data" / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    made.enable_truncation(4)
    made.save(str(file))
    with pytest.raises(ValueError, match=r"whole documents \(--fresh .*, got .* with truncation"):
        prepare(text, tmp_path / "data", words=300)
    assert len(prepare(text, tmp_path / "data", words=300, fresh=True)) == 3


def test_tokens_that_are_used_again_say_their_age_and_what_changed(text, tmp_path, capsys):
    def again() -> str:
        prepare(text, tmp_path / "data", tokenizer=tmp_path / "tokenizer.json")
        return capsys.readouterr().err.replace(str(tmp_path), "")

    train_tokenizer(TALES, 300).save(str(tmp_path / "tokenizer.json"))
    assert again() == ""
    assert "the tokens in /data were made 0 minutes ago (" in again()
    facts = json.loads((tmp_path / "data" / "corpus.json").read_text())
    facts["made"] = time.time() - 3 * 86_400 - 60
    (tmp_path / "data" / "corpus.json").write_text(json.dumps(facts))
    assert "made 3 days ago" in again()
    assert "changed" not in again()
    (text / "c.txt").write_text("A new one.")
    assert again().endswith("; the text has changed since: --fresh makes them anew\n")
    train_tokenizer(TALES, 280).save(str(tmp_path / "tokenizer.json"))
    assert "; the text and the tokenizer have changed since" in again()


def test_fresh_tokens_are_of_the_text_and_the_tokenizer_of_now(text, tmp_path):
    first = prepare(text, tmp_path / "data", words=300)
    (text / "c.txt").write_text("A new one.")
    assert len(prepare(text, tmp_path / "data", words=300)) == 3
    second = prepare(text, tmp_path / "data", words=280, fresh=True)
    assert len(second) == 4
    assert second.words == 280
    assert len(first.tokens) == first.starts[-1] + 1  # still mapped, of the file that was


def test_fresh_tokens_of_a_text_that_is_gone_are_those_that_are_there(text, tmp_path, capsys):
    prepare(text, tmp_path / "data", words=300)
    for file in text.rglob("*.txt"):
        file.unlink()
    assert len(prepare(text, tmp_path / "data", words=300, fresh=True)) == 3
    assert "are used again; the text is no longer there" in capsys.readouterr().err


def test_fresh_tokens_do_not_replace_those_of_another_text(text, tmp_path):
    prepare(text, tmp_path / "data", words=300)
    with pytest.raises(ValueError, match=r"text must be '.*text', with which the tokens"):
        prepare(text / "more", tmp_path / "data", words=300, fresh=True)


@pytest.mark.parametrize("size", [0, 6])
def test_tokens_that_were_cut_short_are_refused(text, tmp_path, size):
    prepare(text, tmp_path / "data", words=300)
    os.truncate(tmp_path / "data" / "tokens.bin", size)
    with pytest.raises(ValueError, match=rf"tokens\.bin must have the \d+ bytes .* got {size}"):
        prepare(text, tmp_path / "data", words=300)


@pytest.mark.parametrize("share", [-0.1, 0.9, 2, math.nan])
def test_a_share_that_holds_no_part_out_is_refused(share):
    corpus = Corpus.of_ids([[1, 2], [3], [4]], words=5, end=0)
    with pytest.raises(ValueError, match=r"held out must lie in \[0, 0.5\]"):
        corpus.split(share)


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ValueError, match="words must be at least 257, .* got 256"):
        train_tokenizer(["a"], 256)
