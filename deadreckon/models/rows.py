"""A batch whose rows have seen different numbers of tokens: masks with holes, while a KV cache is in use.

A masked token is left out. Before a row's first real token that costs nothing: in the first piece masked tokens are
moved there (`masked_first`), and the row is one with padding on the left. In a later piece it means that rows go on by
different numbers of tokens: from then on each has a state of its own, as it would have alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadreckon.models.state import LayerState, Origin
from deadreckon.ops.streaming.past import check_crop


def masked_first(real: Tensor) -> Tensor:
    """The order (B, T) in which masked tokens come first, and real ones stay in theirs."""
    return real.int().argsort(dim=1, stable=True)


@dataclass
class Rows:
    """One layer's states of sequences of different lengths; what `cache.StateLayer` needs of a `LayerState`.

    Attributes:
        states: one for each row, of batch size 1.
        real: (B, tokens) on the CPU: which tokens were real, so that `crop` knows how many of each row to undo.
    """

    states: list[LayerState]
    real: Tensor

    @classmethod
    def of(cls, state: LayerState) -> Rows:
        """A state, row by row. Tokens that were left out before count as real: the row's own state knows of them."""
        states = [state.select(torch.tensor([row])) for row in range(state.batch)]
        return cls(states, torch.ones(state.batch, state.length, dtype=torch.bool))

    @property
    def length(self) -> int:
        """Tokens so far, masked ones included."""
        return self.real.shape[1]

    @property
    def batch(self) -> int:
        """The batch size."""
        return len(self.states)

    @property
    def origin(self) -> Origin | None:
        """The layer and the inputs of a row that has seen tokens."""
        return next((state.origin for state in self.states if state.origin is not None), None)

    def draft(self) -> Rows:
        """A copy to advance."""
        return replace(self, states=[state.draft() for state in self.states])

    def advance(self, real: Tensor) -> None:
        """Counts the tokens of a piece, (B, T)."""
        self.real = torch.cat([self.real, real.cpu()], dim=1)

    def select(self, rows: Tensor) -> Rows:
        """These rows in this order, with repetitions."""
        chosen = rows.tolist()
        return Rows([self.states[row].fork() for row in chosen], self.real[chosen])

    def to(self, device: torch.device | str) -> Rows:
        """The states on another device."""
        return replace(self, states=[state.to(device) for state in self.states])

    def crop(self, tokens: int) -> None:
        """Undoes the last tokens, masked ones included: of each row those that were real."""
        check_crop(tokens, self.length, self.length)
        left = self.length - tokens
        undone = self.real[:, left:].sum(1).tolist()
        for state, count in zip(self.states, undone, strict=True):  # all of them, or none
            check_crop(count, state.length, state.croppable)
        for state, count in zip(self.states, undone, strict=True):
            state.crop(count)
        self.real = self.real[:, :left]
