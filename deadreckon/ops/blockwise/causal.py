"""Large leaves without Householder steps: one causal call of the stock kernel, with gates as two extra channels.

With c the running sum of log gates, centred within the leaf, [q, c_i, 1] · [k, 1, −c_j] is the gated logit. The kernel
adds these channels up in the working precision, so c must stay small within a leaf: `leaf_size` ensures that. With
strong gates leaves are small and tiled instead, and a route's gate is the difference of two float64 numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deadreckon.ops.blockwise.stock import Backend, dense_backward, dense_forward, width_for

SMALLEST, LARGEST = 128, 4096  # tokens of a causal leaf
RANGE = 32.0  # of the sum of log gates in a leaf, ± 32 at most: rounding that costs 32 · 6e-8 of a weight


def leaf_size(gates: Tensor | None, length: int) -> int | None:
    """How many tokens a causal leaf may have, from log gates (N, T, 1 | G); None where gates are too strong."""
    if gates is None:
        return -(-length // 8) * 8
    size = LARGEST
    sums = torch.nn.functional.pad(gates.cumsum(1, dtype=torch.float64), (0, 0, 1, 0))
    while size >= SMALLEST:
        edges = torch.cat([sums[:, :-1:size], sums[:, -1:]], dim=1)
        # A leaf overlaps at most two of these stretches, wherever it begins.
        if edges.diff(dim=1).abs().max() <= RANGE:
            leaves = -(-length // size)
            return -(-length // (8 * leaves)) * 8
        size //= 2
    return None


class CausalLeaves:
    """M leaves of S tokens: q (M, S, G, D), k (M, S, D), v (M, S, E), sums of log gates (M, S, 1 | G) or None."""

    def __init__(
        self, backend: Backend, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, scale: float
    ) -> None:
        self.backend, self.dtype, self.scale = backend, dtype, scale
        self.channels, self.value_channels = q.shape[-1], v.shape[-1]
        self.unit: float | None = None
        extra = 0 if sums is None else 2
        self.width = width_for(backend, self.channels + extra, self.value_channels)
        self.q, keys, values = self.like(q), self.like(k.unsqueeze(2)), self.like(v.unsqueeze(2))
        if sums is not None:
            unit = 2.0 ** round(-math.log2(scale))
            self.unit = scale * unit
            middle = (sums[:, :1] + sums[:, -1:]) / 2
            local = ((sums - middle) / self.unit).mT  # (M, 1 | G, S)
            self.q[..., self.channels] = local
            self.q[..., self.channels + 1] = unit
            keys = keys.repeat(1, local.shape[1], 1, 1)
            keys[..., self.channels] = unit
            keys[..., self.channels + 1] = -local
        shared = backend in ("flash", "cudnn")  # these support GQA
        group = (-1, -1 if shared else q.shape[2], -1, -1)
        self.k, self.v = keys.expand(*group), values.expand(*group)

    def like(self, x: Tensor) -> Tensor:
        """(M, S, heads, channels) in the kernel's layout: heads first, zero-padded to its width."""
        wide = x.new_empty(x.shape[0], x.shape[2], x.shape[1], self.width, dtype=self.dtype)
        wide[..., : x.shape[-1]] = x.transpose(1, 2)
        wide[..., x.shape[-1] :] = 0
        return wide

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output (M, S, G, E) and log-sum-exp (M, S, G)."""
        out, lse = dense_forward(self.backend, self.q, self.k, self.v, self.scale, causal=True)
        return out[..., : self.value_channels].transpose(1, 2), lse.transpose(1, 2)

    def gradients(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """d q, d k, d v and, if there are gates, the sums of d log-weight by query less those by key, (M, S, G)."""
        grad_q, grad_k, grad_v = dense_backward(
            self.backend, self.like(grad), self.q, self.k, self.v, self.like(out),
            lse.transpose(1, 2).contiguous(), self.scale, causal=True,
        )  # fmt: skip
        by_query_less_by_key = None
        if self.unit is not None:
            by_query_less_by_key = (grad_q[..., self.channels] - grad_k[..., self.channels + 1]) / self.unit
            by_query_less_by_key = by_query_less_by_key.transpose(1, 2)
        return (
            grad_q[..., : self.channels].transpose(1, 2),
            grad_k[..., : self.channels].sum(1),
            grad_v[..., : self.value_channels].sum(1),
            by_query_less_by_key,
        )
