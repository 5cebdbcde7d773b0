"""Symmetric power attention: an even power in place of the exponential, with fixed rotations.

    weight = (q_iᵀ R^{i−j} k_j)^p,   θ_m = 2π / N^{2m / D},   N the longest document

A power is a dot product of symmetric tensor powers, so that a state of fixed size can hold all keys.

Cost: linear in T, or that of attention where that is less. State: keys and values, until a state of
C(D + p − 1, p) · (D + 1) numbers is smaller.
"""

from __future__ import annotations

import math

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, every_token
from deadreckon.ops.factors import Factors, Form, Power, Rotation


class Sympow(Encoding):
    """Buckman et al. 2024, with the angles of Kumar et al. 2025.

    Args:
        p: the power, even.
        form: how to compute it, as for `Power`: "attention" is quadratic in T, "chunked" linear; "auto" picks by size.
    """

    def __init__(self, sizes: Sizes, p: int = 2, form: Form = "auto") -> None:
        super().__init__()
        self.head_dim, self.longest, self.score = sizes.even_head_dim, sizes.max_length, Power(p, form)

    def forward(self, x: Tensor, context: Context) -> Factors:
        angles = 2 * math.pi * context.rope_angles(self.head_dim, self.longest)
        return Factors(Rotation(every_token(angles, x)), score=self.score)
