"""Messages name flags as they are typed, and an unknown one its nearest known one."""

from __future__ import annotations

import argparse

import pytest

from tilewise.flags import Flag, Parser, add_flag, as_typed, flags_of, hint, unknown_argument


@pytest.fixture
def parser():
    made = Parser(prog="it")
    made.add_argument("--top-p", type=float, default=1.0)
    made.add_argument("--max-tokens", type=int, default=9)
    made.add_argument("--swap-space", dest="swap_space_gib", type=float, default=0.0)
    made.add_argument("--model", default="story")
    made.add_argument("--prompt", default=None)
    made.add_argument("-n", type=int, default=1)
    made.add_argument("--num-blocks", "-b", type=int, default=argparse.SUPPRESS)
    return made


def test_an_option_is_known_by_its_long_name(parser):
    found = flags_of(parser)
    assert found["num_blocks"] == "--num-blocks"
    assert found["n"] == "-n"


@pytest.mark.parametrize(
    ("arguments", "sentence", "typed"),
    [
        ("--top-p 2", "top_p must be in (0, 1], got 2.0", "--top-p must be in (0, 1], got 2.0"),
        ("-n 0", "n must be at least 1, got 0", "-n must be at least 1, got 0"),
        ("--model x", "model must be a directory, got 'x'", "--model must be a directory, got 'x'"),
        ("--swap-space -1", "swap_space_gib must be at least 0, got -1.0",
         "--swap-space must be at least 0, got -1.0"),
        ("--num-blocks 1", "num_blocks must fit, got 1", "--num-blocks must fit, got 1"),
        ("--max-tokens 99", "prompt and max_tokens must be at most 17 together, got 5 and 99",
         "prompt and --max-tokens must be at most 17 together, got 5 and 99"),
        # Nothing was given: no value was got.
        ("", "top_p must leave room, got 1.0", "--top-p must leave room; by default it is 1.0"),
        ("", "top_p and max_tokens must fit, got 1.0 and 9",
         "--top-p and --max-tokens must fit; by default it is 1.0 and 9"),
        ("--max-tokens 8", "top_p and max_tokens must fit, got 1.0 and 8",
         "--top-p and --max-tokens must fit, got 1.0 and 8"),
        # A word, not a parameter; a value, not a name.
        ("", "norm must be rms, got layer", "norm must be rms, got layer"),
        ("", "model.top_p must be 1, got 'top_p'", "model.top_p must be 1, got 'top_p'"),
        ("", "out of luck: max_tokens and model", "out of luck: --max-tokens and model"),
        ("", "config.json must hold n, got none", "config.json must hold n, got none"),
    ],
)  # fmt: skip
def test_messages_are_in_the_words_of_the_command_line(parser, arguments, sentence, typed):
    assert as_typed(sentence, parser, parser.parse_args(arguments.split())) == typed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-tokns", "3"], "--max-tokns is not an option here; did you mean --max-tokens?"),
        (["--top-k=3"], "--top-k is not an option here; did you mean --top-p?"),
        (["--colour"], "--colour is not an option here"),
        (["x", "y"], "nothing is expected here, got x y"),
        (["x", "--modl"], "--modl is not an option here; did you mean --model?"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_like_it(parser, capsys, words, said):
    assert unknown_argument(words, flags_of(parser).values()) == said
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    assert capsys.readouterr().err.endswith(f"it: error: {said}\n")


def test_nothing_is_guessed_for_what_is_like_nothing():
    assert hint("--tensor-colour", ["--port", "--host"]) == ""


def test_a_flag_keeps_its_value_under_its_name_and_shows_the_default_that_holds():
    parser = Parser(prog="it")
    for flag in (
        Flag("swap_space_gib", float, None, "room", "", "GIB", "swap_space", shown_default=0.5),
        Flag("names", list, None, "of 100 %", "", "NAME"),
        Flag("is_open", bool, False, "no key", ""),
    ):
        add_flag(parser, flag)
    assert vars(parser.parse_args([])) == {}
    words = "--swap-space 2 --names a b --no-is-open"
    values = {"swap_space_gib": 2.0, "names": ["a", "b"], "is_open": False}
    assert vars(parser.parse_args(words.split())) == values
    assert flags_of(parser)["swap_space_gib"] == "--swap-space"
    help_text = " ".join(parser.format_help().split())
    assert "--swap-space GIB room (default: 0.5)" in help_text
    assert "of 100 %" in help_text
    assert help_text.count("default") == 1
