"""RoPE: every token rotates all preceding keys by the same angles, so a route's rotation depends on its length alone.

    step angle of pair m: θ_m = base^(−2m / D)

Cost: two rotations. State: keys and values.
"""

from __future__ import annotations

from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, check_scaling, every_token
from deadreckon.ops.factors import Factors, Rotation


class RoPE(Encoding):
    """Su et al. 2024, in the pairing (m, m + D/2) of Hugging Face's Llama.

    Args:
        base, scaling: of the angles, see :func:`rope_angles`.
    """

    def __init__(self, sizes: Sizes, base: float = 10000.0, scaling: dict[str, float] | None = None) -> None:
        super().__init__()
        check_scaling(scaling)
        self.head_dim, self.base, self.scaling = sizes.even_head_dim, base, scaling

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(Rotation(every_token(context.rope_angles(self.head_dim, self.base, self.scaling), x)))
