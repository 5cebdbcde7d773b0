"""Tokens that are no longer kept one by one, while a sequence comes in pieces: even powers need only their state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.power import read, state_dtype, written
from deadreckon.ops.blockwise.precision import faded, lengths
from deadreckon.ops.blockwise.symmetric import dimension


class Folded(NamedTuple):
    """The state of all tokens that were folded, (N, F, kinds, E + 1), of keys in a unit (N, 1, 1)."""

    state: Tensor
    unit: Tensor

    def read(self, q: Tensor, shift: Tensor | None, longest: Tensor, p: int) -> Tensor:
        """What it adds to rows of unit queries (N, T, G, D), their sums and themselves: (N, T, G, E + 1).

        `shift` is the sum of log gates since, `longest` the unit of all other keys of these rows.
        """
        added = read(self.state, q.to(self.state.dtype), p) * ((self.unit / longest) ** p).unsqueeze(-1)
        return added if shift is None else added * faded(shift, added.dtype).unsqueeze(-1)


def fold(before: Folded | None, k: Tensor, v: Tensor, to_end: Tensor | None, longest: Tensor, p: int) -> Folded:
    """One more stretch of tokens, k (N, S, D), v (N, S, E), with sums of log gates from each to the end (N, S, kinds).

    The gate of the first token is part of what fades the state before: `to_end` has one token more, the last before.
    """
    dtype = state_dtype(k.dtype, p, k.device)
    k, v, longest = (x.to(dtype) for x in (k, v, longest))
    ones = k.new_ones(()).expand(*k.shape[:2], 1)
    state = written(k / longest, v, ones if to_end is None else faded(to_end[:, 1:], k.dtype), p)
    if before is not None:
        rest = (before.unit / longest) ** p  # (N, 1, 1)
        rest = rest if to_end is None else rest * faded(to_end[:, :1], k.dtype)
        state.addcmul_(before.state, rest.unsqueeze(-1))
    return Folded(state, longest)


def tokens_worth(k: Tensor, v: Tensor, gates: Tensor | None, p: int) -> int:
    """How many of these tokens, with log gates (N, S, kinds), take as much room as a state."""
    kinds = 0 if gates is None else gates.shape[2]
    size = state_dtype(k.dtype, p, k.device).itemsize
    state = dimension(k.shape[2], p) * max(1, kinds) * (v.shape[2] + 1) * size
    token = (k.shape[2] + v.shape[2]) * k.element_size() + (0 if gates is None else kinds * gates.element_size())
    return -(-state // token)


def unit_of(k: Tensor, so_far: Tensor | None) -> Tensor:
    """What to divide keys (N, S, D) by to keep powers in range, (N, 1, 1): that or, if it is larger, the one before.

    A power of two, so that to change it costs no precision.
    """
    least = torch.finfo(k.dtype).tiny ** 0.8  # a reciprocal has room
    unit = lengths(k).amax(1, keepdim=True).clamp(min=least).log2().ceil().exp2()
    return unit if so_far is None else torch.maximum(unit, so_far)
