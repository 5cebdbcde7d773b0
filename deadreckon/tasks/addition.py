"""Addition with a chain of thought: digit by digit, with carries, then the sum.

    829+03=8008,2305,9009→859.

That is 928 + 30 = 958: numbers are written with the least significant digit first. Each step between commas is a digit
of either number, the carry out and a digit of the sum. Only tokens after = are scored, including the end token. The
length is the number of digits of the longer number. (The PRISM paper, table 3: trained up to length 10. What it does
not say is chosen so: a number that has run out of digits adds 0; there is a step for each digit of the longer number
and none for a last carry, which only leads the sum; either number, at random, is the longer, the other has 1 to as many
digits, uniformly; no number of more than one digit has a leading zero.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task


@dataclass(frozen=True)
class Addition:
    """The task; see above.

    Args:
        equal: whether both numbers have the same number of digits.
    """

    equal: bool = False
    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and their labels."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        one, other = task.draw_operands(lengths, self.equal, generator)
        question = torch.cat([one, task.column(one, task.TOKEN["+"]), other], dim=1)
        return task.complete(question, answer(one, other))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(one: Tensor, other: Tensor) -> Tensor:
    """The answers to two numbers per row (count, digits), least significant digit first, then holes."""
    width = max(one.shape[1], other.shape[1])
    one, other = (
        torch.nn.functional.pad(number, (0, width - number.shape[1]), value=task.HOLE) for number in (one, other)
    )
    there = (one != task.HOLE) | (other != task.HOLE)
    one, other = one.clamp(min=0), other.clamp(min=0)
    sums = one + other
    # A digit sum of 9 propagates the incoming carry, any other sum decides it: find the last position that decided.
    places = torch.arange(width).expand_as(sums)
    decided = torch.where(sums != 9, places, 0).cummax(1).values
    carries = (sums.gather(1, decided) > 9).long()
    digits = (sums + torch.nn.functional.pad(carries, (1, 0))[:, :-1]) % 10
    last = places == there.sum(1, keepdim=True) - 1
    commas = torch.where(last, task.HOLE, task.TOKEN[","])
    steps = torch.stack([one, other, carries, digits, commas], dim=2)  # (count, digits, 5)
    steps = torch.where(there[:, :, None], steps, task.HOLE)
    leading = torch.where((last & (carries == 1)).any(1, keepdim=True), 1, task.HOLE)
    digits = torch.where(there, digits, task.HOLE)
    return torch.cat([steps.flatten(1), task.column(one, task.TOKEN["→"]), digits, leading], dim=1)
