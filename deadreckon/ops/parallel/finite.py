"""Containment of NaN and infinity: those at token t reach no output before t, and no other document.

Phases, sums of gates, frames and the unit of keys go on from piece to piece and from document to document, since only
differences matter; but of a NaN no difference is left. And a stock kernel may pass over a NaN among the keys of another
piece. So a number that is none is computed as zero, and in the end outputs from its token on become NaN, up to the end
of its document: as in the definition, where every later query meets it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.precision import work
from deadreckon.ops.factors import Factors
from deadreckon.ops.parallel.context import ContextParallel


class Containment:
    """Of the tensors (B, T / R, heads, ...) of one attention.

    Args:
        heads: of queries.
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
        """Transport and gates, likewise; a log gate of −∞ is a number, and forgets all."""
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
        """The output (B, T / R, Hq, E), NaN where a query meets what was cleared."""
        places = cp.positions(output.shape[1], output.device)  # (T / R,)
        flawed = torch.stack(self.flawed).any(0)
        latest = cp.as_rows(torch.where(flawed, places.view(1, -1, 1), -1)).cummax(1).values  # (pieces · B, C, Hq)
        every = cp.every(latest[:, -1].unflatten(0, (cp.pieces, -1))).cummax(0).values  # (count, B, Hq)
        before = pad(every, (0, 0, 0, 0, 1, 0), value=-1)[cp.held].flatten(0, 1)
        latest = cp.from_rows(torch.maximum(latest, before.unsqueeze(1)))
        starts = torch.zeros_like(places)
        if documents is not None:
            bounds = torch.tensor(documents, device=places.device)
            starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        return output.masked_fill((latest >= starts.view(1, -1, 1)).unsqueeze(-1), torch.nan)
