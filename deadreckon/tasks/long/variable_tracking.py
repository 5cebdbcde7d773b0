"""Variable tracking, RULER's vt: which variables have a given value, through a chain of assignments in noise.

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
     VAR KQZPW = 31415 The grass is green. The sky is blue. …
     VAR BMRTX = VAR KQZPW  The grass is green. …
     VAR LLAHE = VAR BMRTX  The grass is green. …
     …

    Question: Find all variables that are assigned the value 31415 in the text above. Answer: According to the chain(s)
    of variable assignment in the text above, 5 variables are assgined the value 31415, they are:
                                                                                -> KQZPW BMRTX LLAHE OOVNS TGIYC

A smaller example with its answer, in which names have three letters, precedes it. One chain of four hops, five letters
per name. The size is the number of lines of noise. Score: the share of the five names that occur in the answer, of up
to 30 tokens. (Hsieh et al. 2024, whose prompt this is, including white space. They extend the example to 500 tokens;
here it has ten lines of noise, with any tokenizer.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from deadreckon.tasks.long.question import NOISE, Question, insert, share_found

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
    "Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assgined the value {value}, they are: "
)
EXAMPLE_NOISE = 10


@dataclass(frozen=True)
class VariableTracking:
    """The task.

    Args:
        hops: assignments of one variable to the next.
    """

    hops: int = 4
    new_tokens: int = 30
    most: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.hops < EXAMPLE_NOISE:
            raise ValueError(f"hops: expected 0 to {EXAMPLE_NOISE - 1}, got {self.hops}")

    @property
    def least(self) -> int:
        """A line of noise for each assignment."""
        return self.hops + 1

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """The example with its answer, and the chain."""
        example, names = self._chain(EXAMPLE_NOISE, 3, random)
        prompt, references = self._chain(size, 5, random)
        answer = " " + " ".join(references)
        return Question(f"{example} {' '.join(names)}\n\n\n\n{prompt}", answer, references)

    def _chain(self, size: int, letters: int, random: Random) -> tuple[str, tuple[str, ...]]:
        names: dict[str, None] = {}
        while len(names) < self.hops + 1:
            names["".join(random.choices(ascii_uppercase, k=letters))] = None
        chain, value = list(names), str(random.randint(10_000, 99_999))
        # As in RULER: a blank at the end of each assignment but the first, and one between all parts.
        assignments = [f"VAR {chain[0]} = {value}"]
        assignments += [f"VAR {name} = VAR {before} " for before, name in pairwise(chain)]
        context = " ".join(insert([f"{NOISE}\n"] * size, assignments, random))
        return TEMPLATE.format(context=context, value=value, count=len(chain)), tuple(chain)

    def score(self, question: Question, said: str) -> float:
        """The share of the names that occur."""
        return share_found(question.references, said)
