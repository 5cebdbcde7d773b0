"""Packed documents become batches: those of similar length are laid side by side, padded at the end, where causal
attention never looks from. Under a tracer, which cannot know the lengths, gates at their first tokens keep them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.factors import Factors
from deadreckon.ops.tracing import operator

CLOSED = -1e4  # a log gate that nothing passes


def boundaries(cu_seqlens: Tensor, length: int) -> list[int]:
    """cu_seqlens (N + 1,) as integers, if they are boundaries of documents in a row of so many tokens."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens: expected it to run from 0 to T = {length}, got {bounds[0]} to {bounds[-1]}")
    if any(later < earlier for earlier, later in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: expected sorted boundaries, got {bounds if len(bounds) < 12 else 'unsorted ones'}"
        )
    return bounds


def _first_tokens(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,) whether a document begins there. The boundaries are checked when it runs."""
    firsts = [start for start in boundaries(cu_seqlens, length) if start < length]
    marks = torch.zeros(length, dtype=torch.bool, device=cu_seqlens.device)
    return marks.index_fill_(0, torch.tensor(firsts, device=marks.device), True)


first_tokens = operator(
    "deadreckon::first_tokens",
    _first_tokens,
    lambda cu_seqlens, length: cu_seqlens.new_empty(length, dtype=torch.bool),
)


def separated(log_gate: Tensor | None, cu_seqlens: Tensor, k: Tensor) -> Tensor:
    """Gates (1, T, H or Hq) that let nothing pass from one document to the next: all else may run through them."""
    gate = k.new_zeros(k.shape[:3], dtype=torch.float32) if log_gate is None else log_gate
    first = first_tokens(cu_seqlens, k.shape[1]).to(k.device)
    return gate.masked_fill(first.unsqueeze(-1), CLOSED)


def buckets(cu_seqlens: list[int]) -> list[list[tuple[int, int]]]:
    """Groups of (start, end) whose lengths share a power of two: at most half of a group is padding."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, end in pairwise(cu_seqlens):
        if end > start:
            groups[(end - start - 1).bit_length()].append((start, end))
    return [groups[size] for size in sorted(groups)]


class Batch(NamedTuple):
    """Documents of similar length side by side."""

    place: Tensor  # (N, longest): where in the row each token is
    real: Tensor  # (N, longest): whether it is one, or padding

    def rows(self, x: Tensor) -> Tensor:
        """(1, T, ...) -> (N, longest, ...), zeros for padding."""
        picked = x[0][self.place.clamp(max=x.shape[1] - 1)]
        return torch.where(self.real.view(*self.real.shape, *(1,) * (x.dim() - 2)), picked, 0)


def batches(cu_seqlens: list[int], device: torch.device) -> Iterator[Batch]:
    """The documents of a row, a few batches of them."""
    for group in buckets(cu_seqlens):
        starts, ends = torch.tensor(group, device=device).unsqueeze(2).unbind(1)  # (N, 1)
        place = starts + torch.arange(max(end - start for start, end in group), device=device)
        yield Batch(place, place < ends)


def unpacked(
    attend: Callable[[Tensor, Tensor, Tensor, Factors, float, None], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Factors,
    scale: float,
    cu_seqlens: list[int],
) -> Tensor:
    """Runs attend over each group of documents as a batch, and packs the outputs again."""
    _, log_gate, score = factors
    outputs, order = [], []
    for batch in batches(cu_seqlens, q.device):
        rows = batch.rows
        gates = None if log_gate is None else rows(log_gate)
        moved = Factors(factors.map_transport(rows), gates, score)
        output = attend(rows(q), rows(k), rows(v), moved, scale, None)
        outputs.append(output[batch.real])
        order.append(batch.place[batch.real])
    return torch.cat(outputs)[torch.cat(order).argsort()].unsqueeze(0)
