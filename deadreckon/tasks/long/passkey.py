"""Passkey retrieval: a number at a certain depth of a text that says nothing else.

    There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you about
    the important information there.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. The grass is green. …
    The pass key is 81501. Remember it. 81501 is the pass key.
    The grass is green. The sky is blue. …
    What is the pass key? The pass key is                                                          -> 81501

Its size is the number of sentences around the pass key. Questions go through the depths in turn, from the beginning of
the text (0) to its end (1). Right if the first number in the answer is the pass key. (Mohtashami and Jaggi 2023, whose
prompt this is, with five digits as in Chen et al. 2023; they draw depths.)
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
SENTENCES = tuple(re.findall(r"[^.]+\.", NOISE))  # all but the first with a blank before them


@dataclass(frozen=True)
class Passkey:
    """The task.

    Args:
        depths: how many there are, evenly spaced.
    """

    depths: int = 11
    new_tokens: int = 16
    least: int = 2
    most: int | None = None

    def __post_init__(self) -> None:
        if self.depths < 2:
            raise ValueError(f"depths: expected 2 or more, got {self.depths}")

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """One prompt, its depth by its number."""
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
    """So many sentences, over and over."""
    repeats, rest = divmod(sentences, len(SENTENCES))
    return " ".join([NOISE] * repeats + ["".join(SENTENCES[:rest])] * (rest > 0))
