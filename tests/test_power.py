"""Symmetric powers: three equivalent forms of one attention, and the paper's propositions about them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from math import comb, factorial, prod
from typing import Any

import pytest
import torch
from cases import Case, relative_errors, run
from power_cases import draw, error, next_piece, weak
from torch import Tensor
from torch._subclasses import FakeTensorMode

import deadreckon as dr
from deadreckon.lab.bench.timing import peak_bytes
from deadreckon.ops.blockwise import power
from deadreckon.ops.blockwise.power import form_for
from deadreckon.ops.blockwise.symmetric import dimension, multiplicities, symmetric_power
from deadreckon.ops.streaming.past import Past

FORMS = ("attention", "chunked", "recurrent")


def enough(form: str, *places: int) -> list[int]:
    """Fewer tokens for the recurrent form, to which all are alike once there are more than it keeps apart."""
    return [min(place, place // 6 + 10) if form == "recurrent" else place for place in places]


# The symmetric power --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "p"), [(1, 4), (3, 2), (16, 2), (5, 4), (12, 4), (4, 6), (2, 8)])
def test_a_dot_product_of_symmetric_powers_is_a_power(width: int, p: int) -> None:
    q, k = draw(2, 9, 5, width)
    found = (symmetric_power(q, p) * symmetric_power(k, p)).sum(-1)
    assert symmetric_power(q, p).shape == (9, 5, comb(width + p - 1, p))
    torch.testing.assert_close(found, (q * k).sum(-1) ** p, rtol=1e-11, atol=1e-11)
    ways = [
        factorial(p) / prod(map(factorial, Counter(indices).values()))
        for indices in itertools.combinations_with_replacement(range(width), p)
    ]
    assert multiplicities(width, p).tolist() == ways


def test_the_gradient_of_the_symmetric_power() -> None:
    for p in (2, 4):
        assert torch.autograd.gradcheck(lambda x, p=p: symmetric_power(x, p), draw(3, 4).requires_grad_())


def induced(turn: Tensor, p: int) -> Tensor:
    """The linear map that takes φ(x) to φ(turn x), found from more vectors than φ has dimensions."""
    width = turn.shape[0]
    x = draw(3 * dimension(width, p), width, seed=3)
    return torch.linalg.lstsq(symmetric_power(x, p), symmetric_power(x @ turn.T, p)).solution.T


@pytest.mark.parametrize("p", [2, 4])
def test_a_rotation_of_keys_rotates_their_powers(p: int) -> None:
    """Proposition 2: φ(Pk) = P̄ φ(k) for every k, P̄ a rotation; and routes compose."""
    first, second = (torch.linalg.qr(draw(4, 4, seed=seed)).Q for seed in (1, 2))
    first, second = (turn * torch.linalg.det(turn).sign() ** torch.tensor([1, 0, 0, 0]) for turn in (first, second))
    maps = induced(first, p), induced(second, p)
    fresh = draw(7, 4, seed=9)
    torch.testing.assert_close(symmetric_power(fresh @ first.T, p), symmetric_power(fresh, p) @ maps[0].T)
    identity = torch.eye(dimension(4, p), dtype=torch.float64)
    for turn in maps:
        torch.testing.assert_close(turn @ turn.T, identity, rtol=0, atol=1e-9)
        torch.testing.assert_close(torch.linalg.det(turn), torch.tensor(1.0).double())
    torch.testing.assert_close(maps[0] @ maps[1], induced(first @ second, p), rtol=0, atol=1e-9)


# Three forms ----------------------------------------------------------------------------------------------------------

CASES = [
    Case("rotation", None, dr.Power(2), length=1),
    Case("rotation", "learned", dr.Power(4), length=50),
    Case(None, "learned", dr.Power(2), length=129),
    Case("rotation", None, dr.Power(2), length=300, batch=1),  # propositions 1 and 3, and both at once
    Case(None, "learned", dr.Power(2), length=300, width=8),
    Case("rotation", "learned", dr.Power(2), length=300, batch=1, value_width=5),
    Case("rotation", "learned per key head", dr.Power(2), length=520, batch=1, group=3, width=8),
    Case("rotation per query head", "constant", dr.Power(2), length=300, batch=1, width=8),
    Case("rotation of values", "learned", dr.Power(2), length=300, batch=1, width=8),
    Case("rotation", None, dr.Power(4), length=300, batch=1, width=6),
    Case("rotation", "learned", dr.Power(4), length=520, width=6, batch=1),
    Case(None, "learned", dr.Power(6), length=300, width=3, batch=1),
]


@cache
def definition(case: Case) -> dict[str, Tensor]:
    return run(case, impl="reference")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.transport}-{case.gate}-p{case.score.p}-T{case.length}")
def test_the_three_forms_are_one(case: Case, form: Any) -> None:
    """float64: to rounding, which few keys magnify. float32: 1e-5 forward, 1e-4 for every gradient."""
    case = replace(case, length=enough(form, case.length)[0])
    expected = definition(case)
    case = replace(case, score=dr.Power(case.score.p, form))
    for dtype, limit, grad_limit in ((torch.float64, 1e-9, 1e-7), (torch.float32, 1e-5, 1e-4)):
        errors = relative_errors(run(case, dtype), expected)
        bad = {n: e for n, e in errors.items() if not e <= (limit if n == "output" else grad_limit)}
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.parametrize("gate", ["learned", "learned per key head"])
def test_gates_that_reach_over_several_chunks(gate: str) -> None:
    """Four chunks of 256, of which a tenth of the first is left in the last: output, gradients, and streamed."""
    case = Case("rotation", gate, dr.Power(2), length=1000, batch=1, heads=1, width=6, value_width=5)
    results = []
    for form, impl in (("attention", "reference"), ("chunked", "blockwise")):
        leaves = {name: x.requires_grad_() for name, x in weak(case.inputs()).items()}
        output = replace(case, score=dr.Power(2, form)).attend(leaves, impl=impl)
        found = torch.autograd.grad(output, list(leaves.values()), draw(*output.shape, seed=1))
        results.append({"output": output.detach(), **dict(zip(leaves, found, strict=True))})
    errors = relative_errors(results[1], results[0])
    assert max(errors.values()) < 1e-10, errors
    leaves = weak(case.inputs())
    past, outputs = Past(), []
    for start, end in itertools.pairwise((0, 90, 200, 330, *range(331, 480), 800, 1000)):
        outputs.append(next_piece(case, {name: x[:, start:end] for name, x in leaves.items()}, past))
    assert past.folded is not None
    assert error(torch.cat(outputs, dim=1), results[0]["output"]) < 1e-12


def by_matrix(leaves: dict[str, Tensor], p: int) -> Tensor:
    """The attention formulation with T × T weights, one head, rotations by complex numbers."""
    (q, k, v), phase = (leaves[name][0, :, 0] for name in "qkv"), leaves["angles"][0, :, 0].cumsum(0)
    half = q.shape[1] // 2
    q, k = (torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(phase), phase) for x in (q, k))
    sums = leaves["log_gate"][0, :, 0].cumsum(0)
    weights = (q @ k.mH).real ** p * (sums[:, None] - sums).tril().exp()
    weights = weights.tril()
    return (weights / weights.sum(-1, keepdim=True) @ v)[None, :, None]


@pytest.mark.parametrize(("p", "width"), [(2, 16), (4, 6)])
def test_the_three_forms_are_one_over_several_chunks(p: int, width: int) -> None:
    case = Case("rotation", "learned", dr.Power(p), 800, batch=1, heads=1, group=1, width=width, value_width=4)
    leaves = {name: x.requires_grad_() for name, x in case.inputs().items()}
    expected = by_matrix(leaves, p)
    grad = draw(*expected.shape, seed=1)
    wanted = dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values()), grad), strict=True))
    for form in FORMS:
        inputs = {name: x.detach().float().requires_grad_() for name, x in leaves.items()}
        output = replace(case, score=dr.Power(p, form)).attend(inputs)
        found = torch.autograd.grad(output, list(inputs.values()), grad.float())
        assert error(output, expected) < 1e-5, form
        errors = relative_errors(dict(zip(inputs, found, strict=True)), wanted)
        assert max(errors.values()) < 1e-4, (form, errors)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_equal_separate_ones(form: Any) -> None:
    lengths = enough(form, 1, 300, 5, 0, 290, 64, 3)
    case = Case("rotation", "learned", dr.Power(2, form), length=sum(lengths), batch=1, width=8)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    errors = relative_errors(run(case, cu_seqlens=bounds), run(case, cu_seqlens=bounds, impl="reference"))
    assert max(errors.values()) < 1e-8, errors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [2, 4])
def test_weights_are_a_distribution(p: int, form: Any) -> None:
    """With one-hot values the output is the weights: none negative, their sum one, none of the future."""
    [length] = enough(form, 300)
    case = Case("rotation", "learned", dr.Power(p, form), length=length, batch=1, width=6, value_width=length)
    leaves = case.inputs()
    leaves["v"] = torch.eye(length, dtype=torch.float64)[None, :, None].expand(1, length, 2, length)
    weights = case.attend(leaves)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-9)
    assert weights.min() > -1e-9
    assert weights[0].transpose(0, 1).triu(1).abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_alibi_is_a_constant_gate(form: Any) -> None:
    """Appendix A.2: a penalty of m for each token of distance, which powers take as a factor exp(−m)."""
    [length] = enough(form, 300)
    q, k, v = draw(3, 1, length, 2, 8)
    slopes = torch.tensor([0.25, 0.0625], dtype=torch.float64)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    biases = (-slopes[:, None, None] * distance).exp().tril()
    weights = torch.einsum("bihd,bjhd->bhij", q, k) ** 2 * biases
    expected = torch.einsum("bhij,bjhe->bihe", weights / weights.sum(-1, keepdim=True), v)
    found = dr.attend(q, k, v, log_gate=-slopes, score=dr.Power(2, form))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_no_worse_than_the_definition_in_it(dtype: torch.dtype) -> None:
    case = Case("rotation", "learned", dr.Power(2), length=300, batch=1, width=8)
    expected = definition(case)
    plain = relative_errors(run(case, dtype, impl="reference"), expected)
    ours = relative_errors(run(replace(case, score=dr.Power(2, "chunked")), dtype), expected)
    assert all(ours[name] <= 2 * plain[name] for name in expected), (ours, plain)


def test_auto_takes_chunks_where_they_are_faster() -> None:
    q = torch.empty(1, 1, 1, 64)
    for gated, even in ((False, 4160), (True, 2912)):
        for length, form in ((even - 1, "attention"), (even, "chunked")):
            assert form_for(dr.Power(2), q.expand(1, length, 1, 64), gated) == form
            k, log_gate = q.expand(1, length, 1, 64).squeeze(2), q.new_empty(1, length, 1) if gated else None
            states = power._room(q.expand(1, length, 1, 64), k, k, log_gate, 2, "auto", keep=True)[-1]
            assert (len(states) > 0) == (form == "chunked")
    assert form_for(dr.Power(4), q.expand(1, 65536, 1, 64), gated=False) == "attention"
    assert form_for(dr.Power(4, "chunked"), q, gated=False) == "chunked"
    with FakeTensorMode():  # which has GPUs
        for width, p, even in ((64, 2, 4576), (32, 2, 2560), (16, 4, 38760)):
            for length, form in ((even - 1, "attention"), (even, "chunked")):
                q = torch.empty(1, length, 1, width, device="cuda")
                assert form_for(dr.Power(p), q, gated=True) == form


# Memory and magnitudes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [None, "learned"])
def test_memory_is_linear_and_holds_phi_of_little(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward. φ of all queries and keys would take four times as much."""
    monkeypatch.setitem(power.HELD, "cpu", 1 << 16)

    def peak(length: int) -> int:
        case = Case(None, gate, dr.Power(4, "chunked"), length, batch=1, heads=1, group=1, width=12, value_width=8)
        leaves = {name: x.float().requires_grad_() for name, x in case.inputs().items()}
        return peak_bytes(lambda: case.attend(leaves).sum().backward())

    small, large = peak(1536), peak(3072)
    assert large < 2.2 * small
    assert large < 2 * 3072 * dimension(12, 4) * 8 / 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("p", "width"), [(2, 8), (4, 6)])
def test_huge_magnitudes(p: int, width: int, form: Any) -> None:
    """Everything times 1e4; then a key 1e3 times longer than all before it, which float32 bears to 1e-4."""
    length, place = enough(form, 600, 250)
    case = Case("rotation", None, dr.Power(p, form), length=length, batch=1, width=width)
    leaves = case.inputs()
    expected = case.attend(leaves, impl="reference")
    large = {name: (x * 1e4 if name in ("q", "k") else x).float() for name, x in leaves.items()}
    assert error(case.attend(large), expected) < 1e-5
    leaves["k"][:, place] *= 1e3
    expected = case.attend(leaves, impl="reference")
    found = case.attend({name: x.float() for name, x in leaves.items()})
    assert error(found[:, :place], expected[:, :place]) < 1e-5
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_queries_at_right_angles_to_all_keys_attend_to_nothing(form: Any) -> None:
    """Their sum of weights is what rounding leaves of zero: an output of any sign, but of no size."""
    length, place = enough(form, 600, 300)
    q, k, v = draw(3, 1, length, 1, 8).float()
    basis = torch.linalg.qr(draw(8, 8, seed=4).float()).Q
    k = k[..., :4] @ basis[:, :4].T
    q[:, place:] = q[:, place:, :, 4:] @ basis[:, 4:].T
    q.requires_grad_()
    output = dr.attend(q, k, v, score=dr.Power(2, form))
    expected = dr.attend(q.detach().double(), k.double(), v.double(), score=dr.Power(2), impl="reference")
    assert error(output[:, :place], expected[:, :place]) < 1e-5
    assert output[:, place:].abs().max() < 1.001 * v.abs().max()
    assert torch.autograd.grad(output.sum(), q)[0].isfinite().all()


# Small numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-9, -1e-9, 1e9, 0.0])
def test_half_precision_has_gradients_at_any_scale(scale: float, form: Any) -> None:
    """Weights are divided by their sum, so that no scale but 0 has a say: least of all by what halves cannot hold."""
    case = Case(None, "learned", dr.Power(2, form), length=enough(form, 300)[0], width=8, batch=1)
    found = run(replace(case, scale=scale), torch.float16, impl="blockwise")
    expected = run(case, torch.float16, impl="blockwise")
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x if scale else torch.zeros_like(x), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_first_tokens_count_whatever_their_angle(p: int, form: Any) -> None:
    """A token that sees one to three keys, all nearly at right angles to it, down to where z^p is next to nothing."""
    q, k, v = draw(3, 40, 3, 1, 4)
    for exponent, angle in enumerate(torch.logspace(0, -8, 40, dtype=torch.float64)):
        normal = torch.nn.functional.normalize(q[exponent, -1, 0], dim=0)
        along = k[exponent, :, 0] @ normal
        k[exponent, :, 0] += (angle * along - along)[:, None] * normal
    q = q[:, -1:].expand_as(q)
    expected = dr.attend(q, k, v, score=dr.Power(p), impl="reference")
    found = dr.attend(q, k, v, score=dr.Power(p, form), impl="blockwise")
    # A logit is off by ε / angle, its power by p times that.
    torch.testing.assert_close(found, expected, rtol=0, atol=float(64 * p * torch.finfo(torch.float64).eps / 1e-8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [("q",), ("k",), ("q", "k")])
def test_denormal_numbers(names: tuple[str, ...], form: Any) -> None:
    """2^-140 times as large, of which float32 keeps nine bits: those bits count as they would at any size."""
    case = Case(None, "learned", dr.Power(4, form), length=enough(form, 300)[0], width=6, batch=1)
    small = {name: x.float() * 2.0**-140 if name in names else x.float() for name, x in case.inputs().items()}
    usual = {name: x * 2.0**100 * 2.0**40 if name in names else x for name, x in small.items()}
    expected = case.attend({name: x.double() for name, x in usual.items()}, impl="reference")
    assert error(case.attend(small, impl="blockwise"), expected) < 1e-5
