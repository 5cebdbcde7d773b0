"""The blockwise path against the float64 definition: every combination, forward and every gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cases import GATES, SCORES, TRANSPORTS, Case, relative_errors, run

import deadreckon as dr
from deadreckon.lab.bench import peak_bytes

LENGTHS = itertools.cycle((1, 63, 64, 128, 100, 257, 192))
COMBINATIONS = [
    Case(*factors, length=length, seed=seed)
    for seed, (factors, length) in enumerate(zip(itertools.product(TRANSPORTS, GATES, SCORES), LENGTHS, strict=False))
]
AWKWARD = [
    Case("householder", "learned", length=1, group=3),
    Case("householder", "learned", length=8),
    Case("householder", None, length=577, batch=1, group=1),
    Case("householder", "learned", length=128, batch=1, heads=4, group=1),
    Case("householder", None, length=512, batch=1, heads=2),
    Case(None, "learned", length=256, batch=1, heads=3),
    Case("householder", "constant", length=449, batch=1),
    Case("householder", "learned", length=200, width=8, value_width=8, heads=1, group=1),
    Case("householder", "learned", length=130, width=7, value_width=3),
    Case("householder", "learned", length=150, scale=0.9),
    Case(None, "learned", length=150, scale=-0.3),
    Case("householder", "learned", length=150, scale=0.0),
    *(Case("householder", gate, length=257, beta=beta) for beta in (0.0, 1.0, 2.0) for gate in (None, "learned")),
]


def describe(case: Case) -> str:
    beta = "" if case.beta is None else f"-beta{case.beta}"
    return f"{case.transport}-{case.gate}-{case.score}-T{case.length}-D{case.width}-s{case.scale}{beta}".replace(
        " ", "_"
    )


@pytest.mark.parametrize("case", COMBINATIONS + AWKWARD, ids=describe)
def test_equals_the_definition(case: Case) -> None:
    """float64: to rounding. float32: 1e-5 forward, 1e-4 for every gradient."""
    expected = run(case, impl="reference")
    for dtype, limit, grad_limit in ((torch.float64, 1e-13, 1e-11), (torch.float32, 1e-5, 1e-4)):
        errors = relative_errors(run(case, dtype, impl="blockwise"), expected)
        bad = {n: e for n, e in errors.items() if not e <= (limit if n == "output" else grad_limit)}
        assert not bad, f"{dtype}: {bad}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case("householder", "learned", length=200), Case("rotation", None, length=200)])
def test_half_precision_is_no_worse_than_the_definition_in_it(case: Case, dtype: torch.dtype) -> None:
    """At most twice the error that the definition makes in the same precision."""
    expected = run(case, impl="reference")
    ours = relative_errors(run(case, dtype, impl="blockwise"), expected)
    plain = relative_errors(run(case, dtype, impl="reference"), expected)
    assert all(ours[name] <= 2 * plain[name] for name in expected), (ours, plain)


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("transport", ["rotation of values", "householder"])
def test_packed_documents_equal_separate_ones(transport: str, score: object) -> None:
    lengths = [1, 70, 5, 0, 130, 64, 70, 3]
    case = Case(transport, "learned", score, length=sum(lengths), batch=1)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = run(case, cu_seqlens=bounds, impl="blockwise")
    by_definition = run(case, cu_seqlens=bounds, impl="reference")
    assert max(relative_errors(packed, by_definition).values()) < 1e-11
    leaves = case.inputs()
    for start, end in itertools.pairwise(bounds.tolist()):
        if end > start:
            alone = case.attend({name: x[:, start:end] for name, x in leaves.items()}, impl="blockwise")
            torch.testing.assert_close(packed["output"][:, start:end], alone)


def test_gates_that_forget_at_once_lose_nothing_that_matters() -> None:
    """Strong gates make blocks that are left out; what is left must still be exact, and quick."""
    case = Case("householder", "learned", length=700, batch=1)
    leaves = case.inputs()
    leaves["log_gate"] = leaves["log_gate"] * 5
    expected = case.attend(leaves, impl="reference")
    found = case.attend({name: x.float() for name, x in leaves.items()}, impl="blockwise")
    assert (found.double() - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("factor", [1e-18, 1e18])
def test_power_neither_overflows_nor_vanishes(factor: float) -> None:
    case = Case(None, "learned", dr.Power(4), length=150)
    leaves = case.inputs()
    expected = case.attend(leaves, impl="reference")
    large = {name: (x * factor if name in ("q", "k") else x).float() for name, x in leaves.items()}
    found = case.attend(large, impl="blockwise")
    assert (found.double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
@pytest.mark.parametrize("score", ["softmax", "stick-breaking", dr.Power(2)], ids=str)
@pytest.mark.parametrize("gate", [None, "learned"])
def test_memory_is_linear_in_length(transport: str | None, score: object, gate: str | None) -> None:
    """Forward and backward, output included: twice the tokens, not much more than twice the memory."""

    def peak(length: int) -> int:
        case = Case(transport, gate, score, length=length, batch=1, heads=1, group=1, width=16, value_width=16)
        leaves = {name: x.float().requires_grad_() for name, x in case.inputs().items()}
        return peak_bytes(lambda: case.attend(leaves, impl="blockwise").sum().backward())

    # 128 × 128 logits of a tile are a constant; measure where they no longer count.
    assert peak(8192) < 2.6 * peak(4096)


def test_gradcheck() -> None:
    """Our gradients against finite differences, which know nothing of the definition."""
    case = Case("householder", "learned", length=70, batch=1, heads=1, group=2, width=4, value_width=3)
    leaves = {name: x.requires_grad_() for name, x in case.inputs().items()}
    names = list(leaves)

    def attend(*values: torch.Tensor) -> torch.Tensor:
        return case.attend(dict(zip(names, values, strict=True)), impl="blockwise")[:, 60:]

    assert torch.autograd.gradcheck(attend, list(leaves.values()), fast_mode=True)


def test_autocast_does_not_touch_what_must_stay_exact() -> None:
    case = replace(Case("householder", "learned"), length=150)
    leaves = {name: x.float() for name, x in case.inputs().items()}
    expected = case.attend(leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(case.attend(leaves), expected)
