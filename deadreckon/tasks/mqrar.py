"""Multi-query repeated associative recall, N back (MQRAR-N): what was a key's N-th last value?

A key followed by a value is an assignment; a key followed by ? is a query. Keys are reassigned between queries.
With N = 2:

    k1 v4 k2 v7 k1 v9 k1 ? k2 v3 k1 v5 k1 ? k2 ?
                         ^                ^    ^
                         v4               v9   v7

Answers are in the labels only, not in the tokens, where they would be assignments. The length is the number of tokens,
twice that of pairs. (Yang et al. 2025, after Tan et al. 2024: N = 1 to 4, 32 keys, length 768. They specify no more.
Here keys are drawn uniformly from the same 32 in every row, so that all soon have N values; the first N pairs of a key
are assignments, and any later one is a query with probability `asking`; values are drawn uniformly from 64; the last
pair is always a query.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadreckon.tasks import task

ASK, PAD = 0, 1
FIRST_KEY = 2


@dataclass(frozen=True)
class MQRAR:
    """The task.

    Args:
        back: N; 1 asks for the last value.
        keys: number of keys.
        values: number of values.
        asking: probability that a pair is a query, once its key has had N values.
    """

    back: int = 1
    keys: int = 32
    values: int = 64
    asking: float = 0.5

    def __post_init__(self) -> None:
        for name in ("back", "keys", "values"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.keys > torch.iinfo(torch.int16).max:
            raise ValueError(f"keys: expected fewer than 32768, got {self.keys}")
        if not 0 <= self.asking <= 1:
            raise ValueError(f"asking: expected a probability, got {self.asking!r}")

    @property
    def vocab_size(self) -> int:
        return FIRST_KEY + self.keys + self.values

    @property
    def lengths(self) -> Sequence[int]:
        """Even, and long enough for one key to have been assigned N times before the last pair."""
        return range(2 * ((self.back - 1) * self.keys + 2), task.ENDLESS, 2)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows, and the target at each ?."""
        pairs = task.draw_lengths(count, length, self.lengths, generator)[:, None] // 2
        place = torch.arange(int(pairs.max())).expand(count, -1)
        keys = torch.randint(0, self.keys, place.shape, generator=generator)
        values = torch.randint(0, self.values, place.shape, generator=generator)
        asks = torch.rand(place.shape, generator=generator) < self.asking
        # The last pair queries a key that has occurred N times before it: the minimum length guarantees one.
        before = (place < pairs - 1).long()
        occurred = torch.zeros(count, self.keys, dtype=torch.long).scatter_add(1, keys, before)
        askable = torch.multinomial((occurred >= self.back).float(), 1, generator=generator)
        keys = keys.scatter(1, pairs - 1, askable)
        asks = asks.scatter(1, pairs - 1, True)
        asks, said = recall(keys, values, asks, self.back)
        there = place < pairs
        answers = torch.where(asks, ASK, FIRST_KEY + self.keys + values)
        tokens = torch.stack([FIRST_KEY + keys, answers], dim=2).flatten(1)
        labels = torch.where(asks & there, FIRST_KEY + self.keys + said, task.NOT_SCORED)
        labels = torch.stack([torch.full_like(labels, task.NOT_SCORED), labels], dim=2).flatten(1)
        return torch.where(there.repeat_interleave(2, 1), tokens, PAD), labels

    def spell(self, tokens: Tensor) -> str:
        """One row as keys, values, counted from 1, and question marks."""
        words = []
        for token in (token for token in tokens.tolist() if token != PAD):
            value = token - FIRST_KEY - self.keys
            words.append("?" if token == ASK else f"v{value + 1}" if value >= 0 else f"k{token - FIRST_KEY + 1}")
        return " ".join(words)


def recall(keys: Tensor, values: Tensor, asks: Tensor, back: int) -> tuple[Tensor, Tensor]:
    """Which pairs (count, pairs) are queries, given that the first N of a key are assignments; and their answers.

    Pairs are sorted by key, stably in time. The assignment N back from a query is then of the same key.
    """
    order = stable_order(keys)
    keys, values, asks = (x.gather(1, order) for x in (keys, values, asks))
    place = torch.arange(keys.shape[1]).expand_as(keys)
    starts = torch.cat([torch.ones_like(asks[:, :1]), keys[:, 1:] != keys[:, :-1]], dim=1)
    occurred = place - torch.where(starts, place, 0).cummax(1).values
    asks = asks & (occurred >= back)
    assigned = (~asks).cumsum(1)  # for a query: the number of assignments before it
    assignments = stable_order(asks)  # indices of assignments, in order, then those of queries
    said = values.gather(1, assignments.gather(1, (assigned - back).clamp(min=0)))
    return torch.empty_like(asks).scatter(1, order, asks), torch.empty_like(said).scatter(1, order, said)


def stable_order(keys: Tensor) -> Tensor:
    """A stable argsort (count, pairs) of keys below 2^15: NumPy sorts int16 ten times as fast as torch."""
    return torch.from_numpy(keys.to(torch.int16).numpy().argsort(axis=1, kind="stable"))
