"""RoPE with value transport: each value is rotated back by its route's angle before the weighted sum.

Cost: four rotations. State: keys and values.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, every_token
from deadreckon.ops.factors import Factors, Rotation


class RoPEValues(Encoding):
    """The fixed-angle baseline with value transport of "Why Do Accumulated Transformations Extrapolate?"."""

    def __init__(self, sizes: Sizes, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = sizes.even_head_dim, base

    def forward(self, x: Tensor, context: Context) -> Factors:
        angles = context.rope_angles(self.head_dim, self.base)
        return Factors(Rotation(every_token(angles, x), values=True))
