"""How a tile of logits becomes weights, and what its gradients are, for each score.

A tile holds the logits z of some queries against some keys, (N, n, tokens, G, S), all keys of one tile nearer to its
queries than those of the tiles that follow (the route tree climbs from near to far). Going forward, `add` folds a tile
into the running output and a running statistic of each row; `finish` turns these into the output. Going back, from far
to near, `gradients` returns d logits, d log-weights (which is what a gate receives) and the weights themselves.

`gate` is the sum of log gates along each route, or None; `visible` marks the keys that a query may see, or None.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from deadreckon.ops.blockwise.precision import exact, faded


class Tiled(Protocol):
    """The contract of a score."""

    normalised: bool  # whether rows are divided by their sum
    careful: bool  # whether leaves and outputs need more than the working precision
    sees_itself: bool  # whether a token is among the keys of its own query
    unseen: float  # a row's statistic that makes all weights zero, for padding on the way back

    def start(self, rows: Tensor) -> Tensor:
        """The statistic before any tile, shaped like rows (N, T, G)."""

    def add(self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, row: Tensor) -> None:
        """Folds a tile into out (N, n, tokens, G, E) and row (N, n, tokens, G), in place."""

    def finish(self, out: Tensor, row: Tensor) -> Tensor:
        """The output, from what `add` has gathered."""

    def gradients(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, grad_weight: Tensor, row: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """d z, d log-weight and the weights, given d weight = grad · v (less grad · out if rows are normalised)."""


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """(N, n, tokens, G, S) × (N, n, S, E) -> (N, n, tokens, G, E)."""
    return (weights.flatten(2, 3) @ v).unflatten(2, weights.shape[2:4])


class Softmax:
    """exp, divided by the row's sum. The statistic is the log-sum-exp; `out` is kept normalised."""

    normalised = True
    careful = False
    sees_itself = True
    unseen = float("inf")

    def start(self, rows: Tensor) -> Tensor:
        return torch.full_like(rows, -torch.inf)

    def add(self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, row: Tensor) -> None:
        z = z if gate is None else z + gate
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        self.merge(weighted_sum(z.softmax(-1), v), z.logsumexp(-1), out, row)

    def merge(self, tile_out: Tensor, tile_row: Tensor, out: Tensor, row: Tensor) -> None:
        """Folds in a part of the rows that is already normalised, with its log-sum-exp."""
        out.lerp_(tile_out.to(out.dtype), torch.sigmoid(tile_row - row).unsqueeze(-1))
        row.copy_(torch.logaddexp(row, tile_row))

    def finish(self, out: Tensor, row: Tensor) -> Tensor:
        return out

    def gradients(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, grad_weight: Tensor, row: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z if gate is None else z + gate
        weights = (z - row.unsqueeze(-1)).exp()
        weights = weights if visible is None else weights.masked_fill(~visible, 0)
        grad = weights * grad_weight
        return grad, grad, weights


class EvenPower:
    """z^p, divided by the row's sum, which is the statistic. Powers are taken directly: no logarithm, no lost sign.

    A row may hold one small logit alone. Its weight is 1 and its gradient 0 all the same, but a rounding error there is
    divided by the logit: so leaves, outputs and statistic are kept in float64.
    """

    normalised = True
    careful = True
    sees_itself = True
    unseen = float("inf")

    def __init__(self, p: int) -> None:
        self.p = p

    def start(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows, dtype=exact(rows.device))

    def _gated(self, power: Tensor, gate: Tensor | None, visible: Tensor | None) -> Tensor:
        power = power if gate is None else power * faded(gate, power.dtype)
        return power if visible is None else power.masked_fill(~visible, 0)

    def add(self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, row: Tensor) -> None:
        weights = self._gated(z**self.p, gate, visible)
        out += weighted_sum(weights, v)
        row += weights.sum(-1, dtype=row.dtype)

    def finish(self, out: Tensor, row: Tensor) -> Tensor:
        row.copy_(torch.where(row > 0, row, torch.ones_like(row)))
        return out / row.unsqueeze(-1)

    def gradients(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, grad_weight: Tensor, row: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lower = self._gated(z ** (self.p - 1), gate, visible) / row.unsqueeze(-1).to(z.dtype)
        weights = lower * z
        return self.p * lower * grad_weight, weights * grad_weight, weights


class StickBreaking:
    """σ(z_j) Π_{nearer s} (1 − σ(z_s)), a token not seeing itself. The statistic is the log of what is left.

    It is kept in float64: going back it is restored by undoing the steps, which must not lose the early, small ones.
    """

    normalised = False
    careful = False
    sees_itself = False
    unseen = -float("inf")

    def start(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows, dtype=exact(rows.device))

    def _steps(self, z: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        z = z if visible is None else z.masked_fill(~visible, -torch.inf)
        return z, -logsigmoid(-z)  # softplus gives up its tail beyond 20

    def _weights(self, z: Tensor, broken: Tensor, gate: Tensor | None, row: Tensor) -> Tensor:
        left = row.unsqueeze(-1).to(z.dtype) - broken.flip(-1).cumsum(-1).flip(-1)
        log_weights = z + left
        return (log_weights if gate is None else log_weights + gate).exp()

    def add(self, z: Tensor, gate: Tensor | None, visible: Tensor | None, v: Tensor, out: Tensor, row: Tensor) -> None:
        z, broken = self._steps(z, visible)
        out += weighted_sum(self._weights(z, broken, gate, row), v)
        row -= broken.sum(-1, dtype=row.dtype)

    def finish(self, out: Tensor, row: Tensor) -> Tensor:
        return out

    def gradients(
        self, z: Tensor, gate: Tensor | None, visible: Tensor | None, grad_weight: Tensor, row: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z, broken = self._steps(z, visible)
        row += broken.sum(-1, dtype=row.dtype)
        weights = self._weights(z, broken, gate, row)
        grad = weights * grad_weight
        # Breaking at j shortens the stick for j itself and for all that is farther.
        shortened = grad.cumsum(-1) + far.unsqueeze(-1)
        far += grad.sum(-1)
        return grad - z.sigmoid() * shortened, grad, weights
