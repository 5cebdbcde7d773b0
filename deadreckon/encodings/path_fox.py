"""PaTH-FoX: Householder steps and forget gates on the same route.

    H_t = I − β_t w_t w_tᵀ  as in PaTH,   f_t = σ(u · x_t + b)  as in FoX

Cost: that of PaTH and a gate. State: that of both.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, HouseholderSteps, Sizes
from deadreckon.encodings.maps import Ending, Projection, maps
from deadreckon.ops.factors import Factors


class PaTHFoX(Encoding):
    """Yang et al. 2025, section 2.

    Args:
        rank: of the low-rank projection to w.
        initial: standard deviation of the projections' initial weights; 0 for PyTorch's default.
        beta: initial β of a zero input.
        activation: after the convolution, "none" or "silu".
        norm_eps: added to ‖w‖² before w is divided by its norm.
        gate_scale: factor on log f. (flash-linear-attention has SiLU, 1e-6 and D^(−1/2).)
        recompute: less memory, slower backward pass: see :class:`deadreckon.Householder`.
    """

    def __init__(
        self,
        sizes: Sizes,
        rank: int = 32,
        initial: float = 0.02,
        beta: float = 1.0,
        activation: str = "none",
        norm_eps: float = 0.0,
        gate_scale: float = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.steps = HouseholderSteps(sizes, rank, initial, beta, activation, norm_eps, recompute=recompute)
        self.gate = Projection(sizes.d_model, sizes.n_heads, initial=initial)
        self.forget = Ending("log gate", gate_scale)

    def forward(self, x: Tensor, context: Context) -> Factors:
        low, beta, log_gate = maps(x, *self.steps.maps, (self.gate, self.forget))
        return Factors(self.steps.from_maps(low, beta, context), log_gate)
