"""Random rotations: step angles redrawn in every forward pass, so that long routes are incoherent by construction.

    step angle of pair m ~ uniform[−θ_m, θ_m],   θ the RoPE grid

independent for each token, pair and layer, shared by heads. The control of "Why Do Accumulated Transformations
Extrapolate?".

Cost: that of RoPE and a draw. State: keys and values, but decoding a sequence twice gives different outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.ops.factors import Factors, Rotation


class RandomRotation(Encoding):
    """Rotates queries and keys."""

    values = False

    def __init__(self, sizes: Sizes, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = sizes.even_head_dim, base

    def forward(self, x: Tensor, context: Context) -> Factors:
        widest = context.rope_angles(self.head_dim, self.base)
        drawn = torch.rand(x.shape[0], context.length, 1, self.head_dim // 2, device=x.device) * 2 - 1
        return Factors(Rotation(context.shard(drawn) * widest, self.values))


class RandomRotationValues(RandomRotation):
    """Rotates queries, keys and values."""

    values = True
