"""Multiplication with a chain of thought: the second number is decomposed, the product is not required.

    675x1259=675x[1*(1→1)(2→0)(5→0)(9→0)+2*(2→1)(5→0)(9→0)+5*(5→1)(9→0)+9*(9→1)].

Each term is a digit times its place value: the digit itself is mapped to 1, those right of it to 0, which is
1·1000 + 2·100 + 5·10 + 9·1. Only tokens after = are scored, including the end token. The length is the number of digits
of the longer number. (The PRISM paper, table 4: trained up to length 9, tested with numbers of equal length, n×n. What
it does not say is chosen so: no number of more than one digit has a leading zero; a digit 0 has its term like any
other; either number, at random, is the longer, the other has 1 to as many digits, uniformly, or as many if `equal`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task


@dataclass(frozen=True)
class Multiplication:
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
        one, other = (number.flip(1) for number in task.draw_operands(lengths, self.equal, generator))
        question = torch.cat([one, task.column(one, task.TOKEN["x"]), other], dim=1)
        return task.complete(question, answer(one, other))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(one: Tensor, other: Tensor) -> Tensor:
    """The answers to two numbers per row (count, digits), most significant digit first, after holes."""
    count, width = other.shape
    there = other != task.HOLE
    maps = torch.empty(count, width, width, 5, dtype=torch.long)  # (count, term, digit mapped, its five tokens)
    maps[..., 0], maps[..., 2], maps[..., 4] = (task.TOKEN[mark] for mark in "(→)")
    maps[..., 1] = other[:, None, :]
    maps[..., 3] = torch.eye(width, dtype=torch.long)
    from_term_on = torch.ones(width, width, dtype=torch.bool).triu()
    maps = torch.where((from_term_on & there[:, :, None])[..., None], maps, task.HOLE)
    plus = torch.where(there.cumsum(1) > 1, task.TOKEN["+"], task.HOLE)
    times = torch.where(there, task.TOKEN["*"], task.HOLE)
    terms = torch.cat([torch.stack([plus, other, times], dim=2), maps.flatten(2)], dim=2)  # (count, term, tokens)
    opening, closing = (task.encode(text).expand(count, -1) for text in ("x[", "]"))
    return torch.cat([one, opening, terms.flatten(1), closing], dim=1)
