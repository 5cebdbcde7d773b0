"""Training rows from the long-context suite: a prompt, its answer and the end token; the prompt is not scored.

    A special magic number is hidden … is: 7182818. … mentioned in the provided text is 7182818.<|end|>
                                                                                       ^^^^^^^^^^^^^^^^ scored

Each row is of one task, drawn uniformly from those that fit, and has as many tokens as its length or a few less. Sizes
are estimated from the average number of tokens per unit of a task, and reduced if the row is too long: exact fits
(`question.fit`) would slow training down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deadreckon.tasks import task
from deadreckon.tasks.long.question import LongTask, draw
from deadreckon.tasks.tokens import end_of

MOST_TRIES = 100  # questions per row that do not fit, before an error is raised
MEASURED = 64  # units above the least size, to measure tokens per unit


class Scale(NamedTuple):
    """Tokens of a row at the least size, and of each additional unit."""

    base: int
    unit: float


class Plan(NamedTuple):
    """A question before it is drawn."""

    name: str
    number: int
    length: int
    size: int


@dataclass(frozen=True, eq=False)
class Questions:
    """The task.

    Args:
        tasks: of the suite, by name.
        tokenizer: one with an end-of-document token.
    """

    tasks: dict[str, LongTask]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def document_end(self) -> int:
        """The token that rows end in, after which `task.draw` starts a new document."""
        return end_of(self.tokenizer)

    @cached_property
    def lengths(self) -> Sequence[int]:
        """From the shortest row of any task."""
        return range(min(scale.base for scale in self._scales.values()), task.ENDLESS)

    @cached_property
    def _scales(self) -> dict[str, Scale]:
        scales = {}
        for name, one in self.tasks.items():
            small = max(sum(map(len, self._encode([Plan(name, number, 0, one.least)])[0])) for number in range(4))
            large = sum(map(len, self._encode([Plan(name, 0, 0, one.least + MEASURED)])[0]))
            scales[name] = Scale(small, max(1.0, (large - small) / MEASURED))
        return scales

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of at most their lengths, and labels for their answers."""
        lengths = task.draw_lengths(count, length, self.lengths, generator).tolist()
        random = Random(int(torch.randint(0, 1 << 62, (1,), generator=generator)))
        rows: list[tuple[list[int], list[int]]] = [([], [])] * count
        plans, tries = {row: self._plan(wanted, random) for row, wanted in enumerate(lengths)}, 0
        while plans:
            drawn = dict(zip(plans, self._encode(list(plans.values())), strict=True))
            for row, (prompt, answer) in drawn.items():
                plan, whole = plans.pop(row), len(prompt) + len(answer)
                if whole <= plan.length:
                    rows[row] = prompt, answer
                elif (least := self.tasks[plan.name].least) < plan.size:
                    size = least + int(0.95 * (plan.size - least) * plan.length / whole)
                    plans[row] = plan._replace(size=size)
                else:  # too long even at the least size: take another question
                    plans[row], tries = self._plan(plan.length, random), tries + 1
                    if tries > MOST_TRIES * count:
                        raise ValueError(
                            f"length: expected room for a question of {plan.name}, got {plan.length} tokens"
                        )
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens, labels = torch.full((count, width), self.document_end), torch.full((count, width), task.NOT_SCORED)
        for row, (prompt, answer) in enumerate(rows):
            whole = len(prompt) + len(answer)
            tokens[row, :whole] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : whole] = torch.tensor(answer)
        return tokens, labels

    def _plan(self, length: int, random: Random) -> Plan:
        name = random.choice([name for name, scale in self._scales.items() if scale.base <= length])
        one, scale = self.tasks[name], self._scales[name]
        size = one.least + int((length - scale.base) / scale.unit)
        return Plan(name, random.getrandbits(40), length, min(size, size if one.most is None else one.most))

    def _encode(self, plans: list[Plan]) -> list[tuple[list[int], list[int]]]:
        """Tokens of prompts, and of answers with the end token."""
        asked = [draw(self.tasks[one.name], one.number, one.length, one.size) for one in plans]
        texts = [text for question in asked for text in (question.prompt, question.answer)]
        ids = [encoded.ids for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return [(prompt, [*answer, self.document_end]) for prompt, answer in zip(ids[::2], ids[1::2], strict=True)]

    def spell(self, tokens: Tensor) -> str:
        """The text, including end tokens."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
