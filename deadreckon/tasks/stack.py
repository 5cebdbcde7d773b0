"""Stack manipulation: the contents of a stack of bits after pops and pushes.

    0110422=11020000.

Before = are the bits of the stack, bottom first, then actions: 2 pops, 3 pushes a 0, 4 pushes a 1. After it is the
resulting stack, top first, then 2, then zeros, one digit more in all than before =. Only tokens after = are scored,
including the end token. The length is the number of bits and actions together. (The PRISM paper, table 3: trained up to
length 40. How rows are drawn, it does not say; here as in the benchmark it takes the task from, Delétang et al. 2023:
1 to length − 1 bits, uniformly, then uniform actions; popping an empty stack does nothing. At length 1 there is one bit
and no action.)
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
        """Rows and their labels."""
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
    """The answers to rows of bits and actions (count, longest), which may have holes at their ends.

    Bits push themselves, so the stack's height goes up and down by one, reflected at zero: the running sum of its
    steps, less its running minimum (at most 0). Each level holds what was pushed there last.
    """
    there = question != task.HOLE
    pushes = there & (question != POP)
    walk = (pushes.long() - (there & ~pushes).long()).cumsum(1)
    heights = walk - walk.cummin(1).values.clamp(max=0)
    times = torch.arange(question.shape[1]).expand_as(question)
    levels = torch.where(pushes, heights - 1, question.shape[1])  # what is not a push goes to an extra level
    pushed = torch.zeros(len(question), question.shape[1] + 1, dtype=torch.long)
    pushed = pushed.scatter_reduce(1, levels, times, "amax")[:, :-1]
    bits = question.gather(1, pushed) % 3  # 0 and 1 are themselves, 3 and 4 push them
    stack = torch.where(times < heights[:, -1:], bits, task.HOLE).flip(1)
    zeros = torch.where(times < there.sum(1, keepdim=True) - heights[:, -1:], 0, task.HOLE)
    return torch.cat([stack, task.column(question, STOP), zeros], dim=1)
