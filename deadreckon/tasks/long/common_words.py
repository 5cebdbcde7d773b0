"""Common words, RULER's cwe: the ten words of a list that occur most often.

    Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear
    most often.
    1. harbour 2. window 3. harbour 4. copper 5. lantern 6. harbour …
    Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in
    the list are:                                                             -> 1. harbour 2. lantern 3. …

Ten words occur 30 times each, the others three times; an example with 40 words, 10 and 3 times, and its answer precedes
it. Below 4096 tokens it is 6 times and once, and the example has 20 words, 3 times and once. The size is the number of
other words. Score: the share of the ten that occur in the answer, of up to 120 tokens. (Hsieh et al. 2024, whose prompt
this is. Words are from our own list. Answers name words in order of first occurrence.)
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from deadreckon.tasks.long.question import Question, share_found
from deadreckon.tasks.long.words import words

COMMON = 10
LONG = 4096
TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)


class Repeats(NamedTuple):
    """How often words occur."""

    common: int
    other: int


@dataclass(frozen=True)
class CommonWords:
    """The task."""

    new_tokens: int = 120
    least: int = 1

    @property
    def most(self) -> int:
        """All other words of the word list."""
        return len(words()) - COMMON

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """The example with its answer, and the list."""
        short = length < LONG
        example, named = _list(10 if short else 30, Repeats(3, 1) if short else Repeats(10, 3), random)
        prompt, references = _list(size, Repeats(6, 1) if short else Repeats(30, 3), random)
        return Question(f"{example} {number_words(named)}\n{prompt}", f" {number_words(references)}", references)

    def score(self, question: Question, said: str) -> float:
        """The share of the ten that occur."""
        return share_found(question.references, said)


def _list(others: int, repeats: Repeats, random: Random) -> tuple[str, tuple[str, ...]]:
    """A prompt, and its common words in order of first occurrence."""
    drawn: dict[str, None] = {}
    while len(drawn) < COMMON + others:
        drawn[random.choice(words())] = None
    common, rest = list(drawn)[:COMMON], list(drawn)[COMMON:]
    listed = common * repeats.common + rest * repeats.other
    random.shuffle(listed)
    return TEMPLATE.format(context=number_words(listed)), tuple(sorted(common, key=listed.index))


def number_words(listed: list[str] | tuple[str, ...]) -> str:
    """1. first 2. second …"""
    return " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
