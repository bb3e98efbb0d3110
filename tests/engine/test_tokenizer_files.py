"""A tokenizer whose tokens stand in several files has transformers' ids and texts."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tilewise.engine.settings import packaged_model
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import CheckpointError

transformers = pytest.importorskip("transformers")

CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N = 300  # ids of the vocabulary
WORDS = ["hello there user assistant the cat's mat, isn't it ? 12345 99 it'S éé IT'S x.append(y);"]
TEXTS = (
    "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n",
    "hello  <|im_end|>  there <|im_start|>cat",
    " the cat 's mat , is n't it ?",
    "x.append(hello);\n\n\n 12345 99\r\n",
    "e\u0301 IT'S it's",
    "catuser<tool>user <tool> <TOOL>",
    "",
    " ",
)


@pytest.fixture(scope="module")
def byte_level():
    """A trained byte-level vocabulary without added tokens, as JSON."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(WORDS * 20, trainer)
    return library.to_str()


@pytest.fixture(scope="module")
def words():
    """A vocabulary of words, whose texts are joined by spaces."""
    library = Tokenizer(models.WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    library.train_from_iterator([*WORDS, " ".join("'n.?!, m s ve re")], trainer)
    return library.to_str()


def decoder_of(first, names=CHAT, **changes):
    plain = {"lstrip": False, "rstrip": False, "single_word": False}
    return {
        str(first + i): {"content": name, "special": True, "normalized": False, **plain, **changes}
        for i, name in enumerate(names)
    }


def save(directory, library, inside=(), **files):
    """Write tokenizer.json with some added tokens, and other files by the first part of a name."""
    library = Tokenizer.from_str(library) if isinstance(library, str) else library
    library.add_tokens(
        [
            t if isinstance(t, AddedToken) else AddedToken(t, special=True, normalized=False)
            for t in inside
        ]
    )
    library.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def assert_transformers(directory, texts=TEXTS):
    """Compare ids, texts and special tokens with those of AutoTokenizer."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    backend = theirs.backend_tokenizer
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, adds_special_tokens=False) == ours.encode_plain(text) == bare
        for skips, decode in ((True, ours.decode), (False, ours.decode_whole)):
            whole = theirs.decode(ids, skip_special_tokens=skips)
            assert decode(ids) == whole
            stream = ours.detokenizer([], skip_special_tokens=skips)
            assert "".join([*map(stream.push, ids), stream.flush()]) == whole
    added = backend.get_added_tokens_decoder()
    assert ours.special_ids == {i for i, token in added.items() if token.special}
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id


EOS = {"eos_token": "<|im_end|>"}
OBJECT = {"content": "<|im_end|>", "lstrip": False, "rstrip": True, "normalized": False}
FORMS = {
    "all_in_tokenizer_json": {"inside": CHAT, "tokenizer_config": EOS},
    "added_tokens_decoder": {"tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N)}},
    "a_decoder_that_is_not_special": {
        "tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N, special=False)}
    },
    "a_decoder_that_strips": {
        "tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N, lstrip=True, rstrip=True)}
    },
    "a_decoder_of_whole_words": {
        "tokenizer_config": {
            **EOS,
            "added_tokens_decoder": decoder_of(N, ("catuser",), single_word=True, special=False),
        }
    },
    "a_decoder_that_is_normalized": {
        "tokenizer_config": {
            **EOS,
            "added_tokens_decoder": decoder_of(N, ("<tool>",), normalized=True, special=False),
        }
    },
    "a_decoder_that_changes_tokenizer_json": {
        "inside": CHAT,
        "tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N, rstrip=True)},
    },
    "one_there_two_beside": {
        "inside": CHAT[:1],
        "tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N)},
    },
    "added_tokens_json": {
        "tokenizer_config": {**EOS, "additional_special_tokens": list(CHAT)},
        "added_tokens": {name: N + i for i, name in enumerate(CHAT)},
    },
    "added_tokens_json_not_special": {
        "tokenizer_config": EOS,
        "added_tokens": {name: N + i for i, name in enumerate(("<tool>", *CHAT))},
    },
    "special_tokens_map": {
        "tokenizer_config": {"eos_token": "<|endoftext|>"},
        "special_tokens_map": {"eos_token": OBJECT, "additional_special_tokens": list(CHAT)},
    },
    "a_map_beside_a_decoder_is_not_read": {
        "tokenizer_config": {**EOS, "added_tokens_decoder": decoder_of(N)},
        "special_tokens_map": {"eos_token": "<|endoftext|>", "pad_token": "<pad>"},
    },
    "a_name_alone": {"tokenizer_config": EOS},
    "an_object_alone": {"tokenizer_config": {"eos_token": {"__type": "AddedToken", **OBJECT}}},
    "names_of_all_kinds": {
        "tokenizer_config": {
            "pad_token": "<pad>",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "image_token": "<tool>",
            "extra_special_tokens": ["<TOOL>"],
        }
    },
    "extra_tokens_by_name": {
        "tokenizer_config": {**EOS, "extra_special_tokens": {"tool_token": "<tool>"}}
    },
    "special_in_tokenizer_json_by_name": {
        "inside": [AddedToken("<|im_end|>", special=False, normalized=False)],
        "tokenizer_config": EOS,
    },
    "flags_that_tokenizer_json_answers": {
        "inside": CHAT,
        "tokenizer_config": {
            **EOS,
            "bos_token": "<|im_start|>",
            "add_bos_token": True,
            "add_eos_token": True,
            "add_prefix_space": True,
            "legacy": False,
        },
    },
    "special_tokens_that_only_the_class_names": {
        "inside": [AddedToken("</s>", special=False, normalized=False)],
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
    },
    "a_token_under_two_ids": {
        "inside": CHAT,
        "tokenizer_config": {
            **EOS,
            "added_tokens_decoder": decoder_of(N) | decoder_of(N + 3, CHAT[:1]),
        },
    },
    "special_tokens_are_split": {
        "inside": CHAT,
        "tokenizer_config": {**EOS, "split_special_tokens": True},
    },
    "spaces_of_bpe_are_kept": {
        "inside": CHAT,
        "tokenizer_config": {**EOS, "clean_up_tokenization_spaces": True},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_all_files_have_transformers_ids(tmp_path, byte_level, form):
    files = {name: content for name, content in FORMS[form].items() if name != "inside"}
    save(tmp_path, byte_level, FORMS[form].get("inside", ()), **files)
    assert_transformers(tmp_path)


@pytest.mark.parametrize(
    ("kind", "end"), [("LlamaTokenizerFast", "</s>"), ("Qwen2Tokenizer", "<|endoftext|>")]
)
def test_an_end_that_only_the_class_names_is_special(tmp_path, byte_level, kind, end):
    """transformers builds these classes anew; of what they name by themselves this reads it."""
    inside = [AddedToken("<|endoftext|>", special=False), AddedToken("</s>", special=False)]
    save(tmp_path, byte_level, inside, tokenizer_config={"tokenizer_class": kind})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == ours._library.token_to_id(end)
    assert theirs.eos_token_id in (ours.eos_token_id, None)  # transformers 5.24 names no "</s>"
    assert ours.eos_token_id in ours.special_ids
    assert ours.decode([ours.eos_token_id]) == ""


@pytest.mark.parametrize("tidies", [False, True])
def test_spaces_before_punctuation_go_where_texts_are_of_words(tmp_path, words, tidies):
    config = {"clean_up_tokenization_spaces": tidies, "unk_token": "<unk>"}
    save(tmp_path, words, tokenizer_config=config)
    texts = (*TEXTS, "cat ' s n ' t , . ? !", "it n ' t , n ' t . ' m", "cat .  .")
    assert_transformers(tmp_path, texts)
    ids = load_tokenizer(tmp_path).encode("cat , mat ?")
    shown = load_tokenizer(tmp_path).decode(ids)
    assert shown == ("cat, mat?" if tidies else "cat , mat ?")


@pytest.mark.parametrize("change", ["truncation", "padding", "left_padding"])
def test_a_tokenizer_json_neither_cuts_nor_fills_a_prompt(tmp_path, change):
    library = Tokenizer.from_file(str(packaged_model() / "tokenizer.json"))
    if change == "truncation":
        library.enable_truncation(5)
    elif change == "padding":
        library.enable_padding(length=64)
    else:
        library.enable_padding(direction="left", pad_to_multiple_of=16)
    library.save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(packaged_model())
    text = "Once upon a time there was a girl. " * 12
    for given in (text, "Once"):
        assert load_tokenizer(tmp_path).encode(given) == plain.encode(given)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == plain.encode(text)


def test_a_byte_order_mark_is_nothing(tmp_path, byte_level):
    save(tmp_path, byte_level, tokenizer_config={**EOS, "added_tokens_decoder": decoder_of(N)})
    before = load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    after = load_tokenizer(tmp_path)
    assert after.encode(TEXTS[0]) == before.encode(TEXTS[0])
    assert after.eos_token_id == before.eos_token_id == N + 2


def save_vocabulary(directory, library, config, model_type):
    Tokenizer.from_str(library).model.save(str(directory))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
        ("gpt2", {}),
        ("gpt2", {"add_prefix_space": True, "add_bos_token": True}),
        ("gpt2", {"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True}),
        ("gpt2", {"eos_token": "<|im_end|>", "add_eos_token": True}),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("qwen2", {"tokenizer_class": "GPT2Tokenizer", **EOS}),
        ("qwen2", {}),
        ("qwen3", {"tokenizer_class": "Qwen2TokenizerFast", "add_eos_token": True, **EOS}),
        ("qwen3", {"add_bos_token": True, "add_prefix_space": True}),
        ("qwen3", {"tokenizer_class": "GPT2Tokenizer"}),
        ("llama", {"tokenizer_class": "GPT2Tokenizer"}),
        ("llama", {"tokenizer_class": "Qwen2Tokenizer", "split_special_tokens": True}),
    ],
)
def test_vocab_and_merges_are_cut_as_their_class_does(tmp_path, byte_level, model_type, config):
    decoder = decoder_of(N, rstrip="Qwen2" in config.get("tokenizer_class", ""))
    for given in (config, {**config, "added_tokens_decoder": decoder}):
        save_vocabulary(tmp_path, byte_level, given, model_type)
        assert_transformers(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {}, "tokenizer_class must be GPT2Tokenizer or Qwen2Tokenizer .* got None; trans"),
        ("mistral", {"tokenizer_class": "RobertaTokenizer"}, "got 'RobertaTokenizer'"),
    ],
)
def test_vocab_and_merges_of_an_unknown_class_are_refused(
    tmp_path, byte_level, model_type, config, message
):
    save_vocabulary(tmp_path, byte_level, config, model_type)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_two_files_is_refused(tmp_path, byte_level, name):
    save_vocabulary(tmp_path, byte_level, {}, "gpt2")
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"got no {name} in"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "qwen.tiktoken"])
def test_other_formats_alone_are_refused_with_what_to_do(tmp_path, byte_level, name):
    (tmp_path / name).write_bytes(b"\n\x0e")
    with pytest.raises(
        CheckpointError, match=rf"must hold tokenizer.json, got {name} alone .*save_pretrained\("
    ):
        load_tokenizer(tmp_path)
    save(tmp_path, byte_level)
    assert load_tokenizer(tmp_path).encode("hello")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"x": "a"}}}, "must have ids as keys"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "must be a JSON object"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"300": 7}}},
            "must have objects with a content",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": decoder_of(N, lstrip="no")}},
            "lstrip must be true or false, got 'no'",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": decoder_of(N + 5)}},
            "must follow the vocabulary one by one, got 305 for '<|endoftext|>', which is 300",
        ),
        ({"added_tokens": {"<tool>": "7"}}, "must hold an id for each token, got '7'"),
        ({"tokenizer_config": {"split_special_tokens": "x"}}, "must be true or false"),
        ({"tokenizer_config": {"eos_token": 7}}, "eos_token must be a token's text, or an object"),
    ],
)
def test_wrong_declarations_are_named(tmp_path, byte_level, files, message):
    save(tmp_path, byte_level, **files)
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        load_tokenizer(tmp_path)


def test_a_field_that_may_matter_is_named(tmp_path, byte_level):
    config = {"image_token": "<i>", "model_max_length": 99, "fix_mistral_regex": False}
    save(tmp_path, byte_level, tokenizer_config=config)
    load_tokenizer(tmp_path)
    save(tmp_path, byte_level, tokenizer_config={**config, "fix_mistral_regex": True})
    with pytest.warns(UserWarning, match="tokenizer_config.json has .* out: 'fix_mistral_regex'"):
        load_tokenizer(tmp_path)


def random_token(draw, name):
    flags = {key: draw.random() < 0.3 for key in ("lstrip", "rstrip", "normalized", "single_word")}
    return {"content": name, "special": draw.random() < 0.5, **flags}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_files_have_transformers_ids(tmp_path, byte_level, seed):
    draw = random.Random(seed)
    names = [*CHAT, "<tool>", "user", " the", "99"]
    draw.shuffle(names)
    inside = [AddedToken(**random_token(draw, name)) for name in names[: draw.randrange(4)]]
    library = Tokenizer.from_str(byte_level)
    if draw.random() < 0.3:
        library.normalizer = normalizers.Lowercase()
    if draw.random() < 0.3:
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=draw.random() < 0.5),
            ]
        )
    save(tmp_path, library, inside)
    ids = {t.content: i for i, t in library.get_added_tokens_decoder().items()}
    vocabulary, first = library.get_vocab(with_added_tokens=False), library.get_vocab_size()
    config: dict[str, object] = {"split_special_tokens": draw.random() < 0.1}
    declared = [name for name in names if draw.random() < 0.6]
    new = (name for name in declared if name not in ids and name not in vocabulary)
    ids |= {name: first + i for i, name in enumerate(new)}
    ids = vocabulary | ids
    if draw.random() < 0.6:
        config["added_tokens_decoder"] = {
            str(ids[name]): random_token(draw, name) for name in declared
        }
    elif draw.random() < 0.7:
        (tmp_path / "added_tokens.json").write_text(
            json.dumps({name: ids[name] for name in declared})
        )
    if draw.random() < 0.5:
        library.post_processor = processors.TemplateProcessing(
            single=["$A", names[0]], special_tokens=[(names[0], ids.get(names[0], 0))]
        )
        library.save(str(tmp_path / "tokenizer.json"))
    for key in ("bos_token", "eos_token", "pad_token", "mask_token", "image_token"):
        if draw.random() < 0.4:
            config[key] = draw.choice(names)
    if draw.random() < 0.4:
        config["additional_special_tokens"] = draw.sample(names, 2)
    if draw.random() < 0.4:
        theirs = {"eos_token": draw.choice(names), "unk_token": draw.choice(names)}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(theirs))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert_transformers(tmp_path, [*TEXTS, "".join(draw.choices(names, k=9))])
    shutil.rmtree(tmp_path)
