"""FoX, the Forgetting Transformer: a learned forget gate per token and head scales the weights of preceding tokens.

    f_t = σ(u · x_t + b)

Cost: one gate per token and head. State: keys, values and gates.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.encodings.maps import Ending, Projection, maps
from deadreckon.ops.factors import Factors


class FoX(Encoding):
    """Lin et al. 2025, without the output gate and norms of its block. b starts at 0."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.forget = Projection(sizes.d_model, sizes.n_heads), Ending("log gate")

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(log_gate=maps(x, (self.gate, self.forget))[0])
