"""Passkey retrieval: a number at a given depth of a text of repeated noise.

    There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about
    the important information there.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. …
    The pass key is 81501. Remember it. 81501 is the pass key.
    The grass is green. The sky is blue. …
    What is the pass key? The pass key is                                                          -> 81501

The size is the number of sentences around the pass key. Questions cycle through the depths, from the start of the text
(0) to its end (1). Correct if the first number in the answer is the pass key. (Mohtashami and Jaggi 2023, whose prompt
this is, with five digits as in Chen et al. 2023; they draw random depths.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from deadreckon.tasks.long.question import NOISE, Question

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
SENTENCES = tuple(re.findall(r"[^.]+\.", NOISE))  # all but the first start with a blank


@dataclass(frozen=True)
class Passkey:
    """The task.

    Args:
        depths: number of depths, evenly spaced.
    """

    depths: int = 11
    new_tokens: int = 16
    least: int = 2
    most: int | None = None

    def __post_init__(self) -> None:
        if self.depths < 2:
            raise ValueError(f"depths: expected 2 or more, got {self.depths}")

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """One prompt; its number determines the depth."""
        key = str(random.randint(10_000, 99_999))
        depth = number % self.depths / (self.depths - 1)
        before = round(depth * size)
        lines = [
            INSTRUCTION, noise(before), f"The pass key is {key}. Remember it. {key} is the pass key.",
            noise(size - before), "What is the pass key? The pass key is",
        ]  # fmt: skip
        return Question("\n".join(line for line in lines if line), f" {key}.", (key,), depth=depth)

    def score(self, question: Question, said: str) -> float:
        """1 if the first number is the pass key."""
        number = re.search(r"\d+", said)
        return float(number is not None and number.group() == question.references[0])


def noise(sentences: int) -> str:
    """So many sentences of noise, repeated."""
    repeats, rest = divmod(sentences, len(SENTENCES))
    return " ".join([NOISE] * repeats + ["".join(SENTENCES[:rest])] * (rest > 0))
