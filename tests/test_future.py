"""Causality, even of NaN: one NaN or infinity at token t reaches no output before t.

Nor another row of the batch, another document, or a head that does not read it; and from t on it is not hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case

import deadreckon as dr

AT = 70  # in the second leaf, and after tokens of the same leaf
CASES = [
    Case(None, "learned", length=300),  # leaves of a stock kernel
    Case("householder", None),
    Case("householder", "learned per key head"),
    Case("householder", "learned", length=200),
    Case(None, None, "stick-breaking"),
    Case("householder", "learned", "stick-breaking"),
    Case("rotation of values", "learned", length=200),
    *(Case("rotation", "learned", dr.Power(p, form), length=300, width=6)
      for p, form in ((2, "attention"), (2, "chunked"), (4, "chunked"), (2, "recurrent"))),
    Case("householder", None, dr.Power(2)),
]  # fmt: skip
KERNELS = [
    Case(None, "learned"),
    Case("householder", None),
    Case("householder", "learned", length=200),
    Case(None, None, "stick-breaking"),
    Case("rotation of values", "learned"),
    Case(None, "learned", dr.Power(2, "attention")),
    Case(None, "learned", dr.Power(4, "attention")),
]


def describe(case: Case) -> str:
    return f"{case.transport}-{case.gate}-{case.score}-T{case.length}".replace(" ", "_")


def check(case: Case, impl: Any, **keywords: Any) -> None:
    leaves = {name: x.float() for name, x in case.inputs().items()}
    expected = case.attend(leaves, impl=impl, **keywords)
    tiled = impl == "triton" and case.transport != "householder"
    for name, x in leaves.items():
        if x.dim() < 3:
            continue
        at, before = (140, 128) if tiled and name in ("v", "angles") else (AT, AT)  # values are kept apart by tiles
        for number in (torch.nan, torch.inf) if impl == "triton" else (torch.nan, torch.inf, -torch.inf):
            if name == "log_gate" and number == -torch.inf:  # which means that all is forgotten
                continue
            bad = x.clone()
            bad[(0, at, -1, 0)[: x.dim()]] = number  # of the first row, the last head
            found = case.attend({**leaves, name: bad}, impl=impl, **keywords)
            assert torch.isfinite(found[:, :before]).all(), (name, number)
            torch.testing.assert_close(found[:, :before], expected[:, :before], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[1:], expected[1:], rtol=1e-5, atol=1e-5)
            if number != number:
                assert torch.isnan(found[0, at if name == "q" else -1]).any(), name


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_blockwise(case: Case) -> None:
    check(case, "blockwise")


@pytest.mark.parametrize("case", KERNELS, ids=describe)
def test_kernels(case: Case) -> None:
    check(replace(case, length=150, width=16, value_width=16, heads=1, group=1, batch=1), "triton")


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("case", [
    Case("householder", "learned", length=200), Case(None, "learned", length=200), Case("rotation", None, length=200),
    Case(None, None, dr.Power(2)), Case(None, None, "stick-breaking"),
], ids=describe)  # fmt: skip
def test_other_documents(case: Case, impl: Any) -> None:
    """Packed rows: neither documents before nor those after, of the same leaf or of later ones, notice."""
    if case.transport == "rotation" and impl == "blockwise":
        pytest.skip("PyTorch's own kernel, which multiplies values of later tokens by zero")
    case = replace(case, width=16, value_width=16, heads=1, group=1, batch=1)
    start, end = 60, 80
    bounds = torch.tensor([0, start, end, 90, case.length], dtype=torch.int32)
    leaves = {name: x.float() for name, x in case.inputs().items()}
    expected = case.attend(leaves, impl=impl, cu_seqlens=bounds)
    tiled = impl == "triton" and case.score != "softmax"
    for name, x in leaves.items():
        bad = x.clone()
        bad[(0, AT, -1, 0)[: x.dim()]] = torch.nan
        found = case.attend({**leaves, name: bad}, impl=impl, cu_seqlens=bounds)
        for part in (slice(0, start if tiled and name == "v" else AT), slice(end, None)):
            torch.testing.assert_close(found[:, part], expected[:, part], rtol=1e-5, atol=1e-5)
        assert not torch.isfinite(found[:, AT:end]).all(), name
