"""Stack manipulation: what is left of a stack of bits after pops and pushes.

    0110422=11020000.

Left of = stand the bits of the stack, the lowest first, then actions: 2 pops, 3 pushes a 0, 4 pushes a 1. Right of it
stands the stack that results, the highest bit first, then 2, then zeros, so that there is one digit more than left of
=. Only what is right of = is scored, the end included. Its length is the number of bits and actions together. (The
PRISM paper, table 3: trained up to length 40. How rows are drawn, it does not say; here as in the benchmark it takes
the task from, Delétang et al. 2023: 1 to length − 1 bits, each number alike, then actions, each of the three alike;
popping an empty stack does nothing. At length 1 there is one bit and no action.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task

POP = STOP = 2


@dataclass(frozen=True)
class Stack:
    """The task; see above."""

    vocab_size: int = task.VOCAB_SIZE
    lengths: Sequence[int] = range(1, task.ENDLESS)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows and what is scored in them."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        bits = task.draw_digits(lengths, generator, base=2)
        actions = torch.randint(POP, 5, bits.shape, generator=generator)
        height = 1 + (torch.rand(count, generator=generator) * (lengths - 1)).long()
        acts = (torch.arange(bits.shape[1]) >= height[:, None]) & (bits != task.HOLE)
        question = torch.where(acts, actions, bits)
        return task.complete(question, answer(question))

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


def answer(question: Tensor) -> Tensor:
    """What is to be said to rows of bits and actions (count, longest), which may have holes at their ends.

    Bits push themselves, so a row is a walk of the stack's height, up and down by one, that does not go below zero:
    the sum of its steps less its lowest point. At each level lies what was pushed there last.
    """
    there = question != task.HOLE
    pushes = there & (question != POP)
    walk = (pushes.long() - (there & ~pushes).long()).cumsum(1)
    heights = walk - walk.cummin(1).values.clamp(max=0)
    times = torch.arange(question.shape[1]).expand_as(question)
    levels = torch.where(pushes, heights - 1, question.shape[1])  # what is no push goes to one level more
    pushed = torch.zeros(len(question), question.shape[1] + 1, dtype=torch.long)
    pushed = pushed.scatter_reduce(1, levels, times, "amax")[:, :-1]
    bits = question.gather(1, pushed) % 3  # 0 and 1 are themselves, 3 and 4 push them
    stack = torch.where(times < heights[:, -1:], bits, task.HOLE).flip(1)
    zeros = torch.where(times < there.sum(1, keepdim=True) - heights[:, -1:], 0, task.HOLE)
    return torch.cat([stack, task.column(question, STOP), zeros], dim=1)
