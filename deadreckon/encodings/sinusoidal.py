"""Sinusoids of the absolute position, added to the embeddings; attention itself is plain.

    p_t = [sin(t · ω), cos(t · ω)],   ω_m = 10000^(−2m / d_model)

Cost: one addition. State: keys and values, and the position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encoding import Context, Encoding, Sizes, rope_angles
from deadreckon.factors import Factors


class Sinusoidal(Encoding):
    """Vaswani et al. 2017.

    Args:
        gain: amplitude of the sinusoids; the default is as loud as embeddings of deviation 0.02 are.
    """

    def __init__(self, sizes: Sizes, base: float = 10000.0, gain: float = 0.03) -> None:
        super().__init__()
        if sizes.d_model % 2:
            raise ValueError(f"sinusoidal: expected an even d_model, got {sizes.d_model}")
        self.base, self.gain = base, gain

    def embed(self, x: Tensor, context: Context) -> Tensor:
        phase = context.positions.unsqueeze(-1) * rope_angles(x.shape[-1], self.base, x.device)
        return x + (self.gain * torch.cat([phase.sin(), phase.cos()], dim=-1)).to(x.dtype)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors()
