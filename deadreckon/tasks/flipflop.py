"""Flip-flop language modelling: remember one bit, through any number of distractors.

A sequence is (instruction, bit) pairs. ``w`` writes its bit to memory, ``i`` is followed by a bit to ignore, and ``r``
by the bit that was written last; only these bits are scored. The first instruction is w, the last r.

    w 1 i 0 i 0 r 1 w 0 i 1 r 0
                  ^           ^

Instructions between are drawn independently: i with probability `ignore`, w and r with half of the rest each. Models
are trained at 0.8 and tested there, at 0.98 (sparse: the write is far away) and at 0.1 (dense: memory changes often).
The length is the number of tokens. Shorter rows are padded with i, which is not scored. (Liu et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task

WRITE, READ, IGNORE, ZERO, ONE = range(5)
SYMBOLS = "wri01"


@dataclass(frozen=True)
class FlipFlop:
    """The task at one density of distractors.

    Args:
        ignore: probability of the instruction i.
    """

    ignore: float = 0.8
    vocab_size: int = len(SYMBOLS)
    lengths: Sequence[int] = range(4, task.ENDLESS, 2)

    def __post_init__(self) -> None:
        if not 0 <= self.ignore <= 1:
            raise ValueError(f"ignore: expected a probability, got {self.ignore!r}")

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sequences and their labels: the bit after each r."""
        pairs = task.draw_lengths(count, length, self.lengths, generator)[:, None] // 2
        longest = int(pairs.max())
        drawn = torch.rand(count, longest, generator=generator)
        written = (1 - self.ignore) / 2
        instructions = torch.full((count, longest), IGNORE)
        instructions[drawn < 2 * written] = READ
        instructions[drawn < written] = WRITE
        place = torch.arange(longest).expand(count, longest)
        instructions[:, 0] = WRITE
        instructions = instructions.masked_fill(place == pairs - 1, READ).masked_fill(place >= pairs, IGNORE)
        bits = torch.randint(0, 2, (count, longest), generator=generator)
        # The pair of the last write at or before each pair; the first pair always writes.
        last_write = torch.where(instructions == WRITE, place, 0).cummax(dim=1).values
        reads = instructions == READ
        bits = torch.where(reads, bits.gather(1, last_write), bits)
        tokens = torch.stack([instructions, bits + ZERO], dim=2)
        tokens = torch.where((place < pairs)[:, :, None], tokens, IGNORE).flatten(1)
        scored = torch.stack([torch.zeros_like(reads), reads], dim=2).flatten(1)
        return tokens, torch.where(scored, tokens, task.NOT_SCORED)

    def spell(self, tokens: Tensor) -> str:
        """One sequence as symbols, without padding."""
        return " ".join(SYMBOLS[token] for token in tokens.tolist()).rstrip(" i")
