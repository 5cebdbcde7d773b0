"""Questions of the long-context suite as rows to train on: a prompt, its answer and the end, of which the prompt is not
scored.

    A special magic number is hidden … is: 7182818. … mentioned in the provided text is 7182818.<|end|>
                                                                                       ^^^^^^^^^^^^^^^^ scored

Each row is of one task, each task alike, and has as many tokens as its length or a little fewer. Sizes come from the
tokens that a unit of a task has on average, and shrink where that was too much: exact fits (`question.fit`) would cost
a training loop more time.
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

MOST_TRIES = 100  # questions of a row that do not fit, before it is said
MEASURED = 64  # units more than the least, to measure what a unit takes


class Scale(NamedTuple):
    """Tokens of a row at the least size, and of every unit more."""

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
        tokenizer: with the end of documents in it.
    """

    tasks: dict[str, LongTask]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def document_end(self) -> int:
        """What `task.draw` packs at, and rows end in."""
        return end_of(self.tokenizer)

    @cached_property
    def lengths(self) -> Sequence[int]:
        """From the shortest row of the task that needs least."""
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
        """Rows of at most their lengths, and their answers."""
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
                else:  # a question that is longer than others: take another
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
        """Tokens of prompts and of answers with their ends."""
        asked = [draw(self.tasks[one.name], one.number, one.length, one.size) for one in plans]
        texts = [text for question in asked for text in (question.prompt, question.answer)]
        ids = [encoded.ids for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        return [(prompt, [*answer, self.document_end]) for prompt, answer in zip(ids[::2], ids[1::2], strict=True)]

    def spell(self, tokens: Tensor) -> str:
        """The text, its end included."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
