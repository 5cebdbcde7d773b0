"""Reverse: output a row of digits in reverse order.

    8349216=6129438.

Only tokens after = are scored, including the end token. The length is the number of digits, drawn uniformly from ten,
leading zeros allowed. (The PRISM paper, table 3: trained up to length 40.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task


@dataclass(frozen=True)
class Reverse:
    """The task; see above."""

    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and their labels."""
        digits = task.draw_digits(task.draw_lengths(count, length, self.lengths, generator), generator)
        return task.complete(digits, answer(digits))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(digits: Tensor) -> Tensor:
    """The answers to rows of digits (count, longest), which may have holes."""
    return digits.flip(1)
