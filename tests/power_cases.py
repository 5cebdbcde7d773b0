"""Cases shared by the tests of symmetric powers."""

from __future__ import annotations

import torch
from cases import Case
from torch import Tensor

import deadreckon as dr
from deadreckon.ops.attention import attend_next
from deadreckon.ops.streaming.past import Past


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).detach().norm() / expected.detach().norm())


def weak(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates that reach over several chunks."""
    return {name: x * 0.02 if name == "log_gate" else x for name, x in leaves.items()}


def next_piece(case: Case, piece: dict[str, Tensor], past: Past) -> Tensor:
    return attend_next(
        piece["q"], piece["k"], piece["v"],
        transport=dr.Rotation(piece["angles"]), log_gate=piece["log_gate"], score=case.score, past=past,
    )  # fmt: skip
