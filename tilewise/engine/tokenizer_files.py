"""A checkpoint's tokenizer files, put together as transformers puts them.

tokenizer.json says how a text is cut. Which tokens there are beside it, and which of them are
special, may stand in tokenizer_config.json, special_tokens_map.json and added_tokens.json: they are
added in transformers' order, as a token that is new takes the next id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import flag, object_of, read_object, text_or_none
from tilewise.models.unread_fields import ReadFields, tell_unread

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TokenizerFiles", "read_tokenizer_files"]

# Special tokens by what they are for, in the order in which transformers adds those it lacks.
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_END = "<|endoftext|>"  # in GPT-2's vocabulary, whose files name no special token
# What transformers' classes name where the files do not.
_DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
# How Qwen2 cuts a text into words: digits one by one, contractions in either case, line ends apart.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What a directory without tokenizer.json may hold in its place, by the ends of file names.
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", ".tiktoken", "tiktoken.model", "spiece.model")


class TokenizerFiles(NamedTuple):
    """The tokenizer that the files of a directory describe.

    Attributes:
        library: the tokenizer of the `tokenizers` library, all tokens added.
        named: special tokens by name, such as eos_token.
        tidies: True if spaces before punctuation are taken out of decoded texts.
    """

    library: tokenizers.Tokenizer
    named: dict[str, str]
    tidies: bool


def read_tokenizer_files(directory: Path) -> TokenizerFiles | None:
    """Read tokenizer.json, or the vocab.json and merges.txt of GPT-2 and Qwen2, and what is beside.

    Returns:
        None for a directory without a tokenizer.

    Raises:
        CheckpointError: a file cannot be read, or the tokenizer is of a kind that is not.
    """
    import tokenizers

    config = ReadFields(written := _object(directory / "tokenizer_config.json"))
    whole = directory / "tokenizer.json"
    kind = (text_or_none(config, "tokenizer_class") or "").removesuffix("Fast")
    if whole.is_file():
        library = _from_tokenizer_json(whole)
        named = _DEFAULTS.get(kind, {})
        defaults = {n: text for n, text in named.items() if library.token_to_id(text) is not None}
    elif (directory / "vocab.json").is_file() or (directory / "merges.txt").is_file():
        kind = _class_of(directory, config)
        library = _from_vocabulary(directory, config, kind)
        defaults = _DEFAULTS[kind]
    else:
        _refuse_other_formats(directory)
        return None
    declared = _declared(directory, {**defaults, **written}, library, is_whole=whole.is_file())
    _add(library, declared)
    texts = {name: _text_of(token) for name, token in declared.named.items()}
    if kind == "Qwen2Tokenizer" and not whole.is_file():  # it declares them once more, as they are
        library.add_special_tokens([*texts.values(), *map(_text_of, declared.others)])
    if not whole.is_file():
        _put_around(library, config, texts)
    library.encode_special_tokens = flag(config, "split_special_tokens", False)
    # Of byte pairs transformers tidies nothing, unless it is told so in these words.
    forced = flag(
        config, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    tidies = flag(config, "clean_up_tokenization_spaces", False)
    tidies = tidies and (forced or not isinstance(library.model, tokenizers.models.BPE))
    if flag(config, "fix_mistral_regex", False):
        config.names.discard("fix_mistral_regex")  # other words than those of tokenizer.json
    unread = config.unread("tokenizer_config.json")
    tell_unread("tokenizer_config.json", [n for n in unread if not n.endswith("_token")])
    return TokenizerFiles(library, texts, tidies)


def _from_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    def read() -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))

    library = _made(path.name, read)
    # Of the batches that it was trained with; a prompt is neither cut nor filled up.
    library.no_truncation()
    library.no_padding()
    return library


def _from_vocabulary(directory: Path, config: Mapping[str, Any], kind: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    files = [directory / name for name in ("vocab.json", "merges.txt")]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint must hold tokenizer.json, or vocab.json and merges.txt, got no "
            f"{missing[0]} in {str(directory)!r}"
        )

    def read() -> tokenizers.Tokenizer:
        lines = files[1].read_text(encoding="utf-8-sig").split("\n")
        pairs = [line.rstrip("\r").split(" ") for line in lines if not line.startswith("#version")]
        merges = [(a, b) for a, b in (pair for pair in pairs if pair != [""])]
        return Tokenizer(models.BPE(vocab=read_object(files[0]), merges=merges))

    library = _made("vocab.json and merges.txt", read)
    has_space = flag(config, "add_prefix_space", False)
    library.decoder = decoders.ByteLevel()
    if kind == "GPT2Tokenizer":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_space)
        return library
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=has_space, use_regex=False),
        ]
    )
    return library


def _class_of(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the class that reads vocab.json and merges.txt: "GPT2Tokenizer" or "Qwen2Tokenizer".

    The files' tokenizer_class decides; for Qwen2, or where none is named, the model_type.

    Raises:
        CheckpointError: another class is named; the message says how to write tokenizer.json.
    """
    model = _object(directory / "config.json")
    model_type = text_or_none(model, "model_type")
    named = text_or_none(config, "tokenizer_class") or text_or_none(model, "tokenizer_class")
    by_type = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gpt2": "GPT2Tokenizer"}
    if model_type == "qwen2" or named is None:  # transformers trusts no other name of Qwen2's
        # The first files of GPT-2 came alone.
        named = by_type.get(model_type or "gpt2")
    found = (named or "").removesuffix("Fast")
    if found not in by_type.values():
        raise CheckpointError(
            "tokenizer_class must be GPT2Tokenizer or Qwen2Tokenizer for vocab.json and merges.txt "
            f"without tokenizer.json, got {named!r}; {_how_to_write(directory)}"
        )
    return found


def _refuse_other_formats(directory: Path) -> None:
    names = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
    for name in names:
        if name.endswith(_OTHER_FORMATS):
            raise CheckpointError(
                f"checkpoint must hold tokenizer.json, got {name} alone in {str(directory)!r}; "
                f"{_how_to_write(directory)}"
            )


def _how_to_write(directory: Path) -> str:
    return (
        "transformers (with sentencepiece or tiktoken) writes it: "
        f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
    )


class _Declared(NamedTuple):
    """The tokens that a tokenizer's files declare besides its vocabulary.

    Attributes:
        added: the added tokens, by id.
        named: the special tokens with a name ("bos_token", ...), by that; a text without properties
            is a str.
        others: the special tokens without a name.
    """

    added: dict[int, tokenizers.AddedToken]
    named: dict[str, tokenizers.AddedToken | str]
    others: list[tokenizers.AddedToken | str]


def _declared(
    directory: Path, config: Mapping[str, Any], library: tokenizers.Tokenizer, *, is_whole: bool
) -> _Declared:
    """Return the tokens that the tokenizer's files declare besides the vocabulary, as transformers
    does.

    If `config` has "added_tokens_decoder", no other file is read. Otherwise special_tokens_map.json
    is, which counts for more than `config`, and added_tokens.json for the ids.

    Args:
        directory: the folder of the files.
        config: the object of tokenizer_config.json, over the defaults of the tokenizer's class.
        library: the tokenizer of the `tokenizers` library.
        is_whole: True if the library's tokenizer was read from tokenizer.json; without
            "added_tokens_decoder" its own added tokens then count, too.

    Raises:
        CheckpointError: a token or an id is of another form.
    """
    import tokenizers

    fields = dict(config)
    if "additional_special_tokens" in fields:
        others = fields.pop("additional_special_tokens")
        fields.setdefault("extra_special_tokens", others)
    added: dict[int, tokenizers.AddedToken] = {}
    if "added_tokens_decoder" in fields:
        for key, value in object_of(fields, "added_tokens_decoder").items():
            if not (isinstance(key, str) and key.isdecimal()):
                raise CheckpointError(
                    f"added_tokens_decoder must have ids as keys, got {shown(key)}"
                )
            if not isinstance(value, dict) or _text(value) is None:
                raise CheckpointError(
                    f"added_tokens_decoder must have objects with a content, got {shown(value)}"
                )
            added[int(key)] = _added_token(value, False)
    else:
        # Older files: special_tokens_map.json counts for more than tokenizer_config.json.
        for name, value in _object(directory / "special_tokens_map.json").items():
            if name == "additional_special_tokens":
                fields.setdefault("extra_special_tokens", value)
            elif name == "extra_special_tokens" and isinstance(value, list):
                before = fields.get(name)
                fields[name] = [*(before if isinstance(before, list) else []), *value]
            else:
                fields[name] = value
        named = {_text(fields.get(name)) for name in _NAMED}
        extra = fields.get("extra_special_tokens")
        named |= {_text(token) for token in (extra if isinstance(extra, list) else [])}
        for text, token_id in _object(directory / "added_tokens.json").items():
            if type(token_id) is not int:
                raise CheckpointError(
                    f"added_tokens.json must hold an id for each token, got {shown(token_id)}"
                )
            special = text in named
            added[token_id] = tokenizers.AddedToken(text, special=special, normalized=not special)
        if is_whole:
            added.update(library.get_added_tokens_decoder())
    known = {token.content: token for token in added.values()}
    extra = fields.get("extra_special_tokens")
    values = {name: fields[name] for name in _NAMED if fields.get(name) is not None}
    # Others with a name, such as image_token.
    values |= {
        name: value
        for name, value in fields.items()
        if name.endswith("_token") and name not in _NAMED and _text(value) is not None
    }
    values |= extra if isinstance(extra, dict) else {}
    named_tokens = {}
    for name, value in values.items():
        token = _token(name, value)
        named_tokens[name] = known.get(_text_of(token), token) if name in _NAMED else token
    many = extra if isinstance(extra, list) else []
    others = [_token("extra_special_tokens", value) for value in many]
    return _Declared(added, named_tokens, others)


def _add(library: tokenizers.Tokenizer, declared: _Declared) -> None:
    """Add the declared tokens to a tokenizer: those with ids first, then special ones that it
    lacks.

    A token whose text is declared twice with different flags is added twice; it keeps one id, and
    the last flags count.

    Raises:
        CheckpointError: a token would get another id than is declared.
    """
    import tokenizers

    tokens: list[tokenizers.AddedToken | str] = [
        token for _, token in sorted(declared.added.items())
    ]
    there = {token.content for token in library.get_added_tokens_decoder().values()}
    there |= {_text_of(token) for token in tokens}
    for token in [*declared.named.values(), *declared.others]:
        if _text_of(token) not in there and token not in tokens:
            tokens.append(token)
    names = {_text_of(token) for token in declared.named.values()}
    for i, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[i] = tokenizers.AddedToken(token, special=True, normalized=False)
        elif token.content in names:
            token.special = True
    library.add_tokens(tokens)
    ids: dict[str, list[int]] = {}
    for token_id, token in sorted(declared.added.items()):
        ids.setdefault(token.content, []).append(token_id)
    for text, wanted in ids.items():
        found = library.token_to_id(text)
        if found not in wanted:  # a prompt would have other tokens than the model was trained with
            raise CheckpointError(
                f"added tokens must follow the vocabulary one by one, got {wanted[0]} for "
                f"{shown(text)}, which is {found} there"
            )


def _put_around(
    library: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Let a text begin and end with special tokens, as add_bos_token and add_eos_token say."""
    from tokenizers import processors

    first, last = (
        named.get(f"{name}_token") if flag(config, f"add_{name}_token", False) else None
        for name in ("bos", "eos")
    )
    if first is None and last is None:
        return
    pieces = [first, "$A", last]
    library.post_processor = processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        special_tokens=[(t, library.token_to_id(t)) for t in {first, last} if t is not None],
    )


def _text(value: object) -> str | None:
    """Return the text of a token, which files give as a string or as an object with content; else
    None."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _text_of(token: tokenizers.AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _token(name: str, value: object) -> tokenizers.AddedToken | str:
    """Return a declared token: a text as it is, or an object, which is special unless it says
    otherwise.

    Raises:
        CheckpointError: the value, of the field `name`, is neither.
    """
    text = _text(value)
    if text is None:
        raise CheckpointError(
            f"{name} must be a token's text, or an object with its content, got {shown(value)}"
        )
    return _added_token(value, True) if isinstance(value, dict) else text


def _added_token(value: Mapping[str, Any], is_special: bool) -> tokenizers.AddedToken:
    """Return the AddedToken of an object with a content; `is_special` counts if it does not say."""
    import tokenizers

    special = flag(value, "special", is_special)
    return tokenizers.AddedToken(
        value["content"],
        special=special,
        normalized=flag(value, "normalized", not special),
        **{key: flag(value, key, False) for key in ("lstrip", "rstrip", "single_word")},
    )


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _made(what: str, read: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return read()
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise CheckpointError(f"{what} must be readable, got {error}") from error
