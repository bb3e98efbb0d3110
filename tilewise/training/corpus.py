"""A folder of text as token ids on disk: cleaned of nothing, tokenised once, mapped ever after.

    tokens.bin      uint16 or uint32 ids; each document begins with its first token
    documents.npy   int64 (documents + 1,): where each begins, and where the last ends
    tokenizer.json  what made them
    corpus.json     what they are, when and from which files they were made

A line `<|endoftext|>` parts the documents of a file.
"""

from __future__ import annotations

import codecs
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tilewise.progress import say

__all__ = ["END", "Corpus", "load_tokenizer", "prepare", "train_tokenizer"]

END = "<|endoftext|>"
MASKED = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
_BATCH = 1000  # documents that are tokenised in one call, on all cores
# What editors put before a text to say how it is encoded; UTF-32's first, which begins as UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The token ids of a text's documents, one after another; `prepare` makes one, `open` maps it.

    Attributes:
        tokens: (N + 1,) ids, mapped from disk as a rule; the last one is the end (or padding) token
            after the last document.
        starts: int64 (D + 1,); document d is tokens[starts[d]:starts[d + 1]].
        words: the size of the vocabulary.
        special: ids of the special tokens, by their text.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    words: int
    special: dict[str, int]

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Return the corpus in `folder`, whose files `prepare` has written; tokens are mapped, not
        read.

        Raises:
            ValueError: tokens.bin is shorter or longer than it was written.
        """
        folder = Path(folder)
        facts = json.loads((folder / "corpus.json").read_text())
        wanted = (facts["tokens"] + 1) * np.dtype(facts["dtype"]).itemsize
        size = (folder / "tokens.bin").stat().st_size
        if size != wanted:
            raise ValueError(
                f"{folder / 'tokens.bin'} must have the {wanted} bytes of which corpus.json tells "
                f"(remove the folder to make it anew), got {size}"
            )
        tokens = np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")
        starts = np.load(folder / "documents.npy", allow_pickle=False)
        return cls(tokens, starts, facts["words"], facts["special"])

    @classmethod
    def of_ids(cls, documents: Iterable[Iterable[int]], words: int, end: int) -> Corpus:
        """Return a corpus in memory from token ids.

        The token `end` precedes each document, and one follows the last; `words` is the size of the
        vocabulary.
        """
        parts = [np.array([end, *ids], dtype=np.uint32) for ids in documents]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate([*parts, np.array([end], np.uint32)]), starts, words, {END: end})

    def __len__(self) -> int:
        return len(self.starts) - 1

    def split(self, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the documents to train on, and of those held out, about every (1 /
        share)-th.

        With one document, or a share of 0, none is held out.

        Raises:
            ValueError: share lies outside of [0, 0.5].
        """
        if not 0 <= share <= 0.5:
            raise ValueError(f"share of documents held out must lie in [0, 0.5], got {share}")
        every = round(1 / share) if share > 0 else 0
        indices = np.arange(len(self), dtype=np.int64)
        if every < 2 or len(self) < 2:
            return indices, indices[:0]
        is_held_out = indices % min(every, len(self)) == min(every, len(self)) // 2
        return indices[~is_held_out], indices[is_held_out]


def read_documents(root: str | Path) -> Iterator[str]:
    """Yield the documents of a text file, or of all .txt files below a folder, in order of name.

    Lines `<|endoftext|>` part the documents of a file; white space around a document is stripped,
    empty ones are left out. A byte order mark says how a file is encoded and is no part of its
    text; without one it is UTF-8. Bytes that cannot be decoded become U+FFFD, with a warning that
    names the file.

    Raises:
        ValueError: no document is found.
    """
    found = False
    for file in _text_files(Path(root)):
        for part in _read(file).replace("\r\n", "\n").replace("\r", "\n").split(END):
            if document := part.strip():
                found = True
                yield document
    if not found:
        raise ValueError(f"text must hold documents in .txt files, got none in {str(root)!r}")


def _text_files(root: Path) -> list[Path]:
    return [root] if root.is_file() else sorted(root.rglob("*.txt"))


def _read(file: Path) -> str:
    data = file.read_bytes()
    mark, encoding = next((m for m in _MARKS if data.startswith(m[0])), (b"", "utf-8"))
    data = data[len(mark) :]
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper()
        warnings.warn(f"{file} is not {name} at byte {len(mark) + error.start}", stacklevel=3)
        return data.decode(encoding, errors="replace")


def train_tokenizer(texts: Iterable[str], words: int, *, is_masked: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `texts`, whose first ids are the special tokens.

    Args:
        words: the largest size of the vocabulary.
        is_masked: True if the special tokens are BERT's, [CLS] before a text and [SEP] after it;
            else the end token, which stands before a text. ValueError if `words` has no room for
            these and all bytes.
    """
    special = list(MASKED) if is_masked else [END]
    fewest = len(special) + 256  # bytes
    if words < fewest:
        raise ValueError(f"words must be at least {fewest}, one for each byte, got {words}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    single = "[CLS] $A [SEP]" if is_masked else f"{END} $A"
    used = [token for token in special if token in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
    )
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load tokenizer.json, or a byte-level BPE of a vocabulary and merges, as GPT-2's is stored.

    Truncation and padding that a tokenizer.json carries are switched off: they would cut each
    document or fill it up.

    Args:
        path: the file, or a folder that holds tokenizer.json, or vocab.json or encoder.json beside
            merges.txt or vocab.bpe.

    Raises:
        ValueError: the folder has neither tokenizer.json nor a vocabulary with merges.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        whole = Tokenizer.from_str(_read(file))
        whole.no_truncation()
        whole.no_padding()
        return whole
    words = [path / name for name in ("vocab.json", "encoder.json") if (path / name).is_file()]
    merges = [path / name for name in ("merges.txt", "vocab.bpe") if (path / name).is_file()]
    if not words or not merges:
        raise ValueError(
            "tokenizer must be tokenizer.json, or a folder of it or of a vocabulary and merges, "
            f"got {str(path)!r}"
        )
    tokenizer = Tokenizer(models.BPE.from_file(str(words[0]), str(merges[0])))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # What stands before each document in training stands before a prompt.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A",
        pair=f"{END} $A $B:1",
        special_tokens=[(END, tokenizer.token_to_id(END))],
    )
    return tokenizer


def prepare(
    text: str | Path,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    words: int = 50_257,
    longest: int | None = None,
    fresh: bool = False,
) -> Corpus:
    """Tokenise `text` into `folder`, or open what is there already, made with the same arguments.

    If tokens are opened, a line on standard error gives their age, and whether the text or the
    tokenizer has changed since.

    Args:
        text: a .txt file, or a folder of them.
        tokenizer: see `load_tokenizer`; None trains one on the text.
        words: the largest size of a trained tokenizer's vocabulary.
        longest: the largest number of tokens, [CLS] and [SEP] included, of the texts into which
            documents are cut for a masked model. None is for a decoder: the end token stands before
            each document.
        fresh: True to tokenise anew although the folder has tokens; without the text they are
            opened all the same.

    Raises:
        ValueError: there is no text, the tokenizer has not got the special tokens, or the folder
            holds tokens that were made with other arguments, or cut or padded by a tokenizer.
    """
    folder = Path(folder)
    if longest is not None and longest < 3:
        raise ValueError(f"longest must leave room between [CLS] and [SEP], 3, got {longest}")
    # Paths, not contents: with the tokens made, the text may be removed.
    source = {
        "text": str(Path(text).resolve()),
        "tokenizer": None if tokenizer is None else str(Path(tokenizer).resolve()),
        "words": words if tokenizer is None else None,
        "longest": longest,
    }
    facts_file = folder / "corpus.json"
    remakes = fresh and bool(_text_files(Path(text)))
    if facts_file.is_file():
        # Tokens of another text are not replaced even so: they may be all that is left of it.
        _check_source(folder, {"text": source["text"]} if remakes else source)
    if facts_file.is_file() and not remakes:
        _check_whole(folder)
        facts = json.loads(facts_file.read_text())
        say(f"the tokens in {folder} {_age(facts, facts_file, text, tokenizer)}")
        return Corpus.open(folder)
    files = _stamps(text, tokenizer)
    is_masked = longest is not None
    made = (
        train_tokenizer(read_documents(text), words, is_masked=is_masked)
        if tokenizer is None
        else load_tokenizer(tokenizer)
    )
    special: dict[str, int] = {}
    for token in MASKED if is_masked else (END,):
        index = made.token_to_id(token)
        if index is None:
            raise ValueError(f"tokenizer must have the token {token}, got none")
        special[token] = index
    dtype = np.uint16 if made.get_vocab_size() <= 1 << 16 else np.uint32
    starts = [0]
    folder.mkdir(parents=True, exist_ok=True)
    tokens = folder / "tokens.partial"  # a run that goes on over older tokens has them mapped
    with tokens.open("wb") as out:
        for texts in _batches(read_documents(text), _BATCH):
            for encoding in made.encode_batch(texts, add_special_tokens=False):
                for ids in _pieces(encoding.ids, special, longest):
                    np.array(ids, dtype=dtype).tofile(out)
                    starts.append(starts[-1] + len(ids))
        np.array([special["[PAD]" if is_masked else END]], dtype=dtype).tofile(out)
    facts = {
        "dtype": np.dtype(dtype).name,
        "words": made.get_vocab_size(),
        "special": special,
        "documents": len(starts) - 1,
        "tokens": starts[-1],
        "source": source,
        "made": time.time(),
        "files": files,
    }
    # First and last: a folder without it is tokenised anew.
    facts_file.unlink(missing_ok=True)
    tokens.replace(folder / "tokens.bin")
    np.save(folder / "documents.npy", np.array(starts, np.int64))
    made.save(str(folder / "tokenizer.json"))
    facts_file.write_text(json.dumps(facts, indent=2) + "\n")
    return Corpus.open(folder)


def _stamps(text: str | Path, tokenizer: str | Path | None) -> dict[str, list[int]]:
    """Return, for "text" and "tokenizer" (if given), [number of files, their bytes, newest mtime in
    ns]."""
    given = {"text": _text_files(Path(text))}
    if tokenizer is not None:
        path = Path(tokenizer)
        given["tokenizer"] = [x for x in path.iterdir() if x.is_file()] if path.is_dir() else [path]
    stamps = {}
    for name, files in given.items():
        found = [file.stat() for file in files if file.is_file()]
        newest = max((stat.st_mtime_ns for stat in found), default=0)
        stamps[name] = [len(found), sum(stat.st_size for stat in found), newest]
    return stamps


def _age(facts: dict[str, Any], file: Path, text: str | Path, tokenizer: str | Path | None) -> str:
    """Return a text that says when tokens were made, and whether text or tokenizer has changed
    since.

    `facts` is the content of corpus.json, `file` its path.
    """
    made = facts.get("made", file.stat().st_mtime)
    minutes = max(0, int(time.time() - made) // 60)
    units = ((60 * 24, "days"), (60, "hours"), (1, "minutes"))
    size, unit = next((x for x in units if minutes >= 2 * x[0]), units[-1])
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
    said = f"were made {minutes // size} {unit} ago ({date}) and are used again"
    now, before = _stamps(text, tokenizer), facts.get("files")
    if not now["text"][0]:
        return f"{said}; the text is no longer there"
    if before is None:
        return f"{said}; whether the text has changed since is not known"
    changed = [name for name in now if now[name] != before.get(name)]
    if not changed:
        return said
    verb = "has" if len(changed) == 1 else "have"
    return f"{said}; the {' and the '.join(changed)} {verb} changed since: --fresh makes them anew"


def _check_source(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise ValueError if the tokens in `folder` were made from other sources or arguments than
    `wanted`."""
    saved = json.loads((folder / "corpus.json").read_text()).get("source", {})
    for name, value in wanted.items():
        if name not in saved or saved[name] != value:
            held = repr(saved[name]) if name in saved else "what corpus.json does not say"
            raise ValueError(
                f"{name} must be {held}, with which the tokens in {folder} were made (or give "
                f"another folder, or remove this one), got {value!r}"
            )


def _check_whole(folder: Path) -> None:
    """Raise ValueError if the tokens in `folder` were made by a tokenizer with truncation or
    padding, which versions before 2026-12 left on."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for name in ("truncation", "padding"):
        if tokenizer.get(name) is not None:
            raise ValueError(
                f"tokens in {folder} must be whole documents (--fresh makes them anew), got a "
                f"tokenizer.json with {name}"
            )


def _pieces(ids: list[int], special: dict[str, int], longest: int | None) -> Iterator[list[int]]:
    """Yield the token ids of one document as training sees them.

    For a decoder (`longest` None) the document whole, behind the end token; for a masked model
    texts of at most `longest` tokens, each between [CLS] and [SEP].
    """
    if longest is None:
        yield [special[END], *ids]
        return
    room = longest - 2
    for first in range(0, len(ids), room):
        yield [special["[CLS]"], *ids[first : first + room], special["[SEP]"]]


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
