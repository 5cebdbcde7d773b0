"""ALiBi: a constant gate for each head, log f = −m, so that a key loses m for every token on its route.

The slopes are the geometric sequence 2^(−8/n), 2^(−16/n), … for n heads a power of two; for other n, that of the next
smaller power followed by every other slope of the next larger one.

Cost: a bias of the logits. State: keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encoding import Context, Encoding, Sizes
from deadreckon.factors import Factors


def slopes(heads: int) -> list[float]:
    """One slope a head."""
    power = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return found + [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]


class ALiBi(Encoding):
    """Press et al. 2022."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.n_heads

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(log_gate=-torch.tensor(slopes(self.heads), device=x.device))
