"""The text side of a checkpoint directory: its tokenizer and its special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.engine.text import Detokenizer
from tilewise.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "load_tokenizer"]

# End an answer, and a call within it, in vocabularies that write messages in channels (gpt-oss):
# config.json names the first alone.
_CHANNEL, _CHANNEL_ENDS = "<|channel|>", ("<|return|>", "<|call|>")
GPT2_END = "<|endoftext|>"  # in GPT-2's vocabulary, whose files name no special token


class Tokenizer:
    """Text to token ids and back.

    Args:
        library: the tokenizer of the `tokenizers` library.
        config: the contents of tokenizer_config.json, special_tokens_map.json merged in.

    Attributes:
        special_ids: tokens that have no text, such as the end token.
        bos_token_id, eos_token_id: None where the model has none.
    """

    def __init__(self, library: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        self._library = library
        names = [_token_text(config.get(key)) for key in _SPECIAL_KEYS]
        library.add_special_tokens([n for n in names if n and library.token_to_id(n) is not None])
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = frozenset(added)
        self._piece_bytes: Callable[[str], bytes] | None = None
        self.bos_token_id = self._id_of(config.get("bos_token"))
        self.eos_token_id = self._id_of(config.get("eos_token"))
        self._adds_bos = config.get("add_bos_token") is True and self.bos_token_id is not None

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the model puts around it.

        Args:
            adds_special_tokens: False leaves these out, as for a chat, whose template has them.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding has.
        """
        _check_unicode("prompt", text)
        ids: list[int] = self._library.encode(text, add_special_tokens=adds_special_tokens).ids
        if adds_special_tokens and self._adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` and no special token beside them.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding has.
        """
        _check_unicode("bad_words", text)
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        text: str = self._library.decode(token_ids, skip_special_tokens=True)
        return text

    def special_id(self, text: str) -> int | None:
        """Return the special token that is written so; None if there is none."""
        found: int | None = self._library.token_to_id(text)
        return found if found in self.special_ids else None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text beside those that the model's configuration names."""
        names = () if self.special_id(_CHANNEL) is None else _CHANNEL_ENDS
        ids = (self.eos_token_id, *map(self.special_id, names))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text, which may be a part of a character.

        Special tokens are as they are written; ids that no token has are empty.
        """
        if self._piece_bytes is None:
            self._piece_bytes = _piece_decoder(self._library)
        text: str | None = self._library.id_to_token(token_id)
        if text is None:
            return b""
        if token_id in self._added:
            return text.encode()
        return self._piece_bytes(text)

    def decode_whole(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, special tokens by their names."""
        text: str = self._library.decode(token_ids, skip_special_tokens=False)
        return text

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Return a fresh incremental decoder for the tokens that follow a prompt."""
        if skip_special_tokens:
            return Detokenizer(self.decode, self.special_ids, prompt_token_ids)
        return Detokenizer(self.decode_whole, frozenset(), prompt_token_ids)

    def to_json(self) -> str:
        """Return the tokenizer as the `tokenizers` library writes it."""
        text: str = self._library.to_str()
        return text

    def _id_of(self, token: object) -> int | None:
        text = _token_text(token)
        found: int | None = None if text is None else self._library.token_to_id(text)
        return found


def _piece_decoder(library: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return how an entry of the vocabulary is written in bytes, by the library's decoder."""
    state = library.decoder.__getstate__() if library.decoder is not None else b""
    if b"ByteLevel" in (state if isinstance(state, bytes) else str(state).encode()):
        # GPT-2's alphabet: printable bytes stand for themselves, the others for 256, 257 ...
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        alphabet = {chr(byte): byte for byte in printable}
        others = (byte for byte in range(256) if byte not in set(printable))
        alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})

        def byte_level(piece: str) -> bytes:
            if all(char in alphabet for char in piece):
                return bytes(alphabet[char] for char in piece)
            return piece.encode()

        return byte_level

    def sentence_piece(piece: str) -> bytes:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    return sentence_piece


_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Read tokenizer.json, or the vocab.json and merges.txt of GPT-2; None when there is neither.

    Raises:
        CheckpointError: a file is there but cannot be read.
    """
    import tokenizers

    config = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    whole, vocab, merges = (
        directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    try:
        if whole.is_file():
            return Tokenizer(tokenizers.Tokenizer.from_file(str(whole)), config)
        if vocab.is_file() and merges.is_file():
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
            library = tokenizers.Tokenizer(model)
            library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            library.decoder = tokenizers.decoders.ByteLevel()
            return Tokenizer(library, {"eos_token": GPT2_END, **config})
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise CheckpointError(f"tokenizer of {directory} must be readable, got {error}") from error
    return None


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} must be valid Unicode, got {text[error.start]!a} at character {error.start}"
        ) from None


def _token_text(token: object) -> str | None:
    """Return the text of a special token, which files give as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must hold JSON, got {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
