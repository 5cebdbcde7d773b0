"""Text, and in a share of its rows first a question with its answer.

    A special magic number … is 7182818.<|end|>Call me Ishmael. Some years ago - never mind how long precisely …
    └── of the questions: answers are scored ─┘└── of the text: everything is scored ───────────────────────────

Such a model is trained on text, and learns what questions look like: without that a small model cannot be asked any.
Any two tasks of the same tokens do, if the length of a question is its number of tokens. It counts up to the last token
that is scored, and the text goes on behind it. Its length is the text's; questions have any length up to it. Packed,
neither sees the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task
from deadreckon.tasks.task import Task


@dataclass(frozen=True)
class Mixture:
    """The task.

    Args:
        text: what every row has.
        questions: what a share of rows begins with.
        share: of rows, from 0 to 1.
    """

    text: Task
    questions: Task
    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: expected 0 to 1, got {self.share}")
        if self.text.vocab_size != self.questions.vocab_size:
            raise ValueError(
                f"questions: expected as many tokens as the text has, {self.text.vocab_size}, "
                f"got {self.questions.vocab_size}"
            )

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def lengths(self) -> Sequence[int]:
        """The text's."""
        return self.text.lengths

    @property
    def document_end(self) -> int | None:
        """What `task.draw` packs at, if the text is packed."""
        return getattr(self.text, "document_end", None)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of the text, and questions at the beginning of some."""
        tokens, labels = self.text.sample(count, length, generator)
        chosen = (torch.rand(count, generator=generator) < self.share).nonzero().flatten()
        if not len(chosen):
            return tokens, labels
        shortest, longest = self.questions.lengths[0], tokens.shape[1]
        if shortest > longest:
            raise ValueError(f"length: expected {shortest} tokens or more, the shortest question's, got {longest}")
        asked, answers = self.questions.sample(len(chosen), range(shortest, longest + 1), generator)
        width = asked.shape[1]
        if width > longest:
            raise ValueError(f"questions: expected lengths in tokens, at most {longest} here, got {width} tokens")
        place = torch.arange(width)
        kept = place <= torch.where(answers != task.NOT_SCORED, place, 0).amax(1, keepdim=True)
        tokens[chosen, :width] = torch.where(kept, asked, tokens[chosen, :width])
        labels[chosen, :width] = torch.where(kept, answers, labels[chosen, :width])
        return tokens, labels

    def spell(self, tokens: Tensor) -> str:
        """One row, as the text spells it."""
        return self.text.spell(tokens)
