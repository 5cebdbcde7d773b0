"""A mixture of text and questions: a share of the rows is filled with questions and their answers.

    A special magic number … is 7182818.<|end|>Nora Becker: 7351942680 … Ivan Shah: 9120457713<|end|>Call me Ish…
    └── a question: its answer is scored ─────┘└── another, and so on ──────────────────────────────┘└── text ───

The model is trained on text, and learns the format of questions: without that a small model cannot answer any. Any two
tasks with the same vocabulary can be mixed, if the length of a question is its number of tokens. After a question the
next one follows, of any length that fits, so that half of the first are longer than half a row and most are short. The
rest of the row, where none fits, is text. Packed, questions do not see each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks.task import Task


@dataclass(frozen=True)
class Mixture:
    """The task.

    Args:
        text: the task that all rows are drawn from first.
        questions: the task that a share of rows is filled with.
        share: of rows that are filled with questions, from 0 to 1.
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
        """The token after which `task.draw` starts a new document, if the text is packed."""
        return getattr(self.text, "document_end", None)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of the text, some of them filled with questions."""
        tokens, labels = self.text.sample(count, length, generator)
        width, offered = tokens.shape[1], self.questions.lengths
        shortest = offered[0]
        if self.share and shortest > width:
            raise ValueError(f"length: expected {shortest} tokens or more, the shortest question's, got {width}")
        for row in (torch.rand(count, generator=generator) < self.share).nonzero().flatten().tolist():
            start = 0
            while (room := width - start) >= shortest:
                fitting = bisect_right(offered, room)
                wanted = offered[int(torch.randint(0, fitting, (1,), generator=generator))]
                asked, answers = self.questions.sample(1, wanted, generator)
                end = start + asked.shape[1]
                if end > width:
                    raise ValueError(
                        f"questions: expected lengths in tokens, at most {room} here, got {asked.shape[1]} tokens"
                    )
                tokens[row, start:end], labels[row, start:end] = asked[0], answers[0]
                start = end
        return tokens, labels

    def spell(self, tokens: Tensor) -> str:
        """One row, as the text spells it."""
        return self.text.spell(tokens)
