"""Dense blocks in the form that stock kernels take: one head width, and gates as extra channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deadreckon.ops.blockwise.runs import Gate
from deadreckon.ops.blockwise.stock import Backend, width_for


class Wide:
    """A dense block as a stock kernel takes it: one head width, and gates as extra channels.

    A key's bias is [q, unit] · [k, bias / (scale · unit)], in as many parts as its precision needs; with a bias for
    each query of a group, each query picks its own. One more channel, zero in q and `unit` in k, brings the row sums of
    the logits' gradient back in dq, as the bias channels bring the column sums in dk.
    """

    def __init__(
        self, backend: Backend, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, scale: float,
        tokens: slice, keys: slice,
    ) -> None:  # fmt: skip
        q, k, v, self.dtype = q[:, :, tokens], k[:, :, keys], v[:, :, keys], dtype
        self.channels, self.value_channels = k.shape[-1], v.shape[-1]
        self.tokens_and_group = q.shape[2:4]
        self.parts = 3 if dtype in (torch.bfloat16, torch.float16) else 1
        self.kinds = 0 if gate is None else gate.bias.shape[-1]
        extra = self.kinds * self.parts + 1 if gate is not None else 0
        self.width = width_for(backend, self.channels + extra, self.value_channels)
        self.q, self.k, self.v = self.like(q), self.like(k), self.like(v)
        if gate is None:
            return
        # A power of two near 1 / scale: exact in every dtype, and keeps the bias in the range of half precision.
        unit = 2.0 ** round(-math.log2(scale))
        self.unit = scale * unit
        columns = slice(self.channels, self.channels + self.kinds * self.parts)
        picks = torch.eye(self.kinds, dtype=dtype, device=q.device).repeat(1, self.parts) * unit  # (kinds, kinds·parts)
        chosen = self.q.unflatten(2, self.tokens_and_group)[..., columns]
        chosen.copy_(picks.expand(self.tokens_and_group[1], -1) if self.kinds == 1 else picks)
        rest = (gate.bias[:, :, keys] / self.unit).clamp(min=-3e4)  # in the range of half precision, and exp of it is 0
        for part in range(self.parts):
            rounded = rest.to(dtype)
            start = self.channels + part * self.kinds
            self.k[..., start : start + self.kinds] = rounded
            rest = rest - rounded.to(rest.dtype)
        self.k[..., columns.stop] = unit

    def like(self, x: Tensor) -> Tensor:
        """x with queries of a group as rows, in the kernel's dtype, padded with zeros to the kernel's width."""
        x = x.flatten(2, 3) if x.dim() == 5 else x
        if x.shape[-1] == self.width and x.dtype == self.dtype:
            return x
        wide = x.new_empty(*x.shape[:-1], self.width, dtype=self.dtype)
        wide[..., : x.shape[-1]] = x
        wide[..., x.shape[-1] :] = 0
        return wide

    def gate_gradients(self, wide_q: Tensor, wide_k: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column sums of the logits' gradient: (N, n, tokens, G) and (N, n, S, 1 | G)."""
        rows = wide_q[..., self.channels + self.kinds * self.parts].unflatten(2, self.tokens_and_group)
        columns = wide_k[..., self.channels : self.channels + self.kinds]
        return rows / self.unit, columns / self.unit
