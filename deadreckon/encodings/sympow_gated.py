"""Gated symmetric power attention: fixed rotations and a learned forget gate.

    weight = Π γ · (q_iᵀ R^{i−j} k_j)^p,   γ_t = σ(w · x_t)

Cost: linear in T, or that of attention where that is less. State: keys, values and gates, until a state of
C(D + p − 1, p) · (D + 1) numbers per gate is smaller.
"""

from __future__ import annotations

import math

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, every_token
from deadreckon.encodings.maps import Ending, Projection, maps
from deadreckon.ops.factors import Factors, Form, Power, Rotation


class SympowGated(Encoding):
    """Kumar et al. 2025, section 3.1.

    Args:
        p: the power, even.
        form: how to compute it, as for `Power`: "attention" is quadratic in T, "chunked" linear; "auto" picks by size.
    """

    def __init__(self, sizes: Sizes, p: int = 2, form: Form = "auto") -> None:
        super().__init__()
        self.head_dim, self.longest, self.score = sizes.even_head_dim, sizes.max_length, Power(p, form)
        self.gate, self.forget = Projection(sizes.d_model, sizes.n_heads, bias=False), Ending("log gate")

    def forward(self, x: Tensor, context: Context) -> Factors:
        angles = 2 * math.pi * context.rope_angles(self.head_dim, self.longest)
        return Factors(Rotation(every_token(angles, x)), maps(x, (self.gate, self.forget))[0], self.score)
