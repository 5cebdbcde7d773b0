"""Folding cached keys and values into a state of fixed size, which is all that even powers need of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.power import read, state_dtype, written
from deadreckon.ops.blockwise.precision import faded, lengths
from deadreckon.ops.blockwise.symmetric import dimension


class Folded(NamedTuple):
    """The state of all folded tokens, (N, F, kinds, E + 1), their keys divided by a unit (N, 1, 1)."""

    state: Tensor
    unit: Tensor

    def read(self, q: Tensor, shift: Tensor | None, longest: Tensor, p: int) -> Tensor:
        """Its contribution to the outputs of unit queries (N, T, G, D) and to their sums of weights: (N, T, G, E + 1).

        `shift` is the sum of log gates since the folded tokens, `longest` the unit of all other keys of these rows.
        """
        added = read(self.state, q.to(self.state.dtype), p) * ((self.unit / longest) ** p).unsqueeze(-1)
        return added if shift is None else added * faded(shift, added.dtype).unsqueeze(-1)


def fold(before: Folded | None, k: Tensor, v: Tensor, to_end: Tensor | None, longest: Tensor, p: int) -> Folded:
    """Adds tokens k (N, S, D), v (N, S, E) to the state.

    `to_end` (N, 1 + S, kinds) are sums of log gates from each token to the end, preceded by that from the last folded
    token, by which the state so far decays.
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
    """How many of these tokens, with log gates (N, S, kinds), take as much memory as a state."""
    kinds = 0 if gates is None else gates.shape[2]
    size = state_dtype(k.dtype, p, k.device).itemsize
    state = dimension(k.shape[2], p) * max(1, kinds) * (v.shape[2] + 1) * size
    token = (k.shape[2] + v.shape[2]) * k.element_size() + (0 if gates is None else kinds * gates.element_size())
    return -(-state // token)


def unit_of(k: Tensor, so_far: Tensor | None) -> Tensor:
    """The unit (N, 1, 1) that keys (N, S, D) are divided by to keep powers in range; at least the previous one.

    A power of two, so that changing it costs no precision.
    """
    least = torch.finfo(k.dtype).tiny ** 0.8  # a reciprocal has room
    unit = lengths(k).amax(1, keepdim=True).clamp(min=least).log2().ceil().exp2()
    return unit if so_far is None else torch.maximum(unit, so_far)
