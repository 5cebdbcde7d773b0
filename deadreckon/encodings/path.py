"""PaTH: each token applies a Householder step to all preceding keys; a route is the ordered product of its steps.

    H_t = I − β_t w_t w_tᵀ,   w_t = normalise(convolve(low-rank linear of x))_t,   β_t = 2σ(u · x_t + b)

Cost: attention and O(T · D² · log T). State: keys, values, O(log T) products of D × D, and the convolution's last
inputs.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, HouseholderSteps, Sizes
from deadreckon.ops.factors import Factors


class PaTH(Encoding):
    """Yang et al. 2025.

    Args:
        rank: of the low-rank projection to w.
        initial: standard deviation of the projections' initial weights; 0 for PyTorch's default.
        beta: initial β of a zero input.
        activation: after the convolution, "none" or "silu".
        norm_eps: added to ‖w‖² before w is divided by its norm.
            (flash-linear-attention has SiLU and 1e-6.)
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
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.steps = HouseholderSteps(sizes, rank, initial, beta, activation, norm_eps, recompute=recompute)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(self.steps(x, context))
