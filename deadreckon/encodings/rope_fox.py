"""RoPE-FoX: RoPE's rotation and forget gates on the same route.

    step angle of pair m: a · θ_m as in RoPE, a initially 1,   f_t = σ(u · x_t + b) as in FoX

With f = 1 it is RoPE, so a RoPE checkpoint can start from it with unchanged logits.

Cost: two rotations and a gate. State: keys, values and gates.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, RopeSteps, Sizes
from deadreckon.encodings.maps import Ending, Projection, maps
from deadreckon.ops.factors import Factors


class RoPEFoX(Encoding):
    """Ours.

    Args:
        base, scaling, learn_factor: of the rotation, see :class:`RopeSteps`.
        from_zero: whether log f is a ramp that starts at 0, so that training starts from RoPE: see :class:`Ending`.
    """

    def __init__(
        self,
        sizes: Sizes,
        base: float = 10000.0,
        scaling: dict[str, float] | None = None,
        learn_factor: bool = False,
        from_zero: bool = False,
    ) -> None:
        super().__init__()
        self.turns = RopeSteps(sizes, base, scaling, learn_factor)
        self.gate = Projection(sizes.d_model, sizes.n_heads, from_zero=from_zero)
        self.forget = Ending("log gate", from_zero=from_zero)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(self.turns(x, context), self.turns.gated(maps(x, (self.gate, self.forget))[0]))
