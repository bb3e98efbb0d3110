"""Streaming shows whole characters, every character once, and never a part of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tilewise.engine.text import MAX_WINDOW, Detokenizer, StopAutomaton, StopMatcher, TextStream

SAMPLES = ["Hello, wörld! naïve café", "日本語の文章です。", "emoji 😀👍🏽 and ⅓", "a  b\n\n c\t"]


def _byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


def _byte_fallback():
    """As Llama 2 has it: words with a leading ▁, bytes for what is not a word."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁Hello", "Hello", "▁wor", "ld", "!", "▁the", "é"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = _byte_level(), _byte_fallback()


def stream(tokenizer, ids, prompt=(), special=frozenset()):
    """The deltas of `ids`, the flush last."""
    detokenizer = Detokenizer(tokenizer.decode, special, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_deltas_add_up_to_the_text_and_hold_whole_characters(text):
    deltas = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(deltas) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def test_text_is_shown_as_soon_as_it_is_certain():
    single_bytes = [BYTE_LEVEL.token_to_id(char) for char in ("a", "Ã", "©", "b")]
    assert stream(BYTE_LEVEL, single_bytes) == ["a", "", "é", "b", ""]


def test_an_unfinished_character_comes_out_only_at_the_end():
    ids = [BYTE_LEVEL.token_to_id(char) for char in ("a", "Ã")]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, BYTE_LEVEL.get_vocab_size() - 1), max_size=80))
def test_any_tokens_give_what_the_decoder_gives(ids):
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40))
def test_any_text_survives_byte_fallback(text):
    ids = list(text.encode())
    deltas = stream(BYTE_FALLBACK, [BYTE_FALLBACK.token_to_id("▁Hello"), *ids])
    assert "".join(deltas) == "Hello" + text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def test_the_prompt_decides_about_the_leading_space():
    hello, world = (BYTE_FALLBACK.token_to_id(t) for t in ("▁Hello", "▁wor"))
    assert stream(BYTE_FALLBACK, [world]) == ["wor", ""]
    assert stream(BYTE_FALLBACK, [world], prompt=[hello]) == [" wor", ""]
    assert stream(BYTE_FALLBACK, [hello, world]) == ["Hello", " wor", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@pytest.mark.parametrize("length", range(1, 12))
def test_a_prompt_of_bytes_is_continued_wherever_its_tail_begins(tokenizer, length):
    prompt = ("x" * length + "日本語").encode()
    byte_of = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    ids = list(prompt)
    rest = list("の文".encode())
    if tokenizer is BYTE_LEVEL:
        names = byte_of("x" * length + "日本語の文")
        ids = [tokenizer.token_to_id(c) for word, _ in names for c in word]
        ids, rest = ids[: len(prompt)], ids[len(prompt) :]
    assert "".join(stream(tokenizer, rest, prompt=ids)) == "の文"


def test_a_character_that_began_in_the_prompt_is_finished():
    first, second = (BYTE_LEVEL.token_to_id(char) for char in ("Ã", "©"))
    assert stream(BYTE_LEVEL, [second], prompt=[first]) == ["é", ""]


def test_what_the_prompt_left_unfinished_is_no_text_of_its_own():
    first, *_ = BYTE_LEVEL.encode("日").ids
    whole = BYTE_LEVEL.encode("ab").ids
    assert stream(BYTE_LEVEL, [], [*whole, first]) == [""]
    assert stream(BYTE_LEVEL, [299], [*whole, first], frozenset([299])) == ["", ""]
    assert "".join(stream(BYTE_LEVEL, [first], [*whole])) == "\N{REPLACEMENT CHARACTER}"


def test_special_and_unknown_tokens_have_no_text():
    end = BYTE_LEVEL.token_to_id("<end>")
    a = BYTE_LEVEL.token_to_id("a")
    ids = [a, end, 9_999, a, *[9_999] * 100, end, a]
    assert "".join(stream(BYTE_LEVEL, ids, special=frozenset([end]))) == "aaa"


@pytest.mark.parametrize(
    "token_bytes",
    [
        [0xFF],  # never UTF-8
        [0xE2, 0x82],  # characters that never end
    ],
)
def test_endless_garbage_is_shown_in_bounded_work(token_bytes):
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    ids = token_bytes * 500
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert text == bytes(ids).decode(errors="replace")
    assert longest <= MAX_WINDOW + 1


def test_tokens_that_all_end_inside_a_character_are_shown_in_bounded_work():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return b"".join([b"\xe2", b"\x82\xac\xe2"][i] for i in ids).decode(errors="replace")

    detokenizer = Detokenizer(decode)
    deltas = [detokenizer.push(i) for i in [0, *[1] * 500]]
    assert deltas == ["", *["€"] * 500]
    assert longest <= MAX_WINDOW + 1


def test_tokens_without_text_take_bounded_work():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("ab"[i] for i in ids if i < 2)

    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.push, [0, *[7] * 500, 1, *[7] * 500])) == "ab"
    assert longest <= 3


def naive_stop(text, stops):
    """The text before the stop string that is complete first, the longest of equals."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=9), max_size=6),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    includes_stop=st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(text, stops, cuts, includes_stop):
    matcher, shown, stop = StopMatcher(stops, includes_stop=includes_stop), "", None
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for start, end in itertools.pairwise(edges):
        delta, stop = matcher.push(text[start:end])
        shown += delta
        if stop is not None:
            break
        assert naive_stop(text[:end], stops)[1] is None
        # no more is held back than could become a stop string
        held = text[len(shown) : end]
        assert held == "" or any(s.startswith(held) for s in stops)
    if stop is None:
        shown += matcher.flush()
    wanted, found = naive_stop(text, stops)
    assert (shown, stop) == (wanted + (found or "") * includes_stop, found)


def test_a_text_costs_its_length_however_many_stop_strings_there_are():
    steps = []
    for count in (1, 64):
        automaton = StopAutomaton(["a" * 500 + chr(200 + i) for i in range(count)])
        looked_up = 0

        class Counting(dict):
            def __contains__(self, char):
                nonlocal looked_up
                looked_up += 1
                return super().__contains__(char)

        automaton.next_of = [Counting(chars) for chars in automaton.next_of]
        matcher = StopMatcher(automaton)
        text = ("a" * 499 + "b") * 40
        shown = "".join(matcher.push(char)[0] for char in text) + matcher.flush()
        assert shown == text
        assert looked_up <= 2 * len(text)
        steps.append(looked_up)
    assert steps[0] == steps[1]


def test_samples_share_an_automaton_and_match_by_themselves():
    automaton = StopAutomaton(["xyz"])
    one, other = StopMatcher(automaton), StopMatcher(automaton)
    assert one.push("axy") == ("a", None)
    assert other.push("z") == ("z", None)
    assert one.push("z") == ("", "xyz")


def test_a_stop_string_that_begins_within_itself_is_found():
    # after "aabaa" the next "a" leaves "aa" matched: the whole automaton is needed to know
    assert StopMatcher(["aabaab"]).push("aabaaabaab") == ("aaba", "aabaab")


def test_half_a_stop_string_waits_and_is_released_when_it_does_not_come():
    matcher = StopMatcher(["###", "\n\n"])
    assert matcher.push("a#") == ("a", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push("b\n") == ("##b", None)
    assert matcher.flush() == "\n"


def test_without_stop_strings_everything_passes_at_once():
    assert StopMatcher([]).push("anything") == ("anything", None)


def ids_of(text):
    return [BYTE_LEVEL.token_to_id(char) for char in text]


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["xyz"])
    deltas = [stream.push(i) for i in ids_of("abxyxyzq")]
    assert deltas == ["a", "b", "", "", "xy", "", "", ""]
    assert (stream.text, stream.stop) == ("abxy", "xyz")
    assert stream.finish() == ""


def test_finishing_releases_what_was_held_back():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["xyz"])
    assert [stream.push(i) for i in ids_of("axy")] == ["a", "", ""]
    assert stream.finish() == "xy"
    assert (stream.text, stream.stop) == ("axy", None)


def test_the_first_tokens_end_no_text():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["x"], min_tokens=2)
    assert [stream.push(i) for i in ids_of("xxax")] == ["x", "x", "a", ""]
    assert (stream.text, stream.stop) == ("xxa", "x")


def test_the_stop_string_is_part_of_the_text_when_asked_for():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["xyz"], includes_stop=True)
    assert [stream.push(i) for i in ids_of("axyz")] == ["a", "", "", "xyz"]
    assert (stream.text, stream.stop) == ("axyz", "xyz")


@pytest.mark.parametrize(
    ("marks", "text", "found"),
    [
        (("", "</t>"), "ax</t>bxc", "ax</t>b"),
        (("", "</t>"), "ax<x</t", None),
        (("<t>", "</t>"), " \n<t>ax</t>bxc", " \n<t>ax</t>b"),
        (("<t>", "</t>"), "<t>x</t></t>x", "<t>x</t></t>"),
        (("<t>", "</t>"), "bx<t>c", "b"),
        (("<t>", "</t>"), "<tx", "<t"),
        (("<t>", "</t>"), " <", None),
        (("<t>", "</t>"), "x", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_strings_are_looked_for_behind_the_reasoning(marks, text, found, size):
    class Pieces:
        def push(self, piece):
            return piece

        def flush(self):
            return ""

    stream = TextStream(Pieces(), ["x"], reasoning=marks)
    told = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
    told.append(stream.finish())
    assert "".join(told) == stream.text == (text if found is None else found)
    assert stream.stop == (None if found is None else "x")


def test_the_first_tokens_may_hold_the_reasonings_end():
    stream = TextStream(Detokenizer(BYTE_LEVEL.decode), ["x"], min_tokens=4, reasoning=("", ">"))
    assert "".join(stream.push(i) for i in ids_of("x>xaxb")) == "x>xa"
    assert stream.stop == "x"
