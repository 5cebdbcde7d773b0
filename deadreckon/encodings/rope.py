"""RoPE: every token turns what lies behind it by the same angles, so that a route's rotation is its length.

    step angle of pair m: θ_m = base^(−2m / D)

Cost: two rotations. State: keys and values.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, every_token, rope_angles
from deadreckon.ops.factors import Factors, Rotation


class RoPE(Encoding):
    """Su et al. 2024, in the pairing (m, m + D/2) of Hugging Face's Llama."""

    def __init__(self, sizes: Sizes, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = sizes.even_head_dim, base

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(Rotation(every_token(rope_angles(self.head_dim, self.base, x.device), x)))
