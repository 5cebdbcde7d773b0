"""Rotations: add up the step angles, turn queries and keys once, and the route's angle is a difference of phases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deadreckon.blockwise.precision import exact, work


def _without_broadcast(x: Tensor) -> Tensor:
    """Drops the copies that ``expand`` made, so that constant angles cost no work per batch row."""
    if x.requires_grad:  # each copy has its gradient
        return x
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and x.stride(dim) == 0 and dim != 1:
            x = x.narrow(dim, 0, 1)
    return x


def phases(angles: Tensor, start: Tensor | None = None) -> Tensor:
    """Inclusive prefix sums of step angles modulo 2π, (B or 1, T, Hr, D/2), from a phase to start at.

    Summed in float64: a route's angle is the difference of two phases, and must not lose digits to steps before it.
    """
    total = _without_broadcast(angles).to(exact(angles.device)).cumsum(1)
    return torch.remainder(total if start is None else total + start, 2 * math.pi)


def rotate(x: Tensor, phase: Tensor) -> Tensor:
    """Turns the pair (m, m + D/2) of x (B, T, heads, D) by phase (B or 1, T, Hr, D/2)."""
    heads, turns = x.shape[2], phase.shape[2]
    phase = phase.to(work(x.dtype))
    if turns not in (1, heads):  # one phase for each group of heads
        phase = phase.repeat_interleave(heads // turns, dim=2)
    cos, sin = phase.cos(), phase.sin()
    first, second = x.to(phase.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
