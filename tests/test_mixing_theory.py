"""Convergence of steps to Haar measure: Assumption 2, Lemmas 1 and 2, Proposition 2, Theorem 4, Examples 6 to 8.

Laws on SO(3) that do not change under conjugation are functions of the angle of rotation, f(θ) = Σ (2l + 1) c_l χ_l(θ),
and their convolutions multiply the c_l: the operator's norm, total variation and densities are exact to quadrature.
"""

from __future__ import annotations

import math

import pytest
import theory
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

import deadreckon as dr
from deadreckon.lab.probe.transport import second_moment

DEGREES = torch.arange(0, 60, dtype=torch.float64)
ANGLES = (torch.arange(4000, dtype=torch.float64) + 0.5) * math.pi / 4000
HAAR = (1 - ANGLES.cos()) / 4000  # Haar measure of each angle; sums to 1
CHARACTERS = torch.sin((2 * DEGREES.unsqueeze(-1) + 1) * ANGLES / 2) / torch.sin(ANGLES / 2)  # (degrees, angles)


def coefficients(density: Tensor) -> Tensor:
    """c_l of a density (angles,), c_0 = 1."""
    return (CHARACTERS * density * HAAR).sum(-1) / (2 * DEGREES + 1)


def density(c: Tensor) -> Tensor:
    return ((2 * DEGREES + 1) * c) @ CHARACTERS


def spread(c: Tensor) -> float:
    """‖f − 1‖₂."""
    return float(((2 * DEGREES + 1) * c)[1:].norm())


def distance(c: Tensor) -> float:
    """Total variation to Haar measure."""
    return float(((density(c) - 1).abs() * HAAR).sum() / 2)


def heat(time: float) -> Tensor:
    """c_l of the heat kernel, Example 6."""
    return torch.exp(-DEGREES * (DEGREES + 1) * time / 2)


def fisher(strength: float) -> Tensor:
    """c_l of the matrix-Fisher law with F = strength · I, Example 7."""
    weight = torch.exp(strength * (1 + 2 * ANGLES.cos()))
    return coefficients(weight / (weight * HAAR).sum())


def local(widest: float) -> Tensor:
    """c_l of noise in the Lie algebra that vanishes beyond an angle, Example 8."""
    weight = torch.where(widest > ANGLES, (1 - (ANGLES / widest).square()).clamp(min=0) ** 4, 0.0)
    return coefficients(weight / (weight * HAAR).sum())


@pytest.mark.parametrize(
    ("law", "floor"),
    [
        (heat(0.4), None), (heat(1.0), None), (fisher(0.3), theory.fisher_floor(0.9)),
        (fisher(0.0), 1.0), (local(2.0), 0.0), (local(1.5), 0.0),
    ],
    ids=["heat-0.4", "heat-1", "fisher-0.3", "haar", "local-2", "local-1.5"],
)  # fmt: skip
def test_smooth_steps_converge_at_the_rate_of_their_operator(law: Tensor, floor: float | None) -> None:
    """Lemma 1 and Theorem 4 (i); Examples 6, 7 and 8, the last of which has no floor but a gap all the same."""
    rate, least = float(law[1:].abs().max()), float(density(law).min())
    truncation = 1e-5 * float(density(law).max())  # of the series, after 60 degrees
    floor = least if floor is None else floor
    assert 0 <= floor <= least + truncation
    assert rate <= theory.rate_above_floor(floor) + 1e-9
    assert rate < 0.999
    assert abs(float(law[1])) <= rate  # E[step] = c_1 I: first moments decay no slower (Theorem 3)
    for steps in (1, 2, 3, 5, 8):
        found, bound = distance(law**steps), theory.to_haar(spread(law), rate, steps)
        assert found <= bound + 1e-9
    if 0.1 < rate < 0.9:  # and the rate is the true one, not merely a bound
        ratio = distance(law**12) / distance(law**11)
        assert abs(ratio - rate) < 0.01


@pytest.mark.parametrize("time", [0.0, 0.2, 1.0])
def test_reflections_converge_two_by_two(time: float) -> None:
    """Theorem 4 for determinant −1, Remark 4 and Example 6: reflections at uniform planes, dithered by a heat kernel.

    A reflection is −1 times half a turn, whose c_l are (−1)^l / (2l + 1). Without dither this is Proposition 2 for the
    uniform density: one step has no density, two steps have one that is square-integrable.
    """
    law = heat(time) * (-1.0) ** DEGREES / (2 * DEGREES + 1)
    pair = law.square()
    rate = float(pair[1:].max())
    assert math.isclose(rate, math.exp(-2 * time) / 9)
    if time:
        floor = float(density(law).min())
        assert floor > 0
        assert rate <= theory.rate_of_reflections(floor)
    for steps in (2, 3, 4, 6):
        bound = theory.to_haar(spread(pair), rate, steps // 2)
        assert distance(law**steps) <= bound + 1e-9  # after an odd number, to Haar measure of the other component
    if not time:
        assert abs(spread(pair) - math.sqrt(math.pi**2 / 8 - 1)) < 0.01  # of 60 degrees


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_steps_of_both_signs_converge_on_all_of_the_group(share: float) -> None:
    """Assumption 2 (iii), Remark 5 and Theorem 4 (ii): a rotation of this share of tokens, else a reflection.

    O(3) is SO(3) × {1, −1}, so a law has two coefficients for each l: of both components, and with the sign. The sign
    alone, l = 0, has |2 · share − 1|: it is forgotten only because both occur.
    """
    turned, mirrored = heat(0.6), heat(0.4) * (-1.0) ** DEGREES / (2 * DEGREES + 1)
    plain, signed = (share * turned + sign * (1 - share) * mirrored for sign in (1, -1))
    dims = 2 * DEGREES + 1

    def components(steps: int) -> list[Tensor]:
        """Densities by Haar measure of O(3) after so many steps."""
        return [density(plain**steps) + sign * density(signed**steps) for sign in (1, -1)]

    rate = max(float(plain[1:].abs().max()), float(signed.abs().max()))
    floor = min(float(part.min()) for part in components(1))
    assert floor > 0
    assert abs(2 * share - 1) <= rate <= theory.rate_above_floor(floor)
    wide = math.hypot(float((dims * plain)[1:].norm()), float((dims * signed).norm()))
    for steps in (1, 2, 3, 5, 9):
        found = sum(float(((part - 1).abs() * HAAR).sum()) / 4 for part in components(steps))
        assert found <= theory.to_haar(wide, rate, steps) + 1e-9
    alone = heat(0.6) ** 9  # of one sign, the walk never leaves its component
    assert sum(float(((density(alone) * side - 1).abs() * HAAR).sum()) / 4 for side in (2.0, 0.0)) >= 0.5


def reflections(w: Tensor) -> Tensor:
    """(N, D, D) of unit normals (N, D)."""
    return torch.eye(w.shape[-1], dtype=w.dtype) - 2 * w.unsqueeze(-1) * w.unsqueeze(-2)


def normals(count: int, tilt: float) -> Tensor:
    """Points of the sphere with the density 1 + tilt (3 z² − 1) / 2, by rejection."""
    generator = torch.Generator().manual_seed(count)
    w = torch.randn(4 * count, 3, generator=generator, dtype=torch.float64)
    w = w / w.norm(dim=-1, keepdim=True)
    kept = torch.rand(4 * count, generator=generator, dtype=torch.float64) * (1 + tilt)
    return w[kept < 1 + tilt * (3 * w[:, 2].square() - 1) / 2][:count]


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_scores_of_reflected_keys_are_those_of_haar_measure(steps: int) -> None:
    """Theorem 5b with the distance of Theorem 4: P(qᵀ T k ≥ τ) is (1 − τ) / 2 for a uniform point of the sphere."""
    count = 20_000
    moved = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64).expand(count, 3)
    for w in normals(count * steps, 0.0).split(count):
        moved = moved - 2 * w * (w * moved).sum(-1, keepdim=True)
    score = moved[:, 2]
    bound = theory.to_haar(math.sqrt(math.pi**2 / 8 - 1), 1 / 9, steps // 2)
    for threshold in (-0.5, 0.0, 0.5, 0.8):
        chance = float((score >= threshold).double().mean())
        assert abs(chance - (1 - threshold) / 2) <= bound + 4 * 0.5 / math.sqrt(count)


def test_a_first_moment_gap_is_not_enough() -> None:
    """Remark 3: normals along the axes have ρ = 1 − 2/D and do not mix; a smooth density of normals does (Prop. 2)."""
    axes = reflections(torch.eye(3, dtype=torch.float64))
    assert math.isclose(float(torch.linalg.matrix_norm(axes.mean(0), 2)), 1 / 3)
    assert math.isclose(theory.second_moment_rate(axes), 1.0)
    for tilt, most in ((0.0, 1 / 3), (0.9, 0.7)):
        rate = theory.second_moment_rate(reflections(normals(20_000, tilt)))
        assert rate < most + 9 / math.sqrt(20_000)
    uniform = theory.second_moment_rate(reflections(normals(20_000, 0.0)))
    assert abs(uniform - 1 / 3) < 9 / math.sqrt(20_000)  # c_1 on its antisymmetric part; c_2 = 1/5 on the other


@pytest.mark.parametrize(
    ("dim", "tokens", "beta"), [(3, 400, 2.0), (6, 900, 2.0), (6, 500, 1.3), (8, 17, 0.3), (5, 3, 2.0)]
)
def test_the_probe_measures_second_moments(dim: int, tokens: int, beta: float) -> None:
    """By Lanczos' method what multiplying out gives; the closed form for uniform directions."""
    w = torch.randn(2, tokens, 2, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    w = w / w.norm(dim=-1, keepdim=True)
    w[:, :, 1] = torch.eye(dim, dtype=torch.float64)[torch.arange(tokens) % dim]  # the second head's along axes
    strength = torch.full(w.shape[:3], beta, dtype=torch.float64)
    found = second_moment(dr.Householder(w, strength))
    for head in range(2):
        directions = w[:, 1:, head].flatten(0, 1)
        steps = torch.eye(dim, dtype=torch.float64) - beta * directions.unsqueeze(-1) * directions.unsqueeze(-2)
        mean = torch.einsum("nij,nkl->ikjl", steps, steps).reshape(dim * dim, dim * dim) / len(steps)
        trace = torch.eye(dim, dtype=torch.float64).flatten() / math.sqrt(dim)
        without = torch.eye(dim * dim, dtype=torch.float64) - torch.outer(trace, trace)
        expected = float(torch.linalg.matrix_norm(without @ mean @ without, 2))
        assert math.isclose(float(found[head]), expected, rel_tol=1e-6)
        if beta == 2.0:
            assert math.isclose(expected, theory.second_moment_rate(steps), rel_tol=1e-9)  # the trace is kept
    if beta == 2.0 and tokens > 100:
        uniform = max(abs(1 - 4 / dim), 1 - 4 / dim + 8 / (dim * (dim + 2)))
        assert abs(float(found[0]) - uniform) < dim * dim / math.sqrt(2 * tokens)
        assert math.isclose(float(found[1]), 1.0, rel_tol=1e-2)  # Remark 3
    assert float(second_moment(dr.Householder(w, strength), most=7)[0]) >= float(found[0]) - 1e-9  # fewer span less


@pytest.mark.parametrize("dim", [3, 4])
def test_products_of_reflections_move_in_every_direction(dim: int) -> None:
    """Lemma 2 as Proposition 2 uses it: the map (w_1, w_2, …) ↦ H_1 H_2 ⋯ has full rank, so its image has a density.

    At w_{2p−1} = w_{2p} = e_i for the p-th pair i < j, moving w_{2p−1} towards e_j turns the product by ∓2 E_ij.
    """
    pairs = [(i, j) for i in range(dim) for j in range(i + 1, dim)]
    eye = torch.eye(dim, dtype=torch.float64)

    def product(w: Tensor) -> Tensor:
        result = eye
        for step in reflections(w / w.norm(dim=-1, keepdim=True)):
            result = result @ step
        return result

    base = torch.stack([eye[i] for i, _ in pairs for _ in range(2)])
    torch.testing.assert_close(product(base), eye)
    slope = jacobian(product, base)  # (D, D, steps, D)
    tangents = []
    for number, (i, j) in enumerate(pairs):
        tangent = slope[:, :, 2 * number, j]
        turn = torch.outer(eye[i], eye[j]) - torch.outer(eye[j], eye[i])
        torch.testing.assert_close(tangent.abs(), 2 * turn.abs())
        torch.testing.assert_close(tangent, -tangent.mT)
        tangents.append(tangent.flatten())
    assert torch.linalg.matrix_rank(torch.stack(tangents)) == len(pairs)
    anywhere = torch.randn(base.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = jacobian(product, anywhere).reshape(dim * dim, -1)
    assert torch.linalg.matrix_rank(slope, rtol=1e-9) == len(pairs)  # a submersion almost everywhere
