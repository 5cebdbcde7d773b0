"""One needle in a haystack of noise: RULER's niah_single_1.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the
    number afterwards.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for quiet-harbour is: 7182818.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    What is the special magic number for quiet-harbour mentioned in the provided text? The special magic number for
    quiet-harbour mentioned in the provided text is                                              -> 7182818

The size is the number of lines of noise. Score: whether the number occurs in the answer, of up to 128 tokens. (Hsieh et
al. 2024, whose prompt this is. Keys are two words with a hyphen, as there, but from our own word list.)
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from deadreckon.tasks.long import niah
from deadreckon.tasks.long.question import NOISE, Question, insert, share_found
from deadreckon.tasks.long.words import draw_key


@dataclass(frozen=True)
class NiahSingle:
    """The task."""

    new_tokens: int = niah.NEW_TOKENS
    least: int = 1
    most: int | None = None

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """One needle at a random position in lines of noise."""
        key, value = draw_key(random), str(random.randint(1_000_000, 9_999_999))
        lines = insert([NOISE] * size, [niah.needle("number", key, value)], random)
        return niah.question("number", key, value, lines)

    def score(self, question: Question, said: str) -> float:
        """Whether the number occurs."""
        return share_found(question.references, said)
