"""BABILong: a question about a few facts that are scattered among the sentences of a book.

    Facts about people, places and things are scattered in a text. Answer the question by these facts alone, in one
    word.

    Text: Mary moved to the garden. John went to the kitchen.
    Question: Where is Mary?
    Answer: garden.

    … a second example …

    Text: It was the best of times, it was the worst of times. John travelled to the hallway. It was the age of wisdom …
    Mary journeyed to the bathroom. …
    Question: Where is John?
    Answer:                                                                                       -> hallway.

Facts and questions are bAbI's (Weston et al. 2015), qa1 to qa5: one, two or three supporting facts, relations of two
and three arguments. The facts of a question keep their order, each at a random position between consecutive sentences
of a book, from a random one on. The size is the number of these sentences. Correct if the target, and none of the
task's other answers except those in the question, occurs in the first sentence of the answer. (Kuratov et al. 2024. The
prompt's wording is ours, as is the choice of sentences, six words or more, and of stories, up to 32 facts, 12 in
examples.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from deadreckon.tasks.long.question import Question
from deadreckon.tasks.text import read_documents

INSTRUCTION = (
    "Facts about people, places and things are scattered in a text. Answer the question by these facts alone, in one "
    "word."
)
EXAMPLES = 2
SHORTEST = 6  # words of a sentence
PARTS = ("train", "test")
TESTED = 5  # one in so many stories and sentences is in the test split
MOST_FACTS = 32  # of a question
EXAMPLE_FACTS = 12
SENTENCE = re.compile(  # the blank after a sentence: not after an abbreviation or initial, and before a capital
    r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)\s+(?=[\"'“‘(]*[A-Z])"
)


class Story(NamedTuple):
    """A question of bAbI, the facts before it and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True, eq=False)
class BabiLong:
    """One of bAbI's tasks among sentences of books.

    Args:
        stories: to draw questions from.
        examples: stories to draw the two examples from.
        sentences: of books, in order.
    """

    stories: Sequence[Story]
    examples: Sequence[Story]
    sentences: Sequence[str] = field(repr=False)
    new_tokens: int = 20
    least: int = 0

    @property
    def most(self) -> int:
        """All sentences, once."""
        return len(self.sentences)

    @cached_property
    def labels(self) -> set[str]:
        """The answers that occur in this task, in lower case."""
        return {story.answer.lower() for story in (*self.stories, *self.examples)}

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """A story, scattered in a book."""
        story = self.stories[random.randrange(len(self.stories))]
        shots = [
            _show(" ".join(shot.facts), shot, f" {shot.answer}.") for shot in random.sample(self.examples, EXAMPLES)
        ]
        start = random.randrange(len(self.sentences))
        places = sorted(random.random() for _ in story.facts)
        book = [self.sentences[(start + number) % len(self.sentences)] for number in range(size)]
        mixed, done = [], 0
        for share, fact in zip(places, story.facts, strict=True):
            place = int(share * (size + 1))
            mixed += [*book[done:place], fact]
            done = place
        text = " ".join(mixed + book[done:])
        prompt = "\n\n".join([INSTRUCTION, *shots, _show(text, story, "")])
        return Question(prompt, f" {story.answer}.", (story.answer,), asked=story.question)

    def score(self, question: Question, said: str) -> float:
        """1 if the target, and no other label, is in the first sentence."""
        first = said.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
        named = {label for label in self.labels if label in first and label not in question.asked.lower()}
        return float(named == {question.references[0].lower()})


def _show(text: str, story: Story, answer: str) -> str:
    return f"Text: {text}\nQuestion: {story.question}\nAnswer:{answer}"


def read_babilong(babi: str | Path, books: str | Path, part: str = "test") -> dict[str, BabiLong]:
    """bAbI's tasks by name, such as qa1, among sentences of books.

    Args:
        babi: a file of JSON lines with bAbI's own lines in "text" and the name of their task in "task".
        books: see :func:`deadreckon.tasks.text.read_documents`.
        part: the split of stories: every fifth ("test"), or the others ("train"), from which examples are always drawn;
            and of sentences: the last fifth, or the others.
    """
    if part not in PARTS:
        raise ValueError(f"part: expected one of {', '.join(PARTS)}; got {part!r}")
    sentences, tasks = _sentences(str(books)), {}
    border = len(sentences) - len(sentences) // TESTED
    sentences = sentences[border:] if part == "test" else sentences[:border]
    for name, text in zip(read_documents(babi, "task"), read_documents(babi, "text"), strict=True):
        groups = parse_stories(text)
        train = [story for number, stories in enumerate(groups) if number % TESTED for story in stories]
        test = [story for stories in groups[::TESTED] for story in stories]
        examples = [story for story in train if len(story.facts) <= EXAMPLE_FACTS]
        asked = [story for story in (test if part == "test" else train) if len(story.facts) <= MOST_FACTS]
        if len(examples) < EXAMPLES or not asked:
            raise ValueError(f"babi: expected more than {len(groups)} stories of {name}, or shorter ones, in {babi}")
        tasks[name] = BabiLong(asked, examples, sentences)
    return tasks


def parse_stories(text: str) -> list[list[Story]]:
    """Parses bAbI's lines: for each story its questions, each with all facts before it.

    A line is "3 Where is John? <tab>hallway<tab>1", or without tabs a fact; a story starts with number 1.
    """
    stories: list[list[Story]] = []
    facts: list[str] = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        number, _, rest = line.partition(" ")
        words = rest.split("\t")
        if not number.isdigit() or len(words) not in (1, 3):
            raise ValueError(f"babi: expected a number and a fact, or a question, answer and places, got {line!r}")
        if number == "1":
            stories.append([])
            facts = []
        if len(words) == 1:
            facts.append(rest.strip())
        else:
            stories[-1].append(Story(tuple(facts), words[0].strip(), words[1].strip()))
    return stories


@lru_cache(maxsize=2)
def _sentences(books: str) -> tuple[str, ...]:
    """All sentences of books that are long enough, in order."""
    sentences = (" ".join(sentence.split()) for book in read_documents(books) for sentence in SENTENCE.split(book))
    long_enough = tuple(sentence for sentence in sentences if sentence.count(" ") >= SHORTEST - 1)
    if len(long_enough) < TESTED:
        raise ValueError(
            f"books: expected {TESTED} sentences or more of {SHORTEST} words or more, got {len(long_enough)} in {books}"
        )
    return long_enough
