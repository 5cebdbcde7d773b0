"""Ragged batches with a KV cache: attention masks with zeros anywhere, rows that have seen different numbers of tokens.

A masked token is left out. In the first piece masked tokens are moved to the front of their row (`masked_first`), which
makes it a row with left padding, at no cost. In a later piece rows advance by different numbers of tokens: from then on
each row has a state of its own, as if it were decoded alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadreckon.models.state import LayerState, Origin
from deadreckon.ops.streaming.past import check_crop
from deadreckon.ops.tracing import traced

GROWN = "_deadreckon_grown"  # attribute of a mask that `generate()` extended by ones after it had been checked


def mark_grown(mask: Tensor, checked: int) -> None:
    """Marks a mask: its columns from `checked` on are ones, and those before have been validated."""
    setattr(mask, GROWN, checked)


def masked_first(real: Tensor) -> Tensor:
    """Indices (B, T) that move masked tokens to the front, and keep the order of real ones."""
    return real.int().argsort(dim=1, stable=True)


def carried(x: Tensor, real: Tensor) -> Tensor:
    """Fills hidden states (B, T, D) at masked tokens with those of the last real token before them; zeros if none.

    So what `generate()` appends to a right-padded prompt follows its last real token.
    """
    places = torch.arange(real.shape[1], device=real.device).masked_fill(~real, 0).cummax(1).values
    return x.gather(1, places.unsqueeze(-1).expand_as(x))


@dataclass
class Rows:
    """One layer's states of rows of different lengths, with the methods of `LayerState` that `cache.StateLayer` needs.

    Attributes:
        states: one for each row, of batch size 1.
        real: (B, tokens) on the CPU: which tokens were real, so that `crop` knows how many of each row to undo.
    """

    states: list[LayerState]
    real: Tensor

    @classmethod
    def of(cls, state: LayerState, real: Tensor) -> Rows:
        """Splits a state into rows; `real` (B, tokens) says which of its tokens were real."""
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
        """The origin of a row that has seen tokens, or None."""
        return next((state.origin for state in self.states if state.origin is not None), None)

    def draft(self) -> Rows:
        """A copy to advance."""
        return replace(self, states=[state.draft() for state in self.states])

    def advance(self, real: Tensor) -> None:
        """Records which tokens of a piece were real, (B, T)."""
        self.real = torch.cat([self.real, real.cpu()], dim=1)

    def select(self, rows: Tensor) -> Rows:
        """These rows in this order, repetitions allowed (beam search)."""
        chosen = rows.tolist()
        return Rows([self.states[row].fork() for row in chosen], self.real[chosen])

    def to(self, device: torch.device | str) -> Rows:
        """The states on another device."""
        return replace(self, states=[state.to(device) for state in self.states])

    def crop(self, tokens: int) -> None:
        """Undoes the last tokens, masked ones included: each row's state undoes those that were real."""
        check_crop(tokens, self.length, self.length)
        left = self.length - tokens
        undone = self.real[:, left:].sum(1).tolist()
        for state, count in zip(self.states, undone, strict=True):  # check all before cropping any
            check_crop(count, state.length, state.croppable)
        for state, count in zip(self.states, undone, strict=True):
            state.crop(count)
        self.real = self.real[:, :left]


def checked(mask: Tensor) -> Tensor:
    """The mask as booleans, true for real tokens; raises a ValueError unless it has only ones and zeros."""
    real = mask.bool()
    if not traced(real) and mask.dtype != torch.bool and bool(((mask != 1) & real).any()):
        other = mask[(mask != 1) & real][0].item()
        raise ValueError(f"attention_mask: expected 1 for tokens and 0 for padding, got {other}")
    return real


def padding(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Which tokens of x (B, T, ...) are real, (B, T), or None if all are known to be."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask: expected a torch.Tensor or None, got {type(mask).__name__}")
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
    """Which of the new tokens are real, (B, T), or None if all are; validates the mask against the state."""
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
        if not torch.equal(masked, before):  # e.g. padding of a finished row, which `generate()` passed as real tokens
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
    """Whether masked new tokens (B, T) occur only in rows without a real token so far: left padding."""
    began = torch.full_like(real[:, 0], state.length > 0) if state.left_out is None else state.left_out < state.length
    return not bool((began & ~real.all(1)).any())
