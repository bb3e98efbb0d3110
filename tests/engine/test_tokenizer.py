"""A checkpoint directory's tokenizer files become one Tokenizer."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import CheckpointError

TEXT = "The cat sat on the mat. Où est le chat? 😀"


def write(directory, *, config=None, special=("<s>", "</s>"), template=None):
    """Save a small byte-level tokenizer as transformers does."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    library.train_from_iterator([TEXT], trainer)
    if template is not None:
        library.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(s, library.token_to_id(s)) for s in special]
        )
    library.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return library


def test_text_round_trips_and_special_tokens_have_no_text(tmp_path):
    write(tmp_path, config={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode([0, *ids, 1]) == TEXT


def test_the_first_token_is_added_once_and_where_the_file_says_so(tmp_path):
    config = {"bos_token": "<s>", "add_bos_token": True}
    write(tmp_path, config=config, template="<s> $A")
    ids = load_tokenizer(tmp_path).encode("cat")
    assert ids[0] == 0
    assert 0 not in ids[1:]
    # As in transformers 5: of two rules the file's own counts.
    write(tmp_path, config=config)
    assert 0 not in load_tokenizer(tmp_path).encode("cat")


def test_special_tokens_may_be_named_by_the_map_alone(tmp_path):
    write(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load_tokenizer(tmp_path).eos_token_id == 1


def test_gpt2_files_give_the_same_ids_as_one_file(tmp_path):
    library = write(tmp_path, special=["<|endoftext|>"])
    whole = load_tokenizer(tmp_path).encode(TEXT)
    (tmp_path / "tokenizer.json").unlink()
    library.model.save(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT) == whole
    assert tokenizer.decode(whole) == TEXT
    end = library.token_to_id("<|endoftext|>")
    assert tokenizer.eos_token_id == end
    assert tokenizer.encode("cat<|endoftext|>")[-1] == end
    assert tokenizer.decode([end]) == ""


def test_streaming_continues_the_prompt(tmp_path):
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompt, rest = tokenizer.encode("The cat"), tokenizer.encode(" sat")
    detokenizer = tokenizer.detokenizer(prompt)
    assert "".join(map(detokenizer.push, rest)) == " sat"


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_files_are_refused_by_name(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="must"):
        load_tokenizer(tmp_path)


def test_channels_end_with_an_answer_or_a_call(tmp_path):
    """config.json of gpt-oss names the end of an answer alone: calls would go on."""
    marks = ("</s>", "<|channel|>", "<|return|>", "<|call|>")
    write(tmp_path, config={"eos_token": "</s>"}, special=marks)
    assert load_tokenizer(tmp_path).end_ids == (0, 2, 3)
    write(tmp_path, config={"eos_token": "</s>"}, special=("</s>", "<|call|>"))
    assert load_tokenizer(tmp_path).end_ids == (0,)
    (tmp_path / "tokenizer_config.json").unlink()
    write(tmp_path, special=("<|call|>",))
    assert load_tokenizer(tmp_path).end_ids == ()
