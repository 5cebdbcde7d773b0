"""Packed documents become batches: those of similar length are laid side by side, padded at the end, where causal
attention never looks from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from deadreckon.ops.factors import Factors, Householder, Rotation


def buckets(cu_seqlens: list[int]) -> list[list[tuple[int, int]]]:
    """Groups of (start, end) whose lengths share a power of two: at most half of a group is padding."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, end in pairwise(cu_seqlens):
        if end > start:
            groups[(end - start - 1).bit_length()].append((start, end))
    return [groups[size] for size in sorted(groups)]


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
    transport, log_gate, score = factors
    outputs, order = [], []
    for group in buckets(cu_seqlens):
        longest = max(end - start for start, end in group)
        starts, ends = torch.tensor(group, device=q.device).unsqueeze(2).unbind(1)  # (N, 1)
        index = starts + torch.arange(longest, device=q.device)
        real = index < ends

        def rows(x: Tensor, index: Tensor = index, real: Tensor = real) -> Tensor:  # (1, T, ...) -> (N, longest, ...)
            picked = x[0][index.clamp(max=x.shape[1] - 1)]
            return torch.where(real.view(*real.shape, *(1,) * (x.dim() - 2)), picked, 0)

        moved = transport
        if isinstance(transport, Rotation):
            moved = Rotation(rows(transport.angles), transport.values)
        elif isinstance(transport, Householder):
            moved = Householder(rows(transport.w), rows(transport.beta))
        gates = None if log_gate is None else rows(log_gate)
        output = attend(rows(q), rows(k), rows(v), Factors(moved, gates, score), scale, None)
        outputs.append(output[real])
        order.append(index[real])
    return torch.cat(outputs)[torch.cat(order).argsort()].unsqueeze(0)
