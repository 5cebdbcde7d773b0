"""The blockwise path on a CUDA device: every stock kernel, against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from cases import Case, relative_errors, run

import deadreckon as dr
from deadreckon.blockwise import climb, stock

EXACT = ("w", "beta", "angles", "log_gate")
CASES = [
    Case("householder", None, length=257),
    Case("householder", "learned", length=577),
    Case("householder", "learned per key head", length=300),
    Case(None, "learned", length=700),
    Case(None, "constant", length=257),
    Case("rotation of values", "learned", length=257),
    Case("rotation", None, length=257),
    Case("householder", "learned", "stick-breaking", length=257),
    Case("rotation", "learned", dr.Power(2), length=257),
]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_single_and_double_precision(case: Case) -> None:
    expected = run(case, impl="reference")
    for dtype, limit in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        errors = relative_errors(run(case, dtype, "cuda", EXACT), expected)
        assert all(error <= limit for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision(case: Case, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice the error that the definition makes in the same precision."""
    for module in (climb, stock):
        monkeypatch.setattr(module, "backend_for", lambda x: backend)
    expected = run(case, impl="reference")
    ours = relative_errors(run(case, dtype, "cuda", EXACT), expected)
    plain = relative_errors(run(case, dtype, "cpu", EXACT, impl="reference"), expected)
    assert all(ours[name] <= 2 * plain[name] for name in expected), (ours, plain)
