"""Clean plain-text stories, train a byte-level BPE on them and write token files for training.

    python examples/story_data.py TEXT_DIR --out .data

TEXT_DIR holds text files and folders of text files; each is one source. A file may separate its
documents by a line ``<|endoftext|>``. Raw Project Gutenberg books are fine: licence text, contents
lists, headings, captions, transcriber's notes and advertisements are removed, hard line breaks are
joined, and quotes, dashes and spaces become ASCII.

Validation text never reaches the tokenizer or the training set: of a file every 50th document is
held out, of a folder every 20th file, whole. A training document that shares more than 30 % of its
eight-word runs with an earlier one, or with the validation set, is dropped.

The folder --out receives train.bin and val.bin (uint16 token ids; the end token stands before each
document and after the last), tokenizer.json, tokenizer_config.json, and meta.json with the token
range and the character count of every source. Needs numpy and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
HELD_OUT_DOCUMENTS = 50
HELD_OUT_FILES = 20
RUN_WORDS = 8
MAX_SHARED_RUNS = 0.3
MIN_DOCUMENT_CHARS = 200

_ASCII = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032`\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012", "-"),
        **dict.fromkeys("\u2013\u2014\u2015", "--"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\t", " "),
        **dict.fromkeys("\u200b\u200c\u200d\ufeff\u00ad", ""),
        "\u2026": "...",
    }
)
_GUTENBERG_START = re.compile(r"(?im)^.*\*\*\*\s*start of (?:the|this) project gutenberg.*$")
_GUTENBERG_END = re.compile(
    r"(?im)^.*(?:\*\*\*\s*end of this project gutenberg|end of (?:the )?project gutenberg).*$"
)
_CAPTION = re.compile(
    r"\*?[\[{]\s*(?:illustration|frontispiece|footnote|transcriber|note)[^\]}]*[\]}]\*?", re.I
)
_NOTE_MARK = re.compile(r"\[\s*(?:\*+|\d{1,3})\s*\]|(?<=[a-z,.;!?])\*")
_MARKUP = re.compile(r"(?<!\w)([_=~*])(?=\S)([^_=~*\n]+?)(?<=\S)\1(?!\w)|</?[a-z][^<>\n]{0,80}>")
_HEADING = re.compile(
    r"(?i)(?:chapter|contents|table of contents|list of|preface|introduction|illustrations?|"
    r"(?:part|book|volume|section|story|lesson|no\.)\s+(?:[ivxlc]+|\d+|one|two|three)|"
    r"transcriber|footnotes?|finis|the\s+end)\b[\s\W]*[^.!?]{0,60}[.!]?$"
)
_APPARATUS = re.compile(
    r"(?i:gutenberg|https?:|www\.|copyright|transcrib|\be-?text\b|proofread|postpaid|12mo\b|"
    r"booksellers|grosset|per volume|price \d+ cents|colou?red wrappers|illustrated by|in cloth\b|"
    r"trademark registered|author of \"|hyphenat|\"\.?\)? (?:was )?changed to|normali[sz]ed|"
    r"^page \d+|^illustrations?:|by the same author)|^By (?:[A-Z][\w.]* ){1,3}[A-Z]\w+\W*$"
)
_NEXT_BOOK = re.compile(
    r"(?i)\bnext (?:book|volume|story)\b|\bother (?:books|volumes)\b|\b(?:dear|little) readers?\b|"
    r"\bseries of (?:books|stories)\b|\b(?:this|first|last|bedtime) (?:series|book is)\b"
)
_BOOK_TRADE = re.compile(
    r"(?i)\b(?:authors?|edition|volumes?|publish\w*|illustrat\w+|series|readers?|folklore|juvenile|"
    r"fiction|narrative|books|letters from children|page numbers)\b"
)
_ENTRY = re.compile(r"(?:^|\s)(?:[IVXLC]+|\d+)\.?\s+(?=[A-Z])")
_OPENING_CAPITALS = re.compile(
    r"(?:[A-Z]{2,}\.?|[AI])(?:'[A-Z]+)?(?:,?\s+[A-Z]{2,}(?:'[A-Z]+)?)*(?=,?\s+[a-z])"
)
_SMALL_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a after all and are as at be but by can did do for from had has he her his how if in into
        is it its may my never no not of old on one or she so some that the their them there these
        they this to up was we were what when who will with you your""",
    )
)


@dataclass(frozen=True, slots=True)
class Document:
    """One cleaned text; `held_out` sends it to validation."""

    source: str
    text: str
    held_out: bool


def normalize(text: str) -> str:
    """Turn typographic quotes, dashes and spaces into ASCII and drop control characters."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = text.translate(_ASCII)
    return "".join(c for c in text if c == "\n" or unicodedata.category(c)[0] != "C")


def strip_licence(text: str) -> str:
    """Return what stands between Project Gutenberg's start and end lines, or the whole text."""
    if start := _GUTENBERG_START.search(text):
        text = text[start.end() :]
    if end := _GUTENBERG_END.search(text):
        text = text[: end.start()]
    return text


def split_paragraphs(text: str) -> list[str]:
    """Join hard-wrapped lines where blank lines part the paragraphs; else one line is one."""
    lines = [line.strip() for line in text.split("\n")]
    filled = [line for line in lines if line]
    wrapped = "\n\n" in text.strip() and max(map(len, filled), default=0) <= 100
    if not wrapped:
        return filled
    blocks = re.split(r"\n(?:[ ]*\n)+", text.strip())
    return [" ".join(block.split()) for block in blocks if block.strip()]


def clean_paragraph(paragraph: str) -> str:
    """Remove captions, note marks and emphasis markup; tidy spaces, dots and opening capitals."""
    if re.match(r"\*\s", paragraph):
        return ""
    paragraph = _CAPTION.sub(" ", paragraph)
    paragraph = _NOTE_MARK.sub("", paragraph)
    paragraph = _MARKUP.sub(lambda match: match.group(2) or "", paragraph)
    paragraph = re.sub(r"(?:\.\s*){3,}", "... ", paragraph)
    paragraph = re.sub(r"\s*-{2,}\s*", "--", paragraph)
    paragraph = re.sub(r"^[|*\s]+|^\d{1,2}\.\s+(?=[\"A-Z])", "", paragraph)
    paragraph = re.sub(r"(?<=[a-z])- (?!(?:and|or|to)\b)(?=[a-z]{2,})", "-", paragraph)
    paragraph = re.sub(r"\s+(?=[,.;:!?])", "", re.sub(r"\s+", " ", paragraph).strip())
    return lower_opening(paragraph)


def lower_opening(paragraph: str) -> str:
    """Undo the capitals that books set at the start of a chapter: ``ONCE UPON a`` is ``Once upon``.

    Words that are no function words may be names, so they keep a capital.
    """
    quote = len(paragraph) - len(paragraph.lstrip("\"'("))
    opening = _OPENING_CAPITALS.match(paragraph, quote)
    if not opening or opening.group() == "OK":
        return paragraph
    words = [w if w == "I" else w.capitalize() for w in opening.group().split(" ")]
    tail = [w if w.lower() not in _SMALL_WORDS or w == "I" else w.lower() for w in words[1:]]
    return paragraph[:quote] + " ".join([words[0], *tail]) + paragraph[opening.end() :]


def is_story(paragraph: str) -> bool:
    """Tell prose from headings, contents lists, tables, advertisements and editors' notes."""
    letters = [c for c in paragraph if c.isalpha()]
    if not letters or "|" in paragraph or "+--" in paragraph:
        return False
    capitals = sum(c.isupper() for c in letters) / len(letters)
    if capitals > 0.4 and len(paragraph.split()) >= 3:
        return False
    if len(paragraph) > 20 and len(letters) < 0.6 * len(paragraph.replace(" ", "")):
        return False
    if _HEADING.match(paragraph) or _APPARATUS.search(paragraph) or _NEXT_BOOK.search(paragraph):
        return False
    if len(_ENTRY.findall(paragraph)) >= 4:
        return False
    is_closed = paragraph.endswith((".", "!", "?", '"', "'", ":", ";", ",", "-", ")"))
    words = paragraph.split()
    return is_closed or (len(words) > 12 and sum(w[0].islower() for w in words) > len(words) / 2)


def clean_document(text: str) -> str:
    """Clean one normalised document: paragraphs joined by a newline, or '' where it is no story.

    A document is refused when it is short, when most of it was apparatus, when it talks of books
    more than once in 500 characters (prefaces, advertisements), or when it does not start like a
    sentence; an unfinished last sentence is cut off.
    """
    paragraphs = split_paragraphs(text)
    kept = [p for p in map(clean_paragraph, paragraphs) if p and is_story(p)]
    body = "\n".join(kept)
    if sum(map(len, kept)) < 0.5 * sum(map(len, paragraphs)):
        return ""
    if not body.endswith((".", "!", "?", '"', "'", ")")):
        last = max((m.end() for m in re.finditer(r"[.!?][\"']?(?=\s|$)", body)), default=0)
        body = body[:last]
    trade_words = len(_BOOK_TRADE.findall(body))
    if trade_words >= 3 and trade_words > len(body) / 500:
        return ""
    starts_well = bool(re.match(r"[\"'(]{0,2}[A-Z]", body))
    return body if starts_well and len(body) >= MIN_DOCUMENT_CHARS else ""


def continues(opening: str, part: str) -> bool:
    """Tell whether `part` starts "One day" and speaks at once of somebody in `opening`."""
    first = re.split(r"[.!?]", part, maxsplit=1)[0]
    if not re.match(r"One day,? (?!an? |two |three )", first) or re.search("named|called", first):
        return False
    names = set(re.findall(r"\b[A-Z][a-z]+", first)) - {"One"}
    return bool(
        names & set(re.findall(r"\w+", opening)) or re.search(r"\b(?:he|she|they)\b", first)
    )


def join_openings(parts: Iterable[str]) -> Iterator[str]:
    """Give back to a story the opening, one short paragraph, that a stray end token cut off."""
    opening = ""
    for part in map(str.strip, parts):
        if opening and continues(opening, part):
            part = f"{opening}\n{part}"
        elif opening:
            yield opening
        opening = part if len(part) <= 350 and "\n" not in part else ""
        if not opening:
            yield part
    if opening:
        yield opening


def clean(text: str) -> Iterator[str]:
    """Yield the cleaned documents of a raw text, '' for each one refused."""
    for part in join_openings(strip_licence(normalize(text)).split(END)):
        yield clean_document(part)


def read_sources(root: Path) -> list[Document]:
    """Read every file and folder of `root`; each is one source, named by its stem."""
    documents = []
    for entry in sorted(root.iterdir()):
        files = sorted(entry.rglob("*.txt")) if entry.is_dir() else [entry]
        files = [file for file in files if file.suffix == ".txt"]
        for number, file in enumerate(files):
            file_is_held_out = number % HELD_OUT_FILES == HELD_OUT_FILES // 10
            for index, text in enumerate(clean(file.read_text("utf-8", errors="replace"))):
                document_is_held_out = index % HELD_OUT_DOCUMENTS == HELD_OUT_DOCUMENTS // 10
                held_out = file_is_held_out if entry.is_dir() else document_is_held_out
                if text:
                    documents.append(Document(entry.stem, text, held_out))
    if not documents:
        raise ValueError(f"text folder must hold stories in .txt files, got none in {root}")
    return documents


def word_runs(text: str) -> set[int]:
    """Hash the runs of eight words and keep one in four, chosen by its hash."""
    words = re.findall(r"\w+", text.lower())
    runs = (" ".join(words[i : i + RUN_WORDS]) for i in range(max(1, len(words) - RUN_WORDS + 1)))
    hashes = {zlib.crc32(run.encode()) for run in runs}
    return {h for h in hashes if h % 4 == 0} or {min(hashes)}


def drop_repeats(documents: Iterable[Document]) -> list[Document]:
    """Keep each document whose word runs are new; validation documents are seen first."""
    seen: set[int] = set()
    kept = []
    for document in sorted(documents, key=lambda d: not d.held_out):
        runs = word_runs(document.text)
        if len(runs & seen) <= MAX_SHARED_RUNS * len(runs):
            kept.append(document)
            seen |= runs
    return kept


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose token 0 is the end token; encoding a text puts it in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A",
        pair=f"{END} $A $B:1",
        special_tokens=[(END, tokenizer.token_to_id(END))],
    )
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """Return tokenizer_config.json; the chat template tells the user's words on as a story."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{{ bos_token }}{% for message in messages %}{% if message['role'] != 'system' %}"
            "{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endif %}{% endfor %}"
        ),
    }


def write_tokens(documents: list[Document], tokenizer: Tokenizer, path: Path) -> dict[str, object]:
    """Write the token ids of `documents` source by source; return each source's range and sizes."""
    ranges: dict[str, object] = {}
    pieces: list[np.ndarray] = []
    position = 0
    for source in sorted({document.source for document in documents}):
        texts = [document.text for document in documents if document.source == source]
        encoded = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts)]
        size = sum(map(len, encoded))
        ranges[source] = {
            "start": position,
            "end": position + size,
            "documents": len(texts),
            "chars": sum(map(len, texts)),
        }
        pieces += encoded
        position += size
    pieces.append(np.array([tokenizer.token_to_id(END)], np.uint16))
    np.concatenate(pieces).tofile(path)
    return ranges


def prepare(root: Path, out: Path, vocab_size: int, context: int = 1024) -> dict[str, object]:
    """Clean, tokenise and write everything under `root`; return what meta.json says."""
    documents = drop_repeats(read_sources(root))
    train = [document for document in documents if not document.held_out]
    val = [document for document in documents if document.held_out]
    if not val:
        train, val = train[:-1], train[-1:]
    tokenizer = train_tokenizer((document.text for document in train), vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = json.dumps(tokenizer_config(context), indent=2)
    (out / "tokenizer_config.json").write_text(config + "\n")
    meta: dict[str, object] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "train": write_tokens(train, tokenizer, out / "train.bin"),
        "val": write_tokens(val, tokenizer, out / "val.bin"),
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="folder of .txt files and folders of them")
    parser.add_argument("--out", type=Path, default=Path(".data"), help="default: .data")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens; default 4096")
    args = parser.parse_args()
    json.dump(prepare(args.text, args.out, args.vocab), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
