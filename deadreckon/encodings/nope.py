"""No position encoding: plain causal attention, whose only notion of order is the mask.

Cost: none. State: keys and values.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.ops.factors import Factors


class NoPE(Encoding):
    """All factors absent (Kazemnejad et al. 2023)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors()
