"""Sinusoids of randomised positions: T sorted indices drawn without replacement from 0..L_max−1 in each forward pass.

A model trained this way sees distances up to L_max at any length (Ruoss et al. 2023). Positions are drawn in training
and in evaluation, so two forward passes differ unless the random seed is the same.

Cost: a sort of L_max numbers. State: none, no prefill and decode: each piece of a sequence would draw new positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deadreckon.encodings.base import Context, Encoding, Sizes, rope_angles
from deadreckon.ops.factors import Factors
from deadreckon.ops.tracing import traced


class Randomized(Encoding):
    """One draw for all rows of the batch; packed documents share it, each starting at the first index.

    Args:
        positions: L_max.
        gain: amplitude of the sinusoids; the default matches embeddings with a standard deviation of 0.02.
    """

    def __init__(self, sizes: Sizes, positions: int = 2048, base: float = 10000.0, gain: float = 0.03) -> None:
        super().__init__()
        if sizes.d_model % 2:
            raise ValueError(f"randomized: expected an even d_model, got {sizes.d_model}")
        self.limit, self.base, self.gain = positions, base, gain

    def embed(self, x: Tensor, context: Context) -> Tensor:
        if context.recent is not None:
            raise ValueError(
                "randomized: positions are drawn afresh for each forward pass; expected no state or cache "
                "(use_cache=False in generate())"
            )
        longest = context.length if context.cu_seqlens is None else context.cu_seqlens.diff().max()
        if not (isinstance(longest, Tensor) and traced(longest)) and longest > self.limit:
            raise ValueError(
                f"randomized: a sequence of {int(longest)} tokens needs as many positions, got {self.limit}"
            )
        drawn = context.drawn_alike(torch.randperm(self.limit, device=x.device))
        # The first `longest` indices, sorted, without slicing: `longest` may be a tensor on the device.
        drawn = drawn.masked_fill(torch.arange(self.limit, device=x.device) >= longest, self.limit).sort().values
        places = context.positions
        if context.cp is not None and context.cu_seqlens is None:
            places = places.clamp(max=self.limit - 1)  # padding of shards may go beyond
        phase = drawn[places].unsqueeze(-1) * rope_angles(x.shape[-1], self.base, x.device)
        return x + (self.gain * torch.cat([phase.sin(), phase.cos()], dim=-1)).to(x.dtype)

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors()
