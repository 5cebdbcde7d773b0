"""Stick-breaking attention: from the nearest key to the farthest, each takes its share of the remaining weight.

    A_ij = σ(z_ij) Π_{j<s<i} (1 − σ(z_is)),   j < i

Cost: that of softmax, with keys taken in order. State: keys and values.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.ops.factors import Factors


class StickBreaking(Encoding):
    """Tan et al. 2025."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(score="stick-breaking")
