"""The task of the example: stories in short sentences. The reward is computed by code."""

from __future__ import annotations

import random
import re

__all__ = ["MOST_WORDS", "prompts", "reward"]

MOST_WORDS = 6
WHO = ("Tom", "Lily", "a little dog", "the old cat", "a big bear", "Anna", "the boy", "a bird")
OPENINGS = (
    "Once upon a time there was {}.",
    "One day {} went to the park.",
    "It was a sunny day. {} wanted to play.",
    "In a small house lived {}.",
)


def prompts(count: int, draw: random.Random) -> list[str]:
    """Return so many beginnings of stories, all different: at most 32."""
    every = [opening.format(who) for opening in OPENINGS for who in WHO]
    return [text[0].upper() + text[1:] for text in draw.sample(every, count)]


def reward(text: str) -> float:
    """Return the share of words that stand in finished sentences of 3 to 6 words, in [0, 1].

    What follows the last full stop counts as words of no such sentence once it has more than 6.
    """
    *sentences, rest = re.split(r"[.!?]+", text)
    sizes = [len(sentence.split()) for sentence in sentences]
    good = sum(size for size in sizes if 3 <= size <= MOST_WORDS)
    open_words = len(rest.split())
    total = sum(sizes) + (open_words if open_words > MOST_WORDS else 0)
    return good / total if total else 0.0
