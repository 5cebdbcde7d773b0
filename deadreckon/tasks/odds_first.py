"""Odds first: output every other digit, starting with the second, then the remaining ones.

    012345=135024.

Only tokens after = are scored, including the end token. The length is the number of digits, drawn uniformly from
0..V−1. (The PRISM paper, table 3: trained up to length 40. It calls positions odd counting from 1, but its example,
which is followed here, starts with those that are odd counting from 0. V is not given: ten, as in the other tasks.)
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
        digits: V, the number of different digits, 2 to 10.
    """

    digits: int = 10
    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 10:
            raise ValueError(f"digits: expected 2 to 10, got {self.digits}")

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and their labels."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        digits = task.draw_digits(lengths, generator, base=self.digits)
        return task.complete(digits, answer(digits))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(digits: Tensor) -> Tensor:
    """The answers to rows of digits (count, longest), which may have holes at their ends."""
    return torch.cat([digits[:, 1::2], digits[:, ::2]], dim=1)
