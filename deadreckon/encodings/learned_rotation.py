"""Learned rotations: every token of the vocabulary has its own step angles, one table a layer.

    step angles at t = table[token_t],   (vocabulary, D/2), shared by heads

Cost: that of RoPE. State: keys and values, and the running angle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deadreckon.encodings.base import Context, Encoding, Sizes, at_least_single, rope_angles
from deadreckon.ops.factors import Factors, Rotation


class LearnedRotation(Encoding):
    """Queries and keys turn. Angles start uniform in [−θ, θ], θ the RoPE grid, as random rotations are drawn."""

    values = False

    def __init__(self, sizes: Sizes, base: float = 10000.0) -> None:
        super().__init__()
        if sizes.vocab_size is None:
            raise ValueError("learned-rotation: expected vocab_size, a table of angles needs it; got None")
        self.head_dim, self.base = sizes.even_head_dim, base
        self.table = nn.Parameter(torch.empty(sizes.vocab_size, self.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The grid multiplies the table: every pair starts, and is trained, on its own scale.
        nn.init.uniform_(self.table, -1, 1)

    def forward(self, x: Tensor, context: Context) -> Factors:
        if context.token_ids is None:
            raise ValueError("learned-rotation: expected token_ids beside x, angles are looked up by token; got None")
        widest = rope_angles(self.head_dim, self.base, x.device)
        angles = at_least_single(self.table[context.token_ids]) * widest
        return Factors(Rotation(angles.unsqueeze(2), self.values))


class LearnedRotationValues(LearnedRotation):
    """Queries, keys and values turn."""

    values = True
