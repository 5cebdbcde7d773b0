"""Selective RoPE: each token rotates all preceding keys by angles computed from the input.

    step angles at t = τ ⊙ convolve(W₂ W₁ x̂)_t,   τ_m = base^(−2m / D),   x̂ = x, each head's channels normalised

The causal convolution is depthwise, of width 4. There is one angle per key head and pair of channels. τ, the
temperature, is fixed.

Cost: that of RoPE and a low-rank projection. State: keys and values, the running angle, the convolution's last inputs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from deadreckon.encodings.base import Context, Encoding, ShortConvolution, Sizes
from deadreckon.encodings.maps import Projection
from deadreckon.ops.factors import Factors, Rotation


class SelectiveRoPE(Encoding):
    """Movahedi et al. 2026, in the published default: no phase gate, no bias.

    Args:
        rank: of W₂ W₁.
    """

    def __init__(self, sizes: Sizes, rank: int = 16, base: float = 500000.0) -> None:
        super().__init__()
        self.sizes, self.base = sizes, base
        pairs = sizes.n_kv_heads * (sizes.even_head_dim // 2)
        self.down = Projection(sizes.d_model, rank, bias=False)
        self.up = Projection(rank, pairs, bias=False)
        self.convolution = ShortConvolution(pairs, width=4)

    def forward(self, x: Tensor, context: Context) -> Factors:
        heads = self.sizes.n_heads if self.sizes.d_model % self.sizes.n_heads == 0 else 1
        share = normalize(x.unflatten(-1, (heads, -1)), dim=-1).flatten(-2)
        low, heads = self.down(share), self.sizes.n_kv_heads
        if (chosen := self.convolution.of_token(low, self.up, context, heads, unit=False)) is None:
            chosen = self.convolution(self.up(low), context, heads)
        return Factors(Rotation(chosen * context.rope_angles(self.sizes.head_dim, self.base)))
