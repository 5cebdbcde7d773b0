"""Flip-flop language modelling: remember one bit, through any number of distractions.

A sequence is (instruction, bit) pairs. ``w`` writes its bit to memory, ``i`` carries a bit to be ignored, and after
``r`` comes the bit that was written last; only these bits are scored. The first instruction is w, the last r.

    w 1 i 0 i 0 r 1 w 0 i 1 r 0
                  ^           ^

Instructions between are drawn independently: i with probability `ignore`, w and r with half of the rest each. Models
are trained at 0.8 and tested there, at 0.98 (sparse: the write is far away) and at 0.1 (dense: memory changes often).
(Liu et al. 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WRITE, READ, IGNORE, ZERO, ONE = range(5)
SYMBOLS = "wri01"
NOT_SCORED = -100  # what Hugging Face's loss leaves out


@dataclass(frozen=True)
class FlipFlop:
    """The task at one density of distractions.

    Args:
        ignore: probability of the instruction i.
    """

    ignore: float = 0.8
    vocab_size: int = len(SYMBOLS)

    def __post_init__(self) -> None:
        if not 0 <= self.ignore <= 1:
            raise ValueError(f"ignore: expected a probability, got {self.ignore!r}")

    def sample(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sequences and what is scored in them.

        Returns:
            tokens (count, length), and labels alike: the bit after each r where it stands, NOT_SCORED elsewhere.
        """
        if length < 4 or length % 2:
            raise ValueError(f"length: expected an even number of 4 or more tokens, got {length}")
        pairs = length // 2
        drawn = torch.rand(count, pairs, generator=generator)
        written = (1 - self.ignore) / 2
        instructions = torch.full((count, pairs), IGNORE)
        instructions[drawn < 2 * written] = READ
        instructions[drawn < written] = WRITE
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        bits = torch.randint(0, 2, (count, pairs), generator=generator)
        # The pair of the last write at or before each pair; the first pair always writes.
        place = torch.arange(pairs).expand(count, pairs)
        last_write = torch.where(instructions == WRITE, place, 0).cummax(dim=1).values
        reads = instructions == READ
        bits = torch.where(reads, bits.gather(1, last_write), bits)
        tokens = torch.stack([instructions, bits + ZERO], dim=2).flatten(1)
        scored = torch.stack([torch.zeros_like(reads), reads], dim=2).flatten(1)
        return tokens, torch.where(scored, tokens, NOT_SCORED)


def spell(tokens: Tensor) -> str:
    """One sequence as symbols, for people."""
    return " ".join(SYMBOLS[token] for token in tokens.tolist())
