"""The tokenizer in a GGUF file's metadata, as Hugging Face's tokenizer.json.

Source: llama.cpp's llama-vocab.cpp; regular expressions are those of the tokenizers that its kinds
are named after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.errors import CheckpointError, shown

if TYPE_CHECKING:
    import tokenizers

__all__ = ["end_tokens", "tokenizer_files"]

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASES}|{_LETTERS}|\p{{N}}{{1,3}}|{_END}"
_QWEN2 = rf"{_CASES}|{_LETTERS}|\p{{N}}|{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASES}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASES}?|\p{{N}}{{1,3}}|{_ENDS}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_ENDS}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS, _GPT2 = "digits", "gpt2"  # steps that are no regular expression of their own
# How a text is cut into words, by tokenizer.ggml.pre.
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "smaug-bpe",
            "dbrx",
            "glm4",
            "chatglm-bpe",
            "exaone4",
            "a.x-4.0",
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan-dense"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT_4O,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "dolma", "mpt"), (_GPT2,)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (_DIGITS, _GPT2)
    ),
    "deepseek-v3": _DEEPSEEK3,
}
_WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")  # words that are a token
_NFC = ("qwen2", "deepseek-r1-qwen", "olmo", "dolma")
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # that sentencepiece writes for a space
# Texts that end an answer, whatever the file says of them; as llama.cpp has them.
_ENDS_OF = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
)


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the contents of tokenizer.json and tokenizer_config.json, by these names.

    Args:
        metadata: the values of a GGUF file.

    Returns:
        None for a file without a vocabulary.

    Raises:
        CheckpointError: the tokenizer is of a kind that is not read, or its lists are not alike.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"tokenizer.ggml.model must be gpt2 or llama, got {shown(kind)}")
    tokens = _list(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else [int(x) for x in types]
    if len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type must have {len(tokens)} entries, got {len(types)}"
        )
    vocabulary = _by_text(tokens)
    library = (_byte_pairs if kind == "gpt2" else _pieces)(metadata, tokens, types, vocabulary)
    _add(library, tokens, types, vocabulary)
    named = {
        f"{name}_token": _token(metadata, tokens, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    named = {name: text for name, text in named.items() if text is not None}
    begins = metadata.get("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = kind == "llama" or _pre(metadata) in (*_WHOLE_FIRST[:4], "tekken")
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _put_around(
        library,
        named.get("bos_token") if begins else None,
        named.get("eos_token") if ends else None,
    )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    config["clean_up_tokenization_spaces"] = False
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return {
        "tokenizer.json": json.loads(library.to_str()),
        "tokenizer_config.json": config,
    }


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer: those that the file names, then those with a
    known text."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ids = [x for x in found if type(x) is int]
    if isinstance(tokens, list):
        texts = set(_ENDS_OF)
        by_text = {text: i for i, text in enumerate(tokens) if text in texts}
        if {"<|return|>", "<|call|>"} <= by_text.keys():
            by_text.pop("<|end|>", None)  # there the end of a message, not of an answer
        ids += sorted(by_text.values())
    return list(dict.fromkeys(ids))


def _list(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise CheckpointError(f"tokenizer.ggml.{name} must be a list of texts, got {shown(value)}")
    return value


def _by_text(tokens: list[str]) -> dict[str, int]:
    """Return the id of each text; where several tokens have the same text, the first one's."""
    found: dict[str, int] = {}
    for i, text in enumerate(tokens):
        found.setdefault(text, i)
    return found


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{name} must be one of {len(tokens)} tokens, got {shown(found)}"
        )
    return tokens[found]


def _pre(metadata: Mapping[str, Any]) -> str | None:
    found = metadata.get("tokenizer.ggml.pre")
    return found if isinstance(found, str) else None


def _byte_pairs(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
    """Return a tokenizer of GPT-2's kind: byte-pair encoding within words.

    How a text is cut into words, tokenizer.ggml.pre says.

    Raises:
        CheckpointError: that kind is not known, or the merges are wrong.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = _pre(metadata)
    if kind not in _KINDS:
        raise CheckpointError(
            f"tokenizer.ggml.pre must be one of {', '.join(_KINDS)}, got {shown(kind)}"
        )
    merges = []
    for line in _list(metadata, "merges"):
        # a piece may begin with a space in no vocabulary of bytes, where none is a space
        first, gap, second = line.partition(" ")
        if not gap:
            raise CheckpointError(
                f"tokenizer.ggml.merges must be pairs with a space between, got {shown(line)}"
            )
        merges.append((first, second))
    try:
        library = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind in _WHOLE_FIRST)
        )
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.ggml.merges must be of tokens, got {error}") from error
    if kind in _NFC:
        library.normalizer = normalizers.NFC()
    steps: list[Any] = []
    for step in _KINDS[kind]:
        if step == _DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != _GPT2:
            steps.append(pre_tokenizers.Split(Regex(step), behavior="isolated"))
    has_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=has_space, use_regex=_GPT2 in _KINDS[kind])
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    library.decoder = decoders.ByteLevel()
    return library


def _pieces(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
    """Return a tokenizer of sentencepiece's kind: BPE that merges the pairs of the highest scores
    first.

    Text that is no token becomes bytes where the vocabulary has byte tokens, else the unknown
    token.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray):
        scores = None
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.scores must have {len(tokens)} numbers, got "
            f"{'others' if scores is None else len(scores)}"
        )
    unknown = _token(metadata, tokens, "unknown_token_id")
    if unknown is None:
        unknown = next((tokens[i] for i, x in enumerate(types) if x == _UNKNOWN), None)
    library = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, types, scores, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    begins = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if begins else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    library.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if begins else back)
    return library


def _merges(
    tokens: list[str], types: list[int], scores: np.ndarray[Any, Any], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that merge into a token, the pair with the highest score first.

    Source: transformers' `generate_merges`.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, text in enumerate(tokens):
        if types[i] not in (_NORMAL, _UNUSED) or vocabulary[text] != i:
            continue
        pairs = [
            (text[:at], text[at:])
            for at in range(1, len(text))
            if text[:at] in vocabulary and text[at:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(float(scores[i]), len(a), len(b), (a, b)) for a, b in pairs]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [entry[3] for entry in found]


def _add(
    library: tokenizers.Tokenizer, tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> None:
    """Register special and user-defined tokens, which are found in a text before it is split."""
    import tokenizers

    added = [
        tokenizers.AddedToken(text, special=types[i] != _USER, normalized=False)
        for i, text in enumerate(tokens)
        if types[i] in (_CONTROL, _USER, _UNKNOWN) and text and vocabulary[text] == i
    ]
    library.add_tokens(added)


def _put_around(library: tokenizers.Tokenizer, first: str | None, last: str | None) -> None:
    from tokenizers import processors

    if first is None and last is None:
        return
    pieces = [first, "$A", last]
    library.post_processor = processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        pair=[piece for piece in (first, "$A", last, first, "$B:1", last) if piece is not None],
        special_tokens=[(t, library.token_to_id(t)) for t in {first, last} if t is not None],
    )
