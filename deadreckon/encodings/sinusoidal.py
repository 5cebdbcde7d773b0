"""Sinusoids of the absolute position, added to the embeddings; attention itself is plain.

    p_t = [sin(t · ω), cos(t · ω)],   ω_m = 10000^(−2m / d_model)

In training, positions may start at a random offset, so that a model also sees those of longer sequences.

Cost: one addition. State: keys and values, and the position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, rope_angles
from deadreckon.ops.factors import Factors


class Sinusoidal(Encoding):
    """Vaswani et al. 2017.

    Args:
        gain: amplitude of the sinusoids; the default matches embeddings with a standard deviation of 0.02.
        shift: in training, the positions of each row start at an offset drawn from 0 to this, which packed documents
            share.
    """

    def __init__(self, sizes: Sizes, base: float = 10000.0, gain: float = 0.03, shift: int = 0) -> None:
        super().__init__()
        if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
            raise ValueError(f"sinusoidal: expected shift to be an integer of 0 or more, got {shift!r}")
        if sizes.d_model % 2:
            raise ValueError(f"sinusoidal: expected an even d_model, got {sizes.d_model}")
        self.base, self.gain, self.shift = base, gain, shift

    def embed(self, x: Tensor, context: Context) -> Tensor:
        positions = context.positions
        if self.training and self.shift:
            shift = torch.randint(0, self.shift + 1, (x.shape[0], 1), device=x.device)
            positions = positions + context.drawn_alike(shift)
        phase = positions.unsqueeze(-1) * rope_angles(x.shape[-1], self.base, x.device)
        return x + (self.gain * torch.cat([phase.sin(), phase.cos()], dim=-1)).to(x.dtype)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors()
