"""The probe's mathematics: closed forms from sampled steps, bounds against sampling, ranges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import theory
import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.probe import attention, fit_decay, mean_transport, transport
from deadreckon.lab.probe.reach import FarTokens, measure, middle, predict
from deadreckon.lab.probe.transport import MeanTransport

ROWS, TOKENS = 64, 400


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def uniform(*shape: int, widest: float = 1.0) -> Tensor:
    return (2 * torch.rand(*shape, generator=seed(), dtype=torch.float64) - 1) * widest


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seed(1), dtype=torch.float64)


def directions(dim: int) -> Tensor:
    return torch.nn.functional.normalize(normal(ROWS, TOKENS, 1, dim), dim=-1)


# Closed forms. The mean of S routes of D-dimensional orthogonal steps is off by √(D / S) in Frobenius norm, root mean
# square, if they are independent; routes that begin k tokens apart are correlated by at most ρ^(2k), which makes the
# variance (1 + ρ²) / (1 − ρ²) times as large. Four such deviations are allowed.


def check_decay(found: MeanTransport, rho: float, dim: int) -> None:
    routes = ROWS * (TOKENS - 1)
    for number, length in enumerate(found.lengths):
        correlated = min((1 + rho**2) / (1 - rho**2), 2 * length - 1)  # apart by ℓ or more, they share no step
        allowed = 4 * math.sqrt(dim / (routes - ROWS * length) * correlated)
        assert abs(float(found.norm[number, 0]) - theory.decayed(rho, length)) < allowed
        assert abs(float(found.size[number, 0]) - 1) < 1e-9
    decay = found.decay(0)
    assert decay.gap is not None
    assert decay.error < 0.1 * (1 - rho)
    assert abs(decay.rate - rho) < 4 * decay.error
    assert theory.mixing_window(decay.rate, 0.1) == pytest.approx(theory.mixing_window(rho, 0.1), rel=0.2, abs=1)


@pytest.mark.parametrize("widest", [0.3, 1.0, 2.5])
def test_uniform_angles(widest: float) -> None:
    rho = theory.uniform_angles(widest)
    assert rho == pytest.approx(math.sin(widest) / widest)
    check_decay(mean_transport(dr.Rotation(uniform(ROWS, TOKENS, 1, 1, widest=widest))), rho, 2)


def test_householder_of_uniform_directions() -> None:
    rho = theory.householder(torch.eye(6, dtype=torch.float64) / 6)
    assert rho == pytest.approx(1 - 2 / 6)
    steps = dr.Householder(directions(6), torch.full((ROWS, TOKENS, 1), 2.0))
    check_decay(mean_transport(steps, routes=ROWS * TOKENS), rho, 6)


def test_householder_of_few_directions() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)  # coordinate vectors, as in Remark 3
    which = torch.multinomial(chances, ROWS * TOKENS, replacement=True, generator=seed())
    w = torch.eye(4, dtype=torch.float64)[which].view(ROWS, TOKENS, 1, 4)
    rho = theory.householder(chances.diag())
    assert rho == pytest.approx(0.9)
    check_decay(mean_transport(dr.Householder(w, torch.full((ROWS, TOKENS, 1), 2.0)), routes=ROWS * TOKENS), rho, 4)


def test_householder_of_any_strength() -> None:
    beta = 1 + uniform(ROWS, TOKENS, 1)
    found = mean_transport(dr.Householder(directions(5), beta), [1, 2, 3, 6], routes=ROWS * TOKENS)
    for number, length in enumerate(found.lengths):
        expected = theory.householder(torch.eye(5, dtype=torch.float64) / 5, beta=1.0) ** length
        shrunk = (1 - (2 - 4 / 3) / 5) ** length  # E‖x‖² loses E[2β − β²] / D a step
        allowed = 4 * math.sqrt(5 / (ROWS * (TOKENS - length)) * (2 * length - 1))
        assert abs(float(found.norm[number]) - expected) < allowed
        assert abs(float(found.size[number]) ** 2 - shrunk) < allowed


@pytest.mark.parametrize("widest", [math.pi, 1.0])
def test_givens(widest: float) -> None:
    dim, count = 5, ROWS * TOKENS
    pairs = torch.stack([torch.randperm(dim, generator=seed(n))[:2] for n in range(500)])
    first, second = pairs[torch.randint(0, 500, (count,), generator=seed())].T
    angle, every = uniform(count, widest=widest), torch.arange(count)
    steps = torch.eye(dim, dtype=torch.float64).repeat(count, 1, 1)
    steps[every, first, first] = steps[every, second, second] = angle.cos()
    steps[every, first, second], steps[every, second, first] = -angle.sin(), angle.sin()
    rho = theory.givens(dim, widest)
    assert widest < math.pi or rho == pytest.approx(1 - 2 / dim)
    # 500 pairs stand for all: each coordinate is in 2/D of them but for √(2/D (1 − 2/D) / 500) or so.
    found = mean_transport(steps.view(ROWS, TOKENS, 1, dim, dim), [1, 2, 4], routes=count)
    for number, length in enumerate(found.lengths):
        allowed = 4 * math.sqrt(dim / count * (2 * length - 1)) + 4 * length * math.sqrt(0.4 * 0.6 / 500)
        assert abs(float(found.norm[number]) - rho**length) < allowed


@pytest.mark.parametrize("angle", [1.1, 2.5])
def test_axis_rotations(angle: float) -> None:
    axis = directions(3).squeeze(2)
    cross = torch.linalg.cross(torch.eye(3, dtype=torch.float64).expand(ROWS, TOKENS, 3, 3), axis.unsqueeze(-2))
    outer = axis.unsqueeze(-1) * axis.unsqueeze(-2)
    steps = (
        math.cos(angle) * torch.eye(3, dtype=torch.float64) + math.sin(angle) * cross + (1 - math.cos(angle)) * outer
    )
    torch.testing.assert_close(steps @ steps.mT, torch.eye(3, dtype=torch.float64).expand_as(steps))
    check_decay(mean_transport(steps.unsqueeze(2), routes=ROWS * TOKENS), theory.axis_rotation(angle), 3)


def test_torus() -> None:
    frequencies, deviation = (0.6, 1.5, 2.0), 0.8
    rho = theory.torus(frequencies, lambda frequency: math.exp(-((deviation * frequency) ** 2) / 2))
    assert rho == pytest.approx(math.exp(-((0.8 * 0.6) ** 2) / 2))
    basis = torch.linalg.qr(normal(6, 6)).Q
    skew = torch.block_diag(*[torch.tensor([[0, -f], [f, 0]], dtype=torch.float64) for f in frequencies])
    by = deviation * normal(ROWS, TOKENS, 1, 1, 1)
    steps = basis @ torch.linalg.matrix_exp(by * skew) @ basis.mT
    check_decay(mean_transport(steps, routes=ROWS * TOKENS), rho, 6)


def test_products_agree_with_multiplying_out() -> None:
    w, beta = directions(4)[:3, :70], 1 + uniform(3, 70, 1)
    found = mean_transport(dr.Householder(w, beta), [1, 3, 8, 20, 35], routes=10**6)
    steps = torch.eye(4, dtype=torch.float64) - beta.unsqueeze(-1) * w[..., 0, :, None] * w[..., 0, None, :]
    for number, length in enumerate(found.lengths):
        routes = torch.eye(4, dtype=torch.float64).repeat(3, 70 - length, 1, 1)
        for step in range(length):
            routes = routes @ steps[:, 1 + step : 71 + step - length]
        mean, groups = routes.mean((0, 1)), [half for row in routes for half in row.tensor_split(2)]
        drawn = transport._noise(
            torch.stack([group.mean(0) for group in groups]),
            torch.tensor([len(group) / (3 * (70 - length)) for group in groups], dtype=torch.float64).view(-1, 1, 1),
        )
        noise = torch.linalg.matrix_norm(drawn, 2).square().mean().sqrt()
        squares = mean.square().sum() - drawn.square().sum((-2, -1)).mean()
        for figure, expected in (
            (found.norm, torch.linalg.matrix_norm(mean, 2)), (found.noise, noise),
            (found.typical, (squares / 4).clamp(min=0).sqrt()), (found.size, (routes.square().mean() * 4).sqrt()),
        ):  # fmt: skip
            torch.testing.assert_close(figure[number, 0], expected, rtol=1e-12, atol=1e-14)
    coarse = mean_transport(dr.Householder(w, beta), [1, 2, 4, 8, 16, 32], routes=24)
    fine = mean_transport(dr.Householder(w, beta), [1, 2, 4, 8, 16, 32], routes=10**6)
    assert ((coarse.norm - fine.norm).abs() < 4 * coarse.noise + 4 * fine.noise).all()


def test_largest_singular_values() -> None:
    turned, also_turned = torch.linalg.qr(normal(2, 9, 9)).Q
    for values in (
        torch.rand(9, generator=seed()).double(),
        torch.ones(9).double(),  # nothing stands out
        1 - 1e-9 * torch.arange(9).double(),  # hardly anything does
        torch.tensor([1e-200, 1e-210, *[0.0] * 7], dtype=torch.float64),  # whose squares are zero
        torch.zeros(9).double(),
    ):
        found = transport.largest_singular_value(turned @ values.diag() @ also_turned)
        torch.testing.assert_close(found, values.max(), rtol=1e-12, atol=1e-250)


def test_rope_has_no_gap() -> None:
    found = mean_transport(dr.Rotation(torch.tensor([1.0, 0.1]).expand(2, 256, 1, 2)))
    torch.testing.assert_close(found.norm, torch.ones_like(found.norm))
    assert found.decay(0).gap is None
    assert found.decay(0).gap_ceiling < 1e-9


def test_noise_is_told_from_transport() -> None:
    found = mean_transport(dr.Rotation(uniform(8, 300, 1, 4, widest=math.pi)))  # one step mixes
    assert (found.norm < 3 * found.noise).all()
    assert (found.typical < found.norm).all()
    assert fit_decay(found.lengths, found.norm[:, 0], found.noise[:, 0]).used == 0
    # 8 · 299 independent phasors, four pairs of which the largest counts
    assert 0.5 < float(found.noise[0]) / math.sqrt(1 / (8 * 299)) < 3


def test_decay_of_exact_norms() -> None:
    lengths = [1, 2, 4, 8, 16]
    decay = fit_decay(lengths, 0.7 * torch.tensor([0.9**n for n in lengths]), torch.full((5,), 1e-3))
    assert decay.rate == pytest.approx(0.9, abs=1e-6)
    assert decay.used == 5
    floor = fit_decay(lengths, torch.tensor([0.5, 0.25, 0.06, 0.01, 0.5]), torch.full((5,), 0.01))
    assert floor.used == 3  # what rises out of the noise again is noise
    assert floor.rate == pytest.approx(0.5, abs=0.01)


# Bounds.


def test_windows() -> None:
    for step in (0.1, 0.5, 0.99):
        window = theory.mixing_window(step, 0.05)
        assert window is not None
        assert step**window <= 0.05 < step ** (window - 1)
    assert theory.mixing_window(0.0, 0.05) == theory.mixing_window(0.01, 0.05) == 1
    assert theory.mixing_window(1.0, 0.05) is None
    assert theory.harmonic_window([0.5, 0.9], 0.1) == theory.mixing_window(0.9, 0.1)
    assert theory.harmonic_window([0.5, 1.0], 0.1) is None
    with pytest.raises(ValueError, match="tolerance: expected a number between 0 and 1, got 2"):
        theory.mixing_window(0.5, 2)
    with pytest.raises(ValueError, match="step: expected a norm"):
        theory.mixing_window(-0.5, 0.1)


def test_score_gap() -> None:
    blocks, draws, routes = 32, 20_000, 4
    scores = theory.matched_score(uniform(draws, routes, blocks, widest=math.pi)).amax(-1)
    for threshold in (0.2, 0.3, 0.5):
        bound = theory.far_score_chance(threshold, blocks, 0.0, routes)
        assert float((scores >= threshold).double().mean()) <= bound
    assert bound < 0.1  # and says something
    near = theory.matched_score(uniform(draws, blocks, widest=0.4))
    assert float(near.min()) >= theory.near_score(0.4)
    points = torch.nn.functional.normalize(normal(draws, 64), dim=-1)[:, 0]
    for threshold in (0.1, 0.2, 0.3):
        chance = float((points >= threshold).double().mean())
        assert chance <= theory.far_score_chance_orthogonal(threshold, 64)
    assert theory.far_score_chance_orthogonal(0.5, 64, to_haar=0.01, routes=3) == pytest.approx(0.03, rel=0.1)
    turned = torch.matrix_exp(0.05 * (normal(64, 64) - normal(64, 64).mT))
    closeness = float(torch.linalg.matrix_norm(turned - torch.eye(64, dtype=torch.float64), 2))
    q, k = torch.nn.functional.normalize(normal(2, 64), dim=-1)
    assert float(q @ turned @ k) >= theory.near_score_orthogonal(float(q @ k), closeness)


def test_far_mass_is_between_its_bounds() -> None:
    for near, far, spread in ((1, 50, 1.0), (8, 500, 0.3), (3, 7, 3.0)):
        for logits in spread * normal(200, near + far):
            weights = logits.softmax(0)
            mass, norm = float(weights[near:].sum()), float(weights[near:].norm())
            margin = float(logits[:near].min() - logits[near:].max())
            assert mass <= theory.far_mass_ceiling(margin, near, far) + 1e-12
            assert norm <= theory.far_weight_ceiling(margin, near, far) + 1e-12
            highest = float(logits[:near].max() - logits[near:].min())
            assert mass >= float(theory.far_mass_floor(highest, near, far)) - 1e-12
            assert mass >= float(theory.far_mass_floor(2 * float(logits.abs().max()), near, far)) - 1e-12
    assert float(theory.far_mass_floor(4.0, 8, 10**9)) > 0.999999  # whatever the transport
    assert theory.near_signal_ceiling(0.9) == pytest.approx(0.1)
    scale = theory.scale_needed(0.5, near=2, far=1000, mass=0.01, weight=0.02)
    assert theory.far_mass_ceiling(0.5 * scale, 2, 1000) <= 0.01
    assert theory.far_weight_ceiling(0.5 * scale, 2, 1000) <= 0.02
    assert theory.far_mass_ceiling(0.49 * scale, 2, 1000) > 0.01  # no more than needed, up to rounding x / (1 + x) to x
    with pytest.raises(ValueError, match="gap: expected a positive"):
        theory.scale_needed(0.0, 1, 1, 0.1, 0.1)


def test_value_cancellation_is_bounded() -> None:
    draws, far, blocks, widest, chance = 400, 4000, 4, 3.0, 0.1
    rho = theory.uniform_angles(widest)
    routes = uniform(draws, far, blocks, widest=widest).cumsum(1)  # nested: each goes one token farther
    logits = 0.5 * theory.matched_score(routes)
    for weights, coupled in (
        (torch.full((draws, far), 1 / far, dtype=torch.float64), False),
        (logits.softmax(1), True),
    ):
        operator = torch.polar(weights.unsqueeze(-1).expand_as(routes), routes).sum(1).abs().amax(-1)
        norm = float(weights.norm(dim=1).max())
        if coupled:
            bound = theory.coupled_radius(1.0, norm, rho, blocks, chance, scale=0.5, remaining=rho)
        else:
            bound = theory.prefix_radius(1.0, norm, rho, blocks, chance, remaining=rho)
        assert bound < 1
        assert float((operator > bound).double().mean()) <= chance
    assert theory.prefix_radius(0.3, 0.1, 1.0, 4, 0.1) == 0.3  # no gap, no cancellation
    assert theory.coupled_radius(0.3, 1e-9, 0.0, 4, 0.1, scale=1e4, remaining=0.0) == 0.3


def test_far_covariance_of_a_shared_background() -> None:
    weights, phases = torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64), uniform(3, widest=2.0)
    turned = torch.polar(weights, phases)
    shared, own = 2.0, 0.5
    background = torch.view_as_complex(normal(200_000, 2)) * shared
    noise = torch.view_as_complex(torch.randn(200_000, 3, 2, generator=seed(2), dtype=torch.float64)) * own
    outputs = torch.view_as_real(((background.unsqueeze(1) + noise) * turned).sum(1))
    expected = theory.far_covariance(float(turned.sum().abs()), float(weights.norm()), shared, own)
    # The covariance of a plane's isotropic Gaussian, off by √(2 / draws) in relation to itself, twice over two axes
    assert float(torch.linalg.matrix_norm(outputs.T.cov(), 2)) == pytest.approx(
        expected, rel=6 * math.sqrt(2 / 200_000)
    )


def test_position_alone_can_stay_coherent() -> None:
    lengths = torch.arange(30, 130)
    even, every_fifth = torch.full((100,), 0.004), torch.where(lengths % 5 == 0, 0.02, 0.0)
    assert theory.fixed_coherence(every_fifth, lengths, [2 * math.pi / 5]) == pytest.approx(0.4, rel=1e-6)
    assert theory.fixed_coherence(even, lengths, [2 * math.pi / 5]) < 1e-6
    assert theory.fixed_coherence(even, lengths, [2 * math.pi / 5, 1e-5]) == pytest.approx(0.4, rel=1e-4)


def test_chosen_phases_do_not_cancel() -> None:
    norm_ceiling, floor, chance = theory.adaptive_selection(2000, 0.5)
    held = 0
    for phases in uniform(200, 2000, widest=math.pi):
        chosen = phases[phases.abs() <= 0.5]
        held += (
            len(chosen) ** -0.5 <= norm_ceiling
            and float(torch.polar(torch.ones_like(chosen), chosen).mean().abs()) >= floor
        )
    assert held / 200 >= chance


def test_near_signal() -> None:
    length, deviation, routes, blocks, chance = 6, 0.05, 5, 8, 0.05
    closeness = theory.near_closeness(length, deviation, routes, blocks, chance, drift=0.1)
    phases = 0.1 + deviation * normal(2000, routes, blocks, length).sum(-1)
    off = (2 * (phases / 2).sin().abs()).amax((1, 2))
    assert float((off > closeness).double().mean()) <= chance
    weights = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1], dtype=torch.float64)
    gain = torch.polar(weights.view(1, -1, 1).expand_as(phases), phases).sum(1).abs().amin(-1)
    floor = theory.near_signal_floor(0.2, closeness)
    assert float((gain < floor).double().mean()) <= chance
    assert floor > 0.3
    assert float(gain.max()) <= theory.near_signal_ceiling(0.2) + 1e-12


# Attention of single queries.


@pytest.mark.parametrize("score", ["softmax", "stick-breaking", dr.Power(2)])
@pytest.mark.parametrize("kind", ["none", "rotation", "values", "householder", "both"])
def test_attention_is_that_of_the_definition(kind: str, score: Any) -> None:
    q, k, v = normal(2, 40, 4, 6), normal(2, 40, 2, 6) + 0.1, normal(2, 40, 2, 6) - 0.2
    gate = -uniform(2, 40, 4).abs()
    transport: Any = None
    if kind == "householder":
        transport = dr.Householder(torch.nn.functional.normalize(k * v, dim=-1), 1 + uniform(2, 40, 2))
    elif kind != "none":
        transport = dr.Rotation(uniform(2, 40, 1, 3, widest=2.0), values=kind == "values")
    if kind == "both":
        transport = transport, dr.Householder(torch.nn.functional.normalize(k * v, dim=-1), 1 + uniform(2, 40, 2))
    expected = dr.attend(q, k, v, transport=transport, log_gate=gate, score=score, impl="reference")
    places = torch.tensor([0, 1, 17, 39])
    k, v = (attention.per_head(x, 4) for x in (k, v))
    distance = places.unsqueeze(-1) - torch.arange(40)
    logits = attention.logits_of(q, k, transport, 6**-0.5, places)
    sums = attention.gate_sums(gate, places)
    weights = attention.weights_of(logits, sums, score, distance)
    output = attention.carried_sum(weights, v, transport, places) if kind == "values" else weights @ v.transpose(1, 2)
    torch.testing.assert_close(output.transpose(1, 2), expected[:, places], rtol=1e-9, atol=1e-9)


def test_routes_that_turn_and_reflect() -> None:
    """Their mean transport and what they carry, by products of matrices."""
    angles = uniform(2, 40, 1, 2, widest=2.0)
    w, beta = torch.nn.functional.normalize(normal(2, 40, 2, 4), dim=-1), 1 + uniform(2, 40, 2)
    both = dr.Rotation(angles), dr.Householder(w, beta)
    turns = attention.turn(torch.eye(4, dtype=torch.float64), angles.unsqueeze(3)).mT  # rows are turned unit vectors
    steps = turns @ (torch.eye(4, dtype=torch.float64) - beta[..., None, None] * w.unsqueeze(-1) * w.unsqueeze(-2))
    found, expected = mean_transport(both, [1, 3, 8], routes=10**6), mean_transport(steps, [1, 3, 8], routes=10**6)
    torch.testing.assert_close(found.norm, expected.norm)
    v, places, weights = normal(2, 40, 2, 4), torch.tensor([12]), torch.zeros(2, 2, 1, 40, dtype=torch.float64)
    weights[..., 9] = 1
    route = steps[:, 10] @ steps[:, 11] @ steps[:, 12]  # (B, H, D, D)
    carried = (route.mT @ v[:, 9].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(attention.carried_sum(weights, v, both, places)[:, :, 0], carried)


def test_blocks_of_reflections_are_steps_one_by_one() -> None:
    tokens, places = 150, torch.tensor([0, 5, 63, 64, 100, 127, 128, 149])  # two blocks and a rest
    w, beta = torch.nn.functional.normalize(normal(2, tokens, 2, 4), dim=-1), 1 + uniform(2, tokens, 2)
    q, k, v = uniform(3, 2, tokens, 2, 4)
    behind = torch.arange(tokens) <= places.unsqueeze(-1)
    weights = uniform(2, 2, 8, tokens).abs() * behind
    logits = attention.logits_of(q, k, dr.Householder(w, beta), 0.5, places)
    carried = attention.carried_sum(weights, v, dr.Householder(w, beta), places)
    for number, place in enumerate(places.tolist()):
        query, expected, arrived = (
            q[:, place],
            torch.zeros(2, 2, tokens, dtype=torch.float64),
            torch.zeros_like(q[:, 0]),
        )
        for back, token in zip(range(place, -1, -1), range(place + 1), strict=True):
            expected[..., back] = 0.5 * (query * k[:, back]).sum(-1)
            query = reflected(query, w[:, back], beta[:, back])
            arrived = reflected(arrived, w[:, token], beta[:, token]) + weights[..., number, token, None] * v[:, token]
        torch.testing.assert_close(logits[:, :, number] * behind[number], expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(carried[:, :, number], arrived, rtol=1e-11, atol=1e-12)


def reflected(x: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return x - (beta * (x * w).sum(-1)).unsqueeze(-1) * w


# Ranges.


def test_far_tokens_are_counted_for_what_gates_let_through() -> None:
    lengths = [1, 2, 4, 8, 16, 32]
    for slope in (0.02, 0.5):
        tokens = FarTokens(5, lengths, [math.exp(-slope * n) for n in lengths])
        for length in (4, 5, 20, 32, 100):
            expected = sum(math.exp(-slope * n) for n in range(5, length + 1))
            assert tokens.at(length) == pytest.approx(expected)
        for length in (7, 40):
            assert tokens.reaching(tokens.at(length)) == pytest.approx(length, rel=1e-6)
        assert tokens.reaching(tokens.at(10**6) * 1.001) == math.inf
    plain, open_gates = FarTokens(5, lengths, None), FarTokens(5, lengths, [1.0] * 6)
    assert plain.at(40) == open_gates.at(40) == 36
    assert plain.reaching(36) == open_gates.reaching(36) == 40
    for closed in (0.0, 1e-310):  # by gates that are shut long before the last length, nothing more comes
        shut = FarTokens(5, lengths, [1e-3, 1e-6, 1e-12, 1e-30, closed, closed])
        assert shut.reaching(1e300) == math.inf > shut.reaching(shut.at(6))
        assert shut.reaching(2 * shut.at(100)) == math.inf


def test_ranges() -> None:
    tokens = FarTokens(10, [1], None)
    borne = predict(0.01, tokens, trained=50, keep=0.5)
    assert borne.tokens is not None
    near = [1 / (1 + 0.01 * tokens.at(length - 1)) for length in (50, borne.tokens)]
    assert near[1] == pytest.approx(near[0] / 2)
    assert theory.far_tokens_borne(0.0, 40) == math.inf
    with pytest.raises(ValueError, match="keep: expected a share"):
        theory.far_tokens_borne(0.1, 40, keep=1.5)
    assert middle([borne, replace(borne, tokens=None), replace(borne, tokens=None)]).tokens is None
    assert middle([]).why == "no layer could be probed"
    places = [10, 20, 40, 80, 160, 320]
    assert measure(places, [9.0, 3.0, 2.0, 2.05, 2.5, 4.0], [0.01] * 6, 50).tokens == 81
    assert measure(places, [9.0, 3.0, 2.0, 2.05, 2.5, 4.0], [0.5] * 6, 50).tokens == 161  # 2.5 may be chance
    assert measure(places, [9.0, 3.0, 2.0, 2.05, 2.0, 2.0], [0.01] * 6, 50).tokens is None
    assert "no loss was seen" in measure(places, [1.0] * 6, [0.0] * 6, 5).why


def test_errors_of_estimates() -> None:
    with pytest.raises(ValueError, match="steps: expected 32 tokens or more, got 20"):
        mean_transport(dr.Rotation(torch.zeros(2, 20, 1, 1)))
    with pytest.raises(ValueError, match=r"lengths: expected numbers between 1 and T / 2 = 20, got \[0, 3\]"):
        mean_transport(dr.Rotation(torch.zeros(2, 40, 1, 1)), [0, 3])
