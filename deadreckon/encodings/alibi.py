"""ALiBi: a constant gate per head, log f = −m, so that a key's logit loses m for every token on its route.

The slopes are the geometric sequence 2^(−8/n), 2^(−16/n), … for n heads a power of two; for other n, that of the next
smaller power followed by every other slope of the next larger one.

Cost: a bias of the logits. State: keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.ops.factors import Factors


def slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """One slope per head, (heads,)."""
    power = 1 << (heads.bit_length() - 1)
    head = torch.arange(heads, dtype=torch.float64, device=device)
    eighths = torch.where(head < power, head + 1, head - power + 0.5)
    return torch.exp2(-8 * eighths / power).float()


class ALiBi(Encoding):
    """Press et al. 2022."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.n_heads

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors(log_gate=-slopes(self.heads, x.device))
