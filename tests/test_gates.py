"""Precision with strong forget gates, against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICE, Case, relative_errors, run

import deadreckon as dr
from deadreckon.ops.triton.gated import gates


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


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize(
    ("length", "strength"),
    [*((length, strength) for length in (64, 300) for strength in (0.0, 0.2, 3.0, 1e4)), (9000, 0.2)],
)
def test_reach_is_what_bounds_say(length: int, strength: float, per_query_head: bool) -> None:
    """Block by block against the inequality itself: two blocks are in each other's reach or not."""
    numbers = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, length, heads, 8, generator=numbers).to(DEVICE) for heads in (6, 2))
    q[:, :, 2::3] *= 4  # the last of a group are the longest
    log_gate = (-strength * torch.rand(2, length, 6 if per_query_head else 2, generator=numbers)).to(DEVICE)
    log_gate[1, :, 0] *= -1  # gates that grow leave all in reach: of their own head, and of no other
    sums, most = gates.gate_sums(log_gate, 2)
    growth = torch.zeros(4, -(-length // 64), device=DEVICE)
    growth[3] = 1 / growth.shape[1]
    reach = gates.reach_of(q, k, sums.edge, most, 0.5, growth)
    longest_q = q.norm(dim=3).amax(1).view(4, -1 if per_query_head else 1, 3 if not per_query_head else 1).amax(2)
    bound = longest_q * k.norm(dim=3).amax(1).view(4, 1)
    bound[3] *= math.e
    bound = (bound + math.log(length) + 20) / math.log(2)
    if strength:
        bound[2, :1] = math.inf
    before = torch.nn.functional.pad(sums.edge[..., :-1], (1, 0))
    seen = sums.edge.unsqueeze(2) <= before.unsqueeze(3) + bound.double()[..., None, None]  # by query, by key
    blocks = seen.shape[3]
    torch.testing.assert_close(reach.first // 64, (blocks - seen.sum(3)).int(), rtol=0, atol=0)
    torch.testing.assert_close(reach.last // 64, seen.sum(2).int(), rtol=0, atol=0)


@pytest.mark.usefixtures("short_walks", "deterministic")
def test_packed_blocks_that_gates_leave_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that documents would let see a block: it has no weight, rather than what memory held before.

    Gates are so strong that exponentials are zero: nothing is lost to rounding.
    """
    case = Case("householder", "learned", length=400, batch=1, heads=1, group=1, forgetting=1000)
    bounds = torch.tensor([0, 40, 400], dtype=torch.int32, device=DEVICE)
    found = []
    for least in (1, 1000):
        monkeypatch.setattr(gates, "PRUNED", least)
        found.append(run(case, torch.float32, DEVICE, impl="triton", cu_seqlens=bounds))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("poison", ["q", "k", "gate", "growth"])
def test_what_is_no_number_bounds_nothing(poison: str) -> None:
    """That of one token."""
    q, k = torch.ones(2, 1, 256, 1, 8, device=DEVICE).clone().unbind()
    log_gate, w = torch.full((1, 256, 1), -1e3, device=DEVICE), torch.zeros(1, 256, 1, 8, device=DEVICE)
    {"q": q, "k": k, "gate": log_gate, "growth": w}[poison][:, 100] = float("nan")
    sums, most = gates.gate_sums(log_gate, 1)
    reach = gates.reach_of(q, k, sums.edge, most, 0.5, gates.growth_of(w, log_gate))
    assert reach.first.flatten().tolist() == [0] * 4
    assert reach.last.flatten().tolist() == [256] * 4


@pytest.mark.skipif(DEVICE == "cuda", reason="memory that is not touched costs nothing on a CPU alone")
def test_heads_that_lie_far_apart() -> None:
    """2³¹ elements from the first head to the third, as of a million tokens head by head: more than 32 bits hold."""
    try:
        memory = torch.empty(2**32 + 16, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine gives no addresses that it has no memory for")
    x = memory.as_strided((1, 2, 3, 8), (0, 8, 2**30, 1), 2**31)
    x.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None].expand(x.shape))
    memory[:16] = 0
    w = x[:, :, :, :1]
    assert gates.longest(x).flatten().tolist() == [8, 32, 72]
    expected = torch.tensor([2.0, 11.0, 26.0]).log() * 2
    torch.testing.assert_close(gates.growth_of(w, torch.full((1, 2, 3), 3.0)).flatten(), expected)


@pytest.mark.parametrize(("gates_of", "length"), [(2, 100), (6, 100), (2, 1100)])
def test_gradients_of_gates_are_sums_from_the_end(gates_of: int, length: int) -> None:
    """Of all routes that end later, less those that begin later, to the rounding of the result."""
    numbers = torch.Generator().manual_seed(0)
    padded = -(-length // 64) * 64
    by_query, by_key = torch.randn(2, 4, padded, 3, generator=numbers).to(DEVICE).unbind()
    by_query[:, length:] = by_key[:, length:] = 0
    log_gate = torch.zeros(2, length, gates_of, device=DEVICE)
    ends = (by_query.double() - by_key.double()).view(2, 2, padded, 3)
    ends = ends if gates_of == 6 else ends.sum(3, keepdim=True)
    expected = ends.flip(2).cumsum(2).flip(2)[:, :, :length].transpose(1, 2).flatten(2)
    found = gates.gate_gradient(by_query, by_key, log_gate, 2)
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-23, atol=1e-12)
