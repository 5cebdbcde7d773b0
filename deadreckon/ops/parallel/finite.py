"""Containment of NaN and infinity: those at token t reach no output before t, and no other document.

Phases, sums of gates, frames and the unit of keys run on across pieces and documents, since only differences matter;
but a NaN survives every difference. And a stock kernel may ignore a NaN among the keys of another piece. So non-finite
numbers are replaced by zeros, and finally outputs from their token to the end of its document are set to NaN, as in the
definition, where every later query sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.precision import work
from deadreckon.ops.factors import Factors
from deadreckon.ops.layout import sent
from deadreckon.ops.parallel.context import ContextParallel


class Containment:
    """Zeroes non-finite numbers in the tensors (B, T / R, heads, ...) of one attention; restores NaN in its output.

    Args:
        heads: the number of query heads.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.flawed: list[Tensor] = []  # (B, T / R, Hq): whether a head of queries meets such a number at a token

    def cleared(self, x: Tensor) -> Tensor:
        """x, with zeros where a token's head is not finite."""
        flawed = ~torch.isfinite(x.detach()).reshape(*x.shape[:3], -1).all(-1)  # (B, T / R, heads of x)
        self.flawed.append(flawed.repeat_interleave(self.heads // x.shape[2], dim=2))
        return x.masked_fill(flawed.view(*flawed.shape, *(1,) * (x.dim() - 3)), 0)

    def cleared_factors(self, factors: Factors) -> Factors:
        """Transport and gates, likewise; a log gate of −∞ is valid, a closed gate."""
        gates = None if factors.log_gate is None else self.cleared(factors.log_gate.clamp(min=-1e4))
        _, steps = factors.parts()

        def within_range(x: Tensor) -> Tensor:
            if steps is None or x is not steps.w:
                return self.cleared(x)
            w, beta = (y.detach().to(work(x.dtype)) for y in (steps.w, steps.beta))
            strengths = (beta * w.square().sum(-1)).unsqueeze(-1)  # may overflow where w and beta do not
            return self.cleared(x.masked_fill(~torch.isfinite(strengths), torch.nan))

        return Factors(factors.map_transport(within_range), gates, factors.score)

    def restored(self, output: Tensor, documents: list[int] | None, cp: ContextParallel) -> Tensor:
        """The output (B, T / R, Hq, E), NaN where a query sees what was cleared."""
        places = cp.positions(output.shape[1], output.device)  # (T / R,)
        flawed = torch.stack(self.flawed).any(0)
        latest = cp.as_rows(torch.where(flawed, places.view(1, -1, 1), -1)).cummax(1).values  # (pieces · B, C, Hq)
        every = cp.every(latest[:, -1].unflatten(0, (cp.pieces, -1))).cummax(0).values  # (count, B, Hq)
        before = pad(every, (0, 0, 0, 0, 1, 0), value=-1)[cp.held].flatten(0, 1)
        latest = cp.from_rows(torch.maximum(latest, before.unsqueeze(1)))
        starts = torch.zeros_like(places)
        if documents is not None:
            bounds = sent(documents, places.device)
            starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        return output.masked_fill((latest >= starts.view(1, -1, 1)).unsqueeze(-1), torch.nan)
