"""English words and people's names to draw from.

names.txt has first names and, after an empty line, surnames. words.txt has some five thousand words of 4 to 12 letters
that occur in five or more of 69 novels from before 1919; proper names and regular inflections are left out, and no word
is a substring of another, so that substring search in an answer finds no false match.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from random import Random


@cache
def words() -> tuple[str, ...]:
    """All words, in alphabetical order."""
    return tuple((files(__package__) / "words.txt").read_text().split())


@cache
def names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """First names and surnames."""
    first, last = (files(__package__) / "names.txt").read_text().split("\n\n")
    return tuple(first.split()), tuple(last.split())


def draw_key(random: Random) -> str:
    """Two words as one key, such as quiet-harbour."""
    return "-".join(random.sample(words(), 2))


def draw_name(random: Random) -> str:
    """A full name, one of `count_names`."""
    return " ".join(random.choice(part) for part in names())


def count_names() -> int:
    """How many full names there are."""
    first, last = names()
    return len(first) * len(last)
