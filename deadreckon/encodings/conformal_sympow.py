"""Conformal symmetric power attention: each token gates all preceding keys, and sets how fast they rotate.

    weight = Π γ · (q_iᵀ R(Σ β θ) k_j)^p,   γ_t = σ(w · x_t),   β_t = 1 + tanh(u · x_t),   θ_m = 2π / N^{2m / D}

over the tokens of the route, N the longest document. γ and β are per head: to GPT-2's 124M parameters (12 layers and
heads, width 768), gates add 0.09%, both 0.18%.

Cost: linear in T, or that of attention where that is less. State: the running angle; keys, values and gates, until a
state of C(D + p − 1, p) · (D + 1) numbers per gate is smaller: for all of GPT-2, head_dim 64, 38.9 MB with p = 2 and
14.3 GB with p = 4 in bfloat16, as the paper counts; states here are in float32, beyond p = 2 in float64.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.encodings.maps import PLAIN, Ending, Projection, maps
from deadreckon.ops.factors import Factors, Form, Power, Rotation
from deadreckon.ops.pointwise import at_least_single

PACES = ("head", "layer")


class ConformalSympow(Encoding):
    """Kumar et al. 2025.

    Args:
        p: the power, even.
        pace: "head" for one β per key head, which matches the paper's parameter counts, or "layer" for one in all.
        initial: standard deviation of u's initial weights; 0 for PyTorch's default. With the small default all tokens
            rotate alike at first, as without β: random initial β are noise at every position, and cost more than β has
            gained (`results/powers-text.md`).
        form: how to compute it, as for `Power`: "attention" is quadratic in T, "chunked" linear; "auto" picks by size.
    """

    saved_without: ClassVar[dict[str, Any]] = {"pace": "layer"}

    def __init__(
        self, sizes: Sizes, p: int = 2, pace: str = "head", initial: float = 1e-6, form: Form = "auto"
    ) -> None:
        super().__init__()
        if pace not in PACES:
            raise ValueError(f"pace: expected one of {', '.join(PACES)}; got {pace!r}")
        self.head_dim, self.longest, self.score = sizes.even_head_dim, sizes.max_length, Power(p, form)
        self.gate, self.forget = Projection(sizes.d_model, sizes.n_heads, bias=False), Ending("log gate")
        paces = sizes.n_kv_heads if pace == "head" else 1
        self.pace = Projection(sizes.d_model, paces, bias=False, initial=initial)

    def forward(self, x: Tensor, context: Context) -> Factors:
        grid = ("turns of conformal powers", self.head_dim, self.longest)
        angles = context.once(grid, lambda: 2 * math.pi * context.rope_angles(self.head_dim, self.longest))
        pace, log_gate = maps(x, (self.pace, PLAIN), (self.gate, self.forget))
        pace = at_least_single(pace).tanh().unsqueeze(-1)  # (B, T, H, 1), or (B, T, 1, 1)
        return Factors(Rotation(torch.addcmul(angles, pace, angles)), log_gate, self.score)
