"""Rotations: prefix sums of step angles (phases) rotate queries and keys once; a route's angle is their difference.

Directions of Householder steps rotate with them: with Θ_t the phase of token t, and R its rotation,
R_{j+1} H_{j+1} ⋯ R_i H_i = R(Θ_j)ᵀ · Π_s (R(Θ_s) H_s R(Θ_s)ᵀ) · R(Θ_i), and R(Θ_s) H_s R(Θ_s)ᵀ is the Householder
step of R(Θ_s) w_s. So what is left on the route are Householder steps alone, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deadreckon.ops.blockwise.precision import exact, work
from deadreckon.ops.factors import Factors, Rotation


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


class Turned(NamedTuple):
    """Attention inputs rotated into the frame of the sequence's start, where no rotation is left on the route."""

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Factors  # the others
    phase: Tensor  # (B or 1, T, Hr, D/2) running sums of step angles, in units
    back: Callable[[Tensor], Tensor]  # takes an output to its own token's frame, if values are rotated
    unit: float = 1.0  # of phases, in radians

    def last_phases(self, tokens: int) -> Tensor:
        """The phases of the last tokens, in radians, as :func:`phases` returns them."""
        last = self.phase[:, -tokens:]
        return last if self.unit == 1 else last.to(exact(last.device)) * self.unit


def unchanged(output: Tensor) -> Tensor:
    """`Turned.back` where values are not rotated: the identity."""
    return output


def turned(q: Tensor, k: Tensor, v: Tensor, factors: Factors, start: Tensor | None = None) -> Turned:
    """Rotates queries, keys, Householder directions and, if `rotation.values`, values by phases that begin at start."""
    rotation, steps = factors.parts()
    assert rotation is not None
    phase = phases(rotation.angles, start)
    k, v, log_gate = for_each_query_head(q, k, v, factors.log_gate, rotation)
    angle = phase.to(work(q.dtype))
    cos, sin = angle.cos(), angle.sin()
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if steps is not None:
        steps = replace(steps, w=_rotate(steps.w, cos, sin))
    factors = Factors(steps, log_gate, factors.score)
    if not rotation.values:
        return Turned(q, k, v, factors, phase, unchanged)
    return Turned(q, k, _rotate(v, cos, sin), factors, phase, lambda output: _rotate(output, cos, -sin))


def for_each_query_head(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and gates, repeated for each query head where angles are per query head."""
    heads = q.shape[2]
    if rotation.angles.shape[2] != heads or k.shape[2] == heads:
        return k, v, log_gate
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    if log_gate is not None:
        log_gate = log_gate.repeat_interleave(heads // log_gate.shape[2], dim=2)
    return k, v, log_gate


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pair (m, m + D/2) of x (B, T, heads, D) by an angle (B or 1, T, Hr, D/2)."""
    heads, turns = x.shape[2], cos.shape[2]
    if turns not in (1, heads):  # one angle for each group of heads
        cos, sin = (part.repeat_interleave(heads // turns, dim=2) for part in (cos, sin))
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
