"""PaTH: every token reflects what lies behind it, and a route is the ordered product of its reflections.

    H_t = I − β_t w_t w_tᵀ,   w_t = normalise(convolve(low-rank linear of x))_t,   β_t = 2σ(u · x_t + b)

Cost: attention and O(T · D² · log T). State: keys, values and O(log T) products of D × D, and the convolution's tail.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, HouseholderSteps, Sizes
from deadreckon.ops.factors import Factors


class PaTH(Encoding):
    """Yang et al. 2025.

    Args:
        rank: of the linear map that w is computed by.
        activation: behind the convolution, "none" or "silu".
        initial: standard deviation of the projections' weights before training; 0 for PyTorch's default.
        beta: β of a zero input before training.
    """

    def __init__(
        self, sizes: Sizes, rank: int = 32, activation: str = "none", initial: float = 0.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self.steps = HouseholderSteps(sizes, rank, activation, initial, beta)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(self.steps(x, context))
