"""Gates that leave little or nothing, against the definition: how precise what is left is."""

from __future__ import annotations

import pytest
import torch
from cases import Case, relative_errors

import deadreckon as dr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("strength", [5.0, 100.0, 1000.0])
def test_extreme_gates_in_half_precision(strength: float) -> None:
    """At most twice the error of the definition in the same precision, where gates leave little or nothing.

    And what kernels' δ = o · do loses in a row of size 1, o being rounded by 2⁻¹¹: few rows see more than themselves.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 130, 1, 32, generator=generator, dtype=torch.float64) for _ in range(4))
    log_gate = -strength * torch.rand(1, 130, 1, generator=generator, dtype=torch.float64)

    def errors(impl: str) -> list[float]:
        leaves = [x.to(DEVICE, torch.float16).requires_grad_() for x in (q, k, v)]
        leaves.append(log_gate.to(DEVICE, torch.float32).requires_grad_())
        output = dr.attend(*leaves[:3], log_gate=leaves[3], impl=impl)
        results = output, *torch.autograd.grad(output, leaves, grad.to(DEVICE, torch.float16))
        return [float((x.cpu().double() - y).norm()) for x, y in zip(results, exact, strict=True)]

    leaves = [x.clone().requires_grad_() for x in (q, k, v, log_gate)]
    output = dr.attend(*leaves[:3], log_gate=leaves[3], impl="reference")
    exact = output.detach(), *torch.autograd.grad(output, leaves, grad)
    allowed = errors("reference")
    for impl in ("blockwise", "triton"):
        for error, definition in zip(errors(impl), allowed, strict=True):  # q, k and v are of size 1
            assert error <= 2 * definition + 2.0**-11 * 32**0.5, (impl, error, definition)


FORGETTING = [
    Case(None, "learned", length=130, batch=1, heads=1),
    Case("householder", "learned per key head", length=200, batch=1, heads=1, group=1),
    Case(None, "learned per key head", dr.Power(2, form="attention"), length=130, batch=1, heads=1),
    Case(None, "learned per key head", dr.Power(2, form="chunked"), length=130, batch=1, heads=1, width=8),
]


@pytest.mark.parametrize("case", FORGETTING, ids=lambda case: f"{case.transport} {case.score}")
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.usefixtures("short_walks")
def test_gates_that_forget_all_cost_no_digits(case: Case, impl: str) -> None:
    """Tokens before, after and between such gates: the definition's error in single precision and sixteen roundings.

    A sum of log gates that runs over one of −1e4 is off by 5e-4, a thousand times as much.
    """
    leaves, found = case.inputs(), []
    leaves["log_gate"][:, [20, 50, 100]] = -1e4
    for dtype, chosen in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, impl)):
        some = {name: x.to(DEVICE, dtype).requires_grad_() for name, x in leaves.items()}
        output = case.attend(some, impl=chosen)
        gradients = torch.autograd.grad(output.square().sum(), list(some.values()))
        found.append({"output": output.detach(), **dict(zip(some, gradients, strict=True))})
    expected, plain, ours = ({name: x.cpu() for name, x in results.items()} for results in found)
    allowed = relative_errors(plain, expected)
    for name, error in relative_errors(ours, expected).items():
        assert error <= 3 * allowed[name] + 2**-20, (name, error, allowed[name])
