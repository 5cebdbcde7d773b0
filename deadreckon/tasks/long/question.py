"""The interface of long-context tasks: a question about as much text as a length allows, answered by generation.

A task generates prompts of any size, in its own units (lines, sentences, words). `fit` finds the largest size at which
prompt and answer fit into a length in tokens, with any tokenizer:

    |<-------------------- length -------------------->|
    | instruction | haystack, `size` units | question  | answer, up to `new_tokens` |

The same seed, length and number give the same question; a larger size gives the same question in more text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Question:
    """One prompt and its answer.

    Attributes:
        prompt: everything that a model reads.
        answer: the expected continuation, with its leading blank.
        references: the strings that the score looks for.
        asked: the question alone, if the score depends on it.
        depth: relative position of the answer in the text, from 0 to 1, or None.
    """

    prompt: str
    answer: str
    references: tuple[str, ...]
    asked: str = ""
    depth: float | None = None


class LongTask(Protocol):
    """The interface of the suite's tasks."""

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens to generate for an answer."""

    @property
    def least(self) -> int:
        """The smallest size."""

    @property
    def most(self) -> int | None:
        """The largest size, or None."""

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """A question by its number, in text of a given size.

        Args:
            number: index of the question; tasks with a grid, such as depths, cycle through it.
            length: target length in tokens, for tasks whose rules depend on it.
            size: amount of text, in the task's own units.
            random: freshly seeded, with the same seed for every size.
        """

    def score(self, question: Question, said: str) -> float:
        """The score of a generated answer, from 0 to 1, by the metric of the task's authors."""


@dataclass(frozen=True)
class Fitted:
    """A question at the largest size that fits into a length."""

    question: Question
    size: int
    tokens: int  # of the prompt


def fit(
    task: LongTask, number: int, length: int, count: Callable[[str], int], seed: int = 0, near: int | None = None
) -> Fitted:
    """The question at the largest size at which its prompt and `new_tokens` fit into `length` tokens.

    Args:
        count: counts the tokens of a prompt.
        near: a size to try first, such as that of the previous question.

    Raises:
        ValueError: if the smallest prompt is too long, or all of the task's text is too short.
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
    """Raises a ValueError if the first question of one of the tasks does not fit into a length at its least size."""
    for name, task in tasks.items():
        least = count(draw(task, 0, length, task.least).prompt) + task.new_tokens
        if least > length:
            raise ValueError(f"lengths: expected at least {least} tokens for {name}, got {length}")


def draw(task: LongTask, number: int, length: int, size: int, seed: int = 0) -> Question:
    """A question by number and size; sizes differ only in the amount of text."""
    return task.ask(number, length, size, Random(f"{type(task).__name__} {seed} {number}"))


def share_found(references: tuple[str, ...], said: str) -> float:
    """RULER's score: the share of the strings that occur in the answer, case-insensitively."""
    return sum(reference.lower() in said.lower() for reference in references) / len(references)


def insert(lines: list[str], needles: list[str], random: Random) -> list[str]:
    """Inserts needles before randomly chosen different lines, in order."""
    places = sorted(random.sample(range(len(lines)), len(needles)))
    mixed, done = [], 0
    for place, needle in zip(places, needles, strict=True):
        mixed += [*lines[done:place], needle]
        done = place
    return mixed + lines[done:]
