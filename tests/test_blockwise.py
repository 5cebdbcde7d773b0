"""The blockwise path against the float64 definition: every combination, forward and every gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import GATES, SCORES, TRANSPORTS, Case, relative_errors, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.bench.timing import peak_bytes
from deadreckon.ops.blockwise import attend
from deadreckon.ops.blockwise.dense import DenseBlocks
from deadreckon.ops.blockwise.runs import Gate

LENGTHS = itertools.cycle((1, 63, 64, 128, 100, 257, 192))
COMBINATIONS = [
    Case(*factors, length=length, seed=seed, batch=1 if length > 128 else 2)  # rows do not differ by length
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
    Case("rotation of values and householder", "learned", length=200, group=3),
    *(
        Case("householder", gate, length=257, batch=1, beta=beta)
        for beta in (0.0, 1.0, 2.0)
        for gate in (None, "learned")
    ),
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
@pytest.mark.parametrize("transport", ["rotation of values", "householder", "rotation of values and householder"])
def test_packed_documents_equal_separate_ones(transport: str, score: object) -> None:
    lengths = [1, 70, 5, 0, 130, 64, 70, 3, 90]  # 70 and 90 share a batch, with padding
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


def test_sums_of_gates_stay_small_within_a_leaf() -> None:
    """At T = 1024 gates add up to −700. A stock kernel adds ± 32 of them to a logit: rounding that costs 32 ε / 2."""
    case = Case(None, "learned", length=1024, batch=1, heads=1, group=1)
    leaves = case.inputs()
    leaves["log_gate"] = leaves["log_gate"] * 4
    expected = case.attend(leaves, impl="reference")
    found = case.attend({name: x.float() for name, x in leaves.items()}, impl="blockwise")
    assert (found.double() - expected).norm() / expected.norm() < 32 * torch.finfo(torch.float32).eps / 2


LARGE_LOGITS = [
    Case(None, "learned", length=150, batch=1, scale=20.0),
    Case("householder", None, length=150, batch=1, scale=20.0),
    Case("householder", "learned", length=150, batch=1, scale=20.0),
    Case("householder", "learned", "stick-breaking", length=150, batch=1, scale=20.0),
]


@pytest.mark.parametrize("case", LARGE_LOGITS, ids=describe)
def test_large_logits_cost_what_their_rounding_costs(case: Case) -> None:
    """float32 gradients where logits reach hundreds.

    The definition rounds a logit z to ε|z| / 2 and knows the row's maximum exactly. A kernel that goes back from the
    log-sum-exp rounds that, too, to ε|z| / 2 at most: to each weight of the row the same. So weights are off by twice
    as much, the row's sums of them by up to √T times that of independent errors, which is what PyTorch's own kernel
    shows, without anything on the route. Twice the error of either is the limit.
    """
    plain = replace(case, transport=None, gate=None, score="softmax")
    stock = relative_errors(run(plain, torch.float32, impl="blockwise"), run(plain, impl="reference"))
    expected = run(case, impl="reference")
    definition = relative_errors(run(case, torch.float32, impl="reference"), expected)
    ours = relative_errors(run(case, torch.float32, impl="blockwise"), expected)
    for name, error in ours.items():
        own = {"w": "k", "beta": "k", "log_gate": "k"}.get(name, name)  # sums of the logits' gradients, as dk
        assert error <= 2 * max(definition[name], stock[own]), (name, error, definition[name], stock[own])


@pytest.mark.parametrize(("length", "strength"), [(1024, 20.0), (4096, 0.5)])
def test_sums_of_gates_lose_no_digits(length: int, strength: float) -> None:
    """They grow to −3480 and −380: what they are rounded by, 2⁻²⁴ of that, must not be in the logits.

    Within a leaf sums are at most 32 from its middle, and a logit has two of them: it is off by 2⁻¹⁸, so is a weight.
    """
    case = Case(None, "learned", length=length, batch=1, heads=1, group=1)
    leaves = case.inputs()
    leaves["log_gate"] = leaves["log_gate"] * strength
    expected = case.attend(leaves, impl="blockwise")
    found = case.attend({name: x.float() for name, x in leaves.items()}, impl="blockwise")
    assert (found.double() - expected).norm() / expected.norm() < 2**-18


@pytest.mark.parametrize("factor", [1e-18, 1e18])
def test_power_neither_overflows_nor_vanishes(factor: float) -> None:
    case = Case(None, "learned", dr.Power(4), length=150)
    leaves = case.inputs()
    expected = case.attend(leaves, impl="reference")
    large = {name: (x * factor if name in ("q", "k") else x).float() for name, x in leaves.items()}
    found = case.attend(large, impl="blockwise")
    assert (found.double() - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize(
    ("transport", "score", "gate"),
    [
        (None, "softmax", "learned"),
        (None, "stick-breaking", None),
        (None, dr.Power(2), "learned"),
        ("rotation", dr.Power(2, form="attention"), None),
        ("rotation of values", "softmax", "learned"),
        ("rotation per query head", "stick-breaking", "learned"),
        ("householder", "softmax", None),
        ("householder", "softmax", "learned"),
        ("householder", "stick-breaking", "learned"),
        ("householder", dr.Power(2), "learned"),
    ],
    ids=str,
)
def test_memory_is_linear_in_length(transport: str | None, score: object, gate: str | None) -> None:
    """Forward and backward, output included: twice the tokens, not much more than twice the memory."""

    def peak(length: int) -> int:
        case = Case(transport, gate, score, length=length, batch=1, heads=1, group=1, width=16, value_width=16)
        leaves = {name: x.float().requires_grad_() for name, x in case.inputs().items()}
        return peak_bytes(lambda: case.attend(leaves, impl="blockwise").sum().backward())

    # 128 × 128 logits of a tile are a constant; measure where they no longer count.
    assert peak(4096) < 2.6 * peak(2048)


@pytest.mark.parametrize("group", [1, 3])
def test_wide_heads_by_the_kernel_that_takes_them(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a GPU's: here its definition, of what it is given, heads of as many channels as it can have."""

    def efficient(backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, None]:
        assert backend == "efficient" and causal
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert [x.shape[3] for x in (q, k, v)] == [304, 304, 16]
        logits = (scale * q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
        return logits.softmax(-1) @ v, None

    monkeypatch.setattr(attend, "dense_forward", efficient)
    case = Case(length=9, group=group, width=300, value_width=12)
    leaves = case.inputs()
    found = attend.wide(leaves["q"], leaves["k"], leaves["v"], 300**-0.5, "efficient")
    torch.testing.assert_close(found, case.attend(leaves, impl="reference"))


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


@pytest.mark.parametrize("score", ["softmax", "stick-breaking", dr.Power(2)], ids=str)
@pytest.mark.parametrize("transport", [None, "householder"])
def test_gates_above_one(transport: str | None, score: object) -> None:
    case = Case(transport, "learned", score, length=150)
    leaves = case.inputs()
    leaves["log_gate"] = 0.3 * torch.randn(leaves["log_gate"].shape, dtype=torch.float64)
    torch.testing.assert_close(case.attend(leaves), case.attend(leaves, impl="reference"), rtol=1e-9, atol=1e-9)


def test_gates_shorten_the_work() -> None:
    """Strong gates leave few keys in reach; without gates all are."""
    q, k = torch.randn(1, 1, 512, 1, 16), torch.randn(1, 1, 512, 16)
    lse = torch.zeros(1, 1, 512, 1)
    sums = -torch.arange(1.0, 513.0).view(1, 1, 512, 1)
    dense = DenseBlocks.choose(q, "softmax", 0.25, 64)
    blocks = list(dense.reach(q, k, Gate(sums, sums.flip(2)), lse))
    assert sum((t.stop - t.start) * (s.stop - s.start) for t, s in blocks) < 0.2 * 512 * 512
    assert list(dense.reach(q, k, None, lse)) == [(slice(0, 512), slice(0, 512))]
    k[0, 0, 0] = torch.nan  # what is no number is never out of reach
    assert sum(t.stop - t.start for t, _ in dense.reach(q, k, Gate(sums, sums.flip(2)), lse)) == 512


def test_what_gates_leave_in_reach_is_not_left_out() -> None:
    """A key far behind that wins in spite of its gate, because its logit, 60, is as high as any can be.

    All others have −60, and a gate between has −95: that is 25 less than what logits differ by.
    """
    q = torch.full((1, 256, 1, 16), 15.0)
    k = torch.full((1, 256, 1, 16), -1.0)
    k[:, 5] = 1
    v, log_gate = torch.randn(1, 256, 1, 16), torch.zeros(1, 256, 1)
    log_gate[:, 100] = -95
    found = dr.attend(q, k, v, log_gate=log_gate, impl="blockwise")
    torch.testing.assert_close(found[:, 5:], v[:, 5:6].expand(1, 251, 1, 16), rtol=0, atol=256 * math.exp(-24))


@pytest.mark.parametrize("scale", [1e-20, 1e-5, 1e6, -1e-7])
def test_unusual_scales(scale: float) -> None:
    case = Case("householder", "learned", length=70, scale=scale)
    leaves = case.inputs()
    torch.testing.assert_close(case.attend(leaves), case.attend(leaves, impl="reference"), rtol=1e-7, atol=1e-9)


def test_expanded_angles_have_their_own_gradients() -> None:
    q, k, v = (torch.randn(2, 20, 1, 8, dtype=torch.float64) for _ in range(3))

    def gradient(impl: str) -> torch.Tensor:
        angles = torch.full((1,), 0.3, dtype=torch.float64).expand(2, 20, 1, 4).requires_grad_()
        output = dr.attend(q, k, v, transport=dr.Rotation(angles), impl=impl)  # type: ignore[arg-type]
        return torch.autograd.grad(output.square().sum(), angles)[0]

    torch.testing.assert_close(gradient("blockwise"), gradient("reference"))


def test_second_derivatives_are_refused() -> None:
    case = Case("householder", length=20)
    leaves = {name: x.requires_grad_() for name, x in case.inputs().items()}
    with pytest.raises(RuntimeError, match="second derivatives need impl='reference'"):
        torch.autograd.grad(case.attend(leaves).sum(), leaves["q"], create_graph=True)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_layout_equals_the_definition(data: st.DataObject) -> None:
    """Sizes, strides and which inputs need gradients, all drawn; output and gradients in float64."""

    def pick(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    case = Case(
        pick(*TRANSPORTS), pick(*GATES), pick(*SCORES), length=pick(1, 63, 64, 65, 128, 192, 257),
        batch=pick(1, 2), heads=pick(1, 2, 3), group=pick(1, 2), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    leaves = case.inputs()
    for name, x in leaves.items():
        if x.dim() >= 3 and pick(True, False):  # laid out heads first
            leaves[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = [name for name in leaves if pick(True, False)] or ["q"]
    results = []
    for impl in ("blockwise", "reference"):
        inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
        output = case.attend(inputs, impl=impl)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = torch.autograd.grad(output, [inputs[name] for name in wanted], grad)
        results.append(dict(zip(["output", *wanted], [output.detach(), *found], strict=True)))
    errors = relative_errors(*results)
    assert all(error < 1e-9 for error in errors.values()), errors
