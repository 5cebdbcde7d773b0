"""Odds first: say every other digit, beginning with the second, then those that were left out.

    012345=135024.

Only what is right of = is scored, the end included. Its length is the number of digits, each drawn from 0..V−1 alike.
(The PRISM paper, table 3: trained up to length 40. It calls the places odd counting from 1, but its example, which is
followed here, begins with those that are odd counting from 0. V is not said: ten, as for the other rows of digits.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task


@dataclass(frozen=True)
class OddsFirst:
    """The task over any number of digits.

    Args:
        digits: how many digits there are, V, 2 to 10.
    """

    digits: int = 10
    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 10:
            raise ValueError(f"digits: expected 2 to 10, got {self.digits}")

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and what is scored in them."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        digits = task.draw_digits(lengths, generator, base=self.digits)
        return task.complete(digits, answer(digits))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(digits: Tensor) -> Tensor:
    """What is to be said to rows of digits (count, longest), which may have holes at their ends."""
    return torch.cat([digits[:, 1::2], digits[:, ::2]], dim=1)
