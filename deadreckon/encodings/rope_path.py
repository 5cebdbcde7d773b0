"""RoPE-PaTH: each token applies RoPE's rotation and a Householder step to all preceding keys.

    step R_t H_t,   R_t rotates pair m by a · θ_m as in RoPE, a initially 1,   H_t = I − β_t w_t w_tᵀ as in PaTH

With β = 0 it is RoPE, so a RoPE checkpoint can start from it with unchanged logits; with a = 0 it is PaTH.

Cost: that of PaTH and three rotations. State: that of PaTH and the running angle.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, HouseholderSteps, RopeSteps, Sizes
from deadreckon.ops.factors import Factors


class RoPEPaTH(Encoding):
    """Ours.

    Args:
        rank: of the low-rank projection to w.
        base, scaling, learn_factor: of the rotation, see :class:`RopeSteps`.
        from_zero: whether β is a ramp that starts at 0: training starts from RoPE. See :class:`HouseholderSteps`.
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

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors((self.turns(x, context), self.turns.beside(self.steps(x, context))))
