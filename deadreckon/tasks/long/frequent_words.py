"""Frequent words, RULER's fwe: the three most frequent words of a coded text.

    Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared
    coded words. ... kwzyab ... ojcmrt ... kwzyab ... kwzyab ueupof ... ojcmrt ueupof ... xqbdwe ...
    Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared
    words in the above coded text? Answer: According to the coded text above, the three most frequently appeared words
    are:                                                                         -> kwzyab, ojcmrt, ueupof.

Words are six random letters; the k-th most frequent of n words occurs n k^−2 / ζ(2) times, rounded down, and the first
is the noise "...". There is one different word per 50 tokens of the prompt. The size is n. Score: the share of the
three that occur in the answer, of up to 50 tokens. (Hsieh et al. 2024, whose prompt this is.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from deadreckon.tasks.long.question import Question, share_found

TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
NOISE_WORD = "..."
ASKED = 3
TOKENS_A_WORD = 50
ZETA = math.pi**2 / 6


@dataclass(frozen=True)
class FrequentWords:
    """The task."""

    new_tokens: int = 50
    least: int = 53  # from here on the fourth word occurs more often than the fifth
    most: int | None = None

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """The text, with `size` words before rounding."""
        different = max(ASKED + 2, (length - self.new_tokens) // TOKENS_A_WORD)
        vocabulary: dict[str, None] = {NOISE_WORD: None}
        while len(vocabulary) < different:
            vocabulary["".join(random.choices(ascii_lowercase, k=6))] = None
        coded = list(vocabulary)
        text = [word for rank, word in enumerate(coded, 1) for _ in range(int(size / rank**2 / ZETA))]
        random.shuffle(text)
        references = tuple(coded[1 : 1 + ASKED])
        return Question(TEMPLATE.format(context=" ".join(text)), f" {', '.join(references)}.", references)

    def score(self, question: Question, said: str) -> float:
        """The share of the three that occur."""
        return share_found(question.references, said)
