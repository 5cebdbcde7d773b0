"""Dynamic string copy: copy a row of digits, starting from a given digit.

    5839472,3=39472.

The digit after the comma occurs exactly once in the row. Only tokens after = are scored, including the end token. The
length is the number of digits in the row; the start of the copy is drawn uniformly. (The PRISM paper, table 4, there
dyn_str_cpy: trained up to length 5 and up to 10. The paper does not say how the rest is drawn: here the digit is any of
ten, all others any of the other nine, so that leading zeros occur.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task


@dataclass(frozen=True)
class DynamicCopy:
    """The task; see above."""

    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and their labels."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        first = torch.randint(0, 10, (count, 1), generator=generator)
        start = (torch.rand(count, 1, generator=generator) * lengths[:, None]).long()
        others = task.draw_digits(lengths, generator, base=9)
        digits = (others + (others >= first)).scatter(1, start, first)  # skips the digit that is to occur once
        question = torch.cat([digits, task.column(digits, task.TOKEN[","]), first], dim=1)
        return task.complete(question, answer(digits, first))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(digits: Tensor, first: Tensor) -> Tensor:
    """The answers to rows (count, longest), which may have holes, and the digit to start from (count, 1)."""
    begun = (digits == first).cumsum(1) > 0
    return torch.where(begun, digits, task.HOLE)
