"""The PRISM paper's theorems on its filter: paths are pooled by position, and sharpening adds up in the exponent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_histogram import NATIVE, Case, draw
from torch import Tensor

import deadreckon as dr


def positions_of_paths(case: Case, positions: int) -> Tensor:
    """Where a cursor is after each token, (T, P): all 6^t paths of (reset or not, +1, −1 or stay), one at a time."""
    reset, move = (case[name][0, :, 0].tolist() for name in ("reset", "move"))
    result = torch.zeros(len(reset), positions, dtype=torch.float64)
    for length in range(1, len(reset) + 1):
        for path in itertools.product(itertools.product((True, False), (1, -1, 0)), repeat=length):
            place, chance = 0, 1.0
            for (back, step), p_reset, p_move in zip(path, reset, move, strict=False):
                chance *= (p_reset if back else 1 - p_reset) * p_move[(1, -1, 0).index(step)]
                place = min(max((0 if back else place) + step, 0), positions - 1)
            result[length - 1, place] += chance
    return result


@pytest.mark.parametrize("impl", ["reference", "blockwise", NATIVE])
@pytest.mark.parametrize("positions", [3, 7])
def test_unsharpened_histograms_marginalise_over_all_paths(impl: Any, positions: int) -> None:
    """Section 5.1: five tokens have 6⁵ = 7776 paths, and a histogram pools their chances by position, at both ends."""
    case = draw(1, 5, 1, positions, initial=False) | {"gamma": torch.ones(1, dtype=torch.float64)}
    found = dr.histogram_filter(**case, positions=positions, eps=1e-30, impl=impl)
    torch.testing.assert_close(found[0, :, 0], positions_of_paths(case, positions), rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", "blockwise", NATIVE])
def test_sharpening_accumulates_in_the_exponent(impl: Any) -> None:
    """Appendix A.2.1: if nothing moves, p_n ∝ p_0^(γⁿ)."""
    case = draw(2, 5, 3, 6)
    stay = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(2, 5, 3, 3)
    case |= {"reset": torch.zeros_like(case["reset"]), "move": stay}
    found = dr.histogram_filter(**case, positions=6, eps=1e-30, impl=impl)
    exponents = case["gamma"] ** torch.arange(1, 6).unsqueeze(-1)  # (T, C)
    expected = (case["initial"].log().unsqueeze(1) * exponents.unsqueeze(-1)).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
