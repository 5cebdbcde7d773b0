"""RoPE-PaTH-FoX: rotations, Householder steps and forget gates on the same route.

    step R_t H_t as in RoPE-PaTH,   f_t = σ(u · x_t + b) as in FoX

With β = 0 and f = 1 it is RoPE, so a RoPE checkpoint can start from it with unchanged logits; with angles of 0 it is
PaTH-FoX.

Cost: that of PaTH-FoX and three rotations. State: that of PaTH-FoX and the running angle.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, HouseholderSteps, RopeSteps, Sizes
from deadreckon.encodings.maps import Ending, Projection, maps
from deadreckon.ops.factors import Factors


class RoPEPaTHFoX(Encoding):
    """Ours.

    Args:
        rank: of the low-rank projection to w.
        base, scaling, learn_factor: of the rotation, see :class:`RopeSteps`.
        from_zero: whether β and log f are ramps that start at 0: training starts from RoPE. See
            :class:`HouseholderSteps` and :class:`Ending`.
        recompute: less memory, slower backward pass: see :class:`deadreckon.Householder`.
    """

    def __init__(
        self,
        sizes: Sizes,
        rank: int = 32,
        base: float = 10000.0,
        scaling: dict[str, float] | None = None,
        learn_factor: bool = False,
        from_zero: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.turns = RopeSteps(sizes, base, scaling, learn_factor)
        self.steps = HouseholderSteps(sizes, rank, from_zero=from_zero, recompute=recompute)
        self.gate = Projection(sizes.d_model, sizes.n_heads, from_zero=from_zero)
        self.forget = Ending("log gate", from_zero=from_zero)

    def forward(self, x: Tensor, context: Context) -> Factors:
        low, beta, log_gate = maps(x, *self.steps.maps, (self.gate, self.forget))
        steps = self.turns.beside(self.steps.from_maps(low, beta, context))
        return Factors((self.turns(x, context), steps), self.turns.gated(log_gate))
