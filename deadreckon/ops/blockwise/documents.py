"""Packed (varlen) documents as padded batches: documents of similar length share a batch, padded at the end, which
causal attention never reads. Under a tracer, which cannot know the lengths, closed gates at first tokens separate them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.factors import Factors
from deadreckon.ops.layout import sent
from deadreckon.ops.tracing import operator

CLOSED = -1e4  # a log gate that nothing passes


def boundaries(cu_seqlens: Tensor, length: int) -> list[int]:
    """cu_seqlens (N + 1,) as Python integers; raises unless they are sorted and run from 0 to `length`."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens: expected it to run from 0 to T = {length}, got {bounds[0]} to {bounds[-1]}")
    if any(later < earlier for earlier, later in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: expected sorted boundaries, got {bounds if len(bounds) < 12 else 'unsorted ones'}"
        )
    return bounds


def _first_tokens(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,) mask of the first tokens of documents. Validates the boundaries when it runs."""
    firsts = [start for start in boundaries(cu_seqlens, length) if start < length]
    marks = torch.zeros(length, dtype=torch.bool, device=cu_seqlens.device)
    return marks.index_fill_(0, sent(firsts, marks.device), True)


first_tokens = operator(
    "deadreckon::first_tokens",
    _first_tokens,
    lambda cu_seqlens, length: cu_seqlens.new_empty(length, dtype=torch.bool),
)


def _sound(cu_seqlens: Tensor, length: int) -> Tensor:
    """A copy of validated boundaries. On a GPU the check is a device-side assertion, without synchronisation."""
    if cu_seqlens.is_cuda:
        right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
        torch._assert_async(right, f"cu_seqlens: expected sorted boundaries from 0 to T = {length}")
    else:
        boundaries(cu_seqlens, length)
    return cu_seqlens.clone()


sound = operator("deadreckon::sound_boundaries", _sound, lambda cu_seqlens, length: torch.empty_like(cu_seqlens))


def separated(log_gate: Tensor | None, cu_seqlens: Tensor, k: Tensor) -> Tensor:
    """Gates (1, T, H or Hq), closed at the first token of each document; all else may run across boundaries."""
    gate = k.new_zeros(k.shape[:3], dtype=torch.float32) if log_gate is None else log_gate
    first = first_tokens(cu_seqlens, k.shape[1]).to(k.device)
    return gate.masked_fill(first.unsqueeze(-1), CLOSED)


class Batch(NamedTuple):
    """A padded batch of documents of similar length."""

    place: Tensor  # (N, longest): where in the row each token is
    real: Tensor  # (N, longest): whether it is one, or padding

    def rows(self, x: Tensor) -> Tensor:
        """(1, T, ...) -> (N, longest, ...), zeros for padding."""
        return torch.where(self.real.view(*self.real.shape, *(1,) * (x.dim() - 2)), x[0][self.place], 0)


def batches(cu_seqlens: list[int], device: torch.device) -> Iterator[Batch]:
    """Batches of documents whose lengths round up to the same power of two: at most half of a batch is padding."""
    bounds = torch.tensor(cu_seqlens)  # on the host: no synchronisation
    starts, ends = torch.stack([bounds[:-1], bounds[1:]])[:, bounds.diff() > 0]
    bits = torch.frexp((ends - starts - 1).double()).exponent  # of the power of two that is no smaller
    for size in bits.unique():
        first, end = (x[bits == size].unsqueeze(1) for x in (starts, ends))  # (N, 1)
        place = sent(first, device) + torch.arange(int((end - first).max()), device=device)
        yield Batch(place.clamp(max=cu_seqlens[-1] - 1), place < sent(end, device))


def unpacked(
    attend: Callable[[Tensor, Tensor, Tensor, Factors, float, None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Factors,
    scale: float,
    cu_seqlens: list[int],
) -> Tensor:
    """Runs `attend` on each batch of documents and packs the outputs again.

    Each tensor is gathered for all batches at once, so that its gradient, too, is scattered once, not batch by batch.
    """
    _, log_gate, score = factors
    places, reals = zip(*batches(cu_seqlens, q.device), strict=True)
    everything = Batch(torch.cat([x.flatten() for x in places]), torch.cat([x.flatten() for x in reals]))

    @functools.cache  # by tensor
    def laid_out(x: Tensor) -> list[Tensor]:
        parts = everything.rows(x).split([place.numel() for place in places])
        return [part.unflatten(0, place.shape) for part, place in zip(parts, places, strict=True)]

    outputs = []
    for number in range(len(places)):

        def rows(x: Tensor, number: int = number) -> Tensor:
            return laid_out(x)[number]

        gates = None if log_gate is None else rows(log_gate)
        moved = Factors(factors.map_transport(rows), gates, score)
        outputs.append(attend(rows(q), rows(k), rows(v), moved, scale, None).flatten(0, 1))
    order = everything.place.masked_fill(~everything.real, q.shape[1]).argsort()[: q.shape[1]]  # padding is last
    return torch.cat(outputs)[order].unsqueeze(0)
