"""Conformal symmetric power attention: a token scales all that lies behind it, and chooses how fast it turns.

    weight = Π γ · (q_iᵀ R(Σ β θ) k_j)^p,   γ_t = σ(w · x_t),   β_t = 1 + tanh(u · x_t),   θ_m = 2π / N^{2m / D}

over the tokens of the route, N the longest document. γ is each head's own; β is the layer's.

Cost: linear in T, or that of attention while that is less. State: the running angle; and keys, values and gates, until
C(D + p − 1, p) · (D + 1) numbers a gate take less room.
"""

from __future__ import annotations

import math

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, ForgetGate, Projection, Sizes, at_least_single, rope_angles
from deadreckon.ops.factors import Factors, Power, Rotation


class ConformalSympow(Encoding):
    """Kumar et al. 2025.

    Args:
        p: the power, even.
    """

    def __init__(self, sizes: Sizes, p: int = 2) -> None:
        super().__init__()
        self.head_dim, self.longest, self.score = sizes.even_head_dim, sizes.max_length, Power(p)
        self.gate = ForgetGate(sizes.d_model, sizes.n_heads, bias=False)
        self.pace = Projection(sizes.d_model, 1, bias=False)

    def forward(self, x: Tensor, context: Context) -> Factors:
        angles = 2 * math.pi * rope_angles(self.head_dim, self.longest, x.device)
        pace = 1 + at_least_single(self.pace(x)).tanh()  # (B, T, 1)
        return Factors(Rotation((pace * angles).unsqueeze(2)), self.gate(x), self.score)
