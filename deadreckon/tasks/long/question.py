"""What a long-context task is: a question behind as much text as a length allows, answered by generation.

A task asks its questions at any size, in its own units (lines, sentences, words). `fit` finds the greatest size at
which the prompt and the tokens of the answer stay within a length, in the tokens of any tokenizer:

    |<-------------------- length -------------------->|
    | instruction | haystack, `size` units | question  | answer, up to `new_tokens` |

The same seed, length and number give the same question, and a larger size the same one in more text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Question:
    """One prompt and what is to be said after it.

    Attributes:
        prompt: everything that a model reads.
        answer: what it should say then, from the blank on that comes first.
        references: the strings that the score looks for.
        asked: the question alone, where the score depends on it.
        depth: where in the text the answer stands, from 0 to 1, where that is known.
    """

    prompt: str
    answer: str
    references: tuple[str, ...]
    asked: str = ""
    depth: float | None = None


class LongTask(Protocol):
    """What a task of the suite must offer."""

    @property
    def new_tokens(self) -> int:
        """How many tokens an answer may have."""

    @property
    def least(self) -> int:
        """The smallest size."""

    @property
    def most(self) -> int | None:
        """The greatest size, where there is one."""

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """The question of that number, in text of a size.

        Args:
            number: which question; tasks with a grid, such as depths, go through it by number.
            length: what the prompt is fitted to, for tasks whose rules depend on it.
            size: how much text, in the task's own units.
            random: fresh, and the same for every size.
        """

    def score(self, question: Question, said: str) -> float:
        """How right what was generated is, from 0 to 1, by the rule of the task's authors."""


@dataclass(frozen=True)
class Fitted:
    """A question at the greatest size that a length allows."""

    question: Question
    size: int
    tokens: int  # of the prompt


def fit(
    task: LongTask, number: int, length: int, count: Callable[[str], int], seed: int = 0, near: int | None = None
) -> Fitted:
    """The question whose prompt and `new_tokens` take as much of `length` tokens as they can.

    Args:
        count: the tokens of a prompt.
        near: a size to try first, such as that of the question before.

    Raises:
        ValueError: if even the smallest prompt is too long, or all of the task's text too short.
    """
    room = length - task.new_tokens

    def measure(size: int) -> Fitted:
        question = draw(task, number, length, size, seed)
        return Fitted(question, size, count(question.prompt))

    low = measure(task.least)
    if low.tokens > room:
        raise ValueError(
            f"length: expected at least {low.tokens + task.new_tokens} tokens for {type(task).__name__}, got {length}"
        )
    high: Fitted | None = None  # too long
    first = low
    while high is None or high.size - low.size > 1:
        if high is not None:
            guess = low.size + (room - low.tokens) * (high.size - low.size) // (high.tokens - low.tokens)
            guess = min(max(guess, low.size + 1), high.size - 1)
        elif low is first:
            guess = max(near or 2 * low.size + 64, low.size + 1)
        else:  # prompts grow in proportion
            grown = max(low.tokens - first.tokens, 1)
            guess = low.size + 1 + (room - low.tokens) * (low.size - first.size) // grown
        if task.most is not None and guess > task.most:
            if low.size >= task.most:
                raise ValueError(
                    f"length: expected about {low.tokens + task.new_tokens} tokens at most, all the text that "
                    f"{type(task).__name__} has, got {length}"
                )
            guess = task.most
        tried = measure(guess)
        low, high = (tried, high) if tried.tokens <= room else (low, tried)
    return low


def check_room(tasks: Mapping[str, LongTask], length: int, count: Callable[[str], int]) -> None:
    """Raises a ValueError if a length is too short for one of the tasks, by its first question."""
    for name, task in tasks.items():
        least = count(draw(task, 0, length, task.least).prompt) + task.new_tokens
        if least > length:
            raise ValueError(f"lengths: expected at least {least} tokens for {name}, got {length}")


def draw(task: LongTask, number: int, length: int, size: int, seed: int = 0) -> Question:
    """The question of a number at a size; alike for every size but for the amount of text."""
    return task.ask(number, length, size, Random(f"{type(task).__name__} {seed} {number}"))


def share_found(references: tuple[str, ...], said: str) -> float:
    """RULER's score: the share of the strings that occur in what was said, in whatever case."""
    return sum(reference.lower() in said.lower() for reference in references) / len(references)


def insert(lines: list[str], needles: list[str], random: Random) -> list[str]:
    """Lines with needles before some of them, each before another, in their order."""
    places = sorted(random.sample(range(len(lines)), len(needles)))
    mixed, done = [], 0
    for place, needle in zip(places, needles, strict=True):
        mixed += [*lines[done:place], needle]
        done = place
    return mixed + lines[done:]
