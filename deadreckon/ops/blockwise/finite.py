"""Containment of NaN and infinity: those at token t reach no output before t.

Blocks of tokens are multiplied as a whole, and a weight of zero does not stop a NaN. So a non-finite token is replaced
by zeros, and finally all outputs from it on are set to NaN, as in the definition, where every later query sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def contained(
    inputs: Sequence[Tensor | None], strengths: Tensor | None = None
) -> tuple[list[Tensor | None], Tensor | None]:
    """Inputs (N, T, ...) with zeros for tokens that are not finite, and what to add to outputs: (N, T), 0 or NaN.

    Strengths (N, T, ...) are checked, too. On a CPU, where checking is cheap, None if all inputs are finite.
    """
    tensors = [x.detach() for x in (*inputs, strengths) if x is not None]
    if tensors[0].device.type == "cpu" and all(bool(torch.isfinite(x.sum())) for x in tensors):
        return list(inputs), None
    nan_or_zero = torch.stack([(x.reshape(*x.shape[:2], -1) * 0).sum(-1).float() for x in tensors]).sum(0)  # (N, T)
    not_finite = nan_or_zero != 0  # (N, T)

    def zeroed(x: Tensor) -> Tensor:
        return x.masked_fill(not_finite.view(*not_finite.shape, *(1,) * (x.dim() - 2)), 0)

    return [None if x is None else zeroed(x) for x in inputs], nan_or_zero.cumsum(1)
