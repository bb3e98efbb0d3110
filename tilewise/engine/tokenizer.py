"""The text side of a checkpoint directory: its tokenizer and its special tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.engine.text import Detokenizer
from tilewise.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files
from tilewise.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "load_tokenizer"]

# Characters, or tokens, above which the library works as for a batch: it lets go of the interpreter
# then, without which other threads would wait a second for each million.
LONG = 4096
# End an answer, and a call within it, in vocabularies that write messages in channels (gpt-oss):
# config.json names the first alone.
_CHANNEL, _CHANNEL_ENDS = "<|channel|>", ("<|return|>", "<|call|>")


class Tokenizer:
    """Text to token ids and back.

    Args:
        files: the library's tokenizer, made of a checkpoint's files.

    Attributes:
        special_ids: tokens that have no text, such as the end token.
        bos_token_id, eos_token_id: None where the model has none.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._library = library = files.library
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = frozenset(added)
        self._piece_bytes: Callable[[str], bytes] | None = None
        self._tidies = files.tidies
        self.bos_token_id = self._id_of(files.named.get("bos_token"))
        self.eos_token_id = self._id_of(files.named.get("eos_token"))

    @property
    def num_ids(self) -> int:
        """One more than the largest id, which may be beyond the model's vocabulary."""
        ids: dict[str, int] = self._library.get_vocab()
        return 1 + max(ids.values(), default=-1)

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the model puts around it.

        Args:
            adds_special_tokens: False leaves these out, as for a chat, whose template has them.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding has.
        """
        _check_unicode("prompt", text)
        return self._ids(text, adds_special_tokens)

    def encode_cut(self, text: str, most: int) -> list[int]:
        """Return the beginning of a text as at most `most` ids, special tokens included.

        Raises:
            RequestError: as of `encode`; or not even the special tokens fit.
        """
        _check_unicode("prompt", text)
        ids: list[int] = self._cut([text], most).ids
        return ids

    def encode_pair(
        self, first: str, second: str, *, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return two texts as one prompt, as the model joins pairs: token ids and their types.

        Args:
            most: the largest number of ids; the second text is cut to fit; None cuts nothing.

        Raises:
            RequestError: as of `encode`; or the first text alone does not fit.
        """
        for text in (first, second):
            _check_unicode("text", text)
        found: tokenizers.Encoding
        if most is not None:
            found = self._cut([first, second], most)
        else:
            [found] = self._library.encode_batch([(first, second)])
        return found.ids, found.type_ids

    def encode_template(
        self, template: str, query: str, document: str, *, most: int | None = None
    ) -> list[int]:
        """Return a template with a query and a document in it as ids, special tokens included.

        Args:
            most: the largest number of ids; the document is cut to fit; None cuts nothing.

        Raises:
            RequestError: as of `encode`; or the rest alone does not fit.
        """
        for text in (query, document):
            _check_unicode("text", text)
        before, _, after = template.partition("{document}")
        before, after = (part.replace("{query}", query) for part in (before, after))
        [found] = self._library.encode_batch([before + document + after])
        ids: list[int] = found.ids
        if most is None or len(ids) <= most:
            return ids
        begin, end = len(before), len(before) + len(document)
        inside = [i for i, (a, b) in enumerate(found.offsets) if begin <= a < b <= end]
        surplus = len(ids) - most
        if surplus > len(inside):
            raise _too_few(most, len(ids) - len(inside))
        cut = inside[len(inside) - surplus]
        return ids[:cut] + ids[cut + surplus :]

    def _cut(self, texts: list[str], most: int) -> tokenizers.Encoding:
        """Return one or two texts as one encoding of at most `most` ids; the last text is cut.

        Raises:
            RequestError: the special tokens and the first of two texts are more than `most`.
        """
        parts = self._library.encode_batch(texts, add_special_tokens=False)
        *others, last = parts
        taken = self._library.num_special_tokens_to_add(bool(others)) + sum(map(len, others))
        if taken > most:
            raise _too_few(most, taken)
        last.truncate(most - taken)
        return self._library.post_process(parts[0], last if others else None)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` and no special token beside them.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding has.
        """
        _check_unicode("bad_words", text)
        return self._ids(text, False)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        text: str
        if len(token_ids) > LONG:
            [text] = self._library.decode_batch([token_ids], skip_special_tokens=True)
        else:
            text = self._library.decode(token_ids, skip_special_tokens=True)
        return _tidy(text) if self._tidies else text

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written as `text`; None if there is none."""
        found: int | None = self._library.token_to_id(text)
        return found if found in self.special_ids else None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of the tokenizer's end tokens, whether or not the model's config names them.

        They are the eos token and, in vocabularies with channels (gpt-oss), <|return|> and
        <|call|>.
        """
        names = () if self.special_id(_CHANNEL) is None else _CHANNEL_ENDS
        ids = (self.eos_token_id, *map(self.special_id, names))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character.

        A special token gives its own text, an id without a token nothing.
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
        """Return the text of `token_ids`, with special tokens as the texts that stand for them."""
        text: str = self._library.decode(token_ids, skip_special_tokens=False)
        return _tidy(text) if self._tidies else text

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Return a fresh incremental decoder for the tokens that follow a prompt."""
        decode = self.decode if skip_special_tokens else self.decode_whole
        special_ids = self.special_ids if skip_special_tokens else frozenset()
        open_end = _open_end if self._tidies else None
        return Detokenizer(decode, special_ids, prompt_token_ids, open_end=open_end)

    def to_json(self) -> str:
        """Return the tokenizer as the `tokenizers` library writes it."""
        text: str = self._library.to_str()
        return text

    def _ids(self, text: str, adds_special_tokens: bool) -> list[int]:
        if len(text) > LONG:
            [found] = self._library.encode_batch_fast(
                [text], add_special_tokens=adds_special_tokens
            )
        else:
            found = self._library.encode(text, add_special_tokens=adds_special_tokens)
        ids: list[int] = found.ids
        return ids

    def _id_of(self, text: str | None) -> int | None:
        found: int | None = None if text is None else self._library.token_to_id(text)
        return found


def _too_few(most: int, least: int) -> RequestError:
    return RequestError(
        f"truncate_prompt_tokens must leave room for what is not cut, {least} tokens, got {most}"
    )


def _piece_decoder(library: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from an entry of the vocabulary to its bytes, by the library's decoder.

    An entry of GPT-2's byte alphabet, or of SentencePiece, is turned into the bytes for which it
    stands.
    """
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


# What is written without its first space, and the apostrophe without either, one after another.
_TIDIED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_TIDIED_TWICE = " n ' t"


def _tidy(text: str) -> str:
    """Return a text without the spaces before punctuation and contractions that tokenizers of words
    put."""
    for spaced in _TIDIED:
        text = text.replace(spaced, spaced.strip())
    return text


def _open_end(text: str) -> int:
    """Return how many characters at the end of a text `_tidy` may still change once more text
    follows."""
    whole = (*_TIDIED, _TIDIED_TWICE)
    ends = (text[-size:] for size in range(min(len(_TIDIED_TWICE) - 1, len(text)), 0, -1))
    return next((len(end) for end in ends if any(t.startswith(end) for t in whole)), 0)


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Read a checkpoint's tokenizer, see `read_tokenizer_files`; None where there is none.

    Raises:
        CheckpointError: a file is there but cannot be read.
    """
    files = read_tokenizer_files(directory)
    return None if files is None else Tokenizer(files)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} must be valid Unicode, got {text[error.start]!a} at character {error.start}"
        ) from None
