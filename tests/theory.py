"""What "Why Do Accumulated Transformations Extrapolate?" proves, as functions of numbers; tests check it by sampling.

The words are those of `deadreckon.lab.probe.theory`, whose bounds are here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deadreckon.lab.probe.theory import far_mass_floor, far_tokens_borne, mixing_window, prefix_radius

__all__ = ["far_mass_floor", "far_tokens_borne", "mixing_window", "prefix_radius"]

# How far one step goes on average: ρ = ‖E[step]‖.


def uniform_angles(widest: float) -> float:
    """Example 1: rotations by an angle uniform on [−θ, θ]: ρ = |sin θ / θ|."""
    return abs(math.sin(widest) / widest) if widest else 1.0


def householder(second_moment: Tensor, beta: float = 2.0) -> float:
    """Example 2: I − β w wᵀ with unit w: ρ = max |1 − β λ| over the eigenvalues λ of E[w wᵀ] (D, D).

    The paper has reflections, β = 2. For w uniform on the sphere λ = 1/D. With strengths that vary, pass E[β w wᵀ] and
    β = 1.
    """
    return float((1 - beta * torch.linalg.eigvalsh(second_moment)).abs().max())


def givens(dim: int, widest: float = math.pi) -> float:
    """Example 3: a rotation of two coordinates drawn from D, by an angle uniform on [−θ, θ].

    Each coordinate is in 2/D of all pairs and then keeps sin θ / θ of itself: ρ = 1 − (2/D)(1 − sin θ / θ). The paper
    has full turns, θ = π: ρ = 1 − 2/D.
    """
    return 1 - 2 / dim * (1 - (math.sin(widest) / widest if widest else 1.0))


def axis_rotation(angle: float) -> float:
    """Example 4: blocks of SO(3), each turned by a fixed angle about a uniform axis: ρ = |1 + 2 cos α| / 3."""
    return abs(1 + 2 * math.cos(angle)) / 3


def torus(frequencies: Sequence[float], characteristic: Callable[[float], complex]) -> float:
    """Example 5: exp(φ A), A skew with eigenvalues ±iω, φ random: ρ = max |E[e^{iωφ}]| over the frequencies ω.

    Args:
        characteristic: ω ↦ E[e^{iωφ}], the characteristic function of φ.
    """
    return max(abs(characteristic(frequency)) for frequency in frequencies)


def decayed(step: float, length: float) -> float:
    """Theorems 1 and 3: ‖E[route]‖ ≤ ρ^ℓ for independent steps."""
    return step**length


def harmonic_window(steps: Sequence[float], tolerance: float) -> int | None:
    """After Theorem 1: one window for several harmonics |E[e^{ikφ}]|, the longest of theirs."""
    windows = [mixing_window(step, tolerance) for step in steps]
    return None if None in windows else max(window for window in windows if window is not None)


# Convergence to Haar measure: the rate r is the norm of a step's operator on functions of mean zero.


def rate_above_floor(floor: float) -> float:
    """Lemma 1 and Remark 5: r ≤ 1 − a if a step's density by Haar measure is a or more everywhere."""
    return 1 - floor


def rate_of_reflections(floor: float) -> float:
    """Remark 4: the same of two steps of determinant −1, whose density is a² or more."""
    return 1 - floor**2


def fisher_floor(nuclear: float) -> float:
    """Example 7: the density exp(tr Fᵀ R) / Z is e^{−2 ‖F‖} or more, in the nuclear norm."""
    return math.exp(-2 * nuclear)


def to_haar(spread: float, rate: float, steps: int, smooth: int = 1) -> float:
    """Theorem 4: the most that the total variation to Haar measure can be after `steps`, of which the first `smooth`
    have a density f with ‖f − 1‖₂ = spread: ½ spread · r^{steps − smooth}. Reflections are counted in pairs.
    """
    return 1.0 if steps < smooth else min(1.0, spread / 2 * rate ** (steps - smooth))


def second_moment_rate(steps: Tensor) -> float:
    """‖E[T ⊗ T] − its limit‖ for steps (N, D, D), D ≥ 3: below 1 under Assumption 2, as r bounds it for two steps.

    The limit keeps the trace alone: a first-moment gap does not give it (Remark 3), and it can be estimated.
    """
    count, dim, _ = steps.shape
    mean = torch.einsum("nij,nkl->ikjl", steps, steps).reshape(dim * dim, dim * dim) / count
    trace = torch.eye(dim, dtype=steps.dtype).flatten() / math.sqrt(dim)
    return float(torch.linalg.matrix_norm(mean - torch.outer(trace, trace), 2))


# Scores: what a route does to the match of a query and a key.


def matched_score(phases: Tensor) -> Tensor:
    """Equation 16: the mean cosine of a route's phases (..., blocks), a logit between 1 and −1 for q = k."""
    return phases.cos().mean(-1)


def near_score(phase: float) -> float:
    """Theorem 2, equation 18: the least matched score if no block has turned by more than this."""
    return math.cos(min(phase, math.pi))


def near_score_orthogonal(match: float, closeness: float) -> float:
    """Theorem 5a: qᵀ T k ≥ qᵀ k − δ for unit vectors, if ‖T − I‖ ≤ δ."""
    return match - closeness


def far_score_chance(threshold: float, blocks: int, coherence: float, routes: int = 1) -> float:
    """Theorem 2, equations 20 and 21: the most that P(some far route scores τ or more) can be.

    Hoeffding over independent blocks of mean cosine ≤ ε in [−1, 1]: routes · exp(−blocks (τ − ε)² / 2).
    """
    over = max(threshold - coherence, 0.0)
    return min(1.0, routes * math.exp(-blocks * over * over / 2))


def far_score_chance_orthogonal(threshold: float, dim: int, to_haar: float = 0.0, routes: int = 1) -> float:
    """Theorem 5b and c: the same for any orthogonal route within `to_haar` (total variation) of Haar measure.

    A uniform point of the sphere has a coordinate of τ or more with chance ≤ exp(−(D − 1) τ² / 2).
    """
    over = max(threshold, 0.0)
    return min(1.0, routes * (to_haar + math.exp(-(dim - 1) * over * over / 2)))


# Softmax: how much of the attention is far.


def far_mass_ceiling(gap: float, near: int, far: int) -> float:
    """Proposition 1: far mass if every near logit is above every far one by `gap` or more.

    x / (1 + x), x = e^{−gap} F / N; the paper rounds it up to x.
    """
    return 0.0 if far == 0 else 1 / (1 + math.exp(gap + math.log(near / far)))


def far_weight_ceiling(gap: float, near: int, far: int) -> float:
    """Proposition 1: ‖far weights‖₂ ≤ e^{−gap} √F / N."""
    return math.exp(-gap) * math.sqrt(far) / near


def scale_needed(gap: float, near: int, far: int, mass: float, weight: float) -> float:
    """Proposition 1, equation 22: the logit scale at which a gap of scores keeps far mass and norm this low."""
    if gap <= 0:
        raise ValueError(f"gap: expected a positive score gap, got {gap}")
    return max(math.log(far / (near * mass)), math.log(math.sqrt(far) / (near * weight)), 0.0) / gap


def near_signal_ceiling(far_mass: float) -> float:
    """Proposition 4: ‖Σ near a U‖ ≤ 1 − far mass, for any orthogonal value transport; squared in equation 23."""
    return 1 - far_mass


def near_signal_floor(far_mass: float, closeness: float) -> float:
    """Lemma 3 and Corollary 2: ‖Σ near a U x‖ ≥ (1 − far mass)(1 − δ) ‖x‖ if ‖(U − I) x‖ ≤ δ ‖x‖ on near routes."""
    return (1 - far_mass) * max(1 - closeness, 0.0)


def near_closeness(length: int, deviation: float, routes: int, blocks: int, chance: float, drift: float = 0.0) -> float:
    """Lemma 4: δ of Lemma 3 for routes up to `length` of sub-Gaussian steps, except with the chance given.

    Every phase is within drift + σ √(2 ℓ log(2 · routes · blocks / chance)), and ‖R(φ) − I‖ = 2 |sin(φ/2)| ≤ |φ|.
    """
    phase = drift + deviation * math.sqrt(2 * length * math.log(2 * routes * blocks / chance))
    return 2 * math.sin(min(phase, math.pi) / 2)


# Values: how much of what is far cancels.


def far_covariance(far_transport: float, far_weight: float, shared: float, own: float) -> float:
    """Definition 1 and equations 25, 30, 36: ‖cov of the far output‖ for values = shared background + own noise.

    σ_b² ‖R‖² + σ² ‖a‖₂², with R = Σ far a U. Without value transport ‖R‖ is the far mass: nothing cancels.
    """
    return shared**2 * far_transport**2 + own**2 * far_weight**2


def fixed_coherence(weights: Tensor, lengths: Tensor, frequencies: Sequence[float]) -> float:
    """Example 9: ‖R‖ of values turned by position alone, ω for each token: max |Σ a_ℓ e^{iωℓ}| over the frequencies.

    Nothing bounds it below the far mass: weights on every n-th token are as one for ω = 2π / n.
    """
    phases = lengths.double().unsqueeze(-1) * torch.tensor(frequencies, dtype=torch.float64)
    return float(torch.polar(weights.double().unsqueeze(-1).expand_as(phases), phases).sum(0).abs().max())


def coupled_radius(
    far_mass: float, far_weight: float, step: float, blocks: int, chance: float, scale: float, remaining: float = 1.0
) -> float:
    """Theorem 6, equation 29: the same where the phases that turn values also made the weights.

    Leaving a block out of logits scale · (mean cosine) changes each weight by a factor of at most
    Λ = exp(2 · scale / blocks): Λ · prefix_radius + (Λ − 1) A.
    """
    change = math.exp(min(2 * scale / blocks, 700.0))
    free = prefix_radius(far_mass, far_weight, step, blocks, chance, remaining)
    return min(far_mass, change * free + (change - 1) * far_mass)


def adaptive_selection(count: int, angle: float) -> tuple[float, float, float]:
    """Example 10: weights that are spread out need not cancel, if they are chosen by the phases.

    Equal weights on those of `count` uniform phasors within ± angle of 1: with p = angle / π,

    Returns:
        the most ‖a‖₂ can be, √(2 / (p · count)); the least |Σ a z| can be, cos(angle); and the chance that both hold,
        at least 1 − exp(−p · count / 8).
    """
    expected = count * angle / math.pi
    return math.sqrt(2 / expected), math.cos(angle), 1 - math.exp(-expected / 8)
