"""Bounds of "Why Do Accumulated Transformations Extrapolate?" that the probe compares with its measurements.

A *route* of length ℓ is a product of ℓ steps. Its mean decays like ρ^ℓ, ρ = ‖E[step]‖; 1 − ρ is the *spectral gap*.
After a *mixing window* a route has forgotten where it began: tokens beyond it are *far*, the others *near*.
Logits are in nats. Numbers of theorems are the paper's; constants that its text leaves open are derived where they are
used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mixing_window(step: float, tolerance: float) -> int | None:
    """Theorems 1 and 3: the least W ≥ 1 with ρ^ℓ ≤ ε for every ℓ ≥ W, ⌈log(1/ε) / log(1/ρ)⌉; None if ρ is 1."""
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: expected a number between 0 and 1, got {tolerance}")
    if step < 0:
        raise ValueError(f"step: expected a norm, 0 or more, got {step}")
    if step >= 1:
        return None
    return max(1, math.ceil(math.log(tolerance) / math.log(step))) if step else 1


def far_mass_floor(gap: float | Tensor, near: int | Tensor, far: int | Tensor) -> Tensor:
    """Proposition 3: far mass if no near logit is above any far one by more than `gap`: F / (F + N e^{gap}).

    With logits between −B and B the gap is 2B. It tends to 1 as the far set grows, whatever the transport.
    """
    gap, near, far = (torch.as_tensor(x, dtype=torch.float64) for x in (gap, near, far))
    return torch.where(far > 0, torch.sigmoid(far.log() - near.log() - gap), 0.0)


def prefix_radius(
    far_mass: float, far_weight: float, step: float, blocks: int, chance: float, remaining: float = 1.0
) -> float:
    """Equation 28, Theorem 7 and Corollary 3: ‖R‖ of value rotations independent of the weights.

    remaining · A + 4 ‖a‖₂ √log(4 · blocks / chance) / (1 − ρ), remaining = ρ^W. The sum of a_ℓ z_ℓ over nested routes
    is its mean, at most ρ^W A, and a martingale whose t-th increment is at most 2 Σ_{ℓ≥t} a_ℓ ρ^{ℓ−t}: by Young's
    inequality their norm is 2 ‖a‖₂ / (1 − ρ); Azuma for real and imaginary part, and a union over blocks, do the rest.
    Never more than A, which holds for any transport.
    """
    if step >= 1:
        return far_mass
    noise = 4 * far_weight * math.sqrt(math.log(4 * blocks / chance)) / (1 - step)
    return min(far_mass, remaining * far_mass + noise)


def far_tokens_borne(odds: float, seen: float, keep: float = 0.5) -> float:
    """How many far tokens dilute what is near to `keep` of what it was beside `seen` of them; Propositions 3 and 4.

    A far token that carries `odds` of the near mass, at any length (Theorem 1: longer contexts only add routes of a
    kind that is already there), leaves a near mass of 1 / (1 + odds · F). So F = seen / keep + (1 / keep − 1) / odds.
    """
    if not 0 < keep < 1:
        raise ValueError(f"keep: expected a share between 0 and 1, got {keep}")
    return seen / keep + (1 / keep - 1) / odds if odds > 0 else math.inf
