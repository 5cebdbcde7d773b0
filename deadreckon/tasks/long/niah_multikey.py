"""One needle in a haystack of other needles: RULER's niah_multikey_2, and niah_multikey_3 with UUIDs.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    One of the special magic numbers for plain-window is: 3141592.
    One of the special magic numbers for quiet-harbour is: 7182818.
    One of the special magic numbers for early-copper is: 1414213.
    What is the special magic number for quiet-harbour mentioned in the provided text? The special magic number for
    quiet-harbour mentioned in the provided text is                                              -> 7182818

With UUIDs, keys and values are UUIDs, and the number is called a uuid. The size is the number of other needles. Score:
whether the value occurs in the answer, of up to 128 tokens. (Hsieh et al. 2024, whose prompt this is. Keys are two
words with a hyphen, as there, but from our own word list; no key occurs twice.)
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from uuid import UUID

from deadreckon.tasks.long import niah
from deadreckon.tasks.long.question import Question, insert, share_found
from deadreckon.tasks.long.words import draw_key


@dataclass(frozen=True)
class NiahMultikey:
    """The task.

    Args:
        uuids: whether keys and values are UUIDs, instead of words and seven-digit numbers.
    """

    uuids: bool = False
    new_tokens: int = niah.NEW_TOKENS
    least: int = 1
    most: int | None = None

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """The needle that is asked for, at a random position among others."""
        kind = "uuid" if self.uuids else "number"
        pairs: dict[str, str] = {}
        while len(pairs) < size + 1:
            pairs.setdefault(draw_uuid(random) if self.uuids else draw_key(random), self._value(random))
        (key, value), *others = pairs.items()
        lines = insert([niah.needle(kind, *pair) for pair in others], [niah.needle(kind, key, value)], random)
        return niah.question(kind, key, value, lines)

    def _value(self, random: Random) -> str:
        return draw_uuid(random) if self.uuids else str(random.randint(1_000_000, 9_999_999))

    def score(self, question: Question, said: str) -> float:
        """Whether the value occurs."""
        return share_found(question.references, said)


def draw_uuid(random: Random) -> str:
    """A random UUID of version 4."""
    return str(UUID(int=random.getrandbits(128), version=4))
