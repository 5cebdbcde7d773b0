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
from deadreckon.ops.tracing import traced

GROWN = "_deadreckon_grown"  # attribute of a mask that `generate()` made from one that was checked, by adding ones


def mark_grown(mask: Tensor, checked: int) -> None:
    """Says that a mask's columns from `checked` on are ones, and that those before have been checked."""
    setattr(mask, GROWN, checked)


def masked_first(real: Tensor) -> Tensor:
    """The order (B, T) in which masked tokens come first, and real ones stay in theirs."""
    return real.int().argsort(dim=1, stable=True)


def carried(x: Tensor, real: Tensor) -> Tensor:
    """Hidden states (B, T, D) that are zero where tokens are masked: there, those of the row's last real token before.

    So what `generate()` adds to a prompt that ends with masked tokens follows the last real one.
    """
    places = torch.arange(real.shape[1], device=real.device).masked_fill(~real, 0).cummax(1).values
    return x.gather(1, places.unsqueeze(-1).expand_as(x))


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
    def of(cls, state: LayerState, real: Tensor) -> Rows:
        """A state, row by row; of its tokens these were real, (B, tokens)."""
        states = [state.select(torch.tensor([row])) for row in range(state.batch)]
        return cls(states, real.cpu())

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


def checked(mask: Tensor) -> Tensor:
    """Which tokens of a mask are real; it must have ones for these, and zeros."""
    real = mask.bool()
    if not traced(real) and mask.dtype != torch.bool and bool(((mask != 1) & real).any()):
        other = mask[(mask != 1) & real][0].item()
        raise ValueError(f"attention_mask: expected 1 for tokens and 0 for padding, got {other}")
    return real


def padding(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Which tokens of x (B, T, ...) are real, (B, T), or None where all are known to be."""
    if mask is None:
        return None
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask: expected (B, T) = {tuple(x.shape[:2])} with 0 for padding, got {tuple(mask.shape)}"
        )
    real = checked(mask)
    if traced(real):
        return real
    if not bool(real.any()):
        raise ValueError("attention_mask: expected a token that is not padding, got zeros alone")
    return None if bool(real.all()) else real


def real_tokens(mask: Tensor | None, state: LayerState | Rows, batch: int, length: int) -> Tensor | None:
    """Which of the new tokens (B, T) are real, or None where all are."""
    seen, left_out = state.length, state.left_out if isinstance(state, LayerState) else None
    if mask is None:
        if left_out is not None:
            raise ValueError("attention_mask: expected that of past and new tokens, some of them masked, got None")
        return None
    expected = (batch, seen + length)
    if mask.shape != expected:
        raise ValueError(f"attention_mask: expected (B, past and new tokens) = {expected}, got {tuple(mask.shape)}")
    if seen and getattr(mask, GROWN, None) == seen:
        return None
    real = checked(mask)
    if seen and isinstance(state, LayerState):
        masked = (~real[:, :seen]).sum(1)
        before = torch.zeros_like(masked) if left_out is None else left_out
        if not torch.equal(masked, before):  # a finished row's padding, say, which `generate()` gives it as real tokens
            raise ValueError(
                "attention_mask: expected as many masked tokens a row as past_key_values has left out, "
                f"{before.tolist()}; what it has read stays, got {masked.tolist()}"
            )
    if seen and isinstance(state, Rows) and not torch.equal(real[:, :seen].cpu(), state.real):
        raise ValueError(
            "attention_mask: expected the tokens masked that past_key_values has left out; what it has read stays, got "
            f"others in rows {(real[:, :seen].cpu() != state.real).any(1).nonzero().flatten().tolist()}"
        )
    return None if bool(real[:, seen:].all()) else real[:, seen:]


def begins_later(real: Tensor, state: LayerState) -> bool:
    """Whether all new tokens (B, T) that are masked are of rows without a real token so far."""
    began = torch.full_like(real[:, 0], state.length > 0) if state.left_out is None else state.left_out < state.length
    return not bool((began & ~real.all(1)).any())
